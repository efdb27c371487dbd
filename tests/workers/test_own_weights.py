"""What is loaded stays what it was, whatever happens to its files: the fingerprint names the bytes that answer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_model
from tests.workers.test_linear import saved
from workers.config import ModelConfig
from workers.fusers.c2c import load_official
from workers.fusers.folder import read_weights
from workers.loader import Loader

FUSER = Path(__file__).parents[1] / "golden" / "e2e" / "k_nearest_fewer_sharer_layers" / "fuser"


def _model(folder: Path, dtype: torch.dtype) -> Callable[[], dict[str, torch.Tensor]]:
    make_model(folder)
    file = folder / "model.safetensors"
    save_file({n: t.to(dtype) for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    name = str(dtype).removeprefix("torch.")
    return Loader("cpu").load(ModelConfig(name="m", model=str(folder), dtype=name)).model.state_dict  # type: ignore[arg-type]


def _official(folder: Path, dtype: torch.dtype) -> Callable[[], dict[str, torch.Tensor]]:
    shutil.copytree(FUSER, folder)
    for file in folder.rglob("*.safetensors"):
        save_file({n: t.to(dtype) for n, t in load_file(file).items()}, file)
    return load_official(folder, dtype=dtype).fuser.net.state_dict


def _linear(folder: Path, dtype: torch.dtype) -> Callable[[], dict[str, torch.Tensor]]:
    saved(folder)
    tensors = read_weights(folder, "linear")[1]
    return lambda: tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("load", [_model, _official, _linear], ids=lambda f: f.__name__.strip("_"))
def test_files_written_over_change_nothing_that_is_loaded(
    load: Callable[[Path, torch.dtype], Callable[[], dict[str, torch.Tensor]]], dtype: torch.dtype, tmp_path: Path
) -> None:
    """Every byte of the files is turned in place, as a copy over them would; tensors in memory are what they were."""
    state = load(tmp_path / "it", dtype)
    before = {name: tensor.clone() for name, tensor in state().items()}
    for file in (tmp_path / "it").rglob("*.safetensors"):
        size = file.stat().st_size
        with file.open("r+b") as opened:
            opened.write(b"\x01" * size)
    after = state()
    assert [name for name, tensor in after.items() if not torch.equal(tensor, before[name])] == []
