"""What fusing costs: nothing behind closed gates, and no wait for the device layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.workers.test_lite import random_kv
from tests.workers.test_runtime import finish
from tests.workers.tiny import tiny
from workers.cache import KVCache
from workers.fusers import rope
from workers.fusers.base import Fuser, KVShape
from workers.fusers.c2c import C2CFuser, Link
from workers.fusers.linear import LinearFuser, LinearShape
from workers.fusers.lite import LiteShape, fresh
from workers.fusers.projector import C2CProjector, ProjectorShape
from workers.fusers.several import JointFuser
from workers.prompt import Prompt
from workers.runtime import Paired


def c2c(layers: int, opened: tuple[int, ...] = ()) -> C2CFuser:
    """One projector a layer; layer i has `opened[i]` gates open of two (default: both)."""
    torch.manual_seed(1)
    projectors = {}
    for layer in range(layers):
        made = C2CProjector(ProjectorShape(16, 16, 2, 2, hidden_dim=24, intermediate_dim=24)).requires_grad_(False)
        for i, kind in enumerate(("key", "value")):
            made.get_parameter(f"{kind}_gate_logit").fill_(1.0 if i < (opened[layer] if opened else 2) else -1.0)
        projectors[layer] = made.eval()
    return C2CFuser(projectors, [Link(layer, layer) for layer in range(layers)])


def linear(layers: int, opened: tuple[int, ...] = ()) -> LinearFuser:
    cosine = tuple(float(opened[i] > 0) if opened else 1.0 for i in range(layers))
    side = KVShape(layers, 2, 16, 1e4)
    shape = LinearShape(side, side, tuple((i,) for i in range(layers)), cosine, 0.5, 0.5)
    tensors = {name: torch.randn(size) * 0.1 for name, size in shape.sizes.items()}
    return LinearFuser(shape, tensors, mode="fuse")


def lite(layers: int) -> Fuser:
    side = KVShape(layers, 2, 16, 1e4)
    return fresh(LiteShape(side, side, tuple(range(layers)), 4), torch.float32, 0)


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for the device: a tensor's value asked for, or a size that depends on one."""

    NAMES = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [c2c, linear, lite], ids=["c2c", "linear", "lite"])
def test_fusing_asks_the_device_nothing(make: Callable[[int], Fuser]) -> None:
    """No value is read back while layers are fused, and the rotation's angles are brought once, not layer by layer."""
    fuser, source = make(6), random_kv(9, layers=6)
    own = random_kv(9, layers=6, seed=1) if fuser.needs_own else None
    rope._table.cache_clear()
    with torch.inference_mode(), Waits() as waits:
        fuser.project(source, own, 3)
    assert waits.seen == []
    assert rope._table.cache_info().misses <= 1


def test_asking_is_noticed() -> None:
    """The counter counts: a gate that was asked for its value while fusing would show."""
    projector = c2c(1).projectors[0]
    with Waits() as waits:
        assert projector.is_open("key")
    assert waits.seen == ["_local_scalar_dense"]


@pytest.mark.parametrize("several", [False, True])
def test_a_whole_prompt_waits_no_more_often_with_more_layers(several: bool) -> None:
    """Reading and fusing a prompt asks the device as often for two layers as for six."""

    def waits(layers: int) -> list[str]:
        model, fuser = tiny(layers), c2c(layers)
        joint = JointFuser((fuser, fuser), "parallel") if several else fuser
        pair = Paired("p", model, model, joint, mode="fuse", scope="prompt", store=None, chunk=512,
                      others=[model] * several)  # fmt: skip
        with Waits() as seen:
            finish(pair, Prompt(tuple(range(1, 12)), 0))
        return seen.seen

    assert waits(2) == waits(6)


def flops(fuser: Fuser, tokens: int = 9) -> int:
    source, own = random_kv(tokens, layers=4), random_kv(tokens, layers=4, seed=1)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        fuser.project(source, own, 0)
    return counter.get_total_flops()


@pytest.mark.parametrize("make", [c2c, linear], ids=["c2c", "linear"])
def test_cost_is_in_proportion_to_open_gates(make: Callable[..., Fuser]) -> None:
    """Half the gates cost half the operations; with one layer open it is that layer's alone."""
    all_open = flops(make(4))
    assert all_open > 0
    assert flops(make(4, (2, 0, 2, 0))) * 2 == flops(make(4, (0, 0, 0, 2))) * 4 == all_open


def test_closed_gates_cost_nothing_and_give_own_kv_itself() -> None:
    """Not one operation, the very tensors, and no sharer layer is asked for."""
    closed, own = c2c(4, (0, 0, 0, 0)), random_kv(9, layers=4, seed=1)
    assert closed.source_layers == frozenset()
    with FlopCounterMode(display=False) as counter:
        fused = closed.project(KVCache([], []), own, 0)
    assert counter.get_total_flops() == 0
    assert all(f is o for f, o in zip((*fused.keys, *fused.values), (*own.keys, *own.values), strict=True))


@pytest.mark.parametrize("opened", [(1, 1, 1, 1), (2, 2, 0, 0)])
def test_half_of_the_c2c_gates_cost_half(opened: tuple[int, ...]) -> None:
    """K's and V's gates count apart."""
    assert flops(c2c(4, opened)) * 2 == flops(c2c(4))


def test_the_sharer_is_read_only_as_far_as_needed() -> None:
    """Layers above the highest that an open gate reads are not run; without an open gate the sharer is not run."""
    model, ids = tiny(4), Prompt(tuple(range(1, 12)), 0)
    sharer, read = tiny(4, seed=1), set[int]()
    for index, layer in enumerate(sharer.model.model.layers):
        layer.register_forward_hook(lambda *_, at=index: read.add(at))
    for opened, layers in (((2, 1, 0, 0), {0, 1}), ((0, 0, 0, 1), {0, 1, 2, 3}), ((0, 0, 0, 0), set[int]())):
        read.clear()
        pair = Paired("p", sharer, model, c2c(4, opened), mode="fuse", scope="prompt", store=None, chunk=512)
        spent = finish(pair, ids).spent
        assert read == layers
        assert (spent.sharer_s > 0) is bool(layers)
