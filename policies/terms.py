"""Terms: a policy compiled for judging. Rules read slots and sets here, not the models that people write."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from policies.facts import DeploymentFacts, Facts

if TYPE_CHECKING:
    from policies.policy import Policy
    from policies.rule import Rule
    from policies.scopes import Scope, UseCase


@dataclass(frozen=True, slots=True)
class Bounds:
    """A scope as rules read it. None stands for "not restricted"."""

    models: frozenset[str] | None
    model_prefixes: tuple[str, ...]
    lanes: frozenset[str] | None
    regions: frozenset[str] | None

    @classmethod
    def of(cls, scope: Scope) -> Bounds:
        exact, prefixes = _names(scope.models)
        return cls(
            exact,
            prefixes,
            None if scope.transports is None else frozenset(scope.transports),
            None if scope.regions is None else frozenset(scope.regions),
        )

    def exceeded(self, facts: Facts, deployment: DeploymentFacts) -> str | None:
        """What the deployment lies outside of: `models`, `transports` or `regions`."""
        if self.lanes is not None and deployment.transport not in self.lanes:
            return "transports"
        if self.models is not None and not _named(facts, self.models, self.model_prefixes):
            return "models"
        if self.regions is not None and deployment.region not in self.regions:
            return "regions"
        return None


@dataclass(frozen=True, slots=True)
class Case:
    """A use case as rules read it."""

    bounds: Bounds
    prohibited: bool
    approved: bool
    until: float
    """Unix seconds at which the approval has ended."""

    @classmethod
    def of(cls, case: UseCase) -> Case:
        day = case.review_by
        until = 0.0 if day is None else (datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(1)).timestamp()
        return cls(Bounds.of(case), case.risk == "prohibited", case.approved_by is not None, until)


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
    signers: frozenset[str] | None
    min_gain: float | None
    min_retention: float | None
    cache_share: float
    ttft_ms: float
    """Infinity where no budget is set."""
    total_ms: float
    sticky: bool
    cases: dict[str, Case]
    """Use cases by id; empty asks for none."""
    cases_by_value: dict[str, str]
    """Use case that a label's value binds to."""
    case_label: str | None
    """The label those values belong to."""
    labels: dict[str, dict[str, Bounds]]
    own: tuple[Rule, ...]

    @classmethod
    def of(cls, policy: Policy) -> Terms:
        models, prefixes = _names(policy.models)
        by_value = {value: case.id for case in policy.use_cases for value in case.labels}
        pairs = policy.pairs
        budget = policy.latency_budget
        return cls(
            models=models,
            model_prefixes=prefixes,
            lanes={lane: rank for rank, lane in enumerate(policy.transports)},
            regulated=policy.regulated,
            regions=None if policy.regions is None else frozenset(policy.regions),
            pairs_allowed=None if pairs.allow is None else frozenset(pairs.allow),
            pairs_denied=frozenset(pairs.deny),
            require_verified=pairs.require_verified,
            signers=None if pairs.trust is None else frozenset(pairs.trust),
            min_gain=pairs.min_gain,
            min_retention=pairs.min_retention,
            cache_share=policy.rollout.cache,
            ttft_ms=math.inf if budget.ttft_ms is None else budget.ttft_ms,
            total_ms=math.inf if budget.total_ms is None else budget.total_ms,
            sticky=policy.sticky == "conversation",
            cases={case.id: Case.of(case) for case in policy.use_cases},
            cases_by_value=by_value,
            case_label=next((name for name, values in policy.labels.items() if by_value.keys() & values.keys()), None),
            labels={
                name: {value: Bounds.of(scope) for value, scope in values.items()}
                for name, values in policy.labels.items()
            },
            own=tuple(rule.rule for rule in policy.rules),
        )

    def allows_model(self, model: str) -> bool:
        """Whether the tenant may name this model group."""
        return self.models is None or _among(model, self.models, self.model_prefixes)

    def allows(self, facts: Facts) -> bool:
        """Whether the tenant may use the model by the name that was asked for, or its group."""
        return self.models is None or _named(facts, self.models, self.model_prefixes)

    def cases_of(self, facts: Facts) -> tuple[str, ...]:
        """Use cases that the request belongs to, all of which must allow it: the key's, else those of its label.

        Empty where it belongs to none, and where only a part of what it is labelled with is bound to any.
        """
        if facts.use_case is not None:
            return (facts.use_case,)
        told = None if self.case_label is None else facts.labels.get(self.case_label)
        if told is None:
            return ()
        values = told.split(",")
        found = [self.cases_by_value[value] for value in values if value in self.cases_by_value]
        return tuple(found) if len(found) == len(values) else ()

    def bounds_of(self, label: str, told: str | None) -> tuple[tuple[str, Bounds], ...]:
        """By value, what holds for a request labelled so: every value's bounds where the label is missing or unknown.

        Several values, joined by commas, all hold: sources did not agree.
        """
        known = self.labels[label]
        values = () if told is None else told.split(",")
        if values and all(value in known for value in values):
            return tuple((value, known[value]) for value in values)
        return tuple(known.items())


def _names(models: tuple[str, ...] | None) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    """Whole names, and prefixes of those that end in a star."""
    exact = None if models is None else frozenset(m for m in models if not m.endswith("*"))
    return exact, tuple(m[:-1] for m in models or () if m.endswith("*"))


def _named(facts: Facts, exact: frozenset[str], prefixes: tuple[str, ...]) -> bool:
    if _among(facts.model, exact, prefixes):
        return True
    return facts.asked != "" and _among(facts.asked, exact, prefixes)


def _among(model: str, exact: frozenset[str], prefixes: tuple[str, ...]) -> bool:
    return model in exact or (bool(prefixes) and model.startswith(prefixes))
