"""Muon in float32, for many small matrices on a CPU. `torch.optim.Muon` computes in bfloat16, one matrix at a time, and
takes twice as long there as the rest of a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_QUINTIC = (3.4445, -4.775, 2.0315)
_ROUNDS = 5


class Muon:
    """Momentum, made orthogonal. `rate` may be set before every step."""

    def __init__(self, matrices: Iterable[torch.nn.Parameter], rate: float, momentum: float = 0.95) -> None:
        self.rate, self.momentum = rate, momentum
        by_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for matrix in matrices:
            by_shape.setdefault(matrix.shape, []).append(matrix)
        self._groups = [(group, torch.zeros(len(group), *shape)) for shape, group in by_shape.items()]

    @torch.no_grad()
    def step(self) -> None:
        """Changes the matrices by their gradients, which all must have."""
        for group, past in self._groups:
            new = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            past.lerp_(new, 1 - self.momentum)
            ahead = orthogonal(new.lerp(past, self.momentum))
            rows, columns = past.shape[1:]
            scale = self.rate * max(1.0, rows / columns) ** 0.5
            for matrix, change in zip(group, ahead, strict=True):
                matrix.sub_(change, alpha=scale)


def orthogonal(matrices: Tensor) -> Tensor:
    """(n, rows, columns) -> about U·Vᵀ of each, by Newton and Schulz: all singular values near 1."""
    a, b, c = _QUINTIC
    flat = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if flat else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if flat else x
