"""Written: the base of everything that people write about a policy."""

from __future__ import annotations

from shapes import Shape


class Written(Shape, extra="forbid"):
    """Frozen, and unknown keys are refused: a misspelt rule must never be ignored."""
