"""Whose turn it is: one device's time, shared fairly between tenants by weight. Knows names and seconds, no clock.

Who has used the least, divided by weight, goes first. Who asked for little keeps a credit for it, bounded, so that a
quiet tenant is served at once beside a busy one, and nobody can save up for a siege. A newcomer has none: what others
used while nobody else asked is not held against them. Work is counted in seconds of the
device and not in tokens, because a token costs differently by model, lane and batch. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Generic, Protocol, TypeVar

CREDIT_S = 2.0
"""Device seconds that a tenant of weight 1 may have used less than the busiest, however quiet it was."""
_MOST = 10_000
"""Accounts that are remembered; who has been away the longest is a newcomer again."""


class Owned(Protocol):
    """Something that waits on somebody's account."""

    @property
    def account(self) -> str: ...


J = TypeVar("J", bound=Owned)


class Shares:
    """What each account has used. Not thread-safe: the engine's thread owns it."""

    def __init__(self, credit_s: float = CREDIT_S) -> None:
        self._credit = credit_s
        self._used: dict[str, float] = {}
        self._front = 0.0
        """The most that anybody has used."""

    def meet(self, account: str) -> None:
        """The account asks for something."""
        self._used[account] = self._used.pop(account, self._front)
        if len(self._used) > _MOST:
            del self._used[next(iter(self._used))]

    def used(self, account: str) -> float:
        """Seconds by weight; the least goes first."""
        return max(self._used.get(account, self._front), self._front - self._credit)

    def charge(self, account: str, seconds: float, weight: float = 1.0) -> None:
        """The device has worked for this account. `weight` is above 0; twice the weight is twice the share."""
        used = self._used[account] = self.used(account) + seconds / weight
        self._front = max(self._front, used)

    def before(self, account: str, others: Iterable[str]) -> bool:
        """Whether `account` goes before all of them."""
        used = self.used(account)
        return all(used < self.used(other) for other in others)


class Line(Generic[J]):
    """Those that wait: in order of arrival for one account, in order of shares between accounts."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._waiting: dict[str, list[J]] = {}
        """By account; none is empty."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[J]:
        return chain.from_iterable(self._waiting.values())

    def add(self, job: J) -> None:
        """To the end of its account's."""
        self._shares.meet(job.account)
        self._waiting.setdefault(job.account, []).append(job)

    def remove(self, job: J) -> bool:
        """False when it does not wait here."""
        own = self._waiting.get(job.account, [])
        if job not in own:
            return False
        own.remove(job)
        if not own:
            del self._waiting[job.account]
        return True

    def of(self, account: str) -> list[J]:
        """Those of one account, in order of arrival."""
        return list(self._waiting.get(account, []))

    def heads(self) -> Iterator[J]:
        """The first of each account, in whose turn it is; of equals, the account that has waited here longer."""
        for account in sorted(self._waiting, key=self._shares.used):
            yield self._waiting[account][0]

    def longest(self) -> J:
        """The last to come of the account with the most waiting, of equals the one that has used more: who leaves
        when there are too many.
        """
        account = max(self._waiting, key=lambda name: (len(self._waiting[name]), self._shares.used(name)))
        return self._waiting[account][-1]
