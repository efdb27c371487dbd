"""Parts of a decoder that compute what the parts they replace compute, faster on a CPU.

Each shares the weights of what it replaces, under the same names. oneDNN's product has no gradient: where one is
wanted, as when a fuser is trained through a model that an engine has packed, the plain layers compute.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward


class PackedLinear(nn.Module):
    """Computes what the layer it wraps computes, up to rounding."""

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
    """A gated MLP, `down(act(gate(x)) * up(x))`, with gate and up in one product."""

    joined = ("gate_proj", "up_proj")

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


class PackedAttention(nn.Module):
    """Causal self-attention with rotary positions: queries, keys and values in one product, the first two rotated as
    one. Behind that it is transformers' own.
    """

    joined = ("q_proj", "k_proj", "v_proj")
    is_causal = True

    def __init__(self, attention: Any, packed: torch.Tensor, bias: torch.Tensor | None, rows: range) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = attention.q_proj, attention.k_proj, attention.v_proj
        self.o_proj = attention.o_proj
        self.q_norm, self.k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.layer_idx, self.scaling = attention.layer_idx, attention.scaling
        self.head_dim, self.num_key_value_groups = attention.head_dim, attention.num_key_value_groups
        self._packed, self._bias, self._rows = packed, bias, rows
        self.heads = (self.q_proj.out_features // self.head_dim, self.k_proj.out_features // self.head_dim)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        rows, (heads, shared) = hidden_states.shape[:-1], self.heads
        cos, sin = (turn.unsqueeze(2) for turn in position_embeddings)
        flat = self.project(hidden_states).view(*rows, heads + 2 * shared, self.head_dim)
        turned = self.turned(flat, cos, signed(sin)).transpose(1, 2)
        query, key, value = turned[:, :heads], turned[:, heads:], flat[:, :, heads + shared :].transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        out, _weights = sdpa_attention_forward(self, query, key, value, attention_mask, scaling=self.scaling)
        return self.o_proj(out.reshape(*rows, -1)), None

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """x of shape (..., hidden) -> (..., all heads · size): of queries, then keys, then values."""
        rows = x.numel() // x.shape[-1]
        if rows in self._rows and not x.requires_grad:
            return product(x, rows, self._packed, self._bias)
        return torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)

    def turned(self, flat: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Queries and keys at their positions. `flat` is (..., all heads, size), cos and sin (..., 1, size), the latter
        `signed`. Returns (..., heads of queries and keys, size).
        """
        heads, shared = self.heads
        both = flat[..., : heads + shared, :]
        if self.q_norm is not None and self.k_norm is not None:
            both = torch.cat((self.q_norm(both[..., :heads, :]), self.k_norm(both[..., heads:, :])), dim=-2)
        half = self.head_dim // 2
        return both * cos + torch.cat((both[..., half:], both[..., :half]), dim=-1) * sin


def product(x: torch.Tensor, rows: int, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x of shape (..., in), `rows` rows in all -> (..., out)."""
    flat = torch.ops.mkldnn._linear_pointwise(x.reshape(rows, -1), packed, bias, "none", [], "")
    out: torch.Tensor = flat.reshape(*x.shape[:-1], -1)
    return out


def signed(sin: torch.Tensor) -> torch.Tensor:
    """With its first half negated: then the halves of a head need only change places to be turned by it."""
    first, second = sin.chunk(2, dim=-1)
    return torch.cat((-first, second), dim=-1)
