"""Own rules: judges that a tenant brings along. They run after the built-in ones and can only refuse."""

from __future__ import annotations

from typing import ClassVar, Protocol

from policies.facts import DeploymentFacts, Facts, Verdict
from policies.hooks import Hook
from policies.rule import OK, Rule
from policies.terms import Terms

_LONGEST = 300
"""Characters of a refusal's sentence that are kept."""


class OwnJudge(Protocol):
    """What the class behind `use` offers. It must be pure: the same facts, the same answer, and no waiting."""

    def judge(self, facts: Facts, deployment: DeploymentFacts) -> str | None:
        """None has nothing against the deployment; a sentence says why it is refused. Raising refuses too."""


class OwnRule(Hook):
    """One entry of `rules`."""

    verb: ClassVar[str] = "judge"

    @property
    def rule(self) -> Rule:
        """The same as the built-in ones are written."""
        own: OwnJudge = self._made

        def judge(terms: Terms, facts: Facts, deployment: DeploymentFacts) -> Verdict:
            said = own.judge(facts, deployment)
            if said is None:
                return OK
            if not isinstance(said, str):
                raise TypeError("an own rule answers None or a sentence")
            return Verdict(False, "own_rule", said[:_LONGEST])

        return Rule(self.use, judge)
