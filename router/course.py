"""The course of one call: what was decided, what was tried, what came of it. Filled by the dispatcher."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from policies.facts import Decision, Estimate, Facts
from policies.rules import REASONS
from router.call import Call, Reply
from router.errors import RouterError, TransportError
from router.facts_record import DecisionRecord, Made, Packed, Said, pack_decision, pack_made
from router.limits import Grant
from router.telemetry import Event, Outcome

View = dict[str, Any]
"""Of a decision, for JSON."""
_YOUNG = 32


class Try(msgspec.Struct, frozen=True, gc=False):
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
    fingerprint: str = ""
    """Of what answered: the pair's on the cache lane, else that of the deployment's entry."""
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
        self.estimate, self.queue = None, 0
        for facts in self.facts.deployments if self.facts is not None else ():
            if facts.id == deployment:
                self.estimate, self.queue = facts.estimate, facts.in_flight
                return

    def past(self, event: Event) -> Callable[[], Kept] | None:
        """What to keep of it, to be made later; None where nothing was decided."""
        call = self.call
        if not call.decided:
            return None
        asked = (call.id, call.model, call.tenant.digest)
        rules = call.tenant.policy.plan.names
        return partial(_kept_of, asked, call.decided, call.packed, rules, event, self.tries, self.spare)

    def event(self, outcome: Outcome, error: RouterError | None, cost: float | None, limit: str | None) -> Event:
        """The one log event of this call."""
        reply, started = self.reply, self.call.started
        event = Event(
            request_id=self.call.id,
            tenant=self.call.tenant.name,
            model=self.call.model,
            outcome=outcome,
            status=error.status if error else reply.status if reply else 499,
            total_ms=round((time.perf_counter() - started) * 1000, 3),
            stream=self.call.stream,
            deployment=self.deployment,
            transport=self.transport,
            reason=self.decision.reason if self.decision else None,
            error=(error.code or error.type) if error else reply.error if reply else None,
            limit=limit,
            retries=self.retries if self.tries else 0,
            fallbacks=self.fallbacks,
            cost=cost or None,
        )
        if reply is not None:
            if self.call.stream:
                event.ttft_ms = _rounded(self.ttft_ms)
            if reply.usage.known:
                event.prompt_tokens = reply.usage.prompt_tokens
                event.completion_tokens = reply.usage.completion_tokens
                event.cached_tokens = reply.usage.cached_tokens
            elif reply.usage.unreadable:
                event.usage = "unreadable"
            if reply.hint_left_out:
                event.hint = "left_out"
            if self.transport == "cache" and reply.usage.known:
                event.kv_reused, event.kv_total = reply.usage.cached_tokens, reply.usage.prompt_tokens
        if self.estimate is not None:
            event.ttft_p90_ms, event.total_p90_ms = round(self.estimate.ttft_p90, 3), round(self.estimate.total_p90, 3)
        return event


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 3)


class Past(msgspec.Struct, gc=False):
    """What is kept of a decision: nothing of what was asked or answered."""

    id: str
    model: str
    policy: str
    """Digest."""
    decided: list[tuple[Facts | None, DecisionRecord]]
    """The first decision; after it those of fallback groups and of a relay's halves."""
    happened: Event | None = None
    tries: list[Try] = []
    spare: str | None = None

    def view(self, rules: Sequence[str]) -> View:
        """As `/decide` and `/decisions/{id}` show it: what every rule said, and estimates, by deployment."""
        first, *later = [_decided(facts, decision, rules) for facts, decision in self.decided]
        shown = {"id": self.id, "object": "twolane.decision", "model": self.model, "policy": self.policy, **first}
        if later:
            models = [decision.model for _, decision in self.decided[1:]]
            shown["later"] = [{"model": model, **view} for model, view in zip(models, later, strict=True)]
        if self.happened is not None:
            tries = [msgspec.structs.asdict(tried) for tried in self.tries]
            shown |= {"happened": msgspec.structs.asdict(self.happened), "tries": tries, "spare": self.spare}
        return shown


class Kept(msgspec.Struct, gc=False):
    """A `Past` whose decisions are JSON already."""

    id: str
    model: str
    policy: str
    decided: Packed
    happened: Event | None
    tries: list[Try]
    spare: str | None


def _kept_of(
    asked: tuple[str, str, str],
    decided: Made,
    packed: Packed,
    rules: Sequence[str],
    event: Event,
    tries: list[Try],
    spare: str | None,
) -> Kept:
    return Kept(*asked, pack_made(decided, packed, rules), event, tries, spare)


def decision_view(call: Call, facts: Facts | None, decision: Decision) -> View:
    """A decision that was not run, as `/decide` shows it; no content."""
    rules = call.tenant.policy.plan.names
    return Past(call.id, call.model, call.tenant.digest, [(facts, pack_decision(decision, rules))]).view(rules)


def _decided(facts: Facts | None, decision: DecisionRecord, rules: Sequence[str]) -> View:
    known = {d.id: d for d in facts.deployments} if facts else {}
    chosen = decision.ranked[0] if decision.ranked else None
    return {
        "deployment": chosen,
        "transport": next((j.transport for j in decision.judged if j.deployment == chosen), None),
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
                "verdicts": _in_full(judged.verdicts, rules),
                "estimate": known[judged.deployment].estimate if judged.deployment in known else None,
            }
            for judged in decision.judged
        ],
    }


def _in_full(verdicts: list[Said], rules: Sequence[str]) -> list[View]:
    """The verdict of every rule by its name; where it is more than `ok`, with the sentence for people."""
    told = {said.rule: said for said in verdicts}
    return [_said(told.get(rule) or Said(rule, True, "ok", "")) for rule in rules]


def _said(said: Said) -> View:
    told: View = msgspec.structs.asdict(said)
    return told if said.code == "ok" else {**told, "means": REASONS[said.code]}


_past = msgspec.json.Decoder(Past)


class Decisions:
    """Past decisions, encoded, so that thousands cost neither the collector nor much memory. The oldest leave.

    The youngest wait to be encoded a few at a time: in a row that costs half of what it costs amid a request.
    """

    def __init__(self, most: int = 10_000, most_bytes: int = 4 * 2**20) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        # Where the oldest leave one by one, a plain dict looks for the next among all that have left.
        self._kept: OrderedDict[str, tuple[str, bytes, tuple[str, ...]]] = OrderedDict()
        self._young: list[tuple[str, Callable[[], Past | Kept], tuple[str, ...]]] = []

    def keep(self, tenant: str, made: Callable[[], Past | Kept], rules: tuple[str, ...]) -> None:
        """Remember a decision that was made by these rules. `made`, called later, must hold on to nothing large."""
        self._young.append((tenant, made, rules))
        if len(self._young) >= _YOUNG:
            self._encode()

    def _encode(self) -> None:
        young, self._young = self._young, []
        for tenant, made, rules in young:
            past = made()
            body = msgspec.json.encode(past)
            self._kept[past.id] = (tenant, body, rules)
            self._bytes += len(body)
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            _, (_, gone, _) = self._kept.popitem(last=False)
            self._bytes -= len(gone)

    def find(self, id: str, tenant: str) -> bytes | None:
        """The decision as JSON; None where there is none of that id that is this tenant's own."""
        self._encode()
        found = self._kept.get(id)
        if found is None or found[0] != tenant:
            return None
        return msgspec.json.encode(_past.decode(found[1]).view(found[2]))
