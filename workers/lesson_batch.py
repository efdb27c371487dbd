"""Several lessons in one forward of the receiver: what each says alone, up to rounding, at a fraction of the time.

Lessons differ in length: shorter ones are padded behind what is shared, and padding is masked. Knows the `mix` network,
which maps every slot by itself, so that slots of many texts are mapped at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.cache import KVCache
from workers.fusers.base import Slots
from workers.fusers.mix import MixFuser
from workers.greedy import answer_logits

if TYPE_CHECKING:
    from transformers.cache_utils import DynamicCache

    from workers.c2c_run import Prompt
    from workers.loader import Loaded
    from workers.train import Lesson, Reads

_SLOTS = 32_768
"""Of one forward, padding included: what bounds its memory."""


class Remembered:
    """Reads that are not asked for twice while they fit into memory: small steps would wait for the disk otherwise."""

    def __init__(self, reads: Reads, most: int = 256 << 20) -> None:
        """`most`: bytes; those that were read first stay."""
        self._reads, self._room = reads, most
        self._held: dict[tuple[int, tuple[int, ...]], KVCache] = {}

    def read(self, loaded: Loaded, ids: Sequence[int]) -> KVCache:
        """As the reads within."""
        name = (id(loaded), tuple(ids))
        kv = self._held.get(name)
        if kv is None:
            kv = self._reads.read(loaded, ids)
            if kv.nbytes <= self._room:
                self._room -= kv.nbytes
                self._held[name] = kv
        return kv

    def read_sharer(self, loaded: Loaded, prompt: Prompt) -> DynamicCache:
        """As the reads within, each time."""
        return self._reads.read_sharer(loaded, prompt)


def grouped(lessons: Sequence[Lesson]) -> Iterator[list[Lesson]]:
    """In their order, as many at once as fit."""
    group: list[Lesson] = []
    rows = longest = 0
    for lesson in lessons:
        asks = [ask for batch in lesson.batches for ask in batch]
        length = len(lesson.context) + max(len(ask.rest) + len(ask.answer) for ask in asks)
        if group and (rows + len(asks)) * max(longest, length) > _SLOTS:
            yield group
            group, rows, longest = [], 0, 0
        group.append(lesson)
        rows, longest = rows + len(asks), max(longest, length)
    yield group


def summed_loss(
    receiver: Loaded,
    fuser: MixFuser,
    lessons: Sequence[Lesson],
    slots: Sequence[Slots],
    keep: Tensor | None = None,
) -> Tensor:
    """Cross-entropy of all answer tokens of the lessons, added up; `slots` are theirs, and `keep` that of all that they
    write. Differentiable in the fuser.
    """
    asks = [(i, ask) for i, lesson in enumerate(lessons) for batch in lesson.batches for ask in batch]
    kv, lengths = _rows(fuser, slots, [i for i, _ in asks], keep)
    rests, answers = [ask.rest for _, ask in asks], [ask.answer for _, ask in asks]
    logits = answer_logits(receiver, kv, rests, answers, seen=lengths)
    wanted = torch.tensor([token for answer in answers for token in answer], device=logits.device)
    return F.cross_entropy(logits.float(), wanted, reduction="sum")


def _rows(
    fuser: MixFuser, slots: Sequence[Slots], lessons: Sequence[int], keep: Tensor | None
) -> tuple[KVCache, list[int]]:
    """KV (rows, heads, longest, size) of each row's lesson as the receiver goes on from it, and the rows' lengths."""
    last = fuser.shape.last
    chosen = [one.last(last) if last else one for one in slots]
    keys, values = fuser.write(Slots.concat(chosen), keep)
    owns = [one.own for one in slots if last and one.own is not None]
    if owns:
        own = KVCache.concat(owns)
        keys, values = (
            [torch.cat(p, dim=2) for p in zip(a, b, strict=True)] for a, b in ((own.keys, keys), (own.values, values))
        )
    index = _places([len(one.at) for one in slots], [len(one.at) for one in chosen], beside=bool(owns))
    lengths = [len(slots[i].at) for i in lessons]
    table = torch.zeros(len(lessons), max(lengths), dtype=torch.long)
    for row, i in enumerate(lessons):
        table[row, : lengths[row]] = index[i]
    table = table.to(keys[0].device)
    return KVCache(*([t[0][:, table].transpose(0, 1) for t in kind] for kind in (keys, values))), lengths


def _places(lengths: Sequence[int], written: Sequence[int], *, beside: bool) -> list[Tensor]:
    """By lesson: where its slots lie; with `beside` the written ones lie behind all own ones, else there are no own."""
    found = []
    own, new = 0, sum(lengths) if beside else 0
    for length, count in zip(lengths, written, strict=True):
        kept = torch.arange(own, own + length - count)
        found.append(torch.cat((kept, torch.arange(new, new + count))))
        own, new = own + length, new + count
    return found
