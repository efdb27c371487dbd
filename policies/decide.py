"""decide(policy, facts) -> Decision. Pure: no I/O, no clock, no randomness; the same facts give the same decision."""

from __future__ import annotations

import math
from operator import attrgetter

import msgspec

from policies.facts import Decision, DeploymentFacts, Facts, Judged
from policies.policy import Policy
from policies.rule import Rule
from policies.rules import RULES, UNBOUND, Plan, judge_all, limits, overshoot, plain, plan
from policies.terms import Terms

_MOST_KNOWN = 256
"""Decisions that a policy remembers: names that callers make up, of wildcards, must not add up."""


class _Survivor(msgspec.Struct, frozen=True, gc=False):
    """A deployment that no rule refused, with what orders it."""

    rank: tuple[float, ...]
    """Resting ones last; then what fits the budget, as wished; then the rest, the fastest first."""
    wish: tuple[int, int, int]
    """Where the conversation was, the tenant's lane, `order`: least first."""
    over: float
    """Estimate as a share of the latency budget; above 1 it does not fit."""
    deployment: DeploymentFacts


def decide(policy: Policy, facts: Facts, rules: tuple[Rule, ...] = RULES) -> Decision:
    """Judge every deployment and rank those that no rule refuses: `rules`, then the policy's own. Never raises."""
    how = policy.plan if rules is RULES else plan(policy.terms, rules)
    key = _question(how, facts)
    if key is None:
        return decide_anew(policy.terms, facts, how)
    known = how.known.get(key)
    if known is None:
        if len(how.known) >= _MOST_KNOWN:
            how.known.clear()
        known = how.known[key] = decide_anew(policy.terms, facts, how)
    return known


def _question(how: Plan, facts: Facts) -> tuple[str | None, ...] | None:
    """All that the decision is made from, where that is little: most groups have one deployment, and it is well."""
    if not how.steady or len(facts.deployments) != 1 or facts.last is not None or not plain(facts):
        return None
    d = facts.deployments[0]
    if d.transport != "text" or d.available is not True or d.context is not None or d.cooling is not False:
        return None
    return facts.model, facts.asked, d.id, d.region


def decide_anew(terms: Terms, facts: Facts, how: Plan) -> Decision:
    """`decide` without what it remembers."""
    judged: list[Judged] = []
    allowed: list[DeploymentFacts] = []
    for d, (found, passed) in zip(facts.deployments, judge_all(terms, facts, facts.deployments, how), strict=True):
        judged.append(Judged(d.id, d.transport, found))
        if passed:
            allowed.append(d)
    cases = _cases(terms, facts) if terms.cases else ()
    if not allowed:
        reason = _first(judged[0]) if judged else "no_deployments"
        return Decision(facts.model, (), reason, tuple(judged), False, cases)
    ranked = _rank(_survivors(terms, facts, allowed), facts.draw)
    reason = _reason(terms, facts, judged, ranked)
    return Decision(
        facts.model, tuple([s.deployment.id for s in ranked]), reason, tuple(judged), ranked[0].over > 1, cases
    )


def _cases(terms: Terms, facts: Facts) -> tuple[str, ...]:
    try:
        return terms.cases_of(facts)
    except Exception:  # the rule met the same fault and refused with its name
        return ()


def rule_names(policy: Policy) -> tuple[str, ...]:
    """Names of the rules whose verdicts a decision under this policy holds, in their order."""
    return policy.plan.names


def _survivors(terms: Terms, facts: Facts, allowed: list[DeploymentFacts]) -> list[_Survivor]:
    last = facts.last if terms.sticky or facts.held else None
    lane = None if last is None else next((d.transport for d in facts.deployments if d.id == last), None)
    bounds, lanes, shuffle = limits(terms, facts), terms.lanes, facts.strategy == "simple-shuffle"
    survivors: list[_Survivor] = []
    for d in allowed:
        over = 0.0 if bounds == UNBOUND else overshoot(bounds, d)
        stays = 0 if last is None or d.id == last else 1 if d.transport == lane else 2
        preference, score = lanes.get(d.transport, len(lanes)), 0.0 if shuffle else _score(facts.strategy, d)
        rank = (d.cooling, over if over > 1 else 0.0, stays, preference, d.order, score)
        survivors.append(_Survivor(rank, (stays, preference, d.order), over, d))
    return survivors


def _score(strategy: str, d: DeploymentFacts) -> float:
    """How equals of one lane are ordered, least first; a tie is drawn by weight."""
    match strategy:
        case "least-busy" | "usage-based-routing" | "usage-based-routing-v2":
            return d.in_flight
        case "latency-based-routing":
            return math.inf if d.estimate is None else d.estimate.total_p50
        case "cost-based-routing":
            return math.inf if d.estimate is None else d.estimate.cost
    return 0.0


def _rank(survivors: list[_Survivor], draw: float) -> list[_Survivor]:
    if len(survivors) == 1:
        return survivors
    survivors.sort(key=_by_rank)
    begin, last = 0, len(survivors) - 1
    for end, survivor in enumerate(survivors):
        if end == last or survivors[end + 1].rank != survivor.rank:
            if end > begin:
                survivors[begin : end + 1] = shuffled(survivors[begin : end + 1], draw)
            begin = end + 1
    return survivors


_by_rank = attrgetter("rank")


def shuffled(ties: list[_Survivor], draw: float) -> list[_Survivor]:
    """In random order, a heavier one earlier in proportion to its weight; one draw on [0, 1) settles all of it.

    After each pick the draw's place within the picked share is uniform again, so it serves the next pick.
    """
    left, order = list(ties), []
    weights = [max(s.deployment.weight, 0.0) for s in left]
    while len(left) > 1:
        whole = sum(weights)
        if not 0 < whole < math.inf:
            weights, whole = [1.0] * len(left), float(len(left))
        point, index = draw * whole, 0
        while index < len(left) - 1 and point >= weights[index]:
            point -= weights[index]
            index += 1
        picked = weights.pop(index)
        draw = min(point / picked, 1 - 2**-53) if picked > 0 else 0.0
        order.append(left.pop(index))
    return order + left


def _first(judged: Judged) -> str:
    return next((v.code for v in judged.verdicts if not v.allowed), "ok")


def _reason(terms: Terms, facts: Facts, judged: list[Judged], ranked: list[_Survivor]) -> str:
    """The most telling cause for the first of the ranking, from the strongest criterion to the weakest."""
    chosen = ranked[0]
    lane = chosen.deployment.transport
    if chosen.over > 1:
        return "budget_missed"
    for other in ranked:
        if other.wish < chosen.wish:
            return "cooldown_avoided" if other.deployment.cooling else "budget_fits"
    if (terms.sticky or facts.held) and facts.last == chosen.deployment.id:
        return "sticky"
    if any(s.deployment.transport != lane for s in ranked):
        return "cache_preferred" if lane == "cache" else "text_preferred"
    for j in judged:
        if j.transport != lane:
            return _first(j)
    return "only_survivor" if len(ranked) == 1 else "routing_strategy"
