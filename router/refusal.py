"""What a decision that no deployment survived tells the caller."""

from __future__ import annotations

from policies.facts import Decision, Verdict
from policies.rules import REASONS
from router.errors import BadRequest, Forbidden, RouterError, Unavailable
from router.transports.upstream_errors import CONTEXT_EXCEEDED

_COMES_BACK = frozenset({"stopped", "pair_unavailable", "pair_demoted", "pair_probation", "deployment_unavailable"})


def refusal(decision: Decision) -> RouterError | None:
    """The error of a decision that no deployment survived; None where one did.

    What may come back by itself is Unavailable, and then fallback groups may answer; what the request asks too much
    of is the caller's to mend; the rest is policy's last word.
    """
    if decision.ranked:
        return None
    if any(_only_absent(judged.verdicts) for judged in decision.judged):
        return Unavailable(_sentence(decision), code=decision.reason, headers={"retry-after": "5"})
    if decision.reason == "context_too_long":
        return BadRequest(_sentence(decision), code=CONTEXT_EXCEEDED, param="messages")
    if decision.reason == "needs_unsupported":
        return BadRequest(_sentence(decision), code=decision.reason)
    return Forbidden(_sentence(decision), code=decision.reason)


def _only_absent(verdicts: tuple[Verdict, ...]) -> bool:
    codes = {v.code for v in verdicts if not v.allowed}
    return bool(codes) and codes <= _COMES_BACK


def _sentence(decision: Decision) -> str:
    """The reason in words, then what each deployment's first refusal says."""
    parts = [REASONS.get(decision.reason, decision.reason)]
    for judged in decision.judged:
        first = next((v for v in judged.verdicts if not v.allowed), None)
        if first is not None and (first.detail or first.code != decision.reason):
            parts.append(f"{judged.deployment}: {first.code}{f' ({first.detail})' if first.detail else ''}.")
    return " ".join(parts)
