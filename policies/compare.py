"""Does one policy allow what another does not? Both are asked about every kind of request that either of them tells
apart: names, thresholds and days on both sides of each limit. Pure.

What an own rule or a classifier would say of requests not in the grid cannot be known here.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from msgspec.structs import replace

from policies.decide import decide
from policies.facts import DeploymentFacts, Facts, PairFacts
from policies.policy import Policy
from policies.scopes import Scope

_MOST = 1000
"""Combinations of model, use case and labels in one grid."""
_OTHER = "another"


@dataclass(frozen=True, slots=True)
class Known:
    """Names that requests may carry besides those that the policies write."""

    models: tuple[str, ...] = ()
    pairs: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Movement:
    """What the new policy allows that the old one did not, and the other way round; an example of each, or empty."""

    widens: str = ""
    narrows: str = ""
    moves: bool = False
    """The same is allowed, and something else goes first."""

    @property
    def word(self) -> str:
        both = [name for name, found in (("widens", self.widens), ("narrows", self.narrows)) if found]
        return " and ".join(both) or ("moves" if self.moves else "allows the same")


def compare(old: Policy, new: Policy, facts: Iterable[Facts]) -> Movement:
    """Over these requests. Both policies see the same facts."""
    widens = narrows = ""
    moves = False
    for fact in facts:
        was, now = decide(old, fact), decide(new, fact)
        come, gone = set(now.ranked) - set(was.ranked), set(was.ranked) - set(now.ranked)
        widens = widens or (_told(fact, min(come)) if come else "")
        narrows = narrows or (_told(fact, min(gone)) if gone else "")
        moves = moves or was.chosen != now.chosen
    return Movement(widens, narrows, moves)


def grid(policies: Sequence[Policy], known: Known, most: int = _MOST) -> Iterator[Facts]:
    """Requests that differ in all that one of the policies may read. Of more than `most` combinations of model, use
    case and labels so many are drawn, always the same.
    """
    # Each of an order of its own: there are no ties to draw.
    deployments = tuple(replace(d, order=i) for i, d in enumerate(_deployments(policies, known)))
    models = sorted({*known.models, *_models(policies), _OTHER})
    cases = [None, *sorted({case.id for p in policies for case in p.use_cases}), _OTHER]
    found = list(product(models, cases, _labels(policies)))
    if len(found) > most:
        found = random.Random(0).sample(found, most)  # noqa: S311  (a sample, always the same)
    # The first conversation and the first day pass wherever any do: each may vary while the other stays.
    shares = [None, *_edges((p.rollout.cache for p in policies), 0.0)]
    days = sorted({day for p in policies for case in p.terms.cases.values() for day in _days(case.until)})
    moments: list[tuple[float | None, float]] = [(0.0, 1.0), *((share, 1.0) for share in shares)]
    moments += [(0.0, day) for day in days]
    for (model, case, labels), (conversation, now) in product(found, moments):
        yield Facts(
            model,
            deployments,
            prompt_tokens=100,
            output_tokens=100,
            use_case=case,
            labels=labels,
            conversation=conversation,
            now=now,
        )


def _deployments(policies: Sequence[Policy], known: Known) -> Iterator[DeploymentFacts]:
    written = (r for p in policies for regions in (p.regions, *(s.regions for s in _scopes(p))) for r in regions or ())
    regions = [None, *sorted({*known.regions, *written, _OTHER})]
    named = (n for p in policies for n in (*(p.pairs.allow or ()), *p.pairs.deny))
    pairs = sorted({*known.pairs, *named, _OTHER})
    signers = ["", *sorted({key for p in policies for key in p.pairs.trust or ()})]
    gains = [None, *_edges((p.pairs.min_gain for p in policies), 0.1)]
    kept = [None, *_edges((p.pairs.min_retention for p in policies), 1.0)]
    for region in regions:
        yield DeploymentFacts(f"the text lane in region {region}", "text", "http", region=region)
        for name, (verdict, signer) in product(pairs, product(("verified", "unproven"), signers)):
            for mode, values in (("fuse", gains), ("handover", kept)):
                for value in values:
                    pair = PairFacts(name, "held", mode, "prompt", verdict, gain=value, retention=value, signer=signer)
                    id = f"the cache lane in region {region}, {verdict} pair {name}, {mode}, proven to {value}"
                    id += f", signed by {signer[:16]}" if signer else ""
                    yield DeploymentFacts(id, "cache", "cache", region=region, pair=pair)


def _scopes(policy: Policy) -> Iterator[Scope]:
    yield from policy.use_cases
    for values in policy.labels.values():
        yield from values.values()


def _models(policies: Sequence[Policy]) -> Iterator[str]:
    for policy in policies:
        for models in (policy.models, *(scope.models for scope in _scopes(policy))):
            for name in models or ():
                yield name if not name.endswith("*") else f"{name[:-1]}{_OTHER}"


def _labels(policies: Sequence[Policy]) -> Iterator[dict[str, str]]:
    """Every value of every label, and none."""
    values: dict[str, set[str]] = {}
    for policy in policies:
        for label, scopes in policy.labels.items():
            values.setdefault(label, set()).update(scopes)
    for told in product(*([None, *sorted(values[label])] for label in values)):
        yield {label: value for label, value in zip(values, told, strict=True) if value is not None}


def _edges(limits: Iterable[float | None], other: float) -> list[float]:
    """Each limit, and the next number below it."""
    found = {limit for limit in limits if limit is not None}
    return sorted({other, *found, *(math.nextafter(limit, -math.inf) for limit in found)})


def _days(until: float) -> tuple[float, ...]:
    return (until - 1, until) if 0 < until < math.inf else ()


def _told(facts: Facts, deployment: str) -> str:
    parts = [f"model {facts.model}"]
    parts += [f"use case {facts.use_case}"] if facts.use_case else []
    parts += [f"{label}: {value}" for label, value in facts.labels.items()]
    return f"{', '.join(parts)}: {deployment}"
