from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from router.cli import main
from tests.router.gateway import KEY, deployment, router, upstream


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


_CASE = "owner: kim, risk: low, approved_by: lee, review_by: 2999-01-01"
BOUND = "use_cases: [{id: a, CASE}, {id: b, CASE}]".replace("CASE", _CASE)
"""Two use cases."""
LABELLED = "labels: {purpose: {VALUE: {}}}\nuse_cases: [{id: u, CASE, labels: [VALUE]}]".replace("CASE", _CASE)
"""A use case that belongs to a value; neither stands without the other."""


@pytest.mark.parametrize(
    ("old", "new", "status", "words"),
    [
        ("models: [x]", "models: [x, y]", 1, ["widens", "newly allowed: model y"]),
        ("models: [x, y]", "models: [x]", 0, ["narrows"]),
        ("transports: [cache, text]", "transports: [text, cache]", 0, ["moves"]),
        ("rpm_limit: 5", "{}", 1, ["rpm_limit: 5 -> not set (widens)"]),
        ("kv: {encrypt: true}", "kv: {encrypt: false}", 1, ["kv.encrypt: true -> false (widens)"]),
        ("audit: {content: none}", "audit: {content: full}", 0, ["narrows"]),
        ("max_budget: 5", "max_budget: 4", 0, ["narrows"]),
        ("transports: [text]\nregulated: true", "transports: [text]\naudit: {content: full}", 1, ["(widens)"]),
        ("audit: {content: full}", "regulated: true", 0, ["regulated: false -> true (narrows)"]),
        (
            "regulated: true",
            "regulated: true\naudit: {hold_stream: false}",
            1,
            ["hold_stream: not set -> false (widens)"],
        ),
        ("audit: {hold_stream: false}", "{}", 0, ["hold_stream: false -> not set (moves)"]),
        ("audit: {retention: 5y}", "audit: {retention: 1d}", 1, ["(widens)"]),
        ("audit: {retention: 5y}", "{}", 0, ["(narrows)"]),
        ("audit: {shadow_text: 1}", "audit: {shadow_text: 0}", 1, ["(widens)"]),
        ("keys: [one]", "keys: [one, two]", 1, ["keys: 0 removed -> 1 added (widens)"]),
        ("keys: [one]", "keys: [two]", 0, ["keys: 1 removed -> 1 added (moves)"]),
        (
            BOUND.replace("id: a", "id: a, keys: [one]"),
            BOUND.replace("id: b", "id: b, keys: [one]"),
            1,
            ["use_cases.keys: 1 bound to a -> to b (widens)"],
        ),
        (
            LABELLED.replace("VALUE", "x"),
            LABELLED.replace("VALUE", "z"),
            1,
            ["newly allowed: model another, purpose: z"],
        ),
        (
            "labels: {data: {closed: {transports: [text]}}}",
            "labels: {data: {closed: {transports: [text]}, open: {}}}",
            1,
            ["labels.data", "newly allowed: model another, data: open"],
        ),
        (
            "models: [x]\nregions: [kr]",
            "models: [x, y]\nregions: [kr, us]",
            1,
            ["newly allowed: model y"],
        ),
        (
            "transports: [text]\nlabels: {data: {open: {transports: [text]}}}",
            "labels: {data: {open: {}}}",
            1,
            ["newly allowed by these together: model another: the cache lane"],
        ),
    ],
)
def test_widening_is_named_and_refused(tmp_path: Path, old: str, new: str, status: int, words: list[str]) -> None:
    """By what becomes possible; with --no-widen the exit status says it, without it never does."""
    lines = ["" if text == "{}" else f"{text}\n" for text in (old, new)]
    before, after = (tenant(tmp_path / side, "a", text) for side, text in zip(("old", "new"), lines, strict=True))
    told = run("diff", before, after, "--no-widen")
    assert told.exit_code == status, told.output
    assert all(word in told.output for word in words), told.output
    assert run("diff", before, after).exit_code == 0


def test_an_added_tenant_widens(tmp_path: Path) -> None:
    """Somebody who could not ask may ask now."""
    tenant(tmp_path / "old", "a")
    tenant(tmp_path / "new", "a")
    tenant(tmp_path / "new", "b")
    assert run("diff", tmp_path / "old", tmp_path / "new", "--no-widen").exit_code == 1
    assert run("diff", tmp_path / "new", tmp_path / "old", "--no-widen").exit_code == 0


async def test_diff_against_the_log_names_who_moves(tmp_path: Path) -> None:
    """Recorded requests are decided under both versions: how many would be refused, and what they took."""
    async with upstream() as up:
        listed = [deployment("x", up), deployment("y", up)]
        async with router(tmp_path, {"model_list": listed, "tenants": [{"name": "a", "key": KEY}]}) as door:
            for model in ("x", "x", "y"):
                assert (await door.post(model=model)).status == 200
    before, after = tenant(tmp_path / "old", "a"), tenant(tmp_path / "new", "a", "models: [x]\n")
    told = run("diff", before, after, "--against", tmp_path / "audit", "--json")
    (entry,) = json.loads(told.output)["tenants"]
    assert entry["replayed"]["requests"] == 3
    assert entry["replayed"]["moved"] == {"text -> refused": 1}
    assert entry["replayed"]["recorded_ms"] > 0
    shown = run("diff", before, after, "--against", tmp_path / "audit").output
    assert "of 3 recorded requests 1 would go elsewhere" in shown
