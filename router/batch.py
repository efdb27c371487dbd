"""Batch: entries that nobody waits for, held for a moment to be dealt with many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Batch(Generic[T]):
    """On a running loop entries leave when they are many or after a moment, else at once; in the order they came."""

    def __init__(self, take: Callable[[list[T]], object], *, most: int, held_s: float) -> None:
        """`take` is given what waits when it is `most` entries or more, or once the first has waited for `held_s`
        seconds. Called by the loop: what fails there is nothing that whoever adds an entry has to do with.
        """
        self._take = take
        self._most = most
        self._held_s = held_s
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
        if len(self._waiting) == self._most:
            loop.call_soon(self.flush)
        if self._armed is not loop:
            self._armed = loop
            loop.call_later(self._held_s, self._due)

    def flush(self) -> None:
        """Let go of what waits."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._take(waiting)

    def _due(self) -> None:
        self._armed = None
        self.flush()
