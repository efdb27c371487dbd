"""Measured rates of one worker: what the router believes of it before answers tell better. Torch-free."""

from __future__ import annotations

from workers.protocol import Rates


class Meter:
    """Tokens per second by runtime name: decayed sums, so that recent work counts most."""

    _DECAY = 0.9

    def __init__(self) -> None:
        self._reads: dict[str, tuple[float, float]] = {}
        self._writes: dict[str, tuple[float, float]] = {}

    def read(self, name: str, tokens: int, seconds: float) -> None:
        """Tokens of a prompt that were computed, and the time it took."""
        if tokens > 0 and seconds > 0:
            self._add(self._reads, name, tokens, seconds)

    def wrote(self, name: str, seconds: float) -> None:
        """One decode step: one token for each answer in it."""
        self._add(self._writes, name, 1, seconds)

    def forget(self, name: str) -> None:
        """What was measured so far does not count: a first run pays for what later ones find done."""
        self._reads.pop(name, None)
        self._writes.pop(name, None)

    def rates(self) -> dict[str, Rates]:
        """What is known so far."""
        return {
            name: Rates(tokens / seconds, self._rate(self._writes, name))
            for name, (tokens, seconds) in list(self._reads.items())
        }

    def _add(self, sums: dict[str, tuple[float, float]], name: str, tokens: float, seconds: float) -> None:
        t, s = sums.get(name, (0.0, 0.0))
        sums[name] = (t * self._DECAY + tokens, s * self._DECAY + seconds)

    def _rate(self, sums: dict[str, tuple[float, float]], name: str) -> float:
        tokens, seconds = sums.get(name, (0.0, 0.0))
        return tokens / seconds if seconds else 0.0
