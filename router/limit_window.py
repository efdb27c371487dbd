"""The rule of a tenant's limits, within one process. Knows no Redis; `limit_redis` holds the same rule in Lua.

Requests and tokens are counted in buckets of `BUCKET_S` seconds. The window is the bucket of now and the twelve
before it: 60 to 65 s, so in no stretch of 60 s more than the limit is let through. Money is counted in periods of
`budget_duration` aligned to the Unix epoch (1d turns over at 00:00 UTC); without a duration it never turns over.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

BUCKET_S = 5
BUCKETS = 13
UNKNOWN_WAIT_S = 1.0
"""Retry-After where nobody can know: a slot comes back when some answer ends."""
NEVER_S = 86400.0
"""Retry-After of a budget that never turns over."""

LIMITS = ("rpm_limit", "tpm_limit", "max_parallel_requests", "max_budget")


class Limited(Protocol):
    """What limits read of a tenant; None means unlimited."""

    @property
    def name(self) -> str: ...
    @property
    def rpm_limit(self) -> int | None: ...
    @property
    def tpm_limit(self) -> int | None: ...
    @property
    def max_parallel_requests(self) -> int | None: ...
    @property
    def max_budget(self) -> float | None: ...
    @property
    def budget_duration(self) -> float | None: ...


class Taken(msgspec.Struct, frozen=True, gc=False):
    """Where an admitted request was counted, so that it can be corrected there."""

    bucket: int
    period: int


@dataclass(frozen=True, slots=True)
class Full:
    """Nothing was taken: this limit is reached, for about so many seconds."""

    limit: str
    retry_s: float


def reserve(tenant: Limited, tokens: int) -> int:
    """Tokens to reserve: a request larger than the whole limit runs when the minute is empty, instead of never."""
    return tokens if tenant.tpm_limit is None else min(tokens, tenant.tpm_limit)


def period_of(tenant: Limited, now: float) -> int:
    """Which budget period `now` lies in."""
    return int(now // tenant.budget_duration) if tenant.budget_duration else 0


@dataclass(slots=True)
class _Counts:
    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Window:
    """One tenant's counters in this process."""

    buckets: dict[int, _Counts] = field(default_factory=dict)
    requests: int = 0
    """Of all buckets together; so are `tokens`."""
    tokens: int = 0
    running: int = 0
    period: int = 0
    spent: float = 0.0

    def take(self, tenant: Limited, now: float, tokens: int, cost: float) -> Taken | Full:
        """Look and take in one step; `tokens` as `reserve` gave them."""
        bucket, period = int(now // BUCKET_S), period_of(tenant, now)
        counts = self.buckets.get(bucket)
        if counts is None:
            for old in [b for b in self.buckets if b <= bucket - BUCKETS]:
                gone = self.buckets.pop(old)
                self.requests -= gone.requests
                self.tokens -= gone.tokens
        if period > self.period:
            self.period, self.spent = period, 0.0
        full = self._full(tenant, now, tokens, cost)
        if full is not None:
            return full
        if counts is None:
            counts = self.buckets[bucket] = _Counts()
        counts.requests += 1
        counts.tokens += tokens
        self.requests += 1
        self.tokens += tokens
        self.running += 1
        self.spent += cost
        return Taken(bucket, period)

    def _full(self, tenant: Limited, now: float, tokens: int, cost: float) -> Full | None:
        budget = tenant.max_budget
        if budget is not None and (self.spent >= budget or self.spent + cost > budget):
            duration = tenant.budget_duration
            return Full("max_budget", (self.period + 1) * duration - now if duration else NEVER_S)
        slots = tenant.max_parallel_requests
        if slots is not None and self.running >= slots:
            return Full("max_parallel_requests", UNKNOWN_WAIT_S)
        if tenant.rpm_limit is not None:
            room = tenant.rpm_limit - 1
            if self.requests > room:
                return Full("rpm_limit", _wait(now, {b: c.requests for b, c in self.buckets.items()}, room))
        if tenant.tpm_limit is not None:
            room = tenant.tpm_limit - max(tokens, 1)
            if self.tokens > room:
                return Full("tpm_limit", _wait(now, {b: c.tokens for b, c in self.buckets.items()}, room))
        return None

    def spend(self, tenant: Limited, taken: Taken, cost: float) -> bool:
        """Take more money for an admitted request, if the budget of the period it was counted in has room."""
        if taken.period != self.period:
            return True
        if tenant.max_budget is not None and self.spent + cost > tenant.max_budget:
            return False
        self.spent += cost
        return True

    def unspend(self, taken: Taken, cost: float) -> None:
        """As if `spend` had never been: someone else refused."""
        if taken.period == self.period:
            self.spent = max(self.spent - cost, 0.0)

    def correct(self, taken: Taken, tokens: int, cost: float) -> None:
        """Give the slot back and add what really was, minus what was reserved (either may be negative)."""
        self.running -= 1
        counts = self.buckets.get(taken.bucket)
        if counts is not None:
            self.tokens -= counts.tokens
            counts.tokens = max(counts.tokens + tokens, 0)
            self.tokens += counts.tokens
        if taken.period == self.period:
            self.spent = max(self.spent + cost, 0.0)

    def undo(self, taken: Taken, tokens: int, cost: float) -> None:
        """As if it had never been taken: someone else refused."""
        self.correct(taken, -tokens, -cost)
        counts = self.buckets.get(taken.bucket)
        if counts is not None:
            counts.requests -= 1
            self.requests -= 1


def _wait(now: float, counts: dict[int, int], room: int) -> float:
    """Seconds until at most `room` is left in a window that holds more."""
    used = sum(counts.values())
    for bucket in sorted(counts):
        used -= counts[bucket]
        if used <= room:
            return (bucket + BUCKETS) * BUCKET_S - now
    return float(BUCKETS * BUCKET_S)
