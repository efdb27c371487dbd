"""What one decision costs: `python -m benchmarks.decide`. Microseconds by number of deployments, over 200 tenants.

Half of the deployments are cache-lane pairs. Each tenant has a policy of its own, in turn without any key, with a lane
order and a latency budget, and with regions, pairs and a rollout. The best of five rounds counts.
"""

from __future__ import annotations

import random
import time

from policies.decide import decide
from policies.facts import DeploymentFacts, Estimate, Facts, PairFacts
from policies.policy import Policy

TENANTS = 200
DECISIONS = 2000
ROUNDS = 5
KINDS: dict[str, dict[str, object]] = {
    "no keys": {},
    "budget, lane order": {"transports": ["text", "cache"], "latency_budget": {"ttft_ms": 500, "total_ms": 4000}},
    "regions, pairs, rollout": {
        "regions": ["kr", "us"],
        "pairs": {"require_verified": True, "min_gain": 0.01},
        "rollout": {"cache": 0.5},
    },
}


def deployments(count: int, draw: random.Random) -> tuple[DeploymentFacts, ...]:
    """Every other one a pair that is held."""
    found = []
    for i in range(count):
        ttft, total = draw.uniform(50, 600), draw.uniform(800, 5000)
        estimate = Estimate(ttft, 1.4 * ttft, total, 1.4 * total, samples=100)
        pair = PairFacts(f"p{i}", "held", verdict="verified", gain=0.05) if i % 2 else None
        lane = "cache" if i % 2 else "text"
        kind = "cache" if i % 2 else "http"
        found.append(DeploymentFacts(f"d{i}", lane, kind, region="kr", pair=pair, estimate=estimate))  # type: ignore[arg-type]
    return tuple(found)


def microseconds(count: int, written: dict[str, object]) -> float:
    """For one decision, the best of the rounds."""
    draw = random.Random(count)
    policies = [Policy.model_validate(written | {"models": ["assistant", f"m{i}"]}) for i in range(TENANTS)]
    known = deployments(count, draw)
    asked = [
        (policies[i % TENANTS], Facts("assistant", known, 300, 100, draw=draw.random(), conversation=draw.random()))
        for i in range(DECISIONS)
    ]
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for policy, facts in asked:
            decide(policy, facts)
        best = min(best, time.perf_counter() - began)
    return best / DECISIONS * 1e6


def main() -> None:
    """Print the table."""
    counts = (1, 5, 20, 50)
    print(f"microseconds for one decision, {TENANTS} tenants; aim: under 30 at 5 deployments")
    print(f"{'policy':<26}" + "".join(f"{n:>8}" for n in counts) + "  deployments")
    for name, written in KINDS.items():
        print(f"{name:<26}" + "".join(f"{microseconds(n, written):>8.1f}" for n in counts))


if __name__ == "__main__":
    main()
