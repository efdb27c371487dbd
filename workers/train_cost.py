"""What a step of training takes, from sizes alone. Knows numbers; knows no model.

A frozen model costs 2 operations per parameter and token that it reads, and as many again backward to its activations;
a trained fuser 6. Embeddings cost nothing but where logits are made, over the answers. What the frozen models read of
the context is read once and kept. Beside operations, each step takes a time of its own for every layer, and the
optimiser walks over all parameters. `benchmarks/train_cost.py` holds all of this against trainings.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["c2c", "lite"]

LAYER_SECONDS: dict[Kind, float] = {"c2c": 0.016, "lite": 0.006}
"""By receiver layer and step, however short: launching small operations forward and backward."""
OPTIMISER = 500
"""As so many operations per parameter and step; it is memory that it waits for."""
REACHED = 0.6
"""Share of a large product's speed that a training reaches."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one model: parameters of its layers, numbers of its output embedding, layers."""

    body: int
    head: int
    layers: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of a step: of the context, of questions and answers behind it, and of the answers alone."""

    context: int = 250
    asked: int = 50
    answered: int = 25


@dataclass(frozen=True, slots=True)
class Cost:
    """Operations of a step: of frozen models over the context, the first time; of the rest, each time."""

    reading: int
    learning: int
    fixed_s: float

    def seconds(self, speed: float, *, kept: bool = False) -> float:
        """At `speed` operations a second; `kept`: the context's KV is there already."""
        return (self.learning + (0 if kept else self.reading)) / speed + self.fixed_s


def cost(kind: Kind, sharer: Sizes, receiver: Sizes, fuser: int, tokens: Tokens, *, own: bool) -> Cost:
    """`own`: the receiver reads the context too, and its KV is changed. `fuser`: parameters."""
    reading = 2 * tokens.context * (sharer.body + (receiver.body if own else 0))
    learning = 6 * fuser * tokens.context + 4 * receiver.body * tokens.asked + 4 * receiver.head * tokens.answered
    return Cost(reading, learning + OPTIMISER * fuser, LAYER_SECONDS[kind] * receiver.layers)


def speed_here(dtype: torch.dtype, device: str | None = None) -> float:
    """Operations a second that a training may reach on this machine, by a product of matrices; takes half a second.

    On a CPU the process's own time is looked at: what else the machine does is not its speed.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rows, width, wide = (256, 1024, 4096) if where.type == "cpu" else (4096, 4096, 4096)
    one, other = (torch.ones(shape, dtype=dtype, device=where) for shape in ((rows, width), (width, wide)))
    clock, at_once = (time.process_time, torch.get_num_threads()) if where.type == "cpu" else (time.perf_counter, 1)
    best = 0.0
    for _ in range(4):
        began, done = clock(), 0
        while clock() - began < 0.1 * at_once:
            float((one @ other)[0, 0])  # waits for the device
            done += 1
        best = max(best, done * 2.0 * rows * width * wide * at_once / (clock() - began))
    return REACHED * best
