from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from policies.facts import DeploymentFacts, Estimate, Facts, PairFacts, Verdict
from policies.policy import Policy
from policies.rule import OK, Rule
from policies.rules import REASONS, RULES, judge, judge_all, plan
from policies.terms import Terms
from tests.policies import strategies

PAIR = PairFacts("duo", "fp", mode="fuse", scope="prompt", verdict="verified", gain=0.05, retention=0.98)
CACHE = DeploymentFacts("c", "cache", "cache", pair=PAIR, region="kr", context=1000)
TEXT = DeploymentFacts("t", "text", "http", region="us")
FACTS = Facts("assistant", (CACHE, TEXT), prompt_tokens=100, output_tokens=100, now=1_800_000_000.0)


def pair(**changes: Any) -> DeploymentFacts:
    return replace(CACHE, pair=replace(PAIR, **changes))


LABELS = {"labels": {"data": {"personal": {"transports": ["text"]}, "public": {}}}}
LAST_DAY = 1_800_057_599.0
"""23:59:59 UTC on 2027-01-15."""


def case(**changes: Any) -> dict[str, Any]:
    told = {"id": "letters", "owner": "kim", "risk": "high", "approved_by": "lee", "review_by": "2027-01-15"}
    return {"use_cases": [told | changes]}


CASE = case()
CASES: list[tuple[dict[str, Any], dict[str, Any], DeploymentFacts, str]] = [
    ({}, {}, CACHE, "ok"),
    ({}, {}, TEXT, "ok"),
    ({"models": ["other"]}, {}, TEXT, "model_not_allowed"),
    ({"models": ["assist*"]}, {}, TEXT, "ok"),
    ({"models": ["alias"]}, {"asked": "alias"}, TEXT, "ok"),
    ({"models": ["ali*"]}, {"asked": "alias"}, TEXT, "ok"),
    ({"models": ["alias"]}, {"asked": "other"}, TEXT, "model_not_allowed"),
    ({"models": []}, {"asked": "alias"}, TEXT, "model_not_allowed"),
    ({"regulated": True}, {}, CACHE, "regulated_text_only"),
    ({"regulated": True}, {}, TEXT, "ok"),
    ({"transports": ["text"]}, {}, CACHE, "transport_not_allowed"),
    ({"transports": ["cache"]}, {}, TEXT, "transport_not_allowed"),
    (CASE, {"use_case": "letters"}, TEXT, "ok"),
    (CASE, {}, TEXT, "use_case_missing"),
    (CASE, {"use_case": "other"}, TEXT, "use_case_unknown"),
    (case(risk="prohibited"), {"use_case": "letters"}, TEXT, "use_case_prohibited"),
    (case(approved_by=None), {"use_case": "letters"}, TEXT, "use_case_unapproved"),
    (CASE, {"use_case": "letters", "now": LAST_DAY}, TEXT, "ok"),
    (CASE, {"use_case": "letters", "now": LAST_DAY + 1}, TEXT, "use_case_overdue"),
    (CASE, {"use_case": "letters", "now": 0.0}, TEXT, "use_case_overdue"),
    (CASE, {"use_case": "letters", "now": float("nan")}, TEXT, "use_case_overdue"),
    (case(transports=["text"]), {"use_case": "letters"}, CACHE, "use_case_not_allowed"),
    (case(transports=["cache", "text"]) | {"transports": ["text"]}, {}, CACHE, "transport_not_allowed"),
    (case(models=["other", "team*"]), {"use_case": "letters"}, TEXT, "use_case_not_allowed"),
    (case(models=["assist*"]), {"use_case": "letters"}, TEXT, "ok"),
    (case(models=["alias"]), {"use_case": "letters", "asked": "alias"}, TEXT, "ok"),
    (case(models=["alias"]), {"use_case": "letters", "asked": "other"}, TEXT, "use_case_not_allowed"),
    (case(regions=["kr"]), {"use_case": "letters"}, TEXT, "use_case_not_allowed"),
    (case(labels=["personal"]) | LABELS, {"labels": {"data": "personal"}}, TEXT, "ok"),
    (case(labels=["personal"]) | LABELS, {"labels": {"data": "public"}}, TEXT, "use_case_missing"),
    (case(labels=["personal"]) | LABELS, {"labels": {"data": "personal,public"}}, TEXT, "use_case_missing"),
    (LABELS, {"labels": {"data": "public"}}, CACHE, "ok"),
    (LABELS, {"labels": {"data": "personal"}}, CACHE, "label_not_allowed"),
    (LABELS, {"labels": {"data": "personal"}}, TEXT, "ok"),
    (LABELS, {"labels": {"data": "personal,public"}}, CACHE, "label_not_allowed"),
    (LABELS, {"labels": {"data": "unheard-of"}}, CACHE, "label_not_allowed"),
    (LABELS, {"labels": {"data": "public,unheard-of"}}, CACHE, "label_not_allowed"),
    (LABELS, {}, CACHE, "label_not_allowed"),
    (LABELS, {}, TEXT, "ok"),
    ({"rules": [{"use": "tests.policies.own_rules:Whim"}]}, {}, replace(TEXT, id="d3"), "own_rule"),
    ({"rules": [{"use": "tests.policies.own_rules:Whim"}]}, {}, replace(TEXT, id="d4"), "ok"),
    ({}, {"hint": "text"}, CACHE, "hint_text"),
    ({}, {"hint": "cache"}, TEXT, "hint_cache"),
    ({"transports": ["text"]}, {"hint": "cache"}, CACHE, "transport_not_allowed"),
    ({}, {"pinned": "t"}, CACHE, "pinned_elsewhere"),
    ({}, {"pinned": "c"}, CACHE, "ok"),
    ({}, {"stopped": frozenset({"cache"})}, CACHE, "stopped"),
    ({}, {"stopped": frozenset({"cache"})}, TEXT, "ok"),
    ({}, {"stopped": frozenset({"pair:duo"})}, CACHE, "stopped"),
    ({}, {"stopped": frozenset({"pair:other"})}, CACHE, "ok"),
    ({}, {"stopped": frozenset({"tenant:bank"}), "labels": {"tenant": "bank"}}, CACHE, "stopped"),
    ({}, {"stopped": frozenset({"tenant:bank"}), "labels": {"tenant": "lab"}}, CACHE, "ok"),
    ({}, {"stopped": frozenset({"tenant:bank"})}, CACHE, "stopped"),
    ({}, {"stopped": frozenset({"unheard-of"})}, CACHE, "stopped"),
    ({"regions": ["kr"]}, {}, CACHE, "ok"),
    ({"regions": ["kr"]}, {}, TEXT, "region_not_allowed"),
    ({"regions": ["kr"]}, {}, replace(TEXT, region=None), "region_not_allowed"),
    ({"rollout": {"cache": "5%"}}, {"conversation": 0.04}, CACHE, "ok"),
    ({"rollout": {"cache": "5%"}}, {"conversation": 0.05}, CACHE, "not_rolled_out"),
    ({"rollout": {"cache": "5%"}}, {}, CACHE, "not_rolled_out"),
    ({"rollout": {"cache": 0}}, {"conversation": 0.0}, CACHE, "not_rolled_out"),
    ({"rollout": {"cache": "5%"}}, {}, TEXT, "ok"),
    ({}, {}, pair(fingerprint=None, reason="weights differ"), "pair_unavailable"),
    ({}, {}, replace(CACHE, pair=None), "pair_unavailable"),
    ({}, {}, pair(demoted="errors"), "pair_demoted"),
    ({}, {}, pair(demoted="errors", probation=1.0), "pair_demoted"),
    ({}, {"draw": 0.5}, pair(probation=0.05), "pair_probation"),
    ({}, {"draw": 0.5}, pair(probation=0.6), "ok"),
    ({}, {"draw": 0.5}, pair(probation=float("nan")), "pair_probation"),
    ({"pairs": {"allow": ["other"]}}, {}, CACHE, "pair_not_allowed"),
    ({"pairs": {"allow": ["duo"]}}, {}, CACHE, "ok"),
    ({"pairs": {"allow": ["duo"], "deny": ["duo"]}}, {}, CACHE, "pair_not_allowed"),
    ({}, {}, pair(verdict="harmful"), "pair_rejected"),
    ({}, {}, pair(verdict="dominated"), "pair_rejected"),
    ({}, {}, pair(verdict="adapter-only"), "pair_rejected"),
    ({}, {}, pair(verdict="a word of the future"), "pair_rejected"),
    ({}, {}, pair(verdict="unproven"), "ok"),
    ({"pairs": {"require_verified": True}}, {}, pair(verdict="unproven"), "pair_unverified"),
    ({"pairs": {"trust": ["a" * 64]}}, {}, CACHE, "pair_not_trusted"),
    ({"pairs": {"trust": []}}, {}, pair(signer="a" * 64), "pair_not_trusted"),
    ({"pairs": {"trust": ["b" * 64]}}, {}, pair(signer="a" * 64), "pair_not_trusted"),
    ({"pairs": {"trust": ["a" * 64]}}, {}, pair(signer="a" * 64), "ok"),
    ({"pairs": {"min_gain": 0.02}}, {}, CACHE, "ok"),
    ({"pairs": {"min_gain": 0.06}}, {}, CACHE, "pair_gain_too_small"),
    ({"pairs": {"min_gain": 0.02}}, {}, pair(gain=None), "pair_gain_too_small"),
    ({"pairs": {"min_gain": 0.02}}, {}, pair(gain=float("nan")), "pair_gain_too_small"),
    ({"pairs": {"min_gain": 0.06}}, {}, pair(mode="handover"), "ok"),
    ({"pairs": {"min_retention": 0.97}}, {}, pair(mode="handover"), "ok"),
    ({"pairs": {"min_retention": 0.99}}, {}, pair(mode="handover"), "pair_retention_too_small"),
    ({"pairs": {"min_retention": 0.99}}, {}, pair(mode="handover", retention=None), "pair_retention_too_small"),
    ({"pairs": {"min_retention": 0.99}}, {}, CACHE, "ok"),
    ({}, {}, replace(TEXT, available=False), "deployment_unavailable"),
    ({}, {"prompt_tokens": 901}, CACHE, "context_too_long"),
    ({}, {"prompt_tokens": 900}, CACHE, "ok"),
    ({}, {"prompt_tokens": 8000, "open_ended": True}, CACHE, "ok"),
    ({}, {"prompt_tokens": 8001, "open_ended": True}, CACHE, "context_too_long"),
    ({}, {"prompt_tokens": 8001, "open_ended": True}, TEXT, "ok"),
    ({}, {"prompt_tokens": 10**9}, TEXT, "ok"),
    ({}, {"needs": frozenset({"tools"})}, replace(CACHE, cannot=frozenset({"tools"})), "needs_unsupported"),
    ({}, {"needs": frozenset({"json"})}, replace(CACHE, cannot=frozenset({"tools"})), "ok"),
    ({}, {"has_context": False}, pair(scope="context"), "no_context"),
    ({}, {"has_context": False}, CACHE, "ok"),
    ({}, {}, replace(TEXT, cooling=True), "cooling_down"),
    ({"latency_budget": {"ttft_ms": 100}}, {}, TEXT, "estimate_unknown"),
    ({"latency_budget": {"ttft_ms": 100}}, {}, replace(TEXT, estimate=Estimate(50, 99, 200, 300)), "ok"),
    ({"latency_budget": {"ttft_ms": 100}}, {}, replace(TEXT, estimate=Estimate(50, 101, 200, 300)), "over_budget"),
    ({}, {"budget_hint_ms": 250.0}, replace(TEXT, estimate=Estimate(50, 99, 200, 300)), "over_budget"),
    (
        {"latency_budget": {"total_ms": 250}},
        {"budget_hint_ms": 400.0},
        replace(TEXT, estimate=Estimate(1, 1, 1, 300)),
        "over_budget",
    ),
]


@pytest.mark.parametrize(("policy", "facts", "deployment", "code"), CASES)
def test_table(policy: dict[str, Any], facts: dict[str, Any], deployment: DeploymentFacts, code: str) -> None:
    """Each rule gives the documented code for what it looks at."""
    verdict = judge(Policy.model_validate(policy), replace(FACTS, **facts), deployment)
    assert verdict.code == code
    assert verdict.allowed is (code in ("ok", "cooling_down", "over_budget", "estimate_unknown"))


def test_every_code_is_documented() -> None:
    """No rule can answer with a code that has no sentence, and the table covers every refusal."""
    used = {code for *_, code in CASES}
    assert used <= set(REASONS)
    decided_elsewhere = {"rule_error", "no_deployments"}
    refusals = list(REASONS)[: list(REASONS).index("no_deployments") + 1]
    assert set(refusals) - decided_elsewhere <= used


def test_reasons_stand_in_the_docs() -> None:
    """docs/policy.md has exactly the documented codes with their sentences."""
    text = (Path(__file__).parents[2] / "docs" / "policy.md").read_text(encoding="utf-8")
    told = text[text.index("## Reasons") :]
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", told, re.MULTILINE)) == REASONS


def _broken(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    raise ZeroDivisionError("secret prompt")


def test_failing_rule_refuses_and_says_nothing_of_the_request() -> None:
    """A rule that raises refuses with its name and the kind of error, without the error's text."""
    verdict = judge(Policy(), FACTS, TEXT, (*RULES, Rule("broken", _broken)))
    assert (verdict.allowed, verdict.code) == (False, "rule_error")
    assert verdict.detail == "broken: ZeroDivisionError"


def test_failing_shortcut_does_not_skip_the_rule() -> None:
    """When the question whether a rule may be skipped fails, the rule is asked."""
    rule = Rule("broken", _broken, idle=lambda terms, facts: 1 / 0 > 0)
    assert judge(Policy(), FACTS, TEXT, (rule,)).code == "rule_error"


def test_own_rule_that_fails_refuses() -> None:
    """An own rule that raises, or answers what is no answer, refuses with its name and says nothing of the request."""
    for name, error in (("Broken", "ZeroDivisionError"), ("Generous", "TypeError")):
        use = f"tests.policies.own_rules:{name}"
        verdict = judge(Policy.model_validate({"rules": [{"use": use}]}), FACTS, TEXT)
        assert (verdict.allowed, verdict.code, verdict.detail) == (False, "rule_error", f"{use}: {error}")


@pytest.mark.parametrize("field", ["use_case", "now", "labels"])
def test_missing_scope_fact_refuses(field: str) -> None:
    """Without the key's use case, the date or the labels a policy that looks at them refuses."""
    policy = Policy.model_validate(
        case(labels=["personal"]) | {"labels": {"data": {"personal": {}, "secret": {"transports": []}}}}
    )
    known = replace(FACTS, use_case="letters", labels={"data": "personal"})
    assert judge(policy, known, TEXT).allowed
    lacking = {"use_case": None, "labels": {}} if field == "use_case" else {field: None}
    assert not judge(policy, replace(known, **lacking), TEXT).allowed


@pytest.mark.parametrize("field", ["prompt_tokens", "output_tokens", "needs", "stopped", "hint", "has_context"])
def test_missing_fact_refuses(field: str) -> None:
    """A rule whose fact is missing altogether refuses instead of taking it for empty."""
    context = pair(scope="context")
    assert judge(Policy(), FACTS, context).allowed
    assert not judge(Policy(), replace(FACTS, **{field: None}), context).allowed


@given(strategies.policies, strategies.facts())
@settings(max_examples=80, deadline=None)
def test_shortcuts_change_nothing(policy: Policy, facts: Facts) -> None:
    """Skipping idle rules gives the same verdicts as asking every rule."""
    asked = tuple(Rule(rule.name, rule.judge) for rule in RULES)
    terms = policy.terms
    quick, whole = (judge_all(terms, facts, facts.deployments, how) for how in (policy.plan, plan(terms, asked)))
    assert quick == whole


def test_ok_is_one_object() -> None:
    """Rules answer with the shared verdict, which is told apart by identity."""
    for rule in RULES:
        assert rule.judge(Policy().terms, FACTS, CACHE) is OK, rule.name
