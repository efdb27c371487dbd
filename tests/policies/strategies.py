"""Random policies, deployments and facts for the laws."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from hypothesis import strategies as st

from policies.facts import DeploymentFacts, Estimate, Facts, PairFacts
from policies.policy import Policy

NAMES = ("alpha", "beta")
CASES = ("letters", "search")
VALUES = {"data": ("personal", "public"), "topic": ("credit", "other")}
NOON = 1_800_014_400.0
"""12:00 UTC on 2027-01-15."""
OWN = "tests.policies.own_rules"
MODELS = ("assistant", "team/small", "team/large")
FEATURES = ("tools", "images", "json")


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


shares = st.floats(0, 1)
milliseconds = st.floats(1, 2000)


@st.composite
def estimates(draw: st.DrawFn) -> Estimate:
    a, b, c, d = (draw(milliseconds) for _ in range(4))
    return Estimate(min(a, b), max(a, b), min(c, d), max(c, d), cost=draw(shares))


KEYS = ("a" * 64, "b" * 64)
pairs = st.builds(
    PairFacts,
    name=st.sampled_from(NAMES),
    fingerprint=maybe(st.just("f")),
    mode=st.sampled_from(("fuse", "handover")),
    scope=st.sampled_from(("prompt", "context")),
    verdict=st.sampled_from(("verified", "unproven", "adapter-only", "dominated", "harmful")),
    gain=maybe(st.floats(-1, 1)),
    retention=maybe(st.floats(0, 1)),
    demoted=st.sampled_from(("", "", "errors")),
    probation=maybe(shares),
    signer=st.sampled_from(("", *KEYS)),
)


@st.composite
def deployments(draw: st.DrawFn, id: str) -> DeploymentFacts:
    transport = draw(st.sampled_from(("text", "cache")))
    return DeploymentFacts(
        id=id,
        transport=transport,
        kind="cache" if transport == "cache" else "http",
        available=draw(st.booleans()),
        region=draw(maybe(st.sampled_from(("kr", "us")))),
        pair=draw(maybe(pairs)) if transport == "cache" else None,
        context=draw(maybe(st.integers(1, 400))),
        cannot=frozenset(draw(st.sets(st.sampled_from(FEATURES)))),
        estimate=draw(maybe(estimates())),
        cooling=draw(st.booleans()),
        in_flight=draw(st.integers(0, 5)),
        weight=draw(st.floats(0, 10)),
        order=draw(st.integers(1, 3)),
    )


labels = st.fixed_dictionaries(
    {},
    optional={
        "tenant": st.just("bank"),
        "data": st.sampled_from((*VALUES["data"], "personal,public", "unheard-of", "")),
        "topic": st.sampled_from((*VALUES["topic"], "credit,other", "credit,unheard-of")),
    },
)


@st.composite
def facts(draw: st.DrawFn) -> Facts:
    ids = [f"d{i}" for i in range(draw(st.integers(0, 5)))]
    return Facts(
        model=draw(st.sampled_from(MODELS)),
        deployments=tuple(draw(deployments(id)) for id in ids),
        prompt_tokens=draw(st.integers(0, 300)),
        output_tokens=draw(st.integers(0, 300)),
        needs=frozenset(draw(st.sets(st.sampled_from(FEATURES), max_size=2))),
        has_context=draw(st.booleans()),
        open_ended=draw(st.booleans()),
        hint=draw(st.sampled_from(("auto", "auto", "text", "cache"))),
        budget_hint_ms=draw(maybe(milliseconds)),
        draw=draw(st.floats(0, 1, exclude_max=True)),
        stopped=frozenset(
            draw(st.sets(st.sampled_from(("cache", "pair:alpha", "tenant:bank", "tenant:x")), max_size=1))
        ),
        pinned=draw(maybe(st.sampled_from(ids))) if ids and draw(st.booleans()) else None,
        strategy=draw(st.sampled_from(("simple-shuffle", "least-busy", "latency-based-routing", "cost-based-routing"))),
        last=draw(maybe(st.sampled_from(ids))) if ids else None,
        conversation=draw(maybe(st.floats(0, 1, exclude_max=True))),
        labels=draw(labels),
        use_case=draw(maybe(st.sampled_from((*CASES, "gone")))),
        now=draw(st.sampled_from((0.0, NOON, NOON, NOON + 86400))),
    )


scopes = st.fixed_dictionaries(
    {},
    optional={
        "models": st.lists(st.sampled_from((*MODELS, "team/*")), unique=True),
        "transports": st.sampled_from(([], ["text"], ["cache"], ["text", "cache"])),
        "regions": st.lists(st.sampled_from(("kr", "us")), unique=True),
    },
)


@st.composite
def use_case(draw: st.DrawFn, id: str, values: tuple[str, ...]) -> dict[str, Any]:
    approved = draw(st.sampled_from((None, "lee", "lee")))
    day = draw(st.sampled_from(("2027-01-14", "2027-01-15", "2027-01-16")))
    return draw(scopes) | {
        "id": id,
        "owner": "kim",
        "risk": draw(st.sampled_from(("low", "medium", "high", "prohibited"))),
        "approved_by": approved,
        "review_by": day if approved else draw(maybe(st.just(day))),
        "labels": values,
    }


@st.composite
def scoped(draw: st.DrawFn) -> dict[str, Any]:
    """`labels` and `use_cases` that fit each other, `rules` too; each may be left out."""
    written: dict[str, Any] = {}
    if draw(st.booleans()):
        picked = draw(st.sets(st.sampled_from(sorted(VALUES)), min_size=1))
        written["labels"] = {label: {value: draw(scopes) for value in VALUES[label]} for label in sorted(picked)}
    if draw(st.booleans()):
        bind = draw(st.sampled_from((None, *written.get("labels", {}))))
        free = list(VALUES[bind]) if bind else []
        written["use_cases"] = []
        for id in draw(st.lists(st.sampled_from(CASES), unique=True, min_size=1)):
            values = tuple(free.pop() for _ in range(draw(st.integers(0, len(free)))))
            written["use_cases"].append(draw(use_case(id, values)))
    if draw(st.booleans()):
        written["rules"] = [{"use": f"{OWN}:Whim", "options": {"divisor": draw(st.integers(1, 3))}}]
    return written


restrictions = st.fixed_dictionaries(
    {},
    optional={
        "models": st.lists(st.sampled_from((*MODELS, "team/*")), unique=True),
        "transports": st.sampled_from((["text"], ["cache"], ["text", "cache"], ["cache", "text"])),
        "regulated": st.booleans(),
        "regions": st.lists(st.sampled_from(("kr", "us")), unique=True),
        "latency_budget": st.fixed_dictionaries({}, optional={"ttft_ms": milliseconds, "total_ms": milliseconds}),
        "pairs": st.fixed_dictionaries(
            {},
            optional={
                "allow": st.lists(st.sampled_from(NAMES), unique=True),
                "deny": st.lists(st.sampled_from(NAMES), unique=True),
                "require_verified": st.booleans(),
                "min_gain": st.floats(-1, 1),
                "min_retention": st.floats(0, 1),
                "trust": st.lists(st.sampled_from(KEYS), unique=True),
            },
        ),
        "sticky": st.sampled_from(("none", "conversation")),
        "rollout": st.fixed_dictionaries({"cache": shares}),
    },
)
policies = st.builds(lambda plain, more: Policy.model_validate(plain | more), restrictions, scoped())


@st.composite
def _narrower(draw: st.DrawFn, scope: dict[str, Any]) -> dict[str, Any]:
    whole = {"models": MODELS, "transports": ("cache", "text"), "regions": ("kr", "us")}
    key = draw(st.sampled_from(sorted(whole)))
    had = scope[key] if scope[key] is not None else whole[key]
    return scope | {key: [value for value in had if draw(st.booleans())]}


@st.composite
def _narrowed_cases(draw: st.DrawFn, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of use cases: a scope narrowed, an approval withdrawn or ended earlier, or all asked for where none were."""
    if not cases:
        return [draw(use_case("letters", ()))]
    at = draw(st.integers(0, len(cases) - 1))
    case = draw(_narrower(cases[at]))
    match draw(st.sampled_from(("scope", "approval", "review", "labels", "risk", "gone"))):
        case "approval":
            case["approved_by"] = None
        case "review" if case["review_by"] is not None:
            case["review_by"] -= timedelta(draw(st.integers(0, 2)))
        case "labels":
            case["labels"] = case["labels"][1:]
        case "risk":
            case["risk"] = "prohibited"
        case "gone" if len(cases) > 1:
            return [*cases[:at], *cases[at + 1 :]]
    return [*cases[:at], case, *cases[at + 1 :]]


@st.composite
def _narrowed_labels(draw: st.DrawFn, labels: dict[str, Any]) -> dict[str, Any]:
    """A value's scope narrowed, or a label asked for where it was not."""
    label = draw(st.sampled_from(sorted(VALUES)))
    if label not in labels:
        return labels | {label: {value: draw(scopes) for value in VALUES[label]}}
    value = draw(st.sampled_from(VALUES[label]))
    return labels | {label: labels[label] | {value: draw(_narrower(labels[label][value]))}}


@st.composite
def stricter(draw: st.DrawFn) -> tuple[Policy, Policy]:
    """(a policy, the same narrowed in one or more ways)."""
    loose = draw(policies)
    told = loose.model_dump()
    narrowed = {
        "models": [m for m in (told["models"] if told["models"] is not None else MODELS) if draw(st.booleans())],
        "transports": [t for t in told["transports"] if draw(st.booleans())] or [told["transports"][0]],
        "regulated": True,
        "regions": [
            r for r in (told["regions"] if told["regions"] is not None else ("kr", "us")) if draw(st.booleans())
        ],
        "pairs": told["pairs"]
        | {
            "deny": sorted({*told["pairs"]["deny"], draw(st.sampled_from(NAMES))}),
            "require_verified": True,
            "trust": [key for key in (told["pairs"]["trust"] or KEYS) if draw(st.booleans())],
            "min_gain": max(draw(st.floats(-1, 1)), told["pairs"]["min_gain"] or -1),
            "min_retention": max(draw(shares), told["pairs"]["min_retention"] or 0),
        },
        "rollout": {"cache": told["rollout"]["cache"] * draw(shares)},
        "use_cases": draw(_narrowed_cases(told["use_cases"])),
        "labels": draw(_narrowed_labels(told["labels"])),
        "rules": [*told["rules"], {"use": f"{OWN}:Whim", "options": {"divisor": draw(st.integers(1, 3))}}],
    }
    picked = draw(st.sets(st.sampled_from(sorted(narrowed)), min_size=1))
    return loose, Policy.model_validate(told | {key: narrowed[key] for key in picked})
