"""The official Cache-to-Cache method as a fuser, and the reader of its published checkpoints.

A checkpoint is `config.json` (the training recipe) and a folder `final/` of `projector_config.json`,
`projector_{i}.json` and `projector_{i}.pt` or `.safetensors`. A `.pt` is unpickled once, weights only, into one
`fuser.safetensors` beside it, or in the cache folder where the checkpoint cannot be written.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from workers.cache import KVCache
from workers.errors import KVMismatch, LoadFailed
from workers.files import content
from workers.fusers.base import Change, KVShape, Slots
from workers.fusers.projector import KINDS, LAYER_MAPS, C2CProjector, ProjectorShape

Fusion = Literal["sequential", "parallel"]
Strategy = Literal["first", "longest"]
KV = tuple[Tensor, Tensor]

_MARKS = {(True, True): "B", (True, False): "K", (False, True): "V", (False, False): "-"}


@dataclass(frozen=True, slots=True)
class Link:
    """What feeds one receiver layer."""

    source: int
    """Sharer layer."""
    projector: int


class C2CFuser:
    """One projector per receiver layer. Layers whose gates are both closed need no sharer and cost nothing.

    Gates are read once: whoever changes weights calls `refresh`.
    """

    kind: str = "c2c"
    needs_own: bool = True

    def __init__(self, projectors: Mapping[int, C2CProjector], links: Sequence[Link | None]) -> None:
        self.projectors = dict(sorted(projectors.items()))
        self.links = tuple(links)
        """By receiver layer; None where the sharer does not reach it."""
        self.net = nn.ModuleDict({str(i): projector for i, projector in self.projectors.items()}).eval()
        self.parameters = sum(p.numel() for m in self.projectors.values() for p in m.parameters())
        self.refresh()

    def refresh(self) -> None:
        """Read gates and digest from the weights as they are now."""
        self._open = self._gates()
        pairs = zip(self.links, self._open, strict=True)
        self.source_layers = frozenset(link.source for link, gates in pairs if link and any(gates))
        self.digest = _digest(self)

    def _gates(self) -> tuple[tuple[bool, bool], ...]:
        opened = {i: (p.is_open("key"), p.is_open("value")) for i, p in self.projectors.items()}
        return tuple(opened[link.projector] if link else (False, False) for link in self.links)

    def train(self, mode: bool = True) -> None:
        """Soft gates and dropout, or hard gates and none. Leaving training refreshes."""
        self.net.train(mode)
        if not mode:
            self.refresh()

    def anneal(self, step: int) -> None:
        """Set the gates' temperature after `step` optimizer steps."""
        for projector in self.projectors.values():
            projector.anneal(step)

    def calibrate(self, seen: Sequence[Slots]) -> None:
        """It takes KV as it comes."""

    def project(self, source: KVCache, own: KVCache | None, start: int) -> KVCache:
        """The receiver's slots after fusing, rounded once to its dtype. `start` is not looked at: K is post-RoPE."""
        if own is None:
            raise KVMismatch("a c2c fuser changes the receiver's own KV, and there is none")
        if own.layers != len(self.links):
            raise KVMismatch(f"the fuser has {len(self.links)} receiver layers, the KV {own.layers}")
        keys, values = [], []
        for layer, (key, value) in enumerate(own.tensors()):
            read = self.reads(layer)
            if read is None:
                fused: KV = (key, value)
            elif read >= source.layers:
                raise KVMismatch(f"the fuser reads sharer layer {read}, the KV has {source.layers} layers")
            else:
                fused = self.fuse_layer(layer, (source.keys[read], source.values[read]), (key, value))
            keys.append(fused[0].to(key.dtype))
            values.append(fused[1].to(value.dtype))
        return KVCache(keys, values)

    def fuse_layer(self, layer: int, source: KV, own: KV) -> KV:
        """K, V (B, heads, tokens, size) of one receiver layer from its sharer layer's; float32 where weights are
        narrower, and `own` itself where a gate is closed. Differentiable. Raises KVMismatch.
        """
        link = self.links[layer]
        if link is None:
            return own
        projector = self.projectors[link.projector]
        _check(projector.shape, layer, source, own)
        if projector.training:
            return projector(source, own)  # type: ignore[no-any-return]
        key, value = (
            projector.add(kind, source[i], own[i]) if self._open[layer][i] else own[i] for i, kind in enumerate(KINDS)
        )
        return key, value

    def reads(self, layer: int) -> int | None:
        """The sharer layer that fusing this receiver layer looks at now, if any."""
        link = self.links[layer]
        if link is None:
            return None
        return link.source if self.projectors[link.projector].training or any(self._open[layer]) else None

    def change(self) -> Change:
        by_layer = self._gates() if self.net.training else self._open
        gates = [gate for pair in by_layer for gate in pair]
        marks = "".join(_MARKS[pair] for pair in by_layer)
        return Change(gates_open=sum(gates) / len(gates) if gates else 0.0, relative=0.0, gates=marks)


def _check(shape: ProjectorShape, layer: int, source: KV, own: KV) -> None:
    for name, kv, heads, size in (
        ("sharer", source, shape.source_num_heads, shape.source_dim),
        ("receiver", own, shape.target_num_heads, shape.target_dim),
    ):
        for tensor in kv:
            want = (own[0].shape[0], heads, own[0].shape[2], size)
            if tuple(tensor.shape) != want:
                raise KVMismatch(f"receiver layer {layer}: {name} KV is {tuple(tensor.shape)}, the fuser needs {want}")


def _digest(fuser: C2CFuser) -> str:
    """Over links, constructor arguments and every tensor that evaluation reads."""
    links = [[link.source, link.projector] if link else None for link in fuser.links]
    shapes = {str(i): asdict(p.shape) for i, p in fuser.projectors.items()}
    total = hashlib.sha256(json.dumps(["c2c", links, shapes], sort_keys=True).encode())
    for index, projector in fuser.projectors.items():
        for name, tensor in sorted(projector.named_parameters()):
            total.update(f"{index}.{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
            data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            total.update(data)
    return total.hexdigest()


@dataclass(frozen=True, slots=True)
class Official:
    """A published checkpoint: the fuser, and how its recipe says it must be run."""

    fuser: C2CFuser
    aligned: bool
    """The sharer has another tokenizer: prompts go through `workers.align`, and only message text is fused."""
    strategy: Strategy
    include_response: bool
    fusion: Fusion
    receiver: str
    sharer: str
    """Model names as the recipe gives them."""

    @property
    def recipe(self) -> dict[str, Any]:
        """What of it changes answers: part of the pair's fingerprint."""
        strategy = {"strategy": self.strategy} if self.aligned else {}
        return {
            "aligned": self.aligned,
            "include_response": self.include_response,
            "fusion": self.fusion,
            **strategy,
        }


def load_official(
    folder: Path,
    *,
    receiver: KVShape | None = None,
    sharer: KVShape | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    cache: Path | None = None,
    place: int = 0,
    sharers: int = 1,
) -> Official:
    """Read a checkpoint folder, or one of its `final` and `checkpoint-N` folders. `dtype` is the receiver's; None
    keeps what is stored. A checkpoint made for several `sharers` is read once for each, by its `place` among them.
    `cache` takes the converted weights of a folder that cannot be written; None takes `workers.loader.cache_dir()`.
    Raises LoadFailed: files missing or malformed, a projector class, argument, key or shape that is not the official
    network's, or models whose KV it does not fit.
    """
    weights = folder / "final" if (folder / "final").is_dir() else folder
    config, recipe = recipe_of(folder)
    links = _links(weights, recipe, receiver, sharer, (place, sharers))
    needed = sorted({link.projector for link in links if link})
    shapes = {index: projector_shape(weights / f"projector_{index}.json") for index in needed}
    for index, shape in shapes.items():
        _fits(f"{weights.name}/projector_{index}.json", shape, receiver, sharer)
    states = _states(weights, needed, cache)
    projectors = {i: _projector(f"{weights.name}/projector_{i}", shapes[i], states[i], dtype, device) for i in needed}
    return Official(
        fuser=C2CFuser(projectors, links),
        aligned=_one_of(config, recipe, "is_do_alignment", (False, True)),
        strategy=_one_of(config, recipe, "alignment_strategy", ("first", "longest")),
        include_response=_one_of(config, recipe, "include_response", (False, True)),
        fusion=_one_of(config, recipe, "multi_source_fusion_mode", ("sequential", "parallel")),
        receiver=str(recipe.get("base_model", "")),
        sharer=str(recipe.get("teacher_model", "")),
    )


def includes_response(folder: Path) -> bool:
    """Whether its recipe fuses the answer too. Raises LoadFailed."""
    return bool(_one_of(*recipe_of(folder), "include_response", (False, True)))


def recipe_of(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Where it stands, and what it says of the model. Raises LoadFailed."""
    config = next((p for p in (folder / "config.json", folder.parent / "config.json") if p.is_file()), None)
    if config is None:
        raise LoadFailed(f"{folder}: no config.json, which says how the fuser must be run")
    recipe = _object(config).get("model")
    if not isinstance(recipe, dict):
        raise LoadFailed(f"{config}: no object named model")
    return config, recipe


def _object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(content(file))
    except (ValueError, RecursionError) as error:
        raise LoadFailed(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise LoadFailed(f"{file}: an object is expected")
    return value


def _one_of(file: Path, recipe: dict[str, Any], key: str, allowed: tuple[Any, ...]) -> Any:
    """The recipe's value; absent or null means the first allowed one."""
    value = recipe.get(key)
    if value is None:
        return allowed[0]
    if value not in allowed:
        raise LoadFailed(f"{file}: model.{key} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")
    return value


def _links(
    weights: Path, recipe: dict[str, Any], receiver: KVShape | None, sharer: KVShape | None, which: tuple[int, int]
) -> tuple[Link | None, ...]:
    """From `projector_config.json`, else from the recipe's `mapping` between two models that are known."""
    file = weights / "projector_config.json"
    if file.exists():
        links = _listed_links(file, receiver.layers if receiver else None, which)
        if sharer and (high := max((link.source for link in links if link), default=0)) >= sharer.layers:
            raise LoadFailed(f"{file}: reads sharer layer {high}; the sharer has {sharer.layers} layers")
        return links
    if which[1] > 1:
        raise LoadFailed(f"{weights}: no projector_config.json, which tells the projectors of several sharers apart")
    name = recipe.get("mapping", "last_aligned")
    if name not in LAYER_MAPS:
        raise LoadFailed(f"{weights}: model.mapping is {name!r}; it must be one of {', '.join(sorted(LAYER_MAPS))}")
    if receiver is None or sharer is None:
        raise LoadFailed(f"{weights}: no projector_config.json, and the models that {name} maps are not known")
    return tuple(Link(source, index) for index, source in enumerate(LAYER_MAPS[name](receiver.layers, sharer.layers)))


def _listed_links(file: Path, layers: int | None, which: tuple[int, int]) -> tuple[Link | None, ...]:
    """receiver index -> sharer index -> receiver layer -> [[sharer layer, projector], ...]; only the first counts.
    `which` is the sharer's place in order, and how many there must be.
    """
    tree = _object(file)
    place, sharers = which
    try:
        (by_sharer,) = tree.values()
        if len(by_sharer) != sharers:
            raise LoadFailed(f"{file}: made for {len(by_sharer)} sharers; the pair has {sharers}")
        by_layer = by_sharer[sorted(by_sharer, key=int)[place]]
        links = {int(t): Link(int(pairs[0][0]), int(pairs[0][1])) for t, pairs in by_layer.items() if pairs}
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise LoadFailed(f"{file}: not one receiver, and for each sharer a list of pairs per receiver layer") from error
    if not links or min(min(t, link.source, link.projector) for t, link in links.items()) < 0:
        raise LoadFailed(f"{file}: no receiver layers, or a negative index")
    count = max(links) + 1
    if layers is not None and count > layers:
        raise LoadFailed(f"{file}: fuses receiver layer {count - 1}; the receiver has {layers} layers")
    return tuple(links.get(t) for t in range(layers or count))


def projector_shape(file: Path) -> ProjectorShape:
    """The constructor arguments in `projector_{i}.json`. Raises LoadFailed for any other class or argument."""
    written = _object(file)
    name = written.get("class")
    if str(name).lower() != "c2cprojector":
        raise LoadFailed(f"{file}: projector class {name!r} is not supported; only C2CProjector is")
    known = {f.name: str(f.type) for f in fields(ProjectorShape)}
    given = written.get("init_args") or {}
    if not isinstance(given, dict):
        raise LoadFailed(f"{file}: init_args must be an object")
    arguments = {k: v for k, v in given.items() if k != "dtype"}
    if unknown := sorted(set(arguments) - set(known)):
        raise LoadFailed(f"{file}: unknown init_args {', '.join(unknown)}")
    for key, value in arguments.items():
        whole = known[key] == "int"
        if (
            isinstance(value, bool)
            or not isinstance(value, int if whole else (int, float))
            or value < (1 if whole else 0)
        ):
            raise LoadFailed(f"{file}: init_args.{key} is {value!r}; a {'whole ' if whole else ''}number is expected")
    try:
        shape = ProjectorShape(**arguments)
    except TypeError as error:
        raise LoadFailed(f"{file}: init_args need source_dim and target_dim") from error
    if shape.num_layers < 3:
        raise LoadFailed(f"{file}: num_layers is {shape.num_layers}; at least 3 are needed")
    return shape


def _fits(name: str, shape: ProjectorShape, receiver: KVShape | None, sharer: KVShape | None) -> None:
    for role, model, heads, size in (
        ("sharer", sharer, shape.source_num_heads, shape.source_dim),
        ("receiver", receiver, shape.target_num_heads, shape.target_dim),
    ):
        if model and (model.heads, model.head_size) != (heads, size):
            raise LoadFailed(
                f"{name}: made for a {role} with {heads} KV heads of size {size}; "
                f"this one has {model.heads} of size {model.head_size}"
            )


def _projector(
    name: str, shape: ProjectorShape, state: dict[str, Tensor], dtype: torch.dtype | None, device: torch.device | str
) -> C2CProjector:
    with torch.device("meta"):
        projector = C2CProjector(shape)
    want = {key: tuple(t.shape) for key, t in projector.state_dict().items()}
    have = {key: tuple(t.shape) for key, t in state.items()}
    if want.keys() != have.keys():
        missing, extra = sorted(want.keys() - have.keys()), sorted(have.keys() - want.keys())
        raise LoadFailed(f"{name}: tensors missing: {missing}; not known: {extra}")
    for key, shape_needed in want.items():
        if have[key] != shape_needed:
            raise LoadFailed(f"{name}: {key} has shape {have[key]}; {shape_needed} is needed")
    # Copies: what safetensors reads is the mapped file, and whoever writes to that would change a pair that runs.
    kept = {k: t.to(device, dtype or t.dtype, copy=True) for k, t in state.items()}
    kept["gate_temperature"] = state["gate_temperature"].to(device, torch.float32, copy=True)
    projector.load_state_dict(kept, assign=True)
    return projector.requires_grad_(False).eval()


def _states(weights: Path, needed: Sequence[int], cache: Path | None) -> dict[int, dict[str, Tensor]]:
    plain = {i: weights / f"projector_{i}.safetensors" for i in needed}
    if all(file.is_file() for file in plain.values()):
        return {i: _read(file) for i, file in plain.items()}
    pickled = {i: weights / f"projector_{i}.pt" for i in needed}
    converted = weights / "fuser.safetensors"
    if not any(file.is_file() for file in pickled.values()) and converted.is_file() and _stamp(converted):
        return {i: {} for i in needed} | _split(_read(converted))  # what it lacks is named by the caller
    if gone := [file.name for file in pickled.values() if not file.is_file()]:
        raise LoadFailed(f"{weights}: {', '.join(gone)} missing, and no .safetensors in its place")
    stamp = hashlib.sha256(repr([(i, f.stat().st_size, f.stat().st_mtime_ns) for i, f in pickled.items()]).encode())
    key = stamp.hexdigest()
    if cache is None:
        from workers.loader import cache_dir

        cache = cache_dir() / "fusers"
    places = (converted, cache / f"{key}.safetensors")
    for place in places:
        if place.is_file() and _stamp(place) == key:
            return _split(_read(place))
    joined = {f"projector_{i}.{k}": t for i, file in pickled.items() for k, t in _unpickle(file).items()}
    _keep(joined, places, key)
    return _split(joined)


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise LoadFailed(f"{file}: cannot be read as safetensors ({error})") from error


def _stamp(file: Path) -> str | None:
    """Which `.pt` files it was made from; None when it is torn or not ours."""
    try:
        with safe_open(file, framework="pt") as tensors:
            return (tensors.metadata() or {}).get("made_from")
    except (OSError, SafetensorError):
        return None


def _unpickle(file: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, zipfile.BadZipFile, EOFError) as error:
        raise LoadFailed(f"{file}: not a state dict of plain tensors ({type(error).__name__})") from error
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise LoadFailed(f"{file}: not a state dict of plain tensors")
    return {str(name): tensor.contiguous() for name, tensor in state.items()}


def _keep(tensors: dict[str, Tensor], places: Sequence[Path], key: str) -> None:
    """Write to the first place that takes it. None may: the disk is then only slower next time."""
    copies = {name: tensor.clone() for name, tensor in tensors.items()}  # safetensors refuses shared memory
    for place in places:
        aside = None
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            handle, aside = tempfile.mkstemp(prefix=".fuser-", dir=place.parent)
            os.close(handle)
            save_file(copies, aside, metadata={"made_from": key})
            Path(aside).replace(place)
            return
        except (OSError, SafetensorError):
            if aside:
                Path(aside).unlink(missing_ok=True)


def _split(joined: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in joined.items():
        if found := re.fullmatch(r"projector_(\d+)\.(.+)", name):
            states.setdefault(int(found[1]), {})[found[2]] = tensor
    return states
