"""Shadow text: after some answers of the cache lane, what text would have said, recorded beside them and watched.

Nothing here is on a caller's way. A sample waits in a bounded queue until its worker is idle; the worker gives it up as
soon as a caller asks, and it is tried again later. What is found goes into the tenant's chain, to the metrics and to
Demotion.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from router.audit import Audit
from router.call import Call
from router.comparison import Comparison, compare
from router.course import Course
from router.demotion import Demotion
from router.errors import TransportError, Unavailable
from router.recorded import NothingToReplay, texts_of
from router.telemetry import Metrics
from router.transcript import transcript
from router.transports.cache import Fleet, Holder, holders
from router.transports.openai_http import Pools
from router.twin import Fields, Said, Twin
from workers.protocol import Otherwise, PairState

log = structlog.get_logger("twolane.router")

BASELINE = 30
"""Comparisons of a pair that say what it may be held to where no report does."""
NEVER_IDLE = "never_idle"
BARRED = "barred"
_MOST = 64
_MOST_BYTES = 16 * 2**20
_PATIENCE_S = 600.0
"""A sample that found no idle moment for so long is given up."""
_PAUSE_S = 0.5
_PATHS = ("/chat/completions", "/completions")


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request, waiting."""

    call: Call
    pair: str
    said: bytes | tuple[bytes, ...]
    """The body of a plain answer, or the frames of a stream."""
    size: int
    until: float


@dataclass(slots=True)
class _Seen:
    """Of one pair, since this process began."""

    compared: int = 0
    suspects: int = 0
    likelihood: float = 0.0
    scored: int = 0
    drift: float = 0.0
    fingerprint: str = ""
    first: list[float] = field(default_factory=list)
    """F1 of the first comparisons of this fingerprint."""


class _WhenIdle(Twin):
    """Asks again what callers made the worker give up, until the sample's time is over or the pair must not run."""

    def __init__(self, pools: Pools, url: str, sample: Sample, pause: float, barred: Callable[[], bool]) -> None:
        super().__init__(pools, url, sample.pair, background=True)
        self._until = sample.until
        self._pause = pause
        self._barred = barred

    async def ask(
        self,
        fields: Fields,
        kind: Otherwise = "same",
        *,
        chat: bool = True,
        other: list[Any] | None = None,
        score: str | None = None,
    ) -> Said:
        while True:
            if self._barred():
                raise Unavailable("The pair must not be run for this tenant any more.", code=BARRED)
            try:
                return await super().ask(fields, kind, chat=chat, other=other, score=score)
            except TransportError as error:
                if error.code != "overloaded":
                    raise
            if time.monotonic() >= self._until:
                raise Unavailable("The worker was never idle.", code=NEVER_IDLE)
            await asyncio.sleep(self._pause)


class Shadow:
    """Samples, compares, tells. `start` in the loop that offers, `close` at the end."""

    def __init__(
        self,
        fleet: Fleet,
        pools: Pools,
        demotion: Demotion,
        audit: Audit,
        *,
        barred: Callable[[str, str], bool] = lambda pair, tenant: False,
        draw: Callable[[], float] = random.random,
        pause: float = _PAUSE_S,
    ) -> None:
        self._fleet, self._pools, self._demotion, self._audit = fleet, pools, demotion, audit
        self._barred = barred
        """By pair and tenant: the pair must not be run for a comparison either, as where a stop button holds."""
        self._draw = draw
        self._pause = pause
        self._waiting: deque[Sample] = deque()
        self._bytes = 0
        self._arrived = asyncio.Event()
        self._dropped: Counter[str] = Counter()
        self._seen: dict[str, _Seen] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look at what is offered."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Give up what waits."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def wants(self, call: Call, pair: str | None) -> bool:
        """Whether the answer that is about to be given should be offered: drawn by the tenant's share, and every one
        of a pair on probation."""
        if pair is None or call.path not in _PATHS or self._task is None:
            return False
        share = call.tenant.audit.shadow_text
        return (share > 0 and self._draw() < share) or self._demotion.wants_twin(pair)

    def offer(self, course: Course, pair: str) -> None:
        """An answer that was wanted is complete. Returns at once; where too much waits it is dropped and counted."""
        reply = course.reply
        if reply is None:
            return
        said = reply.body if reply.frames is None else tuple(course.said or ())
        size = sum(map(len, said)) if isinstance(said, tuple) else len(said)
        size += sum(map(len, course.call.fields.values()))
        if len(self._waiting) >= _MOST or self._bytes + size > _MOST_BYTES:
            self._dropped["queue_full"] += 1
            return
        self._waiting.append(Sample(course.call, pair, said, size, time.monotonic() + _PATIENCE_S))
        self._bytes += size
        self._arrived.set()

    # -- beside the callers

    async def _run(self) -> None:
        while True:
            if not self._waiting:
                self._arrived.clear()
                await self._arrived.wait()
            sample = self._waiting.popleft()
            self._bytes -= sample.size
            try:
                await self._look_at(sample)
            except NothingToReplay:
                self._dropped["no_text"] += 1
            except TransportError as error:
                self._dropped[error.code or "failed"] += 1
                log.warning("shadow_failed", pair=sample.pair, code=error.code)
            except Exception as error:  # one sample must not end all that follow
                self._dropped["internal_error"] += 1
                log.exception("shadow_failed", pair=sample.pair, error=type(error).__name__)

    async def _look_at(self, sample: Sample) -> None:
        """Compare as soon as a worker that holds the pair is idle."""
        answer = texts_of(_read(sample.said))[0]

        def barred() -> bool:
            return self._barred(sample.pair, sample.call.tenant.name)

        while time.monotonic() < sample.until and not barred():
            holder = self._idle(sample.pair)
            if holder is not None and isinstance(holder.state, PairState):
                twin = _WhenIdle(self._pools, holder.worker.url, sample, self._pause, barred)
                chat = sample.call.path == "/chat/completions"
                found = await compare(twin, sample.call.fields, answer, holder.state.mode, chat=chat)
                self._tell(sample, holder.state, found)
                return
            await asyncio.sleep(self._pause)
        self._dropped[BARRED if barred() else NEVER_IDLE] += 1

    def _idle(self, pair: str) -> Holder | None:
        found = [h for h in holders(self._fleet, "pair", pair) if h.state.ready]
        return next((h for h in found if not h.worker.running and not h.worker.queued), None)

    def _tell(self, sample: Sample, state: PairState, found: Comparison) -> None:
        seen = self._seen.setdefault(sample.pair, _Seen())
        drift = _drift(seen, state, found.f1)
        seen.compared += 1
        seen.suspects += found.suspect
        if found.likelihood is not None:
            seen.likelihood += found.likelihood
            seen.scored += 1
        self._demotion.observe_agreement(sample.pair, found.exact, found.f1)
        self._demotion.observe_harm(sample.pair, found.suspect)
        if drift is not None:
            seen.drift += 0.05 * (drift - seen.drift)
            self._demotion.observe_drift(sample.pair, drift)
        texts = {"text": found.text.encode()} | ({"hint": found.hint.encode()} if found.hint is not None else {})
        self._audit.beside(sample.call, "shadow_text", _detail(sample.pair, state, found, drift), texts)

    # -- seen from outside

    def watch(self, metrics: Metrics) -> None:
        """Say what was found, by pair."""
        watch, seen = metrics.watch, self._seen

        def of(read: Callable[[_Seen], float | None]) -> Callable[[], Iterable[tuple[dict[str, str], float]]]:
            return lambda: [({"pair": p}, value) for p, s in seen.items() if (value := read(s)) is not None]

        watch("agreement_samples_total", "Answers compared with the text route's.", of(lambda s: s.compared), "counter")
        watch("agreement_suspects_total", "Of these, those that may do harm.", of(lambda s: s.suspects), "counter")
        watch(
            "agreement_likelihood",
            "Mean log probability that the pair gives the text route's answers.",
            of(lambda s: s.likelihood / s.scored if s.scored else None),
        )
        watch("agreement_drift", "How far recent F1 lies below what was promised.", of(lambda s: s.drift))
        watch(
            "agreement_dropped_total",
            "Answers that were to be compared and were not, by cause.",
            lambda: [({"cause": cause}, count) for cause, count in self._dropped.items()],
            "counter",
        )
        watch("agreement_waiting", "Answers that wait to be compared.", lambda: [({}, len(self._waiting))])


def _read(said: bytes | tuple[bytes, ...]) -> dict[str, Any]:
    whole = transcript(said) if isinstance(said, tuple) else said
    return msgspec.json.decode(whole, type=dict[str, Any])


def _drift(seen: _Seen, state: PairState, f1: float) -> float | None:
    """What was promised less what is: by the report, else by the pair's own first comparisons. None while unknown."""
    if seen.fingerprint != state.fingerprint:
        seen.fingerprint, seen.first, seen.drift = state.fingerprint, [], 0.0
    if state.agreement is not None:
        return state.agreement - f1
    if len(seen.first) < BASELINE:
        seen.first.append(f1)
        return None
    return sum(seen.first) / BASELINE - f1


def _detail(pair: str, state: PairState, found: Comparison, drift: float | None) -> dict[str, Any]:
    """What stands in clear: figures, no text."""
    return {
        "pair": pair,
        "fingerprint": state.fingerprint,
        "route": found.route,
        "greedy": found.greedy,
        "exact": found.exact,
        "f1": round(found.f1, 4),
        "likelihood": found.likelihood,
        "sureness": found.sureness,
        "suspect": found.suspect,
        "drift": drift,
    }
