"""Single flight: of several workers that miss the same prefix, one computes it and the others wait, within a bound.

A claim is a key in the index that ends by itself. Nobody's answer depends on it: without Redis, or when the bound is
over, everybody computes. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from secrets import token_hex

from workers.counters import Counters
from workers.index import IndexDown, KVIndex

LEAST = 128
"""Tokens below which computing twice is cheaper than talking about it."""
MOST_WAIT = 2.0
"""Seconds that a prompt waits at most for another worker."""
_SLACK = 2.0


@dataclass(frozen=True, slots=True)
class Claim:
    """On the first block that is missing. `mine`: this worker computes it; else it may wait for `patience` seconds."""

    tag: str
    block: bytes
    mine: bool
    patience: float


class Flights:
    """Claims of one worker, in the index of the farthest tier, where all that may share with it look."""

    def __init__(self, index: KVIndex, counters: Counters) -> None:
        self._index, self._counters = index, counters
        self.owner = token_hex(8)

    def claim(self, tag: str, block: bytes, tokens: int, seconds: float | None) -> Claim | None:
        """Announce the computing of so many tokens, which takes about so many seconds. None: not worth it, or no index.

        The claim outlives the estimate by far less than a worker's crash may last, so that it cannot block for long.
        """
        if tokens < LEAST:
            return None
        estimate = MOST_WAIT if seconds is None else seconds
        try:
            mine = self._index.claim(tag, block, self.owner, 2 * estimate + _SLACK)
        except IndexDown:
            self._counters.add("index_errors")
            return None
        self._counters.add("claimed" if mine else "waited")
        return Claim(tag, block, mine, min(estimate, MOST_WAIT))

    def flying(self, claim: Claim) -> bool:
        """Is the one who claimed it still at work, as far as Redis says?"""
        try:
            return self._index.claimed(claim.tag, claim.block)
        except IndexDown:
            self._counters.add("index_errors")
            return False
