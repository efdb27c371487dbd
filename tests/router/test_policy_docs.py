"""docs/policy.md against the code: every key stands there, and its example of an own rule works as written."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from policies.decide import decide
from policies.facts import DeploymentFacts, Facts
from policies.scopes import Scope, UseCase
from router.layers import presets
from router.tenant_config import BoundUseCase, TenantConfig
from shapes import Shape

TEXT = (Path(__file__).parents[2] / "docs" / "policy.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    start = TEXT.index(f"## {title}\n")
    end = TEXT.find("\n## ", start + 1)
    return TEXT[start : end if end > 0 else None]


def named(text: str) -> set[str]:
    """Keys in the first column of a section's tables."""
    rows = re.findall(r"^\| (`[^|]+`) \|", text, re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`([\w.]+)`", row)}


def keys(model: type[Shape], *nested: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if name in nested and isinstance(inner, type) and issubclass(inner, Shape):
            yield from (f"{name}.{key}" for key in inner.model_fields)
        else:
            yield name


def test_every_key_of_a_tenant_is_documented() -> None:
    """The table has exactly the keys that a tenant file may have."""
    table = TEXT[: TEXT.index("What is left out restricts nothing")]
    assert named(table) == set(keys(TenantConfig, "pairs", "rollout"))


def test_every_key_of_a_use_case_is_documented() -> None:
    """So for use cases and for the values of labels."""
    assert named(section("Use cases")) == set(BoundUseCase.model_fields)
    assert set(Scope.model_fields) < set(UseCase.model_fields)
    told = section("Labels")
    assert all(f"`{key}`" in told for key in Scope.model_fields)


def examples(title: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section(title), re.DOTALL)


def test_own_rule_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example in docs/policy.md, rule and YAML, refuses what it says it refuses."""
    module = types.ModuleType("acme.rules")
    exec(examples("Own rules", "python")[0], module.__dict__)
    monkeypatch.setitem(sys.modules, "acme", types.ModuleType("acme"))
    monkeypatch.setitem(sys.modules, "acme.rules", module)
    policy = TenantConfig(name="a", **yaml.safe_load(examples("Own rules", "yaml")[0])).policy
    cloud, own = DeploymentFacts("c", "text", "http"), DeploymentFacts("o", "text", "http", region="on-site")
    small = Facts("m", (cloud, own), prompt_tokens=10, output_tokens=10)
    assert set(decide(policy, small).ranked) == {"c", "o"}
    large = decide(policy, replace(small, prompt_tokens=5000))
    assert large.ranked == ("o",)
    assert large.judged[0].verdicts[-1].code == "own_rule"


def test_presets_are_documented() -> None:
    """The table has exactly the presets that there are, and each can be a tenant's."""
    assert set(re.findall(r"^\| `([\w-]+)` \|", section("Presets and bases"), re.MULTILINE)) == set(presets())


def test_use_cases_of_the_docs() -> None:
    """The YAML example of use cases can be read."""
    (text,) = examples("Use cases", "yaml")
    assert len(TenantConfig(name="a", **yaml.safe_load(text)).use_cases) == 2
