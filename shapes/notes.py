"""What a class body says of its keys, and what is said of data that does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

_F = TypeVar("_F", bound=Callable[..., Any])


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED = _Required()
"""In place of a default."""


class Complaint(msgspec.Struct, frozen=True):
    """What is wrong at one place; `type` is pydantic's."""

    loc: tuple[int | str, ...]
    type: str
    msg: str


class Invalid(ValueError):
    """What was written is not of this shape. The text holds no value."""

    def __init__(self, name: str, complaints: Sequence[Complaint]) -> None:
        self.complaints = tuple(complaints)
        super().__init__("; ".join(f"{'.'.join(map(str, (name, *c.loc)))}: {c.msg}" for c in complaints))


class FieldInfo(msgspec.Struct, frozen=True, eq=False):
    """One key: its default and what bounds it."""

    default: Any = REQUIRED
    default_factory: Callable[[], Any] | None = None
    bounds: Mapping[str, Any] = {}
    """`ge`, `gt`, `le`, `min_length`, `pattern`, `allow_inf_nan`: pydantic's."""
    repr: bool = True
    exclude: bool = False
    """Not dumped."""
    json_schema_extra: Any = None
    annotation: Any = None
    """Resolved; None until it is looked up by `model_fields`."""

    @property
    def required(self) -> bool:
        return self.default is REQUIRED and self.default_factory is None

    def absent(self) -> Any:
        """The value of a key that is not written."""
        return self.default if self.default_factory is None else self.default_factory()


def Field(  # noqa: N802  (pydantic's name)
    default: Any = REQUIRED,
    *,
    default_factory: Callable[[], Any] | None = None,
    repr: bool = True,
    exclude: bool = False,
    json_schema_extra: Any = None,
    **bounds: Any,
) -> Any:
    """A key's default and bounds, in a class body or in `Annotated`."""
    return FieldInfo(default, default_factory, bounds, repr, exclude, json_schema_extra)


class BeforeValidator(msgspec.Struct, frozen=True):
    """In `Annotated`: makes of what is written what is then read. Raises ValueError."""

    func: Callable[[Any], Any]


class AfterValidator(msgspec.Struct, frozen=True):
    """In `Annotated`: judges, or replaces, what was read. Raises ValueError."""

    func: Callable[[Any], Any]


def model_validator(*, mode: Literal["before", "after"]) -> Callable[[_F], _F]:
    """Marks a method that sees the whole: the data before it is read, or the object after. Raises ValueError."""

    def mark(function: _F) -> _F:
        inner = function.__func__ if isinstance(function, classmethod) else function
        inner.__validates__ = mode  # type: ignore[attr-defined]
        return function

    return mark
