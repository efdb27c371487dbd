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


class Rule(NamedTuple):
    """A named judge, and when it need not be asked because its answer is `ok` for every deployment."""

    name: str
    judge: Judge
    unwritten: Callable[[Terms], bool] | None = None
    """The policy says nothing that the rule looks at: known once, when the policy is read."""
    idle: Callable[[Terms, Facts], bool] | None = None
    """The request gives it nothing to look at. Of the facts it reads only those that `policies.rules.plain` reads."""
    cache_only: bool = False
    """`ok` for every text-lane deployment."""
    alike: bool = False
    """It looks at the request alone: the same verdict on every deployment."""
    unwell_only: bool = False
    """`ok` for every deployment that is available, bounds no context and does not rest."""
