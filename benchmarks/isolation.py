"""Can a tenant tell from its own waiting what another has stored? `python -m benchmarks.isolation [--json]`.

A prober asks fresh prompts through the router and times the first token. Before each, a victim has asked either the
very same prompt or another of the same length. The AUC says how well the time tells the two apart: 0.5 is guessing,
1.0 is certainty. As a control the same is done with prober and victim in one tenant, where it must tell.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import yaml

from tests.tiny import make_model

KEYS = {"victim": "sk-bench-victim-000000", "prober": "sk-bench-prober-000000"}
LETTERS = 900
"""Of one prompt; about as many tokens."""
_START_S = 120.0


def auc(low: Sequence[float], high: Sequence[float]) -> float:
    """Chance that a value of `low` is below one of `high`; ties count half."""
    wins = sum((a < b) + (a == b) / 2 for a in low for b in high)
    return wins / (len(low) * len(high))


def interval(area: float, n: int, m: int) -> tuple[float, float]:
    """95 % of an AUC of n and m values (Hanley and McNeil 1982)."""
    q1, q2 = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (n - 1) * (q1 - area**2) + (m - 1) * (q2 - area**2)
    reach = 1.96 * math.sqrt(max(0.0, spread) / (n * m))
    return max(0.0, area - reach), min(1.0, area + reach)


@asynccontextmanager
async def router(folder: Path) -> AsyncIterator[str]:
    """The address of a router with one worker, whose model is random and large enough that reading takes a while."""
    model = make_model(folder / "model", layers=4, hidden=128, context=2048, ascii_only=True)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    written = {
        "model_list": [{"model_name": "m", "cache_params": {"pair": "twin"}}],
        "models": [{"name": "random", "model": str(model)}],
        "pairs": [{"name": "twin", "sharer": "random", "receiver": "random", "fuser": "identity"}],
        "workers": [{"name": "w", "spawn": True, "device": "cpu", "threads": 1, "pairs": ["twin"]}],
        "store": {"dir": str(folder / "kv")},
        "state_dir": str(folder / "state"),
        "audit": {"dir": str(folder / "audit")},
        "tenants": [{"name": name, "key": key} for name, key in KEYS.items()],
        "server": {"port": port},
    }
    (folder / "router.yaml").write_text(yaml.safe_dump(written))
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router.cli", "serve", "--config", str(folder / "router.yaml"),
            stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": os.getcwd()},
        )  # fmt: skip
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            await process.wait()


async def first_token(session: aiohttp.ClientSession, tenant: str, prompt: str) -> float:
    """Seconds until the first text of an answer; the answer is read to its end. Raises ClientResponseError."""
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4, "stream": True}
    began, first = time.perf_counter(), 0.0
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    async with session.post("/v1/chat/completions", json=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.content:
            event = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            if not first and any(c["delta"].get("content") for c in event.get("choices", [])):
                first = time.perf_counter() - began
    return first or time.perf_counter() - began


async def until_up(session: aiohttp.ClientSession) -> None:
    until = time.monotonic() + _START_S
    while True:
        try:
            await first_token(session, "victim", "hello")
        except aiohttp.ClientError:
            if time.monotonic() > until:
                raise
            await asyncio.sleep(0.5)
        else:
            return


async def probe(session: aiohttp.ClientSession, prober: str, n: int, draw: random.Random) -> dict[str, float | int]:
    """n prompts that the victim had stored and n that it had not, in random order."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for stored in draw.sample([True, False] * n, 2 * n):
        prompt, other = ("".join(draw.choices("abcdefghijklmnop ", k=LETTERS)) for _ in range(2))
        await first_token(session, "victim", prompt if stored else other)
        times[stored].append(await first_token(session, prober, prompt))
    area = auc(times[True], times[False])
    low, high = interval(area, n, n)
    medians = {f"{name}_ms": 1e3 * sorted(times[key])[n // 2] for key, name in ((True, "stored"), (False, "other"))}
    return {"n": n, "auc": area, "low": low, "high": high, **medians}


async def measure(n: int, seed: int) -> dict[str, dict[str, float | int]]:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        async with router(Path(folder)) as url, aiohttp.ClientSession(url) as session:
            await until_up(session)
            return {
                "another tenant": await probe(session, "prober", n, draw),
                "same tenant": await probe(session, "victim", n, draw),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("-n", type=int, default=60, help="prompts of each kind, for each prober")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    results = asyncio.run(measure(options.n, options.seed))
    if options.json:
        print(json.dumps(results))
        return
    print(f"{'prober':>16} {'n':>9} {'AUC':>6} {'95 %':>14} {'TTFT stored':>12} {'not stored':>11}")
    for who, row in results.items():
        span = f"{row['low']:.3f}-{row['high']:.3f}"
        count = f"{row['n']}+{row['n']}"
        print(f"{who:>16} {count:>9} {row['auc']:6.3f} {span:>14} {row['stored_ms']:9.1f} ms {row['other_ms']:8.1f} ms")


if __name__ == "__main__":
    main()
