"""Decoders packed for a few rows at once on a CPU: which parts gain, and whether what replaces them computes the same.

A decode step multiplies every weight matrix by as many rows as answers run, and reads all of them from memory. For 2
to 32 rows, MKL reads a matrix at half the speed it has for hundreds; oneDNN with the weights reordered beforehand does
not. For one row MKL is as fast, but uses one thread only. Measured on two AVX2 cores, float32, two threads, matrices
that lie in no cache, against MKL: 576 to 49152 features, 1 row 1.8 times faster and 8 rows 3.3 times; 576 to 3072, 1.7
and 2.3 times; 576 to 960, 1.1 and 1.6 times; 1536 to 576, 1.1 and 1.6 times. Hence gate and up are one product, and
queries, keys and values another: small matrices are read at less than full speed. Costs a second copy of the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from workers.packed_layers import PackedAttention, PackedGate, PackedLinear

_PACKED_FOR = 8

_PLAIN_ATTENTION = {
    "LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention", "SmolLM3Attention", "GraniteAttention",
}  # fmt: skip
"""Of transformers: those that may be a `PackedAttention`. Whether one is, is tried."""


def packed_tensors(model: nn.Module) -> list[torch.Tensor]:
    """What a copy of the model must share, since oneDNN's layout cannot be copied."""
    return [m._packed for m in model.modules() if isinstance(m, PackedLinear | PackedGate | PackedAttention)]


class Packer:
    """Packs models in place; models that share weights share the packed ones."""

    def __init__(self) -> None:
        self._packed: dict[tuple[int, ...], torch.Tensor] = {}

    def pack(self, model: nn.Module) -> int:
        """Replace the layers that gain from it; returns how many matrices. None on other devices and dtypes.

        To be called by the thread that computes: for how many rows it pays depends on how many threads that one uses.
        """
        rows = range(1, 257) if torch.get_num_threads() > 1 else range(2, 33)
        return self._pack_groups(model, rows) + self._pack_single(model, rows)

    def _pack_groups(self, model: nn.Module, rows: range) -> int:
        count = 0
        for parent, name, part in _children(model):
            if _is_gated(part):
                packed = self._reordered(part.gate_proj.weight, part.up_proj.weight)
                setattr(parent, name, PackedGate(part, packed, rows))
                count += 2
            elif (attention := self._attention(part, rows)) is not None:
                setattr(parent, name, attention)
                count += 3
        return count

    def _pack_single(self, model: nn.Module, rows: range) -> int:
        found = [
            (parent, name, layer)
            for parent, name, layer in _children(model)
            if type(layer) is nn.Linear and gains(layer) and name not in getattr(parent, "joined", ())
        ]
        for parent, name, layer in found:
            setattr(parent, name, PackedLinear(layer, self._reordered(layer.weight), rows))
        return len(found)

    def _attention(self, part: Any, rows: range) -> PackedAttention | None:
        """What may stand in its place; None where nothing gains or computes the same."""
        if type(part).__name__ not in _PLAIN_ATTENTION:
            return None
        layers = (part.q_proj, part.k_proj, part.v_proj)
        if any(type(layer) is not nn.Linear for layer in layers) or not gains(part.q_proj):
            return None
        biases = [layer.bias for layer in layers if layer.bias is not None]
        bias = torch.cat([b.detach() for b in biases]) if len(biases) == len(layers) else None
        packed = self._reordered(*(layer.weight for layer in layers))
        # One row gains with one thread too: it is one product in place of three.
        found = PackedAttention(part, packed, bias, range(1, rows.stop))
        return found if _attend_alike(part, found) else None

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


def _attend_alike(part: Any, packed: PackedAttention) -> bool:
    """Whether both compute the same of some numbers at some positions."""
    numbers = torch.Generator().manual_seed(0)
    tokens = 5
    angles = torch.randn(1, tokens, part.head_dim, generator=numbers)
    some = torch.randn(1, tokens, part.q_proj.in_features, generator=numbers)
    with torch.inference_mode():
        turns = (angles.cos(), angles.sin())
        theirs, ours = (a(some, position_embeddings=turns, attention_mask=None)[0] for a in (part, packed))
        return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))
