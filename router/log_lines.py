"""structlog's way to a stream, and a shorter one for lines that are made already. Knows streams, no loggers' setup."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TextIO, cast

import structlog

from workers.logs import LossyStream


class Sink(structlog.WriteLoggerFactory):
    """Both ways drop what a full disk refuses."""

    def __init__(self, stream: TextIO, level: int, *, json: bool) -> None:
        """`json`: lines are read by machines, and need not be rendered by structlog."""
        self._out = LossyStream(stream)
        super().__init__(cast(TextIO, self._out))
        self.level = level
        self.json = json

    def write(self, lines: Iterable[bytes]) -> None:
        """Whole lines but for their ends, in one system call."""
        text = b"\n".join([*lines, b""]).decode()
        if text:
            self._out.write(text)
