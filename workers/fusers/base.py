"""The fuser protocol: one network between a sharer and a receiver.

A fuser maps KV of the sharer, slot by slot, to KV that the receiver attends to. It knows neither tokens nor models
beyond their KV shapes; alignment of different tokenizers happens before it (`workers.align`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from workers.cache import KVCache


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a model's KV looks like."""

    layers: int
    heads: int
    """KV heads, not query heads."""
    head_size: int
    rope_theta: float | None = None
    """None where the model uses no plain RoPE."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Slots to be written: the sharer's KV behind them, the receiver's own (`fuse`), and where each stands."""

    source: KVCache
    own: KVCache | None
    heard_at: Tensor
    """(tokens,) positions in the sharer's text."""
    at: Tensor
    """(tokens,) positions in the receiver's."""

    @classmethod
    def of(cls, source: KVCache, own: KVCache | None, start: int, heard_at: Tensor | None = None) -> Slots:
        """Consecutive ones from `start` on; the sharer's stand there too where `heard_at` does not say otherwise."""
        first = next((k for k in source.keys if k.shape[2]), source.keys[0])
        at = torch.arange(start, start + first.shape[2], device=first.device)
        return cls(source, own, at if heard_at is None else heard_at, at)

    def last(self, count: int) -> Slots:
        """The last ones."""
        first = max(0, len(self.at) - count)
        own = None if self.own is None else self.own.slice(first, len(self.at))
        return Slots(self.source.slice(first, len(self.at)), own, self.heard_at[first:], self.at[first:])

    @classmethod
    def concat(cls, parts: Sequence[Slots]) -> Slots:
        """Of several texts, one after the other."""
        owns = [part.own for part in parts if part.own is not None]
        return cls(
            KVCache.concat([part.source for part in parts]),
            KVCache.concat(owns) if owns else None,
            torch.cat([part.heard_at for part in parts]),
            torch.cat([part.at for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class Change:
    """How much fusing changed the receiver's KV: figures for the audit record."""

    gates_open: float
    """Share of (layer, K|V) gates that are open."""
    relative: float
    """Mean over layers of ‖fused − own‖₂ / ‖own‖₂; 0 in handover, where there is no own."""
    gates: str = ""
    """By receiver layer: `B` both gates open, `K` or `V` one, `-` none; empty where the fuser has no gates."""


@runtime_checkable
class Fuser(Protocol):
    """`kind` is c2c | lite | linear | identity; `needs_own` tells `fuse` from `handover`."""

    kind: str
    digest: str
    """SHA-256 over weights and shape: part of the pair's fingerprint."""
    needs_own: bool
    """True: the receiver must have read the same slots itself (`fuse`). False: it need not (`handover`)."""
    source_layers: frozenset[int]
    """Sharer layers that are read; layers behind closed gates are absent and need not be computed or stored."""
    parameters: int

    def project(self, source: KVCache, own: KVCache | None, start: int) -> KVCache:
        """KV for the receiver's slots start..start+len(source)-1.

        `source` holds all sharer layers (those outside `source_layers` may be empty), `own` the receiver's KV of the
        same slots where `needs_own`. The result has the receiver's shape and dtype. Raises KVMismatch.
        """

    def change(self) -> Change:
        """Static gate figures; `relative` is filled per call by the engine where own KV exists."""
