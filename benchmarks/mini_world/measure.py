"""One mini world, one fuser: trained and asked by what the product trains, serves and proves pairs with."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.mini_world.prepare import MOST, Prepared, load
from benchmarks.mini_world.world import KINDS, Split
from workers.asking import Asker
from workers.counterfactual import Pair
from workers.engine import Engine
from workers.items import Item, read_items
from workers.loader import Loader
from workers.pairing import HeldPair
from workers.plan import Plan
from workers.prove import Measured, measure_pair, report_of
from workers.train_pair import train_pair
from workers.verify_cli import hold

ROUTES = ("receiver", "sharer", "relay", "cache", "shuffled", "zero")
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A pair folder, and what it took."""

    folder: Path
    parameters: int
    cpu_s: float
    """Of training the fuser, the models' reading included."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one world and one fuser. Accuracy is exact to the letter."""

    per_kind: dict[str, dict[str, float]]
    """By kind and route."""
    mean: dict[str, float]
    """By route; every kind weighs the same."""
    questions: dict[str, int]
    """By kind."""
    latency_ms: dict[str, float]
    """By route: median from the first token read to the last one written."""
    split_ms: dict[str, dict[str, float]]
    """Of `relay` and `cache`: medians of their parts."""
    verdict: str
    reason: str
    """What `twolane pair verify` says of the same answers."""


def fit(place: Prepared, name: str, plan: Plan, tell: Tell, *, splits: Sequence[Split] = ("train",)) -> Fitted:
    """Train a fuser on the entities of these splits, into a folder beside the models."""
    folder = place.folder / name
    if folder.exists():
        shutil.rmtree(folder)
    sharer, receiver = load(place.model("sharer")), load(place.model("receiver"))
    items = [item for split in splits for item in read_items(place.data(split))]
    began = time.process_time()
    trained = train_pair(folder, name, sharer, receiver, items, plan)
    seconds = round(time.process_time() - began, 1)
    tell(f"{name}: {trained.pair.fuser.parameters} parameters, {seconds} s of CPU")
    return Fitted(folder, trained.pair.fuser.parameters, seconds)


def ask(
    fitted: Fitted, items: Sequence[Item], *, date: str, seed: int, relay: bool = True, most: int = MOST
) -> Outcome:
    """Every item by every route, one at a time, through the engine that serves; answers and hints have at most `most`
    tokens.
    """
    held, _ = hold(fitted.folder, Loader("cpu"))
    engine = Engine({}, pack=False)
    engine.start()
    try:
        asker = Asker(engine, most=most, hint=most)
        measured = measure_pair(held, [_among_its_like(held, item) for item in items], asker, relay=relay)
    finally:
        engine.close()
    measured.items = list(items)
    report = report_of(held, measured, date=date, seeds=(seed,))
    per_kind = _per_kind(measured)
    return Outcome(
        per_kind=per_kind,
        mean={route: _mean(row[route] for row in per_kind.values()) for route in ROUTES if route in measured.answers},
        questions={kind: sum(item.kind == kind for item in items) for kind in KINDS},
        latency_ms={route: report.latency_ms[route] for route in ROUTES if route in report.latency_ms},
        split_ms={"cache": report.split_ms, **({"relay": _relay_split(measured)} if relay else {})},
        verdict=report.verdict,
        reason=report.reason,
    )


def _among_its_like(held: HeldPair, item: Item) -> Item:
    """The shuffled control swaps items of one kind. Only those are one kind here whose questions are the same but for
    the name, in as many of the sharer's tokens: all that changes is whom the sharer has read about.
    """
    runtime = held.runtime
    assert isinstance(runtime, Pair)
    tokens = len(runtime.read_by_sharer(runtime.chat([dict(m) for m in item.chat])))
    return replace(item, kind="|".join((item.kind, *item.labels, str(tokens))))


def _per_kind(measured: Measured) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        rows = [number for number, item in enumerate(measured.items) if item.kind == kind]
        found[kind] = {
            route: _mean(exact(said[row].text, measured.items[row]) for row in rows)
            for route, said in sorted(measured.answers.items(), key=lambda one: ROUTES.index(one[0]))
        }
    return found


def exact(text: str, item: Item) -> bool:
    return text.strip() in item.answers


def _relay_split(measured: Measured) -> dict[str, float]:
    said = measured.answers["relay"]
    return {
        "hint": _median(a.ttft_ms - a.run.prefill_ms for a in said),
        "receiver": _median(a.run.prefill_ms for a in said),
        "decode": _median(a.run.decode_ms for a in said),
    }


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return round(sum(listed) / max(1, len(listed)), 4)


def _median(values: Iterable[float]) -> float:
    return round(median(values), 2)
