"""Memory and open files of router and worker over many requests: `python -m benchmarks.leak [--requests 1000]`.

A real router with one spawned worker and a tiny random model is asked in turn for plain and streamed answers on both
lanes and through the relay, for what it refuses, for what the worker refuses, and by callers who hang up before and
within an answer. What grows from one reading to the next is kept: caches fill at first, and then nothing should.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.running import Router, serving
from tests.tiny import make_model

CONFIG = """
model_list:
  - {{model_name: assistant, cache_params: {{pair: twin}}}}
  - {{model_name: solo, local_params: {{model: tiny}}}}
  - {{model_name: hasty, local_params: {{model: tiny, timeout: 0.1}}}}
  - {{model_name: twice, relay_params: {{sharer: solo, receiver: solo, max_hint_tokens: 8}}}}
models: [{{name: tiny, model: {model}}}]
pairs: [{{name: twin, sharer: tiny, receiver: tiny, fuser: identity}}]
workers: [{{name: w, spawn: true, models: [tiny], pairs: [twin], threads: 1, max_running: 4, max_queued: 4}}]
redis: {{url: embedded}}
store: {{dir: kv, ram_bytes: 8MiB, max_bytes: 32MiB}}
audit: {{dir: audit}}
state_dir: state
tenants: [{{name: lab, key: sk-lab, transports: [cache, text]}}]
general_settings: {{master_key: sk-master}}
"""

MODELS = ("assistant", "solo", "twice")


def body(i: int, **more: Any) -> dict[str, Any]:
    """A request of its own: no two have the same prompt."""
    text = f"{i}: the tide table of the harbour, hour by hour, day by day"
    messages = [{"role": "user", "content": text}]
    return {"model": MODELS[i % len(MODELS)], "messages": messages, "max_tokens": 8, **more}


class Caller:
    """Sends requests of every kind and counts how they ended."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.http, self.url = http, url
        self.ends: Counter[str] = Counter()
        self.kinds: tuple[Callable[[int], Awaitable[str]], ...] = (
            self.plain, self.stream, self.plain, self.leave_stream, self.leave_early, self.wrong, self.too_long,
            self.stream, self.several, self.late,
        )  # fmt: skip

    async def send(self, i: int) -> None:
        """Request number i."""
        kind = self.kinds[i % len(self.kinds)]
        self.ends[f"{kind.__name__} {await kind(i)}"] += 1

    async def plain(self, i: int) -> str:
        return await self._whole(body(i, ignore_eos=True))

    async def several(self, i: int) -> str:
        return await self._whole(body(i, n=2, temperature=1.0, top_p=0.9, logprobs=True, top_logprobs=2))

    async def wrong(self, i: int) -> str:
        return await self._whole(body(i, temperature=9))

    async def too_long(self, i: int) -> str:
        return await self._whole(body(i, max_tokens=100_000))

    async def late(self, i: int) -> str:
        return await self._whole(body(i, model="hasty", max_tokens=1500, ignore_eos=True))

    async def stream(self, i: int) -> str:
        async with self._post(body(i, stream=True, ignore_eos=True)) as got:
            await got.read()
            return str(got.status)

    async def leave_stream(self, i: int) -> str:
        async with self._post(body(i, stream=True, ignore_eos=True, max_tokens=1500)) as got:
            await got.content.readany()
            got.close()
            return "left"

    async def leave_early(self, i: int) -> str:
        try:
            await asyncio.wait_for(self._whole(body(i, ignore_eos=True, max_tokens=1500)), 0.02)
        except TimeoutError:
            return "left"
        return "answered"

    async def _whole(self, asked: dict[str, Any]) -> str:
        async with self._post(asked) as got:
            await got.read()
            return str(got.status)

    def _post(self, asked: dict[str, Any]) -> Any:
        return self.http.post(f"{self.url}/v1/chat/completions", json=asked, headers={"authorization": "Bearer sk-lab"})


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one process."""

    rss: float
    """MB that are its own: anonymous memory."""
    files: int
    threads: int


def reading(pid: int) -> Reading:
    """From /proc (Linux)."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = len(os.listdir(f"/proc/{pid}/fd"))
    return Reading(int(status["RssAnon"].split()[0]) / 1024, files, int(status["Threads"]))


async def ask(url: str, first: int, last: int, at_once: int) -> Counter[str]:
    """Requests first..last-1, some at once."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=at_once)) as http:
        caller, numbers = Caller(http, url), iter(range(first, last))

        async def line() -> None:
            for i in numbers:
                await caller.send(i)

        await asyncio.gather(*(line() for _ in range(at_once)))
        return caller.ends


async def settled(router: Router) -> None:
    """Wait until nothing runs any more."""
    async with asyncio.timeout(30):
        while True:
            workers = (await asyncio.to_thread(router.get, "/admin/workers", "sk-master"))["data"]
            if workers and not workers[0]["running"] and not workers[0]["queued"]:
                return
            await asyncio.sleep(0.2)


def main() -> int:
    """The table; exit status 1 when a process kept growing."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--requests", type=int, default=1000)
    options.add_argument("--at-once", type=int, default=4)
    asked = options.parse_args()
    marks = [n for n in (asked.requests // 10, asked.requests // 2, asked.requests) if n]
    ends: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = make_model(folder / "model", ascii_only=True)
        with serving(folder, CONFIG.format(model=model)) as router:
            worker = router.get("/admin/workers", "sk-master")["data"][0]["pid"]
            print(f"{'requests':>9} {'process':>8} {'MB':>7} {'files':>6} {'threads':>8}")
            done = 0
            kept: dict[str, list[Reading]] = {"router": [], "worker": []}
            for mark in marks:
                ends += asyncio.run(ask(router.base, done, mark, asked.at_once))
                asyncio.run(settled(router))
                done = mark
                for name, pid in (("router", router.process.pid), ("worker", worker)):
                    now = reading(pid)
                    kept[name].append(now)
                    print(f"{done:>9} {name:>8} {now.rss:>7.1f} {now.files:>6} {now.threads:>8}", flush=True)
    print("\n" + "\n".join(f"{count:>6}  {end}" for end, count in sorted(ends.items())))
    grown = 0
    for name, (*_, half, end) in kept.items():
        more = (end.rss - half.rss) / (marks[-1] - marks[-2]) * 1000
        print(f"{name}: {more:+.1f} MB and {end.files - half.files:+d} files per 1000 requests over the second half")
        grown += end.files - half.files > 4
    return int(grown > 0)


if __name__ == "__main__":
    sys.exit(main())
