"""The course of one call: what was decided, what was tried, what came of it. Filled by the dispatcher."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from policies.facts import Decision, Estimate, Facts, Verdict
from policies.rule import OK
from policies.rules import REASONS
from router.call import Call, Reply
from router.errors import RouterError, TransportError
from router.limits import Grant
from router.telemetry import Event, Outcome

View = dict[str, Any]
"""Of a decision, for JSON."""
_YOUNG = 32


@dataclass(frozen=True, slots=True)
class Try:
    """One attempt that failed before the first frame."""

    deployment: str
    code: str
    status: int


@dataclass(slots=True)
class Course:
    """From the decision to the last byte. `finished` once all books are closed."""

    call: Call
    facts: Facts | None = None
    decision: Decision | None = None
    grant: Grant | None = None
    reply: Reply | None = None
    deployment: str | None = None
    transport: str | None = None
    asked: float = 0.0
    """`perf_counter` when the deployment that answered was asked."""
    cost: float | None = None
    """USD; known once the books are closed."""
    upstream_s: float = 0.0
    """Seconds spent waiting for deployments, up to the first frame of the one that answered."""
    estimate: Estimate | None = None
    """What was predicted for the deployment that answered."""
    queue: int = 0
    """Requests it had when it was asked."""
    tries: list[Try] = field(default_factory=list)
    fallbacks: int = 0
    """Model groups visited after the first."""
    spare: str | None = None
    """The group that answered in place of the one asked for."""
    held: int = 0
    """Pieces of a stream that were recorded before they were relayed."""
    finished: bool = False
    sampled: bool = False
    """Its answer is to be compared with the text route's afterwards."""
    said: list[bytes] | None = None
    """Frames of a streamed answer, where they are kept."""

    @property
    def retries(self) -> int:
        """Attempts after the first."""
        return len(self.tries) if self.deployment is not None else max(0, len(self.tries) - 1)

    @property
    def ttft_ms(self) -> float | None:
        """From the request's first byte to the first frame of a stream; a plain answer shows no first token."""
        reply = self.reply
        if reply is None or reply.first_frame is None or not self.call.stream:
            return None
        return (reply.first_frame - self.call.started) * 1000

    def failed(self, deployment: str, error: TransportError) -> None:
        """Remember an attempt that led to nothing."""
        self.tries.append(Try(deployment, error.code or error.type, error.status))

    def chose(self, deployment: str) -> None:
        """A deployment is about to be asked: note what was predicted of it."""
        facts = next((d for d in self.facts.deployments if d.id == deployment), None) if self.facts else None
        self.estimate = facts.estimate if facts else None
        self.queue = facts.in_flight if facts else 0

    def event(self, outcome: Outcome, error: RouterError | None, cost: float | None, limit: str | None) -> Event:
        """The one log event of this call."""
        reply, started = self.reply, self.call.started
        event = Event(
            request_id=self.call.id,
            tenant=self.call.tenant.name,
            model=self.call.model,
            outcome=outcome,
            status=error.status if error else reply.status if reply else 499,
            total_ms=(time.perf_counter() - started) * 1000,
            stream=self.call.stream,
            deployment=self.deployment,
            transport=self.transport,
            reason=self.decision.reason if self.decision else None,
            error=(error.code or error.type) if error else reply.error if reply else None,
            limit=limit,
            retries=self.retries,
            fallbacks=self.fallbacks,
            cost=cost or None,
        )
        if reply is not None:
            event.ttft_ms = self.ttft_ms
            if reply.usage.known:
                event.prompt_tokens = reply.usage.prompt_tokens
                event.completion_tokens = reply.usage.completion_tokens
                event.cached_tokens = reply.usage.cached_tokens
            if self.transport == "cache" and reply.usage.known:
                event.kv_reused, event.kv_total = reply.usage.cached_tokens, reply.usage.prompt_tokens
        if self.estimate is not None:
            event.ttft_p90_ms, event.total_p90_ms = self.estimate.ttft_p90, self.estimate.total_p90
        return event


def decision_view(call: Call, facts: Facts | None, decision: Decision) -> View:
    """A decision as `/decide` and `/decisions/{id}` show it: verdicts and estimates by deployment, no content."""
    return in_full(_view(call.id, call.model, call.tenant.digest, [(facts, decision)]), call.tenant.policy.plan.names)


def course_view(course: Course, event: Event) -> Callable[[], View] | None:
    """The same with what came of it, to be made later: holds on to the decisions, not to what was asked or answered."""
    call = course.call
    if not call.decided:
        return None
    happened = {"happened": event, "tries": course.tries, "spare": course.spare}
    return partial(_view, call.id, call.model, call.tenant.digest, call.decided, happened)


def _view(
    id: str,
    model: str,
    digest: str,
    decided: Sequence[tuple[Facts | None, Decision]],
    more: View | None = None,
) -> View:
    """The first decision; those after it, of fallback groups and of a relay's halves, stand under `later`."""
    first, *later = [_decided(facts, decision) for facts, decision in decided]
    return {
        "id": id,
        "object": "twolane.decision",
        "model": model,
        "policy": digest,
        **first,
        **(
            {"later": [{"model": d.model, **view} for (_, d), view in zip(decided[1:], later, strict=True)]}
            if later
            else {}
        ),
        **(more or {}),
    }


def _decided(facts: Facts | None, decision: Decision) -> View:
    known = {d.id: d for d in facts.deployments} if facts else {}
    return {
        "deployment": decision.chosen,
        "transport": next((j.transport for j in decision.judged if j.deployment == decision.chosen), None),
        "reason": decision.reason,
        "means": REASONS[decision.reason],
        "budget_missed": decision.budget_missed,
        "ranked": decision.ranked,
        "use_cases": decision.use_cases,
        "facts": {
            "prompt_tokens": facts.prompt_tokens,
            "output_tokens": facts.output_tokens,
            "needs": sorted(facts.needs),
            "hint": facts.hint,
            "budget_hint_ms": facts.budget_hint_ms,
            "pinned": facts.pinned,
            "labels": facts.labels,
        }
        if facts
        else None,
        "judged": [
            {
                "deployment": judged.deployment,
                "transport": judged.transport,
                "allowed": judged.deployment in decision.ranked,
                "verdicts": [(place, _told(v)) for place, v in enumerate(judged.verdicts) if v is not OK],
                "estimate": known[judged.deployment].estimate if judged.deployment in known else None,
            }
            for judged in decision.judged
        ],
    }


def in_full(view: View, rules: Sequence[str]) -> View:
    """A view with the verdict of every rule by its name; kept are only those that say more than `ok`."""
    for decided in (view, *view.get("later", ())):
        for judged in decided.get("judged", ()):
            said = dict(judged["verdicts"])
            judged["verdicts"] = [_said(rule, said.get(place)) for place, rule in enumerate(rules)]
    return view


def _told(verdict: Verdict) -> View:
    return {"allowed": verdict.allowed, "code": verdict.code, "detail": verdict.detail}


def _said(rule: str, told: View | None) -> View:
    """A verdict under its rule's name; where it is more than `ok`, with the sentence for people."""
    if told is None:
        return {"rule": rule, **_told(OK)}
    return {"rule": rule, **told, **({} if told["code"] == "ok" else {"means": REASONS[told["code"]]})}


class Decisions:
    """Past decisions, encoded, so that thousands cost neither the collector nor much memory. The oldest leave.

    The youngest wait to be encoded a few at a time: in a row that costs half of what it costs amid a request.
    """

    def __init__(self, most: int = 10_000, most_bytes: int = 4 * 2**20) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._kept: dict[str, tuple[str, bytes, tuple[str, ...]]] = {}
        self._young: list[tuple[str, str, View | Callable[[], View], tuple[str, ...]]] = []

    def keep(self, id: str, tenant: str, view: View | Callable[[], View], rules: tuple[str, ...] = ()) -> None:
        """Remember one decision, made by these rules. A view to be made later must hold on to nothing large."""
        self._young.append((id, tenant, view, rules))
        if len(self._young) >= _YOUNG:
            self._encode()

    def _encode(self) -> None:
        young, self._young = self._young, []
        for id, tenant, view, rules in young:
            body = msgspec.json.encode(view if isinstance(view, dict) else view())
            self._kept[id] = (tenant, body, rules)
            self._bytes += len(body)
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            _, gone, _ = self._kept.pop(next(iter(self._kept)))
            self._bytes -= len(gone)

    def find(self, id: str, tenant: str) -> bytes | None:
        """The decision as JSON; None where there is none of that id that is this tenant's own."""
        self._encode()
        found = self._kept.get(id)
        if found is None or found[0] != tenant:
            return None
        return msgspec.json.encode(in_full(msgspec.json.decode(found[1]), found[2]))

    def recent(self, most: int = 100) -> list[bytes]:
        """The newest first, with the verdicts that say something, for the dashboard."""
        self._encode()
        ids = list(self._kept)[-most:]
        return [self._kept[id][1] for id in reversed(ids)]
