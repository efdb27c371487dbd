"""Linear layers for a few rows at once on a CPU.

A decode step multiplies every weight matrix by as many rows as answers run. For 2 to 32 rows, MKL reads the matrix at
half the speed it has for hundreds; oneDNN with the weights reordered beforehand does not. For one row MKL is as fast,
but uses one thread only. Measured on two AVX2 cores, float32, two threads, against MKL: 576 to 49152 features, 1 row
1.9 times faster and 8 rows 3.2 times; 576 to 1536, 1 row 1.5 times, 2 rows 2.1 times and 120 rows 1.3 times; two such
layers as one, another 1.2 times at 8 rows; 1536 to 576 hardly faster, so only layers that widen are packed. Costs a
second copy of their weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_PACKED_FOR = 8


class PackedLinear(nn.Module):
    """Computes what the layer it wraps computes, up to rounding; shares its weights.

    oneDNN's product has no gradient: where one is wanted, as when a fuser is trained through a model that an engine has
    packed, the layer itself computes.
    """

    def __init__(self, layer: nn.Linear, packed: torch.Tensor, rows: range) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._packed, self._rows = packed, rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // self.in_features
        if x.requires_grad or rows not in self._rows:
            return nn.functional.linear(x, self.weight, self.bias)
        return product(x, rows, self._packed, self.bias)


class PackedGate(nn.Module):
    """A gated MLP, `down(act(gate(x)) * up(x))`, with gate and up in one product; shares its weights."""

    def __init__(self, mlp: Any, packed: torch.Tensor, rows: range) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn
        self._packed, self._rows = packed, rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // x.shape[-1]
        if rows in self._rows and not x.requires_grad:
            gate, up = product(x, rows, self._packed, None).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        out: torch.Tensor = self.down_proj(self.act_fn(gate) * up)
        return out


def product(x: torch.Tensor, rows: int, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x of shape (..., in), `rows` rows in all -> (..., out)."""
    flat = torch.ops.mkldnn._linear_pointwise(x.reshape(rows, -1), packed, bias, "none", [], "")
    out: torch.Tensor = flat.reshape(*x.shape[:-1], -1)
    return out


def packed_tensors(model: nn.Module) -> list[torch.Tensor]:
    """What a copy of the model must share, since oneDNN's layout cannot be copied."""
    return [m._packed for m in model.modules() if isinstance(m, PackedLinear | PackedGate)]


class Packer:
    """Packs models in place; models that share weights share the packed ones."""

    def __init__(self) -> None:
        self._packed: dict[tuple[int, ...], torch.Tensor] = {}

    def pack(self, model: nn.Module) -> int:
        """Replace the layers that gain from it; returns how many. None on other devices and dtypes.

        To be called by the thread that computes: for how many rows it pays depends on how many threads that one uses.
        """
        rows = range(1, 257) if torch.get_num_threads() > 1 else range(2, 33)
        gated = [(parent, name, mlp) for parent, name, mlp in _children(model) if _is_gated(mlp)]
        for parent, name, mlp in gated:
            packed = self._reordered(mlp.gate_proj.weight, mlp.up_proj.weight)
            setattr(parent, name, PackedGate(mlp, packed, rows))
        single = [
            (parent, name, layer)
            for parent, name, layer in _children(model)
            if type(layer) is nn.Linear
            and gains(layer)
            and not (isinstance(parent, PackedGate) and name in ("gate_proj", "up_proj"))
        ]
        for parent, name, layer in single:
            setattr(parent, name, PackedLinear(layer, self._reordered(layer.weight), rows))
        return 2 * len(gated) + len(single)

    def _reordered(self, *weights: torch.Tensor) -> torch.Tensor:
        key = tuple(w.data_ptr() for w in weights)
        if key not in self._packed:
            joined = torch.cat([w.detach() for w in weights]) if len(weights) > 1 else weights[0].detach()
            self._packed[key] = torch.ops.mkldnn._reorder_linear_weight(joined, _PACKED_FOR)
        return self._packed[key]


def _children(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    return [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]


def gains(layer: Any) -> bool:
    """Whether packing makes this layer faster here."""
    weight = layer.weight
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and layer.out_features >= layer.in_features
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _is_gated(mlp: Any) -> bool:
    """Whether it is the gated MLP of most decoders: by its parts, and by what it computes for some numbers."""
    if isinstance(mlp, PackedGate) or not callable(getattr(mlp, "act_fn", None)):
        return False
    layers: list[Any] = [getattr(mlp, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if any(type(layer) is not nn.Linear for layer in layers):
        return False
    gate, up, down = layers
    if gate.bias is not None or up.bias is not None or gate.weight.shape != up.weight.shape or not gains(gate):
        return False
    with torch.inference_mode():
        some = torch.linspace(-1, 1, gate.in_features)[None]
        return torch.equal(mlp(some), down(mlp.act_fn(gate(some)) * up(some)))
