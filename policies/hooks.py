"""Hooks: classes of other packages, named in YAML, imported and made once when the file is read."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any, ClassVar, Self

from policies.written import Written
from shapes import Field, model_validator


class Hook(Written):
    """`use: "pkg.mod:Class"` and its `options`, which the class is called with by name."""

    use: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
    options: dict[str, Any] = Field(default_factory=dict, repr=False)
    _made: Any = None

    verb: ClassVar[str]
    """The method that the class must have. One without it is never called, so that YAML cannot run just any class."""
    may_wait: ClassVar[bool] = False
    """The method may be a coroutine function."""

    @model_validator(mode="after")
    def _load(self) -> Self:
        found = _import(self.use)
        method = getattr(found, self.verb, None) if isinstance(found, type) else None
        if not callable(method):
            raise ValueError(f"{self.use} is not a class with a method {self.verb!r}")
        if inspect.iscoroutinefunction(method) and not self.may_wait:
            raise ValueError(f"{self.use}: {self.verb!r} must not be async")
        assert isinstance(found, type)  # noqa: S101  (it has the method)
        try:
            self._made = found(**self.options)
        except TypeError as error:
            raise ValueError(f"{self.use} does not take these options: {error}") from None
        except Exception as error:  # its text may hold an option's value
            raise ValueError(f"{self.use} cannot be made: {type(error).__name__}") from None
        return self


def _import(use: str) -> object:
    module, _, path = use.partition(":")
    try:
        found: object = import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except Exception as error:  # whatever the module does when it is imported
        raise ValueError(f"{use} cannot be imported: {type(error).__name__}: {error}") from None
    return found
