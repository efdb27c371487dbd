from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.errors import BadPrompt
from workers.sampling import Sampler, Sampling, draw, nucleus

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def draws(times: int = 400, **asked: Any) -> Counter[int]:
    """How often each token is chosen; no choice sees the ones before."""
    return Counter(Sampler(Sampling(seed=seed, **asked), (), 0).choose(LOGITS).token for seed in range(times))


def test_zero_temperature_takes_the_likeliest() -> None:
    """Greedy is the largest logit."""
    assert draws(20, temperature=0.0) == {0: 20}


def test_draws_follow_the_probabilities() -> None:
    """At temperature 1 the shares are the model's, within four standard errors."""
    shares = draws(2000)
    for token, share in enumerate([0.5, 0.3, 0.15, 0.05]):
        assert abs(shares[token] / 2000 - share) < 4 * (share * (1 - share) / 2000) ** 0.5


@pytest.mark.parametrize(
    ("asked", "possible"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.0}, {0}),
        ({"min_p": 0.4}, {0, 1}),
        ({"logit_bias": {3: 100.0}}, {3}),
        ({"logit_bias": {0: -100.0, 1: -100.0}}, {2, 3}),
    ],
)
def test_filters_keep_what_they_say(asked: dict[str, Any], possible: set[int]) -> None:
    """Only the tokens that a filter keeps are drawn, and all of them are."""
    assert set(draws(**asked)) == possible


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 2000), st.floats(0.1, 8.0), st.floats(0.0, 0.999), st.integers(0, 1 << 30), st.booleans())
def test_the_nucleus_is_that_of_the_whole_order(
    size: int, spread: float, top_p: float, seed: int, filtered: bool
) -> None:
    """However flat or steep: every token whose predecessors have less than top_p in all, with its own probability."""
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread
    probabilities = torch.softmax(logits, dim=-1)
    if filtered:
        probabilities = probabilities.masked_fill(probabilities < 0.1 * probabilities.max(), 0.0)
    ordered = probabilities.sort(descending=True).values
    count = max(1, int((ordered.cumsum(0) - ordered < top_p).sum()))
    expected = torch.where(probabilities >= ordered[count - 1], probabilities, 0.0)
    assert torch.equal(nucleus(probabilities, top_p), expected)


@pytest.mark.parametrize(
    ("at", "token"), [(0.0, 1), (0.24, 1), (0.26, 3), (0.99, 3), (1 - 2**-53, 3), (1.0, 3)]
)  # fmt: skip
def test_a_draw_never_takes_what_has_no_probability(at: float, token: int) -> None:
    """Not even at the edges of the range, whether or not the rest sums to 1."""
    for scale in (1.0, 0.3):
        assert draw(torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0]) * scale, at) == token


@pytest.mark.parametrize(
    ("asked", "second"),
    [
        ({}, 0),
        ({"frequency_penalty": 2.0}, 1),
        ({"presence_penalty": 2.0}, 1),
        ({"repetition_penalty": 8.0}, 1),
    ],
)
def test_penalties_turn_from_what_was_said(asked: dict[str, Any], second: int) -> None:
    """A penalty large enough makes the second choice another one."""
    sampler = Sampler(Sampling(temperature=0.0, **asked), ())
    logits = torch.tensor([2.0, 1.5, 0.1, 0.0])
    assert sampler.choose(logits).token == 0
    assert sampler.choose(logits).token == second


def test_the_same_seed_gives_the_same_tokens_and_choices_differ() -> None:
    """A seed fixes a choice's draws; the choices of one request use different ones."""
    flat = torch.zeros(1000)
    first, again, other = (Sampler(Sampling(seed=7), (), i) for i in (0, 0, 1))
    a, b, c = ([s.choose(flat).token for _ in range(5)] for s in (first, again, other))
    assert a == b != c


def test_log_probabilities_are_the_models_own() -> None:
    """They are those of the distribution before temperature, with the likeliest beside."""
    chosen = Sampler(Sampling(temperature=0.0, logprobs=2), ()).choose(LOGITS)
    assert chosen.logprob == pytest.approx(float(LOGITS[0]), abs=1e-6)
    assert [t for t, _ in chosen.top] == [0, 1]


@pytest.mark.parametrize(
    "asked",
    [{"temperature": 2.1}, {"temperature": -0.1}, {"top_p": 1.5}, {"n": 0}, {"max_tokens": 0}, {"logprobs": 21},
     {"presence_penalty": 3.0}, {"repetition_penalty": 0.0}, {"stop": ("x",) * 17}],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(asked: dict[str, Any]) -> None:
    """The refusal names the parameter."""
    with pytest.raises(BadPrompt) as refusal:
        Sampling(**asked)
    assert next(iter(asked)).split("_")[-1] in str(refusal.value)


_ANY = st.floats(allow_nan=True, allow_infinity=True)
_SOME = st.one_of(_ANY, st.sampled_from([0.0, 5e-324, 1e-300, 1e-40, 1e-5, 1.0, 2.0, 100.0, 1e308]))


@settings(deadline=None, max_examples=150)
@given(
    asked=st.fixed_dictionaries(
        {},
        optional={
            "temperature": _SOME,
            "top_p": _SOME,
            "min_p": _SOME,
            "presence_penalty": _SOME,
            "frequency_penalty": _SOME,
            "repetition_penalty": _SOME,
            "top_k": st.integers(-2, 40),
            "seed": st.integers(-(1 << 70), 1 << 70),
            "logprobs": st.integers(0, 20),
            "logit_bias": st.dictionaries(st.integers(0, 29), _SOME, max_size=30),
        },
    ),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 1e4]),
)
def test_whatever_is_accepted_draws_a_token_of_the_vocabulary(asked: dict[str, Any], scale: float) -> None:
    """Values at every extreme are refused, or a token comes out, several times in a row: none ends the engine."""
    try:
        sampling = Sampling(**asked)
    except BadPrompt:
        return
    sampler = Sampler(sampling, (1, 2, 3))
    logits = torch.randn(30, generator=torch.Generator().manual_seed(0)) * scale
    assert all(0 <= sampler.choose(logits).token < 30 for _ in range(4))


@pytest.mark.parametrize("asked", [{"logit_bias": {3: 101.0}}, {"logit_bias": {3: -1e308}}, {"repetition_penalty": 0}])
def test_what_would_leave_no_numbers_is_refused(asked: dict[str, Any]) -> None:
    """Bias beyond OpenAI's bounds and a penalty of nothing are the caller's mistakes."""
    with pytest.raises(BadPrompt, match=next(iter(asked))):
        Sampling(**asked)
