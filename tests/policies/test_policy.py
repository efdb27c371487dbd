from __future__ import annotations

import pytest

from policies.policy import Policy
from shapes import Invalid

OWN = "tests.policies.own_rules"


@pytest.mark.parametrize(
    "written",
    [
        {"transport": ["text"]},
        {"transports": []},
        {"transports": ["text", "text"]},
        {"transports": ["smoke"]},
        {"latency_budget": {"ttft_ms": 0}},
        {"latency_budget": {"ttft": 5}},
        {"rollout": {"cache": "105%"}},
        {"rollout": {"cache": "many%"}},
        {"pairs": {"min_gain": 2}},
        {"sticky": "maybe"},
        {"regulated": "perhaps"},
        {"labels": {"data": {}}},
        {"labels": {"tenant": {"bank": {}}}},
        {"labels": {"data": {"a,b": {}}}},
        {"labels": {"data": {"a": {}}, "topic": {"a": {}}}},
        {"labels": {"data": {"a": {"transport": ["text"]}}}},
        {"use_cases": [{"id": "a", "owner": "kim"}]},
        {"use_cases": [{"id": "a", "owner": "kim", "risk": "low", "approved_by": "lee"}]},
        {"use_cases": [{"id": "a", "owner": "kim", "risk": "low"}, {"id": "a", "owner": "lee", "risk": "low"}]},
        {"use_cases": [{"id": "a", "owner": "kim", "risk": "low", "labels": ["unheard-of"]}]},
        {"rules": [{"use": "no colon"}]},
    ],
)
def test_refuses(written: dict[str, object]) -> None:
    """What cannot be meant is refused, misspelt keys included."""
    with pytest.raises(Invalid):
        Policy.model_validate(written)


def test_nothing_written_allows_everything() -> None:
    """An empty policy restricts nothing and prefers the cache lane."""
    terms = Policy().terms
    assert terms.models is None
    assert terms.regions is None
    assert terms.lanes == {"cache": 0, "text": 1}
    assert terms.cache_share == 1


@pytest.mark.parametrize(
    ("models", "asked", "allowed"),
    [
        (["a"], "a", True),
        (["a"], "ab", False),
        (["team/*"], "team/x", True),
        (["team/*"], "teams/x", False),
        (["*"], "anything", True),
        ([], "a", False),
    ],
)
def test_models(models: list[str], asked: str, allowed: bool) -> None:
    """A trailing star is a prefix, an empty list allows nothing."""
    assert Policy.model_validate({"models": models}).terms.allows_model(asked) is allowed


def test_use_cases_bind_by_one_label() -> None:
    """A value binds one use case, and all values that bind belong to one label: losing a label must not free."""
    labels = {"data": {"personal": {}, "public": {}}, "topic": {"credit": {}}}

    def bound(*values: list[str]) -> dict[str, object]:
        cases = [{"id": f"c{i}", "owner": "kim", "risk": "low", "labels": v} for i, v in enumerate(values)]
        return {"labels": labels, "use_cases": cases}

    Policy.model_validate(bound(["personal"], ["public"]))
    with pytest.raises(Invalid, match="both bound to 'public'"):
        Policy.model_validate(bound(["public"], ["public"]))
    with pytest.raises(Invalid, match="values of one label"):
        Policy.model_validate(bound(["personal"], ["credit"]))


@pytest.mark.parametrize(
    ("use", "options", "said"),
    [
        ("no.such.module:Rule", {}, "cannot be imported: ModuleNotFoundError"),
        (f"{OWN}:Nobody", {}, "cannot be imported: AttributeError"),
        ("subprocess:Popen", {"args": ["true"]}, "not a class with a method 'judge'"),
        (f"{OWN}:Whim", {"number": 3}, "does not take these options"),
        (f"{OWN}:Waiting", {}, "must not be async"),
        (f"{OWN}:Fussy", {}, "cannot be made: RuntimeError"),
    ],
)
def test_own_rule_that_cannot_be_loaded(use: str, options: dict[str, object], said: str) -> None:
    """A rule that cannot be had is refused with its cause when it is read, and its error's text is not repeated."""
    with pytest.raises(Invalid, match=said) as caught:
        Policy.model_validate({"rules": [{"use": use, "options": options}]})
    assert "sk-secret" not in str(caught.value)


def test_digest_tells_policies_apart() -> None:
    """The digest depends on what holds, not on whether a default was written out."""
    assert Policy().digest == Policy(transports=("cache", "text")).digest
    assert Policy().digest != Policy(transports=("text", "cache")).digest
    assert (
        Policy.model_validate({"rollout": {"cache": "5%"}}).digest
        == Policy.model_validate({"rollout": {"cache": 0.05}}).digest
    )
