"""Processes that learn one fuser together, through `accelerate`: each takes a share of every batch, on a GPU of its own
or all on the CPU. Knows processes and tensors; knows no model, and imports accelerate only where there are several.

Processes find each other by the environment (RANK, WORLD_SIZE, ...), as `accelerate launch` and torchrun set it, and as
`start` does on one machine. Only tensors go between them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from workers.errors import LoadFailed

T = TypeVar("T")

_BUCKET = 1 << 24
"""Numbers that are added up in one message."""


class Elsewhere(LoadFailed):
    """Another process has failed, and says why."""


@dataclass(frozen=True, slots=True)
class Team:
    """This process among all. Every method is called by all of them, in the same order."""

    rank: int = 0
    size: int = 1
    device: torch.device | None = None
    """Where this process computes; None leaves it to the caller."""

    def share(self, things: Sequence[T]) -> Sequence[T]:
        """Those that are this process's to do."""
        return things[self.rank :: self.size]

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Each becomes its sum over all processes."""
        if self.size > 1:
            from accelerate.utils import reduce

            for tensor in tensors:
                tensor.copy_(reduce(tensor, reduction="sum"))

    def add_gradients(self, parameters: Sequence[Tensor]) -> None:
        """As `add`, in float32. What has a gradient in no process keeps none."""
        if self.size == 1:
            return
        has = torch.tensor([float(p.grad is not None) for p in parameters], device=self.device)
        self.add([has])
        bucket: list[Tensor] = []
        for parameter, count in zip(parameters, has.tolist(), strict=True):
            if count:
                bucket.append(parameter)
            if sum(p.numel() for p in bucket) >= _BUCKET:
                self._add_bucket(bucket)
                bucket = []
        self._add_bucket(bucket)

    def _add_bucket(self, parameters: Sequence[Tensor]) -> None:
        if not parameters:
            return
        flat = torch.cat(
            [(p.grad if p.grad is not None else torch.zeros_like(p)).float().flatten() for p in parameters]
        )
        self.add([flat])
        for parameter, part in zip(parameters, torch.split(flat, [p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)

    def follow(self, tensors: Sequence[Tensor]) -> None:
        """Take the first process's values."""
        if self.size > 1:
            from accelerate.utils import broadcast

            for tensor in tensors:
                tensor.copy_(broadcast(tensor.clone()))

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """A LoadFailed in one process ends it in all: the first that has one raises it, the others raise Elsewhere."""
        failed: LoadFailed | None = None
        try:
            yield
        except LoadFailed as error:
            failed = error
        if self.size == 1:
            if failed is not None:
                raise failed
            return
        all_failed = torch.zeros(self.size, device=self.device)
        all_failed[self.rank] = float(failed is not None)
        self.add([all_failed])
        if all_failed.any():
            first = int(all_failed.argmax())
            raise failed if failed is not None and first == self.rank else Elsewhere(f"process {first} failed")

    def leave(self) -> None:
        """Once nothing more is to be done together."""
        if self.size > 1:
            torch.distributed.destroy_process_group()


ALONE = Team()


def join(device: str) -> Team:
    """The processes that the environment names; one alone where it names none. `device` is auto, cpu or cuda.

    Raises LoadFailed: a device for one process alone, or fewer GPUs than processes.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return ALONE
    if device not in ("auto", "cpu", "cuda"):
        told = LoadFailed if os.environ.get("RANK", "0") == "0" else Elsewhere
        raise told(f"several processes take a GPU each, or the CPU: device auto, cuda or cpu, not {device}")
    here, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    cpu = device == "cpu" or (device == "auto" and not count)
    if not cpu and here >= count:
        raise LoadFailed(f"{count} GPUs are here, and process {here + 1} needs one of its own; use --device cpu?")
    from accelerate import PartialState

    state = PartialState(cpu=cpu)
    return Team(state.process_index, state.num_processes, torch.device("cpu") if cpu else state.device)


def start(count: int, work: Callable[..., int], *arguments: object, method: str = "spawn") -> int:
    """Run `work(*arguments)` in `count` new processes of this machine; the exit status of the first that fails.

    When one ends badly, the others are ended. `method`: as in `multiprocessing`; `fork` only where nothing has touched
    a GPU yet.
    """
    from torch.multiprocessing.spawn import ProcessExitedException, start_processes

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = start_processes(  # type: ignore[no-untyped-call]
        _begin, (count, port, work, arguments), count, join=False, start_method=method
    )
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # it tells whom it ends
    try:
        while not group.join():
            pass
    except ProcessExitedException as error:
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    except KeyboardInterrupt:
        for process in group.processes:
            process.join()
        return 130
    return 0


def _begin(rank: int, count: int, port: int, work: Callable[..., int], arguments: tuple[object, ...]) -> None:
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in named.items()} | {"MASTER_ADDR": "127.0.0.1"}
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo asks what the host's name resolves to
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        status = work(*arguments)
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
