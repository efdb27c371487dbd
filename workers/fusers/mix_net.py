"""The general `lite` network: any two models, in `fuse` or `handover`, with one tokenizer or two.

Each receiver layer reads K and V of all sharer layers together, in `fuse` its own K and V as well unless they are only
added to, through one low-rank code, and writes K and V from it, every head by its own gate. Inputs are standardised by
dimension, outputs scaled back by the receiver's; keys are read and written without their rotation where both models
turn plainly. The first network, for models of one KV size, is `workers.fusers.lite`.

Every slot is mapped by itself; the sharer's slots may stand elsewhere than the receiver's. With `last` only the last
slots of what is projected are changed, so projecting in pieces is then another thing than projecting at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.cache import KVCache
from workers.errors import KVMismatch, LoadFailed
from workers.fusers.base import KVShape, Slots
from workers.fusers.rope import angles_at, turn

NETWORK = "mix"
"""How `fuser.shape` in `pair.json` names it."""

# Standardised inputs are cut here: the first token's KV stands tens of deviations away from all others'.
_FAR = 6.0


@dataclass(frozen=True, slots=True)
class MixShape:
    """What the constructor takes; `pair.json` carries it as `fuser.shape`."""

    sharer: KVShape
    receiver: KVShape
    own: bool
    """`fuse`: the receiver's own KV is changed, and read too unless `add_only`. Else `handover`."""
    reads: tuple[tuple[int, ...], ...]
    """By receiver layer: the sharer layers it reads."""
    rank: int
    """Width of the code, per receiver layer."""
    hidden: int = 0
    """Width of the SwiGLU block on the code; 0 leaves it out: linear but for the gates."""
    last: int = 0
    """`fuse`: only so many slots at the end of what is shared are changed; 0 changes all."""
    add_only: bool = False
    """`fuse`: what is added to the receiver's own KV follows from the sharer's alone."""

    def __post_init__(self) -> None:
        named = [layer for row in self.reads for layer in row]
        if len(self.reads) != self.receiver.layers or not all(self.reads):
            raise LoadFailed(
                f"lite fuser: needs sharer layers to read for each of {self.receiver.layers} receiver layers"
            )
        if any(not 0 <= layer < self.sharer.layers for layer in named):
            raise LoadFailed(f"lite fuser: reads sharer layers beyond 0..{self.sharer.layers - 1}")
        if self.rank < 1 or self.hidden < 0 or self.last < 0:
            raise LoadFailed("lite fuser: rank is at least 1, hidden and last at least 0")
        if not self.own and self.last:
            raise LoadFailed("lite fuser: in handover every slot is written, so `last` is 0")
        if not self.own and self.add_only:
            raise LoadFailed("lite fuser: in handover there is no own KV to add to, so `add_only` is false")
        if not self.own and not self.turns:
            raise LoadFailed("lite fuser: in handover both models need plain rotary positions")

    @property
    def reads_own(self) -> bool:
        """The receiver's own KV is among the inputs."""
        return self.own and not self.add_only

    @property
    def turns(self) -> bool:
        """Keys are read and written without their rotation."""
        return self.sharer.rope_theta is not None and self.receiver.rope_theta is not None

    @classmethod
    def read(cls, value: dict[str, Any]) -> MixShape:
        """From `pair.json`. Raises LoadFailed."""
        try:
            return cls(
                KVShape(**value["sharer"]),
                KVShape(**value["receiver"]),
                bool(value["own"]),
                tuple(tuple(map(int, row)) for row in value["reads"]),
                int(value["rank"]),
                int(value["hidden"]),
                int(value["last"]),
                bool(value.get("add_only", False)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise LoadFailed(f"lite fuser: its shape in pair.json cannot be read ({error!r})") from error

    def as_json(self) -> dict[str, Any]:
        """For `pair.json`."""
        said = {"network": NETWORK, **asdict(self)}
        if not self.add_only:  # absent in every folder that is older than the word
            del said["add_only"]
        return said


class MixLayer(nn.Module):
    """One receiver layer: standardised rows -> K and V in the receiver's deviations, and the heads' gates."""

    def __init__(self, shape: MixShape, layer: int) -> None:
        super().__init__()
        theirs = len(shape.reads[layer]) * 2 * shape.sharer.heads * shape.sharer.head_size
        ours = 2 * shape.receiver.heads * shape.receiver.head_size
        rank, hidden = shape.rank, shape.hidden
        self.heads = 2 * shape.receiver.heads
        self.down = nn.Linear(theirs + (ours if shape.reads_own else 0), rank)
        self.widen = nn.Linear(rank, 2 * hidden, bias=False) if hidden else None
        self.narrow = nn.Linear(hidden, rank, bias=False) if hidden else None
        self.up = nn.Linear(rank, ours)
        self.gate = nn.Linear(rank, self.heads)
        for start in (self.up, self.gate):
            nn.init.zeros_(start.weight)
            nn.init.zeros_(start.bias)
        if self.narrow is not None:
            nn.init.zeros_(self.narrow.weight)

    def forward(self, rows: Tensor) -> Tensor:
        """(tokens, inputs) -> (tokens, K|V, heads, head_size), zero before training. Gates lie in 0..2, from 1."""
        code = self.down(rows)
        if self.widen is not None and self.narrow is not None:
            gated, value = self.widen(F.rms_norm(code, code.shape[-1:])).chunk(2, dim=-1)
            code = code + self.narrow(F.silu(gated) * value)
        out: Tensor = self.up(code).view(len(rows), self.heads, -1)
        out = out * (2 * torch.sigmoid(self.gate(code)))[..., None]
        return out.view(len(rows), 2, self.heads // 2, -1)


class MixNet(nn.Module):
    """The weights, and their path from slots to the receiver's KV. Computes in float32."""

    theirs_mean: Tensor
    theirs_deviation: Tensor
    ours_mean: Tensor
    ours_deviation: Tensor
    scale: Tensor
    """What an output of 1 means, by receiver layer and dimension."""

    def __init__(self, shape: MixShape) -> None:
        super().__init__()
        self.shape = shape
        for side, kv in (("theirs", shape.sharer), ("ours", shape.receiver)):
            size = (kv.layers, 2, kv.heads * kv.head_size)
            self.register_buffer(f"{side}_mean", torch.zeros(size))
            self.register_buffer(f"{side}_deviation", torch.ones(size))
        self.register_buffer("scale", torch.ones_like(self.ours_deviation))
        self.layers = nn.ModuleList(MixLayer(shape, layer) for layer in range(shape.receiver.layers))
        self._read = sorted({layer for row in shape.reads for layer in row})
        place = {layer: i for i, layer in enumerate(self._read)}
        self._places = [[place[layer] for layer in row] for row in shape.reads]

    @torch.no_grad()
    def standardise(self, texts: Sequence[Slots]) -> None:
        """Take mean and deviation of every dimension from whole texts; `own` must be there in handover too."""
        # The first token is left out: it is an attention sink, and would set the scale for all the others.
        all_slots = Slots.concat([text.last(max(1, len(text.at) - 1)) for text in texts])
        count = self.shape.last
        written = Slots.concat([text.last(count) for text in texts]) if count else all_slots
        for side in ("theirs", "ours"):
            spread = self._side(all_slots, side).std(0, correction=0)
            rows = self._side(written, side)
            # In the first layer the last tokens of all texts may be one token, whose KV never varies.
            deviation = torch.maximum(rows.std(0, correction=0), 0.1 * spread).clamp_min(1e-3)
            self.get_buffer(f"{side}_mean").copy_(rows.mean(0))
            self.get_buffer(f"{side}_deviation").copy_(deviation)
            if side == "ours":
                self.scale.copy_(spread.clamp_min(1e-3))

    def keep(self, tokens: int, share: float, seed: int) -> Tensor:
        """(tokens, standardised inputs of either side): 0 for that share of them, drawn, and for the rest what makes up
        for it.
        """
        inputs = len(self._read) * self.theirs_mean[0].numel() + self.shape.reads_own * self.ours_mean.numel()
        drawn = torch.rand(tokens, inputs, generator=torch.Generator().manual_seed(seed))
        return (drawn >= share).to(self.theirs_mean.device) / (1 - share)

    def forward(self, slots: Slots, keep: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values by receiver layer, each (1, heads, tokens, head_size), keys rotated; float32. `keep`: as
        drawn for these slots, while it is trained.
        """
        shape, tokens = self.shape, len(slots.at)
        heads, size = shape.receiver.heads, shape.receiver.head_size
        own = self._side(slots, "ours") if shape.own else None
        inputs = self._inputs(slots, own if shape.reads_own else None, keep)
        made = [net(rows) for net, rows in zip(self.layers, inputs, strict=True)]
        base = self.ours_mean.view(1, -1, 2, heads, size) if own is None else own.view(tokens, -1, 2, heads, size)
        # (tokens, layers, K|V, heads, size) -> (layers, K|V, 1, heads, tokens, size)
        scaled = self.scale.view(-1, 2, heads, size) * torch.stack(made, dim=1)
        out = (base + scaled).permute(1, 2, 3, 0, 4).unsqueeze(2)
        keys = out[:, 0]
        if shape.turns:
            keys = turn(keys, angles_at(slots.at, size, shape.receiver.rope_theta or 0.0))
        return list(keys.unbind(0)), list(out[:, 1].unbind(0))

    def examples(self, slots: Slots) -> Iterator[tuple[Tensor, Tensor]]:
        """`handover`, by receiver layer: what it reads (tokens, inputs), and what it must say (tokens, outputs) to
        write the receiver's own KV.
        """
        wanted = (self._side(slots, "ours") - self.ours_mean) / self.scale
        for layer, rows in enumerate(self._inputs(slots, None)):
            yield rows, wanted[:, layer].flatten(1)

    def _inputs(self, slots: Slots, own: Tensor | None, keep: Tensor | None = None) -> Iterator[Tensor]:
        """By receiver layer (tokens, inputs): the sharer's layers that it reads, then its own rows where given."""
        theirs = self._unit(self._side(slots, "theirs", self._read), "theirs", self._read)
        ours = None if own is None else self._unit(own, "ours", range(self.shape.receiver.layers))
        if keep is not None:
            theirs = theirs * keep[:, : theirs[0].numel()].view_as(theirs)
            ours = None if ours is None else ours * keep[:, theirs[0].numel() :].view_as(ours)
        for layer, places in enumerate(self._places):
            rows = theirs.flatten(1) if len(places) == len(self._read) else theirs[:, places].flatten(1)
            yield rows if ours is None else torch.cat((rows, ours[:, layer].flatten(1)), dim=1)

    def _side(self, slots: Slots, side: str, layers: Sequence[int] | None = None) -> Tensor:
        """Bare rows of one model's layers, of all of them where none are named."""
        shape, kv = (self.shape.sharer, slots.source) if side == "theirs" else (self.shape.receiver, slots.own)
        if kv is None:
            raise KVMismatch("what the receiver's KV looks like is not known without it")
        at = slots.heard_at if side == "theirs" else slots.at
        return self._rows(kv, at, shape, range(shape.layers) if layers is None else layers)

    def _rows(self, kv: KVCache, at: Tensor, shape: KVShape, layers: Sequence[int]) -> Tensor:
        """(tokens, layers, K|V, heads · head_size), keys without rotation; float32."""
        keys = torch.cat([kv.keys[layer] for layer in layers]).float()
        if self.shape.turns:
            keys = turn(keys, angles_at(at, shape.head_size, shape.rope_theta or 0.0, back=True))
        values = torch.cat([kv.values[layer] for layer in layers]).float()
        return torch.stack((keys, values), dim=1).permute(3, 0, 1, 2, 4).flatten(3)

    def _unit(self, rows: Tensor, side: str, layers: Sequence[int]) -> Tensor:
        mean, deviation = self.get_buffer(f"{side}_mean"), self.get_buffer(f"{side}_deviation")
        if len(layers) != len(mean):
            mean, deviation = mean[layers], deviation[layers]
        return ((rows - mean) / deviation).clamp(-_FAR, _FAR)
