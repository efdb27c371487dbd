"""Files of a pair's folder: read within bounds, and written whole or not at all. Torch-free."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from workers.errors import LoadFailed

MOST = 64 << 20
"""Bytes of a file that says what a pair is: a report with a million intervals takes less."""


def content(file: Path, most: int | None = MOST) -> bytes:
    """All of a plain file, at most so many bytes; None sets no bound. Raises LoadFailed: also for what never ends, or
    waits for a writer.
    """
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise LoadFailed(f"{file}: is no plain file")
        if most is not None and found.st_size > most:
            raise LoadFailed(f"{file}: {found.st_size} bytes, of at most {most}")
        return file.read_bytes()
    except OSError as error:
        raise LoadFailed(f"{file}: {error.strerror}") from error


@contextmanager
def replacing(file: Path, *failures: type[Exception]) -> Iterator[Path]:
    """A path beside `file` to write to, in a folder that is made where there is none. What was written takes its place
    once it is on the disk; where writing fails, the file stays as it was and nothing lies beside it. `failures`: what a
    library makes of an OSError. Raises LoadFailed.
    """
    aside = file.with_name(f".{file.name}.tmp")
    expected: tuple[type[Exception], ...] = (OSError, *failures)
    try:
        aside.parent.mkdir(parents=True, exist_ok=True)
        aside.unlink(missing_ok=True)  # a link there would lead the writing elsewhere
        yield aside
        _to_disk(aside)
        aside.replace(file)
    except expected as error:
        raise unwritten(file, error) from error
    finally:
        with suppress(OSError):
            aside.unlink()


def unwritten(place: Path, error: Exception) -> LoadFailed:
    """The error in a user's words."""
    cause = error if isinstance(error, OSError) else error.__context__
    why = cause.strerror if isinstance(cause, OSError) else None
    return LoadFailed(f"{place}: cannot be written ({why or error})")


def _to_disk(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
