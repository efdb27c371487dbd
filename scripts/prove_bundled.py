"""Proves a bundled pair and writes its report: `python -m scripts.prove_bundled pairs/smol-reader`.

The routes and the report are those of `twolane pair verify`, and so is every figure but one thing: the questions about
one document are asked together, greedily, which takes a fraction of asking one at a time. Times are taken on some
of them, one at a time through the engine, all routes in turn. Answers are kept in `--kept` as they come: a run that
was stopped goes on, and another fuser is not asked again what does not depend on it.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch

from scripts.questions import reader_items, twin_items
from workers import pairs
from workers.asking import Answer, Asker
from workers.counterfactual import otherwise
from workers.engine import Engine
from workers.fusers.base import Fuser
from workers.fusers.identity import IdentityFuser
from workers.greedy import answers, read
from workers.items import Item
from workers.loader import Loaded, Loader
from workers.pairing import HeldPair
from workers.pairs import Report, canonical
from workers.prompt import split_context
from workers.protocol import Run
from workers.prove import CONTROLS, Measured, measure_pair, report_of
from workers.report_text import for_people, told
from workers.runtime import Alone, Paired
from workers.verify import derange, silent
from workers.verify_cli import hold

MOST = 20
"""Tokens of an answer."""
ALONE = ("sharer", "receiver", "no_context")
_ABOUT = {
    "smol-reader": (
        "Passages and questions are synthetic. No name and no value of them occurs in a training passage; questions "
        "labelled wording:new are put in words that no training question has.",
        "The pair answers questions about facts that stand in the document, in one short sentence. It was trained for "
        "nothing else: ordinary conversation, reasoning over several facts, summaries, questions that the document "
        "does not answer, and documents much longer than those of training (about 250 tokens) are outside of what it "
        "can do.",
        "The two models that read everything themselves were given no examples of the answers' form. Answers count as "
        "right when they name the value, in whatever words. The 20-layer receiver was cut out of the full model and "
        "not healed, so it reads badly by itself: that it answers at all is the handed-over KV's work.",
    ),
    "smol-twin": ("Gain is zero by construction: both sides are the same weights. The pair is pure reuse.",),
}


@dataclass(slots=True)
class Kept:
    """Answers by what was asked of whom, in a file that only grows; without a file, in memory."""

    file: Path | None = None
    known: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.file is not None and self.file.exists():
            lines = self.file.read_bytes().splitlines()
            self.known = dict(msgspec.json.decode(line, type=tuple[str, list[str]]) for line in lines)

    def put(self, key: str, said: list[str]) -> None:
        self.known[key] = said
        if self.file is not None:
            with self.file.open("ab") as out:
                out.write(msgspec.json.encode((key, said)) + b"\n")


@dataclass(frozen=True, slots=True)
class Parts:
    """A handover pair of one tokenizer, taken apart."""

    sharer: Loaded
    receiver: Loaded
    fuser: Fuser
    fingerprint: str

    @classmethod
    def of(cls, held: HeldPair) -> Parts:
        runtime = held.runtime
        if isinstance(runtime, Paired) and isinstance(runtime.fuser, Fuser) and not runtime.fuser.needs_own:
            return cls(runtime.sharer, runtime.decoder, runtime.fuser, held.state.fingerprint)
        if not isinstance(runtime, Alone):
            raise SystemExit(f"{held.state.name}: only a handover pair of one sharer can be asked this way")
        model = runtime.decoder
        twin = IdentityFuser(model.identity, model.identity, model.shape)
        return cls(model, model, twin, held.state.fingerprint)


@torch.no_grad()
def ask_together(parts: Parts, items: Sequence[Item], routes: Sequence[str], kept: Kept) -> Measured:
    """Every item by the routes; neighbours with one document are one batch. Times are not taken."""
    together = [list(group) for _, group in itertools.groupby(items, key=lambda item: item.before)]
    others = derange([group[0].kind for group in together])
    contexts = [_split(parts, group)[0] for group in together]
    measured = Measured(items=list(items))
    for number, group in enumerate(together):
        for route in routes:
            said = _said(parts, route, group, contexts[others[number]], kept)
            found = [Answer(text, 0.0, 0.0, Run(gates_open=1.0)) for text in said]
            measured.answers.setdefault(route, []).extend(found)
        print(f"document {number + 1}/{len(together)}", flush=True)
    return measured


def _split(parts: Parts, group: Sequence[Item]) -> tuple[list[int], list[list[int]]]:
    """The document's ids, and what stands behind them for each question."""
    split = [split_context(parts.receiver.tokenizer, item.chat) for item in group]
    return split[0][0], [rest for _, rest in split]


def _said(parts: Parts, route: str, group: Sequence[Item], other: Sequence[int], kept: Kept) -> list[str]:
    context, rests = _split(parts, group)
    match route:
        case "sharer":
            return _alone(parts.sharer, context, rests, kept)
        case "receiver" if parts.fuser.kind == "identity":
            # Read in one piece, so that handing over is compared with something else than itself.
            return _alone(parts.receiver, (), [[*context, *rest] for rest in rests], kept)
        case "receiver":
            return _alone(parts.receiver, context, rests, kept)
        case "no_context":
            bare = [split_context(parts.receiver.tokenizer, item.last_only) for item in group]
            return _alone(parts.receiver, (), [[*before, *rest] for before, rest in bare], kept)
        case "zero":
            return _over(parts, None, len(context), rests, kept)
        case "shuffled":
            return _over(parts, other, len(context), rests, kept)
        case _:
            return _over(parts, context, len(context), rests, kept)


def _alone(model: Loaded, context: Sequence[int], rests: Sequence[Sequence[int]], kept: Kept) -> list[str]:
    """What a model says that reads everything itself."""
    key = _key(model.fingerprint, context, rests)
    if key not in kept.known:
        kept.put(key, _texts(model, answers(model, read(model, context), rests, MOST)))
    return kept.known[key]


def _over(
    parts: Parts, source: Sequence[int] | None, count: int, rests: Sequence[Sequence[int]], kept: Kept
) -> list[str]:
    """What the receiver says over what the sharer has read, or over `count` tokens of nothing."""
    key = _key(parts.fingerprint, [count] if source is None else source, rests)
    if key not in kept.known:
        kv = silent(parts.sharer, count) if source is None else read(parts.sharer, source)
        given = parts.fuser.project(kv, None, 0)
        kept.put(key, _texts(parts.receiver, answers(parts.receiver, given, rests, MOST)))
    return kept.known[key]


def _key(who: str, source: Sequence[int], rests: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(canonical([who, MOST, list(source), [list(r) for r in rests]])).hexdigest()


def _texts(model: Loaded, found: Sequence[Sequence[int]]) -> list[str]:
    return [str(model.tokenizer.decode(ids, skip_special_tokens=True)) for ids in found]


def prove(held: HeldPair, items: Sequence[Item], kept: Kept, *, timed: int, seeds: tuple[int, ...]) -> Report:
    """The report; `timed` items give its times, with 0 it has none."""
    parts = Parts.of(held)
    controls = () if parts.fuser.kind == "identity" else CONTROLS
    measured = ask_together(parts, items, (*ALONE, "cache", *controls), kept)
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    notes = [*_ABOUT.get(held.state.name, ()), "The questions about one document were asked together, without a relay."]
    if not timed:
        report = report_of(held, measured, date=date, seeds=seeds, notes=tuple(notes))
        return msgspec.structs.replace(report, latency_ms={}, ttft_ms={}, split_ms={})
    notes.append(f"Times are medians over {timed} of the questions, asked one at a time on one thread.")
    report = report_of(held, measured, date=date, seeds=seeds, notes=tuple(notes))
    times = report_of(held, _one_by_one(held, items[:: max(1, len(items) // timed)][:timed]), date=date)
    return msgspec.structs.replace(
        report, latency_ms=times.latency_ms, ttft_ms=times.ttft_ms, split_ms=times.split_ms, gates=times.gates
    )


def _one_by_one(held: HeldPair, items: Sequence[Item]) -> Measured:
    engine = Engine({}, pack=False)
    engine.start()
    try:
        return measure_pair(held, items, Asker(engine, most=MOST), relay=False)
    finally:
        engine.close()


def main() -> None:
    """Ask, judge, write `report.json`, `report.txt` and `report.svg`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=45, help="passages that are asked about")
    parser.add_argument("--first", type=int, default=10_000, help="number of the first passage")
    parser.add_argument("--timed", type=int, default=12, help="questions that give the times; 0 leaves times out")
    parser.add_argument("--kept", type=Path, help="file of answers, to go on after a stop")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="default: the pair's folder")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    held, file = hold(args.folder, Loader("cpu"))
    tokenizer = otherwise(held.runtime, "receiver", None).decoder.tokenizer
    reads = file.scope == "context"
    items = reader_items(tokenizer, args.documents, args.first) if reads else twin_items(args.documents)
    seeds = (int(file.training.options["seed"]),) if file.training else ()
    report = prove(held, items, Kept(args.kept), timed=args.timed, seeds=seeds)
    out = args.out or args.folder
    pairs.write(out, "report.json", report)
    for_people(out, report, as_png=False)
    print(told(report))


if __name__ == "__main__":
    main()
