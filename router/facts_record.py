"""Facts and decisions as a record holds them: what says something, so that a decision can be made again years later.

They hold no content: numbers, names from the configuration, and labels that policy reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from typing import Any

import msgspec

from policies.facts import Decision, Facts
from policies.rule import OK

VERSION = 1
"""Of the shape. A member more, with a default, is no new version; a change of meaning is."""


class NotReplayable(Exception):
    """The facts of a record cannot be read. The message says why."""


_AS_IT_IS = frozenset({str, int, float, bool, type(None), dict})
"""JSON already. A record is made of every request: what does not have to be looked into is not."""


def pack_all(found: Sequence[Facts]) -> dict[str, Any]:
    """Facts of one request's decisions, in their order, as JSON can hold them."""
    return {"v": VERSION, "of": [_packed(facts) for facts in found]}


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


def _packed(value: Any) -> Any:
    kind: type[Any] = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is tuple or kind is list:
        return [_packed(v) for v in value]
    if kind is frozenset or kind is set:
        return sorted(value)
    packed = {}
    for name, default in _DEFAULTS.get(kind) or _look_up(kind):
        found = getattr(value, name)
        if found is not default and found != default:
            packed[name] = found if type(found) in _AS_IT_IS else _packed(found)
    return packed


def pack_decision(decision: Decision, rules: Sequence[str]) -> dict[str, Any]:
    """A decision as JSON can hold it, with the verdicts that say something: rules that are not named said `ok`."""
    return {
        "model": decision.model,
        "ranked": decision.ranked,
        "reason": decision.reason,
        "judged": [
            {
                "deployment": judged.deployment,
                "transport": judged.transport,
                "verdicts": [
                    {"rule": rule, "allowed": v.allowed, "code": v.code, "detail": v.detail}
                    for rule, v in zip(rules, judged.verdicts, strict=False)
                    if v is not OK
                ],
            }
            for judged in decision.judged
        ],
        "budget_missed": decision.budget_missed,
        "use_cases": decision.use_cases,
    }


_DEFAULTS: dict[type[Any], tuple[tuple[str, object], ...]] = {}
"""Fields with their defaults, by class of facts."""


def _look_up(kind: type[Any]) -> tuple[tuple[str, object], ...]:
    found = _DEFAULTS[kind] = tuple((f.name, _default(f)) for f in fields(kind))
    return found


def _default(field: Field[Any]) -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default
