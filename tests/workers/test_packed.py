from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.workers.test_engine import generate, some_ids
from workers.config import ModelConfig
from workers.loader import Loader
from workers.packed import Packer
from workers.packed_layers import PackedGate, PackedLinear


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many the products use."""
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


class Gated(nn.Module):
    """The MLP of Llama and its kin, or one that scales besides."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(48, 96, bias=False), nn.Linear(48, 96, bias=False)
        self.down_proj, self.act_fn, self.scale = nn.Linear(96, 48, bias=False), nn.SiLU(), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.scale * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


@pytest.mark.parametrize("rows", [1, 2, 7, 32, 33, 256, 257])
def test_gate_and_up_in_one_product_compute_what_two_do(rows: int, threads: int) -> None:
    """For every number of rows, packed once only; an MLP that computes anything else keeps its own way."""
    plain, odd = Gated(), Gated(scale=2.0)
    model, packer = nn.Sequential(copy.deepcopy(plain)), Packer()
    assert packer.pack(model) == 3
    assert packer.pack(model) == 0
    assert isinstance(model[0], PackedGate)
    x = torch.randn(rows, 1, 48)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-5, atol=1e-5)
        strange = nn.Sequential(copy.deepcopy(odd))
        assert packer.pack(strange) == 3
        assert type(strange[0]) is Gated
        torch.testing.assert_close(strange(x), odd(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 32, 33, 256, 257])
def test_a_packed_layer_computes_what_its_layer_does(rows: int, bias: bool, threads: int) -> None:
    """For every number of rows, threads, and any leading shape."""
    layer = nn.Linear(48, 96, bias=bias)
    model = nn.Sequential(layer)
    assert Packer().pack(model) == 1
    assert isinstance(model[0], PackedLinear)
    x = torch.randn(rows, 1, 48)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), layer(x), rtol=1e-5, atol=1e-5)


def test_only_what_gains_is_packed_and_shared_weights_once() -> None:
    """Other dtypes stay; two models of one weight share one packed copy."""
    layer = nn.Linear(8, 16)
    packer = Packer()
    one, two = nn.Sequential(layer, nn.Linear(16, 8)), nn.Sequential(layer)
    assert packer.pack(one) == 2
    assert packer.pack(two) == 1
    assert one[0]._packed is two[0]._packed
    assert Packer().pack(nn.Sequential(nn.Linear(8, 16).bfloat16())) == 0
    assert packer.pack(one) == 0


def test_a_packed_model_generates_the_same(tiny_folder: object) -> None:
    """Greedy tokens of a batch of one are those of the untouched model."""
    plain = Loader("cpu").load(ModelConfig(model=str(tiny_folder)))
    packed = Loader("cpu").load(ModelConfig(model=str(tiny_folder)))
    assert Packer().pack(packed.model) > 0
    assert generate(packed, some_ids(20), 12) == generate(plain, some_ids(20), 12)


def test_a_model_already_packed_can_be_truncated(tiny_folder: object) -> None:
    """A receiver is cut out of a model that runs already: same tokens as cut out of an untouched one."""
    cut = ModelConfig(model=str(tiny_folder), layers=(0, 2))
    loader = Loader("cpu")
    full = loader.load(ModelConfig(model=str(tiny_folder)))
    Packer().pack(full.model)
    late, early = loader.load(cut), Loader("cpu").load(cut)
    assert generate(late, some_ids(20), 8) == generate(early, some_ids(20), 8)


@pytest.mark.parametrize("rows", [1, 8, 257])
def test_gradients_pass_through_packed_layers(rows: int, threads: int) -> None:
    """What a fuser learns through a model is the same whether an engine has packed the model or not."""
    plain = nn.Sequential(nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 48), Gated())
    packed = copy.deepcopy(plain)
    assert Packer().pack(packed) >= 3
    given = torch.randn(rows, 48)
    found = []
    for model in (plain, packed):
        x = given.clone().requires_grad_()
        model(x).square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
