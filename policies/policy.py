"""Policy: what a person allows one tenant to do, in the shape it is written in."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Annotated, Literal, Self

from policies import scopes
from policies.facts import Transport
from policies.own import OwnRule
from policies.rules import Plan, plan
from policies.scopes import Scope, UseCase
from policies.terms import Terms
from policies.written import Written
from shapes import BeforeValidator, Field, model_validator


def parse_share(value: object) -> object:
    """`"5%"` -> 0.05. A plain number is a share already."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip()[:-1]) / 100
        except ValueError:
            raise ValueError(f"{value!r} is not a share; write a number from 0 to 1 or e.g. 5%") from None
    return value


Share = Annotated[float, BeforeValidator(parse_share), Field(ge=0, le=1, allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class LatencyBudget(Written):
    """Milliseconds that nine answers of ten should keep to. What does not fit is ranked last, not refused."""

    ttft_ms: Milliseconds | None = None
    total_ms: Milliseconds | None = None


class PairPolicy(Written):
    """Which pairs may answer, and how well proven they must be."""

    allow: tuple[str, ...] | None = None
    """Names; null allows every pair that is not denied."""
    deny: tuple[str, ...] = ()
    require_verified: bool = False
    trust: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] | None = None
    """Public keys whose signature a pair must carry; null asks for none."""
    min_gain: float | None = Field(None, ge=-1, le=1)
    """Least gain over the receiver alone (lower bound); judges pairs of mode `fuse`."""
    min_retention: float | None = Field(None, ge=0, le=2)
    """Least share kept of a receiver that reads everything (lower bound); judges pairs of mode `handover`."""


class Rollout(Written):
    """Share of conversations that may take a lane; the same conversations for as long as the share stands."""

    cache: Share = 1.0


class Policy(Written):
    """Every key left out allows; only what is written narrows."""

    models: tuple[str, ...] | None = None
    """Model groups; `prefix*` is a wildcard; null allows all."""
    transports: tuple[Transport, ...] = Field(("cache", "text"), min_length=1)
    """Lanes allowed, in order of preference."""
    regulated: bool = False
    """Text lane only, whatever else is written."""
    regions: tuple[str, ...] | None = None
    """Only deployments whose `model_info.region` is listed; one without a region is not."""
    latency_budget: LatencyBudget = LatencyBudget.model_construct()
    pairs: PairPolicy = PairPolicy.model_construct()
    sticky: Literal["none", "conversation"] = "none"
    rollout: Rollout = Rollout.model_construct()
    use_cases: tuple[UseCase, ...] = ()
    """Registered purposes; where there are any, a request that belongs to none is refused."""
    labels: dict[str, dict[str, Scope]] = Field(default_factory=dict)
    """By label and value, what a request may do; a request without the label may do what every value allows."""
    rules: tuple[OwnRule, ...] = ()
    """Judges of the tenant's own, asked after the built-in ones."""

    @model_validator(mode="after")
    def _each_lane_once(self) -> Self:
        if len(set(self.transports)) != len(self.transports):
            raise ValueError("transports names a lane twice")
        return self

    @model_validator(mode="after")
    def _scopes_fit(self) -> Self:
        scopes.check(self.use_cases, self.labels)
        return self

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the policy with its defaults filled in, hex."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @cached_property
    def terms(self) -> Terms:
        """The same, compiled once: judging reads slots and sets, not what was written."""
        return Terms.of(self)

    @cached_property
    def plan(self) -> Plan:
        """Which rules are asked under this policy; made once."""
        return plan(self.terms)
