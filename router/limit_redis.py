"""Limits shared between processes: the rule of `limit_window` as two Lua scripts, and the breaker around Redis.

Per tenant two keys with one hash tag: a hash with `r<bucket>`, `t<bucket>` (requests, tokens) and `b<period>` (USD),
and a sorted set of running requests by the time their lease ends. A living process renews its leases; a dead one's
slots come back when they end. Both keys expire.

Commands go out in batches, each bounded by `timeout`: a request waits for its own and at most the one before. After
`FAILURES` failed batches in a row the breaker opens: no request waits for Redis until a probe in the background has
been answered within the same bound. In a cluster the keys of a tenant lie on one node; `FAILURES` in a row of any node
open the breaker for all, until every node answers. A tenant whose slot is moving is not counted together meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import structlog

from router.limit_window import BUCKET_S, BUCKETS, LIMITS, NEVER_S, UNKNOWN_WAIT_S, Full, Limited, Taken
from router.redis_line import Away, Lines

LEASE_S = 30.0
FAILURES = 3
_WATCH_S = 1.0
_PROBE_S = (0.25, 2.0)
"""First and longest pause between probes."""
_KEEP_S = 400 * 86400

_log = structlog.get_logger("twolane.limits")

_ADMIT = f"""
local now = tonumber(ARGV[1])
if now == nil then local t = redis.call('TIME'); now = t[1] + t[2] / 1000000 end
local id, rpm, tpm, slots, budget = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local duration, tokens, cost, lease = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local bucket, period = math.floor(now / {BUCKET_S}), 0
if duration > 0 then period = math.floor(now / duration) end
local used, spent = {{r = {{}}, t = {{}}}}, 0
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local kind, at, value = string.sub(all[i], 1, 1), tonumber(string.sub(all[i], 2)), tonumber(all[i + 1])
  if kind == 'b' then
    if at == period then spent = value else redis.call('HDEL', KEYS[1], all[i]) end
  elseif at <= bucket - {BUCKETS} then redis.call('HDEL', KEYS[1], all[i])
  else used[kind][at] = value end
end
local function wait(counts, room)
  local sum, order = 0, {{}}
  for at, value in pairs(counts) do sum = sum + value; order[#order + 1] = at end
  if sum <= room then return nil end
  table.sort(order)
  for _, at in ipairs(order) do
    sum = sum - counts[at]
    if sum <= room then return (at + {BUCKETS}) * {BUCKET_S} - now end
  end
  return {BUCKETS * BUCKET_S}
end
local function full(limit, seconds) return {{0, limit, tostring(seconds)}} end
if budget >= 0 and (spent >= budget or spent + cost > budget) then
  return full(4, duration > 0 and (period + 1) * duration - now or {NEVER_S})
end
if slots >= 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
  if redis.call('ZCARD', KEYS[2]) >= slots then return full(3, {UNKNOWN_WAIT_S}) end
end
local seconds = rpm >= 0 and wait(used.r, rpm - 1)
if seconds then return full(1, seconds) end
seconds = tpm >= 0 and wait(used.t, tpm - math.max(tokens, 1))
if seconds then return full(2, seconds) end
redis.call('HINCRBY', KEYS[1], 'r' .. bucket, 1)
redis.call('HINCRBY', KEYS[1], 't' .. bucket, tokens)
if budget >= 0 then redis.call('HINCRBYFLOAT', KEYS[1], 'b' .. period, cost) end
local keep = {2 * BUCKETS * BUCKET_S}
if budget >= 0 then keep = math.max(keep, duration > 0 and (period + 1) * duration - now + 60 or {_KEEP_S}) end
redis.call('EXPIRE', KEYS[1], math.ceil(keep))
if slots >= 0 then
  redis.call('ZADD', KEYS[2], now + lease, id)
  redis.call('EXPIRE', KEYS[2], math.ceil(2 * lease))
end
return {{1, bucket, period}}
"""
"""KEYS: hash, sorted set. Answers `{1, bucket, period}` or `{0, number of the limit, seconds}`."""

_SETTLE = """
redis.call('ZREM', KEYS[2], ARGV[1])
local tokens, cost = tonumber(ARGV[3]), tonumber(ARGV[5])
if tokens ~= 0 and redis.call('HEXISTS', KEYS[1], 't' .. ARGV[2]) == 1 then
  if redis.call('HINCRBY', KEYS[1], 't' .. ARGV[2], tokens) < 0 then redis.call('HSET', KEYS[1], 't' .. ARGV[2], 0) end
end
if cost ~= 0 then
  if tonumber(redis.call('HINCRBYFLOAT', KEYS[1], 'b' .. ARGV[4], cost)) < 0 then
    redis.call('HSET', KEYS[1], 'b' .. ARGV[4], 0)
  end
  local keep = tonumber(ARGV[6])
  if redis.call('TTL', KEYS[1]) < keep then redis.call('EXPIRE', KEYS[1], math.ceil(keep)) end
end
return 1
"""


_SPEND = """
local spent = tonumber(redis.call('HGET', KEYS[1], 'b' .. ARGV[1]) or '0')
if spent + tonumber(ARGV[2]) > tonumber(ARGV[3]) then return 0 end
redis.call('HINCRBYFLOAT', KEYS[1], 'b' .. ARGV[1], ARGV[2])
return 1
"""
"""KEYS: hash. Answers whether the budget had room. The hash expires as `_ADMIT` said."""


def _digest(script: str) -> str:
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


_ADMIT_SHA, _SETTLE_SHA, _SPEND_SHA = _digest(_ADMIT), _digest(_SETTLE), _digest(_SPEND)


def _keys(tenant: str) -> tuple[str, str]:
    return f"twolane:limits:{{{tenant}}}", f"twolane:limits:{{{tenant}}}:running"


def _or_none(value: float | None) -> str:
    return "-1" if value is None else repr(value)


def _read_admit(answer: Any) -> Taken | Full:
    ok, first, second = answer
    return Taken(int(first), int(second)) if ok else Full(LIMITS[int(first) - 1], float(second))


def _read_nothing(answer: Any) -> None:
    """Settling answers nothing of interest."""


class Shared:
    """Counters in Redis. Each method queues its command at once; the future holds the answer or `Away`."""

    def __init__(self, url: str, timeout: float, clock: Callable[[], float] | None) -> None:
        self._lines = Lines(url, timeout=timeout, scripts=(_ADMIT, _SETTLE, _SPEND), callbacks=self._callbacks)
        self._clock = clock
        self._failures: dict[str, int] = {}
        """In a row, by node."""
        self._probe: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._back: Callable[[], Awaitable[None]] | None = None
        self._closed = False
        self.up = False
        """False until Redis has answered once, and while the breaker is open: ask nothing then."""

    async def start(self, back: Callable[[], Awaitable[None]]) -> None:
        """Try once, within bounds; `back` runs whenever Redis is there (again)."""
        self._back = back
        self._watch = asyncio.create_task(self._watch_for_ever())
        try:
            await self._lines.ready()
        except Away as error:
            self._open(str(error))
            return
        self.up = True
        await back()

    def admit(self, tenant: Limited, id: str, tokens: int, cost: float) -> asyncio.Future[Taken | Full]:
        """Look and take, in one step on the server."""
        keys = _keys(tenant.name)
        command = (
            "EVALSHA",
            _ADMIT_SHA,
            2,
            *keys,
            repr(self._clock()) if self._clock else "",
            id,
            _or_none(tenant.rpm_limit),
            _or_none(tenant.tpm_limit),
            _or_none(tenant.max_parallel_requests),
            _or_none(tenant.max_budget),
            repr(tenant.budget_duration or 0),
            tokens,
            repr(cost),
            repr(LEASE_S),
        )
        return self._lines.ask(keys[0], command, _read_admit)

    def spend(self, tenant: Limited, taken: Taken, cost: float) -> asyncio.Future[bool]:
        """Take more money for an admitted request; whether the budget has room for it."""
        key = _keys(tenant.name)[0]
        command = ("EVALSHA", _SPEND_SHA, 1, key, taken.period, repr(cost), _or_none(tenant.max_budget))
        return self._lines.ask(key, command, bool)

    def settle(
        self, tenant: str, id: str, taken: Taken, tokens: int, cost: float, keep_s: float
    ) -> asyncio.Future[None]:
        """Give the slot back; add to tokens and money (either may be negative)."""
        keys = _keys(tenant)
        command = (
            "EVALSHA",
            _SETTLE_SHA,
            2,
            *keys,
            id,
            taken.bucket,
            tokens,
            taken.period,
            repr(cost),
            repr(keep_s),
        )
        return self._lines.ask(keys[0], command, _read_nothing)

    async def renew(self, tenant: str, ids: Iterable[str], now: float) -> None:
        """Hold these slots for another lease. Raises `Away`."""
        key = _keys(tenant)[1]
        ends = [part for id in ids for part in (repr(now + LEASE_S), id)]
        held = self._lines.ask(key, ("ZADD", key, *ends), _read_nothing)
        await self._lines.ask(key, ("EXPIRE", key, int(2 * LEASE_S)), _read_nothing)
        await held

    async def drop(self, tenant: str, ids: Iterable[str]) -> None:
        """Give these slots back. Raises `Away`."""
        key = _keys(tenant)[1]
        await self._lines.ask(key, ("ZREM", key, *ids), _read_nothing)

    async def close(self) -> None:
        """Stop probing and give up the connections."""
        self._closed = True
        for task in (self._watch, self._probe):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        await self._lines.close()

    def _callbacks(self, node: str) -> tuple[Callable[[], None], Callable[[Exception], None]]:
        def answered() -> None:
            self._failures[node] = 0

        def failed(error: Exception) -> None:
            self._failures[node] = self._failures.get(node, 0) + 1
            if self._failures[node] >= FAILURES:
                self._open(f"{type(error).__name__}: {error}")

        return answered, failed

    def _open(self, why: str) -> None:
        if self.up or self._probe is None:
            _log.warning("redis_away", why=why, rule="each process enforces the full limits by itself")
        self.up = False
        if not self._closed and (self._probe is None or self._probe.done()):
            self._probe = asyncio.create_task(self._probe_until_back())

    async def _watch_for_ever(self) -> None:
        """Find out that Redis is gone where no request does: readiness and metrics are to tell the truth."""
        failures = 0
        while True:
            await asyncio.sleep(_WATCH_S)
            if not self.up:
                failures = 0
                continue
            try:
                await self._lines.ready()
                failures = 0
            except Away as error:
                failures += 1
                if failures >= FAILURES:
                    self._open(str(error))

    async def _probe_until_back(self) -> None:
        pause, longest = _PROBE_S
        while True:
            await asyncio.sleep(pause)
            try:
                await self._lines.ready()
                break
            except Away:
                pause = min(pause * 2, longest)
        self._failures.clear()
        self.up = True
        _log.info("redis_back")
        if self._back is not None:
            await self._back()
