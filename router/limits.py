"""Limits of a tenant: admit before the upstream is called, settle on every way out.

`Limits(None)` counts in this process. With Redis each process still enforces the full limits by itself, which costs
microseconds and spares Redis a flood; what passes there is then counted in Redis, once for all processes. When Redis
is away the process's own counters decide alone. A tenant without limits costs nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from router.errors import TooManyRequests
from router.limit_redis import LEASE_S, Shared
from router.limit_window import Full, Limited, Taken, Window, reserve
from router.redis_line import Away

_SENTENCES = {
    "rpm_limit": "{limit} requests per minute",
    "tpm_limit": "{limit} tokens per minute",
    "max_parallel_requests": "{limit} requests at a time",
    "max_budget": "a budget of {limit} USD",
}


BUDGET_KEPT_S = 400 * 86400.0
"""Seconds that money without a duration is remembered after it was last spent."""


@dataclass(slots=True, eq=False)
class Grant:
    """One admitted request: what was reserved, and where. Give it to `settle` exactly once; more does nothing."""

    tenant: Limited | None = None
    id: str = ""
    tokens: int = 0
    cost: float = 0.0
    local: Taken | None = None
    shared: Taken | None = None
    """None while Redis does not know of it."""
    untold: float = 0.0
    """Part of `cost` that Redis does not know of."""
    settled: bool = False


_FREE = Grant(settled=True)


class Limits:
    """Rates, parallel requests and money of all tenants."""

    def __init__(
        self, redis: str | None = None, *, timeout: float = 0.05, clock: Callable[[], float] | None = None
    ) -> None:
        """`redis`: a URL, or None to count in this process. `clock`: Unix seconds, in place of both machines' own.

        Raises ValueError for a URL that is none of Redis.
        """
        self._clock = clock or time.time
        self._shared = Shared(redis, timeout, clock) if redis is not None else None
        self._windows: dict[str, Window] = {}
        self._running: dict[str, set[Grant]] = {}
        self._ids = map(f"{secrets.token_hex(8)}-{{:x}}".format, itertools.count())
        """Names of grants: this process's own, and a number, which costs no system call."""
        self._owed: dict[tuple[str, int], tuple[float, float]] = {}
        """Money Redis was not told of, by tenant and period, with the seconds it must be kept."""
        self._renewal: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Reach for Redis, for a second at most: without it we serve all the same."""
        if self._shared is not None:
            await self._shared.start(self._catch_up)
            self._renewal = asyncio.create_task(self._renew_for_ever())

    async def close(self) -> None:
        """Settle what is under way and give up the connections."""
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.wait([self._renewal])
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._shared is not None:
            await self._shared.close()

    @property
    def shared(self) -> bool | None:
        """Whether counters are shared right now; None without Redis."""
        return self._shared.up if self._shared is not None else None

    def running(self, tenant: str) -> int:
        """Requests of this tenant that this process runs now, as far as limits watch it."""
        return len(self._running.get(tenant, ()))

    async def admit(self, tenant: Limited, tokens: int, cost: float = 0.0) -> Grant:
        """Reserve a request, so many tokens and USD; TooManyRequests if a limit is reached, and nothing is taken."""
        if not _limited(tenant):
            return _FREE
        tokens = reserve(tenant, tokens)
        window = self._windows.get(tenant.name)
        if window is None:
            window = self._windows[tenant.name] = Window()
        taken = window.take(tenant, self._clock(), tokens, cost)
        if isinstance(taken, Full):
            raise _refusal(tenant, taken)
        grant = Grant(tenant, "" if self._shared is None else next(self._ids), tokens, cost, taken)
        running = self._running.get(tenant.name)
        if running is None:
            running = self._running[tenant.name] = set()
        running.add(grant)
        if self._shared is not None and self._shared.up:
            asked = self._shared.admit(tenant, grant.id, tokens, cost)
            try:
                full = _take_in(grant, await asyncio.shield(asked))
            except Away:
                return grant
            except asyncio.CancelledError:
                # A caller who hangs up here must not leave a slot behind, taken or about to be.
                self._spawn(self._give_back(asked, grant))
                raise
            if full is not None:
                self._undo(grant)
                raise _refusal(tenant, full)
        return grant

    async def afford(self, grant: Grant, cost: float) -> bool:
        """Raise what is reserved in USD to `cost`, if it is less; False where the budget has no room for that."""
        more = cost - grant.cost
        tenant = grant.tenant
        if more <= 0 or grant.settled or tenant is None or grant.local is None or tenant.max_budget is None:
            return True
        window = self._windows[tenant.name]
        if not window.spend(tenant, grant.local, more):
            return False
        grant.cost += more
        grant.untold += more
        if self._shared is None or not self._shared.up or grant.shared is None:
            return True
        try:
            fits = await asyncio.shield(self._shared.spend(tenant, grant.shared, more))
        except Away:
            return True
        if fits:
            grant.untold -= more
            return True
        window.unspend(grant.local, more)
        grant.cost -= more
        grant.untold -= more
        return False

    async def settle(self, grant: Grant, usage_tokens: int, cost: float = 0.0) -> None:
        """Give the slot back, and put what was really used in place of what was reserved.

        Never raises; a hang-up meanwhile does not stop it. Await it before the answer's last byte, so that the
        caller's next request finds its slot free.
        """
        if grant.settled or grant.tenant is None or grant.local is None:
            return
        self._forget(grant)
        self._windows[grant.tenant.name].correct(grant.local, usage_tokens - grant.tokens, cost - grant.cost)
        if self._shared is not None:
            await self._settle_shared(self._shared, grant.tenant, grant, usage_tokens, cost)

    def _forget(self, grant: Grant) -> None:
        grant.settled = True
        if grant.tenant is not None:
            running = self._running[grant.tenant.name]
            running.discard(grant)
            if not running:
                del self._running[grant.tenant.name]

    def _undo(self, grant: Grant) -> None:
        self._forget(grant)
        if grant.tenant is not None and grant.local is not None:
            self._windows[grant.tenant.name].undo(grant.local, grant.tokens, grant.cost)

    async def _give_back(self, asked: asyncio.Future[Taken | Full], grant: Grant) -> None:
        try:
            full = _take_in(grant, await asked)
        except Away:
            full = None
        if full is None:
            await self.settle(grant, 0)
        else:
            self._undo(grant)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _settle_shared(self, shared: Shared, tenant: Limited, grant: Grant, tokens: int, cost: float) -> None:
        assert grant.local is not None  # noqa: S101 - an admitted grant was counted here first
        at, used, spent = grant.local, 0, cost
        if grant.shared is not None:
            at, used, spent = grant.shared, tokens - grant.tokens, cost - grant.cost + grant.untold
        if tenant.max_budget is None:
            spent = 0.0
        keep = tenant.budget_duration or BUDGET_KEPT_S
        if not shared.up:
            self._owe(tenant.name, at.period, spent, keep)
            return
        settled = shared.settle(tenant.name, grant.id, at, used, spent, keep)

        def owe(done: asyncio.Future[None]) -> None:
            # An answer may have been lost on the way back: money may then count twice, but is never lost.
            if done.cancelled() or done.exception() is not None:
                self._owe(tenant.name, at.period, spent, keep)

        settled.add_done_callback(owe)
        try:
            await asyncio.shield(settled)
        except Away:
            return

    def _owe(self, tenant: str, period: int, spent: float, keep: float) -> None:
        if spent:
            before, _ = self._owed.get((tenant, period), (0.0, keep))
            self._owed[tenant, period] = (before + spent, keep)

    async def _renew_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            await self._catch_up()

    async def _renew(self) -> None:
        """Hold all running requests' slots in Redis, also of those it has not heard of yet."""
        if self._shared is None or not self._shared.up:
            return
        for name, grants in list(self._running.items()):
            held = [g for g in grants if g.tenant is not None and g.tenant.max_parallel_requests is not None]
            if not held:
                continue
            try:
                await self._shared.renew(name, [g.id for g in held], self._clock())
                gone = [g.id for g in held if g.settled]
                if gone:
                    await self._shared.drop(name, gone)
            except Away:
                return

    async def _catch_up(self) -> None:
        """Tell Redis of running requests, and of money it was not told of."""
        await self._renew()
        for (name, period), (spent, keep) in list(self._owed.items()):
            if self._shared is None or not self._shared.up:
                return
            del self._owed[name, period]
            try:
                await self._shared.settle(name, "", Taken(0, period), 0, spent, keep)
            except Away:
                self._owe(name, period, spent, keep)
                return


def _take_in(grant: Grant, answer: Taken | Full) -> Full | None:
    if isinstance(answer, Full):
        return answer
    grant.shared = answer
    return None


def _limited(tenant: Limited) -> bool:
    return (
        tenant.rpm_limit is not None
        or tenant.tpm_limit is not None
        or tenant.max_parallel_requests is not None
        or tenant.max_budget is not None
    )


def _refusal(tenant: Limited, full: Full) -> TooManyRequests:
    seconds = max(1, math.ceil(full.retry_s))
    allowed = _SENTENCES[full.limit].format(limit=getattr(tenant, full.limit))
    return TooManyRequests(
        f"Tenant {tenant.name!r} is allowed {allowed}. Try again in {seconds} s.",
        code="insufficient_quota" if full.limit == "max_budget" else None,
        headers={"retry-after": str(seconds), "x-twolane-limit": full.limit},
    )
