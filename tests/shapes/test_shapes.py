"""Both readers of what people write: that they agree, and what a shape is besides."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import types
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.policy import Policy
from router.deployments import Deployment, LiteLLMParams, ModelInfo
from router.guardrail_config import GuardrailConfig
from router.settings import RouterSettings, Settings
from router.tenant_config import TenantConfig
from router.traces import OtelConfig
from shapes import Complaint, Field, Invalid, Shape, quick, thorough
from workers.config import Fleet, PairConfig, StoreConfig, WorkerConfig

WORDS = (
    "m",
    "auto",
    "text",
    "cache",
    "http://h",
    "4GiB",
    "1h",
    "5%",
    "a:b",
    "header:x",
    "é",
    "x\n",
    "redis://h",
    "low",
)
JUNK = st.one_of(
    st.sampled_from((*WORDS, "", " 1", "01", "1_0", "-1", "1e-6", "1e400", "nan", "true", "True", "yes", "2026-13-01")),
    st.sampled_from((None, True, False, 0, 1, -1, 20, 2**70, 0.0, 1.5, float("inf"), float("nan"))),
    st.sampled_from((date(2026, 1, 1), [], {}, [1], {1: 2}, {"a": None}, ("x",), b"x", Path("p"), "2026-01-01")),
)


def right(annotation: Any) -> st.SearchStrategy[Any]:
    """Values that a type is likely to take."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Shape):
        return written(annotation)
    if origin is Annotated:
        return right(arguments[0])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is Union or origin is types.UnionType:
        return st.one_of(*map(right, arguments))
    if origin is tuple:
        return st.lists(mixed(arguments[0]), max_size=2)
    if origin is dict:
        return st.dictionaries(right(arguments[0]), mixed(arguments[1]), max_size=2)
    plain = {int: (0, 1, 20, "7"), float: (0.5, 1, "0.5", 2000), bool: (True, False), str: WORDS, Path: ("p", "p/q")}
    return st.sampled_from(plain.get(annotation, (None,)))


def mixed(annotation: Any) -> st.SearchStrategy[Any]:
    return st.integers(0, 19).flatmap(lambda n: JUNK if n == 0 else right(annotation))


def written(cls: type[Shape]) -> st.SearchStrategy[Any]:
    """Data of a shape: what must be there, some of what may, now and then a key too many."""
    keys = {name: mixed(info.annotation) for name, info in cls.model_fields.items()}
    must = {name: value for name, value in keys.items() if cls.model_fields[name].required}
    may = {name: value for name, value in keys.items() if name not in must}
    few = st.lists(st.sampled_from(sorted(may)), max_size=3, unique=True) if may else st.just([])
    plain = few.flatmap(lambda names: st.fixed_dictionaries(must | {name: may[name] for name in names}))
    return st.one_of(plain, plain, plain, plain.map(lambda data: {**data, "unheard_of": [1, {"a": None}]}))


SHAPES = (
    *(Policy, TenantConfig, LiteLLMParams, ModelInfo, Deployment, RouterSettings, Settings),
    *(GuardrailConfig, OtelConfig, PairConfig, WorkerConfig, StoreConfig, Fleet),
)


def told(made: Shape) -> str:
    """All that there is of it, types included."""
    return repr((made.model_dump(), sorted(made.model_fields_set), made.model_extra, made.model_dump(mode="json")))


@pytest.mark.parametrize("cls", SHAPES, ids=lambda cls: cls.__name__)
def test_what_the_quick_reader_takes_pydantic_takes_alike(cls: type[Shape]) -> None:
    """Whatever is written: where the quick reader is sure, the other makes the very same of it."""

    @settings(max_examples=60, deadline=None, database=None)
    @given(written(cls))
    def agree(data: Any) -> None:
        with contextlib.suppress(quick.Unsure):
            assert told(quick.read(cls, data)) == told(thorough.read(cls, data))

    agree()


USUAL: list[tuple[type[Shape], dict[str, Any]]] = [
    (Policy, {"models": ["m*"], "rollout": {"cache": "5%"}, "pairs": {"trust": ["0" * 64], "min_gain": 0.1}}),
    (TenantConfig, {"name": "a", "key": "sk", "audit": {"retention": "5y"}, "max_budget": 5, "budget_duration": "1d"}),
    (LiteLLMParams, {"model": "m", "rpm": "7", "input_cost_per_token": "1e-6", "weight": 1, "top_k": [1, None]}),
    (Deployment, {"model_name": "m", "relay_params": {"sharer": "a", "receiver": "b"}, "model_info": {"id": "x"}}),
    (RouterSettings, {"retry_policy": {"TimeoutErrorRetries": 2}, "fallbacks": [{"a": ["b"]}], "timeout": 5}),
    (GuardrailConfig, {"guardrail_name": "g", "own": {"use": "tests.router.own_guardrails:Words"}, "mode": "pre_call"}),
    (PairConfig, {"name": "p", "sharers": ["a", {"model": "b"}], "receiver": "r", "demotion": {"min_agreement": None}}),
    (WorkerConfig, {"name": "w", "device": "cuda:1", "memory": "4GiB", "pack": False}),
    (Settings, {"tenants": "folder", "audit": {"anchor": {"to": "file"}}, "log": {"level": "debug"}}),
]


@pytest.mark.parametrize(("cls", "data"), USUAL, ids=lambda one: getattr(one, "__name__", ""))
def test_the_quick_reader_takes_what_is_usual(cls: type[Shape], data: dict[str, Any]) -> None:
    """Sizes, spans, shares, numbers as text, either kind of a union: nothing of this needs pydantic."""
    assert told(quick.read(cls, data)) == told(thorough.read(cls, data))


def test_a_usual_file_is_read_without_pydantic(tmp_path: Path) -> None:
    """The example configuration, its tenants and what they take from the environment need no pydantic.

    A variable of our own is pydantic-settings' to read, and a wrong file is pydantic's to refuse.
    """
    script = """
import os, sys
from router.settings import ConfigError, load, load_text
from router.tenants import TenantSource
os.environ["COST"] = "1e-6"
settings = load("config.example.yaml")
assert TenantSource(settings).names
model = "litellm_params: {model: openai/m, input_cost_per_token: os.environ/COST}"
assert load_text(f"model_list: [{{model_name: m, {model}}}]").model_list[0].price.named()
assert "pydantic" not in sys.modules
os.environ["TWOLANE_SERVER__PORT"] = "4711"
assert load("config.example.yaml").server.port == 4711
assert "pydantic_settings" in sys.modules
del os.environ["TWOLANE_SERVER__PORT"]
try:
    load_text("server: {prot: 1}")
except ConfigError as error:
    assert "unknown key 'prot'" in str(error)
else:
    raise AssertionError("taken")
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], cwd=root, timeout=60, check=True)


class Inner(Shape, extra="forbid"):
    size: int = Field(1, ge=1)


class Outer(Shape, extra="allow"):
    name: str
    inner: Inner = Inner.model_construct()
    secret: str | None = Field(None, repr=False)

    @cached_property
    def shouted(self) -> str:
        return self.name.upper()


def test_a_shape_is_a_value() -> None:
    """Equal and of one hash by what is written, frozen, silent about secrets; a copy computes anew."""
    one, other = Outer(name="a", inner={"size": 2}), Outer.model_validate({"name": "a", "inner": Inner(size=2)})
    assert one == other
    assert hash(one) == hash(other)
    assert one != Outer(name="a", more=1)
    with pytest.raises(AttributeError, match="frozen"):
        one.name = "b"
    assert "hidden" not in repr(Outer(name="a", secret="hidden"))
    assert (one.shouted, one.model_copy(update={"name": "b"}).shouted) == ("A", "B")
    assert Outer(name="a", more=1).model_dump(exclude_unset=True) == {"name": "a", "more": 1}


def test_every_wrong_place_is_told_without_its_value() -> None:
    """Complaints have pydantic's places and words, and never what was written."""
    with pytest.raises(Invalid) as caught:
        Outer(inner={"size": "sk-secret", "sise": 1})
    assert [(c.loc, c.type) for c in caught.value.complaints] == [
        (("name",), "missing"),
        (("inner", "size"), "int_parsing"),
        (("inner", "sise"), "extra_forbidden"),
    ]
    assert isinstance(caught.value.complaints[0], Complaint)
    assert "sk-secret" not in str(caught.value)


def test_the_schema_tells_defaults_of_nested_shapes() -> None:
    """Editors see what a section left out stands for."""
    told = Outer.model_json_schema()
    assert told["properties"]["inner"] == {"$ref": "#/$defs/Inner", "default": {"size": 1}}
    assert (told["$defs"]["Inner"]["additionalProperties"], told["additionalProperties"]) == (False, True)
