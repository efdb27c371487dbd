"""docs/pairs.md: the commands from two models to a verified pair, run as they stand there, on tiny models."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from router.cli import main
from tests.tiny import make_model
from workers import pairs

PAGE = (Path(__file__).parents[1] / "docs" / "pairs.md").read_text()


def commands() -> list[list[str]]:
    """Those of the first section that leads from two models to a pair."""
    section = PAGE.split("## From two models to a verified pair")[1].split("\n## ")[0]
    lines = [line for block in re.findall(r"```\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("twolane ")]


def test_from_two_models_to_a_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command ends well; of random models nothing is proven, and `verify` says so by its exit status."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path / "cache"))
    for name, seed in (("big-model", 0), ("small-model", 1)):
        make_model(Path(name), seed=seed)
    rows = [{"context": f"Item {i} is tide {i}.", "question": "What is it?", "answer": f"tide {i}"} for i in range(8)]
    for name in ("train.jsonl", "test.jsonl"):
        Path(name).write_text("\n".join(map(json.dumps, rows)))
    run = commands()
    assert [" ".join(command[:2]) for command in run] == [
        "pair check", "pair train", "pair verify", "pair keygen", "pair export", "pair versions",
    ]  # fmt: skip
    for command in run:
        result = CliRunner().invoke(main, command)
        expected = 1 if command[1] == "verify" else 0
        assert result.exit_code == expected, (command, result.output)
    report = pairs.read_report(Path("my-pair"))
    assert report is not None
    assert (report.verdict, report.n) == ("unproven", 8)
    assert len(list(Path("published").rglob("signature.json"))) == 1
