"""Where log lines go: a stream whose disk may be full, whose pipe may be closed. Torch-free."""

from __future__ import annotations

from typing import TextIO


class LossyStream:
    """Writes to `stream`; what it does not take is dropped, because whoever logs is at work for a caller.

    How much was lost stands in the stream once it takes lines again. Only for lines that nobody waits for.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.lost = 0
        """Writes that failed since one last succeeded."""

    def write(self, text: str) -> int:
        """`text` is one or more whole lines. Returns 0 where it was dropped."""
        note = f'{{"event": "log lines lost", "level": "warning", "lost": {self.lost}}}\n' if self.lost else ""
        try:
            self._stream.write(note + text)
            self._stream.flush()
        except (OSError, ValueError):  # ValueError: the stream is closed
            self.lost += 1
            return 0
        self.lost = 0
        return len(text)

    def flush(self) -> None:
        """Nothing: each write is flushed."""
