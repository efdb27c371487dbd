from __future__ import annotations

import pytest
from pydantic import ValidationError

from policies.policy import Policy


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
    ],
)
def test_refuses(written: dict[str, object]) -> None:
    """What cannot be meant is refused, misspelt keys included."""
    with pytest.raises(ValidationError):
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


def test_digest_tells_policies_apart() -> None:
    """The digest depends on what holds, not on whether a default was written out."""
    assert Policy().digest == Policy(transports=("cache", "text")).digest
    assert Policy().digest != Policy(transports=("text", "cache")).digest
    assert (
        Policy.model_validate({"rollout": {"cache": "5%"}}).digest
        == Policy.model_validate({"rollout": {"cache": 0.05}}).digest
    )
