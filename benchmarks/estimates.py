"""How often a request stays within its predicted p90, on simulated latency laws: after a warm-up, and after a step.

    python -m benchmarks.estimates

Text-like: a far provider, wide noise, hardly any cost per prompt token. Cache-like: a worker on this machine, narrow
noise, prefill and queue dominate, half of the prompts largely cached. Two answers in a hundred are outliers. The goal
is 85 to 95 % of requests within p90.

Then what that is good for: a tenant with a latency budget and both lanes, its requests one after the other at random
moments, each decided by `policies.decide` on these estimates as they stand. What was chosen makes the queue that the
next one meets, an answer is learnt from when it ends, and half way a law changes. Every way of choosing meets the same
requests and the same noise; answers are as long as their callers allow.
"""

from __future__ import annotations

import heapq
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from msgspec import structs

from policies.decide import decide
from policies.facts import DeploymentFacts, Facts, PairFacts, Transport
from policies.policy import Policy
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
SLOW_TEXT = law(base=750, prefill=0.06, queue=0, decode=36, sigma=0.35)
SLOW_CACHE = law(base=8, prefill=2.2, queue=300, decode=25, sigma=0.1)
CASES: dict[str, tuple[Law, Law]] = {
    "text, three times slower": (TEXT, SLOW_TEXT),
    "text, three times faster": (TEXT, law(83, 0.007, 0, 4, 0.35)),
    "cache, prefill doubles": (CACHE, SLOW_CACHE),
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


TTFT_MS, TOTAL_MS = 600.0, 3000.0
ASKED, APART_MS = 1500, 800.0
LANES: tuple[Transport, ...] = ("cache", "text")
NEAR = law(base=8, prefill=1.1, queue=90, decode=14, sigma=0.1)
SLOW_NEAR = law(base=8, prefill=2.2, queue=180, decode=14, sigma=0.1)
STEPS: dict[str, tuple[dict[Transport, Law], dict[Transport, Law]]] = {
    "text becomes three times slower": ({"text": TEXT, "cache": NEAR}, {"text": SLOW_TEXT, "cache": NEAR}),
    "cache lane's prefill doubles": ({"text": TEXT, "cache": NEAR}, {"text": TEXT, "cache": SLOW_NEAR}),
    "text was slow and recovers": ({"text": SLOW_TEXT, "cache": NEAR}, {"text": TEXT, "cache": NEAR}),
}

Choose = Callable[[dict[Transport, Request], dict[Transport, bool], random.Random], Transport]
"""Of the request as each lane would meet it, and whether each would keep the budget (which only hindsight may look
at), the lane."""


def _learn_nothing(lane: Transport, r: Request, ttft_ms: float, total_ms: float) -> None:
    pass


@dataclass(frozen=True)
class Way:
    """To choose lanes, and to take in what happened."""

    choose: Choose
    learn: Callable[[Transport, Request, float, float], None] = _learn_nothing


@dataclass(frozen=True)
class Kept:
    """Of one way of choosing: each request's time to the first token, and whether it kept the budget, in order."""

    ttft_ms: list[float]
    within: list[bool]


class ByPolicy:
    """The decision of a tenant that prefers the cache lane and has a budget."""

    def __init__(self) -> None:
        self.policy = Policy.model_validate({"latency_budget": {"ttft_ms": TTFT_MS, "total_ms": TOTAL_MS}})
        self.estimates = Estimates()
        # What the configuration states of a far provider, roughly, and what a worker measures of itself.
        self.estimates.prior("text", ttft_ms=400, tokens_per_s=60)
        self.estimates.prior("cache", prefill_tokens_per_s=900, decode_tokens_per_s=40)
        pair = PairFacts("p", "held", verdict="verified", gain=0.05)
        self.deployments = {
            "text": DeploymentFacts("text", "text", "http"),
            "cache": DeploymentFacts("cache", "cache", "cache", pair=pair),
        }

    def learn(self, lane: Transport, r: Request, ttft_ms: float, total_ms: float) -> None:
        """One finished answer."""
        self.estimates.learn(lane, **asdict(r), ttft_ms=ttft_ms, total_ms=total_ms)

    def choose(self, met: dict[Transport, Request], _fits: dict[Transport, bool], rng: random.Random) -> Transport:
        """What `decide` puts first."""
        known = tuple(
            structs.replace(
                self.deployments[lane], estimate=self.estimates.predict(lane, **asdict(r)), in_flight=r.queue
            )
            for lane, r in met.items()
        )
        r = met["text"]
        chosen = decide(self.policy, Facts("m", known, r.prompt_tokens, r.output_tokens, draw=rng.random())).chosen
        return "cache" if chosen == "cache" else "text"


def in_hindsight(met: dict[Transport, Request], fits: dict[Transport, bool], rng: random.Random) -> Transport:
    """What nobody can know: the first lane that will keep the budget."""
    return next((lane for lane in LANES if fits[lane]), "cache")


def ways() -> dict[str, Way]:
    """Fresh ones, by name."""
    policy = ByPolicy()
    return {
        "always text": Way(lambda met, fits, rng: "text"),
        "always cache": Way(lambda met, fits, rng: "cache"),
        "random": Way(lambda met, fits, rng: rng.choice(LANES)),
        "by policy": Way(policy.choose, policy.learn),
        "in hindsight": Way(in_hindsight),
    }


def keep(way: Way, laws: tuple[dict[Transport, Law], dict[Transport, Law]], seed: int, count: int) -> Kept:
    """Send `count` requests; the second laws hold from the middle on."""
    requests, whims = random.Random(seed), random.Random(seed + 1)
    running: dict[Transport, list[tuple[float, int, Request, float, float]]] = {"text": [], "cache": []}
    kept, now = Kept([], []), 0.0
    for i in range(count):
        now += requests.expovariate(1 / APART_MS)
        asked = request(requests)
        for lane, answers in running.items():
            while answers and answers[0][0] <= now:
                _, _, r, ttft, total = heapq.heappop(answers)
                way.learn(lane, r, ttft, total)
        law_now = laws[2 * i >= count]
        # A far provider has no stored KV of ours.
        met = {lane: replace(asked, queue=len(running[lane])) for lane in LANES}
        met["text"] = replace(met["text"], cached_tokens=0)
        noise = requests.random()
        times = {lane: law_now[lane](random.Random(f"{noise}{lane}"), met[lane]) for lane in LANES}
        fits = {lane: ttft <= TTFT_MS and total <= TOTAL_MS for lane, (ttft, total) in times.items()}
        lane = way.choose(met, fits, whims)
        ttft, total = times[lane]
        heapq.heappush(running[lane], (now + total, i, met[lane], ttft, total))
        kept.ttft_ms.append(ttft)
        kept.within.append(fits[lane])
    return kept


def show_budgets(seed: int = 1) -> None:
    """Print how each way of choosing keeps the budget."""
    print(f"\n{ASKED} requests, budget {TTFT_MS:.0f} ms to the first token and {TOTAL_MS:.0f} ms in all")
    for name, laws in STEPS.items():
        print(f"{'half way ' + name:<44}{'kept before':>12}{'after':>8}{'TTFT mean':>11}{'p95 ms':>9}")
        for title, way in ways().items():
            kept = keep(way, laws, seed, ASKED)
            half = len(kept.within) // 2
            before, after = sum(kept.within[:half]) / half, sum(kept.within[half:]) / (len(kept.within) - half)
            p95 = statistics.quantiles(kept.ttft_ms, n=20)[-1]
            print(f"  {title:<42}{before:>12.1%}{after:>8.1%}{statistics.mean(kept.ttft_ms):>11.0f}{p95:>9.0f}")


def cost() -> tuple[float, float]:
    """Microseconds for one predict and one learn, in the best of some rounds."""
    rng, estimates = random.Random(1), Estimates()
    covered(estimates, TEXT, rng, WARM_UP)

    def predict(i: int) -> None:
        estimates.predict("d", prompt_tokens=300, output_tokens=100, cached_tokens=0, queue=i & 1)

    def learn(i: int) -> None:
        estimates.learn(
            "d", prompt_tokens=300, output_tokens=100, queue=i & 1, ttft_ms=250.0 + i % 97, total_ms=1500.0 + i % 89
        )

    return fastest(predict), fastest(learn)


def fastest(once: Callable[[int], None], calls: int = 4000, rounds: int = 10) -> float:
    """Microseconds for one call."""
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        for i in range(calls):
            once(i)
        best = min(best, time.perf_counter() - began)
    return best / calls * 1e6


def main() -> None:
    """Print the table."""
    print(f"{SEEDS} seeds, {SPAN} requests each; share within predicted p90 (goal 85 to 95 %)")
    print(f"{'law, then step':<28}{'ttft':>8}{'total':>8}{'after: ttft':>14}{'total':>8}")
    for name, (before, after) in CASES.items():
        runs = [run(before, after, seed) for seed in range(SEEDS)]
        means = [sum(column) / SEEDS for column in zip(*runs, strict=True)]
        print(f"{name:<28}{means[0]:>8.1%}{means[1]:>8.1%}{means[2]:>14.1%}{means[3]:>8.1%}")
    predict, learn = cost()
    show_budgets()
    print(f"\npredict {predict:.1f} µs, learn {learn:.1f} µs; aim: under 20")


if __name__ == "__main__":
    main()
