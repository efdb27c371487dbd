"""Rules: each looks at one deployment and answers with a verdict. Pure, and never raise as seen from outside.

A rule that lacks the fact it needs refuses, and so does one that fails. A verdict that allows may still carry a code
other than `ok`: a note that explains the ranking.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, get_args

from policies.facts import Decision, DeploymentFacts, Facts, Transport, Verdict
from policies.rule import OK, Judge, Rule
from policies.terms import Terms

if TYPE_CHECKING:
    from policies.policy import Policy

REASONS: dict[str, str] = {
    # refusals
    "model_not_allowed": "The tenant may not use this model group.",
    "regulated_text_only": "The tenant is regulated: it has the text lane only.",
    "transport_not_allowed": "The tenant's policy does not list this lane under transports.",
    "use_case_missing": "The tenant's requests must belong to a use case, and this one belongs to none.",
    "use_case_unknown": "The key is bound to a use case that the tenant's policy does not list.",
    "use_case_prohibited": "The use case is prohibited.",
    "use_case_unapproved": "The use case is not approved.",
    "use_case_overdue": "The use case's approval has ended and awaits its review.",
    "use_case_not_allowed": "The use case does not include this model group, lane or region.",
    "label_not_allowed": "What the request is labelled as, or lacks a label for, excludes this group, lane or region.",
    "hint_text": "The caller asked for the text lane.",
    "hint_cache": "The caller asked for the cache lane.",
    "pinned_elsewhere": "The caller asked for another deployment.",
    "stopped": "A stop button is in force.",
    "region_not_allowed": "The deployment stands in no region that the tenant allows.",
    "not_rolled_out": "The conversation is not in the share that the rollout lets onto the cache lane.",
    "pair_unavailable": "No live worker holds this pair.",
    "pair_demoted": "The pair was taken out: its answers went wrong, or it is not the pair that it was.",
    "pair_probation": "The pair is on probation, and the request is not in the share that may take it.",
    "pair_not_allowed": "The tenant's policy does not allow this pair.",
    "pair_rejected": "The pair's report speaks against it.",
    "pair_unverified": "The tenant asks for a verified pair.",
    "pair_not_trusted": "Nobody whom the tenant trusts has signed this pair.",
    "pair_gain_too_small": "The pair's gain over its receiver is below what the tenant asks for.",
    "pair_retention_too_small": "The pair keeps less of its receiver's accuracy than the tenant asks for.",
    "deployment_unavailable": "The deployment cannot be reached.",
    "context_too_long": "Prompt and answer together do not fit the context.",
    "needs_unsupported": "The request needs what this deployment cannot do.",
    "no_context": "The pair reads what stands before the last user message, and nothing does.",
    "own_rule": "A rule of the tenant's own refused.",
    "rule_error": "A rule failed, so the deployment is refused.",
    "no_deployments": "The model group has no deployment.",
    # notes: allowed, but ranked later
    "cooling_down": "The deployment rests after failures; others go first.",
    "over_budget": "The estimate exceeds the latency budget; deployments that fit go first.",
    "estimate_unknown": "There is a latency budget and no estimate; deployments that fit go first.",
    # why the first of the ranking was chosen
    "ok": "The rule allows it.",
    "cache_preferred": "Both lanes could answer, and the tenant prefers the cache lane.",
    "text_preferred": "Both lanes could answer, and the tenant prefers the text lane.",
    "only_survivor": "No other deployment of the group was allowed.",
    "routing_strategy": "Several deployments of one lane could answer; the routing strategy ordered them.",
    "sticky": "The conversation stays where it was.",
    "budget_fits": "What would have gone first exceeds the latency budget.",
    "budget_missed": "Nothing fits the latency budget; the fastest was taken.",
    "cooldown_avoided": "What would have gone first rests after failures.",
}
"""Every code that a verdict or a decision may carry, with its sentence."""

REFUSALS = {code: Verdict(False, code) for code in REASONS}
"""Verdicts without a detail are made once."""

_NONE: frozenset[str] = frozenset()
"""Compared with, where "not" would take a missing fact for an empty one."""
UNBOUND = (math.inf, math.inf)
"""Limits of a request that has no latency budget."""
_NOT_REJECTED = frozenset({"verified", "unproven"})


def model(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    return OK if terms.models is None or terms.allows(facts) else REFUSALS["model_not_allowed"]


def regulated(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    return REFUSALS["regulated_text_only"] if terms.regulated and deployment.transport != "text" else OK


def transport(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    return OK if deployment.transport in terms.lanes else REFUSALS["transport_not_allowed"]


def use_case(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    if not terms.cases:
        return OK
    names = terms.cases_of(facts)
    if not names:
        return REFUSALS["use_case_missing"]
    for name in names:
        verdict = _case(terms, facts, deployment, name)
        if verdict is not OK:
            return verdict
    return OK


def _case(terms: Terms, facts: Facts, deployment: DeploymentFacts, name: str) -> Verdict:
    case = terms.cases.get(name)
    if case is None:
        return Verdict(False, "use_case_unknown", name)
    if case.prohibited:
        return Verdict(False, "use_case_prohibited", name)
    if not case.approved:
        return Verdict(False, "use_case_unapproved", name)
    if not 0 < facts.now < case.until:
        return Verdict(False, "use_case_overdue", name if facts.now > 0 else f"{name}: today's date is not known")
    outside = case.bounds.exceeded(facts, deployment)
    return OK if outside is None else Verdict(False, "use_case_not_allowed", f"{name}: {outside}")


def labels(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    for label in terms.labels:
        told = facts.labels.get(label)
        for value, bounds in terms.bounds_of(label, told):
            outside = bounds.exceeded(facts, deployment)
            if outside is not None:
                which = value if told is not None and value in told.split(",") else f"missing, hence also {value}"
                return Verdict(False, "label_not_allowed", f"{label} {which}: {outside}")
    return OK


def hint(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    if facts.hint == "auto" or facts.hint == deployment.transport:
        return OK
    return REFUSALS["hint_cache"] if facts.hint == "cache" else REFUSALS["hint_text"]


def pinned(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    return OK if facts.pinned is None or facts.pinned == deployment.id else REFUSALS["pinned_elsewhere"]


def stopped(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    if deployment.transport != "cache" or facts.stopped == _NONE:
        return OK
    if "cache" in facts.stopped:
        return Verdict(False, "stopped", "cache")
    pair, tenant = deployment.pair, facts.labels.get("tenant")
    for button in facts.stopped:
        kind, _, name = button.partition(":")
        holder = {"pair": None if pair is None else pair.name, "tenant": tenant}.get(kind)
        if holder is None or holder == name:
            return Verdict(False, "stopped", button)
    return OK


def region(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    if terms.regions is None or deployment.region in terms.regions:
        return OK
    return Verdict(False, "region_not_allowed", deployment.region or "region not known")


def rollout(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    if terms.cache_share >= 1 or deployment.transport != "cache":
        return OK
    if facts.conversation is None:
        return Verdict(False, "not_rolled_out", "conversation not known")
    return OK if facts.conversation < terms.cache_share else REFUSALS["not_rolled_out"]


def pair_available(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    if deployment.transport != "cache":
        return OK
    pair = deployment.pair
    if pair is not None and pair.fingerprint is not None:
        return OK
    return Verdict(False, "pair_unavailable", "" if pair is None else pair.reason)


def pair_in_force(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    pair = deployment.pair
    if deployment.transport != "cache" or pair is None or (not pair.demoted and pair.probation is None):
        return OK
    if pair.demoted or pair.probation is None:
        return Verdict(False, "pair_demoted", pair.demoted)
    # Not the draw itself: that one also orders equals. Written so that a NaN refuses.
    return OK if facts.draw * 1021 % 1 < pair.probation else REFUSALS["pair_probation"]


def pair_allowed(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    if deployment.transport != "cache" or (terms.pairs_allowed is None and not terms.pairs_denied):
        return OK
    name = None if deployment.pair is None else deployment.pair.name
    if name is None or name in terms.pairs_denied:
        return REFUSALS["pair_not_allowed"]
    return OK if terms.pairs_allowed is None or name in terms.pairs_allowed else REFUSALS["pair_not_allowed"]


def pair_proven(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    if deployment.transport != "cache":
        return OK
    pair = deployment.pair
    if pair is None:
        return REFUSALS["pair_unverified"]
    if pair.verdict not in _NOT_REJECTED:
        return Verdict(False, "pair_rejected", pair.verdict)
    if terms.require_verified and pair.verdict != "verified":
        return Verdict(False, "pair_unverified", pair.verdict)
    if terms.signers is not None and pair.signer not in terms.signers:
        return REFUSALS["pair_not_trusted"]
    if pair.mode == "fuse":
        return _at_least(pair.gain, terms.min_gain, "pair_gain_too_small")
    return _at_least(pair.retention, terms.min_retention, "pair_retention_too_small")


def available(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    return OK if deployment.available else Verdict(False, "deployment_unavailable", deployment.unavailable)


_OVERESTIMATED = 8
"""Times the estimate of a prompt's tokens may exceed their number: it takes four bytes for a token, and tokens of 32
(long words and names of code, spaces, characters that JSON escapes) are rare even alone.
"""


def context(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    if deployment.context is None:
        return OK
    if facts.open_ended:
        # Any answer will do, and the prompt is only estimated: whoever has the tokenizer refuses what is too long.
        asked = facts.prompt_tokens
        fits = asked <= deployment.context * _OVERESTIMATED
    else:
        asked = facts.prompt_tokens + facts.output_tokens
        fits = asked <= deployment.context
    return OK if fits else Verdict(False, "context_too_long", f"{asked} tokens, {deployment.context} fit")


def needs(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    if facts.needs.isdisjoint(deployment.cannot):
        return OK
    return Verdict(False, "needs_unsupported", ", ".join(sorted(facts.needs & deployment.cannot)))


def scope(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    pair = deployment.pair
    return REFUSALS["no_context"] if pair is not None and pair.scope == "context" and not facts.has_context else OK


def cooldown(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    return _COOLING if deployment.cooling else OK


def budget(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
    over = overshoot(limits(terms, facts), deployment)
    if over <= 1:
        return OK
    return _UNKNOWN if deployment.estimate is None else _OVER


RULES: tuple[Rule, ...] = (
    Rule("model", model, unwritten=lambda terms: terms.models is None, alike=True),
    Rule("regulated", regulated, unwritten=lambda terms: not terms.regulated, cache_only=True),
    Rule("transport", transport, unwritten=lambda terms: len(terms.lanes) == len(get_args(Transport))),
    Rule("use_case", use_case, unwritten=lambda terms: not terms.cases),
    Rule("labels", labels, unwritten=lambda terms: not terms.labels),
    Rule("hint", hint, idle=lambda terms, facts: facts.hint == "auto"),
    Rule("pinned", pinned, idle=lambda terms, facts: facts.pinned is None),
    Rule("stopped", stopped, idle=lambda terms, facts: facts.stopped == _NONE, cache_only=True),
    Rule("region", region, unwritten=lambda terms: terms.regions is None),
    Rule("rollout", rollout, unwritten=lambda terms: terms.cache_share >= 1, cache_only=True),
    Rule("pair_available", pair_available, cache_only=True),
    Rule("pair_in_force", pair_in_force, cache_only=True),
    Rule(
        "pair_allowed",
        pair_allowed,
        unwritten=lambda terms: terms.pairs_allowed is None and not terms.pairs_denied,
        cache_only=True,
    ),
    Rule("pair_proven", pair_proven, cache_only=True),
    Rule("available", available, unwell_only=True),
    Rule("context", context, unwell_only=True),
    Rule("needs", needs, idle=lambda terms, facts: facts.needs == _NONE),
    Rule("scope", scope, idle=lambda terms, facts: facts.has_context is True),
    Rule("cooldown", cooldown, unwell_only=True),
    Rule("budget", budget, idle=lambda terms, facts: limits(terms, facts) == UNBOUND),
)


_COOLING, _OVER, _UNKNOWN = (Verdict(True, code) for code in ("cooling_down", "over_budget", "estimate_unknown"))


Asked = list[tuple[int, Rule, Judge]]
"""Rules to ask, with their places among all."""


class Roster(NamedTuple):
    """The rules that a request must be asked about, for each kind of deployment."""

    once: Asked
    """Those that look at no deployment."""
    every: Asked
    on_text: Asked
    on_well_text: Asked

    @classmethod
    def of(cls, asked: Asked) -> Roster:
        once, every = ([entry for entry in asked if entry[1].alike is alike] for alike in (True, False))
        on_text = [entry for entry in every if not entry[1].cache_only]
        return cls(once, every, on_text, [entry for entry in on_text if not entry[1].unwell_only])


class Plan(NamedTuple):
    """Rules as they are asked under one policy, with their places among all; what it does not speak of is left out."""

    ok: tuple[Verdict, ...]
    """The verdicts on a deployment that no rule has anything to say about."""
    names: tuple[str, ...]
    """Of all rules, in the order of their verdicts."""
    asked: tuple[tuple[int, Rule], ...]
    usual: Roster
    """For a request that is plain."""
    steady: bool
    """On a plain request and a text-lane deployment that is well, it reads nothing but their names and the region."""
    known: dict[tuple[str | None, ...], Decision]
    """Decisions that `decide` made under it and may give again, by what they were made from."""


_PLAIN = Facts("", (), 0, 0)
_STEADY = {model, regulated, transport, region}


def plain(facts: Facts) -> bool:
    """A request that asks for nothing out of the ordinary, as most are."""
    return (
        facts.hint == "auto"
        and facts.needs == _NONE
        and facts.has_context is True
        and facts.pinned is None
        and facts.stopped == _NONE
        and facts.budget_hint_ms is None
    )


def plan(terms: Terms, rules: tuple[Rule, ...] = RULES) -> Plan:
    """How to judge under a policy: by `rules`, then by its own."""
    every = (*rules, *terms.own)
    asked = tuple([(place, rule) for place, rule in enumerate(every) if not (rule.unwritten and rule.unwritten(terms))])
    usual = Roster.of(_active(asked, terms, _PLAIN))
    steady = not terms.cases and {rule.judge for _, rule, _ in (*usual.once, *usual.on_well_text)} <= _STEADY
    return Plan((OK,) * len(every), tuple([rule.name for rule in every]), asked, usual, steady, {})


def judge(policy: Policy, facts: Facts, deployment: DeploymentFacts, rules: tuple[Rule, ...] = RULES) -> Verdict:
    """The first refusal, else the first note, else `ok`."""
    note = OK
    for verdict in judge_all(policy.terms, facts, (deployment,), plan(policy.terms, rules))[0][0]:
        if not verdict.allowed:
            return verdict
        if note is OK:
            note = verdict
    return note


Answer = tuple[tuple[Verdict, ...], bool]
"""About one deployment: every rule's verdict, in the rules' order, and whether all allow it."""


def judge_all(terms: Terms, facts: Facts, deployments: Iterable[DeploymentFacts], how: Plan) -> list[Answer]:
    """The answer about each deployment. Never raises: a rule that fails refuses."""
    roster = how.usual if plain(facts) else Roster.of(_active(how.asked, terms, facts))
    answers: list[Answer] = []
    shared: tuple[tuple[int, Verdict], ...] = ()
    for deployment in deployments:
        if not answers:
            shared = tuple(_said(roster.once, terms, facts, deployment))
        if deployment.transport != "text":
            asked = roster.every
        else:
            # A deployment that is well: nothing stands in its way, and no request is too long for it.
            well = deployment.available is True and deployment.context is None and deployment.cooling is False
            asked = roster.on_well_text if well else roster.on_text
        said = (*shared, *_said(asked, terms, facts, deployment)) if asked else shared
        if said:
            found = list(how.ok)
            for place, verdict in said:
                found[place] = verdict
            answers.append((tuple(found), all(verdict.allowed for _, verdict in said)))
        else:
            answers.append((how.ok, True))
    return answers


def _said(asked: Asked, terms: Terms, facts: Facts, deployment: DeploymentFacts) -> list[tuple[int, Verdict]]:
    """Verdicts that are more than the one OK, from which they are told apart by identity."""
    said: list[tuple[int, Verdict]] = []
    for place, rule, judge in asked:
        try:
            verdict = judge(terms, facts, deployment)
        except Exception as error:
            verdict = Verdict(False, "rule_error", f"{rule.name}: {type(error).__name__}")
        if verdict is not OK:
            said.append((place, verdict))
    return said


def _active(asked: tuple[tuple[int, Rule], ...], terms: Terms, facts: Facts) -> Asked:
    """The rules that this request must be asked about, with their places."""
    try:
        return [(place, rule, rule.judge) for place, rule in asked if rule.idle is None or not rule.idle(terms, facts)]
    except Exception:  # every judge is asked: the one that meets the same fault refuses
        return [(place, rule, rule.judge) for place, rule in asked]


def limits(terms: Terms, facts: Facts) -> tuple[float, float]:
    """Milliseconds to the first token and in all. The caller's hint bounds the whole answer, and only ever narrows."""
    total = terms.total_ms
    if facts.budget_hint_ms is not None and facts.budget_hint_ms < total:
        total = facts.budget_hint_ms
    return terms.ttft_ms, total


def overshoot(bounds: tuple[float, float], deployment: DeploymentFacts) -> float:
    """The p90 estimate as a share of the limits: at most 1 fits; infinite where it is not known."""
    if bounds == UNBOUND:
        return 0.0
    ttft, total = bounds
    estimate = deployment.estimate
    if estimate is None or total <= 0:
        return math.inf
    share = max(estimate.ttft_p90 / ttft, estimate.total_p90 / total)
    return math.inf if math.isnan(share) else share


def _at_least(measured: float | None, wanted: float | None, code: str) -> Verdict:
    if wanted is None:
        return OK
    if measured is None:
        return Verdict(False, code, "not measured")
    # Written so that a NaN refuses.
    return OK if measured >= wanted else Verdict(False, code, f"{measured:.4g} < {wanted:.4g}")
