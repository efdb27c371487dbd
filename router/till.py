"""The till: money and rates of requests. Reserved before a deployment is asked, billed when the answer has ended."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from policies.facts import Decision, Facts
from router.asked import answers
from router.bills import Tariff, reserved
from router.call import Call, Reply
from router.course import Course
from router.errors import TooManyRequests, Unaffordable
from router.limits import Grant, Limits
from router.tenants import Tenant


@dataclass(frozen=True, slots=True)
class Till:
    """Limits of tenants, and what each deployment charges."""

    limits: Limits
    tariffs: Mapping[str, Tariff]
    aliases: Mapping[str, str] = field(default_factory=dict)
    """By deployment id."""

    def admit(self, call: Call, facts: Facts, decision: Decision) -> Awaitable[Grant]:
        """Reserve a request and what its first choice is expected to cost: calls sent together do not all pass.

        Where that exceeds the budget and another survivor does not, that one's cost is reserved. Raises
        TooManyRequests.
        """
        tokens = reserved_tokens(call, facts)
        if call.tenant.max_budget is None or not decision.ranked:
            return self.limits.admit(call.tenant, tokens)
        return self._admit_cost(call.tenant, tokens, [self.cost(call, facts, id) for id in decision.ranked])

    async def _admit_cost(self, tenant: Tenant, tokens: int, costs: list[float]) -> Grant:
        least = min(costs)
        try:
            return await self.limits.admit(tenant, tokens, costs[0])
        except TooManyRequests as full:
            if full.headers.get("x-twolane-limit") != "max_budget" or least >= costs[0]:
                raise
        return await self.limits.admit(tenant, tokens, least)

    def cost(self, call: Call, facts: Facts, deployment: str) -> float:
        """USD to reserve for an answer of this deployment."""
        return reserved(call, facts, deployment, self.tariff(deployment, call.model))

    def tariff(self, deployment: str, model: str) -> Tariff:
        """What a deployment charges for the model that it is asked for."""
        tariff = self.tariffs[deployment]
        return tariff if tariff.by_model is None else tariff.of(self.aliases.get(model, model))

    async def afford(self, course: Course, call: Call, deployment: str) -> None:
        """Reserve what this deployment costs beyond what was reserved. Raises Unaffordable.

        `call` names the group that is asked, be it a fallback. A relay's halves were reserved with the whole.
        """
        grant, facts = course.grant, course.facts
        if grant is None or grant.settled or facts is None or course.call.tenant.max_budget is None:
            return
        cost = self.cost(call, facts, deployment)
        if not await self.limits.afford(grant, cost):
            budget = course.call.tenant.max_budget
            raise Unaffordable(
                f"{deployment} is expected to cost {cost:.6g} USD, and the budget of {budget} USD has no room for it.",
                headers={"x-twolane-limit": "max_budget"},
            )

    async def settle(self, course: Course, tokens: int) -> float | None:
        """Bill the answer of a course that has ended, and give back what it did not use.

        USD; None where nobody can tell, and then what was reserved stands.
        """
        reply, grant = course.reply, course.grant
        cost = self._own(course) if reply is None or reply.cost is None else reply.cost(reply)
        if grant is not None and not grant.settled:
            await self.limits.settle(grant, tokens, grant.cost if cost is None else cost)
        return cost

    def _own(self, course: Course) -> float | None:
        """USD for what the very deployment of a course answered; 0 without an answer, None where nobody can tell."""
        cost = self.biller(course)
        return 0.0 if course.reply is None or cost is None else cost(course.reply)

    def biller(self, course: Course) -> Callable[[Reply], float | None] | None:
        """The same for a reply that is given to it: it knows neither reply nor course, which might hold it."""
        if course.deployment is None:
            return None
        return partial(_bill, self.tariff(course.deployment, course.spare or course.call.model), course.asked)


def _bill(tariff: Tariff, asked: float, reply: Reply) -> float | None:
    return tariff.bill(reply, time.perf_counter() - asked)


def reserved_tokens(call: Call, facts: Facts) -> int:
    """Tokens a call is charged before it runs: what it asks, and what it allows in answers if it says so."""
    if facts.open_ended or not facts.output_tokens:
        return facts.prompt_tokens
    return facts.prompt_tokens + facts.output_tokens * answers(call)
