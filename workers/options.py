"""Kinds of command-line numbers that click has none for."""

from __future__ import annotations

import math
from typing import Any

import click

SEED = click.IntRange(-(2**63), 2**63 - 1)
"""What random generators take."""


class Finite(click.FloatRange):
    """A number within bounds: click lets `nan` and `inf` through, which no comparison catches."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is no finite number", param, ctx)
        return found
