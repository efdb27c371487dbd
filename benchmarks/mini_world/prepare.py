"""A mini world in a folder: two models, three JSONL files, and what the relay's gate found. Made once, then reused.

The gate is passed before anything is compared: a relay that fails because its sharer misspells, or because its receiver
does not read, would prove nothing; nor would a fuser whose receiver does not know its own half of an answer. It asks
about entities that the test does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.mini_world.models import Recipe, Tell, make, prompt
from benchmarks.mini_world.world import KINDS, Kind, Question, Role, Size, World
from workers.config import ModelConfig
from workers.greedy import answers, read
from workers.loader import Loaded, Loader

MOST = 24
"""Tokens of an answer or hint."""
_ROWS = 128
_SEED_STEP = 1000
"""Between the seeds of one model and its next try."""


@dataclass(frozen=True, slots=True)
class Gates:
    """What either model must reach."""

    exact_hints: float = 0.98
    """Share of the sharer's hints that are right to the letter, on questions of kind `A`."""
    gold_hints: float = 0.95
    """The receiver's accuracy on `A` when it is given the right hint."""
    gold_joint: float = 0.9
    """The same on `AB`."""
    known: float = 0.97
    """The receiver's accuracy on `B` without any hint."""
    tries: int = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """All that changes what is made."""

    seed: int
    size: Size = field(default_factory=Size)
    recipe: Recipe = field(default_factory=Recipe)
    gates: Gates = field(default_factory=Gates)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What lies in the folder."""

    folder: Path
    world: World
    found: dict[str, Any] = field(default_factory=dict)
    """What the gates measured, by their names; `gold_hints_by_kind`; and for either model its `seed`, how many `tries`
    it took, and `cpu_s` of the last one.
    """

    def model(self, role: Role) -> Path:
        return self.folder / role

    def data(self, split: str) -> Path:
        return self.folder / f"{split}.jsonl"


class GateFailed(Exception):
    """A model did not learn what a fair relay needs, however often it was trained."""


def prepare(folder: Path, plan: Plan, tell: Tell = print) -> Prepared:
    """Raises GateFailed."""
    world, mark = World(plan.seed, plan.size), folder / "prepared.json"
    if (found := _kept(mark, asdict(plan))) is not None:
        return Prepared(folder, world, found)
    folder.mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation", "test"):
        lines = [world.line(question) for question in world.asked(split)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    sharer = _pass(folder, "sharer", world, plan, tell)
    receiver = _pass(folder, "receiver", world, plan, tell)
    by_kind = {kind: gold_hints(load(folder / "receiver"), world, kind) for kind in KINDS}
    found = {
        **sharer["reached"],
        **receiver["reached"],
        "gold_hints_by_kind": by_kind,
        **{part: {"sharer": sharer[part], "receiver": receiver[part]} for part in ("seed", "tries", "cpu_s")},
    }
    _keep(mark, asdict(plan), found)
    return Prepared(folder, world, found)


def _kept(mark: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """What was found when just this was asked; what was made for other plans counts as not there."""
    if not mark.exists():
        return None
    told = json.loads(mark.read_text())
    if told["asked"] == json.loads(json.dumps(asked)):
        return dict(told["found"])
    mark.unlink()
    return None


def _keep(mark: Path, asked: dict[str, Any], found: dict[str, Any]) -> None:
    mark.write_text(json.dumps({"asked": asked, "found": found}, indent=1) + "\n")


def _pass(folder: Path, role: Role, world: World, plan: Plan, tell: Tell) -> dict[str, Any]:
    """Train one model, with another seed where it fails a gate. Returns what it `reached` by gate, with which `seed`,
    and how many `tries` it took.
    """
    mark, lessons = folder / f"{role}.json", plan.recipe.of(role)
    least = {gate: getattr(plan.gates, gate) for gate in _MEASURES[role]}
    asked = {"seed": plan.seed, "size": asdict(plan.size), "lessons": asdict(lessons), "least": least}
    if (found := _kept(mark, asked)) is not None:
        return found
    for tried in range(plan.gates.tries):
        seed = plan.seed + tried * _SEED_STEP
        seconds = make(folder / role, role, world, lessons, seed, tell)
        model = load(folder / role)
        reached = {gate: measure(model, world) for gate, measure in _MEASURES[role].items()}
        told = ", ".join(f"{gate} {share:.3f} (needed {least[gate]:g})" for gate, share in reached.items())
        tell(f"{role}, seed {seed}: {told}; {seconds:.0f} s of CPU")
        if all(share >= least[gate] for gate, share in reached.items()):
            found = {"reached": reached, "seed": seed, "tries": tried + 1, "cpu_s": round(seconds, 1)}
            _keep(mark, asked, found)
            return found
    needed = ", ".join(f"{gate} {share:g}" for gate, share in least.items())
    raise GateFailed(f"seed {plan.seed}: no {role} of {plan.gates.tries} reached {needed}")


def load(folder: Path) -> Loaded:
    """As a worker loads it, in float32."""
    return Loader("cpu").load(ModelConfig.model_validate({"model": str(folder), "dtype": "float32"}))


def exact_hints(sharer: Loaded, world: World) -> float:
    """Share of hints about what it was told that say just that, name and all."""
    questions = _judged(world, "A")
    wanted = [world.hint(q, world.right(q)) for q in questions]
    asked = [prompt(sharer.tokenizer, "sharer", q, "") for q in questions]
    return _share(said(sharer, asked), wanted)


def gold_hints(receiver: Loaded, world: World, kind: Kind = "A") -> float:
    """Share of right answers when the hint is right."""
    questions = _judged(world, kind)
    asked = []
    for question in questions:
        hint = world.hint(question, world.right(question).split()[0])
        asked.append(prompt(receiver.tokenizer, "receiver", question, hint))
    return _share(said(receiver, asked), [world.right(q) for q in questions])


def gold_joint(receiver: Loaded, world: World) -> float:
    """Share of right answers of two words when the hint about the first is right."""
    return gold_hints(receiver, world, "AB")


def known(receiver: Loaded, world: World) -> float:
    """Share of right answers about what the receiver was told, without a hint."""
    questions = _judged(world, "B")
    asked = [prompt(receiver.tokenizer, "receiver", q) for q in questions]
    return _share(said(receiver, asked), [world.right(q) for q in questions])


_MEASURES: dict[Role, dict[str, Callable[[Loaded, World], float]]] = {
    "sharer": {"exact_hints": exact_hints},
    "receiver": {"gold_hints": gold_hints, "gold_joint": gold_joint, "known": known},
}
"""By the names of the gates."""


def _judged(world: World, kind: Kind) -> list[Question]:
    """Of all entities but those of the test."""
    names = (*world.entities("validation"), *world.entities("train"))
    return list(world.questions(names, (kind,)))


def said(model: Loaded, prompts: Sequence[Sequence[int]]) -> list[str]:
    """What a model answers alone, greedily."""
    found: list[str] = []
    for start in range(0, len(prompts), _ROWS):
        ids = answers(model, read(model, ()), prompts[start : start + _ROWS], MOST)
        found += model.tokenizer.batch_decode(ids, skip_special_tokens=True)
    return found


def _share(got: Sequence[str], wanted: Sequence[str]) -> float:
    return round(sum(a.strip() == b for a, b in zip(got, wanted, strict=True)) / len(wanted), 4)
