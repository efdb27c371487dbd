"""A device whose time is stated, not measured: the real engine and a real model, on a clock that only forwards move.

Every forward of one model takes `forward_s + token_s · tokens` seconds, spread evenly over its layers, and half of a
forward that is given up half way. Nothing else takes time. What is due meanwhile happens between two layers, so the
same arrivals give the same schedule on any machine, however busy.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from workers.engine import Engine
from workers.loader import Loaded

_STILL = 10_000


class VirtualDevice:
    """`now` in seconds, and what happens at stated times."""

    def __init__(self, forward_s: float, token_s: float) -> None:
        self.forward_s, self.token_s = forward_s, token_s
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def clock(self) -> float:
        """What the engine goes by."""
        return self.now

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Call `what` when the clock has come to `when`, in the order of being told where times are equal."""
        self._count += 1
        heapq.heappush(self._due, (when, self._count, what))

    def work(self, seconds: float) -> None:
        """Let time pass, and what is due in it happen."""
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            when, _, what = heapq.heappop(self._due)
            self.now = max(self.now, when)
            what()
        self.now = max(self.now, end)

    @contextmanager
    def timing(self, *models: Loaded) -> Iterator[None]:
        """Forwards of these models move the clock meanwhile."""
        with ExitStack() as hooks:
            for loaded in models:
                layers = loaded.model.get_decoder().layers
                for layer in layers:
                    hooks.enter_context(layer.register_forward_pre_hook(self._hook(len(layers))))
            yield

    def _hook(self, layers: int) -> Callable[[Any, tuple[Any, ...]], None]:
        def took(_layer: Any, args: tuple[Any, ...]) -> None:
            rows, tokens = args[0].shape[:2]
            self.work((self.forward_s + self.token_s * rows * tokens) / layers)

        return took

    def run(self, engine: Engine, until: Callable[[], bool]) -> None:
        """Turn the engine, and skip the time in which it has nothing to do."""
        still = 0
        with torch.inference_mode():
            while not until():
                before = self.now
                if sum(engine.load()):
                    engine.turn()
                elif self._due:
                    self.work(self._due[0][0] - self.now)
                else:
                    raise AssertionError("nothing runs and nothing is due")
                still = still + 1 if self.now == before else 0
                if still > _STILL:
                    raise AssertionError("the engine turns and no time passes")
