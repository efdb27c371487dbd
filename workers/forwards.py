"""How chunks of prompts are read: several of one model in one forward, and abreast what need not wait for others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property, partial

from workers.abreast import Abreast, Forward
from workers.chunk import Chunk
from workers.loader import Loaded
from workers.packed import Packer
from workers.plain import PlainDecoder, plain_decoder

_SPLIT = 128
"""Tokens from which prompts of one model are read in several forwards abreast. Measured on two cores, SmolLM2-135M: 4
prompts of 120 tokens take 0.94 of the time of one forward over all of them, 16 of 32 0.94, 2 of 16 tokens 1.2."""


class Forwards:
    """Of one engine, used by its thread alone."""

    def __init__(self, *, pack: bool) -> None:
        """`pack`: models that are held are packed where that is faster."""
        self._packer = Packer() if pack else None
        self._plain: dict[int, PlainDecoder | None] = {}
        """By model that is held."""

    @cached_property
    def _abreast(self) -> Abreast:
        """Made by the thread that computes, once that has its threads."""
        return Abreast()

    def hold(self, loaded: Loaded) -> PlainDecoder | None:
        """Make it ready to be computed often. Returns what makes its steps where that can."""
        key = id(loaded.model)
        if self._packer is not None and key not in self._plain:
            self._packer.pack(loaded.model)
            self._plain[key] = plain_decoder(loaded)
        return self._plain.get(key)

    def close(self) -> None:
        self._abreast.close()

    def joint(self, chunks: Sequence[Chunk]) -> PlainDecoder | None:
        """What can read a single chunk in one forward with other prompts'; None where nothing can, or for several."""
        if len(chunks) != 1 or not chunks[0].plain:
            return None
        return self._plain.get(id(chunks[0].loaded.model))

    def read(self, chunks: Sequence[Chunk]) -> float:
        """Read all that are not done. Returns the seconds it took; each chunk has its share. Raises Interrupted, and
        then some may be done.
        """
        began = time.perf_counter()
        groups = self._groups([chunk for chunk in chunks if not chunk.done])
        forwards = [_Timed(self._forward(group)) for group in groups]
        self._abreast.run(forwards, chunks[0].loaded.device)
        took, busy = time.perf_counter() - began, sum(forward.seconds for forward in forwards)
        for group, forward in zip(groups, forwards, strict=True):
            tokens = sum(len(chunk.ids) for chunk in group)
            for chunk in group:
                chunk.seconds = took * forward.seconds / busy * len(chunk.ids) / tokens
        return took

    def _groups(self, chunks: Sequence[Chunk]) -> list[list[Chunk]]:
        """Those of one forward each."""
        if any(self.joint([chunk]) is None for chunk in chunks) or len({id(c.loaded.model) for c in chunks}) > 1:
            return [[chunk] for chunk in chunks]
        if sum(len(chunk.ids) for chunk in chunks) < _SPLIT:
            return [list(chunks)]
        groups: list[list[Chunk]] = [[] for _ in range(self._abreast.width)]
        for chunk in sorted(chunks, key=lambda c: len(c.ids), reverse=True):
            min(groups, key=lambda group: sum(len(c.ids) for c in group)).append(chunk)
        return [group for group in groups if group]

    def _forward(self, group: Sequence[Chunk]) -> Forward:
        decoder = self.joint(group[:1])
        return group[0].compute if decoder is None else partial(decoder.read, group)


class _Timed:
    """A forward, and the seconds it took."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.seconds = 0.0

    def __call__(self) -> None:
        began = time.perf_counter()
        self._forward()
        self.seconds = time.perf_counter() - began
