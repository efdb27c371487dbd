"""The fuser around the `mix` network: what it checks, how it is stored, where it begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from workers.cache import KVCache
from workers.errors import KVMismatch
from workers.fusers.base import Change, KVShape, Slots
from workers.fusers.folder import fitted, read_weights, save_weights
from workers.fusers.mix_net import MixNet, MixShape
from workers.fusers.mix_start import begin


class MixFuser:
    """The fuser around the weights: checks shapes, casts to the receiver's dtype, and names what it is."""

    kind: str = "lite"

    def __init__(self, net: MixNet, dtype: torch.dtype = torch.float32, digest: str = "") -> None:
        self.net = net
        self.shape = net.shape
        self.dtype = dtype
        self.digest = digest
        """Empty until the weights are saved: weights that may still change have no name."""
        self.needs_own = net.shape.own
        self.parameters = sum(p.numel() for p in net.parameters())
        self.source_layers = frozenset(layer for row in net.shape.reads for layer in row)

    @classmethod
    def from_folder(cls, folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> MixFuser:
        """From `fuser.safetensors` and the shape in `pair.json`. Raises LoadFailed: missing, altered, or misfit."""
        info, tensors = read_weights(folder, cls.kind)
        return cls(_loaded(MixShape.read(info.shape), tensors, folder).to(device), dtype, info.digest)

    def save(self, folder: Path) -> MixFuser:
        """Write `fuser.safetensors` in bfloat16; returns the fuser as it will be loaded."""
        stored = {name: t.detach().to(torch.bfloat16) for name, t in self.net.state_dict().items()}
        digest = save_weights(folder, stored)
        net = _loaded(self.shape, stored, folder).to(self.net.ours_mean.device)
        return MixFuser(net, self.dtype, digest)

    def project(self, source: KVCache, own: KVCache | None, start: int, heard_at: Tensor | None = None) -> KVCache:
        """KV for the receiver's slots from `start` on; `heard_at` (tokens,) says where the sharer's slots stand where
        that is elsewhere. With `last` the slots given must be the last that are shared. Raises KVMismatch.
        """
        own = own if self.needs_own else None
        self._check(source, own)
        slots = Slots.of(source, own, start, heard_at)
        keys, values = self.write(slots.last(self.shape.last) if self.shape.last else slots)
        kept = len(slots.at) - keys[0].shape[2]
        if own is None or not kept:
            return KVCache(keys, values)
        before = KVCache(*([t[:, :, :kept].to(self.dtype) for t in kind] for kind in (own.keys, own.values)))
        return KVCache.concat([before, KVCache(keys, values)])

    def write(self, slots: Slots, keep: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values by layer of exactly these slots, in the receiver's dtype. Differentiable."""
        keys, values = self.net(slots, keep)
        return [k.to(self.dtype) for k in keys], [v.to(self.dtype) for v in values]

    def keep(self, slots: Slots, share: float, seed: int) -> Tensor:
        """As `MixNet.keep`, for the slots of a text that are written."""
        return self.net.keep(min(len(slots.at), self.shape.last or len(slots.at)), share, seed)

    def calibrate(self, seen: Sequence[Slots]) -> None:
        """Statistics, and in handover the closed form to begin with."""
        self.net.standardise(seen)
        if not self.needs_own:
            begin(self.net, seen)

    def train(self, mode: bool = True) -> None:
        """Nothing here is random."""
        self.net.train(mode)

    def anneal(self, step: int) -> None:
        """Its gates have no temperature."""

    def change(self) -> Change:
        """Every layer is written, by gates that are never shut."""
        return Change(gates_open=1.0, relative=0.0)

    def _check(self, source: KVCache, own: KVCache | None) -> None:
        if self.needs_own and own is None:
            raise KVMismatch("a lite fuser in mode fuse changes the receiver's own KV, and there is none")
        tokens = source.keys[min(self.source_layers)].shape[2] if source.layers else 0
        _check_side("sharer", source, self.shape.sharer, sorted(self.source_layers), tokens)
        if own is not None:
            _check_side("receiver", own, self.shape.receiver, range(self.shape.receiver.layers), tokens)


def _check_side(role: str, kv: KVCache, shape: KVShape, layers: Sequence[int], tokens: int) -> None:
    if kv.layers != shape.layers:
        raise KVMismatch(f"{role} KV has {kv.layers} layers, the fuser reads {shape.layers}")
    wanted = (1, shape.heads, tokens, shape.head_size)
    for layer in layers:
        for t in (kv.keys[layer], kv.values[layer]):
            if tuple(t.shape) != wanted:
                raise KVMismatch(f"{role} layer {layer} has KV of shape {tuple(t.shape)}, expected {wanted}")


def _loaded(shape: MixShape, tensors: dict[str, Tensor], folder: Path) -> MixNet:
    net = fitted(lambda: MixNet(shape), tensors, folder)
    return net.requires_grad_(False).eval()


def fresh(shape: MixShape, dtype: torch.dtype, seed: int) -> MixFuser:
    """An untrained fuser: in `fuse` it leaves the receiver's own KV as it is."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return MixFuser(MixNet(shape), dtype)
