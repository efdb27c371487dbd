"""A fuser in closed form: every head of the receiver is a linear map of the KV of a few sharer layers.

Keys are mapped without their rotation, values as they are; K comes from K and V from V. What stands at position 0 has
an offset of its own: models park attention there, and its KV is far from all others'. `workers.fit_linear` finds the
maps.

One folder serves both modes. In `handover` the receiver takes what the maps give. In `fuse` its own KV moves towards
that by the share `blend`, in the layers where the maps were good enough when they were fitted; the others are closed,
and cost nothing. Every slot is mapped by itself, so KV projected in pieces is the KV projected at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workers.cache import KVCache
from workers.errors import KVMismatch, LoadFailed
from workers.fusers.base import Change, KVShape
from workers.fusers.folder import read_weights, save_weights
from workers.fusers.rope import rotate, unrotate

MODES = ("handover", "fuse")


@dataclass(frozen=True, slots=True)
class LinearShape:
    """What `pair.json` carries as `fuser.shape`."""

    sharer: KVShape
    receiver: KVShape
    layers: tuple[tuple[int, ...], ...]
    """By receiver layer: the sharer layers it is made from; as many for each."""
    cosine: tuple[float, ...]
    """By receiver layer, on held-out texts: cosine between what its attention says over mapped and over its own KV."""
    least: float
    """A layer below this cosine is closed in `fuse`; a mean below it is refused in `handover`."""
    blend: float
    """`fuse`: how far own KV moves towards mapped KV, 0..1."""

    def __post_init__(self) -> None:
        count = self.receiver.layers
        named = [i for row in self.layers for i in row]
        if len(self.layers) != count or len({len(row) for row in self.layers}) != 1 or not named:
            raise LoadFailed(f"linear fuser: needs as many sharer layers for each of {count} receiver layers")
        if any(not 0 <= i < self.sharer.layers for i in named):
            raise LoadFailed(f"linear fuser: names sharer layers beyond 0..{self.sharer.layers - 1}")
        if self.sharer.rope_theta is None or self.receiver.rope_theta is None:
            raise LoadFailed("linear fuser: both models need plain rotary positions")
        if len(self.cosine) != count or not 0 < self.blend <= 1:
            raise LoadFailed("linear fuser: needs a cosine for every receiver layer, and a blend in 0..1")

    @property
    def inputs(self) -> int:
        """Width of what one map reads."""
        return len(self.layers[0]) * self.sharer.heads * self.sharer.head_size

    @property
    def outputs(self) -> int:
        return self.receiver.heads * self.receiver.head_size

    @property
    def mean_cosine(self) -> float:
        return sum(self.cosine) / len(self.cosine)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Of the tensors in `fuser.safetensors`; the second index is K | V."""
        count = self.receiver.layers
        return {
            "weight": (count, 2, self.inputs, self.outputs),
            "bias": (count, 2, self.outputs),
            "first": (count, 2, self.outputs),
        }

    @classmethod
    def read(cls, value: dict[str, Any]) -> LinearShape:
        """From `pair.json`. Raises LoadFailed."""
        try:
            return cls(
                KVShape(**value["sharer"]),
                KVShape(**value["receiver"]),
                tuple(tuple(map(int, row)) for row in value["layers"]),
                tuple(map(float, value["cosine"])),
                float(value["least"]),
                float(value["blend"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise LoadFailed(f"linear fuser: its shape in pair.json cannot be read ({error!r})") from error

    def as_json(self) -> dict[str, Any]:
        """For `pair.json`."""
        return asdict(self)


class LinearFuser:
    """The maps, in one mode. Computes in float32 and casts to the receiver's dtype."""

    kind: str = "linear"

    def __init__(
        self,
        shape: LinearShape,
        tensors: dict[str, Tensor],
        *,
        mode: str = "handover",
        dtype: torch.dtype = torch.float32,
        digest: str = "",
    ) -> None:
        sizes = {name: tuple(t.shape) for name, t in tensors.items()}
        if sizes != shape.sizes:
            raise LoadFailed(f"linear fuser: tensors {sizes} do not fit its shape, which needs {shape.sizes}")
        if mode not in MODES:
            raise LoadFailed(f"linear fuser: its modes are {' and '.join(MODES)}, not {mode}")
        self.shape, self.dtype, self.digest = shape, dtype, digest
        self.needs_own = mode == "fuse"
        self.parameters = sum(t.numel() for t in tensors.values())
        self._weight, self._bias, self._first = (tensors[name] for name in ("weight", "bias", "first"))
        self._open = tuple(not self.needs_own or cosine >= shape.least for cosine in shape.cosine)
        self.source_layers = frozenset(i for row, on in zip(shape.layers, self._open, strict=True) if on for i in row)
        self._refuse_bad_fit()

    def _refuse_bad_fit(self) -> None:
        """Where maps carry too little of the sharer's KV there is nothing to serve."""
        shape = self.shape
        if self.needs_own and not any(self._open):
            raise LoadFailed(f"linear fuser: no layer's attention cosine reaches {shape.least:g}, so all are closed")
        if not self.needs_own and shape.mean_cosine < shape.least:
            raise LoadFailed(
                f"linear fuser: its mean attention cosine is {shape.mean_cosine:.3f}, below {shape.least:g}: the "
                "receiver would not understand what it is handed"
            )

    @classmethod
    def from_folder(
        cls, folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu", *, mode: str = "handover"
    ) -> LinearFuser:
        """From `fuser.safetensors` and the shape in `pair.json`. Raises LoadFailed: missing, altered, misfit, or too
        bad a fit for the mode.
        """
        info, tensors = read_weights(folder, cls.kind)
        moved = {name: t.to(device, torch.float32) for name, t in tensors.items()}
        return cls(LinearShape.read(info.shape), moved, mode=mode, dtype=dtype, digest=info.digest)

    def save(self, folder: Path) -> LinearFuser:
        """Write `fuser.safetensors` in float32; returns the fuser with its digest."""
        tensors = {"weight": self._weight, "bias": self._bias, "first": self._first}
        digest = save_weights(folder, tensors)
        mode = "fuse" if self.needs_own else "handover"
        return LinearFuser(self.shape, tensors, mode=mode, dtype=self.dtype, digest=digest)

    def project(self, source: KVCache, own: KVCache | None, start: int) -> KVCache:
        """KV for the receiver's slots from `start` on. Raises KVMismatch."""
        own = own if self.needs_own else None
        self._check(source, own)
        theirs = bare_rows(source, sorted(self.source_layers), start, self.shape.sharer)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for layer, reads in enumerate(self.shape.layers):
            if own is not None and not self._open[layer]:
                key, value = own.keys[layer], own.values[layer]
            else:
                key, value = self._map(layer, torch.cat([theirs[i] for i in reads], dim=2), start)
                if own is not None:
                    key, value = self._blend(own.keys[layer], key), self._blend(own.values[layer], value)
            keys.append(key.to(self.dtype))
            values.append(value.to(self.dtype))
        return KVCache(keys, values)

    def change(self) -> Change:
        """Open layers; K and V of a layer are open or closed together."""
        return Change(gates_open=sum(self._open) / len(self._open), relative=0.0)

    def _map(self, layer: int, rows: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Rows (2, tokens, inputs) of K and V -> K, V (1, heads, tokens, head_size) of one layer, keys rotated."""
        shape = self.shape.receiver
        out = torch.baddbmm(self._bias[layer][:, None], rows, self._weight[layer])
        if start == 0 and out.shape[1]:
            out[:, 0] += self._first[layer]
        both = out.view(2, -1, shape.heads, shape.head_size).transpose(1, 2)
        return rotate(both[:1], start, shape.rope_theta or 0.0), both[1:]

    def _blend(self, own: Tensor, mapped: Tensor) -> Tensor:
        return torch.lerp(own.float(), mapped, self.shape.blend)

    def _check(self, source: KVCache, own: KVCache | None) -> None:
        if self.needs_own and own is None:
            raise KVMismatch("a linear fuser in mode fuse changes the receiver's own KV, and there is none")
        self._check_side("sharer", source, self.shape.sharer, self.source_layers)
        if own is not None:
            self._check_side("receiver", own, self.shape.receiver, frozenset(range(self.shape.receiver.layers)))

    def _check_side(self, role: str, kv: KVCache, shape: KVShape, layers: frozenset[int]) -> None:
        if kv.layers != shape.layers:
            raise KVMismatch(f"{role} KV has {kv.layers} layers, the fuser reads {shape.layers}")
        for layer in sorted(layers):
            for t in (kv.keys[layer], kv.values[layer]):
                wanted = (1, shape.heads, kv.keys[min(layers)].shape[2], shape.head_size)
                if tuple(t.shape) != wanted:
                    raise KVMismatch(f"{role} layer {layer} has KV of shape {tuple(t.shape)}, expected {wanted}")


def bare_rows(kv: KVCache, layers: list[int], start: int, shape: KVShape) -> dict[int, Tensor]:
    """By layer (2, tokens, heads · head_size) of K without rotation and V; float32."""
    theta = shape.rope_theta or 0.0
    found = {}
    for layer in layers:
        both = torch.cat((unrotate(kv.keys[layer], start, theta), kv.values[layer].float()))
        found[layer] = both.transpose(1, 2).flatten(2)
    return found
