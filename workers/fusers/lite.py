"""Our own small fuser for handover between models of one KV size; `workers.fusers.mix` is the one for any two models.

The sharer alone reads, and the receiver takes what this network makes of its KV.

Each receiver layer starts from one copied sharer layer and adds a residual: K from that layer's K, V from its V, and
both from a low-rank reading of all sharer layers' K and V together. The residual is zero before training, so training
starts from the raw copy. Keys are mapped without their rotation. Every slot is mapped by itself, so KV projected in
pieces is the KV projected at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workers.cache import KVCache
from workers.errors import KVMismatch, LoadFailed
from workers.fusers.base import Change, KVShape, Slots
from workers.fusers.folder import fitted, read_weights, save_weights
from workers.fusers.rope import rotate, unrotate

# Standardised inputs are cut here: the first token's KV stands tens of deviations away from all others'.
_FAR = 6.0


@dataclass(frozen=True, slots=True)
class LiteShape:
    """What the constructor takes; `pair.json` carries it as `fuser.shape`."""

    sharer: KVShape
    receiver: KVShape
    copied: tuple[int, ...]
    """By receiver layer: the sharer layer it starts from."""
    rank: int
    """Width of the low-rank reading, per receiver layer; 0 leaves it out, and only `copied` layers are read."""

    def __post_init__(self) -> None:
        if len(self.copied) != self.receiver.layers or any(not 0 <= i < self.sharer.layers for i in self.copied):
            raise LoadFailed(
                f"lite fuser: copied layers {self.copied} do not name one of {self.sharer.layers} sharer layers "
                f"for each of {self.receiver.layers} receiver layers"
            )
        if not fits(self.sharer, self.receiver):
            raise LoadFailed("lite fuser: sharer and receiver need KV heads of the same number and size")
        if self.sharer.rope_theta is None or self.receiver.rope_theta is None:
            raise LoadFailed("lite fuser: both models need plain rotary positions")

    @classmethod
    def read(cls, value: dict[str, Any]) -> LiteShape:
        """From `pair.json`. Raises LoadFailed."""
        try:
            sharer, receiver = KVShape(**value["sharer"]), KVShape(**value["receiver"])
            return cls(sharer, receiver, tuple(value["copied"]), int(value["rank"]))
        except (KeyError, TypeError, ValueError) as error:
            raise LoadFailed(f"lite fuser: its shape in pair.json cannot be read ({error!r})") from error

    def as_json(self) -> dict[str, Any]:
        """For `pair.json`."""
        return {**asdict(self), "copied": list(self.copied)}


class LiteNet(nn.Module):
    """The weights, and their path from sharer KV to receiver KV. Computes in float32."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, shape: LiteShape) -> None:
        super().__init__()
        width = shape.sharer.heads * shape.sharer.head_size
        count, read = shape.receiver.layers, shape.sharer.layers * 2 * width
        self.shape = shape
        self.width = width
        self.register_buffer("mean", torch.zeros(shape.sharer.layers, 2, width))
        self.register_buffer("deviation", torch.ones(shape.sharer.layers, 2, width))
        self.direct = nn.Parameter(torch.zeros(count, 2, width, width))
        self.bias = nn.Parameter(torch.zeros(count, 2, width))
        self.down = nn.Parameter(torch.randn(count * shape.rank, read) / read**0.5)
        self.up = nn.Parameter(torch.zeros(count, shape.rank, 2 * width))

    @torch.no_grad()
    def standardise(self, sources: Sequence[KVCache]) -> None:
        """Take mean and deviation of every input dimension from sharer KV; each cache must begin at position 0."""
        # The first token is left out: it is an attention sink, and would set the scale for all the others.
        flat = torch.cat([self.flatten(kv, 0)[:, :, 1:] for kv in sources], dim=2)
        self.mean.copy_(flat.mean(2))
        self.deviation.copy_(flat.std(2).clamp_min(1e-3))

    def flatten(self, source: KVCache, start: int) -> Tensor:
        """(sharer layers, K|V, tokens, width), keys without rotation; layers that are not read are zero."""
        tokens = len_of(source, self.shape.copied[0])
        theta = self.shape.sharer.rope_theta or 0.0
        blank = torch.zeros(2, tokens, self.width, device=self.mean.device)
        rows = []
        for keys, values in source.tensors():
            if keys.shape[2] != tokens:
                rows.append(blank)
                continue
            rows.append(torch.stack((_rows(unrotate(keys, start, theta)), _rows(values.float()))))
        return torch.stack(rows)

    def forward(self, source: KVCache, start: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values by receiver layer, each (1, heads, tokens, head_size), keys rotated; float32."""
        shape, (heads, size) = self.shape, (self.shape.receiver.heads, self.shape.receiver.head_size)
        flat = self.flatten(source, start)
        tokens = flat.shape[2]
        copied = list(shape.copied)
        scale = self.deviation[:, :, None]
        unit = ((flat - self.mean[:, :, None]) / scale).clamp(-_FAR, _FAR)
        change = unit[copied] @ self.direct + self.bias[:, :, None]
        if shape.rank:
            read = unit.permute(2, 0, 1, 3).reshape(tokens, -1) @ self.down.T
            code = read.view(tokens, len(copied), shape.rank).transpose(0, 1)
            joint = (code @ self.up).view(len(copied), tokens, 2, self.width)
            change = change + joint.transpose(1, 2)
        out = (flat[copied] + change * scale[copied]).view(len(copied), 2, 1, tokens, heads, size).transpose(3, 4)
        keys = rotate(out[:, 0], start, shape.receiver.rope_theta or 0.0)
        return list(keys.unbind(0)), list(out[:, 1].unbind(0))


def len_of(source: KVCache, layer: int) -> int:
    """Tokens of one layer: layers that are not read may be empty."""
    return int(source.keys[layer].shape[2])


def _rows(x: Tensor) -> Tensor:
    """(1, heads, tokens, size) -> (tokens, heads * size)."""
    return x[0].transpose(0, 1).reshape(x.shape[2], -1)


class LiteFuser:
    """The fuser around the weights: checks shapes, casts to the receiver's dtype, and names what it is."""

    kind: str = "lite"
    needs_own: bool = False

    def __init__(self, net: LiteNet, dtype: torch.dtype = torch.float32, digest: str = "") -> None:
        self.net = net
        self.shape = net.shape
        self.dtype = dtype
        self.digest = digest
        """Empty until the weights are saved: weights that may still change have no name."""
        self.parameters = sum(p.numel() for p in net.parameters())
        every = range(net.shape.sharer.layers)
        self.source_layers = frozenset(every if net.shape.rank else net.shape.copied)

    @classmethod
    def from_folder(cls, folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> LiteFuser:
        """From `fuser.safetensors` and the shape in `pair.json`. Raises LoadFailed: missing, altered, or misfit."""
        info, tensors = read_weights(folder, cls.kind)
        net = fitted(lambda: LiteNet(LiteShape.read(info.shape)), tensors, folder)
        net.requires_grad_(False).to(device)
        return cls(net, dtype, info.digest)

    def save(self, folder: Path) -> LiteFuser:
        """Write `fuser.safetensors` in bfloat16; returns the fuser as it will be loaded."""
        stored = {name: t.detach().to(torch.bfloat16) for name, t in self.net.state_dict().items()}
        digest = save_weights(folder, stored)
        net = LiteNet(self.shape)
        net.load_state_dict({name: t.float() for name, t in stored.items()})
        net.requires_grad_(False).to(self.net.mean.device)
        return LiteFuser(net, self.dtype, digest)

    def project(self, source: KVCache, own: KVCache | None, start: int) -> KVCache:
        """KV for the receiver's slots from `start` on. Raises KVMismatch."""
        self._check(source)
        keys, values = self.net(source, start)
        return KVCache([k.to(self.dtype) for k in keys], [v.to(self.dtype) for v in values])

    def calibrate(self, seen: Sequence[Slots]) -> None:
        """As `LiteNet.standardise`."""
        self.net.standardise([one.source for one in seen])

    def train(self, mode: bool = True) -> None:
        """Nothing here is random."""
        self.net.train(mode)

    def anneal(self, step: int) -> None:
        """It has no gates."""

    def change(self) -> Change:
        """Every layer is written; there is no own KV to compare with."""
        return Change(gates_open=1.0, relative=0.0)

    def _check(self, source: KVCache) -> None:
        sharer = self.shape.sharer
        if source.layers != sharer.layers:
            raise KVMismatch(f"sharer KV has {source.layers} layers, the fuser reads {sharer.layers}")
        tokens = len_of(source, self.shape.copied[0])
        expected = (1, sharer.heads, tokens, sharer.head_size)
        for layer in sorted(self.source_layers):
            for t in (source.keys[layer], source.values[layer]):
                if tuple(t.shape) != expected:
                    raise KVMismatch(f"sharer layer {layer} has KV of shape {tuple(t.shape)}, expected {expected}")


def fits(sharer: KVShape, receiver: KVShape) -> bool:
    """A copy of the sharer's KV has the receiver's size."""
    return (sharer.heads, sharer.head_size) == (receiver.heads, receiver.head_size)


def copied_layers(sharer: KVShape, receiver: KVShape, kept: Sequence[int] | None) -> tuple[int, ...]:
    """The sharer layers a receiver starts from: those it is made of, else the nearest in relative depth."""
    if kept is not None:
        return tuple(kept)
    steps = max(1, receiver.layers - 1)
    return tuple(round(i * (sharer.layers - 1) / steps) for i in range(receiver.layers))


def fresh(shape: LiteShape, dtype: torch.dtype, seed: int) -> LiteFuser:
    """An untrained fuser: it hands over the copied layers as they are."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LiteFuser(LiteNet(replace(shape)), dtype)
