"""workers.fusers.c2c and workers.fusers.projector: the official network, as a fuser and as a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from workers.cache import KVCache
from workers.errors import KVMismatch, LoadFailed
from workers.fusers.base import Fuser, KVShape
from workers.fusers.c2c import C2CFuser, Link, load_official
from workers.fusers.projector import LAYER_MAPS, C2CProjector, ProjectorShape

GOLDEN = Path(__file__).parents[1] / "golden"
SAME = GOLDEN / "e2e" / "same_tokenizer"
RECEIVER = KVShape(layers=4, heads=2, head_size=16)
SHARER = KVShape(layers=6, heads=2, head_size=12)
SMALL = ProjectorShape(source_dim=4, target_dim=6, source_num_heads=3, target_num_heads=2, hidden_dim=8)


def projector(key: float, value: float, dtype: torch.dtype = torch.float32, seed: int = 0) -> C2CProjector:
    torch.manual_seed(seed)
    made = C2CProjector(SMALL).to(dtype).eval().requires_grad_(False)
    made.get_parameter("key_gate_logit").fill_(key)
    made.get_parameter("value_gate_logit").fill_(value)
    return made


def kv(layers: int, heads: int, tokens: int, size: int, dtype: torch.dtype = torch.float32) -> KVCache:
    torch.manual_seed(layers * 31 + heads * 7 + tokens)
    shape = (layers, 1, heads, tokens, size)
    return KVCache(list(torch.randn(shape).to(dtype)), list(torch.randn(shape).to(dtype)))


def fuser(gates: list[tuple[float, float]], dtype: torch.dtype = torch.float32) -> C2CFuser:
    parts = {i: projector(k, v, dtype, seed=i) for i, (k, v) in enumerate(gates)}
    return C2CFuser(parts, [Link(source=i + 1, projector=i) for i in parts])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of a checkpoint whose weights are `.safetensors`."""
    return Path(shutil.copytree(SAME / "fuser", tmp_path / "fuser"))


@pytest.fixture
def pickled(folder: Path) -> Path:
    """The same checkpoint as it is published: `.pt`."""
    for file in (folder / "final").glob("projector_*.safetensors"):
        torch.save(load_file(file), file.with_suffix(".pt"))
        file.unlink()
    return folder


def test_a_loaded_checkpoint_is_a_fuser() -> None:
    """A published checkpoint loads as a fuser that knows which sharer layers it needs, with its recipe's switches."""
    made = load_official(SAME / "fuser", receiver=RECEIVER, sharer=SHARER)
    assert isinstance(made.fuser, Fuser)
    assert made.fuser.source_layers == {2, 4, 5}  # layer 3 feeds a receiver layer whose gates are both closed
    assert (made.aligned, made.strategy, made.include_response, made.fusion) == (False, "first", False, "sequential")
    assert made.fuser.change().gates_open == pytest.approx(0.5)
    aligned = load_official(GOLDEN / "e2e" / "aligned" / "fuser")
    assert (aligned.aligned, aligned.strategy) == (True, "longest")


def test_the_recipe_is_obeyed(folder: Path) -> None:
    """Every switch of the recipe that changes an answer is read from config.json."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["model"] |= {
        "is_do_alignment": True,
        "alignment_strategy": "longest",
        "include_response": True,
        "multi_source_fusion_mode": "parallel",
    }
    file.write_text(json.dumps(config))
    made = load_official(folder)
    assert (made.aligned, made.strategy, made.include_response, made.fusion) == (True, "longest", True, "parallel")


def test_the_mapping_strategy_applies_where_no_list_is_given(folder: Path) -> None:
    """Without projector_config.json the layers are mapped as the recipe names it."""
    (folder / "final" / "projector_config.json").unlink()
    assert [link and link.source for link in load_official(folder, receiver=RECEIVER, sharer=SHARER).fuser.links] == [
        2,
        3,
        4,
        5,
    ]
    with pytest.raises(LoadFailed, match="projector_config"):
        load_official(folder)


def test_only_the_first_pair_of_a_layer_counts(folder: Path) -> None:
    """Of several sharer layers listed for a receiver layer the first is used, as in the official code."""
    file = folder / "final" / "projector_config.json"
    tree = json.loads(file.read_text())
    tree["0"]["1"]["0"] = [[1, 0], [4, 2]]
    file.write_text(json.dumps(tree))
    assert load_official(folder).fuser.links[0] == Link(source=1, projector=0)


def test_a_pickled_checkpoint_is_the_same_fuser(pickled: Path) -> None:
    """`.pt` weights give the fuser that their `.safetensors` twins give, and are converted beside themselves."""
    assert load_official(pickled).fuser.digest == load_official(SAME / "fuser").fuser.digest
    assert (pickled / "final" / "fuser.safetensors").is_file()


def test_a_pickle_is_opened_once(pickled: Path) -> None:
    """The second load reads the converted weights only; when the `.pt` has changed, it is opened again."""
    digest = load_official(pickled).fuser.digest
    file = pickled / "final" / "projector_0.pt"
    stat = file.stat()
    file.write_bytes(b"\0" * stat.st_size)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert load_official(pickled).fuser.digest == digest
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))
    with pytest.raises(LoadFailed, match=r"projector_0\.pt"):
        load_official(pickled)


def test_a_folder_that_cannot_be_written_is_converted_elsewhere(pickled: Path, tmp_path: Path) -> None:
    """Where nothing can be put beside the checkpoint its weights go to the cache folder, and are found there."""
    (pickled / "final" / "fuser.safetensors").mkdir()
    cache = tmp_path / "cache"
    digest = load_official(pickled, cache=cache).fuser.digest
    (kept,) = cache.iterdir()
    written = kept.stat().st_mtime_ns
    assert load_official(pickled, cache=cache).fuser.digest == digest
    assert kept.stat().st_mtime_ns == written
    assert sorted(p.name for p in (pickled / "final").glob(".fuser-*")) == []


def test_nothing_that_can_be_written_is_no_failure(pickled: Path, tmp_path: Path) -> None:
    """A checkpoint loads although neither its folder nor the cache takes the converted weights."""
    (pickled / "final" / "fuser.safetensors").mkdir()
    blocked = tmp_path / "blocked"
    blocked.write_text("a file, not a folder")
    assert load_official(pickled, cache=blocked).fuser.digest == load_official(SAME / "fuser").fuser.digest


def test_a_torn_conversion_is_made_again(pickled: Path) -> None:
    """A converted file that is torn is no failure: it is made again from the `.pt`."""
    digest = load_official(pickled).fuser.digest
    kept = pickled / "final" / "fuser.safetensors"
    kept.write_bytes(kept.read_bytes()[:100])
    assert load_official(pickled).fuser.digest == digest
    assert kept.stat().st_size > 100


def test_the_conversion_alone_is_enough(pickled: Path) -> None:
    """Once converted, the `.pt` files may be deleted; a conversion that lacks a projector is refused."""
    digest = load_official(pickled).fuser.digest
    for file in (pickled / "final").glob("*.pt"):
        file.unlink()
    assert load_official(pickled).fuser.digest == digest
    kept = pickled / "final" / "fuser.safetensors"
    part = {k: t for k, t in load_file(kept).items() if not k.startswith("projector_3.")}
    save_file(part, kept, metadata={"made_from": "elsewhere"})
    with pytest.raises(LoadFailed, match="projector_3"):
        load_official(pickled)


class _Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.target,))


def test_a_pickle_that_runs_code_is_refused(pickled: Path, tmp_path: Path) -> None:
    """A `.pt` that would run code when unpickled is refused, and does not run it."""
    target = tmp_path / "ran"
    torch.save({"key_gate_logit": _Payload(target)}, pickled / "final" / "projector_1.pt")
    with pytest.raises(LoadFailed, match="projector_1"):
        load_official(pickled)
    assert not target.exists()


def _edit(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / name
        value = json.loads(file.read_text())
        change(value)
        file.write_text(json.dumps(value))

    return apply


def _weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "final" / "projector_2.safetensors"
        state = load_file(file)
        change(state)
        save_file(state, file)

    return apply


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "other class": (_edit("final/projector_1.json", lambda c: c.update({"class": "AllInOneProjector"})), "AllInOne"),
    "unknown argument": (_edit("final/projector_1.json", lambda c: c["init_args"].update(swiglu=True)), "swiglu"),
    "argument of no number": (
        _edit("final/projector_1.json", lambda c: c["init_args"].update(hidden_dim="x")),
        "hidden",
    ),
    "no sizes": (_edit("final/projector_1.json", lambda c: c["init_args"].pop("source_dim")), "source_dim"),
    "too shallow": (_edit("final/projector_1.json", lambda c: c["init_args"].update(num_layers=2)), "num_layers"),
    "strategy": (_edit("config.json", lambda c: c["model"].update(alignment_strategy="prefix")), "prefix"),
    "fusion": (_edit("config.json", lambda c: c["model"].update(multi_source_fusion_mode="both")), "both"),
    "no model": (_edit("config.json", lambda c: c.pop("model")), "model"),
    "two sharers": (_edit("final/projector_config.json", lambda c: c["0"].update({"2": c["0"]["1"]})), "for 2 sharers"),
    "sharer too short": (
        _edit("final/projector_config.json", lambda c: c["0"]["1"].update({"0": [[6, 0]]})),
        "layer 6",
    ),
    "receiver too short": (
        _edit("final/projector_config.json", lambda c: c["0"]["1"].update({"4": [[0, 0]]})),
        "layer 4",
    ),
    "projector missing": (_edit("final/projector_config.json", lambda c: c["0"]["1"].update({"0": [[0, 9]]})), "_9"),
    "key missing": (_weights(lambda s: s.pop("key_in.bias")), "key_in.bias"),
    "key too many": (_weights(lambda s: s.update(extra=torch.zeros(1))), "extra"),
    "gate of another shape": (_weights(lambda s: s.update(key_gate_logit=torch.zeros(1))), "key_gate_logit"),
    "wrong shape": (_weights(lambda s: s.update({"value_in.bias": torch.zeros(3)})), r"value_in.bias"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "torn weights": (lambda f: (f / "final" / "projector_0.safetensors").write_bytes(b"no"), "projector_0"),
    "torn JSON": (lambda f: (f / "final" / "projector_0.json").write_bytes(b"{"), "projector_0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_the_official_network_is_refused(case: str, folder: Path) -> None:
    """A checkpoint that is not exactly the official network, or not for these models, fails naming what is wrong."""
    change, names = REFUSED[case]
    change(folder)
    with pytest.raises(LoadFailed, match=names):
        load_official(folder, receiver=RECEIVER, sharer=SHARER)


@pytest.mark.parametrize(
    ("receiver", "sharer"),
    [(KVShape(4, 4, 16), SHARER), (RECEIVER, KVShape(6, 2, 8)), (KVShape(3, 2, 16), SHARER)],
)
def test_models_of_other_shapes_are_refused(receiver: KVShape, sharer: KVShape) -> None:
    """A fuser made for other heads, head sizes or layers than the models have is refused before it runs."""
    with pytest.raises(LoadFailed):
        load_official(SAME / "fuser", receiver=receiver, sharer=sharer)


def test_projectors_take_the_receivers_dtype() -> None:
    """Weights are cast to the receiver's dtype; the gate's temperature stays as it is."""
    made = load_official(SAME / "fuser", dtype=torch.bfloat16).fuser
    one = made.projectors[0]
    assert {p.dtype for p in one.parameters()} == {torch.bfloat16}
    assert one.gate_temperature.dtype == torch.float32


def test_a_published_fuser_has_its_published_size() -> None:
    """28 projectors between Qwen2.5-0.5B and Qwen3-0.6B hold the 478 million parameters that were published."""
    with torch.device("meta"):
        one = C2CProjector(ProjectorShape(source_dim=64, target_dim=128, source_num_heads=2, target_num_heads=8))
    assert len(one.state_dict()) == 33
    assert 28 * sum(p.numel() for p in one.parameters()) == pytest.approx(477.85e6, rel=1e-5)


def test_layers_behind_closed_gates_are_not_looked_at() -> None:
    """A layer whose gates are closed needs no sharer KV and returns the receiver's own tensors themselves."""
    made = fuser([(1.0, 1.0), (0.0, -1.0), (1.0, 0.0), (-2.0, 3.0)])
    source, own = kv(5, 3, 7, 4), kv(4, 2, 7, 6)
    assert made.source_layers == {1, 3, 4}
    for unread in (0, 2):
        source.keys[unread] = source.values[unread] = torch.empty(1, 3, 0, 4)
    fused = made.project(source, own, 0)
    same = [(k is ok, v is ov) for (k, v), (ok, ov) in zip(fused.tensors(), own.tensors(), strict=True)]
    assert same == [(False, False), (True, True), (False, True), (True, False)]


def test_a_path_reads_its_own_half_only() -> None:
    """With only the K gate open, V of the sharer cannot change anything, not even as NaN."""
    made = fuser([(1.0, 0.0)])
    source, own = kv(2, 3, 5, 4), kv(1, 2, 5, 6)
    clean = made.project(source, own, 0)
    source.values[1] = torch.full_like(source.values[1], float("nan"))
    assert torch.equal(made.project(source, own, 0).keys[0], clean.keys[0])


@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(1, 9), cut=st.integers(0, 9), seed=st.integers(0, 99))
def test_slots_are_fused_one_by_one(tokens: int, cut: int, seed: int) -> None:
    """Fusing a stretch of slots gives what fusing its parts gives: no slot looks at another."""
    cut = min(cut, tokens)
    made = fuser([(1.0, 1.0)])
    torch.manual_seed(seed)
    source, own = kv(2, 3, tokens, 4), kv(1, 2, tokens, 6)
    whole = made.project(source, own, 0)
    parts = KVCache.concat(
        [made.project(source.slice(a, b), own.slice(a, b), a) for a, b in ((0, cut), (cut, tokens)) if b > a]
    )
    torch.testing.assert_close(whole.keys[0], parts.keys[0])
    torch.testing.assert_close(whole.values[0], parts.values[0])


def test_bfloat16_is_rounded_once() -> None:
    """With bfloat16 weights gate, product and sum are float32, and the result is rounded when it enters the cache."""
    made = fuser([(1.0, 1.0)], torch.bfloat16)
    source, own = kv(2, 3, 6, 4, torch.bfloat16), kv(1, 2, 6, 6, torch.bfloat16)
    weight, feature = made.projectors[0].weight_and_feature("key", source.keys[1], own.keys[0])
    exact = own.keys[0].float() + weight.float() * feature.float()
    key, _ = made.fuse_layer(0, (source.keys[1], source.values[1]), (own.keys[0], own.values[0]))
    assert key.dtype == torch.float32
    assert torch.equal(key, exact)
    assert torch.equal(made.project(source, own, 0).keys[0], exact.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("source", "own"),
    [
        (kv(2, 3, 4, 4), None),
        (kv(2, 3, 4, 4), kv(2, 2, 4, 6)),
        (kv(1, 3, 4, 4), kv(1, 2, 4, 6)),
        (kv(2, 3, 5, 4), kv(1, 2, 4, 6)),
        (kv(2, 2, 4, 4), kv(1, 2, 4, 6)),
        (kv(2, 3, 4, 4), kv(1, 2, 4, 8)),
    ],
)
def test_kv_that_does_not_fit_is_refused(source: KVCache, own: KVCache | None) -> None:
    """KV of other layers, heads, head sizes or lengths than the fuser was made for raises KVMismatch."""
    with pytest.raises(KVMismatch):
        fuser([(1.0, 1.0)]).project(source, own, 0)


def test_the_digest_follows_what_changes_the_answer() -> None:
    """The digest is that of the weights and links: equal for equal ones, another when one weight or link changes."""
    one, same = fuser([(1.0, 1.0)]), fuser([(1.0, 1.0)])
    assert one.digest == same.digest
    same.projectors[0].get_parameter("key_in.bias")[0] += 1e-3
    same.refresh()
    moved = C2CFuser(one.projectors, [Link(source=0, projector=0)])
    assert len({one.digest, same.digest, moved.digest}) == 3


def test_training_opens_every_path_and_evaluation_closes_it_again() -> None:
    """In training both paths run with soft gates that learn; leaving it takes the gates as they then are."""
    made = fuser([(0.0, 0.0)])
    made.projectors[0].requires_grad_(True)
    source, own = kv(2, 3, 6, 4), kv(1, 2, 6, 6)
    assert made.reads(0) is None
    made.train()
    made.anneal(100)
    assert made.reads(0) == 1
    key, value = made.fuse_layer(0, (source.keys[1], source.values[1]), (own.keys[0], own.values[0]))
    torch.autograd.backward(key.square().sum() + value.square().sum())
    logit = made.projectors[0].get_parameter("key_gate_logit")
    assert logit.grad is not None
    assert logit.grad.abs() > 0
    with torch.no_grad():
        logit.fill_(0.5)
    made.train(False)
    assert made.source_layers == {1}
    assert made.change().gates_open == 0.5


@given(targets=st.integers(1, 60), sources=st.integers(1, 60))
def test_layer_maps_stay_within_the_sharer_and_never_turn_back(targets: int, sources: int) -> None:
    """Both maps give every receiver layer a sharer layer, in order, and the identity for models of equal depth."""
    for name, layer_map in LAYER_MAPS.items():
        layers = layer_map(targets, sources)
        assert len(layers) == targets
        assert all(0 <= s < sources for s in layers)
        assert list(layers) == sorted(layers)
        if targets == sources:
            assert layers == tuple(range(targets)), name
