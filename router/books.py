"""The books of finished requests, closed many at a time: in a row that costs half of what it costs amid a request.

Metrics, log lines, estimates, decisions and records that nobody waits for. What somebody waits for, or what must be
exact at once, the dispatcher settles before: slots, tokens and money, health, the records of regulated tenants.
"""

from __future__ import annotations

import time
from operator import itemgetter
from typing import Literal, NamedTuple

import msgspec
import structlog

from policies.facts import Decision
from router.audit import Audit
from router.audit import Outcome as Ending
from router.batch import Batch
from router.call import Call, Usage
from router.course import Course, Decisions, Kept
from router.deployments import Deployment
from router.estimates import Estimates
from router.facts_record import Packed, pack_made
from router.telemetry import Ended, Event, Metrics, Outcome, log_requests
from router.traces import Traces

log = structlog.get_logger("twolane.router")

_HELD_S = 0.02
_MOST = 64
_TAUGHT = 4
"""Answers of one deployment that its estimate learns from, of those closed together: more say hardly more."""
_RESULTS: dict[Outcome, Literal["answered", "refused", "failed", "cancelled"]] = {
    "ok": "answered",
    "refused": "refused",
    "error": "failed",
    "cut": "failed",
    "abandoned": "cancelled",
}


class Books:
    """All books of one router. What reads them closes first what has ended: `flush`."""

    def __init__(
        self,
        *,
        metrics: Metrics,
        estimates: Estimates,
        decisions: Decisions,
        audit: Audit | None,
        traces: Traces | None = None,
    ) -> None:
        self._metrics = metrics
        self._estimates = estimates
        self._decisions = decisions
        self._audit = audit
        self._traces = traces
        self._open: Batch[Course | Ended] = Batch(self._close, most=_MOST, held_s=_HELD_S)
        metrics.before = decisions.before = self.flush
        if audit is not None:
            audit.before = self.flush

    def add(self, course: Course, answered: Deployment | None) -> None:
        """A call has ended. `answered`: the deployment that did."""
        self._open.add(course)
        if self._traces is not None:
            self._traces.finished(course, course.event(), answered)

    def refused(self, event: Event) -> None:
        """A request has ended that never became a call."""
        self._open.add((event, msgspec.json.encode(event), time.time()))

    def flush(self) -> None:
        """Close what is open now."""
        self._open.flush()

    def _close(self, closed: list[Course | Ended]) -> None:
        """Step by step over all of them: the same code in a row costs less than all of it for one after the other."""
        courses = [one for one in closed if isinstance(one, Course)]
        try:
            written = _Written.of(courses)
        except Exception:  # a mistake in one must not take the others along
            courses = [course for course in courses if _can_be_written(course)]
            written = _Written.of(courses)
        ended = list(zip(written.events, written.said, [course.at for course in courses], strict=True))
        if len(courses) < len(closed):
            ended += [one for one in closed if isinstance(one, tuple)]
            ended.sort(key=itemgetter(2))
        if self._audit is not None:  # first: of all books these must not miss anything
            self._audit.note(written.endings)
        for event, _, _ in ended:
            self._metrics.finish(event)
        log_requests(ended)
        for course, packed, said in zip(courses, written.packed, written.said, strict=True):
            if packed:
                self._keep(course, packed, said)
        self._teach(courses)

    def _keep(self, course: Course, packed: Packed, said: bytes) -> None:
        call, tenant = course.call, course.call.tenant
        past = Kept(call.id, call.model, tenant.digest, packed, msgspec.Raw(said), course.tries, course.spare)
        self._decisions.keep(tenant.name, past, tenant.policy.plan.names)

    def _teach(self, courses: list[Course]) -> None:
        by_deployment: dict[str, list[Course]] = {}
        for course in courses:
            if _teaches(course):
                by_deployment.setdefault(course.deployment or "", []).append(course)
        for id, some in by_deployment.items():
            for course in some[:: -(-len(some) // _TAUGHT)]:
                self._learn(id, course)

    def _learn(self, id: str, course: Course) -> None:
        reply, call = course.reply, course.call
        assert reply is not None  # noqa: S101  (it teaches)
        self._estimates.learn(
            id,
            prompt_tokens=reply.usage.prompt_tokens,
            output_tokens=max(1, reply.usage.completion_tokens),
            cached_tokens=reply.usage.cached_tokens,
            queue=course.queue,
            ttft_ms=course.ttft_ms if call.stream else None,
            total_ms=course.total_ms,
        )


class _Written(NamedTuple):
    """What the books say of some calls, in their order. Making it changes nothing."""

    events: list[Event]
    said: list[bytes]
    """The events as JSON."""
    packed: list[Packed]
    """Decisions; empty where none was made."""
    endings: list[tuple[Call, Decision | None, Ending, float]]
    """Of those that are still to be recorded: for `Audit.note`."""

    @classmethod
    def of(cls, courses: list[Course]) -> _Written:
        events = [course.event() for course in courses]
        said = [msgspec.json.encode(event) for event in events]
        calls = [course.call for course in courses]
        packed = [pack_made(call.decided, call.packed, call.tenant.policy.plan.names) for call in calls]
        unrecorded = [course for course in courses if not course.call.tenant.policy.regulated]
        return cls(events, said, packed, [(c.call, c.decision, ending(c), c.at) for c in unrecorded])


def _can_be_written(course: Course) -> bool:
    try:
        _Written.of([course])
    except Exception as error:
        log.exception("books_failed", request_id=course.call.id, error=type(error).__name__)
        return False
    return True


def _teaches(course: Course) -> bool:
    """It says how long answers of its deployment take: asked at once, answered whole, its tokens known."""
    reply = course.reply
    if course.outcome != "ok" or reply is None or course.deployment is None:
        return False
    return reply.usage.known and not course.tries and course.call.raw is None


def ending(course: Course) -> Ending:
    """How a call ended, as its record says."""
    call, reply, error = course.call, course.reply, course.error
    run, tokens = _parted(reply.run) if reply is not None and reply.run is not None else (None, None)
    return Ending(
        _RESULTS[course.outcome],
        error.status if error else reply.status if reply else 499,
        course.deployment,
        course.transport,
        (error.code or error.type) if error else reply.error if reply else None,
        reply.usage if reply else Usage(),
        run,
        course.fingerprints if course.transport == "cache" else {},
        tuple([t.deployment for t in course.tries]) if course.tries else (),
        course.cost,
        course.ttft_ms if call.stream else None,
        course.total_ms,
        _kept_answer(course),
        None if reply is None or reply.hint is None else reply.hint.encode(),
        # A guardrail may have changed the answer since: the record must not tell what the caller was not to see.
        None if call.guardrails else tokens,
        reply is not None and reply.hint_left_out,
    )


def _kept_answer(course: Course) -> bytes | None:
    tenant = course.call.tenant
    if tenant.audit.content == "none" and not tenant.policy.regulated:
        return None
    return course.answer if course.answer is not None or course.reply is None else course.reply.body or None


def _parted(run: msgspec.Raw) -> tuple[msgspec.Raw, bytes | None]:
    """A worker's account as a record may show it, and the token ids, which are content."""
    if b'"tokens":' not in bytes(run):
        return run, None
    members = msgspec.json.decode(run, type=dict[str, msgspec.Raw])
    tokens = bytes(members.pop("tokens"))
    return msgspec.Raw(msgspec.json.encode(members)), tokens
