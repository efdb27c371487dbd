from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from policies.decide import decide, decide_anew, rule_names
from policies.facts import DeploymentFacts, Estimate, Facts, PairFacts, Verdict
from policies.policy import Policy, Rollout
from policies.rule import Rule
from policies.rules import REASONS, RULES
from policies.terms import Terms
from tests.policies import strategies

PAIR = PairFacts("duo", "fp", verdict="verified", gain=0.1)
CACHE = DeploymentFacts("c", "cache", "cache", pair=PAIR, estimate=Estimate(50, 100, 500, 900))
TEXT = DeploymentFacts("t", "text", "http", estimate=Estimate(100, 200, 300, 400))
SLOW = DeploymentFacts("s", "text", "http", order=2, estimate=Estimate(500, 900, 2000, 3000))
laws = settings(max_examples=80, deadline=None)


def facts(*deployments: DeploymentFacts, **changes: Any) -> Facts:
    return replace(Facts("assistant", deployments or (CACHE, TEXT, SLOW), 10, 10), **changes)


CASES: list[tuple[dict[str, Any], Facts, str, str]] = [
    ({}, facts(), "c t s", "cache_preferred"),
    ({"transports": ["text", "cache"]}, facts(), "t s c", "text_preferred"),
    ({"regulated": True}, facts(), "t s", "regulated_text_only"),
    ({}, facts(hint="text"), "t s", "hint_text"),
    ({}, facts(needs=frozenset({"tools"})), "c t s", "cache_preferred"),
    ({}, facts(pinned="s"), "s", "pinned_elsewhere"),
    ({}, facts(TEXT, SLOW), "t s", "routing_strategy"),
    ({}, facts(TEXT), "t", "only_survivor"),
    ({}, facts(TEXT, replace(SLOW, available=False)), "t", "only_survivor"),
    ({"latency_budget": {"total_ms": 500}}, facts(), "t c s", "budget_fits"),
    ({"latency_budget": {"ttft_ms": 150}}, facts(), "c t s", "cache_preferred"),
    ({"latency_budget": {"ttft_ms": 10}}, facts(), "c t s", "budget_missed"),
    ({"latency_budget": {"total_ms": 10}}, facts(), "t c s", "budget_missed"),
    ({"latency_budget": {"total_ms": 10}}, facts(replace(CACHE, estimate=None), SLOW), "s c", "budget_missed"),
    ({"latency_budget": {"total_ms": 10}}, facts(TEXT), "t", "budget_missed"),
    ({}, facts(budget_hint_ms=500.0), "t c s", "budget_fits"),
    ({"latency_budget": {"total_ms": 500}}, facts(budget_hint_ms=10_000.0), "t c s", "budget_fits"),
    ({}, facts(replace(CACHE, cooling=True), TEXT), "t c", "cooldown_avoided"),
    ({}, facts(replace(CACHE, cooling=True)), "c", "only_survivor"),
    ({"sticky": "conversation"}, facts(last="s"), "s t c", "sticky"),
    ({}, facts(last="s"), "c t s", "cache_preferred"),
    ({"sticky": "conversation", "regulated": True}, facts(last="c"), "t s", "regulated_text_only"),
    (
        {"sticky": "conversation"},
        facts(replace(CACHE, available=False), replace(CACHE, id="c2"), TEXT, last="c"),
        "c2 t",
        "cache_preferred",
    ),
    ({"models": []}, facts(), "", "model_not_allowed"),
    ({}, Facts("assistant", (), 1, 1), "", "no_deployments"),
    ({}, facts(replace(TEXT, in_flight=3), replace(SLOW, order=1), strategy="least-busy"), "s t", "routing_strategy"),
    ({}, facts(replace(SLOW, order=1), TEXT, strategy="latency-based-routing"), "t s", "routing_strategy"),
    (
        {},
        facts(replace(TEXT, estimate=None), replace(SLOW, order=1), strategy="latency-based-routing"),
        "s t",
        "routing_strategy",
    ),
    (
        {},
        facts(TEXT, replace(SLOW, order=1, estimate=Estimate(1, 1, 1, 1, cost=-1)), strategy="cost-based-routing"),
        "s t",
        "routing_strategy",
    ),
]


@pytest.mark.parametrize(("policy", "given_facts", "ranked", "reason"), CASES)
def test_table(policy: dict[str, Any], given_facts: Facts, ranked: str, reason: str) -> None:
    """Survivors stand in the documented order, with the most telling reason."""
    decision = decide(Policy.model_validate(policy), given_facts)
    assert (" ".join(decision.ranked), decision.reason) == (ranked, reason)
    assert decision.budget_missed is (reason == "budget_missed")


def test_shuffle_follows_weights() -> None:
    """Over an even grid of draws each deployment comes first in proportion to its weight."""
    group = tuple(replace(TEXT, id=f"w{w}", weight=float(w)) for w in (1, 2, 5, 0))
    firsts = Counter(decide(Policy(), facts(*group, draw=i / 8000)).ranked[0] for i in range(8000))
    assert {name: round(count / 1000) for name, count in firsts.items()} == {"w1": 1, "w2": 2, "w5": 5}


def test_shuffle_is_fair_in_second_place() -> None:
    """What follows the first is drawn by weight too, as if drawn one after the other."""
    group = tuple(replace(TEXT, id=f"w{w}", weight=float(w)) for w in (1, 2, 3))
    seen = Counter(decide(Policy(), facts(*group, draw=i / 6000)).ranked[:2] for i in range(6000))
    for (first, second), count in seen.items():
        a, b = float(first[1:]), float(second[1:])
        assert count == pytest.approx(6000 * a / 6 * b / (6 - a), abs=3)


@given(strategies.policies, strategies.facts())
@laws
def test_same_facts_same_decision(policy: Policy, seen: Facts) -> None:
    """Deciding twice gives the same, and so does a policy read back from what was written."""
    again = Policy.model_validate(json.loads(policy.model_dump_json()))
    assert decide(policy, seen) == decide(policy, seen) == decide(again, seen)


ALONE: tuple[dict[str, Any], ...] = (
    {},
    {"region": "kr"},
    {"cooling": True},
    {"available": False},
    {"context": 5},
    {"cannot": frozenset({"tools"})},
    {"transport": "cache", "kind": "cache", "pair": PAIR},
    {"id": "other"},
    {"estimate": None},
)
ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"hint": "cache"},
    {"needs": frozenset({"tools"})},
    {"pinned": "x"},
    {"stopped": frozenset({"cache"})},
    {"budget_hint_ms": 1.0},
    {"last": "t"},
    {"has_context": False},
    {"model": "team/small"},
    {"model": "x"},
    {"model": "x", "asked": "team/small"},
    {"labels": {"data": "personal"}, "use_case": "letters"},
    {"draw": 0.7, "strategy": "least-busy"},
)


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"models": ["assistant"]},
        {"models": ["team/*"]},
        {"regions": ["kr"]},
        {"regulated": True},
        {"transports": ["text"]},
        {"transports": ["cache"]},
        {"sticky": "conversation"},
        {"latency_budget": {"ttft_ms": 150}},
        {"labels": {"data": {"personal": {"models": []}}}},
        {"use_cases": [{"id": "letters", "owner": "kim", "risk": "prohibited"}]},
        {"rules": [{"use": "tests.policies.own_rules:Whim"}]},
    ],
)
def test_nothing_remembered_changes_a_decision(policy: dict[str, Any]) -> None:
    """Whatever was asked under a policy before, a decision is the one that is made without remembering anything."""
    under = Policy.model_validate(policy)
    every = [facts(replace(TEXT, **alone), **asked) for alone in ALONE for asked in ASKED]
    for seen in (*every, *reversed(every)):
        assert decide(under, seen) == decide_anew(under.terms, seen, under.plan)


def test_a_steady_policy_gives_the_same_decision_again() -> None:
    """Where nothing but draw, time, load and latency differ, one deployment is judged once, and names do not add up."""
    policy = Policy(models=("assistant", "team/*"))
    first = decide(policy, facts(TEXT, draw=0.1, now=1.0))
    assert decide(policy, facts(replace(TEXT, in_flight=3, estimate=None), draw=0.9, now=2.0)) is first
    for n in range(1000):
        assert decide(policy, facts(TEXT, model=f"team/{n}")).ranked
    assert len(policy.plan.known) < 1000


@given(strategies.stricter(), strategies.facts())
@laws
def test_stricter_never_allows_more(policies: tuple[Policy, Policy], seen: Facts) -> None:
    """Narrowing a policy never lets in a deployment that was refused before."""
    loose, strict = policies
    assert set(decide(strict, seen).ranked) <= set(decide(loose, seen).ranked)


@given(strategies.policies, strategies.facts(), st.integers(0, 5))
@laws
def test_one_more_rule_never_adds(policy: Policy, seen: Facts, divisor: int) -> None:
    """A further rule, whatever it answers, only takes deployments away."""

    def whim(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
        return Verdict(int(deployment.id[1:]) % divisor == 0, "stopped")

    more = decide(policy, seen, (*RULES, Rule("whim", whim)))
    assert set(more.ranked) <= set(decide(policy, seen).ranked)


@given(strategies.policies, strategies.facts())
@laws
def test_hints_only_narrow(policy: Policy, seen: Facts) -> None:
    """No hint, pin or stop button brings in what the policy refuses by itself."""
    free = replace(seen, hint="auto", pinned=None, stopped=frozenset())
    assert set(decide(policy, seen).ranked) <= set(decide(policy, free).ranked)


@given(strategies.policies, strategies.facts(), st.data())
@laws
def test_removing_a_label_never_allows_more(policy: Policy, seen: Facts, data: st.DataObject) -> None:
    """A request that lacks a label gets at most what it got with any value of it."""
    if not seen.labels:
        return
    gone = data.draw(st.sampled_from(sorted(seen.labels)))
    fewer = replace(seen, labels={name: value for name, value in seen.labels.items() if name != gone})
    assert set(decide(policy, fewer).ranked) <= set(decide(policy, seen).ranked)


@given(strategies.policies, strategies.facts())
@laws
def test_another_source_only_narrows(policy: Policy, seen: Facts) -> None:
    """A second value of a label, from a source that differs, never allows what the first alone refused."""
    both = replace(seen, labels=seen.labels | {"data": "personal,public"})
    for value in ("personal", "public"):
        alone = replace(seen, labels=seen.labels | {"data": value})
        assert set(decide(policy, both).ranked) <= set(decide(policy, alone).ranked)


@given(strategies.policies, strategies.facts(), st.floats(0, 1), st.floats(0, 1))
@laws
def test_larger_share_only_adds_conversations(policy: Policy, seen: Facts, one: float, other: float) -> None:
    """Raising a rollout's share takes the cache lane from no conversation that had it."""
    small, large = sorted((one, other))
    before = policy.model_copy(update={"rollout": Rollout(cache=small)})
    after = policy.model_copy(update={"rollout": Rollout(cache=large)})
    assert set(decide(before, seen).ranked) <= set(decide(after, seen).ranked)


@given(strategies.policies, strategies.facts())
@laws
def test_regulated_never_ranks_the_cache_lane(policy: Policy, seen: Facts) -> None:
    """Whatever else is written or asked, a regulated tenant gets no cache-lane deployment, fallbacks included."""
    decision = decide(policy.model_copy(update={"regulated": True}), seen)
    lanes = {d.id: d.transport for d in seen.deployments}
    assert all(lanes[id] == "text" for id in decision.ranked)


@given(strategies.policies, strategies.facts())
@laws
def test_decision_is_whole(policy: Policy, seen: Facts) -> None:
    """Every deployment is judged by every rule, exactly the allowed ones are ranked, and all codes are documented."""
    decision = decide(policy, seen)
    assert [j.deployment for j in decision.judged] == [d.id for d in seen.deployments]
    assert all(len(j.verdicts) == len(rule_names(policy)) for j in decision.judged)
    assert sorted(decision.ranked) == sorted(j.deployment for j in decision.judged if j.allowed)
    assert {decision.reason, *(v.code for j in decision.judged for v in j.verdicts)} <= set(REASONS)
    assert (decision.chosen is None) is (decision.ranked == ())


@given(strategies.policies, strategies.facts())
@laws
def test_resting_deployments_never_go_first(policy: Policy, seen: Facts) -> None:
    """A cooling deployment is ranked before another only where that one is cooling too; none is benched."""
    cooling = {d.id: d.cooling for d in seen.deployments}
    ranked = [cooling[id] for id in decide(policy, seen).ranked]
    assert ranked == sorted(ranked)


def _broken(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    raise KeyError(deployment.id)


def test_failing_rule_refuses_all() -> None:
    """When a rule fails for every deployment nothing is chosen, and the decision says why."""
    decision = decide(Policy(), facts(), (Rule("broken", _broken),))
    assert (decision.ranked, decision.reason) == ((), "rule_error")
