"""Own rules as tenants bring them: one that is right, and some that are not."""

from __future__ import annotations

from policies.facts import DeploymentFacts, Facts


class Whim:
    """Refuses deployments by their number."""

    def __init__(self, divisor: int = 2) -> None:
        self._divisor = divisor

    def judge(self, facts: Facts, deployment: DeploymentFacts) -> str | None:
        return None if int(deployment.id[1:]) % self._divisor == 0 else "not today"


class Broken:
    def judge(self, facts: Facts, deployment: DeploymentFacts) -> str | None:
        raise ZeroDivisionError("secret prompt")


class Generous:
    """Tries to allow, which no rule can."""

    def judge(self, facts: Facts, deployment: DeploymentFacts) -> bool:
        return True


class Waiting:
    async def judge(self, facts: Facts, deployment: DeploymentFacts) -> str | None:
        return None


class Fussy:
    def __init__(self) -> None:
        raise RuntimeError("sk-secret")

    def judge(self, facts: Facts, deployment: DeploymentFacts) -> str | None:
        return None
