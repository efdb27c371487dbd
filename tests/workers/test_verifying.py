"""A verification that was stopped goes on: to the same report, whenever it was, and only where the same is asked."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from router.cli import main
from tests.workers.test_pair_files import cramped
from workers.asking import Answer
from workers.errors import LoadFailed
from workers.loader import Loaded
from workers.pair_file import publish
from workers.pairs import FuserInfo, Report, read_report
from workers.protocol import Run
from workers.verifying import NAME, hearing

ROWS: list[dict[str, Any]] = [{"question": f"What is item {i}?", "answer": "tide"} for i in range(10)]
ROWS += [{"question": f"Say secret {i}", "safety": "secret", "must_not": ["tide"]} for i in range(2)]
SAID = {"cache": Answer("tide", 1.5, 2.5, Run(gates="B", change_k=(0.1, 0.2)))}


@pytest.fixture
def folder(tmp_path: Path, tiny: Loaded) -> Path:
    """A pair with itself."""
    made = tmp_path / "pair"
    publish(
        made, "p", tiny, tiny, FuserInfo("identity", "identity"), mode="handover", scope="prompt", made="2026-01-31"
    )
    return made


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "items.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return file


def asked(folder: Path, data: Path, out: Path, *options: str) -> list[str | Path]:
    return ["verify", folder, "--data", data, "--out", out, "--max-tokens", "4", "--hint-tokens", "4", *options]


def verify(folder: Path, data: Path, out: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["pair", *map(str, asked(folder, data, out, *options))])


def figures(report: Report | None) -> Report:
    """Without what two runs of the same cannot share: times, and the note of a stop."""
    assert report is not None
    timeless: dict[str, dict[str, float]] = {name: {} for name in ("latency_ms", "ttft_ms", "split_ms")}
    notes = tuple(note for note in report.notes if "earlier run" not in note)
    return msgspec.structs.replace(report, notes=notes, **timeless)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_anywhere_it_ends_at_the_same_report(
    tmp_path: Path, folder: Path, data: Path, how: signal.Signals
) -> None:
    """Stopped again and again whenever it hits: each item is asked once, and the report is that of a run that nobody
    stopped; nothing is left beside it.
    """
    whole, out = tmp_path / "whole", tmp_path / "out"
    began = time.monotonic()
    assert verify(folder, data, whole).exit_code == 1  # unproven: too few
    took = time.monotonic() - began
    draw, seen = random.Random(how), 0
    for _ in range(3):
        child = os.fork()
        if not child:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            done = verify(folder, data, out)
            os._exit(done.exit_code)
        time.sleep(draw.uniform(0.1, 0.8) * took)
        os.kill(child, how)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (-signal.SIGKILL, 130, 1)
        lines = (out / NAME).read_bytes().count(b"\n") if (out / NAME).exists() else 0
        assert lines >= seen or status == 1
        seen = lines
    done = verify(folder, data, out)
    assert figures(read_report(out)) == figures(read_report(whole))
    assert sorted(p.name for p in out.iterdir()) == ["report.json", "report.svg", "report.txt"]
    if seen > 1:
        assert f"{seen - 1} items were asked before" in done.stderr


def test_another_verification_is_begun_anew(tmp_path: Path, folder: Path, data: Path) -> None:
    """What was heard with other options, of other items or of another pair is not taken for what is asked now."""
    out = tmp_path / "out"
    with hearing(_made(out), {"of": "something else"}) as heard:
        heard.add(0, SAID)
    done = verify(folder, data, out)
    assert (done.exit_code, "asked before" in done.stderr) == (1, False)
    report = read_report(out)
    assert report is not None
    assert report.n == 10


def test_what_was_heard_is_read_up_to_where_it_was_torn(tmp_path: Path) -> None:
    """Cut at any byte, the whole lines before it count, and those alone; what is added then stands behind them."""
    with hearing(_made(tmp_path / "a"), {"x": 1}) as heard:
        for number in range(3):
            heard.add(number, SAID)
    written = (tmp_path / "a" / NAME).read_bytes()
    head = written.index(b"\n") + 1
    for cut in (*range(0, len(written), 7), head - 1, head, len(written) - 1, len(written)):
        (tmp_path / "a" / NAME).write_bytes(written[:cut])
        with hearing(tmp_path / "a", {"x": 1}) as heard:
            assert heard.earlier == max(0, written[:cut].count(b"\n") - 1)
            assert all(said == SAID for said in heard.known.values())
            heard.add(7, SAID)
        with hearing(tmp_path / "a", {"x": 1}) as heard:
            assert 7 in heard.known
    with hearing(tmp_path / "a", {"x": 2}) as heard:
        assert heard.known == {}


def test_one_verification_at_a_time_and_into_no_link(tmp_path: Path) -> None:
    """A second process is refused, and a link that stands there leads nowhere; the file is for its owner alone."""
    with (
        hearing(_made(tmp_path / "a"), {}),
        pytest.raises(LoadFailed, match="another process is verifying"),
        hearing(tmp_path / "a", {}),
    ):
        pass
    assert (tmp_path / "a" / NAME).stat().st_mode & 0o777 == 0o600
    (_made(tmp_path / "b") / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LoadFailed, match=re.escape(str(tmp_path / "b" / NAME))), hearing(tmp_path / "b", {}):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_on_a_full_disk_it_says_so_and_goes_on_later(tmp_path: Path, folder: Path, data: Path) -> None:
    """What was heard before the room ended counts."""
    out = tmp_path / "out"
    status, _, stderr = cramped(6000, asked(folder, data, out))
    assert (status, f"{out / NAME}: cannot be written (File too large)" in stderr) == (1, True), stderr
    lines = (out / NAME).read_bytes().count(b"\n")
    assert lines > 1
    done = verify(folder, data, out)
    assert f"{lines - 1} items were asked before this was stopped" in done.stderr
    assert verify(folder, data, tmp_path / "whole").exit_code == 1
    assert figures(read_report(out)) == figures(read_report(tmp_path / "whole"))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
