"""Small files that several routers of one host keep together: exchanged under a lock, replaced as a whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_LOCK_PATIENCE = 2.0

Stamp = tuple[int, int, int]


def stamp(path: Path) -> Stamp | None:
    """Changes whenever the file is written or replaced; None where there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold `path`'s lock, a file beside it. Raises OSError where the folder cannot be written or it lasts too long."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{path}: another process holds the lock") from None
                time.sleep(0.005)
        yield
    finally:
        os.close(handle)


def replace(path: Path, text: str) -> None:
    """Durable on return; a reader sees the old text or the new, never a part. Raises OSError where nothing changed."""
    aside = path.with_name(f".{path.name}.new")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
