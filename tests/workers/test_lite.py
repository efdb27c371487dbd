"""The `lite` fuser: what it starts from, that pieces make the whole, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.tiny import tiny_pair
from workers.cache import KVCache
from workers.errors import KVMismatch, LoadFailed
from workers.fusers.base import Fuser, KVShape
from workers.fusers.lite import LiteFuser, LiteShape, copied_layers, fresh
from workers.greedy import read
from workers.pair_file import publish
from workers.pairs import FuserInfo

SHARER, RECEIVER = KVShape(4, 2, 16, 1e4), KVShape(2, 2, 16, 1e4)
SHAPE = LiteShape(SHARER, RECEIVER, (0, 3), rank=8)


def random_kv(tokens: int, layers: int = 4, heads: int = 2, size: int = 16, seed: int = 0) -> KVCache:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(1, heads, tokens, size, generator=generator) for _ in range(2 * layers)]
    return KVCache(draw[:layers], draw[layers:])


def stirred(shape: LiteShape = SHAPE, seed: int = 1) -> LiteFuser:
    """A fuser whose every weight does something."""
    fuser = fresh(shape, torch.float32, seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in fuser.net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    fuser.net.standardise([random_kv(40, seed=9)])
    return fuser


def publish_to(folder: Path, fuser: LiteFuser) -> LiteFuser:
    sharer, receiver = tiny_pair()
    stored = fuser.save(folder)
    info = FuserInfo("lite", stored.digest, stored.shape.as_json(), stored.parameters)
    publish(folder, "tiny", sharer, receiver, info, mode="handover", scope="context", made="2026-01-01")
    return stored


def test_it_is_a_fuser() -> None:
    """It keeps the protocol, and needs no own KV."""
    fuser = fresh(SHAPE, torch.float32, 0)
    assert isinstance(fuser, Fuser)
    assert not fuser.needs_own
    assert fuser.kind == "lite"


def test_untrained_is_the_copied_layers() -> None:
    """Before training it hands over the copied sharer layers as they are, at any position."""
    source = random_kv(6)
    fused = fresh(SHAPE, torch.float32, 0).project(source, None, 11)
    for mine, theirs in zip((0, 1), (0, 3), strict=True):
        assert torch.allclose(fused.keys[mine], source.keys[theirs], atol=1e-5)
        assert torch.allclose(fused.values[mine], source.values[theirs], atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 20), max_size=4), start=st.integers(0, 300))
def test_pieces_make_the_whole(cuts: list[int], start: int) -> None:
    """Projecting in pieces, each at its own start, equals projecting at once."""
    fuser, source = stirred(), random_kv(20)
    whole = fuser.project(source, None, start)
    edges = [0, *sorted(cuts), 20]
    parts = [fuser.project(source.slice(a, b), None, start + a) for a, b in pairwise(edges) if b > a]
    joined = KVCache.concat(parts)
    for a, b in zip((*whole.keys, *whole.values), (*joined.keys, *joined.values), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_content_is_mapped_apart_from_position() -> None:
    """The same bare KV is mapped to the same values wherever it stands."""
    from workers.fusers.rope import rotate, unrotate

    fuser, source = stirred(), random_kv(5)
    moved = KVCache([rotate(unrotate(k, 0, 1e4), 64, 1e4) for k in source.keys], source.values)
    here, there = fuser.project(source, None, 0), fuser.project(moved, None, 64)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(here.values, there.values, strict=True))
    assert not torch.allclose(here.keys[0], there.keys[0], atol=1e-2)


def test_every_sharer_layer_matters() -> None:
    """With a low-rank reading, a change in any sharer layer changes what is handed over."""
    fuser, source = stirred(), random_kv(4)
    base = fuser.project(source, None, 0)
    assert fuser.source_layers == frozenset(range(4))
    for layer in range(4):
        values = list(source.values)
        values[layer] = values[layer] + 1
        assert not torch.allclose(fuser.project(KVCache(source.keys, values), None, 0).keys[0], base.keys[0])


def test_without_low_rank_only_copied_layers_are_read() -> None:
    """Rank 0 reads the copied layers alone; the others may be empty, and the result is the same."""
    fuser = stirred(replace(SHAPE, rank=0))
    assert fuser.source_layers == {0, 3}
    full = random_kv(4)
    blank = full.keys[0][:, :, :0]
    sparse = KVCache(
        [k if i in {0, 3} else blank for i, k in enumerate(full.keys)],
        [v if i in {0, 3} else blank for i, v in enumerate(full.values)],
    )
    a, b = fuser.project(full, None, 3), fuser.project(sparse, None, 3)
    assert all(torch.equal(x, y) for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True))


def test_result_has_the_receivers_dtype() -> None:
    """It computes in float32 and casts at the end."""
    fuser = LiteFuser(stirred().net, torch.bfloat16)
    source = random_kv(3)
    half = KVCache([k.bfloat16() for k in source.keys], [v.bfloat16() for v in source.values])
    assert {t.dtype for pair in fuser.project(half, None, 0).tensors() for t in pair} == {torch.bfloat16}


@pytest.mark.parametrize(
    "source",
    [random_kv(4, layers=3), random_kv(4, heads=3), random_kv(4, size=8)],
    ids=["layers", "heads", "head size"],
)
def test_kv_of_another_shape_is_refused(source: KVCache) -> None:
    """KV that is not the sharer's raises KVMismatch, and never a tensor error."""
    with pytest.raises(KVMismatch):
        stirred().project(source, None, 0)


def test_saved_and_loaded_again(tmp_path: Path) -> None:
    """What `save` returns and what `from_folder` reads project the same and carry the same digest."""
    stored = publish_to(tmp_path, stirred())
    loaded = LiteFuser.from_folder(tmp_path, torch.float32)
    a, b = stored.project(random_kv(5), None, 2), loaded.project(random_kv(5), None, 2)
    assert all(torch.equal(x, y) for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True))
    assert loaded.digest == stored.digest != ""
    assert loaded.parameters == stored.parameters == sum(p.numel() for p in loaded.net.parameters())


def test_altered_weights_are_refused(tmp_path: Path) -> None:
    """One changed byte in the weights is found."""
    publish_to(tmp_path, stirred())
    file = tmp_path / "fuser.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(LoadFailed, match="SHA-256"):
        LiteFuser.from_folder(tmp_path, torch.float32)


@pytest.mark.parametrize("rank", [-1, 9, 10**6, 10**12, 2**64])
@pytest.mark.parametrize("heads", [2, 0, "2", 10**12])
def test_a_shape_that_lies_is_refused_before_it_takes_memory(tmp_path: Path, rank: int, heads: int | str) -> None:
    """Any size may stand in pair.json; it is held against the tensors that are there."""
    publish_to(tmp_path, stirred())
    file = tmp_path / "pair.json"
    pair = json.loads(file.read_bytes())
    shape = pair["fuser"]["shape"]
    shape["rank"] = rank
    for side in ("sharer", "receiver"):
        shape[side]["heads"] = heads
    file.write_text(json.dumps(pair))
    with pytest.raises(LoadFailed, match="shape in pair"):
        LiteFuser.from_folder(tmp_path, torch.float32)


@pytest.mark.parametrize("what", ["weights", "shape", "rank", "kind"])
def test_a_broken_folder_says_what_is_wrong(tmp_path: Path, what: str) -> None:
    """Missing weights, an unreadable or misfit shape and another kind raise LoadFailed."""
    publish_to(tmp_path, stirred())
    file = tmp_path / "pair.json"
    pair = json.loads(file.read_bytes())
    match what:
        case "weights":
            (tmp_path / "fuser.safetensors").unlink()
        case "shape":
            del pair["fuser"]["shape"]["copied"]
        case "rank":
            pair["fuser"]["shape"]["rank"] = 9
        case "kind":
            pair["fuser"]["kind"] = "c2c"
    file.write_bytes(msgspec.json.encode(pair))
    with pytest.raises(LoadFailed):
        LiteFuser.from_folder(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("sharer", "receiver", "copied"),
    [
        (SHARER, RECEIVER, (0,)),
        (SHARER, RECEIVER, (0, 4)),
        (SHARER, replace(RECEIVER, heads=4), (0, 3)),
        (SHARER, replace(RECEIVER, rope_theta=None), (0, 3)),
    ],
    ids=["too few", "no such layer", "other heads", "no plain rotation"],
)
def test_shapes_it_cannot_serve(sharer: KVShape, receiver: KVShape, copied: tuple[int, ...]) -> None:
    """A shape that this fuser cannot map is refused when it is made."""
    with pytest.raises(LoadFailed):
        LiteShape(sharer, receiver, copied, 4)


@pytest.mark.parametrize(
    ("kept", "expected"),
    [((0, 3), (0, 3)), (None, (0, 3)), ((2, 1), (2, 1))],
)
def test_copied_layers(kept: tuple[int, ...] | None, expected: tuple[int, ...]) -> None:
    """A truncated receiver starts from its own layers, any other from the nearest in depth."""
    assert copied_layers(SHARER, RECEIVER, kept) == expected


def test_handing_over_to_the_same_layers_is_exact() -> None:
    """Untrained, between a model and itself, the receiver's KV is the sharer's."""
    sharer, _ = tiny_pair()
    fuser = fresh(LiteShape(sharer.shape, sharer.shape, (0, 1, 2, 3), 4), torch.float32, 0)
    source = read(sharer, [1, 2, 3, 4, 5])
    fused = fuser.project(source, None, 0)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(fused.keys, source.keys, strict=True))
