"""Comparisons with vectors of the official code: what is allowed, and what came nearest to it. Knows tensors only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

RTOL, ATOL = 1e-4, 1e-5
BF16_ATOL = 2e-2
"""Between kernels that round in bfloat16 at different places."""
BF16_RTOL = 2**-6
"""Two units in the last place of a bfloat16, at most."""


@dataclass(frozen=True, slots=True)
class Case:
    """One vector: the error that comes nearest to what is allowed, or passes it, and what is allowed there."""

    name: str
    passed: bool
    error: float
    """Absolute difference; where things must be equal, how many are not."""
    tolerance: float
    detail: str = ""
    """Which tensor is out, or why the case could not be run."""


@dataclass(slots=True)
class Checks:
    """Comparisons of one case; keeps the worst."""

    worst: float = -1.0
    error: float = 0.0
    tolerance: float = 0.0
    detail: str = ""

    def close(self, name: str, got: Tensor, want: Tensor, rtol: float = RTOL, atol: float = ATOL) -> None:
        if got.shape != want.shape:
            self._note(name, float("inf"), 0.0, float("inf"), f"shape {tuple(got.shape)}, not {tuple(want.shape)}")
            return
        got, want = got.detach().double().flatten(), want.detach().double().flatten()
        if not want.numel():
            return
        # What is no number, here or in the vector, compares with nothing; two equal infinities are equal.
        error = torch.where(got == want, 0.0, (got - want).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
        allowed = (atol + rtol * want.abs()).nan_to_num(nan=0.0, posinf=0.0)
        share = torch.where(error == 0.0, 0.0, error / allowed)
        at = int(share.argmax())
        self._note(name, float(error[at]), float(allowed[at]), float(share[at]))

    def same(self, name: str, got: Any, want: Any) -> None:
        if isinstance(got, (list, tuple)) and isinstance(want, (list, tuple)) and len(got) == len(want):
            wrong = sum(a != b for a, b in zip(got, want, strict=True))
        else:
            wrong = int(got != want)
        self._note(name, float(wrong), 0.0, float("inf") if wrong else 0.0)

    def _note(self, name: str, error: float, tolerance: float, share: float, why: str = "") -> None:
        # Among equals a tolerance that is not zero says more.
        if (share, tolerance) > (self.worst, self.tolerance):
            self.worst, self.error, self.tolerance = share, error, tolerance
            self.detail = (f"{name}: {why}" if why else name) if share > 1 else ""

    def case(self, name: str) -> Case:
        if self.worst < 0:
            return Case(name, False, float("inf"), 0.0, "nothing to compare with")
        return Case(name, self.worst <= 1, self.error, self.tolerance, self.detail)


@dataclass(slots=True)
class Cases:
    """All cases of a folder, in the order they were run."""

    found: list[Case] = field(default_factory=list)

    @contextmanager
    def case(self, name: str) -> Iterator[Checks]:
        """A case that breaks while it runs has failed; the others still run."""
        checks = Checks()
        try:
            yield checks
        except Exception as e:  # whatever a vector of another making breaks on, it is that case's reason
            self.found.append(Case(name, False, float("inf"), 0.0, _line(f"{type(e).__name__}: {e}")))
        else:
            self.found.append(checks.case(name))

    def broken(self, name: str, why: str) -> None:
        """A case that could not be run."""
        self.found.append(Case(name, False, float("inf"), 0.0, _line(why)))


def _line(text: str) -> str:
    """A library's message may have many."""
    return " ".join(text.split())
