"""Tokens -> text as it may be sent: no broken characters, no stop string or part of one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Detokenizer:
    """Incremental. `push` returns text that is final; `stopped` tells that a stop string was met."""

    tokenizer: Any
    stop: tuple[str, ...] = ()
    stopped: bool = False
    _ids: list[int] = field(default_factory=list)
    _start: int = 0
    """First id of the decoded window: one step back, since a token's text may depend on the one before."""
    _read: int = 0
    """Ids whose text has left the window."""
    _held: str = ""
    """Text that may yet turn out to begin a stop string."""

    def push(self, token: int) -> str:
        """Text that became certain with this token; often empty."""
        self._ids.append(token)
        before = self._decode(self._start, self._read)
        after = self._decode(self._start, len(self._ids))
        # An unfinished multi-byte character decodes to U+FFFD: wait for the rest of it.
        if len(after) <= len(before) or after.endswith("�"):
            return ""
        self._start, self._read = self._read, len(self._ids)
        return self._release(after[len(before) :])

    def flush(self) -> str:
        """What is left when the answer ends otherwise than by a stop string."""
        if self.stopped:
            return ""
        tail = self._decode(self._start, len(self._ids))[len(self._decode(self._start, self._read)) :]
        self._start = self._read = len(self._ids)
        text = self._release(tail)
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _decode(self, start: int, stop: int) -> str:
        return str(self.tokenizer.decode(self._ids[start:stop], skip_special_tokens=True))

    def _release(self, text: str) -> str:
        text = self._held + text
        if not self.stop:
            return text
        found = [at for s in self.stop if (at := text.find(s)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, s) for s in self.stop), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
