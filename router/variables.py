"""TWOLANE_* variables over the configuration: `TWOLANE_SERVER__PORT=8080`. Values of lists and mappings are JSON."""

from __future__ import annotations

import json
import os
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from router.settings import PREFIX, Settings
from router.source import ConfigError
from shapes import Shape


def with_variables(data: dict[str, Any]) -> Settings:
    """The settings that data and variables make together. Raises ConfigError for a variable that is no JSON.

    Raises Invalid like `Settings`.
    """
    found = {name.upper(): text for name, text in os.environ.items() if name.upper().startswith(PREFIX)}
    # Deeper names say the finer thing: they come last and win.
    for name in sorted(found, key=lambda name: name.count("__")):
        path = name.removeprefix(PREFIX).lower().split("__")
        if path[0] in Settings.model_fields:
            data = _merged(data, _nested(path, _value(name, path, found[name])))
    return Settings(**data)


def _value(name: str, path: list[str], text: str) -> Any:
    """The text, or what it says as JSON where the key takes more than text and numbers."""
    kinds = list(_kinds(_annotation(path)))
    if not any(_holds_others(kind) for kind in kinds):
        return text
    try:
        return json.loads(text)
    except ValueError:
        if all(_holds_others(kind) for kind in kinds if kind is not type(None)):
            raise ConfigError(f"environment variable {name}: expected JSON") from None
        return text


def _annotation(path: list[str]) -> Any:
    """Of the key that a path leads to; that of plain text where no shape says."""
    cls: type[Shape] | None = Settings
    annotation: Any = str
    for step in path:
        if cls is None or step not in cls.model_fields:
            return str
        annotation = cls.model_fields[step].annotation
        shapes = (kind for kind in _kinds(annotation) if isinstance(kind, type) and issubclass(kind, Shape))
        cls = next(shapes, None)
    return annotation


def _kinds(annotation: Any) -> Iterable[Any]:
    """The arms of a union; a type alone is its own."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _kinds(get_args(annotation)[0])
    elif origin is Union or origin is types.UnionType:
        for arm in get_args(annotation):
            yield from _kinds(arm)
    else:
        yield annotation


def _holds_others(kind: Any) -> bool:
    origin = get_origin(kind)
    return (origin is not None and origin is not Literal) or (isinstance(kind, type) and issubclass(kind, Shape))


def _nested(path: list[str], value: Any) -> dict[str, Any]:
    for step in reversed(path):
        value = {step: value}
    return dict(value)


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings at the same place become one; else `over` wins."""
    both = dict(under)
    for key, value in over.items():
        held = both.get(key)
        both[key] = _merged(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return both
