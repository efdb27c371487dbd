"""What a model or a pair will take once it serves: estimated from headers and configs before anything is loaded.

Counted are weights, the second copy that packing makes of a decoder's matrices, the fuser, the room that running
answers can grow into, and the KV of one prompt while it is read. Not counted are further prompts that are half read,
one at most for each other tenant, activations, a few MB per chunk, and what the store keeps, which has its own bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from workers import pairs
from workers.config import ModelConfig, WorkerConfig
from workers.errors import LoadFailed
from workers.fusers.base import KVShape
from workers.fusers.projector import C2CProjector, ProjectorShape
from workers.loader import DTYPES, kv_shape, locate, read_config, refuse_unsupported, tensor_shapes, weight_bytes

Parts = dict[tuple[str, ...], int]
"""Bytes by what needs them: a part that two pairs share has one name, and counts once."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that stay, by part, and bytes of one prompt while it is read."""

    parts: Parts
    reading: int

    def told(self) -> str:
        """The figures by kind, largest first."""
        kinds: dict[str, int] = {}
        for (kind, *_), size in self.parts.items():
            kinds[kind] = kinds.get(kind, 0) + size
        kinds["KV of a prompt that is read"] = self.reading
        return ", ".join(f"{gib(size)} {kind}" for kind, size in sorted(kinds.items(), key=lambda e: -e[1]) if size)


class Budget:
    """Bytes promised under a limit; None promises everything."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._parts: Parts = {}
        self._reading = 0

    @property
    def promised(self) -> int:
        return sum(self._parts.values()) + self._reading

    def promise(self, what: str, needs: Needs) -> None:
        """Raises LoadFailed with the figures when it does not fit beside what was promised before.

        A promise stays when loading fails after it: models that were loaded by then stay loaded.
        """
        parts, reading = self._parts | needs.parts, max(self._reading, needs.reading)
        total = sum(parts.values()) + reading
        if self.limit is not None and total > self.limit:
            raise LoadFailed(
                f"{what} would bring this worker to {gib(total)} of {gib(self.limit)} GiB of memory: it needs "
                f"{needs.told()}; {gib(self.promised)} are promised already. A smaller max_context or max_running "
                "needs less"
            )
        self._parts, self._reading = parts, reading


def gib(size: int) -> str:
    """A figure in GiB."""
    return f"{size / 2**30:.2f}"


@dataclass(frozen=True, slots=True)
class Sized:
    """One model's figures, from its config and its weights' headers."""

    name: tuple[str, ...]
    shape: KVShape
    context: int
    weights: int
    matrices: int
    """Bytes of the layers that packing copies."""
    token: int
    """Bytes of K and V per token."""
    layers: str = "all"
    """Those kept: each selection decodes in a batch of its own."""

    @property
    def kept(self) -> Parts:
        return {("weights", *self.name): self.weights}

    def serving(self, worker: WorkerConfig, *, cpu: bool, context: int) -> Parts:
        """As the model that answers."""
        packs = worker.pack and cpu and self.name[1] == "float32"
        return {
            **self.kept,
            ("packed layers", *self.name): self.matrices if packs else 0,
            ("KV of running answers", *self.name, self.layers): worker.places * context * self.token,
        }


def size_of(config: ModelConfig) -> Sized:
    """Raises LoadFailed. Fetches or converts a model that is not here yet."""
    folder = locate(config)
    hf = read_config(folder, config.model)
    refuse_unsupported(hf, config.model)
    text = hf.get_text_config()
    shape = kv_shape(text)
    if config.layers is not None:
        shape = replace(shape, layers=len(config.layers))
    return Sized(
        name=(str(folder), config.dtype),
        shape=shape,
        context=int(text.max_position_embeddings),
        weights=weight_bytes(folder, config.dtype),
        matrices=matrix_bytes(folder, config.dtype),
        token=kv_bytes(shape, config.dtype),
        layers="all" if config.layers is None else ",".join(map(str, config.layers)),
    )


def kv_bytes(shape: KVShape, dtype: str) -> int:
    """K and V of one token in all layers."""
    return 2 * shape.layers * shape.heads * shape.head_size * DTYPES[dtype].itemsize


def matrix_bytes(folder: Path, dtype: str) -> int:
    """Of all linear layers; a tied embedding is also the last layer."""
    size = DTYPES[dtype].itemsize
    found = {name: math.prod(shape) * size for name, shape in tensor_shapes(folder) if len(shape) == 2}
    tied = not any(name.endswith("lm_head.weight") for name in found)
    return sum(size for name, size in found.items() if tied or "embed" not in name)


def model_needs(model: Sized, worker: WorkerConfig, *, cpu: bool) -> Needs:
    """Of a model that answers alone, or of an identity pair."""
    context = bounded(model.context, worker)
    return Needs(model.serving(worker, cpu=cpu, context=context), context * model.token)


def pair_needs(
    sharers: Sequence[Sized],
    receiver: Sized,
    fuser: Parts,
    worker: WorkerConfig,
    *,
    cpu: bool,
    own: bool,
    response: bool = False,
) -> Needs:
    """`own`: the receiver reads the shared part itself, and its KV stands beside the fused. `response`: so it does
    beside the answer too, and the first sharer's as well.
    """
    context = bounded(min(model.context for model in (*sharers, receiver)), worker)
    parts = receiver.serving(worker, cpu=cpu, context=context) | fuser
    for sharer in sharers:
        parts = sharer.kept | parts
    if response:
        beside = worker.places * context
        for role, model in (("sharer", sharers[0]), ("receiver", receiver)):
            parts["KV beside running answers", role, *model.name, model.layers] = beside * model.token
    read = sum(sharer.token for sharer in sharers) + receiver.token * (2 if own else 1)
    return Needs(parts, context * read)


def bounded(context: int, worker: WorkerConfig) -> int:
    """Tokens a request may have."""
    return context if worker.max_context is None else min(context, worker.max_context)


def fuser_part(folder: Path, kind: str, dtype: str) -> Parts:
    """Once loaded. Ours computes in float32, the official one in the receiver's dtype. Raises LoadFailed."""
    if kind == "c2c":
        size = official_parameters(folder) * DTYPES[dtype].itemsize
    else:
        size = pairs.read_pair(folder).fuser.parameters * torch.float32.itemsize
    return {("fuser", str(folder), dtype): size}


def official_parameters(folder: Path) -> int:
    """Of a checkpoint in the official layout, from its `projector_{i}.json`."""
    from workers.fusers.c2c import projector_shape

    weights = folder / "final" if (folder / "final").is_dir() else folder
    return sum(projector_parameters(projector_shape(file)) for file in _projectors(weights))


def _projectors(weights: Path) -> Iterator[Path]:
    return (f for f in sorted(weights.glob("projector_*.json")) if f.name != "projector_config.json")


@cache
def projector_parameters(shape: ProjectorShape) -> int:
    """Of the official network for one layer."""
    with torch.device("meta"):
        return sum(p.numel() for p in C2CProjector(shape).parameters())
