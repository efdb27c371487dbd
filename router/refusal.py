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
        return Unavailable(_sentence(decision, decision.reason), code=decision.reason, headers={"retry-after": "5"})
    reason = decision.reason
    if reason in _COMES_BACK:  # and would be refused then as well: that is what the caller must hear
        reason = next((v.code for judged in decision.judged if (v := _refused(judged.verdicts))), reason)
    said = _sentence(decision, reason)
    if reason == "context_too_long":
        return BadRequest(said, code=CONTEXT_EXCEEDED, param="messages")
    if reason == "needs_unsupported":
        return BadRequest(said, code=reason)
    return Forbidden(said, code=reason)


def _only_absent(verdicts: tuple[Verdict, ...]) -> bool:
    codes = {v.code for v in verdicts if not v.allowed}
    return bool(codes) and codes <= _COMES_BACK


def _refused(verdicts: tuple[Verdict, ...]) -> Verdict | None:
    """The first refusal that lasts, else the first; None where there is none."""
    refused = [v for v in verdicts if not v.allowed]
    return next((v for v in refused if v.code not in _COMES_BACK), refused[0] if refused else None)


def _sentence(decision: Decision, reason: str) -> str:
    """The reason in words, then what each deployment's refusal says."""
    parts = [REASONS.get(reason, reason)]
    for judged in decision.judged:
        told = _refused(judged.verdicts)
        if told is not None and (told.detail or told.code != reason):
            parts.append(f"{judged.deployment}: {told.code}{f' ({told.detail})' if told.detail else ''}.")
    return " ".join(parts)
