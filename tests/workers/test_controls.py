"""The adapter control: what is made of a silent sharer cannot depend on the sharer, and runs as the pair runs."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from router.cli import main
from tests.tiny import make_model
from workers import pairs
from workers.config import ModelConfig
from workers.controls import adapter
from workers.errors import LoadFailed
from workers.fit_linear import bare_rows
from workers.greedy import read
from workers.items import Item, read_items
from workers.loader import Loaded, Loader
from workers.pairs import Report
from workers.plan import Plan
from workers.runtime import Paired
from workers.train_pair import fit_pair, train_pair

WORDS = ("tide", "harbour", "ledger", "France", "buyer", "item", "date", "sale", "hour", "capital")
ROWS = [{"context": f"Item {i} is {w}.", "question": "What is it?", "answer": w} for i, w in enumerate(WORDS)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("items") / "items.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return file


@pytest.fixture(scope="module")
def items(data: Path) -> list[Item]:
    return read_items(data)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> list[Loaded]:
    """Two models of one shape with a tokenizer of their own."""
    place = tmp_path_factory.mktemp("foreign")
    made = [make_model(place / str(seed), seed=seed, ascii_only=True) for seed in (5, 6)]
    return [Loader("cpu").load(ModelConfig(model=str(folder))) for folder in made]


@pytest.mark.parametrize("kind", ["c2c", "aligned", "lite"])
def test_a_deaf_training_knows_nothing_of_the_sharer(
    tmp_path: Path, tiny: Loaded, other: Loaded, foreign: list[Loaded], items: list[Item], kind: str
) -> None:
    """Two sharers of one shape, one of them the receiver itself: deaf, they make the very same fuser; listening, each
    makes its own.
    """
    mode = "handover" if kind == "lite" else "fuse"
    plan = Plan("c2c" if kind == "aligned" else kind, mode, "prompt", steps=2, width=16, rank=4)
    sharers = foreign if kind == "aligned" else [tiny, other]
    made: dict[bool, list[str]] = {True: [], False: []}
    for deaf, digests in made.items():
        for number, sharer in enumerate(sharers):
            place = tmp_path / f"{deaf}{number}"
            digests.append(train_pair(place, "p", sharer, other, items, plan, deaf=deaf).pair.fuser.digest)
    assert made[True][0] == made[True][1]
    assert len({*made[False], made[True][0]}) == 3


def test_of_a_deaf_fit_constants_are_left(tiny: Loaded, other: Loaded, items: list[Item]) -> None:
    """A linear fuser that heard nothing maps everything to the mean of the receiver's own KV; so of a pair whose sharer
    is its receiver.
    """
    plan = Plan("linear", "fuse", "prompt", tokens=10_000)
    fitted = fit_pair(tiny, other, items, plan, deaf=True)
    assert not fitted.tensors["weight"].any()
    chats = [[*item.chat, {"role": "assistant", "content": item.answers[0]}] for item in items]
    texts = [str(other.tokenizer.apply_chat_template(chat, tokenize=False)) for chat in chats]
    ids = [other.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    rows = [bare_rows(read(other, one), [0], 0, other.shape)[0][:, 1:] for i, one in enumerate(ids) if i % 8 != 1]
    torch.testing.assert_close(fitted.tensors["bias"][0], torch.cat(rows, 1).mean(1), rtol=1e-3, atol=1e-4)
    itself = fit_pair(other, other, items, plan, deaf=True)
    assert torch.equal(itself.tensors["bias"], fitted.tensors["bias"])


def test_the_control_of_a_linear_pair_runs_in_its_layers(
    tmp_path: Path, tiny: Loaded, other: Loaded, items: list[Item]
) -> None:
    """In both modes, though no layer of it would pass the screen; on other items, or untrained, there is none."""
    for mode, scope in (("fuse", "prompt"), ("handover", "context")):
        plan = Plan("linear", mode, scope, tokens=200)
        place = tmp_path / mode
        file = train_pair(place, "p", tiny, other, items, plan).pair
        control = adapter(file, tiny, other, items, tmp_path / "control", 64)
        assert isinstance(control, Paired)
        assert (control.mode, control.scope) == (mode, scope)
        theirs = pairs.read_pair(place).fuser.shape
        assert control.fuser.shape.cosine == tuple(theirs["cosine"])  # type: ignore[union-attr]
        with pytest.raises(LoadFailed, match="trained on other items"):
            adapter(file, tiny, other, items[1:], tmp_path / "control", 64)
    with pytest.raises(LoadFailed, match="does not say how its fuser was trained"):
        adapter(msgspec.structs.replace(file, training=None), tiny, other, items, tmp_path, 64)
    several = msgspec.structs.replace(file, others=(file.sharer,))
    with pytest.raises(LoadFailed, match="has several sharers"):
        adapter(several, tiny, other, items, tmp_path, 64)


@pytest.mark.parametrize(
    ("sharer", "options"),
    [("tiny", ("--fuser", "linear", "--mode", "fuse", "--tokens", "200")), ("foreign", ("--fuser", "c2c"))],
)
def test_the_command_asks_the_control(
    tmp_path: Path,
    tiny: Loaded,
    other: Loaded,
    foreign: list[Loaded],
    data: Path,
    sharer: str,
    options: tuple[str, ...],
) -> None:
    """`pair verify --control adapter`, of a linear pair and of one with two tokenizers."""
    source = tiny.source if sharer == "tiny" else foreign[0].source
    made = ["--data", str(data), "--out", str(tmp_path / "pair"), "--device", "cpu", "--steps", "2", "--width", "16"]
    trained = CliRunner().invoke(main, ["pair", "train", source, other.source, *made, *options])
    assert trained.exit_code == 0, trained.output
    asked = ["--data", str(data), "--no-relay", "--max-tokens", "2", "--limit", "3", "--device", "cpu", "--json"]
    control = ["--control", "adapter", "--train-data", str(data)]
    done = CliRunner().invoke(main, ["pair", "verify", str(tmp_path / "pair"), *asked, *control])
    report = msgspec.json.decode(done.stdout, type=Report)
    assert {"receiver", "sharer", "cache", "shuffled", "zero", "adapter"} == set(report.accuracy)
