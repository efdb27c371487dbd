"""Muon: momentum made orthogonal, for matrices. Many of one shape are done at once, in float32.

`torch.optim.Muon` takes one matrix after the other, in bfloat16: on a CPU that takes longer than the rest of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_QUINTIC = (3.4445, -4.775, 2.0315)
_ROUNDS = 5


class Muon(torch.optim.Optimizer):
    """Of parameters with two dimensions; the rate is that of the original, scaled by √(rows / columns) above 1."""

    def __init__(
        self, matrices: Iterable[torch.nn.Parameter], lr: float, *, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        if any(p.ndim != 2 for group in self.param_groups for p in group["params"]):
            raise ValueError("Muon is for matrices")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Parameters without a gradient stay as they are."""
        if closure is not None:
            raise ValueError("Muon looks at gradients that are there already")
        for group in self.param_groups:
            alike: dict[torch.Size, list[torch.nn.Parameter]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    alike.setdefault(matrix.shape, []).append(matrix)
            for matrices in alike.values():
                self._change(matrices, group)

    def _change(self, matrices: list[torch.nn.Parameter], group: dict[str, Any]) -> None:
        momentum = group["momentum"]
        ahead = []
        for matrix in matrices:
            state, new = self.state[matrix], matrix.grad
            if new is None:
                continue
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(matrix)
            past: Tensor = state["momentum"]
            past.lerp_(new, 1 - momentum)
            ahead.append(torch.lerp(new, past, momentum))
        rows, columns = matrices[0].shape
        rate = group["lr"] * max(1.0, rows / columns) ** 0.5
        for matrix, change in zip(matrices, orthogonal(torch.stack(ahead).float()), strict=True):
            matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change.to(matrix.dtype), alpha=rate)


def orthogonal(matrices: Tensor) -> Tensor:
    """(n, rows, columns) -> about U·Vᵀ of each, by Newton and Schulz: all singular values near 1."""
    a, b, c = _QUINTIC
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    found: Tensor = x.mT if tall else x
    return found
