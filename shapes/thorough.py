"""What pydantic makes of it: whatever `quick` is not sure of, all that is refused, and JSON Schema."""

from __future__ import annotations

import functools
import operator
import types
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import pydantic
from pydantic_core import CoreSchema, core_schema

from shapes.notes import REQUIRED, AfterValidator, BeforeValidator, Complaint, FieldInfo, Invalid
from shapes.shape import Shape

_S = TypeVar("_S", bound=Shape)


class _Twin(pydantic.BaseModel):
    """A model with the keys of a shape. What it reads becomes an object of the shape."""

    model_config = pydantic.ConfigDict(defer_build=True, frozen=True, protected_namespaces=())

    shape: ClassVar[type[Shape]]

    @pydantic.model_validator(mode="wrap")
    @classmethod
    def _into_shape(cls, value: Any, inner: pydantic.ModelWrapValidatorHandler[Any]) -> Any:
        shape = cls.shape
        if isinstance(value, shape):
            return value
        model = inner(shape._prepared(value))
        extra = dict(model.model_extra or {})
        return shape._of_values(model.__dict__, extra, frozenset(model.model_fields_set))._checked()


def read(cls: type[_S], data: Any) -> _S:
    """The object that the data says. Raises Invalid."""
    try:
        made = twin(cls).__pydantic_validator__.validate_python(data)
    except pydantic.ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        raise Invalid(cls.__name__, [Complaint(tuple(e["loc"]), e["type"], e["msg"]) for e in found]) from None
    assert isinstance(made, cls)  # noqa: S101  (what `_Twin` makes)
    return made


def json_schema(cls: type[Shape]) -> dict[str, Any]:
    """Of all that `read` takes."""
    return twin(cls).model_json_schema()


def core_schema_of(cls: type[Shape], handler: pydantic.GetCoreSchemaHandler) -> CoreSchema:
    """What pydantic needs where a shape stands in a type of its own."""
    dumped = core_schema.plain_serializer_function_ser_schema(lambda made: made.model_dump(mode="json"))
    return core_schema.no_info_after_validator_function(lambda made: made, handler(twin(cls)), serialization=dumped)


_known: dict[type[Shape], type[_Twin]] = {}


def twin(cls: type[Shape]) -> type[_Twin]:
    """The model that has its keys."""
    if cls not in _known:
        _known[cls] = _made(cls)
    return _known[cls]


def _made(cls: type[Shape]) -> type[_Twin]:
    config = pydantic.ConfigDict(extra=cls._extra)
    if cls._schema_extra is not None:
        config["json_schema_extra"] = cls._schema_extra
    fields = cls.model_fields
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
        "__annotations__": {name: _translated(info.annotation) for name, info in fields.items()} | {"shape": ClassVar},
        "model_config": config,
        "shape": cls,
    }
    namespace |= {name: _field(info) for name, info in fields.items()}
    made = types.new_class(cls.__name__, (_Twin,), exec_body=lambda body: body.update(namespace))
    assert issubclass(made, _Twin)  # noqa: S101  (its base)
    made.model_rebuild()
    return made


def _field(info: FieldInfo) -> Any:
    told: dict[str, Any] = dict(info.bounds)
    if info.json_schema_extra is not None:
        told["json_schema_extra"] = info.json_schema_extra
    if info.default_factory is not None:
        told["default_factory"] = info.default_factory
    elif info.default is not REQUIRED:
        told["default"] = info.default
    return pydantic.Field(exclude=info.exclude or None, repr=info.repr, **told)


def _translated(annotation: Any) -> Any:
    """The annotation with twins in place of shapes, and pydantic's notes in place of ours."""
    if isinstance(annotation, type) and issubclass(annotation, Shape):
        return twin(annotation)
    if isinstance(annotation, FieldInfo):
        return _field(annotation)
    if isinstance(annotation, BeforeValidator):
        return pydantic.BeforeValidator(annotation.func)
    if isinstance(annotation, AfterValidator):
        return pydantic.AfterValidator(annotation.func)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is None or origin is Literal:
        return annotation
    translated = tuple(_translated(argument) for argument in arguments)
    if origin is Annotated:
        return Annotated[translated]
    if origin is Union or origin is types.UnionType:
        return functools.reduce(operator.or_, translated)
    return origin[translated]
