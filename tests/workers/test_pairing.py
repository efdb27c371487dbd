"""A pair is only what its folder was made for: the parties and the fuser that `pair.json` names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_model
from workers.config import Fleet, ModelConfig, PairConfig, WorkerConfig
from workers.engine import Engine
from workers.fusers.lite import LiteShape, fresh
from workers.holdings import Holdings
from workers.loader import Loader
from workers.pairs import FuserInfo
from workers.protocol import PairState
from workers.train import publish

LAYERS = (0, 2)


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A pair of the tiny model and two of its layers, with a model folder of its own to change."""
    model = shutil.copytree(tiny_folder, tmp_path / "model")
    loader = Loader("cpu")
    sharer = loader.load(ModelConfig(model=str(model)))
    receiver = loader.load(ModelConfig(model=str(model), layers=LAYERS))
    fuser = fresh(LiteShape(sharer.shape, receiver.shape, LAYERS, rank=2), torch.float32, 0).save(tmp_path / "pair")
    info = FuserInfo("lite", fuser.digest, fuser.shape.as_json(), fuser.parameters)
    publish(tmp_path / "pair", "p", sharer, receiver, info, mode="handover", scope="context", made="2026-01-01")
    return tmp_path


def held(folder: Path) -> PairState:
    """What a worker with that pair says of it."""
    config = PairConfig(
        name="p",
        sharer="m",
        receiver=ModelConfig(name="r", model=str(folder / "model"), layers=LAYERS),
        fuser=str(folder / "pair"),
    )
    fleet = Fleet(
        models=(ModelConfig(name="m", model=str(folder / "model")),),
        pairs=(config,),
        workers=(WorkerConfig(name="w", pairs=("p",), threads=1),),
    )
    holdings = Holdings(fleet, fleet.workers[0])
    engine = Engine(holdings.runtimes, threads=1)
    engine.start()
    holdings.load_in_background(engine).join()
    engine.close()
    holdings.close()
    return holdings.pairs[0]


def change_weights(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] += 0.5
    save_file(tensors, file, metadata={"format": "pt"})


def change_tokenizer(folder: Path) -> None:
    file = folder / "model" / "tokenizer.json"
    said = json.loads(file.read_text())
    said["model"]["merges"].pop()
    file.write_text(json.dumps(said))


def change_fuser(folder: Path) -> None:
    file = folder / "pair" / "fuser.safetensors"
    tensors = load_file(file)
    tensors["bias"][0, 0, 0] += 0.5
    save_file(tensors, file)


def change_model(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    make_model(folder / "model", seed=7)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (change_weights, "the sharer's weights are not those that the pair p was made for"),
        (change_model, "the sharer's weights are not those that the pair p was made for"),
        (change_tokenizer, "the sharer's tokenizer are not those that the pair p was made for"),
        (change_fuser, "fuser.safetensors: its SHA-256 is"),
    ],
)
def test_a_pair_with_anything_changed_is_unavailable_and_says_why(folder: Path, change: object, reason: str) -> None:
    """One number in a weight, one merge of the tokenizer, one number of the fuser, another model: refused by name."""
    assert callable(change)
    change(folder)
    state = held(folder)
    assert not state.ready
    assert reason in state.reason


def test_an_untouched_pair_is_ready_and_one_with_another_template_unproven(folder: Path) -> None:
    """What only changes how a chat is written leaves the pair usable, and in doubt."""
    before = held(folder)
    assert before.ready
    config = folder / "model" / "chat_template.jinja"
    config.write_text(config.read_text() + "{# other #}")
    after = held(folder)
    assert after.ready
    assert after.verdict == "unproven"
