from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from policies.compare import Known, Movement, compare, grid
from policies.policy import Policy
from tests.policies import strategies

KNOWN = Known(strategies.MODELS, strategies.NAMES, ("kr", "us"))


def moved(old: Policy, new: Policy) -> Movement:
    return compare(old, new, grid([old, new], KNOWN, most=12))


@given(strategies.policies)
@settings(max_examples=6, deadline=None)
def test_the_same_policy_moves_nothing(policy: Policy) -> None:
    """Beside itself a policy widens, narrows and moves nothing."""
    assert moved(policy, policy) == Movement()


@given(strategies.stricter())
@settings(max_examples=8, deadline=None)
def test_tightening_is_never_called_widening(policies: tuple[Policy, Policy]) -> None:
    """Whatever keys are tightened, and however many."""
    loose, strict = policies
    assert not moved(loose, strict).widens


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ({"transports": ["text"]}, {"transports": ["text", "cache"]}, "widens"),
        ({"transports": ["cache", "text"]}, {"transports": ["text", "cache"]}, "moves"),
        ({"regulated": True}, {}, "widens"),
        ({"models": ["a"]}, {"models": ["a", "b"]}, "widens"),
        ({"models": ["team/*"]}, {"models": ["team/small"]}, "narrows"),
        ({"models": ["a"]}, {"models": ["b"]}, "widens and narrows"),
        ({"regions": ["kr"]}, {"regions": ["kr", "us"]}, "widens"),
        ({"pairs": {"min_gain": 0.02}}, {"pairs": {"min_gain": 0.01}}, "widens"),
        ({"pairs": {"min_retention": 0.9}}, {"pairs": {"min_retention": 0.97}}, "narrows"),
        ({"pairs": {"deny": ["x"]}}, {}, "widens"),
        ({"pairs": {"trust": ["a" * 64]}}, {"pairs": {"trust": ["a" * 64, "b" * 64]}}, "widens"),
        ({"rollout": {"cache": 0.05}}, {"rollout": {"cache": 0.06}}, "widens"),
        ({"regulated": True}, {"regulated": True, "pairs": {"require_verified": True}}, "allows the same"),
        ({"labels": {"data": {"secret": {"transports": ["text"]}}}}, {}, "widens"),
    ],
)
def test_what_a_change_does(old: dict[str, Any], new: dict[str, Any], word: str) -> None:
    """By what is allowed, not by the key's name."""
    assert moved(Policy.model_validate(old), Policy.model_validate(new)).word == word
