from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from router.cli import main


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["policy", *map(str, arguments)])


def tenant(folder: Path, name: str, text: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / f"{name}.yaml"
    file.write_text(f"name: {name}\n{text}")
    return file


def test_diff_names_each_changed_key(tmp_path: Path) -> None:
    """Tenant by tenant, key by key, with the old and the new value; keys are counted and never shown."""
    old, new = tmp_path / "old", tmp_path / "new"
    tenant(old, "a", "models: [x]\nkeys: [sk-secret-one]\npairs: {min_gain: 0.01}\n")
    tenant(new, "a", "models: [x, y]\nkeys: [sk-secret-two]\npairs: {min_gain: 0.02}\n")
    tenant(old, "gone")
    tenant(new, "come")
    told = run("diff", old, new)
    assert told.exit_code == 0
    for part in ("a: changed", 'models: ["x"] -> ["x", "y"]', "pairs.min_gain: 0.01 -> 0.02", "keys: 1 removed"):
        assert part in told.output
    assert "gone: removed" in told.output
    assert "come: added" in told.output
    assert "secret" not in told.output


def test_diff_of_the_same_is_nothing(tmp_path: Path) -> None:
    """A version beside itself has no change, as files, as folders and as data."""
    file = tenant(tmp_path, "a", "models: [x]\n")
    assert run("diff", file, tmp_path).output == "nothing changes\n"
    assert json.loads(run("diff", file, file, "--json").output) == {"tenants": []}
