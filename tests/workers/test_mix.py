"""The general `lite` network: what it starts from, what it reads and changes, its file, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.test_lite import random_kv
from workers.cache import KVCache
from workers.errors import KVMismatch, LoadFailed
from workers.fusers.base import Fuser, KVShape, Slots
from workers.fusers.mix import MixFuser, fresh
from workers.fusers.mix_net import MixShape
from workers.fusers.mix_start import begin
from workers.fusers.rope import rotate, unrotate
from workers.pairs import FORMAT, FuserInfo, PairFile, Party, write

SHARER, RECEIVER = KVShape(3, 1, 12, 1e4), KVShape(2, 3, 8, 5e2)
FUSE = MixShape(SHARER, RECEIVER, own=True, reads=((0, 1, 2), (1, 2)), rank=6, hidden=5)
HANDOVER = replace(FUSE, own=False)
ADDS = replace(FUSE, add_only=True)
PARTY = Party("owner/model", "0" * 64, "1" * 64, "2" * 64)


def theirs(tokens: int, seed: int = 0) -> KVCache:
    return random_kv(tokens, 3, 1, 12, seed)


def ours(tokens: int, seed: int = 1) -> KVCache:
    return random_kv(tokens, 2, 3, 8, seed)


def stirred(shape: MixShape = FUSE) -> MixFuser:
    """A fuser whose every weight does something."""
    fuser = fresh(shape, torch.float32, 0)
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in fuser.net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random) * 0.2)
    fuser.calibrate([Slots.of(theirs(40, 5), ours(40, 6), 0)])
    return fuser


def same(a: KVCache, b: KVCache, tolerance: float = 1e-5) -> None:
    for mine, other in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [FUSE, HANDOVER, ADDS])
def test_it_is_a_lite_fuser(shape: MixShape) -> None:
    """Of the protocol; whether it needs own KV is said by its shape, and it reads the layers that are named."""
    fuser = fresh(shape, torch.float32, 0)
    assert isinstance(fuser, Fuser)
    assert (fuser.kind, fuser.needs_own, fuser.source_layers) == ("lite", shape.own, {0, 1, 2})
    assert fresh(replace(shape, reads=((2,), (2,))), torch.float32, 0).source_layers == {2}


@pytest.mark.parametrize("shape", [FUSE, ADDS])
def test_untrained_it_changes_nothing(shape: MixShape) -> None:
    """In fuse the receiver's own KV comes out, wherever it stands."""
    own = ours(9)
    same(fresh(shape, torch.float32, 0).project(theirs(9), own, 31), own)


@settings(max_examples=20, deadline=None)
@given(one=st.integers(0, 1000), other=st.integers(0, 1000), start=st.integers(0, 300), last=st.sampled_from([0, 2]))
def test_what_is_added_does_not_depend_on_own(one: int, other: int, start: int, last: int) -> None:
    """Add-only: the change is the same whatever the receiver has read itself, and another where the sharer has read
    something else; a fuser that reads the own KV makes another change of another own.
    """

    def added(fuser: MixFuser, source: KVCache, own: KVCache) -> torch.Tensor:
        with torch.no_grad():
            made = fuser.project(source, own, start)
        pairs = zip((*made.keys, *made.values), (*own.keys, *own.values), strict=True)
        return torch.stack([after - before for after, before in pairs])

    source, first, second = theirs(6), ours(6, one), ours(6, 2000 + other)
    adds, reads = (stirred(replace(shape, last=last)) for shape in (ADDS, FUSE))
    torch.testing.assert_close(added(adds, source, first), added(adds, source, second), rtol=1e-4, atol=1e-4)
    for fuser, others in ((adds, (theirs(6, 9), first)), (reads, (source, second))):
        assert float((added(fuser, source, first) - added(fuser, *others)).abs().max()) > 0.01


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 20), max_size=4), start=st.integers(0, 300), own=st.booleans())
def test_pieces_make_the_whole(cuts: list[int], start: int, own: bool) -> None:
    """Projecting in pieces, each at its own start, equals projecting at once."""
    fuser, source, mine = stirred(FUSE if own else HANDOVER), theirs(20), ours(20)
    whole = fuser.project(source, mine, start)
    edges = [0, *sorted(cuts), 20]
    parts = [fuser.project(source.slice(a, b), mine.slice(a, b), start + a) for a, b in pairwise(edges) if b > a]
    same(whole, KVCache.concat(parts))


def turned(kv: KVCache, shape: KVShape, start: int) -> KVCache:
    """Bare keys as they are cached from `start` on."""
    return KVCache([rotate(k, start, shape.rope_theta or 0.0) for k in kv.keys], kv.values)


@settings(max_examples=20, deadline=None)
@given(first=st.integers(0, 400), heard=st.integers(0, 400), own=st.booleans())
def test_what_is_said_does_not_depend_on_where(first: int, heard: int, own: bool) -> None:
    """The same bare KV at other positions, of either model, gives the same bare KV."""
    fuser, source, mine = stirred(FUSE if own else HANDOVER), theirs(5), ours(5)
    here = fuser.project(turned(source, SHARER, 0), turned(mine, RECEIVER, 0), 0)
    at = torch.arange(heard, heard + 5)
    there = fuser.project(turned(source, SHARER, heard), turned(mine, RECEIVER, first), first, at)
    theta = RECEIVER.rope_theta or 0.0
    bare = [KVCache([unrotate(k, at, theta) for k in kv.keys], kv.values) for kv, at in ((here, 0), (there, first))]
    same(*bare, tolerance=2e-3)


def test_models_that_do_not_turn_plainly_are_fused_as_they_are() -> None:
    """Without a theta on one side keys are read and written as cached; handover is refused."""
    odd = replace(SHARER, rope_theta=None)
    fuser = stirred(replace(FUSE, sharer=odd))
    source, own = theirs(4), ours(4)
    same(fuser.project(source, own, 0), fuser.project(source, own, 77))
    with pytest.raises(LoadFailed, match="plain rotary"):
        replace(HANDOVER, sharer=odd)


@pytest.mark.parametrize("last", [1, 3, 50])
def test_only_the_last_slots_are_changed(last: int) -> None:
    """The others are the receiver's own, bit for bit; those that change do as they would among all."""
    whole, some = stirred(), stirred(replace(FUSE, last=last))
    some.net.load_state_dict(whole.net.state_dict())
    source, own = theirs(8), ours(8)
    made, all_of_it = some.project(source, own, 3), whole.project(source, own, 3)
    kept = max(0, 8 - last)
    for mine, before, other in zip(made.keys, own.keys, all_of_it.keys, strict=True):
        assert torch.equal(mine[:, :, :kept], before[:, :, :kept])
        torch.testing.assert_close(mine[:, :, kept:], other[:, :, kept:])
    assert not torch.equal(made.values[0][:, :, kept:], own.values[0][:, :, kept:])


@settings(max_examples=30, deadline=None)
@given(
    share=st.floats(0.05, 0.9),
    seed=st.integers(0, 1000),
    last=st.sampled_from([0, 2]),
    shape=st.sampled_from([FUSE, HANDOVER, ADDS]),
)
def test_inputs_left_out_are_not_read(share: float, seed: int, last: int, shape: MixShape) -> None:
    """What is drawn is zero or makes up for the zeros, the same for one seed, and no input that is zero is read."""
    fuser = stirred(replace(shape, last=last if shape.own else 0))
    slots = Slots.of(theirs(6), ours(6), 0).last(fuser.shape.last or 6)
    keep = fuser.keep(Slots.of(theirs(6), ours(6), 0), share, seed)
    assert keep.shape == (len(slots.at), 3 * 2 * 12 + (2 * 2 * 3 * 8 if shape == FUSE else 0))
    torch.testing.assert_close(keep, (keep > 0) / (1 - share))
    assert torch.equal(keep, fuser.keep(Slots.of(theirs(6), ours(6), 0), share, seed))
    written = fuser.net(slots, keep)
    # The mean is what standardises to zero.
    kept = keep[:, : 3 * 2 * 12].view(len(slots.at), 3, 2, 12) > 0
    bare = fuser.net._side(slots, "theirs")
    wanted = torch.where(kept, bare, fuser.net.theirs_mean)
    changed = Slots(_rotated(wanted, slots), slots.own, slots.heard_at, slots.at)
    blind = keep.clone()
    blind[:, : 3 * 2 * 12] = 1 / (1 - share)
    same(KVCache(*written), KVCache(*fuser.net(changed, blind)), 1e-4)


def _rotated(bare: torch.Tensor, slots: Slots) -> KVCache:
    """Bare rows (tokens, layers, K|V, size) of the one head as a sharer caches them."""
    keys, values = (bare[:, :, side].transpose(0, 1)[:, None, None] for side in (0, 1))
    start = int(slots.heard_at[0])
    return KVCache([rotate(k, start, SHARER.rope_theta or 0.0) for k in keys], list(values))


def test_layers_that_are_not_read_may_be_empty() -> None:
    """The sharer need not have computed them."""
    fuser = stirred(replace(FUSE, reads=((2,), (1, 2))))
    full = theirs(6)
    blank = torch.empty(1, 1, 0, 12)
    partial = KVCache([blank, *full.keys[1:]], [blank, *full.values[1:]])
    same(fuser.project(partial, ours(6), 0), fuser.project(full, ours(6), 0))


def test_statistics_are_those_of_the_slots_that_are_written() -> None:
    """Inputs by the last slots with `last`, else by all but the first; outputs by all but the first in any case."""
    for shape, chosen in ((FUSE, slice(1, None)), (replace(FUSE, last=2), slice(-2, None))):
        fuser = fresh(shape, torch.float32, 0)
        seen = [Slots.of(theirs(30, i), ours(30, 50 + i), 0) for i in range(6)]
        fuser.calibrate(seen)
        values = torch.cat([one.source.values[1][0, 0, chosen] for one in seen])
        torch.testing.assert_close(fuser.net.theirs_mean[1, 1], values.mean(0))
        torch.testing.assert_close(fuser.net.theirs_deviation[1, 1], values.std(0, correction=0))
        owns = [one.own.values[0][0, 2] for one in seen if one.own is not None]
        inputs, every = (torch.cat([own[rows] for own in owns]) for rows in (chosen, slice(1, None)))
        torch.testing.assert_close(fuser.net.ours_deviation[0, 1, 16:], inputs.std(0, correction=0))
        torch.testing.assert_close(fuser.net.scale[0, 1, 16:], every.std(0, correction=0))


def test_a_token_that_is_always_the_same_can_still_be_changed() -> None:
    """Where the last slots never vary, outputs keep the scale of all slots, and inputs are not blown up."""
    fuser = fresh(replace(FUSE, last=1), torch.float32, 0)
    seen = [Slots.of(theirs(30, i), ours(30, 50 + i), 0) for i in range(4)]
    for one in seen:
        one.source.values[0][:, :, -1] = 1.0
    fuser.calibrate(seen)
    assert float(fuser.net.theirs_deviation[0, 1].min()) > 0.05
    assert float(fuser.net.scale.min()) > 0.5


def test_handover_begins_with_the_ridge_of_its_rank() -> None:
    """Where the receiver's KV is a linear map of the sharer's of no higher rank, the start is that map; with a lower
    rank it is closer than nothing; of too few slots nothing is made.
    """
    random = torch.Generator().manual_seed(3)
    maps = torch.randn(3, 2 * 2 * 24, generator=random)
    shape = replace(HANDOVER, reads=((0, 1, 2), (0, 1, 2)), rank=4, hidden=0)
    texts = []
    for seed in range(20):
        source = KVCache(*([t * 1.0 for t in kind] for kind in (theirs(16, seed).keys, theirs(16, seed).values)))
        # K of the second layer tells all: three of its numbers, without their rotation.
        told = torch.randn(16, 3, generator=random)
        source.values[1][0, 0, :, :3] = told
        out = (told @ maps).view(16, 2, 2, 3, 8).permute(1, 2, 3, 0, 4)[:, :, None]
        own = KVCache([rotate(k, 0, 5e2) for k in out[:, 0]], list(out[:, 1]))
        texts.append(Slots.of(source, own, 0))
    errors = {}
    for rank in (1, 4):
        fuser = fresh(replace(shape, rank=rank), torch.float32, 0)
        fuser.net.standardise(texts)
        explained = begin(fuser.net, texts[:-1])
        with torch.no_grad():
            made = fuser.project(texts[-1].source, None, 0)
        assert texts[-1].own is not None
        errors[rank] = sum(
            float((a - b)[:, :, 1:].square().mean()) for a, b in zip(made.values, texts[-1].own.values, strict=True)
        )
        assert all(share > 0.2 for share in explained) if rank == 1 else all(share > 0.99 for share in explained)
    assert errors[4] < 0.05 * errors[1]
    few = fresh(shape, torch.float32, 0)
    few.net.standardise(texts[:1])
    assert begin(few.net, [texts[0].last(9)]) == ()


def published(folder: Path, fuser: MixFuser) -> MixFuser:
    stored = fuser.save(folder)
    info = FuserInfo("lite", stored.digest, stored.shape.as_json(), stored.parameters)
    mode = "fuse" if stored.needs_own else "handover"
    write(folder, "pair.json", PairFile(FORMAT, "p", mode, "prompt", PARTY, PARTY, info))
    return stored


@pytest.mark.parametrize("shape", [FUSE, HANDOVER, replace(FUSE, last=2, hidden=0), replace(ADDS, last=1)])
def test_what_is_stored_is_what_is_loaded(shape: MixShape, tmp_path: Path) -> None:
    """Weights in bfloat16, statistics with them, and the shape by the side; the digest names the file."""
    stored = published(tmp_path, stirred(shape))
    loaded = MixFuser.from_folder(tmp_path, torch.float32)
    assert (loaded.shape, loaded.digest, loaded.parameters) == (shape, stored.digest, stored.parameters)
    source, own = theirs(5), ours(5)
    made = loaded.project(source, own, 4)
    assert all(torch.equal(a, b) for a, b in zip(made.keys, stored.project(source, own, 4).keys, strict=True))
    half = MixFuser.from_folder(tmp_path, torch.bfloat16).project(source, own, 4)
    assert {t.dtype for t in half.values[-1:]} == {torch.bfloat16}


def test_a_shape_without_the_word_is_read_as_before(tmp_path: Path) -> None:
    """`add_only` stands in pair.json only where it is true: a folder from before has no such member, and loads."""
    old = published(tmp_path, stirred())
    assert "add_only" not in old.shape.as_json()
    assert MixShape.read(ADDS.as_json()) == ADDS
    assert MixFuser.from_folder(tmp_path, torch.float32).shape == FUSE


def edited(folder: Path, **changes: Any) -> None:
    file = json.loads((folder / "pair.json").read_text())
    file["fuser"]["shape"] |= changes
    (folder / "pair.json").write_bytes(msgspec.json.encode(file))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rank": 7}, "do not fit the shape"),
        ({"hidden": 0}, "do not fit the shape"),
        ({"reads": [[0], [9]]}, r"beyond 0\.\.2"),
        ({"reads": [[0], []]}, "for each of 2 receiver layers"),
        ({"own": False, "last": 1}, "`last` is 0"),
        ({"own": False, "add_only": True}, "`add_only` is false"),
        ({"add_only": True}, "do not fit the shape"),
        ({"rank": 0}, "rank is at least 1"),
        ({"rank": None}, "cannot be read"),
        ({"sharer": {"layers": 3}}, "cannot be read"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    """By name, before anything runs."""
    published(tmp_path, stirred())
    edited(tmp_path, **changes)
    with pytest.raises(LoadFailed, match=says):
        MixFuser.from_folder(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("source", "own", "says"),
    [
        (theirs(5), None, "there is none"),
        (random_kv(5, 2, 1, 12), ours(5), "sharer KV has 2 layers"),
        (random_kv(5, 3, 2, 12), ours(5), "sharer layer 0"),
        (theirs(5), random_kv(5, 2, 2, 8), "receiver layer 0"),
        (theirs(5), ours(4), "receiver layer 0"),
    ],
)
def test_kv_of_another_shape_is_refused(source: KVCache, own: KVCache | None, says: str) -> None:
    """It names the side and the layer."""
    with pytest.raises(KVMismatch, match=says):
        stirred().project(source, own, 0)
