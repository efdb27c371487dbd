"""How often a request stays within its predicted p90, on simulated latency laws: after a warm-up, and after a step.

    python -m benchmarks.estimates

Text-like: a far provider, wide noise, hardly any cost per prompt token. Cache-like: a worker on this machine, narrow
noise, prefill and queue dominate, half of the prompts largely cached. Two answers in a hundred are outliers. The goal
is 85 to 95 % of requests within p90.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from router.estimates import Estimates

WARM_UP, SPAN, SETTLE = 200, 400, 40
SEEDS = 20


@dataclass(frozen=True)
class Request:
    """What the estimator may know of one request."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    queue: int


Law = Callable[[random.Random, Request], tuple[float, float]]
"""Draws (ttft_ms, total_ms)."""


def law(base: float, prefill: float, queue: float, decode: float, sigma: float) -> Law:
    """Linear means, log-normal noise, and one answer in fifty that takes eight times as long."""

    def draw(rng: random.Random, r: Request) -> tuple[float, float]:
        slow = 8.0 if rng.random() < 0.02 else 1.0
        ttft = base + prefill * (r.prompt_tokens - r.cached_tokens) + queue * r.queue
        ttft *= slow * rng.lognormvariate(0, sigma)
        return ttft, ttft + decode * r.output_tokens * slow * rng.lognormvariate(0, sigma)

    return draw


TEXT = law(base=250, prefill=0.02, queue=0, decode=12, sigma=0.35)
CACHE = law(base=8, prefill=1.1, queue=150, decode=25, sigma=0.1)
CASES: dict[str, tuple[Law, Law]] = {
    "text, three times slower": (TEXT, law(750, 0.06, 0, 36, 0.35)),
    "text, three times faster": (TEXT, law(83, 0.007, 0, 4, 0.35)),
    "cache, prefill doubles": (CACHE, law(8, 2.2, 300, 25, 0.1)),
    "cache, four times faster": (CACHE, law(2, 0.28, 38, 6, 0.1)),
}


def request(rng: random.Random) -> Request:
    """A request as conversations send them: skewed lengths, every other prompt largely cached."""
    prompt = int(min(rng.lognormvariate(5.5, 1.0), 4000)) + 1
    cached = int(prompt * 0.8) if rng.random() < 0.5 else 0
    return Request(prompt, int(min(rng.lognormvariate(4, 0.8), 1000)) + 1, cached, rng.choice((0, 0, 0, 1, 2)))


def covered(estimates: Estimates, draw: Law, rng: random.Random, count: int) -> tuple[float, float]:
    """Share of requests within predicted p90 of TTFT and of total, learning all the while."""
    ttft_hits = total_hits = 0
    for _ in range(count):
        r = request(rng)
        tokens = {
            "prompt_tokens": r.prompt_tokens,
            "output_tokens": r.output_tokens,
            "cached_tokens": r.cached_tokens,
            "queue": r.queue,
        }
        estimate = estimates.predict("d", **tokens)
        ttft, total = draw(rng, r)
        if estimate is not None:
            ttft_hits += ttft <= estimate.ttft_p90
            total_hits += total <= estimate.total_p90
        estimates.learn("d", **tokens, ttft_ms=ttft, total_ms=total)
    return ttft_hits / count, total_hits / count


def run(before: Law, after: Law, seed: int) -> list[float]:
    """TTFT and total coverage after the warm-up, then from `SETTLE` requests after the step."""
    rng, estimates = random.Random(seed), Estimates()
    covered(estimates, before, rng, WARM_UP)
    steady = covered(estimates, before, rng, SPAN)
    covered(estimates, after, rng, SETTLE)
    return [*steady, *covered(estimates, after, rng, SPAN)]


def cost() -> tuple[float, float]:
    """Microseconds for one predict and one learn."""
    rng, estimates = random.Random(1), Estimates()
    covered(estimates, TEXT, rng, WARM_UP)
    rounds = 20_000
    started = time.perf_counter()
    for _ in range(rounds):
        estimates.predict("d", prompt_tokens=300, output_tokens=100, cached_tokens=0, queue=1)
    predicted = time.perf_counter()
    for i in range(rounds):
        estimates.learn(
            "d", prompt_tokens=300, output_tokens=100, queue=i & 1, ttft_ms=250.0 + i % 97, total_ms=1500.0 + i % 89
        )
    learnt = time.perf_counter()
    return (predicted - started) / rounds * 1e6, (learnt - predicted) / rounds * 1e6


def main() -> None:
    """Print the table."""
    print(f"{SEEDS} seeds, {SPAN} requests each; share within predicted p90 (goal 85 to 95 %)")
    print(f"{'law, then step':<28}{'ttft':>8}{'total':>8}{'after: ttft':>14}{'total':>8}")
    for name, (before, after) in CASES.items():
        runs = [run(before, after, seed) for seed in range(SEEDS)]
        means = [sum(column) / SEEDS for column in zip(*runs, strict=True)]
        print(f"{name:<28}{means[0]:>8.1%}{means[1]:>8.1%}{means[2]:>14.1%}{means[3]:>8.1%}")
    predict, learn = cost()
    print(f"predict {predict:.1f} µs, learn {learn:.1f} µs")


if __name__ == "__main__":
    main()
