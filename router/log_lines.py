"""Log lines of finished requests, written together: one system call for many. Knows streams, no loggers' setup."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TextIO, TypeVar, cast

import structlog

from workers.logs import LossyStream

_HELD_S = 0.05
_MOST = 128
"""Entries: about 64 KiB, which a pipe takes in one piece."""

T = TypeVar("T")


class LineBatch(Generic[T]):
    """Entries that nobody waits for. On a running loop they leave after 50 ms or when they are many, else at once.

    Their lines are made when they leave: many in a row cost half of what each would cost amid its request.
    """

    def __init__(self, write: Callable[[str], object], line: Callable[[T], bytes]) -> None:
        """`line` gives an entry's line without its end."""
        self._write = write
        self._line = line
        self._waiting: list[T] = []
        self._armed: asyncio.AbstractEventLoop | None = None
        """The loop that will flush; another one's promise holds nothing."""

    def add(self, entry: T) -> None:
        """Must not change any more."""
        self._waiting.append(entry)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self.flush()
            return
        if len(self._waiting) >= _MOST:
            self.flush()
        elif self._armed is not loop:
            self._armed = loop
            loop.call_later(_HELD_S, self.flush)

    def flush(self) -> None:
        """Write what waits."""
        self._armed = None
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._write(b"\n".join([*map(self._line, waiting), b""]).decode())


class Sink(structlog.WriteLoggerFactory):
    """structlog's way to a stream, and a shorter one for the events of requests. Both drop what a full disk refuses."""

    def __init__(self, stream: TextIO, level: int, line: Callable[[Any], bytes] | None) -> None:
        """`line` makes the JSON line of a request; None where people read, and structlog renders requests too."""
        out = LossyStream(stream)
        super().__init__(cast(TextIO, out))
        self.level = level
        self.requests = LineBatch(out.write, line) if line is not None else None
