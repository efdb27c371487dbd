"""KVCache: the K and V of one sequence, layer by layer. Knows tensors; knows no model, tokenizer or store.

Layout per layer: keys and values of shape (1, kv_heads, tokens, head_size); keys as the model caches them, after RoPE.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from workers.errors import KVMismatch


@dataclass(slots=True)
class KVCache:
    """K and V by layer. Holds references; slices share memory with what they were cut from."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def __post_init__(self) -> None:
        if len(self.keys) != len(self.values):
            raise KVMismatch(f"{len(self.keys)} layers of keys and {len(self.values)} of values")

    @classmethod
    def empty(cls, layers: int, heads: int, head_size: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        """No tokens yet."""
        blank = torch.empty(1, heads, 0, head_size, dtype=dtype, device=device)
        return cls([blank] * layers, [blank] * layers)

    def __len__(self) -> int:
        """Tokens held."""
        return int(self.keys[0].shape[2]) if self.keys else 0

    @property
    def layers(self) -> int:
        return len(self.keys)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.keys, *self.values))

    def slice(self, start: int, stop: int) -> KVCache:
        """Tokens start..stop-1, as views."""
        return KVCache([k[:, :, start:stop] for k in self.keys], [v[:, :, start:stop] for v in self.values])

    def pick(self, places: torch.Tensor) -> KVCache:
        """The tokens at these places, in this order; layers that hold none stay empty."""
        return KVCache(
            [k[:, :, places] if k.shape[2] else k for k in self.keys],
            [v[:, :, places] if v.shape[2] else v for v in self.values],
        )

    def clone(self) -> KVCache:
        """A copy whose memory is its own and contiguous."""
        return KVCache(
            [k.clone(memory_format=torch.contiguous_format) for k in self.keys],
            [v.clone(memory_format=torch.contiguous_format) for v in self.values],
        )

    @classmethod
    def concat(cls, parts: Sequence[KVCache]) -> KVCache:
        """The parts' tokens one after the other. Raises KVMismatch when their layers differ in number or shape."""
        if len(parts) == 1:
            return parts[0]
        shapes = {tuple((t.shape[1], t.shape[3], t.dtype) for t in p.keys) for p in parts}
        if len(shapes) != 1:
            raise KVMismatch(f"cannot join KV of different shapes: {sorted(map(str, shapes))}")
        return cls(
            [torch.cat(ks, dim=2) for ks in zip(*(p.keys for p in parts), strict=True)],
            [torch.cat(vs, dim=2) for vs in zip(*(p.values for p in parts), strict=True)],
        )

    def tensors(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """(keys, values) layer by layer."""
        return zip(self.keys, self.values, strict=True)
