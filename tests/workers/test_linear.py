"""The `linear` fuser: that pieces make the whole, what each mode does, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.test_lite import random_kv
from tests.workers.tiny import tiny_pair
from workers.cache import KVCache
from workers.errors import KVMismatch, LoadFailed
from workers.fusers.base import Fuser, KVShape
from workers.fusers.linear import LinearFuser, LinearShape
from workers.fusers.rope import rotate, unrotate
from workers.pair_file import publish
from workers.pairs import FuserInfo

SHAPE = LinearShape(KVShape(4, 2, 16, 1e4), KVShape(2, 3, 8, 1e5), ((0, 1), (2, 3)), (0.9, 0.7), least=0.5, blend=0.5)


def made(shape: LinearShape = SHAPE, mode: str = "handover", **more: Any) -> LinearFuser:
    """Random maps."""
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(size, generator=generator) * 0.2 for name, size in shape.sizes.items()}
    return LinearFuser(shape, tensors, mode=mode, **more)


def own_kv(tokens: int) -> KVCache:
    return random_kv(tokens, layers=2, heads=3, size=8, seed=5)


def saved(folder: Path, mode: str = "handover") -> LinearFuser:
    sharer, receiver = tiny_pair()
    stored = made().save(folder)
    info = FuserInfo("linear", stored.digest, stored.shape.as_json(), stored.parameters)
    publish(folder, "tiny", sharer, receiver, info, mode=mode, scope="context", made="2026-01-01")
    return stored


def same(a: KVCache, b: KVCache) -> bool:
    return all(torch.equal(x, y) for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True))


@pytest.mark.parametrize("mode", ["handover", "fuse"])
def test_it_is_a_fuser(mode: str) -> None:
    """It keeps the protocol; only `fuse` needs the receiver's own KV."""
    fuser = made(mode=mode)
    assert isinstance(fuser, Fuser)
    assert fuser.needs_own is (mode == "fuse")
    assert fuser.parameters == 2 * 2 * (64 + 2) * 24


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 20), max_size=4), start=st.integers(0, 300), mode=st.sampled_from(["fuse", ""]))
def test_pieces_make_the_whole(cuts: list[int], start: int, mode: str) -> None:
    """Projecting in pieces, each at its own start, equals projecting at once, in both modes."""
    fuser, source = made(mode=mode or "handover"), random_kv(20)
    own = own_kv(20) if mode else None
    whole = fuser.project(source, own, start)
    edges = [0, *sorted(cuts), 20]
    parts = [
        fuser.project(source.slice(a, b), own.slice(a, b) if own else None, start + a)
        for a, b in pairwise(edges)
        if b > a
    ]
    joined = KVCache.concat(parts)
    for a, b in zip((*whole.keys, *whole.values), (*joined.keys, *joined.values), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_content_is_mapped_apart_from_position() -> None:
    """The same bare KV is mapped to the same values and the same bare keys, wherever it stands behind the beginning."""
    fuser, source = made(), random_kv(5)
    moved = KVCache([rotate(unrotate(k, 7, 1e4), 64, 1e4) for k in source.keys], source.values)
    here, there = fuser.project(source, None, 7), fuser.project(moved, None, 64)
    for a, b in zip(here.values, there.values, strict=True):
        assert torch.allclose(a, b, atol=1e-4)
    for a, b in zip(here.keys, there.keys, strict=True):
        assert torch.allclose(unrotate(a, 7, 1e5), unrotate(b, 64, 1e5), atol=1e-3)


def test_the_first_position_has_an_offset_of_its_own() -> None:
    """Position 0 alone is moved by `first`."""
    fuser = made()
    still = LinearFuser(SHAPE, {n: t * (n != "first") for n, t in zip(SHAPE.sizes, _tensors(fuser), strict=True)})
    a, b = fuser.project(random_kv(4), None, 0), still.project(random_kv(4), None, 0)
    moved = [(x - y).abs().amax((0, 1, 3)) > 1e-6 for x, y in zip(a.values, b.values, strict=True)]
    assert all(m.tolist() == [True, False, False, False] for m in moved)
    assert same(fuser.project(random_kv(4), None, 1), still.project(random_kv(4), None, 1))


def _tensors(fuser: LinearFuser) -> tuple[torch.Tensor, ...]:
    return fuser._weight, fuser._bias, fuser._first


def test_fuse_moves_own_kv_by_the_blend() -> None:
    """With a blend of 1 it is the handover; with less, a point on the way from own KV to it."""
    source, own = random_kv(6), own_kv(6)
    handed = made().project(source, None, 2)
    assert same(made(replace(SHAPE, blend=1.0), "fuse").project(source, own, 2), handed)
    part = made(replace(SHAPE, blend=0.25), "fuse").project(source, own, 2)
    for mixed, mine, theirs in zip(part.values, own.values, handed.values, strict=True):
        assert torch.allclose(mixed, mine + 0.25 * (theirs - mine), atol=1e-6)


def test_layers_that_fit_badly_are_closed_in_fuse() -> None:
    """A layer below `least` is own KV itself, its sharer layers may be empty, and the figures say so."""
    shape = replace(SHAPE, least=0.8)
    fuser, source, own = made(shape, "fuse"), random_kv(6), own_kv(6)
    assert fuser.source_layers == {0, 1}
    assert fuser.change().gates_open == 0.5
    blank = source.keys[0][:, :, :0]
    sparse = KVCache([*source.keys[:2], blank, blank], [*source.values[:2], blank, blank])
    fused = fuser.project(sparse, own, 0)
    assert fused.keys[1] is own.keys[1]
    assert fused.values[1] is own.values[1]
    assert not torch.equal(fused.keys[0], own.keys[0])


@pytest.mark.parametrize(
    ("mode", "least", "says"), [("handover", 0.81, "mean attention cosine is 0.800"), ("fuse", 0.95, "all are closed")]
)
def test_a_bad_fit_is_refused(mode: str, least: float, says: str) -> None:
    """Handover refuses a mean cosine below the bar, and fuse refuses when no layer reaches it."""
    with pytest.raises(LoadFailed, match=says):
        made(replace(SHAPE, least=least), mode)


def test_result_has_the_receivers_dtype() -> None:
    """It computes in float32 and casts at the end, closed layers included."""
    fuser = made(replace(SHAPE, least=0.8), "fuse", dtype=torch.bfloat16)
    source, own = (KVCache([k.bfloat16() for k in kv.keys], [v.bfloat16() for v in kv.values])
                   for kv in (random_kv(3), own_kv(3)))  # fmt: skip
    assert {t.dtype for pair in fuser.project(source, own, 0).tensors() for t in pair} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("source", "own"),
    [
        (random_kv(4, layers=3), own_kv(4)),
        (random_kv(4, heads=3), own_kv(4)),
        (random_kv(4, size=8), own_kv(4)),
        (random_kv(4), random_kv(4)),
        (random_kv(4), None),
    ],
    ids=["layers", "heads", "head size", "receiver's shape", "no own KV"],
)
def test_kv_of_another_shape_is_refused(source: KVCache, own: KVCache | None) -> None:
    """KV that is not the sharer's, or not the receiver's, raises KVMismatch, and never a tensor error."""
    with pytest.raises(KVMismatch):
        made(mode="fuse").project(source, own, 0)


@pytest.mark.parametrize("mode", ["handover", "fuse"])
def test_saved_and_loaded_again(mode: str, tmp_path: Path) -> None:
    """One folder serves both modes, with the same maps bit for bit and the same digest."""
    stored = saved(tmp_path)
    loaded = LinearFuser.from_folder(tmp_path, torch.float32, mode=mode)
    own = own_kv(5) if mode == "fuse" else None
    assert same(loaded.project(random_kv(5), own, 0), made(mode=mode).project(random_kv(5), own, 0))
    assert loaded.digest == stored.digest != ""


@pytest.mark.parametrize("what", ["weights", "shape", "layers", "kind", "byte"])
def test_a_broken_folder_says_what_is_wrong(tmp_path: Path, what: str) -> None:
    """Missing or altered weights, an unreadable or misfit shape and another kind raise LoadFailed."""
    saved(tmp_path)
    file, weights = tmp_path / "pair.json", tmp_path / "fuser.safetensors"
    pair = json.loads(file.read_bytes())
    match what:
        case "weights":
            weights.unlink()
        case "byte":
            data = bytearray(weights.read_bytes())
            data[-1] ^= 1
            weights.write_bytes(data)
        case "shape":
            del pair["fuser"]["shape"]["layers"]
        case "layers":
            pair["fuser"]["shape"]["layers"] = [[0], [1]]
        case "kind":
            pair["fuser"]["kind"] = "lite"
    file.write_text(json.dumps(pair))
    with pytest.raises(LoadFailed):
        LinearFuser.from_folder(tmp_path, torch.float32)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": ((0, 1),)},
        {"layers": ((0, 1), (2,))},
        {"layers": ((0, 1), (2, 4))},
        {"layers": ((), ())},
        {"cosine": (1.0,)},
        {"blend": 0.0},
        {"sharer": KVShape(4, 2, 16, None)},
    ],
    ids=["too few", "unequal", "no such layer", "none", "cosines", "blend", "no plain rotation"],
)
def test_shapes_it_cannot_serve(changes: dict[str, Any]) -> None:
    """A shape that is not whole is refused when it is made."""
    with pytest.raises(LoadFailed):
        replace(SHAPE, **changes)
