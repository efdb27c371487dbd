"""Newest: a small map that all routers of one Redis agree on. Of two values of a key the higher order wins.

Four times a second a router sends what Redis may not have yet and takes in all that stands there, in one exchange
within a bound. While Redis is away each router goes on with what it knows; whatever happened meanwhile is made good
when it is back, also by routers that remember what a Redis that came back empty has lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog

from router.redis_line import Away, Lines

EVERY_S = 0.25
PATIENCE_S = 0.25
"""Bound on one exchange. Together: what one router knows is on the others within 0.75 s while Redis answers."""
_REACH_S = 0.6
_KEY = "twolane:{routers}:newest"
_LIFE_S = 40 * 86400
"""Redis forgets all when no router has been there for so long."""

_SYNC = """
for i = 2, #ARGV, 3 do
  local known = redis.call('HGET', KEYS[1], ARGV[i])
  if not known or tonumber(string.match(known, '^%d+')) < tonumber(ARGV[i + 1]) then
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1] .. ' ' .. ARGV[i + 2])
  end
end
if #ARGV > 1 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
return redis.call('HGETALL', KEYS[1])
"""
"""KEYS: the hash. ARGV: its life in seconds, then key, order and value of each news. Orders stay below 2**53."""
_SYNC_SHA = hashlib.sha1(_SYNC.encode(), usedforsecurity=False).hexdigest()

log = structlog.get_logger("twolane.router")

Heard = Callable[[str, bytes, bool], None]


class Newest:
    """`put` and `heard` cost no I/O. Without Redis it is this router's own map."""

    def __init__(self, url: str | None) -> None:
        """`url`: of the Redis, or of a cluster, that the routers share."""
        self._lines = (
            None if url is None else Lines(url, timeout=PATIENCE_S, scripts=(_SYNC,), callbacks=self._callbacks)
        )
        self._known: dict[str, tuple[int, bytes]] = {}
        self._news: set[str] = set()
        """Keys that Redis may have nothing, or something older, of."""
        self._heard: dict[str, Heard] = {}
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[bool]] = set()
        self.up: bool | None = None
        """Redis answered last time; None before the first time, and without one."""
        self.at = -math.inf
        """When it last did (`time.monotonic`)."""

    @property
    def shared(self) -> bool:
        """There is a Redis to share through."""
        return self._lines is not None

    def listen(self, prefix: str, heard: Heard) -> None:
        """Have `heard(key, value, contested)` called for what others put under keys that begin so.

        Contested: this router had put something older meanwhile, which Redis had not seen.
        """
        self._heard[prefix] = heard

    def put(self, key: str, order: int, value: bytes) -> None:
        """Make known; older than what is known it does nothing."""
        if self._newer(key, order):
            self._known[key] = (order, value)
            self._news.add(key)

    async def sync(self) -> bool:
        """One exchange; False where Redis did not take part."""
        if self._lines is None:
            return False
        async with self._lock:
            sent = {key: self._known[key] for key in self._news}
            try:
                found = await self._exchange(self._lines, sent)
            except Away as error:
                self._said(False, str(error))
                return False
            self._said(True)
            self._news = {key for key, (order, _) in self._known.items() if found.get(key, (-1, b""))[0] < order}
            for key, (order, value) in found.items():
                if self._newer(key, order):
                    self._known[key] = (order, value)
                    self._tell(key, value, key in sent)
        return True

    async def reach(self) -> bool:
        """As `sync`, for somebody who waits: False too where it lasts long, and goes on without them."""
        task = asyncio.create_task(self.sync())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        done, _ = await asyncio.wait([task], timeout=_REACH_S)
        return bool(done) and task.result()

    async def _exchange(self, lines: Lines, sent: Mapping[str, tuple[int, bytes]]) -> Mapping[str, tuple[int, bytes]]:
        from redis.exceptions import RedisError

        arguments = [part for key, (order, value) in sent.items() for part in (key, order, value)]
        try:
            if not self.up:
                await lines.ready()
            return await lines.ask(_KEY, ("EVALSHA", _SYNC_SHA, 1, _KEY, _LIFE_S, *arguments), _read)
        except RedisError as error:
            raise Away(type(error).__name__) from error

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.sync()

    async def close(self) -> None:
        """Give up the connection."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._lines is not None:
            await self._lines.close()

    def _newer(self, key: str, order: int) -> bool:
        return order > self._known.get(key, (-1, b""))[0]

    def _tell(self, key: str, value: bytes, contested: bool) -> None:
        for prefix, heard in self._heard.items():
            if key.startswith(prefix):
                heard(key.removeprefix(prefix), value, contested)

    def _callbacks(self, node: str) -> tuple[Callable[[], None], Callable[[Exception], None]]:
        # Each exchange says for itself whether it was answered.
        return lambda: None, lambda error: log.debug("redis_failed", node=node, error=type(error).__name__)

    def _said(self, up: bool, why: str = "") -> None:
        if up:
            self.at = time.monotonic()
        if up != self.up:
            if not up:
                log.warning("routers_apart", why=why, rule="stops and demotions are taken from this host's files alone")
            elif self.up is not None:
                log.info("routers_together")
        self.up = up


def _read(answer: Any) -> Mapping[str, tuple[int, bytes]]:
    """The hash, as a flat list or a map of bytes."""
    pairs = answer.items() if isinstance(answer, dict) else zip(answer[::2], answer[1::2], strict=True)
    read: dict[str, tuple[int, bytes]] = {}
    for field, text in pairs:
        order, _, value = text.partition(b" ")
        # What no router wrote is left aside, and overwritten by the next value of its key.
        if order.isdigit() and len(order) < 17:
            read[field.decode(errors="replace")] = (int(order), value)
    return read
