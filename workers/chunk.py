"""A stretch of one prompt that one model reads next, and the model's own way to read it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from workers.buffers import Sequence
from workers.loader import Loaded


@dataclass(slots=True, eq=False)
class Chunk:
    """Whoever reads it in the reader's place says so by `done`."""

    loaded: Loaded
    into: Sequence
    ids: tuple[int, ...]
    answers: bool
    """The logits behind it are wanted; else the model's last layer is not run."""
    positions: tuple[int, ...] | None = None
    """None: right behind what was read before."""
    mask: torch.Tensor | None = None
    """(1, all slots so far), 0 where one stands for nothing; None where all stand for something."""
    done: bool = False
    logits: torch.Tensor | None = None
    """(vocabulary,)"""
    seconds: float = 0.0
    """Its share of the forward."""

    @property
    def plain(self) -> bool:
        """It can be read in one forward with others'."""
        return self.positions is None and self.mask is None

    def compute(self) -> None:
        """Read it by the model's own forward. Raises Interrupted, and then nothing was read."""
        began, device, start = time.perf_counter(), self.loaded.device, self.into.seen
        positions = self.positions or range(start, start + len(self.ids))
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor([self.ids], device=device),
            "position_ids": torch.tensor([list(positions)], device=device),
            "cache": self.into,
            "use_cache": True,
        }
        if self.mask is not None:
            inputs["attention_mask"] = self.mask
        if self.answers:
            self.logits = self.loaded.model(**inputs, logits_to_keep=1).logits[0, -1]
        else:
            self.loaded.model.get_decoder()(**inputs)
        self.into.advance(len(self.ids))
        self.done = True
        self.seconds = time.perf_counter() - began
