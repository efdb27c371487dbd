from __future__ import annotations

import random
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.estimates import CACHE, STEPS, TEXT, Law, covered, keep, law, request, ways
from policies.facts import Estimate
from router.estimates import Estimates

tokens = st.integers(0, 20_000)
milliseconds = st.floats(0.0, 1e6)


def predict(e: Estimates, prompt: int = 300, output: int = 50, cached: int = 0, queue: int = 0) -> Estimate:
    found = e.predict("d", prompt_tokens=prompt, output_tokens=output, cached_tokens=cached, queue=queue)
    assert found is not None
    return found


def taught(draw: Law, count: int = 300, seed: int = 0) -> Estimates:
    e = Estimates()
    covered(e, draw, random.Random(seed), count)
    return e


@st.composite
def any_history(draw: st.DrawFn) -> Estimates:
    e = Estimates()
    for _ in range(draw(st.integers(1, 30))):
        e.learn(
            "d",
            prompt_tokens=draw(tokens),
            output_tokens=draw(tokens),
            cached_tokens=draw(tokens),
            queue=draw(st.integers(0, 50)),
            ttft_ms=draw(st.none() | milliseconds),
            total_ms=draw(milliseconds),
        )
    return e


@given(e=any_history(), prompt=tokens, output=tokens, cached=tokens, queue=st.integers(0, 50), more=tokens)
@settings(max_examples=60, deadline=None)
def test_laws(e: Estimates, prompt: int, output: int, cached: int, queue: int, more: int) -> None:
    """Whatever was learnt, quantiles are ordered and positive, and more work never takes less time."""
    base = predict(e, prompt, output, cached, queue)
    assert 0 < base.ttft_p50 <= base.ttft_p90
    assert 0 < base.total_p50 <= base.total_p90
    assert base.ttft_p50 <= base.total_p50
    assert base.ttft_p90 <= base.total_p90
    longer = predict(e, prompt + more, output, cached, queue)
    assert longer.ttft_p90 >= base.ttft_p90
    assert longer.total_p90 >= base.total_p90
    assert predict(e, prompt, output + more, cached, queue).total_p50 >= base.total_p50
    assert predict(e, prompt, output, cached, queue + more).ttft_p50 >= base.ttft_p50
    assert predict(e, prompt, output, cached + more, queue).ttft_p50 <= base.ttft_p50


def test_unknown_is_none() -> None:
    """A deployment without answers and without a prior has no estimate."""
    e = taught(TEXT)
    assert e.predict("other", prompt_tokens=1, output_tokens=1) is None
    assert e.usual_output("other") is None


@pytest.mark.parametrize(
    ("prior", "prompt", "output", "ttft", "total"),
    [
        ({"ttft_ms": 400.0, "tokens_per_s": 50.0}, 300, 100, 400, 2400),
        ({"ttft_ms": 400.0}, 300, 100, 400, 2900),
        ({"prefill_tokens_per_s": 1000.0, "decode_tokens_per_s": 20.0}, 500, 10, 500, 1000),
        ({"ttft_ms": 100.0, "prefill_tokens_per_s": 1000.0, "tokens_per_s": 10.0}, 200, 10, 300, 1300),
    ],
)
def test_prior(prior: dict[str, float], prompt: int, output: int, ttft: float, total: float) -> None:
    """A cold deployment is predicted from its prior, with no samples and a p90 well above p50."""
    e = Estimates()
    e.prior("d", **prior)
    found = predict(e, prompt, output)
    assert found.ttft_p50 == pytest.approx(ttft, rel=0.01)
    assert found.total_p50 == pytest.approx(total, rel=0.01)
    assert found.ttft_p90 > 1.3 * found.ttft_p50
    assert found.samples == 0


@pytest.mark.parametrize("prior", [{}, {"tokens_per_s": 1.0}])
def test_half_a_prior_is_refused(prior: dict[str, float]) -> None:
    """A prior that says nothing of the first token is an error, not a guess."""
    with pytest.raises(ValueError, match="latency prior"):
        Estimates().prior("d", **prior)


def test_answers_outweigh_a_late_prior() -> None:
    """Once answers were seen, a prior changes nothing."""
    e = taught(TEXT)
    before = predict(e)
    e.prior("d", ttft_ms=1.0, tokens_per_s=1e6)
    assert predict(e) == before


@pytest.mark.parametrize(
    ("prompt", "cached", "queue", "output", "ttft"),
    [(100, 0, 0, 50, 118), (1000, 0, 0, 50, 1108), (1000, 900, 0, 200, 118), (300, 0, 2, 100, 638)],
)
def test_learns_a_known_law(prompt: int, cached: int, queue: int, output: int, ttft: float) -> None:
    """After some hundred noisy answers p50 is near the law's own median, for cached prompts and queues too."""
    found = predict(taught(CACHE), prompt, output, cached, queue)
    assert found.ttft_p50 == pytest.approx(ttft, rel=0.2)
    assert found.total_p50 == pytest.approx(ttft + 25 * output, rel=0.15)
    assert found.ttft_p90 < 1.6 * ttft


@pytest.mark.parametrize("draw", [TEXT, CACHE])
def test_totals_alone_teach_totals(draw: Law) -> None:
    """From answers in one piece, whose first token nobody saw, totals are learnt and covered as well."""
    e, rng, hits, count = Estimates(), random.Random(4), 0, 0
    for turn in range(700):
        r = request(rng)
        tokens = asdict(r)
        found = e.predict("d", **tokens)
        _, total = draw(rng, r)
        if found is not None and turn >= 200:
            count += 1
            hits += total <= found.total_p90
        e.learn("d", **tokens, ttft_ms=None, total_ms=total)
    assert 0.85 <= hits / count <= 0.95
    expected = 250 + 12 * 100 if draw is TEXT else 8 + 1.1 * 200 + 25 * 100
    assert predict(e, 200, 100).total_p50 == pytest.approx(expected, rel=0.2)


def test_mixed_answers_keep_the_first_token() -> None:
    """Answers in one piece among streams leave TTFT as the streams showed it."""
    e, rng = Estimates(), random.Random(5)
    for turn in range(600):
        r = request(rng)
        ttft, total = CACHE(rng, r)
        e.learn("d", **asdict(r), ttft_ms=ttft if turn % 2 else None, total_ms=total)
    found = predict(e, 1000, 50)
    assert found.ttft_p50 == pytest.approx(1108, rel=0.25)
    assert found.ttft_p90 < 1.8 * 1108


def test_wrong_prior_is_unlearnt() -> None:
    """A prior that is wrong tenfold does not outlive some tens of answers."""
    e = Estimates()
    e.prior("d", ttft_ms=2500.0, tokens_per_s=8.0)
    covered(e, TEXT, random.Random(2), 60)
    assert predict(e).ttft_p50 == pytest.approx(256, rel=0.35)


@pytest.mark.parametrize("draw", [TEXT, CACHE])
def test_one_outlier_moves_little(draw: Law) -> None:
    """An answer a thousand times too slow moves p50 by less than a fifth."""
    e = taught(draw)
    before = predict(e)
    e.learn("d", prompt_tokens=300, output_tokens=50, ttft_ms=before.ttft_p50 * 1000, total_ms=before.total_p50 * 1000)
    after = predict(e)
    assert after.ttft_p50 == pytest.approx(before.ttft_p50, rel=0.2)
    assert after.total_p50 == pytest.approx(before.total_p50, rel=0.2)


@pytest.mark.parametrize("factor", [0.25, 3.0, 8.0])
def test_step_is_followed(factor: float) -> None:
    """Thirty answers after everything changed by a factor, p50 is at the new level, and p90 is not far above it."""
    e = taught(law(base=50, prefill=0.5, queue=20, decode=10, sigma=0.2))
    before = predict(e)
    covered(e, law(50 * factor, 0.5 * factor, 20 * factor, 10 * factor, 0.2), random.Random(9), 30)
    after = predict(e)
    assert after.ttft_p50 == pytest.approx(before.ttft_p50 * factor, rel=0.35)
    assert after.total_p50 == pytest.approx(before.total_p50 * factor, rel=0.35)
    assert after.ttft_p90 < 2.2 * after.ttft_p50


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("draw", [TEXT, CACHE])
def test_p90_covers(draw: Law, seed: int) -> None:
    """After 200 answers, 85 to 95 % of requests stay within p90."""
    e, rng = Estimates(), random.Random(seed)
    covered(e, draw, rng, 200)
    for share in covered(e, draw, rng, 600):
        assert 0.85 <= share <= 0.95


def test_decisions_on_estimates_keep_a_latency_budget() -> None:
    """Whichever lane changes half way, a tenant's decisions keep its budget nearly as often as the better of the two
    lanes, and far more often than a fixed lane or chance where those choose badly."""
    behind: dict[str, list[float]] = {}
    for laws in STEPS.values():
        found = {name: keep(way, laws, 5, 800).within for name, way in ways().items()}
        shares = {name: sum(within) / len(within) for name, within in found.items()}
        best = max(shares[name] for name in ("always text", "always cache"))
        for name, share in shares.items():
            behind.setdefault(name, []).append(best - share)
    worst = {name: max(found) for name, found in behind.items()}
    assert worst["by policy"] < 0.03
    assert min(worst["always text"], worst["always cache"]) > 0.15
    assert worst["random"] > 0.1


def test_a_load_is_the_same_for_the_same_seed() -> None:
    """Budgets are kept to the request alike in two runs."""
    laws = next(iter(STEPS.values()))
    one, two = (keep(ways()["by policy"], laws, 3, 300) for _ in range(2))
    assert one == two


def test_usual_output_and_forget() -> None:
    """The usual output follows what answers had; a forgotten deployment is unknown again."""
    e = Estimates()
    for _ in range(50):
        e.learn("d", prompt_tokens=10, output_tokens=120, ttft_ms=10, total_ms=100)
    assert e.usual_output("d") == 120
    assert predict(e).samples == 50
    e.forget("d")
    assert e.predict("d", prompt_tokens=1, output_tokens=1) is None
