"""Shape: the base of every class that people write in YAML."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, cast

import msgspec
from msgspec.structs import replace

from shapes import quick
from shapes.notes import REQUIRED, FieldInfo

Extra = Literal["forbid", "ignore", "allow"]
"""What becomes of a key that the class does not name; `allow` keeps it in `model_extra`."""


class _Fields:
    """`model_fields`: of the class, with annotations resolved when they are first looked up."""

    def __get__(self, _: Any, cls: type[Shape]) -> dict[str, FieldInfo]:
        found = cls.__dict__.get("_resolved")
        if found is None:
            hints = _hints(cls)
            found = {name: replace(info, annotation=hints[name]) for name, info in cls._fields.items()}
            cls._resolved = found
        return cast("dict[str, FieldInfo]", found)


class Shape:
    """Frozen but for names that begin with `_`; equal by what is written. Made by `Class(key=value)`."""

    _fields: ClassVar[dict[str, FieldInfo]] = {}
    _resolved: ClassVar[dict[str, FieldInfo]]
    _extra: ClassVar[Extra] = "ignore"
    _schema_extra: ClassVar[Callable[[dict[str, Any]], None] | None] = None
    _validators: ClassVar[dict[str, str]] = {}
    """Methods by name, and their mode; those of bases first."""
    model_fields: ClassVar[_Fields] = _Fields()

    model_fields_set: frozenset[str]
    """Keys that were written; the others have their defaults."""
    model_extra: dict[str, Any]

    def __init_subclass__(
        cls, *, extra: Extra | None = None, schema_extra: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        super().__init_subclass__()
        if extra is not None:
            cls._extra = extra
        cls._schema_extra = None if schema_extra is None else staticmethod(schema_extra)
        cls._own_fields = _own_fields(cls)
        lineage = [base for base in reversed(cls.__mro__) if issubclass(base, Shape)]
        cls._fields = {name: info for base in lineage for name, info in base.__dict__.get("_own_fields", {}).items()}
        cls._validators = {name: mode for base in lineage for name, mode in _marked(base)}

    _own_fields: ClassVar[dict[str, FieldInfo]]

    def __init__(self, /, **data: Any) -> None:
        """Raises Invalid."""
        vars(self).update(vars(type(self).model_validate(data)))

    @classmethod
    def model_validate(cls, data: Any) -> Self:
        """The object that the data says; an object of the class is taken as it is. Raises Invalid."""
        if isinstance(data, cls):
            return data
        try:
            return quick.read(cls, data)
        except quick.Unsure:
            from shapes import thorough

            return thorough.read(cls, data)

    @classmethod
    def model_construct(cls, **values: Any) -> Self:
        """With these values and the other keys' defaults, unread."""
        return cls._of_values(values, {}, frozenset(values))

    @classmethod
    def _of_values(cls, values: Mapping[str, Any], extra: dict[str, Any], written: frozenset[str]) -> Self:
        made = object.__new__(cls)
        kept = vars(made)
        for name, info in cls._fields.items():
            kept[name] = values[name] if name in values else info.absent()
        kept["model_extra"], kept["model_fields_set"] = extra, written
        return made

    def _checked(self) -> Self:
        """What the validators that see the whole make of it. Raises ValueError."""
        found = self
        for name, mode in self._validators.items():
            if mode == "after":
                found = getattr(found, name)()
        return found

    @classmethod
    def _prepared(cls, data: Any) -> Any:
        """The data as those validators leave it that see it first. Raises ValueError."""
        for name, mode in reversed(cls._validators.items()):
            if mode == "before":
                data = getattr(cls, name)(data)
        return data

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        """For editors."""
        from shapes import thorough

        return thorough.json_schema(cls)

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: Any) -> Any:
        """Lets types that pydantic reads hold shapes."""
        from shapes import thorough

        return thorough.core_schema_of(cls, handler)

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        """The same with other values, unread; what was computed of it is computed anew."""
        made = object.__new__(type(self))
        computed = {name for name in vars(self) if isinstance(getattr(type(self), name, None), cached_property)}
        vars(made).update({name: value for name, value in vars(self).items() if name not in computed} | dict(update))
        vars(made)["model_fields_set"] = self.model_fields_set | update.keys()
        return made

    def model_dump(
        self,
        *,
        mode: Literal["python", "json"] = "python",
        exclude: Collection[str] = (),
        exclude_unset: bool = False,
        exclude_none: bool = False,
    ) -> dict[str, Any]:
        """What is written as plain data, defaults filled in unless `exclude_unset`; `json`: of JSON's types only."""
        dumped = _plain(self, exclude, exclude_unset, exclude_none)
        if mode == "json":
            dumped = msgspec.to_builtins(dumped, enc_hook=_path, str_keys=True)
        return dict(dumped)

    def model_dump_json(self) -> str:
        """The same as JSON text."""
        return msgspec.json.encode(self.model_dump(), enc_hook=_path).decode()

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} is frozen")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen")

    def _compared(self) -> list[Any]:
        kept = vars(self)
        return [*(kept[name] for name in self._fields), self.model_extra]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._compared() == other._compared()

    def __hash__(self) -> int:
        return hash((type(self), *self._compared()[:-1]))

    def __repr__(self) -> str:
        told = (f"{name}={vars(self)[name]!r}" for name, info in self._fields.items() if info.repr)
        return f"{type(self).__name__}({', '.join(told)})"


def _own_fields(cls: type) -> dict[str, FieldInfo]:
    """Keys that the class itself names; their defaults leave the class, so that only objects have values."""
    found = {}
    for name, annotation in inspect.get_annotations(cls).items():
        if name.startswith("_") or "ClassVar[" in str(annotation):
            continue
        default = cls.__dict__.get(name, REQUIRED)
        found[name] = default if isinstance(default, FieldInfo) else FieldInfo(default)
        if default is not REQUIRED:
            delattr(cls, name)
    return found


_known: dict[tuple[str, str], Any] = {}
"""Types by module, as they are written there: few kinds of keys make most of a configuration."""


def _hints(cls: type[Shape]) -> dict[str, Any]:
    """The keys' types. `typing.get_type_hints` says the same in ten times as long, at every start."""
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        for name, annotation in inspect.get_annotations(base).items():
            if name in cls._fields:
                found[name] = _evaluated(base.__module__, annotation) if isinstance(annotation, str) else annotation
    return found


def _evaluated(module: str, text: str) -> Any:
    if (module, text) not in _known:
        _known[module, text] = eval(text, vars(sys.modules[module]))  # noqa: S307  (the program's own text)
    return _known[module, text]


def _marked(cls: type) -> Iterable[tuple[str, str]]:
    for name, value in cls.__dict__.items():
        mode = getattr(value.__func__ if isinstance(value, classmethod) else value, "__validates__", None)
        if mode is not None:
            yield name, mode


def _plain(value: Any, exclude: Collection[str], unset: bool, none: bool) -> Any:
    """Shapes as mappings, at any depth; `exclude` holds at the top."""
    if isinstance(value, Shape):
        kept = vars(value)
        names = (
            name
            for name, info in value._fields.items()
            if not (info.exclude or name in exclude)
            and not (unset and name not in value.model_fields_set)
            and not (none and kept[name] is None)
        )
        found = {name: _plain(kept[name], (), unset, none) for name in names}
        more = {k: v for k, v in value.model_extra.items() if k not in exclude and not (none and v is None)}
        return found | more
    if isinstance(value, tuple | list):
        return type(value)(_plain(item, (), unset, none) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item, (), unset, none) for key, item in value.items()}
    return value


def _path(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is no value of JSON")
