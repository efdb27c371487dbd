"""How long a longest-prefix match takes: `python -m benchmarks.reuse_index [--json]`.

Fills an embedded server with 1,000 and then 100,000 block entries, and times matches of 1, 16 and 256 blocks: stored in
whole, stored in half, and not stored. Milliseconds, client and server on one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time

from workers.embedded import EmbeddedRedis
from workers.index import Entry, KVIndex

LENGTHS = (1, 16, 256)
SIZES = (1_000, 100_000)
SEGMENT = 16
TAG = "a" * 32


def fill(index: KVIndex, entries: int) -> list[list[bytes]]:
    """Chains of 256 blocks in segments of 16; returns them."""
    chains = []
    for _ in range(max(1, entries // 256)):
        chain = [os.urandom(16) for _ in range(256)]
        for at in range(0, 256, SEGMENT):
            parent = chain[at - 1] if at else b""
            made = Entry(TAG, os.urandom(16).hex(), 1000, at, parent, tuple(chain[at : at + SEGMENT]), 3600.0)
            index.begin(made, tenant_limit=2**50, store_limit=2**50)
            index.commit(TAG, made.obj)
        chains.append(chain)
    return chains


def measure(index: KVIndex, chains: list[list[bytes]], rounds: int) -> list[dict[str, float | int | str]]:
    """One row for each length and share of it that is stored."""
    rows: list[dict[str, float | int | str]] = []
    for length in LENGTHS:
        for stored in ("all", "half", "none"):
            kept = {"all": length, "half": length // 2, "none": 0}[stored]
            times = []
            for _ in range(rounds):
                asked = random.choice(chains)[:kept] + [os.urandom(16) for _ in range(length - kept)]
                began = time.perf_counter()
                found = index.match(TAG, asked)
                times.append((time.perf_counter() - began) * 1e3)
                assert sum(f.used for f in found) == kept
            cuts = statistics.quantiles(times, n=100)
            rows.append({"blocks": length, "stored": stored, "p50": round(cuts[49], 3), "p99": round(cuts[98], 3)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=500)
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder, EmbeddedRedis(folder) as server:
        index = KVIndex(server.url, "bench", timeout=5.0)
        chains: list[list[bytes]] = []
        for size in SIZES:
            chains += fill(index, size - 256 * len(chains))
            results[size] = measure(index, chains, options.rounds)
        index.close()
    if options.json:
        print(json.dumps(results))
        return
    print(f"{'entries':>8} {'blocks':>7} {'stored':>7} {'p50 ms':>8} {'p99 ms':>8}")
    for size, rows in results.items():
        for row in rows:
            print(f"{size:>8} {row['blocks']:>7} {row['stored']:>7} {row['p50']:>8} {row['p99']:>8}")


if __name__ == "__main__":
    main()
