"""Lane: what the router's response headers say of one answer, and the request headers that ask for one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Literal

Transport = Literal["auto", "text", "cache"]

TRANSPORT: Final = "x-twolane-transport"
BUDGET: Final = "x-twolane-latency-budget-ms"
SESSION: Final = "x-session-id"
DEPLOYMENT: Final = "x-twolane-deployment"

_MARK: Final = "_twolane"


class Keep(Enum):
    """Tells "not named" from None, which takes a setting away."""

    KEEP = "keep"


KEEP: Final = Keep.KEEP


@dataclass(frozen=True, slots=True)
class Lane:
    """Which lane answered, and why. KV counts are prompt tokens; None where the answer has no KV of ours."""

    decision: str
    transport: str
    deployment: str
    reason: str
    kv_reused: int | None = None
    kv_total: int | None = None


def lane_of(response: object) -> Lane:
    """The lane behind an answer, a stream (also before its first chunk), a raw response or an APIStatusError.

    Raises LookupError when the response has no decision: it came from somewhere else, or was refused before one.
    """
    lane = getattr(response, _MARK, None)
    if isinstance(lane, Lane):
        return lane
    found = _read(_headers(response))
    if found is None:
        raise LookupError(f"this {type(response).__name__} carries no decision of a TwoLane router")
    return found


def mark(answer: object, headers: Mapping[str, str]) -> None:
    """Tie the lane to a parsed answer, beside openai's own `_request_id`: not a field, so it is never dumped."""
    lane = _read(headers)
    if lane is not None and hasattr(answer, "model_fields_set"):
        setattr(answer, _MARK, lane)


def asked(
    transport: Transport | Keep | None,
    latency_budget_ms: float | Keep | None,
    session: str | Keep | None,
    deployment: str | Keep | None,
) -> dict[str, str | None]:
    """Request headers for what was named; None for one to take away. Raises ValueError for what no header can hold."""
    if transport not in (KEEP, None, "auto", "text", "cache"):
        raise ValueError(f"transport is auto, text or cache, not {transport!r}")
    if isinstance(latency_budget_ms, (int, float)) and not 0 < latency_budget_ms < float("inf"):
        raise ValueError("latency_budget_ms is a number of milliseconds above 0")
    named = {
        TRANSPORT: None if transport == "auto" else transport,
        BUDGET: f"{latency_budget_ms:.15g}" if isinstance(latency_budget_ms, (int, float)) else latency_budget_ms,
        SESSION: session,
        DEPLOYMENT: deployment,
    }
    for name, value in named.items():
        if isinstance(value, str) and not (value and value.isascii() and value.isprintable()):
            raise ValueError(f"{name} takes printable ASCII")
    return {name: value for name, value in named.items() if not isinstance(value, Keep)}


def _headers(response: Any) -> Mapping[str, str]:
    """Raw responses have headers; streams and errors have a response; openai's stream helpers keep it privately."""
    for holder in (response, getattr(response, "response", None), getattr(response, "_response", None)):
        headers = getattr(holder, "headers", None)
        if isinstance(headers, Mapping):
            return headers
    return {}


def _read(headers: Mapping[str, str]) -> Lane | None:
    decision = headers.get("x-twolane-decision")
    if decision is None:
        return None
    reused, slash, total = headers.get("x-twolane-kv", "").partition("/")
    counted = bool(slash) and reused.isdecimal() and total.isdecimal()
    return Lane(
        decision=decision,
        transport=headers.get("x-twolane-transport", ""),
        deployment=headers.get("x-twolane-deployment", ""),
        reason=headers.get("x-twolane-reason", ""),
        kv_reused=int(reused) if counted else None,
        kv_total=int(total) if counted else None,
    )
