"""The official Cache-to-Cache network for one receiver layer, and the two maps between layers. Knows tensors only.

State dict names, arithmetic and dtype promotion are those of the published checkpoints (class `C2CProjector`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kind = Literal["key", "value"]
KINDS: tuple[Kind, Kind] = ("key", "value")


@dataclass(frozen=True, slots=True)
class ProjectorShape:
    """The constructor arguments in `projector_{i}.json`; `dim` is a head's size, `heads` counts KV heads."""

    source_dim: int
    target_dim: int
    source_num_heads: int = 1
    target_num_heads: int = 1
    hidden_dim: int = 1024
    intermediate_dim: int = 1024
    num_layers: int = 3
    dropout: float = 0.1
    initial_temperature: float = 1.0
    final_temperature: float = 0.001
    anneal_steps: int = 1929

    @property
    def source_width(self) -> int:
        return self.source_dim * self.source_num_heads

    @property
    def target_width(self) -> int:
        return self.target_dim * self.target_num_heads


class _Block(nn.Module):
    """x + W2·GELU(W1·RMSNorm(x)), dropout before the residual."""

    def __init__(self, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        change = self.w2(F.gelu(self.w1(self.norm(x))))
        return x + F.dropout(change, self.dropout, self.training)


class _Blocks(nn.Module):
    def __init__(self, count: int, width: int, inner: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(width, inner, dropout) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class C2CProjector(nn.Module):
    """Sharer K, V (B, Hs, N, Ds) and receiver K, V (B, Ht, N, Dt) -> the receiver's, changed. K and V never mix.

    Evaluation: a gate is open or closed (logit > 0), and a closed one costs nothing. Training: gates are soft, with
    noise per (batch, receiver head, token). Where weights are narrower than float32 the result is float32, to be
    rounded once when it is written into a cache.
    """

    gate_temperature: Tensor

    def __init__(self, shape: ProjectorShape) -> None:
        super().__init__()
        if shape.num_layers < 3:
            raise ValueError(f"a C2CProjector has at least 3 layers, not {shape.num_layers}")
        self.shape = shape
        hidden, inner, dropout = shape.hidden_dim, shape.intermediate_dim, shape.dropout
        for kind in KINDS:
            self.register_parameter(f"{kind}_gate_logit", nn.Parameter(torch.tensor(0.0)))
            parts: dict[str, nn.Module] = {
                "in": nn.Linear(shape.source_width + shape.target_width, hidden),
                "mlp1": _Blocks(1, hidden, inner, dropout),
                "scalar_mlp2": _Blocks(1, hidden, hidden, dropout),
                "scalar_head": nn.Linear(hidden, shape.target_num_heads),
                "proj_mlp2": _Blocks(shape.num_layers - 2, hidden, inner, dropout),
                "proj_out": nn.Linear(hidden, shape.target_width),
            }
            for name, part in parts.items():
                self.add_module(f"{kind}_{name}", part)
        self.register_buffer("gate_temperature", torch.tensor(shape.initial_temperature))

    def forward(
        self,
        source: tuple[Tensor, Tensor],
        target: tuple[Tensor, Tensor],
        uniforms: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(K, V) of the receiver after fusing; where a gate is closed its own tensor itself.

        `uniforms` (B, Ht, N, 1), for K and V, replace the noise drawn in training.
        """
        noise = uniforms or (None, None)
        key = self.fuse("key", source[0], target[0], noise[0])
        return key, self.fuse("value", source[1], target[1], noise[1])

    def fuse(self, kind: Kind, source: Tensor, target: Tensor, uniform: Tensor | None = None) -> Tensor:
        """One of the two paths. Asks the device whether the gate is open: keep `is_open` where that wait matters."""
        if not self.training and not self.is_open(kind):
            return target
        return self.add(kind, source, target, uniform)

    def add(self, kind: Kind, source: Tensor, target: Tensor, uniform: Tensor | None = None) -> Tensor:
        """Target + gate · weight · feature, for a gate known to be open or in training."""
        weight, feature = self.weight_and_feature(kind, source, target)
        return target + self.gate(kind, target, uniform) * weight * feature

    def is_open(self, kind: Kind) -> bool:
        return bool(self.get_parameter(f"{kind}_gate_logit") > 0)

    def gate(self, kind: Kind, target: Tensor, uniform: Tensor | None = None) -> Tensor:
        """Float32: (1, 1, 1, 1) of 0 or 1 in evaluation, (B, Ht, N, 1) between them in training."""
        logit = self.get_parameter(f"{kind}_gate_logit")
        if not self.training:
            # Four dimensions, not none: a 0-dim tensor would not promote bfloat16, and the sum would lose bits.
            return (logit > 0).float().view(1, 1, 1, 1)
        if uniform is None:
            uniform = torch.rand(*target.shape[:3], 1, device=target.device)
        gumbel = -torch.log(-torch.log(uniform + 1e-20) + 1e-20)
        return torch.sigmoid((logit + gumbel) / self.gate_temperature)

    def weight_and_feature(self, kind: Kind, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (B, Ht, N, 1) in 0..1 and features (B, Ht, N, Dt), in the projector's dtype."""
        heads = self.shape.target_num_heads
        into = self._part(kind, "in")
        dtype = self.get_parameter(f"{kind}_proj_out.weight").dtype
        joined = torch.cat([_flat(source).to(dtype), _flat(target).to(dtype)], dim=-1)
        hidden = self._part(kind, "mlp1")(into(joined))
        feature = self._part(kind, "proj_out")(self._part(kind, "proj_mlp2")(hidden))
        weight = torch.sigmoid(self._part(kind, "scalar_head")(self._part(kind, "scalar_mlp2")(hidden)))
        return weight.transpose(1, 2).unsqueeze(-1), feature.unflatten(-1, (heads, -1)).transpose(1, 2)

    def anneal(self, step: int) -> None:
        """Set the temperature that holds after `step` optimizer steps."""
        self.gate_temperature.fill_(temperature(self.shape, step))

    def _part(self, kind: Kind, name: str) -> nn.Module:
        return self.get_submodule(f"{kind}_{name}")


def _flat(kv: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, H·D), head by head."""
    return kv.transpose(1, 2).flatten(2)


def temperature(shape: ProjectorShape, step: int) -> float:
    """From the initial to the final temperature along an exponential, then constant."""
    share = min(step / shape.anneal_steps, 1.0)
    return shape.initial_temperature * math.pow(shape.final_temperature / shape.initial_temperature, share)


def last_aligned(targets: int, sources: int) -> tuple[int, ...]:
    """The sharer layer of each receiver layer: last to last, downwards; what is left over takes layer 0."""
    return tuple(min(max(t + sources - targets, 0), sources - 1) for t in range(targets))


def k_nearest(targets: int, sources: int) -> tuple[int, ...]:
    """The sharer layer at the nearest relative depth; of two equally near, the lower."""

    def depth(i: int, n: int) -> float:
        return i / (n - 1) if n > 1 else 0.0

    return tuple(
        min(range(sources), key=lambda s: (abs(depth(s, sources) - depth(t, targets)), s)) for t in range(targets)
    )


LAYER_MAPS: dict[str, Callable[[int, int], tuple[int, ...]]] = {"last_aligned": last_aligned, "k_nearest": k_nearest}
