"""How long until a stop holds: on the router that is asked, and on another one. Real processes, real Redis.

    python -m benchmarks.stop [--presses N]

Five ways for the news to travel: through Redis to another host (its own files), with Redis well; through the file to
another router of the same host, with Redis well, frozen (SIGSTOP) and gone; and by a person who writes the file. The
time runs from before the call (or the write) until a decision of the other router is refused by the stop; decisions
are asked for every few milliseconds. Lifting is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from router.stops_file import Wish, leave
from tests.running import serving
from workers.embedded import EmbeddedRedis

MASTER = {"authorization": "Bearer sk-master-0123456789"}
DECIDE = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
NOWHERE: dict[str, Any] = {"model": "none/none"}
CONFIG: dict[str, Any] = {
    "pairs": [{"name": "duo", "sharer": NOWHERE, "receiver": NOWHERE}],
    "model_list": [
        {"model_name": "m", "cache_params": {"pair": "duo"}},
        {"model_name": "m", "litellm_params": {"model": "openai/x", "api_base": "http://127.0.0.1:9/v1"}},
    ],
    "general_settings": {"master_key": "sk-master-0123456789"},
    "log": {"level": "error"},
}


@dataclass(frozen=True)
class Door:
    """A router that is asked for decisions."""

    session: aiohttp.ClientSession
    base: str

    async def stopped(self) -> bool:
        async with self.session.post(f"{self.base}/v1/decide", json=DECIDE, headers=MASTER) as got:
            return b'"stopped"' in await got.read()

    async def press(self, method: str) -> None:
        body = {"target": "cache", "reason": "benchmark"}
        async with self.session.request(method, f"{self.base}/admin/stops", json=body, headers=MASTER) as got:
            assert got.status in (200, 404), await got.read()

    async def until(self, stopped: bool) -> None:
        while await self.stopped() != stopped:  # noqa: ASYNC110  (a question to another process)
            await asyncio.sleep(0.004)


async def measured(asked: Door, other: Door, presses: int, file: Path | None) -> tuple[list[float], list[float]]:
    """Milliseconds until it holds where it is asked, and on the other; `file` is written instead of asking."""
    here, there = [], []
    for _ in range(presses):
        began = time.perf_counter()
        if file is None:
            call = asyncio.create_task(asked.press("POST"))
        else:
            await asyncio.to_thread(leave, file, Wish("cache", True, "benchmark", "person"))
            call = asyncio.create_task(asyncio.sleep(0))

        async def holds(door: Door, began: float = began) -> float:
            await door.until(True)
            return (time.perf_counter() - began) * 1000

        first, second = await asyncio.gather(holds(asked), holds(other))
        await call
        here.append(first)
        there.append(second)
        await asked.press("DELETE")
        await asyncio.gather(asked.until(False), other.until(False))
    return here, there


def told(name: str, here: list[float], there: list[float]) -> str:
    def figures(values: list[float]) -> str:
        ordered = sorted(values)
        high = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return f"{statistics.median(ordered):7.0f} {high:7.0f} {ordered[-1]:7.0f}"

    return f"{name:<44} {figures(here)}   {figures(there)}"


@contextlib.asynccontextmanager
async def two(folder: Path, redis_url: str, *, one_host: bool) -> AsyncIterator[tuple[Door, Door, Path]]:
    """Two routers, and the stops file of the first."""
    folders = [folder / "one", folder / ("one" if one_host else "two")]
    for each in folders:
        each.mkdir(parents=True, exist_ok=True)
    config = yaml.safe_dump({**CONFIG, "redis": {"url": redis_url}})
    with serving(folders[0], config) as first, serving(folders[1], config) as second:
        async with aiohttp.ClientSession() as session:
            yield Door(session, first.base), Door(session, second.base), folders[0] / ".twolane" / "stops.yaml"


async def run(presses: int) -> None:
    print(
        f"{'milliseconds until a stop holds':<44} {'asked: p50':>7} {'p99':>5} {'max':>7}   {'other: p50':>7} p99 max"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with EmbeddedRedis(folder / "redis") as server:
            async with two(folder / "hosts", server.url, one_host=False) as (asked, other, _):
                print(told("other host, through Redis", *await measured(asked, other, presses, None)))
            async with two(folder / "host", server.url, one_host=True) as (asked, other, file):
                print(told("same host, Redis well", *await measured(asked, other, presses, None)))
                print(told("same host, file written by a person", *await measured(asked, other, presses, file)))
                assert server.pid is not None
                os.kill(server.pid, signal.SIGSTOP)
                try:
                    print(told("same host, Redis frozen", *await measured(asked, other, presses, None)))
                finally:
                    os.kill(server.pid, signal.SIGCONT)
                server.stop()
                print(told("same host, Redis gone", *await measured(asked, other, presses, None)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presses", type=int, default=8)
    asyncio.run(run(parser.parse_args().presses))


if __name__ == "__main__":
    main()
