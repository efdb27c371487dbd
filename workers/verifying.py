"""`verifying.jsonl` in a report's folder while items are asked: what every route said to each, so that a verification
that was stopped in whatever way goes on. It holds answers in clear, and goes when the report is there.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from workers.asking import Answer
from workers.errors import LoadFailed
from workers.files import unwritten

NAME = "verifying.jsonl"
Said = dict[str, Answer]
"""By route."""


class Heard:
    """Answers by the item's number: those of an earlier run, and those that are added. `known` may be read."""

    def __init__(self, file: Path, handle: int, known: Mapping[int, Said]) -> None:
        self._file, self._handle = file, handle
        self.known = dict(known)
        self.earlier = len(known)
        """Items that an earlier run has asked."""

    def add(self, number: int, said: Said) -> None:
        """Raises LoadFailed where it cannot be written."""
        self.known[number] = said
        _write(self._file, self._handle, msgspec.json.encode((number, said)))


@contextmanager
def hearing(folder: Path, asked: Mapping[str, object]) -> Iterator[Heard]:
    """What an earlier run heard counts where it was `asked` the same: a tree of JSON values; else it is dropped. Raises
    LoadFailed: another process verifies into this folder, or it cannot be written to.
    """
    file = folder / NAME
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unwritten(file, error) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LoadFailed(f"{folder}: another process is verifying into it") from None
        head = msgspec.json.encode(asked, order="sorted")
        known, whole = _read(os.pread(handle, os.fstat(handle).st_size, 0), head)
        os.ftruncate(handle, whole)
        os.lseek(handle, whole, os.SEEK_SET)
        if not whole:
            _write(file, handle, head)
        yield Heard(file, handle, known)
    finally:
        os.close(handle)


def sweep(folder: Path) -> None:
    """The report is there."""
    (folder / NAME).unlink(missing_ok=True)


def _read(content: bytes, head: bytes) -> tuple[dict[int, Said], int]:
    """What is known, and up to which byte: a line that a stop has torn, and all behind it, is asked again."""
    first, *lines = content.splitlines(keepends=True) or [b""]
    if first != head + b"\n":
        return {}, 0
    known: dict[int, Said] = {}
    whole = len(first)
    for line in lines:
        try:
            number, said = msgspec.json.decode(line, type=tuple[int, Said])
        except msgspec.DecodeError:
            break
        if not line.endswith(b"\n"):
            break
        known[number] = said
        whole += len(line)
    return known, whole


def _write(file: Path, handle: int, line: bytes) -> None:
    left = line + b"\n"
    try:
        while left:
            left = left[os.write(handle, left) :]
    except OSError as error:
        raise unwritten(file, error) from error
