"""Room for KV that grows in place. Knows the transformers Cache interface; knows no requests.

transformers' own DynamicCache grows by concatenation: every step copies all KV. Here a step writes one slot.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from workers.cache import KVCache
from workers.fusers.base import KVShape

_ROUND = 128  # slots: growing in small steps would copy often

_UNBOUNDED = 1 << 62

_asked = threading.local()


class Interrupted(Exception):
    """A forward was given up between two layers. Nothing was counted: the same forward may be run again."""


@contextmanager
def interruptible(give_up: Callable[[], bool]) -> Iterator[None]:
    """Forwards of this thread over a buffer that gives way ask at each layer whether to go on, and raise Interrupted
    where `give_up` says so.
    """
    _asked.give_up = give_up
    try:
        yield
    finally:
        _asked.give_up = None


class _Layer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__ is untyped
    """The face that a model sees of one layer; the tensors lie with the owner."""

    is_sliding = False

    def __init__(self, owner: _Buffer, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Not a cycle: the KV of a prompt must go when its reader is done, not when a collector comes by.
        self._owner = weakref.ref(owner)
        self.index = index
        self.is_initialized = True

    @property
    def owner(self) -> _Buffer:
        owner = self._owner()
        if owner is None:
            raise AssertionError("a layer is used while its buffer lives")
        return owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the room is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        owner = self.owner
        if owner.given is not None:
            key_states, value_states = owner.given[self.index]
        owner.go_on()
        return owner.write(self.index, key_states, value_states)

    def get_seq_length(self) -> int:
        return self.owner.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.seen + query_length, 0

    def get_max_length(self) -> int:
        return -1


class _Buffer(Cache):
    """`keys` and `values` by layer, each of shape (rows, heads, slots, head size)."""

    seen: int
    """Tokens before the step to come: what masks and positions go by."""
    given: list[tuple[torch.Tensor, torch.Tensor]] | None = None
    """By layer, K and V that the step to come writes and attends to in place of those the model computes."""
    gives_way = False
    """Whoever runs forwards over it is ready for Interrupted."""

    def __init__(self, shape: KVShape, rows: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(layers=[_Layer(self, i) for i in range(shape.layers)])
        self.rows, self.slots = rows, slots
        size = (rows, shape.heads, slots, shape.head_size)
        self.keys = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.layers)]
        self.values = [torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.layers)]

    def go_on(self) -> None:
        """To be called at each layer. Raises Interrupted where the forward gives way."""
        if self.gives_way:
            give_up: Callable[[], bool] | None = getattr(_asked, "give_up", None)
            if give_up is not None and give_up():
                raise Interrupted

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put new K and V (rows, heads, new tokens, head size) in place; returns all that is to be attended to."""
        raise NotImplementedError

    def _widen(self, rows: int, slots: int) -> None:
        for tensors in (self.keys, self.values):
            for i, old in enumerate(tensors):
                tensors[i] = old.new_zeros(rows, old.shape[1], slots, old.shape[3])
                tensors[i][: old.shape[0], :, : old.shape[2]] = old
        self.rows, self.slots = rows, slots


class Sequence(_Buffer):
    """The KV of one prompt while it is read, chunk by chunk."""

    def __init__(self, shape: KVShape, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, 1, slots, dtype, device)
        self.seen = 0

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.seen + keys.shape[2]
        self.keys[layer][:, :, self.seen : end] = keys
        self.values[layer][:, :, self.seen : end] = values
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def advance(self, tokens: int) -> None:
        """Count what the last forward wrote."""
        self.seen += tokens

    def put(self, kv: KVCache) -> None:
        """Append stored or fused KV as if it had been read here."""
        end = self.seen + len(kv)
        for mine, new in zip((*self.keys, *self.values), (*kv.keys, *kv.values), strict=True):
            mine[:, :, self.seen : end] = new
        self.seen = end

    def overwrite(self, start: int, kv: KVCache) -> None:
        """Put fused KV in the place of what was read from slot `start` on."""
        for mine, new in zip((*self.keys, *self.values), (*kv.keys, *kv.values), strict=True):
            mine[:, :, start : start + len(kv)] = new

    def kv(self, start: int = 0, stop: int | None = None) -> KVCache:
        """Views of tokens start..stop-1."""
        end = self.seen if stop is None else stop
        return KVCache([k[:, :, start:end] for k in self.keys], [v[:, :, start:end] for v in self.values])


class Rows(_Buffer):
    """The KV of a running batch: the first n rows are in use, each with its own length and position.

    A step appends one slot to each row in use. A row whose prompt had padding, which is not kept, has a position beyond
    its length.
    """

    def __init__(self, shape: KVShape, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(shape, rows, _ROUND, dtype, device)
        self.device = device
        self._row_heads = shape.heads
        self._most = 0
        """Slots that any row has been said to need at most: room grows in large steps, but not beyond."""
        self.lengths: list[int] = []
        self.positions: list[int] = []
        """Of the next token of each row."""
        self.seen = 0

    def join(self, kv: KVCache, position: int | None = None, most: int = _UNBOUNDED) -> int:
        """Copy a read prompt into the next free row; returns its number. The next token stands at `position`; None
        means right behind the KV. It will have at most `most` tokens.
        """
        row, tokens = len(self.lengths), len(kv)
        self._most = max(self._most, most)
        self._reserve(row + 1, tokens + 1)
        for mine, new in zip((*self.keys, *self.values), (*kv.keys, *kv.values), strict=True):
            mine[row, :, :tokens] = new[0]
        self.lengths.append(tokens)
        self.positions.append(tokens if position is None else position)
        return row

    def leave(self, row: int) -> None:
        """Free a row: the last row takes its place."""
        last = len(self.lengths) - 1
        length = self.lengths[last]
        if row != last:
            for tensor in (*self.keys, *self.values):
                tensor[row, :, :length] = tensor[last, :, :length]
            self.lengths[row] = length
            self.positions[row] = self.positions[last]
        self.lengths.pop()
        self.positions.pop()

    def kv(self, row: int, start: int, stop: int) -> KVCache:
        """Views of one row's tokens start..stop-1."""
        return KVCache(
            [k[row : row + 1, :, start:stop] for k in self.keys], [v[row : row + 1, :, start:stop] for v in self.values]
        )

    def prepare(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Positions (n, 1) and mask (n, 1, 1, longest + 1) of the step to come; no mask where no row is padded."""
        longest = max(self.lengths)
        self._reserve(len(self.lengths), longest + 1)
        self._at = torch.tensor(self.lengths, device=self.device)
        self._row = torch.arange(len(self.lengths), device=self.device)
        heads = torch.arange(self._row_heads, device=self.device)
        # Of the slot that each row and head is to write, in a layer seen as (rows · heads · slots, head size).
        self._slot = ((self._row[:, None] * self._row_heads + heads) * self.slots + self._at[:, None]).flatten()
        self.seen = longest
        mask = None
        if min(self.lengths) != longest:
            mask = (torch.arange(longest + 1, device=self.device)[None] <= self._at[:, None])[:, None, None]
        return torch.tensor(self.positions, device=self.device)[:, None], mask

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.put(layer, keys[:, :, 0], values[:, :, 0])
        return self.held(layer)

    def put(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the new slot of each row in use: (rows, heads, head size)."""
        for mine, new in ((self.keys[layer], keys), (self.values[layer], values)):
            mine.view(-1, mine.shape[3]).index_copy_(0, self._slot, new.reshape(-1, mine.shape[3]))

    def held(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V that the step to come attends to, of the rows in use up to the longest."""
        n, end = len(self.lengths), self.seen + 1
        return self.keys[layer][:n, :, :end], self.values[layer][:n, :, :end]

    def latest(self) -> KVCache:
        """(rows, heads, 1, head size): what the last forward wrote, before `advance`."""
        return KVCache(
            [k[self._row, :, self._at][:, :, None] for k in self.keys],
            [v[self._row, :, self._at][:, :, None] for v in self.values],
        )

    def advance(self) -> None:
        """Every row in use has grown by the slot that the last forward wrote."""
        self.lengths = [n + 1 for n in self.lengths]
        self.positions = [n + 1 for n in self.positions]

    def _reserve(self, rows: int, slots: int) -> None:
        if rows <= self.rows and slots <= self.slots:
            return
        wanted = max(slots, min(self.slots * 2, self._most)) if slots > self.slots else self.slots
        self._widen(max(rows, self.rows), -(-wanted // _ROUND) * _ROUND)
