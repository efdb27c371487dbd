"""Stops: which parts of the cache lane are switched off, by whom and why; the same on every router within a second.

A stop is in force here as soon as `put` is called. It is written to a file, which the routers of this host read four
times a second, and put into `Newest`, through which the routers of the same Redis hear of it. A file that cannot be
read stops the whole cache lane until it can: nobody knows then what it says.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from router.newest import EVERY_S, Newest
from router.state_files import stamp
from router.stops_file import BadStops, Stop, Wish, exchange, newest, read_target

log = structlog.get_logger("twolane.router")

_PREFIX = "stop/"
_STOP = msgspec.json.Decoder(Stop)
_APART_S = 0.8
"""Without an exchange with Redis for so long, `when_apart: stop` stops the cache lane."""

Adopted = Callable[[Stop], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a change has come by now."""

    stop: Stop
    file: str = ""
    """Why the file does not hold it; empty where it does."""
    redis: bool | None = None
    """Redis has it; None where there is none."""


class Stops:
    """The stop buttons. Call from one event loop; `in_force` costs nothing."""

    def __init__(
        self,
        path: Path,
        news: Newest,
        *,
        adopted: Adopted,
        apart: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`adopted` is told what people wrote into the file. `apart`: stop the cache lane while Redis is away."""
        self.path = path
        self._news = news
        self._adopted = adopted
        self._apart = apart
        self._clock = clock
        self._known: dict[str, Stop] = {}
        self._own: set[str] = set()
        """Targets that were stopped through this router since it started."""
        self._done: frozenset[Wish] = frozenset()
        self._seen: object = ()
        """Stamp of the file as it was last read: whatever is written after that reading is seen by the next look."""
        self._dirty = False
        """The file may not hold what is known; tried again until it does."""
        self._fault = ""
        self._unsaved = ""
        self._targets: frozenset[str] = frozenset()
        self._lock = asyncio.Lock()
        news.listen(_PREFIX, self._heard)

    def in_force(self) -> frozenset[str]:
        """Targets: `cache`, `pair:NAME`, `tenant:NAME`."""
        if self._apart and self.apart:
            return self._targets | {"cache"}
        return self._targets

    @property
    def apart(self) -> bool:
        """Redis is configured and has not answered for most of a second: others' stops do not arrive."""
        return self._news.shared and time.monotonic() - self._news.at > _APART_S

    def entries(self) -> list[Stop]:
        """What is stopped now, with those that nobody pressed."""
        pressed = [stop for stop in self._known.values() if stop.stopped]
        now = self._clock()
        return pressed + [Stop("cache", True, reason, "router", now, 0) for reason in self._own_reasons()]

    def _own_reasons(self) -> list[str]:
        reasons = [f"{self.path.name}: {self._fault}"] if self._fault else []
        return (
            [*reasons, "Redis does not answer, so stops made elsewhere may be unknown here"]
            if (self._apart and self.apart)
            else reasons
        )

    def known(self, target: str) -> Stop | None:
        """The last word about a target."""
        return self._known.get(target)

    def holds(self, pair: str, tenant: str) -> bool:
        """Whether a call of this tenant to this pair is stopped now."""
        stopped = self.in_force()
        return bool(stopped) and not stopped.isdisjoint(("cache", f"pair:{pair}", f"tenant:{tenant}"))

    async def put(self, wish: Wish) -> Reach:
        """Have it in force here at once, then in the file and in Redis, each within a bound."""
        stop = wish.after(self._known.get(wish.target), self._clock())
        self._take(stop)
        if stop.stopped:
            self._own.add(stop.target)
        self._share(stop)
        unsaved, redis = await asyncio.gather(self._save(), self._news.reach())
        return Reach(self._known[wish.target], unsaved, redis if self._news.shared else None)

    async def start(self) -> None:
        """Know what the file and Redis say before the first request."""
        await asyncio.gather(self.look(), self._news.reach())

    async def run(self) -> None:
        """Read the file whenever it changes, for ever."""
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Take in the file if it changed, and write to it what was heard."""
        if self._dirty or await asyncio.to_thread(self._stamp) != self._seen:
            await self._save()

    async def _save(self) -> str:
        """Exchange with the file; why it does not hold what is known, or nothing."""
        async with self._lock:
            self._dirty = False
            before = await asyncio.to_thread(self._stamp)
            if before != self._seen:
                self._done = frozenset()
            self._seen = before
            try:
                found = await asyncio.to_thread(exchange, self.path, dict(self._known), self._clock(), self._done)
            except Exception as error:  # whatever it is, nobody knows now what the file says
                fault = str(error) if isinstance(error, BadStops) else type(error).__name__
                self._broken(fault)
                return f"{self.path}: {fault}"
            self._broken("")
            self._dirty = bool(found.unsaved)
            if found.unsaved and found.unsaved != self._unsaved:
                log.error("stops_not_kept", why=found.unsaved)
            self._unsaved = found.unsaved
            for stop in found.stops.values():
                if self._take(stop):
                    self._share(stop)
            if found.unsaved:
                self._done |= {Wish(s.target, s.stopped, s.reason, s.by, s.drill) for s in found.adopted}
        for stop in found.adopted:
            log.warning("stops_file_edited", target=stop.target, stopped=stop.stopped)
            await self._adopted(stop)
        return found.unsaved

    def _stamp(self) -> object:
        try:
            return stamp(self.path)
        except OSError as error:
            return str(error)

    def _broken(self, fault: str) -> None:
        if fault and fault != self._fault:
            log.error("stops_file_unreadable", file=str(self.path), why=fault, rule="the cache lane is stopped")
        elif self._fault and not fault:
            log.info("stops_file_readable", file=str(self.path))
        self._fault = fault
        self._count()

    def _heard(self, target: str, value: bytes, contested: bool) -> None:
        try:
            stop = _STOP.decode(value)
            if stop.target != read_target(target):
                raise BadStops(f"{stop.target!r} stands under {target!r}")
        except (msgspec.DecodeError, BadStops) as error:
            log.error("stop_unreadable", target=target[:80], error=str(error))
            return
        own = self._known.get(target)
        if contested and own is not None and own.stopped and target in self._own and not stop.stopped:
            # Whoever lifted could not know of the stop that was made here while Redis was away: it goes on.
            stop = msgspec.structs.replace(own, seq=stop.seq + 1)
            self._share(stop)
        if self._take(stop):
            self._dirty = True

    def _take(self, stop: Stop) -> bool:
        merged = newest(self._known, {stop.target: stop})
        if merged == self._known:
            return False
        self._known = merged
        self._count()
        log.warning("stop" if stop.stopped else "start", target=stop.target, drill=stop.drill)
        return True

    def _share(self, stop: Stop) -> None:
        self._news.put(_PREFIX + stop.target, stop.order, msgspec.json.encode(stop))

    def _count(self) -> None:
        stopped = {stop.target for stop in self._known.values() if stop.stopped}
        self._targets = frozenset(stopped | {"cache"}) if self._fault else frozenset(stopped)
