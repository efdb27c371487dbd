"""Recorded decisions made again: from the facts on record, under the policy that the record names by its digest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from policies.decide import decide, rule_names
from policies.facts import Facts
from policies.policy import Policy
from router import audit_verify, policy_files
from router.audit_keys import AuditError
from router.audit_lines import Record
from router.facts_record import NotReplayable, pack_decision, unpack_all


@dataclass(frozen=True, slots=True)
class Again:
    """One recorded request, decided again."""

    tenant: str
    id: str
    seq: int
    decisions: int
    """How many the record holds: of the group asked for, of fallback groups, of a relay's halves."""
    result: Literal["same", "differs", "unknown"]
    why: str = ""
    """What differs, or why it cannot be told."""


class Policies:
    """Policies of past digests, each read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, Policy] = {}

    def find(self, digest: str) -> Policy:
        """Raises AuditError."""
        if digest not in self._known:
            self._known[digest] = policy_files.find(self._root, digest)
        return self._known[digest]


def replay(root: Path, tenant: str, id: str | None = None) -> Iterator[Again]:
    """Every record of a tenant that holds a decision, or those of one request, oldest first. Raises AuditError."""
    policies = Policies(root)
    for record in audit_verify.records(root, tenant):
        if "decision" in record.body and id in (None, record.body.get("id")):
            yield _again(record, tenant, policies)


def _again(record: Record, tenant: str, policies: Policies) -> Again:
    body = record.body
    recorded = [body["decision"], *body.get("later", [])]
    known = (tenant, str(body.get("id", "")), record.seq, len(recorded))
    try:
        policy, facts = policies.find(str(body.get("policy", ""))), unpack_all(body.get("facts"))
    except (AuditError, NotReplayable) as error:
        return Again(*known, "unknown", str(error))
    if len(facts) != len(recorded):
        return Again(*known, "unknown", f"it holds {len(recorded)} decisions and the facts of {len(facts)}")
    for was, fact in zip(recorded, facts, strict=True):
        if difference := _difference(was, policy, fact):
            return Again(*known, "differs", difference)
    return Again(*known, "same")


def _difference(was: dict[str, Any], policy: Policy, facts: Facts) -> str:
    """Empty where the decision is the recorded one to the last verdict."""
    now: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode(pack_decision(decide(policy, facts), rule_names(policy)))
    )
    was, now = _told(was), _told(now)
    if was == now:
        return ""
    for key in ("ranked", "reason", "budget_missed"):
        if was.get(key) != now[key]:
            return f"{key} was {was.get(key)!r} and is {now[key]!r}"
    for old, new in zip(was.get("judged", []), now["judged"], strict=False):
        if old != new:
            return f"the verdicts on {new['deployment']} differ"
    return "the decisions differ"


def _told(decision: dict[str, Any]) -> dict[str, Any]:
    """With the verdicts that say something, as codes: earlier records hold every `ok` too, and name no rule."""
    judged = [
        {**entry, "verdicts": [(v["code"], v["allowed"], v["detail"]) for v in entry["verdicts"] if v["code"] != "ok"]}
        for entry in decision.get("judged", ())
    ]
    return {**decision, "judged": judged}
