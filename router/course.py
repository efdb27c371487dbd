"""The course of one call: what was decided, what was tried, what came of it. Filled by the dispatcher."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from policies.facts import Decision, Estimate, Facts
from router.call import Call, Reply
from router.errors import RouterError, TransportError
from router.limits import Grant
from router.telemetry import Event, Outcome


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
    costs: tuple[float, float] = (0.0, 0.0)
    """USD per prompt and per completion token of the deployment that answered."""
    estimate: Estimate | None = None
    """What was predicted for the deployment that answered."""
    queue: int = 0
    """Requests it had when it was asked."""
    tries: list[Try] = field(default_factory=list)
    fallbacks: int = 0
    """Model groups visited after the first."""
    spare: str | None = None
    """The group that answered in place of the one asked for."""
    finished: bool = False

    @property
    def retries(self) -> int:
        """Attempts after the first."""
        return len(self.tries) if self.deployment is not None else max(0, len(self.tries) - 1)

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
            if reply.first_frame is not None:
                event.ttft_ms = (reply.first_frame - started) * 1000
            if reply.usage.known:
                event.prompt_tokens = reply.usage.prompt_tokens
                event.completion_tokens = reply.usage.completion_tokens
                event.cached_tokens = reply.usage.cached_tokens
            if self.transport == "cache" and reply.usage.known:
                event.kv_reused, event.kv_total = reply.usage.cached_tokens, reply.usage.prompt_tokens
        if self.estimate is not None:
            event.ttft_p90_ms, event.total_p90_ms = self.estimate.ttft_p90, self.estimate.total_p90
        return event


def decision_view(call: Call, facts: Facts | None, decision: Decision) -> dict[str, Any]:
    """A decision as `/decide` and `/decisions/{id}` show it: verdicts and estimates by deployment, no content."""
    known = {d.id: d for d in facts.deployments} if facts else {}
    return {
        "id": call.id,
        "object": "twolane.decision",
        "model": call.model,
        "deployment": decision.chosen,
        "transport": next((j.transport for j in decision.judged if j.deployment == decision.chosen), None),
        "reason": decision.reason,
        "budget_missed": decision.budget_missed,
        "ranked": decision.ranked,
        "policy": call.tenant.digest,
        "facts": {
            "prompt_tokens": facts.prompt_tokens,
            "output_tokens": facts.output_tokens,
            "needs": sorted(facts.needs),
            "hint": facts.hint,
            "budget_hint_ms": facts.budget_hint_ms,
            "pinned": facts.pinned,
        }
        if facts
        else None,
        "judged": [
            {
                "deployment": judged.deployment,
                "transport": judged.transport,
                "allowed": judged.allowed,
                "verdicts": judged.verdicts,
                "estimate": known[judged.deployment].estimate if judged.deployment in known else None,
            }
            for judged in decision.judged
        ],
    }


class Decisions:
    """Past decisions, encoded, so that thousands cost neither the collector nor much memory. The oldest leave."""

    def __init__(self, most: int = 10_000, most_bytes: int = 8 * 2**20) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._kept: dict[str, tuple[str, bytes]] = {}

    def keep(self, id: str, tenant: str, view: dict[str, Any]) -> None:
        """Remember one decision of one tenant."""
        body = msgspec.json.encode(view)
        self._kept[id] = (tenant, body)
        self._bytes += len(body)
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            _, gone = self._kept.pop(next(iter(self._kept)))
            self._bytes -= len(gone)

    def find(self, id: str, tenant: str) -> bytes | None:
        """The decision as JSON; None where there is none of that id that is this tenant's own."""
        found = self._kept.get(id)
        return found[1] if found is not None and found[0] == tenant else None

    def recent(self, most: int = 100) -> list[bytes]:
        """The newest first, for the dashboard."""
        ids = list(self._kept)[-most:]
        return [self._kept[id][1] for id in reversed(ids)]
