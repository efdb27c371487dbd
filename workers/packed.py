"""Linear layers for a few rows at once on a CPU.

A decode step multiplies every weight matrix by as many rows as answers run. For 2 to 32 rows, MKL reads the matrix at
half the speed it has for one row or for hundreds; oneDNN with the weights reordered beforehand does not. Measured on
two AVX2 cores, float32, one thread, 8 rows: 576 to 49152 features 2.0 times faster, 576 to 3072 1.5 times, 1536 to 576
not faster, so only layers that widen are packed. Costs a second copy of their weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_FEWEST, _MOST = 2, 32
"""Rows for which the packed product is the faster one."""
_PACKED_FOR = 8


class PackedLinear(nn.Module):
    """Computes what the layer it wraps computes, up to rounding; shares its weights."""

    def __init__(self, layer: nn.Linear, packed: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self._packed = packed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // self.in_features
        if not _FEWEST <= rows <= _MOST:
            return nn.functional.linear(x, self.weight, self.bias)
        flat = x.reshape(rows, self.in_features)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(flat, self._packed, self.bias, "none", [], "")
        return out.reshape(*x.shape[:-1], self.out_features)


def packed_tensors(model: nn.Module) -> list[torch.Tensor]:
    """What a copy of the model must share, since oneDNN's layout cannot be copied."""
    return [m._packed for m in model.modules() if isinstance(m, PackedLinear)]


class Packer:
    """Packs models in place; models that share weights share the packed ones."""

    def __init__(self) -> None:
        self._packed: dict[int, torch.Tensor] = {}

    def pack(self, model: nn.Module) -> int:
        """Replace the layers that gain from it; returns how many. None on other devices and dtypes."""
        found = [
            (parent, name, layer)
            for parent in model.modules()
            for name, layer in parent.named_children()
            if type(layer) is nn.Linear and gains(layer)
        ]
        for parent, name, layer in found:
            key = layer.weight.data_ptr()
            if key not in self._packed:
                self._packed[key] = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _PACKED_FOR)
            setattr(parent, name, PackedLinear(layer, self._packed[key]))
        return len(found)


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
