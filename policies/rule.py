"""Rule: a named judge of one deployment. What rules are made of; the rules themselves stand in `rules` and `own`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from policies.facts import DeploymentFacts, Facts, Verdict

if TYPE_CHECKING:
    from policies.terms import Terms

OK = Verdict(True, "ok")
"""The one verdict without a reason, told apart by identity."""

Judge = Callable[["Terms", Facts, DeploymentFacts], Verdict]
Idle = Callable[["Terms", Facts], bool]


class Rule(NamedTuple):
    """A named judge, and when it need not be asked because its answer is `ok` for every deployment."""

    name: str
    judge: Judge
    idle: Idle | None = None
    cache_only: bool = False
    """`ok` for every text-lane deployment."""
