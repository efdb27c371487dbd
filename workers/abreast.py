"""Forwards that do not need each other, side by side on one device: of a sharer and a receiver, or of several prompts.

On a CPU each runs on its share of the threads. What lies between a forward's products keeps only one core busy, so two
forwards on half of the cores each take less time than one after the other on all of them; of SmolLM2-135M in float32 on
two AVX2 cores, two prompts of 32, 120, 240 and 512 tokens 0.82, 0.84, 0.91 and 0.92 of it, bit for bit the same KV and
logits. On CUDA each has a stream, and the device decides how much of them it can run at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from workers.buffers import Interrupted, interruptible

Forward = Callable[[], None]


class Abreast:
    """To be used by one thread, the one that computes."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self.width = min(2, self._threads)
        """Forwards that a CPU runs at once: by more, each would have too few threads for its products."""
        self._pool: ThreadPoolExecutor | None = None
        self._streams: dict[torch.device, list[torch.cuda.Stream]] = {}

    def run(self, forwards: Sequence[Forward], device: torch.device) -> None:
        """All of them, when it returns. Raises Interrupted where one was given up; the others may have been run."""
        if device.type == "cuda" and len(forwards) > 1:
            self._on_streams(forwards, device)
            return
        for start in range(0, len(forwards), self.width):
            self._on_threads(forwards[start : start + self.width])

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def _on_threads(self, forwards: Sequence[Forward]) -> None:
        first, *others = forwards
        if not others:
            first()
            return
        share = max(1, self._threads // len(forwards))
        self._pool = self._pool or ThreadPoolExecutor(self.width - 1, "abreast", torch.set_num_threads, (share,))
        given_up = threading.Event()
        torch.set_num_threads(share)
        running = [self._pool.submit(_beside, forward, given_up) for forward in others]
        try:
            first()
        except Interrupted:
            given_up.set()
            raise
        finally:
            wait(running)
            torch.set_num_threads(self._threads)
        _results(running)

    def _on_streams(self, forwards: Sequence[Forward], device: torch.device) -> None:
        streams = self._streams.setdefault(device, [])
        while len(streams) < len(forwards):
            streams.append(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(device)
        try:
            for stream, forward in zip(streams, forwards, strict=False):
                # What it reads was written there; what it frees may be in use there until now.
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    forward()
        finally:
            for stream in streams:
                current.wait_stream(stream)


def _beside(forward: Forward, given_up: threading.Event) -> None:
    with torch.inference_mode(), interruptible(given_up.is_set):
        forward()


def _results(running: Sequence[Future[None]]) -> None:
    for future in running:
        future.result()
