"""A pair is only what its folder was made for: the parties and the fuser that `pair.json` names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_model
from tests.workers.test_runtime import finish, keep_of, some_ids
from workers.config import Fleet, ModelConfig, PairConfig, WorkerConfig
from workers.engine import Engine
from workers.fusers.linear import LinearFuser, LinearShape
from workers.fusers.lite import LiteShape, fresh
from workers.holdings import Holdings
from workers.loader import Loaded, Loader
from workers.pair_file import publish
from workers.pairing import hold_pair
from workers.pairs import FuserInfo
from workers.prompt import Prompt
from workers.protocol import PairState
from workers.store import KVStore

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


def reshape_lite(shape: dict[str, Any]) -> None:
    shape["copied"] = [0, 1]


def reshape_blend(shape: dict[str, Any]) -> None:
    shape["blend"] = 1.0


def reshape_least(shape: dict[str, Any]) -> None:
    shape["least"] = 0.8  # closes one of its two layers


def linear_pair(folder: Path, sharer: Loaded, receiver: Loaded) -> None:
    """Maps of random numbers, in mode fuse over the context."""
    layers, cosines = ((0, 1), (1, 2)), (0.9, 0.7)
    shape = LinearShape(sharer.shape, receiver.shape, layers, cosines, least=0.5, blend=0.5)
    draw = torch.Generator().manual_seed(3)
    fuser = LinearFuser(shape, {n: torch.randn(size, generator=draw) * 0.2 for n, size in shape.sizes.items()})
    info = FuserInfo("linear", fuser.save(folder).digest, shape.as_json(), fuser.parameters)
    publish(folder, "p", sharer, receiver, info, mode="fuse", scope="context", made="2026-01-01")


@pytest.mark.parametrize("reshape", [reshape_lite, reshape_blend, reshape_least])
def test_the_same_weights_in_another_shape_are_another_pair(
    folder: Path, store: KVStore, reshape: Callable[[dict[str, Any]], None]
) -> None:
    """Its fingerprint differs, and with a store full of what the old shape fused it answers as one without a store."""
    loader = Loader("cpu")
    whole, part = ModelConfig(model=str(folder / "model")), ModelConfig(model=str(folder / "model"), layers=LAYERS)
    if reshape is not reshape_lite:
        shutil.rmtree(folder / "pair")
        linear_pair(folder / "pair", loader.load(whole), loader.load(part))
    config = PairConfig(name="p", sharer=whole, receiver=part, fuser=str(folder / "pair"))
    prompt, keep = Prompt(some_ids(60), 48), keep_of(store)
    before = hold_pair(Fleet(), config, loader, store, 32).runtime
    finish(before, prompt, keep)
    assert store.settle()
    assert finish(before, prompt, keep).spent.reused == 48
    file = folder / "pair" / "pair.json"
    said = json.loads(file.read_text())
    reshape(said["fuser"]["shape"])
    file.write_text(json.dumps(said))
    after = hold_pair(Fleet(), config, loader, store, 32).runtime
    cold = hold_pair(Fleet(), config, loader, None, 32).runtime
    assert after.fingerprint != before.fingerprint
    assert torch.equal(finish(after, prompt, keep).logits, finish(cold, prompt).logits)
    assert not torch.equal(finish(before, prompt).logits, finish(cold, prompt).logits)
