"""The course of one call: what was decided, what was tried, what came of it. Filled by the dispatcher."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from mmap import mmap
from typing import Any

import msgspec

from policies.facts import Decision, Estimate, Facts
from policies.rules import REASONS
from router.call import Call, Reply
from router.errors import RouterError, TooManyRequests, TransportError
from router.facts_record import DecisionRecord, Packed, Said, pack_decision
from router.limits import Grant
from router.telemetry import Event, Outcome

View = dict[str, Any]
"""Of a decision, for JSON."""


class Try(msgspec.Struct, frozen=True, gc=False):
    """One attempt that failed before the first frame."""

    deployment: str
    code: str
    status: int


class Course(msgspec.Struct):
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
    tries: list[Try] = []
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
    outcome: Outcome = "abandoned"
    error: RouterError | None = None
    """What the caller was told in place of an answer."""
    answer: bytes | None = None
    """Of a stream, where it is kept: what the record holds of it."""
    at: float = 0.0
    """Unix seconds of its end."""
    total_ms: float = 0.0

    def ends(self, outcome: Outcome, error: RouterError | None) -> None:
        """It is over."""
        self.outcome, self.error = outcome, error
        self.at, self.total_ms = time.time(), (time.perf_counter() - self.call.started) * 1000

    @property
    def retries(self) -> int:
        """Attempts after the first."""
        return len(self.tries) if self.deployment is not None else max(0, len(self.tries) - 1)

    @property
    def fingerprints(self) -> dict[str, str]:
        """Digests of what answered on the cache lane."""
        facts = self.facts.deployments if self.facts else ()
        pair = next((d.pair for d in facts if d.id == self.deployment), None)
        return {"pair": pair.fingerprint} if pair is not None and pair.fingerprint is not None else {}

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

    def event(self) -> Event:
        """The one log event of this call."""
        call, reply, error, decision = self.call, self.reply, self.error, self.decision
        event = Event(
            call.id,
            call.tenant.name,
            call.model,
            self.outcome,
            error.status if error else reply.status if reply else 499,
            round(self.total_ms, 3),
            call.stream,
            self.deployment,
            self.transport,
            decision.reason if decision else None,
            (error.code or error.type) if error else reply.error if reply else None,
        )
        event.cost = self.cost or None
        if self.tries:
            event.retries = self.retries
        event.fallbacks = self.fallbacks
        if isinstance(error, TooManyRequests):
            event.limit = error.headers.get("x-twolane-limit")
        if reply is not None:
            usage = reply.usage
            if call.stream:
                ttft = self.ttft_ms
                event.ttft_ms = None if ttft is None else round(ttft, 3)
            if usage.known:
                event.prompt_tokens = usage.prompt_tokens
                event.completion_tokens = usage.completion_tokens
                event.cached_tokens = usage.cached_tokens
                if self.transport == "cache":
                    event.kv_reused, event.kv_total = usage.cached_tokens, usage.prompt_tokens
            elif usage.unreadable:
                event.usage = "unreadable"
            if reply.hint_left_out:
                event.hint = "left_out"
        if self.estimate is not None:
            event.ttft_p90_ms, event.total_p90_ms = round(self.estimate.ttft_p90, 3), round(self.estimate.total_p90, 3)
        return event


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
    """A `Past` whose parts are JSON already."""

    id: str
    model: str
    policy: str
    decided: Packed
    happened: msgspec.Raw
    tries: list[Try]
    spare: str | None


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
    """Past decisions, encoded, in one ring of bytes: thousands cost neither the collector nor holes in the heap. The
    oldest leave.
    """

    def __init__(self, most: int = 10_000, most_bytes: int = 4 * 2**20) -> None:
        self.before: Callable[[], None] | None = None
        """Called before one is looked for: puts down those of requests that have just ended."""
        self._most = most
        self._size = most_bytes
        self._ring = mmap(-1, most_bytes)  # takes memory as it fills, not before
        self._at = 0
        """Where the next is put: what follows is the oldest."""
        # Where the oldest leave one by one, a plain dict looks for the next among all that have left.
        self._kept: OrderedDict[str, tuple[str, int, int, tuple[str, ...]]] = OrderedDict()
        """Tenant, place in the ring and rules; the oldest first."""

    def keep(self, tenant: str, past: Past | Kept, rules: tuple[str, ...]) -> None:
        """Remember a decision that was made by these rules; one that is larger than all there is room for is not."""
        body = msgspec.json.encode(past)
        at, end = self._at, self._at + len(body)
        if end > self._size:
            self._forget(at, self._size)
            at, end = 0, len(body)
            if end > self._size:
                return
        self._forget(at, end)
        self._ring[at:end] = body
        self._at = end
        kept = self._kept
        kept.pop(past.id, None)  # told again, it is the youngest
        kept[past.id] = (tenant, at, end, rules)
        if len(kept) > self._most:
            kept.popitem(last=False)

    def _forget(self, at: int, end: int) -> None:
        """The oldest, as far as they begin within these bytes."""
        kept = self._kept
        while kept:
            oldest = next(iter(kept))
            if not at <= kept[oldest][1] < end:
                return
            del kept[oldest]

    def find(self, id: str, tenant: str) -> bytes | None:
        """The decision as JSON; None where there is none of that id that is this tenant's own."""
        if self.before is not None:
            self.before()
        found = self._kept.get(id)
        if found is None or found[0] != tenant:
            return None
        _, at, end, rules = found
        return msgspec.json.encode(_past.decode(self._ring[at:end]).view(rules))
