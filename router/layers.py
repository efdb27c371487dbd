"""What a tenant stands on: `extends` and `preset`, laid under what it says itself. Knows no other key's meaning.

Mappings are laid over each other key by key; anything else, lists too, is replaced as a whole. A tenant's name and keys
are its own: they are never taken from what it extends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from router import source
from router.source import ConfigError, Path_, Source

_OWN = frozenset({"name", "key", "keys", "extends", "preset"})
_PRESETS = Path(__file__).with_name("presets")

Reader = Callable[[str, Source], Source]
"""What `extends: NAME`, written in a source, leads to. Raises ConfigError."""


@dataclass(frozen=True, slots=True)
class Layered(Source):
    """Several sources as one; errors name the source that an offending key comes from."""

    layers: tuple[Source, ...] = ()
    """What is said last, and so wins, first."""

    def error(self, path: Path_, problem: str) -> ConfigError:
        owner = max(self.layers, key=lambda layer: _reach(layer.data, path))
        return owner.error(path, problem)


def presets() -> tuple[str, ...]:
    """Names that `preset` knows."""
    return tuple(sorted(file.stem for file in _PRESETS.glob("*.yaml")))


def layers_of(written: Source, read: Reader, above: tuple[str, ...] = ()) -> tuple[Source, ...]:
    """The source and all it stands on, the nearest first. Raises ConfigError at the key that leads nowhere."""
    base, preset = (_named(written, key) for key in ("extends", "preset"))
    if base is None:
        return (written,) if preset is None else (written, _preset(preset, written))
    if preset is not None:
        raise written.error(("preset",), "expected either preset or extends; what is extended may name the preset")
    if written.name in above:
        raise written.error(("extends",), f"extends itself: {' -> '.join((*above, written.name))}")
    return (written, *layers_of(read(base, written), read, (*above, written.name)))


def laid(layers: Iterable[Source]) -> Layered:
    """Layers as one source, without the words that led to them."""
    own, *bases = layers
    top = replace(own, data={k: v for k, v in own.data.items() if k not in ("extends", "preset")})
    stripped = (top, *(replace(base, data=_inheritable(base.data)) for base in bases))
    data: dict[str, Any] = {}
    for layer in reversed(stripped):
        data = over(data, layer.data)
    return Layered(own.name, data, own.root, stripped)


def expand_listed(written: Source) -> Source:
    """A configuration whose listed tenants are laid over what they extend. Raises ConfigError."""
    listed = written.data.get("tenants")
    if not isinstance(listed, list):
        return written
    names = [entry.get("name") if isinstance(entry, dict) else None for entry in listed]

    def read(name: str, at: Source) -> Source:
        if name not in names:
            raise at.error(("extends",), f"{name!r} is not listed under tenants")
        return entry(names.index(name))

    def entry(index: int) -> _Entry:
        return _Entry(f"tenants[{index}]", listed[index], None, written, ("tenants", index))

    expanded = [
        laid(layers_of(entry(index), read)).data if isinstance(tenant, dict) else tenant
        for index, tenant in enumerate(listed)
    ]
    return replace(written, data={**written.data, "tenants": expanded})


@dataclass(frozen=True, slots=True)
class _Entry(Source):
    """One tenant of a list, whose errors stand in the whole file."""

    whole: Source
    at: Path_

    def error(self, path: Path_, problem: str) -> ConfigError:
        return self.whole.error((*self.at, *path), problem)


def _named(written: Source, key: str) -> str | None:
    name = written.data.get(key)
    if name is not None and not isinstance(name, str):
        raise written.error((key,), f"expected text, found {source.kind_of(name)}")
    return name


def _preset(name: str, at: Source) -> Source:
    if name not in presets():
        raise at.error(("preset",), f"{name!r} is not a preset; there are: {', '.join(presets())}")
    return source.read((_PRESETS / f"{name}.yaml").read_text(encoding="utf-8"), f"preset {name}")


def _inheritable(data: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in data.items() if key not in _OWN}
    cases = kept.get("use_cases")
    if isinstance(cases, list):
        kept["use_cases"] = [
            {k: v for k, v in case.items() if k != "keys"} if isinstance(case, dict) else case for case in cases
        ]
    return kept


def over(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings at the same place become one, at any depth; else `upper` wins."""
    found = dict(lower)
    for key, value in upper.items():
        below = found.get(key)
        found[key] = over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return found


def _reach(data: Any, path: Path_) -> float:
    """How far a layer owns a path: all of it where the path's value, or the list it leads through, is this layer's."""
    for depth, step in enumerate(path):
        if not isinstance(data, Mapping):
            return float("inf")
        if step not in data:
            return depth
        data = data[step]
    return float("inf")
