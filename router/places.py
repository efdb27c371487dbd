"""Limits of a deployment: a place is taken before it is asked, and given back when its answer has ended.

A deployment that is full is passed over like one that fails, but nothing is held against it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from router.bills import Tariff
from router.call import Reply
from router.deployments import Deployment
from router.errors import TooManyRequests, TransportError
from router.limits import Grant, Limits

FULL = "deployment_limit"
"""Code of a deployment that has reached a limit of its own."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """A deployment's limits, as `Limits` reads them; None means unlimited."""

    name: str
    rpm_limit: int | None
    tpm_limit: int | None
    max_parallel_requests: int | None
    max_budget: float | None
    budget_duration: float | None

    @classmethod
    def of(cls, deployment: Deployment, *, rates: bool, parallel: int | None) -> Allowance | None:
        """None where it has none. With `rates` rpm and tpm are limits; `parallel` is an upstream's usual."""
        params = deployment.params
        slots = params.max_parallel_requests
        if slots is None and deployment.litellm_params is not None:
            slots = parallel
        rpm, tpm = (params.rpm, params.tpm) if rates else (None, None)
        if rpm is None and tpm is None and slots is None and params.max_budget is None:
            return None
        # No tenant's name has a colon, so the two never share a counter.
        return cls(f"deployment:{deployment.id}", rpm, tpm, slots, params.max_budget, params.budget_duration)


@dataclass(frozen=True, slots=True)
class Place:
    """One request's place on a deployment that is answering it."""

    grant: Grant
    reply: Reply
    tariff: Tariff
    asked: float
    """`perf_counter` when it was asked."""


async def take(limits: Limits, allowance: Allowance, tokens: int, cost: float) -> Grant:
    """Raises TransportError (429) where the deployment is full."""
    try:
        return await limits.admit(allowance, tokens, cost)
    except TooManyRequests as error:
        limit, wait = error.headers["x-twolane-limit"], error.headers["retry-after"]
        raise TransportError(
            f"The deployment has reached its own {limit}. Try again in {wait} s.",
            status=429,
            type="rate_limit_error",
            code=FULL,
            headers={"retry-after": wait},
        ) from None


async def give_back(limits: Limits, place: Place) -> None:
    """Count what was really used; what was reserved where nobody told."""
    reply, grant = place.reply, place.grant
    used = reply.usage
    cost = place.tariff.bill(reply, time.perf_counter() - place.asked) if reply.cost is None else reply.cost(reply)
    await limits.settle(
        grant,
        used.prompt_tokens + used.completion_tokens if used.known else grant.tokens,
        grant.cost if cost is None else cost,
    )
