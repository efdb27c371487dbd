"""How far do readers of several seeds differ, and do half the layers read as well? `python -m benchmarks.readers
[--steps 60 --reader 0-4,15-29:1 --reader 0-4,15-29:2 --reader 0-4,20-29:1]`.

A reader is `smol-reader` made anew by its own recipe, in an equal number of steps on one thread: LAYERS:SEED says which
layers of the model the receiver keeps, and the seed of the fuser's first weights and of the order of the passages. Loss
is that of the answers' tokens on the validation passages of `scripts.train_smol_reader`; then all are asked about the
test passages that `scripts.prove_bundled` begins with, of whose names and values no training passage has any. The
bundled pair and every receiver that reads for itself are asked the same. With `--work FOLDER` a run that was stopped
goes on, and what has been measured is kept.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import TypeVar

import msgspec
import torch

from scripts.prove_bundled import MOST, Parts
from scripts.questions import lesson, reader_items, wide_words
from scripts.train_smol_reader import KEPT, RATE, SHARER, VALIDATED, receiver_of, untrained
from workers.cache import KVCache
from workers.fusers.base import Fuser
from workers.greedy import answers
from workers.items import Item
from workers.lesson_batch import Remembered
from workers.lessons import Shuffled
from workers.loader import Loaded, Loader
from workers.prompt import split_context
from workers.prove import compared, right
from workers.train import ANEW, Progress, Recipe, Trainer, answer_loss
from workers.verify import wilson
from workers.verify_cli import hold

SHIPPED = Path(__file__).parents[1] / "pairs" / "smol-reader"
FIRST = 10_000
"""Number of the first test passage, as in the bundled report."""
EVERY = 20
"""Steps between two checkpoints."""
REMEMBERED = 4 << 30
"""Bytes of what the sharer has read, which all readers learn from."""
T = TypeVar("T")


class Row(msgspec.Struct, frozen=True):
    """What is known of one reader."""

    layers: str
    seed: int | None
    """None: the bundled one."""
    steps: int
    parameters: int
    loss: float
    right: list[bool]
    """Question after question, over the sharer's KV."""

    @property
    def name(self) -> str:
        return f"{self.layers}, seed {self.seed}" if self.seed is not None else f"{self.layers}, bundled"


@dataclass(frozen=True, slots=True)
class Asked:
    """A reader that is to be made."""

    layers: str
    seed: int

    @classmethod
    def read(cls, text: str) -> Asked:
        """`0-4,15-29:1`. Raises ArgumentTypeError."""
        layers, _, seed = text.rpartition(":")
        try:
            receiver_of(layers)
            return cls(layers, int(seed))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: LAYERS:SEED is expected, e.g. {KEPT}:1 ({error})") from error


def main() -> None:
    """Train, ask, print the tables."""
    told = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("--reader", action="append", type=Asked.read, help="LAYERS:SEED, once for each")
    told.add_argument("--steps", type=int, default=6)
    told.add_argument("--documents", type=int, default=2, help="that are asked about")
    told.add_argument("--work", type=Path, help="keeps checkpoints and rows; default: a folder that is removed")
    options = told.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as aside:
        work: Path = options.work or Path(aside)
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(work, options.steps, options.documents)
        wanted = options.reader or [Asked(KEPT, 1), Asked(KEPT, 2), Asked("0-4,20-29", 1)]
        rows = [bench.shipped(), *map(bench.trained, wanted)]
        alone = {layers: bench.alone(layers) for layers in dict.fromkeys(row.layers for row in rows)}
    print("\n".join(("", *table(rows, alone), "", *slices(rows, bench.items), "", *apart(rows, bench.passages))))


class Bench:
    """The sharer, and what all readers learn from and are asked."""

    def __init__(self, work: Path, steps: int, documents: int) -> None:
        """`steps` passages are learnt from, each once."""
        self._work, self._steps, self._loader = work, steps, Loader("cpu")
        self._sharer = self._loader.load(SHARER)
        tokenizer = self._sharer.tokenizer
        wide, held = wide_words(tokenizer, "train"), wide_words(tokenizer, "validation")
        self._lessons = [lesson(tokenizer, number, wide) for number in range(steps)]
        self._validation = [lesson(tokenizer, number, held, "validation") for number in range(VALIDATED)]
        self.items = reader_items(tokenizer, documents, FIRST)
        self._groups = [list(group) for _, group in itertools.groupby(self.items, key=lambda item: item.before)]
        self._reads = Remembered(ANEW, REMEMBERED)

    @property
    def passages(self) -> list[int]:
        """By question: which passage it is about."""
        return [number for number, group in enumerate(self._groups) for _ in group]

    def shipped(self) -> Row:
        """The bundled pair."""
        return kept(self._work, f"bundled-{len(self._groups)}", Row, self._shipped)

    def trained(self, asked: Asked) -> Row:
        """Train it, or go on, and ask it."""
        name = f"{asked.layers}-seed-{asked.seed}-{self._steps}"
        return kept(
            self._work, f"{name}-{len(self._groups)}", Row, partial(self._trained, asked, self._work / f"{name}.ckpt")
        )

    def alone(self, layers: str) -> list[bool]:
        """By question: the receiver reads for itself."""
        return kept(self._work, f"{layers}-alone-{len(self._groups)}", list[bool], partial(self._alone, layers))

    def _shipped(self) -> Row:
        parts = Parts.of(hold(SHIPPED, self._loader)[0])
        return self._row(KEPT, None, 0, parts.receiver, parts.fuser)

    def _trained(self, asked: Asked, checkpoint: Path) -> Row:
        receiver = self._loader.load(receiver_of(asked.layers))
        fuser = untrained(self._sharer, receiver, asked.seed)
        lessons = Shuffled(self._lessons, asked.seed)
        recipe = Recipe(self._steps, rate=RATE, seed=asked.seed)
        trainer = Trainer(self._sharer, receiver, fuser, lessons, recipe, self._reads)
        if checkpoint.exists():
            trainer.resume(checkpoint)
        while trainer.step < self._steps:
            trainer.run(trainer.step + EVERY, _tell)
            trainer.checkpoint(checkpoint)
        with tempfile.TemporaryDirectory() as folder:
            stored = fuser.save(Path(folder))  # as it would ship: in bfloat16
        return self._row(asked.layers, asked.seed, self._steps, receiver, stored)

    def _alone(self, layers: str) -> list[bool]:
        receiver = self._loader.load(receiver_of(layers))
        return list(self._judged(receiver, lambda context: ANEW.read(receiver, context)))

    @torch.no_grad()
    def _row(self, layers: str, seed: int | None, steps: int, receiver: Loaded, fuser: Fuser) -> Row:
        def given(context: Sequence[int]) -> KVCache:
            return fuser.project(self._reads.read(self._sharer, context), None, 0)

        losses = [float(answer_loss(receiver, given(one.context), b)) for one in self._validation for b in one.batches]
        found = list(self._judged(receiver, given))
        return Row(layers, seed, steps, fuser.parameters, mean(losses), found)

    def _judged(self, receiver: Loaded, kv: Callable[[Sequence[int]], KVCache]) -> Iterator[bool]:
        """The questions about one document are asked together, greedily."""
        tokenizer = receiver.tokenizer
        for group in self._groups:
            split = [split_context(tokenizer, item.chat) for item in group]
            said = answers(receiver, kv(split[0][0]), [rest for _, rest in split], MOST)
            for ids, item in zip(said, group, strict=True):
                yield right(str(tokenizer.decode(ids, skip_special_tokens=True)), item)


def kept(work: Path, name: str, kind: type[T], make: Callable[[], T]) -> T:
    """What the work folder says, else what is measured now and written there."""
    file = work / f"{name}.json"
    if not file.exists():
        print(f"{name} ...", flush=True)
        file.write_bytes(msgspec.json.encode(make()))
    return msgspec.json.decode(file.read_bytes(), type=kind)


def _tell(progress: Progress) -> None:
    if progress.step % 10 == 0:
        print(progress, flush=True)


def table(rows: Sequence[Row], alone: dict[str, list[bool]]) -> list[str]:
    """Markdown, a line for each reader, and one for the spread over the seeds of equal layers."""
    found = [
        "| receiver's layers | seed | steps | parameters | loss | right (95 %) | receiver alone |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        n, said = len(row.right), alone[row.layers]
        share = wilson(sum(row.right), n)
        which = ("bundled", "as shipped") if row.seed is None else (str(row.seed), str(row.steps))
        found.append(
            f"| {row.layers} | {which[0]} | {which[1]} | {row.parameters / 1e6:.2f} M | {row.loss:.3f} "
            f"| {share.value:.3f} ({share.low:.2f}-{share.high:.2f}) of {n} | {sum(said) / len(said):.3f} |"
        )
    for layers, same in _by_layers(rows).items():
        if len(same) > 1:
            losses, shares = [row.loss for row in same], [sum(row.right) / len(row.right) for row in same]
            found.append(
                f"| {layers} | {len(same)} seeds | {same[0].steps} | {same[0].parameters / 1e6:.2f} M "
                f"| {mean(losses):.3f} ± {stdev(losses):.3f} | {mean(shares):.3f} ± {stdev(shares):.3f} | |"
            )
    return found


def slices(rows: Sequence[Row], items: Sequence[Item]) -> list[str]:
    """Markdown: the share that is right, by what the items are labelled with."""
    found = [
        f"| slice | n | {' | '.join(row.name for row in rows)} |",
        "|---|---|" + "---|" * len(rows),
    ]
    labels = [(f"form:{item.kind}", *item.labels) for item in items]
    for label in sorted({label for of in labels for label in of}):
        at = [number for number, of in enumerate(labels) if label in of]
        shares = (f"{sum(row.right[i] for i in at) / len(at):.2f}" for row in rows)
        found.append(f"| {label} | {len(at)} | {' | '.join(shares)} |")
    return found


def apart(rows: Sequence[Row], passages: Sequence[int]) -> list[str]:
    """Readers of other layers, held against those of the bundled one's with the same seed, on the same questions."""
    found = []
    for first, other in itertools.product(rows, rows):
        if first.seed is None or first.layers != KEPT or other.layers == KEPT or other.seed != first.seed:
            continue
        both = compared(other.right, first.right, passages)
        by = both.difference
        found.append(
            f"{other.name} against {first.name}: right {by.value:+.3f} ({by.low:+.3f} to {by.high:+.3f}), "
            f"p {both.p:.2g}, loss {other.loss - first.loss:+.3f}"
        )
    return found


def _by_layers(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Those that were trained here."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.seed is not None:
            found.setdefault(row.layers, []).append(row)
    return found


if __name__ == "__main__":
    main()
