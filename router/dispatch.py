"""The dispatcher: facts, decision, transport, fallback. Knows no HTTP and no body beyond what the facts tell."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from policies.decide import decide
from policies.facts import Decision, Facts
from router import fallbacks
from router.audit import Audit
from router.books import Books, ending
from router.call import Call, Reply
from router.conversations import Conversations, identity, response
from router.course import Course, Decisions
from router.deployments import Deployment
from router.errors import (
    Final,
    Refused,
    RouterError,
    TransportError,
    Unaffordable,
    Unavailable,
    UnknownModel,
    Unrecorded,
)
from router.gather import Gatherer
from router.guardrails import Guardrails
from router.health import Health, wait_told
from router.lane import CacheLane
from router.limits import Grant
from router.places import Allowance, Place, give_back, take
from router.refusal import refusal
from router.retries import kind_of
from router.settings import Settings
from router.shadow import Shadow
from router.telemetry import Metrics, Outcome
from router.till import Till, reserved_tokens
from router.traces import Traces, follow
from router.transports.base import Transport

LONGEST_WAIT = 3.0
"""Seconds that a request may be made to wait for another try; a longer Retry-After is the caller's to honour."""
_FIRST_WAIT = 0.2
_NOT_HERE_AGAIN = frozenset(
    {"upstream_auth", "upstream_billing", "upstream_not_found", "insufficient_quota", "stopped", "pair_demoted"}
)
"""Faults that the same deployment will show again, though another may not."""


class _Again(msgspec.Struct):
    """A deployment that may be asked once more, and not before when (`perf_counter`)."""

    deployment: Deployment
    group: str
    left: int
    not_before: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatcher:
    """Runs calls. Everything it needs is built in `app` and closed there."""

    settings: Settings
    transports: Mapping[str, Transport]
    """By deployment id."""
    deployments: Mapping[str, Deployment]
    """By id."""
    gatherer: Gatherer
    health: Health
    till: Till
    metrics: Metrics
    books: Books
    lane: CacheLane
    guardrails: Guardrails
    allowances: Mapping[str, Allowance] = field(default_factory=dict)
    """Limits of deployments that have some, by id."""
    decisions: Decisions = field(default_factory=Decisions)
    conversations: Conversations = field(default_factory=Conversations)
    traces: Traces | None = None
    audit: Audit | None = None
    """None keeps no records, and then regulated tenants get no answers."""
    shadow: Shadow | None = None
    """Compares some answers of the cache lane with text."""

    async def label(self, call: Call) -> None:
        """Find the labels that the tenant's policy asks for; before `decide`. Raises BadRequest."""
        if call.tenant.labeller is not None:
            call.labels = await call.tenant.labeller.labels(call)

    def decide(self, call: Call) -> tuple[Facts, Decision]:
        """The decision for a call, not run. Raises UnknownModel and BadRequest."""
        facts = self._facts(call, call.model)
        return facts, decide(call.tenant.policy, facts)

    async def dispatch(self, call: Call) -> Course:
        """Run a call until its first frame is certain. Whoever gets the Course owes it `finish`.

        Raises RouterError; the books of a call that raises are closed.
        """
        course = Course(call)
        if call.trace is not None or self.traces is not None:
            onward = self.settings.litellm_settings.forward_traceparent_to_llm_provider
            follow(call, self.traces, onward=onward)
        try:
            if self.guardrails or "guardrails" in call.fields or call.tenant.guardrails:
                await self.guardrails.request(call)
            if call.tenant.labeller is not None:
                await self.label(call)
            course.facts, course.decision = self.decide(call)
            call.decided.append((course.facts, course.decision))
            refused = None if course.decision.ranked else refusal(course.decision)
            if refused is not None and not self._spares(course.decision.model, refused, call):
                raise refused
            course.grant = await self.till.admit(call, course.facts, course.decision)
            if call.tenant.policy.regulated:
                await self._recorder().intent(call, course.decision)
            course.reply = await self._run(course, refused)
            if call.guardrails:
                await self.guardrails.answer(call, course.reply)
            if self.shadow is not None and course.transport == "cache":
                course.sampled = self.shadow.wants(call, self._pair(course))
        except BaseException as error:
            await self.finish(course, ended_by(error), error if isinstance(error, RouterError) else None)
            raise
        return course

    async def run_text(self, call: Call) -> Reply:
        """Half of a relay: `call.model` is a group, answered by its plain text deployments under the same policy."""
        course = Course(call)
        course.facts = self._facts(call, call.model, relayed=True)
        course.decision = decide(call.tenant.policy, course.facts)
        call.decided.append((course.facts, course.decision))
        reply = await self._run(course, refusal(course.decision), relayed=True)
        course.reply, reply.cost = reply, self.till.biller(course)
        if course.deployment is not None:
            self.health.succeeded(course.deployment)
            self.metrics.end(course.deployment)
        if reply.frames is None:
            await self._give_places_back(call, reply)
        return reply

    async def finish(
        self, course: Course, outcome: Outcome, error: RouterError | None = None, answer: bytes | None = None
    ) -> None:
        """Close the books once: slot, tokens and money, estimates, health, metrics, log and record.

        Await it before the answer's last byte. Raises Unrecorded when a regulated answer has no record; the caller
        must then get none.
        """
        if course.finished:
            return
        course.finished = True
        if course.deployment is not None:
            self.metrics.end(course.deployment)
        if self.lane.pairs or self.lane.running:
            self.lane.left(course.call, course.deployment, outcome)
        course.cost = await self.till.settle(course, _used_tokens(course, outcome))
        if course.call.places:
            await self._give_places_back(course.call)
        course.answer = answer
        course.ends(outcome, error)
        try:
            if self._regulated(course.call):
                await self._record(course)
                course.ends(outcome, error)  # later than the record says, which had to be written
        except Unrecorded as unrecorded:
            course.ends("error", unrecorded)
            raise
        finally:
            self._learn(course)
            self.books.add(course, self.deployments.get(course.deployment or ""))

    # -- the way of one call

    def _facts(self, call: Call, model: str, *, relayed: bool = False) -> Facts:
        group = self.settings.group(model)
        if group is None:
            raise UnknownModel(f"The model {model!r} does not exist.", param="model")
        members = self.settings.groups[group]
        if relayed:
            members = tuple(d for d in members if d.kind not in ("relay", "cache"))
        return self.gatherer.facts(call, members, group)

    async def _run(self, course: Course, refused: RouterError | None, relayed: bool = False) -> Reply:
        """The group asked for, then its fallbacks, each once; at last those that may be asked again."""
        assert course.decision is not None  # noqa: S101  (dispatch and run_text set it)
        group, decision, call = course.decision.model, course.decision, course.call
        seen, queue, again = {group}, list[str](), list[_Again]()
        error: RouterError | None = refused
        while True:
            if error is None:
                try:
                    return await self._first_round(course, call, decision, again)
                except TransportError as failure:
                    error = failure
            queue += self._spares(group, error, call)
            spare = None if relayed else self._spare(course, queue, seen)
            if spare is None:
                break
            group, call, decision = spare
            course.fallbacks += 1
            error = None
        return await self._later_rounds(course, error, again)

    def _spares(self, group: str, error: RouterError, call: Call) -> tuple[str, ...]:
        return fallbacks.after(self.settings.routing, group, error, call.model)

    def _spare(self, course: Course, queue: list[str], seen: set[str]) -> tuple[str, Call, Decision] | None:
        """The next fallback group that was not visited and that policy lets answer."""
        while queue and len(seen) <= self.settings.routing.max_fallbacks:
            model = queue.pop(0)
            group = self.settings.group(model)
            if group is None or group in seen:
                continue
            seen.add(group)
            call = replace(course.call, model=model)
            facts = self._facts(call, model)
            decision = decide(call.tenant.policy, facts)
            call.decided.append((facts, decision))
            if decision.ranked:
                course.facts = facts
                return group, call, decision
        return None

    async def _first_round(self, course: Course, call: Call, decision: Decision, again: list[_Again]) -> Reply:
        """Every survivor of a group once, in order. Raises the last failure."""
        last: TransportError | None = None
        for id in decision.ranked:
            deployment = self.deployments[id]
            try:
                if call.tenant.max_budget is not None:
                    await self.till.afford(course, call, id)
                return await self._try(course, call, deployment)
            except Refused:
                raise
            except Unaffordable as error:
                course.failed(id, error)
                last = last or error
            except TransportError as error:
                last = error
                self._maybe_again(again, deployment, call.model, error)
        raise last or Unavailable("No deployment could be asked.")

    def _maybe_again(self, again: list[_Again], deployment: Deployment, model: str, error: TransportError) -> None:
        group = self.settings.group(model) or model
        routing = self.settings.routing
        named = model if model in routing.group_retry_policy else group
        left = routing.retries(named, kind_of(error), deployment.num_retries)
        if left > 0 and (wait := self._wait(error, 0)) is not None:
            again.append(_Again(deployment, model, left, time.perf_counter() + wait))

    def _wait(self, error: TransportError, round: int) -> float | None:
        """Seconds before the same deployment is asked again; None where that cannot help or lasts too long."""
        if error.code in _NOT_HERE_AGAIN or error.status == 400:
            return None
        told = wait_told(error) or 0.0
        if told > LONGEST_WAIT:
            return None
        backoff: float = _FIRST_WAIT * 2**round * random.uniform(0.8, 1.2)  # noqa: S311  (spreads retries)
        return min(max(told, backoff, self.settings.routing.retry_after), LONGEST_WAIT)

    async def _later_rounds(self, course: Course, error: RouterError | None, again: list[_Again]) -> Reply:
        """Ask once more those that a pause may have cured, the soonest first, until none has a try left."""
        rounds = 0
        while again:
            again.sort(key=lambda entry: entry.not_before)
            entry = again.pop(0)
            if self.health.cooling(entry.deployment.id) and again:
                continue
            await asyncio.sleep(max(0.0, entry.not_before - time.perf_counter()))
            self.metrics.retried(entry.deployment.id)
            call = course.call if entry.group == course.call.model else replace(course.call, model=entry.group)
            try:
                return await self._try(course, call, entry.deployment)
            except Refused:
                raise
            except TransportError as failure:
                error = failure
                rounds += 1
                wait = self._wait(failure, rounds)
                if entry.left > 1 and wait is not None:
                    again.append(replace(entry, left=entry.left - 1, not_before=time.perf_counter() + wait))
        raise error or Unavailable("No deployment could be asked.")

    async def _try(self, course: Course, call: Call, deployment: Deployment) -> Reply:
        """One attempt. The deployment that answers counts as busy until `finish`."""
        course.chose(deployment.id)
        grant = await self._place(course, call, deployment) if self.allowances else None
        self.metrics.begin(deployment.id)
        asked = time.perf_counter()
        try:
            if self.lane.pairs:
                self.lane.enter(call, deployment.id)
            meant = self.settings.routing.aliases.get(call.model)
            reply = await self.transports[deployment.id].send(call if meant is None else replace(call, model=meant))
        except BaseException as error:
            self.metrics.end(deployment.id)
            if isinstance(error, TransportError):
                self._failed(course, deployment.id, error)
            if grant is not None:
                await self.till.limits.settle(grant, 0)
            if isinstance(error, TransportError) and call.raw is not None and call.raw.spent:
                raise Final.of(error) from error
            raise
        finally:
            course.upstream_s += time.perf_counter() - asked
        if grant is not None:
            call.places.append(Place(grant, reply, self.till.tariff(deployment.id, call.model), asked))
        course.deployment, course.transport, course.asked = deployment.id, deployment.transport, asked
        pair = course.fingerprints.get("pair") if course.transport == "cache" else None
        course.fingerprint = pair or deployment.digest
        course.spare = call.model if call.model != course.call.model else None
        return reply

    async def _place(self, course: Course, call: Call, deployment: Deployment) -> Grant | None:
        """Its place on a deployment that has limits of its own. Raises TransportError where that one is full."""
        allowance = self.allowances.get(deployment.id)
        if allowance is None:
            return None
        facts = course.facts
        assert facts is not None  # noqa: S101  (nothing is tried before it is decided)
        cost = 0.0 if allowance.max_budget is None else self.till.cost(call, facts, deployment.id)
        try:
            return await take(self.till.limits, allowance, reserved_tokens(call, facts), cost)
        except TransportError as error:
            course.failed(deployment.id, error)
            raise

    async def _give_places_back(self, call: Call, only: Reply | None = None) -> None:
        """Settle the places of a call, or only that of one half of a relay."""
        for place in [p for p in call.places if only is None or p.reply is only]:
            call.places.remove(place)
            await give_back(self.till.limits, place)

    def _failed(self, course: Course, deployment: str, error: TransportError) -> None:
        course.failed(deployment, error)
        self.lane.failed(course.call, deployment, error)
        if self.health.failed(deployment, error):
            self.metrics.cooled(deployment)

    # -- the books

    def _regulated(self, call: Call) -> bool:
        return call.tenant.policy.regulated

    def _recorder(self) -> Audit:
        if self.audit is None:
            raise Unrecorded("No audit log is open, so there is no answer for a regulated tenant.")
        return self.audit

    def keeps_answer(self, call: Call) -> bool:
        """The record holds what was answered, in whole or as a digest."""
        return self.audit is not None and (self._regulated(call) or call.tenant.audit.content != "none")

    def holds_stream(self, call: Call) -> bool:
        """Each piece of a streamed answer must be on record before it is relayed."""
        hold = call.tenant.audit.hold_stream
        return self._regulated(call) if hold is None else hold

    async def hold(self, course: Course, piece: bytes) -> None:
        """Record a piece of a streamed answer. Raises Unrecorded; the caller must then not get it."""
        audit = self._recorder()
        reply = course.reply
        hint = reply.hint if reply is not None and not course.held else None
        await audit.chunk(course.call, course.held, piece, hint)
        course.held += 1

    async def _record(self, course: Course) -> None:
        """Of a regulated tenant. Raises Unrecorded."""
        if self.audit is not None:
            await self.audit.outcome(course.call, course.decision, ending(course))
        elif course.outcome == "ok":
            self._recorder()

    def _pair(self, course: Course) -> str | None:
        """Of the cache lane: which pair answered."""
        params = self.deployments[course.deployment].cache_params if course.deployment is not None else None
        return params.pair if params is not None else None

    def _learn(self, course: Course) -> None:
        """What the next request must know: who is well, where conversations are."""
        reply, id = course.reply, course.deployment
        if reply is None or id is None:
            return
        if course.outcome == "cut":
            error = Unavailable("cut", code=reply.error)
            if self.health.failed(id, error):
                self.metrics.cooled(id)
        if course.outcome != "ok":
            return
        self.health.succeeded(id)
        if course.sampled and self.shadow is not None and (pair := self._pair(course)) is not None:
            self.shadow.offer(course, pair)
        if course.call.tenant.policy.terms.sticky:
            self.conversations.answered(identity(course.call), id)
        if reply.id is not None:
            self.conversations.answered(response(course.call, reply.id), id)


def ended_by(error: BaseException) -> Outcome:
    """How a call ended that raised before its first frame."""
    if isinstance(error, asyncio.CancelledError):
        return "abandoned"
    return "refused" if isinstance(error, RouterError) and error.status < 500 else "error"


def _used_tokens(course: Course, outcome: Outcome) -> int:
    reply = course.reply
    if reply is None:
        return 0
    if reply.usage.known:
        return reply.usage.prompt_tokens + reply.usage.completion_tokens
    return course.facts.prompt_tokens if course.facts else 0
