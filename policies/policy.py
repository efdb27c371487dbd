"""Policy: what a person allows one tenant to do. The YAML shape, and the same compiled for judging."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from policies.facts import Transport


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


class _Written(BaseModel):
    """Frozen, and unknown keys are refused: a misspelt rule must never be ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class LatencyBudget(_Written):
    """Milliseconds that nine answers of ten should keep to. What does not fit is ranked last, not refused."""

    ttft_ms: Milliseconds | None = None
    total_ms: Milliseconds | None = None


class PairPolicy(_Written):
    """Which pairs may answer, and how well proven they must be."""

    allow: tuple[str, ...] | None = None
    """Names; null allows every pair that is not denied."""
    deny: tuple[str, ...] = ()
    require_verified: bool = False
    min_gain: float | None = Field(None, ge=-1, le=1)
    """Least gain over the receiver alone (lower bound); judges pairs of mode `fuse`."""
    min_retention: float | None = Field(None, ge=0, le=2)
    """Least share kept of a receiver that reads everything (lower bound); judges pairs of mode `handover`."""


class Rollout(_Written):
    """Share of conversations that may take a lane; the same conversations for as long as the share stands."""

    cache: Share = 1.0


class Policy(_Written):
    """Every key left out allows; only what is written narrows."""

    models: tuple[str, ...] | None = None
    """Model groups; `prefix*` is a wildcard; null allows all."""
    transports: tuple[Transport, ...] = Field(("cache", "text"), min_length=1)
    """Lanes allowed, in order of preference."""
    regulated: bool = False
    """Text lane only, whatever else is written."""
    regions: tuple[str, ...] | None = None
    """Only deployments whose `model_info.region` is listed; one without a region is not."""
    latency_budget: LatencyBudget = LatencyBudget()
    pairs: PairPolicy = PairPolicy()
    sticky: Literal["none", "conversation"] = "none"
    rollout: Rollout = Rollout()

    @model_validator(mode="after")
    def _each_lane_once(self) -> Self:
        if len(set(self.transports)) != len(self.transports):
            raise ValueError("transports names a lane twice")
        return self

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the policy with its defaults filled in, hex."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()

    @cached_property
    def terms(self) -> Terms:
        """The same, compiled once: judging reads slots and sets, not pydantic models."""
        return Terms.of(self)


@dataclass(frozen=True, slots=True)
class Terms:
    """A policy as rules read it. None stands for "not restricted"."""

    models: frozenset[str] | None
    model_prefixes: tuple[str, ...]
    lanes: dict[str, int]
    """Allowed transports with their rank of preference."""
    regulated: bool
    regions: frozenset[str] | None
    pairs_allowed: frozenset[str] | None
    pairs_denied: frozenset[str]
    require_verified: bool
    min_gain: float | None
    min_retention: float | None
    cache_share: float
    ttft_ms: float
    """Infinity where no budget is set."""
    total_ms: float
    sticky: bool

    @classmethod
    def of(cls, policy: Policy) -> Terms:
        models = policy.models
        pairs = policy.pairs
        budget = policy.latency_budget
        return cls(
            models=None if models is None else frozenset(m for m in models if not m.endswith("*")),
            model_prefixes=tuple(m[:-1] for m in models or () if m.endswith("*")),
            lanes={lane: rank for rank, lane in enumerate(policy.transports)},
            regulated=policy.regulated,
            regions=None if policy.regions is None else frozenset(policy.regions),
            pairs_allowed=None if pairs.allow is None else frozenset(pairs.allow),
            pairs_denied=frozenset(pairs.deny),
            require_verified=pairs.require_verified,
            min_gain=pairs.min_gain,
            min_retention=pairs.min_retention,
            cache_share=policy.rollout.cache,
            ttft_ms=math.inf if budget.ttft_ms is None else budget.ttft_ms,
            total_ms=math.inf if budget.total_ms is None else budget.total_ms,
            sticky=policy.sticky == "conversation",
        )

    def allows_model(self, model: str) -> bool:
        """Whether the tenant may name this model group."""
        return (
            self.models is None
            or model in self.models
            or (bool(self.model_prefixes) and model.startswith(self.model_prefixes))
        )
