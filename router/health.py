"""Health of deployments as this router saw it: failures in a row, and rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from router.deployments import Deployment
from router.errors import Refused, TransportError
from router.places import FULL
from router.retries import kind_of

_LONGEST_REST = 60.0
_BLAMELESS = frozenset({"overloaded", FULL, "stopped", "pair_demoted"})
"""A full queue or limit is no fault, whoever comes later may find room; nor is what we ourselves hold back."""


class Health:
    """Counts per deployment id; their number is bounded by the config."""

    def __init__(
        self,
        groups: Mapping[str, Iterable[Deployment]],
        *,
        allowed_fails: int,
        cooldown_time: float,
        by_kind: Mapping[str, int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        announce: Callable[[str, float], None] | None = None,
    ) -> None:
        """`cooldown_time` in seconds, 0 never rests anyone. The only deployment of its group never rests.

        `by_kind` are LiteLLM's kinds of error that have a number of their own, counted apart from the rest. `announce`
        is called when a rest begins, with its seconds.
        """
        self._allowed = max(1, allowed_fails)
        self._rest = cooldown_time
        self._clock = clock
        self._by_kind = by_kind or {}
        self._announce = announce
        self._fails: dict[str, dict[str, int]] = {}
        """Failures in a row by kind; kinds without a number of their own are counted as one."""
        self._until: dict[str, float] = {}
        self._alone = {members[0].id for group in groups.values() if len(members := tuple(group)) == 1}

    def cooling(self, deployment: str) -> bool:
        """It rests now."""
        until = self._until.get(deployment)
        return until is not None and self._clock() < until

    def succeeded(self, deployment: str) -> None:
        """Failures in a row are forgotten."""
        self._fails.pop(deployment, None)
        self._until.pop(deployment, None)

    def failed(self, deployment: str, error: TransportError) -> bool:
        """Count a failure; True when it begins a rest. A refusal of the caller's own mistake counts for nothing."""
        if not blames(error) or self._rest <= 0:
            return False
        kind = kind_of(error) if self._by_kind else ""
        allowed = self._by_kind.get(kind)
        if allowed is None:
            kind, allowed = "", self._allowed
        counted = self._fails.setdefault(deployment, {})
        counted[kind] = counted.get(kind, 0) + 1
        if deployment in self._alone:
            return False
        if error.status == 429 and (told := wait_told(error)) is not None:
            seconds = min(told, _LONGEST_REST)
        elif counted[kind] < max(1, allowed):
            return False
        else:
            seconds = self._rest
        self.rest(deployment, seconds)
        if self._announce is not None:
            self._announce(deployment, seconds)
        return True

    def rest(self, deployment: str, seconds: float) -> None:
        """It rests from now on, whoever saw it fail."""
        self._until[deployment] = self._clock() + seconds


def blames(error: TransportError) -> bool:
    """Whether a failure is the deployment's own."""
    return not (isinstance(error, Refused) or error.status == 400 or error.code in _BLAMELESS)


def wait_told(error: TransportError) -> float | None:
    """Seconds of the upstream's Retry-After; None where there is none, or a date."""
    value = error.headers.get("retry-after", "")
    try:
        return max(0.0, float(value))
    except ValueError:
        return None
