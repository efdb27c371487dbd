"""Backups of groups that regulated tenants may use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from router.cli import main


def entry(group: str, region: str = "kr", kind: str = "litellm_params") -> dict[str, object]:
    params = {"model": "openai/x", "api_base": "http://x/v1", "api_key": "os.environ/HOME"}
    pair = {"cache_params": {"pair": "duo"}}
    told = {"litellm_params": params} if kind == "litellm_params" else pair
    return {"model_name": group, "model_info": {"region": region}, **told}


ONE, TWO, CACHE, ABROAD = [entry("g")], [entry("g"), entry("g")], entry("g", kind="cache"), entry("g", "us")
SPARE = entry("spare")


@pytest.mark.parametrize(
    ("deployments", "fallbacks", "tenant", "backed"),
    [
        (TWO, {}, {}, True),
        (ONE, {}, {}, False),
        ([CACHE], {}, {}, False),
        ([*ONE, CACHE], {}, {}, False),
        ([*ONE, ABROAD], {}, {}, True),
        ([*ONE, ABROAD], {}, {"regions": ["kr"]}, False),
        ([*ONE, SPARE], {"fallbacks": [{"g": ["spare"]}]}, {}, True),
        ([*ONE, SPARE], {"default_fallbacks": ["spare"]}, {}, True),
        ([*ONE, SPARE], {"fallbacks": [{"g": ["spare"]}]}, {"models": ["g"]}, False),
        ([*ONE, SPARE], {"fallbacks": [{"g": ["g"]}]}, {}, False),
        ([CACHE, SPARE], {"fallbacks": [{"g": ["spare"]}]}, {}, False),
        (ONE, {}, {"regulated": False}, True),
        (ONE, {}, {"models": ["other"]}, True),
        ([*ONE, SPARE, SPARE], {}, {"models": ["spare"]}, True),
    ],
)
def test_check(
    tmp_path: Path,
    deployments: list[dict[str, object]],
    fallbacks: dict[str, object],
    tenant: dict[str, object],
    backed: bool,
) -> None:
    """`twolane check` ends with 1 exactly where a group lacks two text deployments or a fallback the tenant may use."""
    (tmp_path / "tenants").mkdir()
    written = {"name": "bank", "key": "sha256:" + "0" * 64, "models": ["g", "spare"], "regulated": True, **tenant}
    # The fallback group itself is no concern here.
    spare = [entry("spare")] if any(d["model_name"] == "spare" for d in deployments) else []
    config = {
        "model_list": [*deployments, *spare],
        "pairs": [{"name": "duo", "sharer": {"model": "x"}, "receiver": {"model": "x"}}],
        "router_settings": fallbacks,
        "tenants": "tenants",
    }
    (tmp_path / "tenants" / "bank.yaml").write_text(yaml.safe_dump(written, sort_keys=False))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    result = CliRunner().invoke(main, ["check", str(tmp_path / "c.yaml")])
    assert result.exit_code == (0 if backed else 1), result.output
    if not backed:
        assert "bank.yaml:" in result.stderr
        assert "regulated tenant 'bank' needs a backup for group 'g'" in result.stderr
    told = json.loads(CliRunner().invoke(main, ["check", str(tmp_path / "c.yaml"), "--json"]).stdout)
    assert (told["ok"], bool(told["problems"])) == (backed, not backed)


def test_listed_tenant_and_lines(tmp_path: Path) -> None:
    """The problem names the line that lets the tenant in, also of a tenant in the configuration itself."""
    config = tmp_path / "c.yaml"
    config.write_text(
        yaml.safe_dump({"model_list": ONE}) + "tenants:\n- name: bank\n  regulated: true\n  models: [g]\n"
    )
    line = config.read_text().splitlines().index("  models: [g]") + 1
    result = CliRunner().invoke(main, ["check", str(config)])
    assert result.exit_code == 1
    assert f"c.yaml:{line}: tenants[0].models (name bank): regulated tenant" in result.stderr
