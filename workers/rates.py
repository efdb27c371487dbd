"""Rates: is loading faster than computing? Learns from what happened; knows bytes and seconds only. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

_PRIOR = {"ram": 4e9, "disk": 5e8, "shared": 2e8}
"""Bytes per second before anything was measured."""
_OVERHEAD = {"ram": 2e-5, "disk": 5e-4, "shared": 5e-3}
"""Seconds per segment besides its bytes."""
_WEIGHT = 0.2
_LEAST = 2**20
_PROBE = 16
"""One refusal in so many is let through, or a bad estimate would never be measured again."""


class Rates:
    """For one thread."""

    def __init__(self) -> None:
        self._loads = dict(_PRIOR)
        self._computes: dict[bytes | None, float] = {}
        self._refused = 0

    def computing(self, tokens_per_s: float, space: bytes | None) -> None:
        """How fast a space is computed; None for every space that is not told."""
        self._computes[space] = tokens_per_s

    def seconds(self, tokens: int, space: bytes) -> float | None:
        """How long computing would take; None where nobody has told."""
        speed = self._computes.get(space, self._computes.get(None))
        return tokens / speed if speed else None

    def loaded(self, tier: str, size: int, seconds: float) -> None:
        """A load took so long. Small ones say more about the machine's other work than about bytes: not counted."""
        if size < _LEAST:
            return
        measured = size / max(seconds - _OVERHEAD[tier], 1e-6)
        self._loads[tier] += _WEIGHT * (measured - self._loads[tier])

    def worth(self, steps: Sequence[tuple[str, int, int]], space: bytes) -> int:
        """How many of the steps, (tier, bytes, tokens) each and in order, to load: as far as it beats computing."""
        speed = self._computes.get(space, self._computes.get(None))
        if speed is None or speed <= 0:
            return len(steps)
        load = compute = 0.0
        best = 0
        for n, (tier, size, tokens) in enumerate(steps, 1):
            load += _OVERHEAD[tier] + size / self._loads[tier]
            compute += tokens / speed
            if load < compute:
                best = n
        if best < len(steps):
            self._refused += 1
            if self._refused % _PROBE == 0:
                return len(steps)
        return best

    def shown(self) -> dict[str, int]:
        """Bytes per second by tier."""
        return {tier: round(rate) for tier, rate in self._loads.items()}
