"""Alarm: has the mean of what is observed risen above its limit? Knows numbers only.

A CUSUM of bets (an e-detector): every observation x multiplies the wealth by 1 + bet * (x - limit), which is 1 at most
on average while the mean is within the limit, and the wealth never falls below 1. So, whatever the distribution, at
least `patience` observations pass on average between two alarms of a healthy stream (Ville's inequality, summed over
starting points), and a stream that turns bad is found within a number of observations that does not depend on how long
it was good before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class Alarm:
    """One stream of observations on [`low`, 1], small is good. Rings when the wealth reaches `patience`."""

    limit: float
    """The mean that is still accepted."""
    bet: float
    """Below 1 / (limit - low), so that the wealth stays positive."""
    patience: float
    wealth: float = 1.0
    samples: int = 0

    @classmethod
    def of_share(cls, limit: float, patience: float) -> Alarm:
        """For observations of 0 and 1. Bets on odds four times as bad as those of the limit."""
        limit = min(max(limit, 1e-3), 0.999)
        against = 4 * limit / (1 + 3 * limit)
        return cls(limit, (against - limit) / (limit * (1 - limit)), patience)

    @classmethod
    def of_mean(cls, limit: float, patience: float, *, low: float = 0.0) -> Alarm:
        """For any numbers on [`low`, 1]."""
        limit = min(max(limit, low + 1e-3), 0.999)
        return cls(limit, 0.8 / (limit - low), patience)

    def see(self, value: float) -> bool:
        """Take in one observation; True when it rings. Goes on from wherever it is."""
        self.samples += 1
        self.wealth = max(1.0, self.wealth * (1 + self.bet * (value - self.limit)))
        return self.wealth >= self.patience

    def reset(self, patience: float | None = None) -> None:
        """Forget what was seen."""
        self.wealth, self.samples = 1.0, 0
        self.patience = self.patience if patience is None else patience

    @property
    def level(self) -> float:
        """0 at rest, 1 when it rings: the logarithm of the wealth as a share of what rings."""
        return min(1.0, math.log(self.wealth) / math.log(self.patience))

    def within(self, value: float) -> int:
        """Observations of this value in a row that ring for certain, whatever was seen before; 0 if they never do."""
        factor = 1 + self.bet * (value - self.limit)
        if factor <= 1:
            return 0
        # A hair less, so that rounding in the logarithm does not cost one observation more than `see` needs.
        return math.ceil(math.log(self.patience) / math.log(factor) - 1e-9)
