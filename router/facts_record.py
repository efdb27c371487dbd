"""Facts and decisions as a record holds them: what says something, so that a decision can be made again years later.

They hold no content: numbers, names from the configuration, and labels that policy reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from policies.facts import Decision, Facts, Transport
from policies.rule import OK

VERSION = 1
"""Of the shape. A member more, with a default, is no new version; a change of meaning is."""


Made = list[tuple[Facts, Decision]]
"""Decisions of one request, in order, each with what it was made from."""
Packed = list[tuple[msgspec.Raw, msgspec.Raw]]
"""The same as JSON: `Facts` and `DecisionRecord`."""


class NotReplayable(Exception):
    """The facts of a record cannot be read. The message says why."""


_facts = msgspec.json.Encoder(order="deterministic")


def pack(facts: Facts) -> msgspec.Raw:
    """As JSON: what has its default is left out."""
    return msgspec.Raw(_facts.encode(facts))


def pack_all(packed: Packed) -> msgspec.Raw:
    """The facts of one request's decisions, in their order, as a record holds them."""
    found = packed[0][0] if len(packed) == 1 else b",".join([facts for facts, _ in packed])
    return msgspec.Raw(b'{"of":[%b],"v":%d}' % (found, VERSION))


def unpack_all(record: object) -> list[Facts]:
    """Raises NotReplayable."""
    if not isinstance(record, dict) or not isinstance(record.get("of"), list):
        raise NotReplayable("the record holds no facts")
    if record.get("v") != VERSION:
        raise NotReplayable(f"its facts are of version {record.get('v')!r}, and this program reads {VERSION}")
    try:
        return [msgspec.convert(facts, Facts) for facts in record["of"]]
    except msgspec.ValidationError as error:
        raise NotReplayable(f"its facts cannot be read: {error}") from error


class Said(msgspec.Struct, frozen=True, gc=False):
    """What one rule said of a deployment."""

    rule: str
    allowed: bool
    code: str
    detail: str


class JudgedRecord(msgspec.Struct, frozen=True, gc=False):
    """A deployment, and the verdicts on it that say something: rules that are not named said `ok`."""

    deployment: str
    transport: Transport
    verdicts: list[Said]


class DecisionRecord(msgspec.Struct, frozen=True, gc=False):
    """A decision as a record holds it; in its words."""

    model: str
    ranked: tuple[str, ...]
    reason: str
    judged: list[JudgedRecord]
    budget_missed: bool
    use_cases: tuple[str, ...]


def pack_decision(decision: Decision, rules: Sequence[str]) -> DecisionRecord:
    """A decision made by these rules."""
    judged = []
    for of in decision.judged:
        said = []
        if of.verdicts.count(OK) < len(of.verdicts):  # nearly always none: not looked through one by one
            named = zip(rules, of.verdicts, strict=False)
            said = [Said(rule, v.allowed, v.code, v.detail) for rule, v in named if v is not OK]
        judged.append(JudgedRecord(of.deployment, of.transport, said))
    return DecisionRecord(
        decision.model, decision.ranked, decision.reason, judged, decision.budget_missed, decision.use_cases
    )


def pack_made(made: Made, packed: Packed, rules: Sequence[str]) -> Packed:
    """`packed`, once it has all of `made`: whoever keeps a request's decisions shares what was packed before."""
    for facts, decision in made[len(packed) :] if packed else made:
        packed.append((pack(facts), _decisions.pack(decision, rules)))
    return packed


class _Decisions:
    """Decisions as JSON, of those that were packed lately: a steady policy gives the very same one again and again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Decision, Sequence[str], msgspec.Raw]] = {}

    def pack(self, decision: Decision, rules: Sequence[str]) -> msgspec.Raw:
        known = self._known.get(id(decision))
        if known is not None and known[0] is decision and known[1] is rules:
            return known[2]
        record = msgspec.Raw(msgspec.json.encode(pack_decision(decision, rules)))
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[id(decision)] = (decision, rules, record)
        return record


_MOST_KNOWN = 256
_decisions = _Decisions()
