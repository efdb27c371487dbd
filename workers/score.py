"""Score intervals of two shares over the same items, by counts alone. Knows no report.

What a bootstrap makes of a handful of items that only one side got right is too narrow, and of none at all nothing.
Score intervals hold their level there: a bound is the value that a test against it would just not reject.
"""

from __future__ import annotations

import math
from collections.abc import Callable

Z = 1.959964
"""Of 95 %, two-sided."""


def difference(ours: int, theirs: int, n: int) -> tuple[float, float]:
    """Of `n` items `ours` are right on our side only, `theirs` on theirs only: bounds of the difference of the two
    shares (Tango 1998).
    """

    def statistic(d: float) -> float:
        a, b, c = 2 * n, (2 * n - ours + theirs) * d - ours - theirs, -theirs * d * (1 - d)
        only_theirs = _larger_root(a, b, c)
        return _ratio(ours - theirs - n * d, n * (2 * only_theirs + d * (1 - d)))

    middle = (ours - theirs) / n
    return _falls_to(statistic, Z, -1.0, middle), _falls_to(statistic, -Z, middle, 1.0)


def ratio(both: int, ours: int, theirs: int) -> tuple[float, float]:
    """Bounds of our share over theirs, where `both` sides are right on so many items, and one alone on the others
    (Nam and Blackwelder 2002, in the form of Tang, Tang and Chan 2003). Theirs must be right somewhere.
    """
    hits, base, some = both + ours, both + theirs, both + ours + theirs

    def statistic(r: float) -> float:
        a, b, c = 1 + r, base * r * r - (both + ours + 2 * theirs), theirs * (1 - r) * some
        only_theirs = _larger_root(a, b, c)  # times the number of items, which falls out
        return _ratio(hits - base * r, (1 + r) * only_theirs + some * (r - 1))

    middle = hits / base
    high = max(2.0, 2 * middle)
    while statistic(high) > -Z:
        high *= 2
    return _falls_to(statistic, Z, 0.0, middle), _falls_to(statistic, -Z, middle, high)


def _larger_root(a: float, b: float, c: float) -> float:
    return (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)


def _ratio(above: float, variance: float) -> float:
    if variance > 0:
        return above / math.sqrt(variance)
    return 0.0 if above == 0 else math.copysign(math.inf, above)


def _falls_to(statistic: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Where it comes down to the level: by halves, far below what a report shows."""
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if statistic(middle) > level else (low, middle)
    return (low + high) / 2
