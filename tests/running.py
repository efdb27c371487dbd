"""A real router process for tests: `twolane serve` on a config written for the test."""

from __future__ import annotations

import contextlib
import json
import os
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
from typing import Any

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Router:
    """A running router."""

    base: str
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str, key: str | None = None) -> Any:
        """GET a JSON page; an error status is returned as its body too."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            with urllib.request.urlopen(urllib.request.Request(self.base + path, headers=headers), timeout=10) as got:
                return json.loads(got.read())
        except urllib.error.HTTPError as error:
            return json.loads(error.read())

    def post(self, path: str, body: object, key: str | None = None) -> Any:
        """POST JSON; an error status is returned as its body too."""
        return self.request("POST", path, body, key)[2]

    def request(self, method: str, path: str, body: object, key: str | None = None) -> tuple[int, dict[str, str], Any]:
        """Status, headers in lower case, and the JSON body."""
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        asked = urllib.request.Request(self.base + path, json.dumps(body).encode(), headers, method=method)
        try:
            got = urllib.request.urlopen(asked, timeout=30)
        except urllib.error.HTTPError as error:
            got = error
        with got:
            return got.status, {name.lower(): value for name, value in got.headers.items()}, json.loads(got.read())


@contextlib.contextmanager
def serving(folder: Path, config: str, *, seconds: float = 90) -> Iterator[Router]:
    """`twolane serve` in `folder`, ready when its workers are; ended with all it started."""
    port = free_port()
    (folder / "config.yaml").write_text(config)
    log = folder / "router.log"
    command = [sys.executable, "-m", "router.cli", "serve", "--config", "config.yaml", "--port", str(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=out, stderr=out
        )
    router = Router(f"http://127.0.0.1:{port}", process, log)
    try:
        until_ready(router, seconds)
        yield router
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def until_ready(router: Router, seconds: float) -> None:
    """Wait for /health/readiness; fails with the router's log."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if router.process.poll() is not None:
            raise AssertionError(f"the router ended: {router.log.read_text()}")
        with contextlib.suppress(OSError):
            if router.get("/health/readiness").get("status") == "healthy":
                return
        time.sleep(0.1)
    raise AssertionError(f"not ready within {seconds:g} s: {router.log.read_text()}")
