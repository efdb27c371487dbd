"""The README's commands, run as they stand there (on another port), and what it shows checked against the tree."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import httpx
import pytest
import yaml

from router.settings import load_text
from tests.running import ROOT, free_port

README = (ROOT / "README.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    """Every shell command, continued lines joined."""
    text = "\n".join(blocks("sh")).replace("\\\n", " ")
    return [line.split("  #")[0].strip() for line in text.splitlines() if line.strip()]


def test_every_file_it_names_is_there() -> None:
    """Links lead somewhere."""
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("text", blocks("yaml"))
def test_every_config_it_shows_is_one(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each YAML block is read by the product, beside what it refers to."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-x")
    whole = yaml.safe_load((ROOT / "config.example.yaml").read_text()) if "smol-twin" in text else {}
    for key, value in yaml.safe_load(text).items():
        whole[key] = value
    whole.pop("tenants", None)
    load_text(yaml.safe_dump(whole), folder=ROOT)


@pytest.mark.real_model
@pytest.mark.timeout(600)
def test_its_commands_do_what_it_says(tmp_path: Path) -> None:
    """`make run` serves both models on both lanes; every other command ends well; `make demo` shows three tenants."""
    assert commands()[:2] == ["make run", "make test"]
    port = free_port()
    state = tmp_path / "state"
    env = {
        **os.environ,
        "TWOLANE_STATE_DIR": str(state),
        "TWOLANE_STORE__DIR": str(state / "kv"),
        "TWOLANE_AUDIT__DIR": str(state / "audit"),
    }
    with (tmp_path / "run.log").open("wb") as log:
        run = subprocess.Popen(
            ["make", "run", f"PORT={port}"], cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_ready(port, run, tmp_path / "run.log")
        for command in commands():
            if command in {"make run", "make test"}:
                continue
            done = subprocess.run(
                [shutil.which("bash") or "bash", "-c", command.replace(":4000", f":{port}")],
                cwd=ROOT,
                env={**env, "PORT": str(port)},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
            assert '"error"' not in done.stdout, f"{command}: {done.stdout}"
            if command == "make demo":
                assert_demo(done.stdout)
        assert_text_answers_without_the_cache_worker(f"http://127.0.0.1:{port}")
    finally:
        os.killpg(run.pid, signal.SIGTERM)
        run.wait(timeout=60)


def assert_demo(shown: str) -> None:
    """Three tenants, both lanes, the regulated one on text; the second answer of each reuses KV."""
    rows = [line.split() for line in shown.splitlines() if line.startswith(("assistant", "reader"))]
    assert {(row[0], row[1]) for row in rows} >= {("assistant", "lab"), ("assistant", "bank"), ("assistant", "kiosk")}
    lanes = {(row[0], row[1]): row[2] for row in rows}
    assert lanes["assistant", "lab"] == "cache"
    assert lanes["assistant", "bank"] == "text"
    assert lanes["reader", "lab"] == "cache"
    assert sum(int(row[4].split("/")[0]) > 0 for row in rows if "/" in row[4]) >= len(rows) // 2


def assert_text_answers_without_the_cache_worker(base: str) -> None:
    """Killed, the cache lane's worker is missed by nobody whom policy allows text; then it is back."""
    asked = itertools.count()

    def lane() -> str:
        # Each time another conversation: one that has begun stays where it is.
        hello = [{"role": "user", "content": f"Hello, for the time number {next(asked)}!"}]
        ask = {"model": "assistant", "messages": hello, "max_tokens": 4}
        answer = httpx.post(
            f"{base}/v1/chat/completions", json=ask, headers={"authorization": "Bearer sk-lab"}, timeout=60
        )
        assert answer.status_code == 200, answer.text
        return answer.headers["x-twolane-transport"]

    assert lane() == "cache"
    workers = {w["name"]: w for w in httpx.get(f"{base}/admin/workers").json()["data"]}
    os.kill(workers["cache"]["pid"], signal.SIGKILL)
    assert lane() == "text"
    deadline = time.monotonic() + 120
    while lane() != "cache":
        assert time.monotonic() < deadline
        time.sleep(1)


def wait_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/readiness", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"not ready: {log.read_text()}")
