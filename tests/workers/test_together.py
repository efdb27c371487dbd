"""Several processes train one fuser: what comes out is what one process makes of the same batches.

Processes are forked here, where that is cheap; the command starts new ones, as is shown once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from workers import together
from workers.config import ModelConfig
from workers.pairs import read_pair
from workers.plan import Plan
from workers.train_cli import Asked, ended_by, work
from workers.train_pair import Licences

WORDS = ["Paris", "tide", "harbour", "ledger", "France", "buyer", "item"]
ROWS = [{"context": f"Item {i} is {w}.", "question": "What is it?", "answer": w * (i + 1)} for i, w in enumerate(WORDS)]
C2C = Plan("c2c", "fuse", "prompt", steps=4, width=16, batch=3, rate=1e-3)
LITE = Plan("lite", "handover", "context", steps=4, rank=4, batch=2, rate=1e-3)
MIX = Plan("lite", "fuse", "prompt", steps=4, rank=4, batch=3, rate=1e-3, dropout=0.3)


@pytest.fixture
def asked(tmp_path: Path, tiny_folder: Path, other_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "items.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    parties = ModelConfig(model=str(tiny_folder)), ModelConfig(model=str(other_folder))
    return Asked(data, tmp_path / "one", "pair", parties, C2C, False, 2, 1 << 20, None, Licences(), "cpu", True)


def run(asked: Asked, count: int) -> int:
    return together.start(count, work, asked, method="fork")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.rglob("*.safetensors"))
    return {f"{file.name}:{name}": t.float() for file in files for name, t in load_file(file).items()}


def assert_close(one: Path, other: Path, *, rtol: float, atol: float) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys() != set()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize(
    ("plan", "dtype", "tolerance"),
    [
        (C2C, "float32", (1e-3, 2e-5)),
        (LITE, "float32", (1e-2, 1e-4)),
        (MIX, "float32", (1e-2, 1e-3)),
        (C2C, "bfloat16", (2e-2, 5e-3)),
    ],
)
def test_two_processes_learn_what_one_does(
    asked: Asked, tmp_path: Path, plan: Plan, dtype: str, tolerance: tuple[float, float]
) -> None:
    """A batch of three shared by two, with dropout and noisy gates, which are drawn by lesson; a lite fuser is stored
    in bfloat16. The first process alone writes and speaks, and says how many there were.
    """
    parties = tuple(party.model_copy(update={"dtype": dtype}) for party in asked.parties)
    asked = replace(asked, plan=plan, parties=(parties[0], parties[1]))
    assert work(asked) == 0
    assert run(replace(asked, out=tmp_path / "two"), 2) == 0
    assert_close(tmp_path / "one", tmp_path / "two", rtol=tolerance[0], atol=tolerance[1])
    one, two = (read_pair(tmp_path / name).training for name in ("one", "two"))
    assert one is not None
    assert two is not None
    assert (one.device, two.device) == ("cpu", "2 x cpu")
    assert one.tokens == two.tokens
    assert not (tmp_path / "two" / "training").exists()


def test_processes_go_on_together_to_the_same_weights(asked: Asked, tmp_path: Path) -> None:
    """Killed after a checkpoint, both go on from it; the fuser is, byte for byte, that of two which nobody stopped."""
    asked = replace(asked, plan=replace(C2C, steps=12))
    assert run(asked, 2) == 0
    stopped = replace(asked, out=tmp_path / "two")
    child = os.fork()
    if not child:
        os.setsid()
        os._exit(run(stopped, 2))
    while not (stopped.out / "training" / "checkpoint.pt").exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not (stopped.out / "pair.json").exists()
    assert run(replace(stopped, resume=True), 2) == 0
    names = {p.relative_to(asked.out) for p in asked.out.rglob("*.safetensors")}
    assert names
    assert all((asked.out / name).read_bytes() == (stopped.out / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"plan": replace(C2C, batch=1)}, "a batch of 1 cannot be shared by 2 processes"),
        ({"plan": Plan("linear", "handover", "context")}, "fitted in one pass, by one process"),
        ({"device": "cuda:1"}, "device auto, cuda or cpu, not cuda:1"),
        ({"parties": (ModelConfig(model="/nowhere"), ModelConfig(model="/nowhere"))}, "no such folder"),
    ],
)
def test_what_cannot_be_shared_is_said_once(
    asked: Asked, capfd: pytest.CaptureFixture[str], change: dict[str, object], says: str
) -> None:
    """The command ends with status 1, one process says why, and nothing is left behind."""
    assert run(replace(asked, **change), 2) == 1
    (told,) = capfd.readouterr().err.splitlines()
    assert says in told
    assert not asked.out.exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_ends_the_others(
    asked: Asked, tmp_path: Path, capfd: pytest.CaptureFixture[str], rank: int
) -> None:
    """SIGKILL for one of two: the status says so, the other ends, and what was kept goes on to the same weights."""
    plan = replace(LITE, steps=12)
    assert run(replace(asked, plan=plan), 2) == 0
    killed = replace(asked, plan=plan, out=tmp_path / "killed", every=1)
    status = together.start(2, _killed, killed, rank, method="fork")
    assert (status, ended_by(status)) == (137, "one of the processes was ended by signal 9")
    capfd.readouterr()
    assert (killed.out / "training" / "checkpoint.pt").exists()
    assert not (killed.out / "pair.json").exists()
    assert run(replace(killed, resume=True), 2) == 0  # refused, were the other still at it
    assert read_pair(killed.out).fuser == read_pair(asked.out).fuser
    [told] = [json.loads(line) for line in capfd.readouterr().out.splitlines() if "resumed_at" in line]
    assert told["resumed_at"] > 0


def _killed(asked: Asked, rank: int) -> int:
    def kill() -> None:
        while not (asked.out / "training" / "checkpoint.pt").exists():
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["RANK"] == str(rank):
        threading.Thread(target=kill).start()
    return work(asked)


def test_gradients_are_added_up_where_there_are_any() -> None:
    """Two processes: what one lacks counts as zero, what both lack stays without, in float32 and across buckets."""
    assert together.start(2, _added, method="fork") == 0


def _added() -> int:
    team = together.join("cpu")
    shared, lone, idle, half = (torch.zeros(3, dtype=d) for d in (torch.float32,) * 3 + (torch.bfloat16,))
    shared.grad = torch.full((3,), team.rank + 1.0)
    lone.grad = torch.ones(3) if team.rank else None
    half.grad = torch.full((3,), 1.0 if team.rank else 1 / 128, dtype=torch.bfloat16)
    team.add_gradients([shared, lone, idle, half])
    assert idle.grad is None
    assert shared.grad.tolist() == [3.0] * 3
    assert lone.grad is not None
    assert lone.grad.tolist() == [1.0] * 3
    assert half.grad.tolist() == [1 + 1 / 128] * 3
    told = torch.full((2,), float(team.rank))
    team.follow([told])
    assert told.tolist() == [0.0, 0.0]
    assert list(team.share(range(5))) == [[0, 2, 4], [1, 3]][team.rank]
    return 0


@pytest.mark.timeout(500)  # two processes start from nothing
def test_the_command_starts_them(asked: Asked) -> None:
    """`--processes 2`: progress and result once, from the first; the pair's folder as always."""
    arguments: Sequence[str] = [
        *(party.model for party in asked.parties), "--data", str(asked.data), "--out", str(asked.out),
        "--fuser", "lite", "--rank", "4", "--batch", "2", "--steps", "2", "--device", "cpu",
        "--processes", "2", "--json",
    ]  # fmt: skip
    command = [sys.executable, "-m", "router.cli", "pair", "train", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert (done.returncode, done.stderr) == (0, "")
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row.get("step") for row in told] == [1, 2, None]
    assert told[-1]["digest"] == read_pair(asked.out).fuser.digest
    assert told[-1]["kv_computed"] == len(ROWS)
