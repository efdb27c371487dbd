"""What the cache lane is held by, built once and opened and closed as one: stops, standings, and what spreads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from router.admin import record_stop
from router.audit import Audit
from router.errors import Unrecorded
from router.lane import CacheLane, RunningCall, lane_pairs, reported, watch_fingerprints
from router.newest import EVERY_S, Newest
from router.settings import Settings
from router.standings import Standings
from router.stops import Stops
from router.stops_file import Stop
from router.telemetry import Metrics
from router.tenants import TenantSource
from router.transports.cache import Fleet
from workers.config import DemotionLimits

log = structlog.get_logger("twolane.router")


class LaneHouse:
    """`start` before the first request, `run` beside them, `close` at the end."""

    def __init__(
        self, settings: Settings, redis_url: str | None, *, audit: Audit, tenants: TenantSource, metrics: Metrics
    ) -> None:
        """`redis_url`: where stops and demotions are shared; None keeps them to this host's files."""

        async def adopted(stop: Stop) -> None:
            await record_stop(audit, tenants, "file", stop)

        async def record(what: str, who: str, detail: dict[str, Any]) -> None:
            await record_or_log(audit, what, who, detail)

        self._audit = audit
        self._reported: dict[str, list[dict[str, Any]]] = {}
        """By pair, what reports said when they were last recorded: a report lets a pair in, and no reload brings it."""
        self._news = Newest(redis_url)
        apart = settings.stops.without_redis == "stop"
        self.stops = Stops(settings.stops_file, self._news, adopted=adopted, apart=apart)
        file = settings.state_dir.resolve() / "standings.json"
        self._standings = Standings(_limits(settings), file, self._news, record)
        self._running: dict[str, RunningCall] = {}
        self.demotion = self._standings.demotion
        _watch(metrics, self)

    def lane(self, settings: Settings) -> CacheLane:
        """For a dispatcher of these settings; what runs is known across reloads."""
        return CacheLane(lane_pairs(settings.model_list), self.stops, self.demotion, self._running)

    def configure(self, settings: Settings) -> None:
        """Take in a reloaded configuration."""
        self.demotion.configure(_limits(settings))

    async def look(self, fleet: Fleet) -> None:
        """See pairs that were swapped, also where nobody asks for them, and record what their reports say now."""
        watch_fingerprints(fleet, self.demotion)
        for name, _ in self.demotion.states():
            told = reported(fleet, name)
            if told and told != self._reported.get(name):
                self._reported[name] = told
                for report in told:
                    await record_or_log(self._audit, "pair_report", "router", {"pair": name, **report})

    async def start(self) -> None:
        """Know what is stopped and demoted. Needs an open audit log."""
        await self.stops.start()
        await self._standings.start()

    async def run(self) -> None:
        """For ever."""
        await asyncio.gather(*(_kept_up(run) for run in (self._news.run, self.stops.run, self._standings.run)))

    async def close(self) -> None:
        """Keep and record what is known, and give up the connections."""
        await self._standings.close()
        await self._news.close()


async def _kept_up(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """A fault that nobody foresaw must not end what a stop needs to arrive."""
    while True:
        try:
            await run()
        except Exception as error:
            log.exception("lane_watch_failed", part=run.__qualname__, error=type(error).__name__)
            await asyncio.sleep(EVERY_S)


async def record_or_log(audit: Audit, what: str, who: str, detail: dict[str, Any]) -> bool:
    """A control record of what happens whether or not it can be recorded: a demotion, a reload that mends.

    False, and a line in the log, where it cannot.
    """
    try:
        await audit.control(what, who, detail)
    except Unrecorded as error:
        log.error("step_not_recorded", what=what, error=error.message)
        return False
    return True


def _limits(settings: Settings) -> dict[str, DemotionLimits]:
    return {pair.name: pair.demotion for pair in settings.pairs}


def _watch(metrics: Metrics, house: LaneHouse) -> None:
    watch, demotion = metrics.watch, house.demotion
    watch("stops", "Stop buttons in force.", lambda: [({}, len(house.stops.in_force()))])
    watch("pair_demoted", "The pair is taken out.", lambda: demotion.samples("demoted"))
    watch("pair_probation", "The pair is on probation.", lambda: demotion.samples("probation"))
    watch("pair_alarm_level", "How near a signal is to demoting its pair; 1 does.", demotion.levels)
    watch("pair_f1", "Recent mean token F1 between a pair's answers and the text route's.", demotion.agreement)
    watch("pair_agreed", "Share of compared answers that say the same as the text route's.", demotion.agreed)
