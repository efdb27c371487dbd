"""What a tenant file stands on: presets and bases."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.decide import decide
from policies.facts import Facts
from router.cli import main
from router.layers import presets
from router.settings import ConfigError, load_text
from router.tenants import TenantSource, read_tenant
from tests.policies import strategies
from tests.router.test_tenants import folder, name_of


def put(place: Path, **files: dict[str, Any] | str) -> Path:
    """Files by name; gives the first."""
    written = []
    for name, content in files.items():
        file = place / f"{name.replace('__', '/')}.yaml"
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
        written.append(file)
    return written[0]


def test_base_holds_where_nothing_is_said(tmp_path: Path) -> None:
    """Mappings are laid over each other, lists are replaced, and name and keys stay with their owner."""
    file = put(
        tmp_path,
        shop={"extends": "bank", "name": "shop", "key": "sk-shop", "models": ["b"], "audit": {"retention": "1y"}},
        bank={
            "extends": "bases/all.yaml",
            "name": "bank",
            "keys": ["sk-bank", "os.environ/NO_SUCH_VARIABLE"],
            "models": ["a"],
            "use_cases": [{"id": "x", "owner": "kim", "risk": "low", "keys": ["sk-x"]}],
        },
        bases__all={"audit": {"content": "none", "retention": "2y"}, "regions": ["kr"], "preset": "lab"},
    )
    shop = read_tenant(file)
    assert (shop.name, shop.models, shop.regions) == ("shop", ("b",), ("kr",))
    assert (shop.audit.content, shop.audit.retention) == ("none", 365 * 86400)
    assert shop.audit.shadow_text == 0.05
    assert shop.sticky == "conversation"
    assert [case.id for case in shop.use_cases] == ["x"]
    assert len(shop.key_digests) == 1


def test_null_takes_a_restriction_back(tmp_path: Path) -> None:
    """A key written as null overrides the base's."""
    file = put(tmp_path, a={"extends": "b", "name": "a", "regions": None}, b={"name": "b", "regions": ["kr"]})
    assert read_tenant(file).regions is None


@pytest.mark.parametrize("name", presets())
def test_presets(tmp_path: Path, name: str) -> None:
    """Each preset makes a tenant; what is regulated has the text lane only and a full record."""
    tenant = read_tenant(put(tmp_path, a={"name": "a", "preset": name}))
    assert tenant.audit.retention is not None
    if tenant.regulated:
        assert (tenant.transports, tenant.audit.content) == (("text",), "full")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a": "name: a\n\nextends: nobody\n"}, r"a\.yaml:3: extends: there is no file .*nobody\.yaml"),
        ({"a": "name: a\npreset: moon\n"}, r"a\.yaml:2: preset: 'moon' is not a preset; there are: eu-high-risk"),
        ({"a": "name: a\npreset: lab\nextends: a\n"}, r"a\.yaml:2: preset: expected either"),
        ({"a": "name: a\nextends: [b]\n"}, r"a\.yaml:2: extends: expected text, found a list"),
        ({"a": "name: a\nextends: b\n", "b": "extends: a\n"}, r"extends itself: .*a\.yaml -> .*b\.yaml -> "),
        ({"a": "name: a\nextends: b\n", "b": "name: b\n\nregoins: [kr]\n"}, r"b\.yaml:3: regoins: unknown key"),
        (
            {"a": "name: a\nextends: b\n", "b": "name: b\nlatency_budget:\n  ttft_ms: -1\n"},
            r"b\.yaml:3: latency_budget\.ttft_ms",
        ),
        (
            {"a": "name: a\nextends: b\nlatency_budget:\n  total_ms: -1\n", "b": "latency_budget: {ttft_ms: 1}\n"},
            r"a\.yaml:4: latency_budget\.total_ms",
        ),
        (
            {"a": "name: a\nextends: b\nuse_cases:\n- {id: x}\n", "b": "use_cases: [{id: x, owner: k, risk: low}]\n"},
            r"a\.yaml:4: use_cases\[0\]\.owner",
        ),
        ({"a": "name: a\nextends: b\n", "b": "name: b\naudit: {anchor: os.environ/NOPE}\n"}, r"b\.yaml:2: .*NOPE"),
    ],
)
def test_refused(tmp_path: Path, files: dict[str, str], said: str) -> None:
    """What leads nowhere, in circles or into a mistake is named with the file and line that it stands in."""
    with pytest.raises(ConfigError, match=said):
        read_tenant(put(tmp_path, **files))


def test_listed_tenants() -> None:
    """Tenants listed in the configuration may extend each other and name presets."""
    listed = load_text(
        "tenants:\n- {name: a, key: sk-a, extends: b, models: [m]}\n- {name: b, key: sk-b, preset: kr-finance}\n"
    ).tenants
    assert isinstance(listed, tuple)
    assert [(t.name, t.regulated, t.models) for t in listed] == [("a", True, ("m",)), ("b", True, None)]
    with pytest.raises(ConfigError, match=r"config:2: tenants\[0\]\.extends \(name a\): 'c' is not listed"):
        load_text("tenants:\n- {name: a, extends: c}\n")
    with pytest.raises(ConfigError, match=r"config:2: tenants\[0\]\.extends \(name a\): extends itself"):
        load_text("tenants:\n- {name: a, extends: a}\n")


def test_base_is_watched(tmp_path: Path) -> None:
    """A change of a base is a change of those that extend it; a bad one keeps what was and is not tried again."""
    settings, place = folder(tmp_path, a="name: a\nkey: sk-a\nextends: bases/b.yaml\n")
    put(place, bases__b="models: [m]\n")
    tenants = TenantSource(settings)
    before = tenants.get("a")
    assert before is not None
    assert before.policy.models == ("m",)
    assert not tenants.changed()
    put(place, bases__b="modles: [m, n]\n")
    assert tenants.changed()
    with pytest.raises(ConfigError, match=r"b\.yaml:1: modles"):
        tenants.reload()
    assert tenants.get("a") is before
    assert not tenants.changed()
    (place / "bases" / "b.yaml").unlink()
    assert tenants.changed()
    with pytest.raises(ConfigError, match="there is no file"):
        tenants.reload()
    assert not tenants.changed()
    put(place, bases__b="models: [m, n]\n")
    assert tenants.changed()
    assert tenants.reload().changed == ("a",)
    assert name_of(tenants, "sk-a") == "a"
    after = tenants.get("a")
    assert after is not None
    assert after.policy.models == ("m", "n")
    assert after.digest != before.digest


def test_show(tmp_path: Path) -> None:
    """`twolane policy show` prints tenants laid out, without keys and secrets, and as YAML."""
    rule = {"use": "tests.policies.own_rules:Whim", "options": {"divisor": 3}}
    file = put(tmp_path, a={"name": "a", "preset": "kr-finance", "key": "sk-a", "rules": [rule]}, b={"name": "b"})
    result = CliRunner().invoke(main, ["policy", "show", str(file)])
    assert result.exit_code == 0
    told = yaml.safe_load(result.stdout)
    assert (told["regulated"], told["regions"], told["rules"]) == (True, ["kr"], [rule])
    assert told["key"] == "sha256:" + hashlib.sha256(b"sk-a").hexdigest()
    assert "preset" not in told
    both = list(yaml.safe_load_all(CliRunner().invoke(main, ["policy", "show", str(tmp_path)]).stdout))
    assert [tenant["name"] for tenant in both] == ["a", "b"]
    nobody = CliRunner().invoke(main, ["policy", "show", str(tmp_path), "--tenant", "c"])
    assert (nobody.exit_code, nobody.stderr) == (1, "Error: no tenant is called 'c'; there are: a, b\n")


@given(strategies.restrictions, strategies.restrictions, strategies.facts())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_it_expands_to(tmp_path: Path, base: dict[str, Any], own: dict[str, Any], seen: Facts) -> None:
    """A tenant printed with all that it stands on reads back as the same tenant, with the same decisions."""
    base, own = ({k: v for k, v in written.items() if k != "regulated"} for written in (base, own))
    tenant = read_tenant(put(tmp_path, a={"name": "a", "key": "sk-a", "extends": "b", **own}, b=base))
    again = read_tenant(put(tmp_path, c=tenant.written()))
    assert again.digest == tenant.digest
    assert decide(again.policy, seen) == decide(tenant.policy, seen)


@given(strategies.restrictions, st.lists(st.sampled_from(strategies.MODELS), unique=True), strategies.facts())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_base_only_narrows_a_file_that_restricts_nothing(
    tmp_path: Path, base: dict[str, Any], models: list[str], seen: Facts
) -> None:
    """A file over a base allows at most what it allows alone, where it says nothing of what the base says."""
    base = {key: value for key, value in base.items() if key not in ("models", "regulated")}
    over = read_tenant(put(tmp_path, a={"name": "a", "extends": "b", "models": models}, b=base))
    alone = read_tenant(put(tmp_path, c={"name": "a", "models": models}))
    assert set(decide(over.policy, seen).ranked) <= set(decide(alone.policy, seen).ranked)
