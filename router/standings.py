"""Standings: keeps what `Demotion` found over restarts, spreads it among routers, and has it recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import structlog

from router.demotion import Demotion, Standing, Step
from router.newest import EVERY_S, Newest
from router.state_files import locked, replace, stamp
from workers.config import DemotionLimits

log = structlog.get_logger("twolane.router")

_PREFIX = "pair/"
_STANDING = msgspec.json.Decoder(Standing)
_FILE = msgspec.json.Decoder(dict[str, Standing])

Record = Callable[[str, str, dict[str, Any]], Awaitable[None]]


class Standings:
    """`demotion` and what surrounds it. `start` before the first request, `run` beside them, `close` at the end."""

    def __init__(self, limits: Mapping[str, DemotionLimits], path: Path, news: Newest, record: Record) -> None:
        """`record(what, who, detail)` writes a control record; it must not raise."""
        self.demotion = Demotion(limits, changed=self._changed)
        self._path = path
        self._news = news
        self._record = record
        self._seen: object = ()
        self._dirty = False
        self._unsaved = ""
        self._tasks: set[asyncio.Future[None]] = set()
        news.listen(_PREFIX, self._heard)

    async def start(self) -> None:
        """Know what was known before."""
        await self.exchange()

    async def run(self) -> None:
        """Exchange with the file whenever either side has news, for ever."""
        while True:
            await asyncio.sleep(EVERY_S)
            if self._dirty or await asyncio.to_thread(self._stamp) != self._seen:
                await self.exchange()

    async def close(self) -> None:
        """Let records be written, and keep what is known."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._dirty:
            await self.exchange()

    async def exchange(self) -> None:
        """Take in what the file says, and have it say what is known. A file that cannot be used is said in the log."""
        self._dirty = False
        unsaved = ""
        try:
            found, self._seen = await asyncio.to_thread(_exchange, self._path, self.demotion.known())
        except OSError as error:
            unsaved, self._seen, found = str(error), self._stamp(), {}
        if unsaved and unsaved != self._unsaved:
            log.error("standings_not_kept", file=str(self._path), why=unsaved)
        self._unsaved = unsaved
        for pair, standing in found.items():
            if self.demotion.take(pair, standing):
                self._share(pair, standing)

    def _changed(self, step: Step) -> None:
        self._dirty = True
        self._share(step.pair, step.new)
        if step.new.state == step.old.state and not step.old.fingerprint:
            return  # a pair that is seen for the first time: nothing happened to it
        log.warning(step.what, pair=step.pair, why=step.new.why, round=step.new.round, until=step.new.until or None)
        if step.who != "router":
            return  # recorded before it was done
        detail = {"pair": step.pair, "why": step.new.why, "fingerprint": step.new.fingerprint, **step.detail}
        if step.new.until:
            detail["until"] = step.new.until
        task = asyncio.ensure_future(self._record(step.what, step.who, detail))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _share(self, pair: str, standing: Standing) -> None:
        self._news.put(_PREFIX + pair, standing.seq, msgspec.json.encode(standing))

    def _heard(self, pair: str, value: bytes, contested: bool) -> None:
        try:
            standing = _STANDING.decode(value)
        except msgspec.DecodeError:
            log.error("standing_unreadable", pair=pair[:80])
            return
        if self.demotion.take(pair, standing):
            self._dirty = True

    def _stamp(self) -> object:
        try:
            return stamp(self._path)
        except OSError as error:
            return str(error)


def _exchange(path: Path, known: Mapping[str, Standing]) -> tuple[dict[str, Standing], object]:
    """All standings, the newer of each, and the file's stamp. Raises OSError."""
    with locked(path):
        try:
            old = _FILE.decode(path.read_bytes())
        except FileNotFoundError:
            old = {}
        except msgspec.DecodeError:
            # Nothing that people write: what a crash of the disk left is replaced by what is known.
            log.error("standings_unreadable", file=str(path))
            old = {}
        merged = dict(old)
        for pair, standing in known.items():
            if standing.seq > merged.get(pair, Standing()).seq:
                merged[pair] = standing
        if merged != old:
            replace(path, msgspec.json.format(msgspec.json.encode(merged), indent=1).decode() + "\n")
        return merged, stamp(path)
