"""What is plainly right, read without pydantic.

Where this reads something, pydantic would read the same; where it would not do for any reason, it says that it is
unsure, and never what is wrong. A test holds the two together.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from shapes.notes import AfterValidator, BeforeValidator, FieldInfo

if TYPE_CHECKING:
    from shapes.shape import Shape

    _S = TypeVar("_S", bound=Shape)

Reader = Callable[[Any], Any]
"""Raises Unsure."""

_INT = re.compile(r"-?[0-9]{1,18}")
_FLOAT = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,2})?")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_BOUNDS = frozenset({"ge", "gt", "le", "lt", "min_length", "pattern", "allow_inf_nan"})


class Unsure(Exception):
    """Pydantic is to be asked."""


def read(cls: type[_S], data: Any) -> _S:
    """The object that the data says. Raises Unsure."""
    if type(data) is not dict:
        raise Unsure
    try:
        data = cls._prepared(data)
    except (ValueError, AssertionError):
        raise Unsure from None
    values = {}
    for name, (reader, required) in _readers(cls).items():
        if name in data:
            values[name] = reader(data[name])
        elif required:
            raise Unsure
    extra: dict[str, Any] = {}
    if len(values) < len(data):
        others = data.keys() - values.keys()
        if cls._extra == "forbid" or not all(type(key) is str for key in others):
            raise Unsure
        if cls._extra == "allow":
            extra = {key: value for key, value in data.items() if key in others}
    made = cls._of_values(values, extra, frozenset(values) | extra.keys())
    try:
        return made._checked()
    except (ValueError, AssertionError):
        raise Unsure from None


_known: dict[type, dict[str, tuple[Reader, bool]]] = {}


def _readers(cls: type[Shape]) -> dict[str, tuple[Reader, bool]]:
    """By key; and whether it must be written."""
    found = _known.get(cls)
    if found is None:
        fields = cls.model_fields.items()
        found = {name: (_bounded(_reader(f.annotation), f.bounds), f.required) for name, f in fields}
        _known[cls] = found
    return found


def _unsure(_: Any) -> Any:
    raise Unsure


def _reader(annotation: Any) -> Reader:
    """Of one type, as it stands in an annotation."""
    plain = _PLAIN.get(annotation) if isinstance(annotation, typing.Hashable) else None
    if plain is not None:
        return plain
    if isinstance(annotation, type) and hasattr(annotation, "_fields"):
        return lambda value: value if isinstance(value, annotation) else read(annotation, value)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotated(*arguments)
    if origin is Literal:
        return _one_of(arguments)
    if origin is Union or origin is types.UnionType:
        return _union([_reader(argument) for argument in arguments])
    if origin is tuple and len(arguments) == 2 and arguments[1] is ...:
        return _many(_reader(arguments[0]))
    if origin is dict:
        return _mapping(_reader(arguments[0]), _reader(arguments[1]))
    return _unsure


def _text(value: Any) -> str:
    if type(value) is not str:
        raise Unsure
    return value


def _whole(value: Any) -> int:
    if type(value) is int:
        return value
    if type(value) is str and _INT.fullmatch(value):  # a variable's
        return int(value)
    raise Unsure


def _number(value: Any) -> float:
    if type(value) is float or (type(value) is int and abs(value) < 2**53):
        return float(value)
    if type(value) is str and _FLOAT.fullmatch(value):  # a variable's; and YAML takes 1e-6 for text
        return float(value)
    raise Unsure


def _truth(value: Any) -> bool:
    if type(value) is bool:
        return value
    if value in ("true", "false"):
        return bool(value == "true")
    raise Unsure


def _nothing(value: Any) -> None:
    if value is not None:
        raise Unsure


def _path(value: Any) -> Path:
    if type(value) is str:
        return Path(value)
    if isinstance(value, Path):
        return value
    raise Unsure


def _day(value: Any) -> date:
    if type(value) is date:
        return value
    if type(value) is str and _DAY.fullmatch(value):
        return _guarded(date.fromisoformat)(value)  # type: ignore[no-any-return]
    raise Unsure


_PLAIN: dict[Any, Reader] = {
    str: _text,
    int: _whole,
    float: _number,
    bool: _truth,
    None: _nothing,
    type(None): _nothing,
    Path: _path,
    date: _day,
    Any: lambda value: value,
}


def _one_of(choices: tuple[Any, ...]) -> Reader:
    def among(value: Any) -> Any:
        for choice in choices:
            if type(value) is type(choice) and value == choice:
                return choice
        raise Unsure

    return among


def _union(arms: list[Reader]) -> Reader:
    def only_one(value: Any) -> Any:
        found = []
        for arm in arms:
            try:
                found.append(arm(value))
            except Unsure:
                continue
        if len(found) != 1:
            raise Unsure
        return found[0]

    return only_one


def _many(one: Reader) -> Reader:
    def many(value: Any) -> tuple[Any, ...]:
        if type(value) is not list and type(value) is not tuple:
            raise Unsure
        return tuple(map(one, value))

    return many


def _mapping(key_of: Reader, value_of: Reader) -> Reader:
    def mapping(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise Unsure
        return {key_of(key): value_of(item) for key, item in value.items()}

    return mapping


def _annotated(inner: Any, *notes: Any) -> Reader:
    reader = _reader(inner)
    for note in notes:
        if isinstance(note, FieldInfo):
            reader = _bounded(reader, note.bounds)
        elif isinstance(note, BeforeValidator):
            reader = _then(_guarded(note.func), reader)
        elif isinstance(note, AfterValidator):
            reader = _then(reader, _guarded(note.func))
        else:
            return _unsure
    return reader


def _then(first: Reader, second: Reader) -> Reader:
    return lambda value: second(first(value))


def _guarded(function: Reader) -> Reader:
    def call(value: Any) -> Any:
        try:
            return function(value)
        except (ValueError, AssertionError):
            raise Unsure from None

    return call


def _bounded(reader: Reader, bounds: Mapping[str, Any]) -> Reader:
    """Null is in every bound: where it may not stand, it was not read."""
    if not bounds:
        return reader
    if not bounds.keys() <= _BOUNDS:
        return _unsure
    pattern = re.compile(bounds["pattern"], re.ASCII) if "pattern" in bounds else None

    def within(value: Any) -> Any:
        found = reader(value)
        if found is not None and not _holds(found, bounds, pattern):
            raise Unsure
        return found

    return within


def _holds(value: Any, bounds: Mapping[str, Any], pattern: re.Pattern[str] | None) -> bool:
    # Of text only what both kinds of expressions mean the same by: they differ on the end of a line, and on \w and \s.
    if pattern is not None and not (value.isascii() and value.isprintable() and pattern.search(value)):
        return False
    if len(value) < bounds["min_length"] if "min_length" in bounds else False:
        return False
    if isinstance(value, float) and value - value != 0:  # nan, inf
        return False
    return not (
        ("ge" in bounds and not value >= bounds["ge"])
        or ("gt" in bounds and not value > bounds["gt"])
        or ("le" in bounds and not value <= bounds["le"])
        or ("lt" in bounds and not value < bounds["lt"])
    )
