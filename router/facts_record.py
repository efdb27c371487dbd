"""Facts as a record holds them: what differs from the default, so that a decision can be made again years later.

They hold no content: numbers, names from the configuration, and labels that policy reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any

import msgspec

from policies.facts import Facts

VERSION = 1
"""Of the shape. A member more, with a default, is no new version; a change of meaning is."""


class NotReplayable(Exception):
    """The facts of a record cannot be read. The message says why."""


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
    if is_dataclass(kind):
        return {
            name: _packed(found)
            for name, default in _defaults(kind)
            if (found := getattr(value, name)) != default or default is MISSING
        }
    if isinstance(value, tuple | list):
        return [_packed(v) for v in value]
    if isinstance(value, frozenset | set):
        return sorted(value)
    return value


@cache
def _defaults(kind: type[Any]) -> tuple[tuple[str, object], ...]:
    return tuple((f.name, _default(f)) for f in fields(kind))


def _default(field: Field[Any]) -> object:
    return field.default_factory() if field.default_factory is not MISSING else field.default
