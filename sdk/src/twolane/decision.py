"""Decision: what the router answers at `/decide` and `/decisions/{id}`. Reads what it knows and keeps the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Verdict:
    """One rule's answer about one deployment."""

    allowed: bool
    code: str
    detail: str = ""
    rule: str = ""
    means: str = ""
    """The code in words, where it is more than `ok`."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A deployment with every rule's verdict."""

    deployment: str
    transport: str
    verdicts: tuple[Verdict, ...]

    @property
    def allowed(self) -> bool:
        return all(v.allowed for v in self.verdicts)


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice and all verdicts. `chosen` is None when every deployment was refused."""

    id: str
    model: str
    chosen: str | None
    reason: str
    ranked: tuple[str, ...]
    judged: tuple[Judged, ...]
    budget_missed: bool = False
    body: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """All that the router answered: facts, estimates, and for a past decision what really happened."""

    @property
    def transport(self) -> str | None:
        """Lane of the chosen deployment."""
        return next((j.transport for j in self.judged if j.deployment == self.chosen), None)

    @classmethod
    def read(cls, body: object) -> Decision:
        """Raises ValueError when the body is not a decision."""
        if not isinstance(body, Mapping):
            raise ValueError("not a decision: the server did not answer a JSON object")
        try:
            ranked = tuple(str(name) for name in body["ranked"])
            return cls(
                id=str(body.get("id", "")),
                model=str(body["model"]),
                chosen=ranked[0] if ranked else None,
                reason=str(body["reason"]),
                ranked=ranked,
                judged=tuple(_judged(entry) for entry in body.get("judged", ())),
                budget_missed=bool(body.get("budget_missed", False)),
                body=body,
            )
        except (KeyError, TypeError) as missing:
            raise ValueError(f"not a decision: {missing}") from missing


def _judged(entry: Mapping[str, Any]) -> Judged:
    verdicts = tuple(_verdict(v) for v in entry["verdicts"])
    return Judged(str(entry["deployment"]), str(entry["transport"]), verdicts)


def _verdict(entry: Mapping[str, Any]) -> Verdict:
    words = (str(entry.get(name, "")) for name in ("detail", "rule", "means"))
    return Verdict(bool(entry["allowed"]), str(entry["code"]), *words)
