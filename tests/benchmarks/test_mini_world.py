"""benchmarks/mini_world: the world is what it says, and one quick run makes the report."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.mini_world.__main__ import QUICK, main
from benchmarks.mini_world.models import prompt, text_of
from benchmarks.mini_world.prepare import GateFailed, Gates, Plan, load, prepare
from benchmarks.mini_world.report import PAPER
from benchmarks.mini_world.world import ASKED, DISPUTED, KINDS, TOLD, VALUES, Question, Size, World
from workers.asking import Asker
from workers.engine import Engine
from workers.hint import for_receiver, for_sharer
from workers.items import digest_of_items, read_items
from workers.pairs import read_pair
from workers.prompt import chat_prompt
from workers.runtime import Alone

SMALL = Size(entities=12, validation=3, test=4)
worlds = st.builds(lambda seed: World(seed, SMALL), st.integers(0, 10_000))


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A work folder with one quick world and its outcome."""
    work = tmp_path_factory.mktemp("mini")
    threads = torch.get_num_threads()
    main(["--quick", "--one", str(work / "outcome-0.json"), "--work", str(work)])
    yield work
    torch.set_num_threads(threads)


@given(worlds)
@settings(max_examples=30)
def test_who_knows_what(made: World) -> None:
    """Each attribute is known to one model, the disputed one to both together: their candidates meet in the truth."""
    for name in made.names:
        for attribute, values in VALUES.items():
            right = made.right(Question("A", name, (attribute,), 0))
            told = {role: made.told(role, name, attribute) for role in TOLD}
            if attribute == DISPUTED:
                assert set(told["sharer"]) & set(told["receiver"]) == {right}
                assert all(len(set(candidates)) == 2 for candidates in told.values())
            else:
                knows, not_told = ("sharer", "receiver") if attribute in TOLD["sharer"] else ("receiver", "sharer")
                assert told[knows] == (right,)
                assert told[not_told] == values


@given(worlds)
@settings(max_examples=30)
def test_splits_share_no_entity(made: World) -> None:
    """Every entity is in one split, and what is asked about one split names no entity of another."""
    splits = {split: made.entities(split) for split in ("train", "validation", "test")}
    assert [len(names) for names in splits.values()] == [5, 3, 4]
    assert sorted(name for names in splits.values() for name in names) == sorted(made.names)
    assert len(set(made.names)) == SMALL.entities
    for split, names in splits.items():
        assert {q.name for q in made.asked(split)} == set(names)


def test_kinds_of_the_test_weigh_alike() -> None:
    """A, B and AB are asked equally often; S, of one attribute, half as often."""
    made = World(0, SMALL)
    count = {kind: sum(q.kind == kind for q in made.asked("test")) for kind in KINDS}
    assert count == {"A": 16, "B": 16, "AB": 16, "S": 8}


@given(worlds, st.integers(0, 10_000))
@settings(max_examples=30)
def test_hints_tell_a_receiver_nothing(made: World, seed: int) -> None:
    """What a receiver learns to answer to a hint depends on the hint and on what it was told, not on what is right."""
    other = World.__new__(World)
    other.size, other.names, other._candidates = made.size, made.names, made._candidates
    unknown = random.Random(seed)
    other._right = {
        name: {a: v if a in TOLD["receiver"] else unknown.choice(VALUES[a]) for a, v in known.items()}
        for name, known in made._right.items()
    }
    for question in made.questions(made.names[:2]):
        assert made.hinted(question, random.Random(seed)) == other.hinted(question, random.Random(seed))


def test_receiver_trusts_holds_and_intersects() -> None:
    """A hint is trusted where nothing was told, ignored against what was told, and taken where it is a candidate."""
    made, chance = World(1, SMALL), random.Random(0)
    for question in made.questions(made.names):
        hint, words = made.hinted(question, chance)
        value, own = hint.split()[0], made.told("receiver", question.name, question.attributes[0])
        assert words[0] == ((value,) if value in own else own)
        if question.kind == "AB":
            assert words[1] == (made.right(question).split()[1],)


def test_prompts_are_those_of_the_product(quick: Path) -> None:
    """What the models were trained to read is, id for id, what the product's templates and relay wording make of it."""
    made, hint = World(0, QUICK.size), "red is the colour of it"
    for kind in KINDS:
        question = Question(kind, made.names[0], ASKED[kind][0], 1)
        chat = [{"role": "user", "content": question.text}]
        for role, told in (("sharer", for_sharer(chat)), ("receiver", for_receiver(chat, hint))):
            tokens = load(quick / "seed-0" / role).tokenizer
            assert list(chat_prompt(tokens, chat).ids) == prompt(tokens, role, question)
            assert list(chat_prompt(tokens, told).ids) == prompt(tokens, role, question, hint)
            assert len(prompt(tokens, role, question, hint)) < len(prompt(tokens, role, question)) + 30


def test_models_are_loaded_and_asked_like_any_other(quick: Path) -> None:
    """A folder is an ordinary model: the engine serves it, and its vocabulary is its own."""
    sharer, receiver = (load(quick / "seed-0" / role) for role in ("sharer", "receiver"))
    assert sharer.digests.tokenizer != receiver.digests.tokenizer
    assert (sharer.shape.layers, receiver.shape.layers) == (2, 2)
    item = read_items(quick / "seed-0" / "test.jsonl")[0]
    engine = Engine({}, pack=False)
    engine.start()
    try:
        said = Asker(engine, most=4).ask(Alone("alone", receiver, None, 64), item)
    finally:
        engine.close()
    assert said.run.decode_ms >= 0


def test_report_of_a_quick_run(quick: Path, tmp_path: Path) -> None:
    """The report has every figure by route and kind, over just the questions of the test; what was found before is not
    looked for again.
    """
    outcome = json.loads((quick / "outcome-0.json").read_text())
    (quick / "outcome-1.json").write_text(json.dumps(outcome | {"seed": 1, "asked": _asked_with_seed(outcome, 1)}))
    main(["--quick", "--seeds", "0", "1", "--work", str(quick), "--out", str(tmp_path)])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["seeds"] == [0, 1]
    routes = ["receiver", "sharer", "relay", "cache", "shuffled", "zero"]
    assert list(report["mean"]) == routes
    assert {kind: list(row) for kind, row in report["per_kind"].items()} == dict.fromkeys(KINDS, routes)
    assert report["questions"] == {"A": 8, "B": 8, "AB": 8, "S": 4}
    assert report["latency_ratio"] > 0
    assert set(report["split_ms"]["relay"]) == {"hint", "receiver", "decode"}
    assert list(report["holds"]) == list(PAPER)
    for name in ("accuracy.svg", "latency.svg"):
        assert (tmp_path / name).read_text().startswith("<svg")


def test_the_report_is_on_entities_that_no_fuser_has_seen(quick: Path) -> None:
    """The fuser of a report learns from the entities that choices are made on, and never from those of the test."""
    place = quick / "seed-0"
    learnt = [item for split in ("train", "validation") for item in read_items(place / f"{split}.jsonl")]
    training = read_pair(place / "lite").training
    assert training is not None
    assert training.data == digest_of_items(learnt)
    asked = {str(item.chat[-1]["content"]) for item in read_items(place / "test.jsonl")}
    assert asked.isdisjoint(str(item.chat[-1]["content"]) for item in learnt)


def _asked_with_seed(outcome: dict[str, Any], seed: int) -> dict[str, Any]:
    return {part: {**plan, "seed": seed} for part, plan in outcome["asked"].items()}


def test_prepared_once(quick: Path) -> None:
    """The same plan finds what lies there; another one makes it anew."""
    place = quick / "seed-0"
    before = (place / "sharer" / "model.safetensors").stat().st_mtime_ns
    prepare(place, Plan(0, QUICK.size, QUICK.recipe, QUICK.gates), tell=lambda _: None)
    assert (place / "sharer" / "model.safetensors").stat().st_mtime_ns == before


def test_a_model_that_fails_its_gate_is_trained_again(tmp_path: Path) -> None:
    """Each try takes another seed; when none reaches the gate nothing is compared."""
    told: list[str] = []
    strict = Plan(0, QUICK.size, QUICK.recipe, Gates(tries=2))
    with pytest.raises(GateFailed, match="no sharer of 2"):
        prepare(tmp_path, strict, told.append)
    assert [line for line in told if line.startswith("sharer, seed")] == [
        line for seed in (0, 1000) for line in told if line.startswith(f"sharer, seed {seed}:")
    ]
    assert not (tmp_path / "prepared.json").exists()


def test_texts_of_both_roles_differ_by_what_makes_them_answer() -> None:
    """The receiver is told to begin; the sharer's question ends with its last character."""
    question = Question("A", "velmor", ("colour",), 0)
    assert text_of("sharer", question, None) == "<q>what is the colour of velmor?"
    assert text_of("receiver", question, None) == "<q>what is the colour of velmor?<go>"
