"""What a request costs in the router, beside LiteLLM: `python -m benchmarks.gateway [--litellm BIN] [--scenarios ...]`.

One router process with keys, policy, limits, metrics, decision records and audit on; one fake upstream and one load
generator (two small C programs, built with `cc` into a temporary folder); loopback only. Rounds are interleaved and the
medians are shown: trust CPU per request and the ratios within one run, for on a shared machine all else moves.

LiteLLM is measured beside it where `--litellm` names its proxy's executable (of a virtual environment of its own:
`pip install 'litellm[proxy]==1.106.12'`), with its production settings and one worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

HERE = Path(__file__).parent
KEY = "sk-bench-0123456789"
BODY = {
    "model": "stub",
    "messages": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Write one sentence about a quick brown fox, please."},
    ],
    "temperature": 0.7,
    "max_tokens": 64,
}
CHUNKS = 64
SCENARIOS: dict[str, tuple[bool, int, dict[str, int]]] = {
    "c1": (False, 1, {}),
    "c16": (False, 16, {}),
    "c64": (False, 64, {}),
    "s16": (True, 16, {"chunks": CHUNKS}),
    "s32paced": (True, 32, {"chunks": CHUNKS, "interval_us": 20_000, "delay_us": 20_000}),
}
"""Streamed, connections, settings of the upstream. In `s16` events share a read, in `s32paced` each comes alone."""


@dataclass
class Target:
    """One gateway that runs, and what was measured of it."""

    name: str
    port: int
    process: psutil.Process
    ready_s: float
    rows: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    rss: int = 0

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


def main() -> int:
    """Exit status 1 where a request failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gateway", description=__doc__)
    parser.add_argument("--litellm", help="the `litellm` executable of a virtual environment of its own")
    parser.add_argument("--python", default=sys.executable, help="runs the router; one without extras starts sooner")
    parser.add_argument("--scenarios", default="c1,c16,c64,s16,s32paced", help=f"of {','.join(SCENARIOS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one round; in two LiteLLM ends no paced stream")
    told = parser.parse_args()
    if shutil.which("cc") is None:
        print("no C compiler (cc) is installed: nothing was measured")
        return 0
    names = told.scenarios.split(",")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        build = Path(folder)
        upstream = stack.enter_context(_upstream(build))
        targets = [stack.enter_context(_router(build, upstream, told.python))]
        if told.litellm:
            targets.append(stack.enter_context(_litellm(build, upstream, told.litellm)))
        for target in targets:
            _load(build, target, SCENARIOS["c16"], 1.0)
        for name in names:
            _set(upstream, SCENARIOS[name][2])
            for round in range(told.rounds):
                for target in targets if round % 2 == 0 else targets[::-1]:
                    row = _load(build, target, SCENARIOS[name], told.seconds)
                    target.rows.setdefault(name, []).append(row)
                    target.rss = max(target.rss, target.process.memory_info().rss)
        print(_table(names, targets))
        return int(any(row["bad"] for t in targets for rows in t.rows.values() for row in rows))


def _table(names: list[str], targets: list[Target]) -> str:
    lines = ["| scenario | gateway | requests/s | CPU µs per request | CPU µs per event | p50 ms | p99 ms | bad |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for name in names:
        for target in targets:
            of = {key: statistics.median(row[key] for row in target.rows[name]) for key in target.rows[name][0]}
            event = f"{of['cpu_us'] / CHUNKS:.1f}" if SCENARIOS[name][0] else ""
            cells = [f"{of['rps']:.0f}", f"{of['cpu_us']:.0f}", event, f"{of['p50_ms']:.1f}", f"{of['p99_ms']:.1f}"]
            lines.append(f"| {' | '.join([name, target.name, *cells, format(of['bad'], '.0f')])} |")
    lines += [f"\n{t.name}: ready in {t.ready_s:.2f} s, RSS {t.rss / 2**20:.0f} MiB at most" for t in targets]
    if len(targets) == 2:
        ours, theirs = targets
        for name in names:
            pairs = [(a, b) for a, b in zip(ours.rows[name], theirs.rows[name], strict=True) if b["rps"]]
            if not pairs:
                lines.append(f"{name}: {theirs.name} ended no request")
                continue
            faster = statistics.median(a["rps"] / b["rps"] for a, b in pairs)
            lighter = statistics.median(b["cpu_us"] / a["cpu_us"] for a, b in pairs)
            lines.append(f"{name}: {faster:.0f} times the requests/s, 1/{lighter:.0f} of the CPU")
    return "\n".join(lines)


def _pinned(cores: str, command: list[str]) -> list[str]:
    """The gateway has one core, upstream and load share another, where there are two."""
    return ["taskset", "-c", cores, *command] if (os.cpu_count() or 1) > 1 and shutil.which("taskset") else command


@contextlib.contextmanager
def _upstream(build: Path) -> Iterator[str]:
    for name in ("stub", "load"):
        subprocess.run(["cc", "-O2", "-o", build / name, HERE / f"{name}.c", "-lm"], check=True)
    for stream in (False, True):
        (build / f"body_{stream}.json").write_text(json.dumps({**BODY, "stream": stream}))
    port = _free_port()
    with _running(_pinned("0", [str(build / "stub"), "--port", str(port)]), build, {}):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def _router(build: Path, upstream: str, python: str) -> Iterator[Target]:
    config = build / "router.yaml"
    params = {"model": "openai/stub", "api_base": f"{upstream}/v1", "api_key": "sk-upstream"}
    config.write_text(
        yaml.safe_dump(
            {
                "model_list": [
                    {"model_name": "stub", "litellm_params": params},
                    {"model_name": "other", "litellm_params": params},
                ],
                "general_settings": {"master_key": "sk-master-0123456789"},
                "tenants": [
                    {
                        "name": "bench",
                        "key": KEY,
                        "models": ["stub"],
                        "rpm_limit": 10**9,
                        "tpm_limit": 10**12,
                        "max_parallel_requests": 10_000,
                    }
                ],
                "audit": {"dir": str(build / "audit")},
                "state_dir": str(build / "state"),
            }
        )
    )
    tree = HERE.parents[1]
    # As pip does when it installs: else the start is mostly the compiler's.
    packages = [str(tree / package) for package in ("router", "policies", "workers", "shapes")]
    subprocess.run([python, "-m", "compileall", "-q", *packages], check=True)
    arguments = ["-m", "router.cli", "serve", "--config", str(config), "--port"]
    with _gateway("TwoLane", build, [python, *arguments], {"PYTHONPATH": str(tree)}) as target:
        yield target


@contextlib.contextmanager
def _litellm(build: Path, upstream: str, executable: str) -> Iterator[Target]:
    config = build / "litellm.yaml"
    params = {"model": "openai/stub", "api_base": f"{upstream}/v1", "api_key": "sk-upstream"}
    config.write_text(
        yaml.safe_dump(
            {
                "model_list": [{"model_name": "stub", "litellm_params": params}],
                "litellm_settings": {"json_logs": True, "num_retries": 0, "telemetry": False},
                "router_settings": {"num_retries": 0},
                "general_settings": {"master_key": KEY},
            }
        )
    )
    command = [executable, "--config", str(config), "--host", "127.0.0.1", "--num_workers", "1", "--port"]
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"}
    with _gateway("LiteLLM", build, command, quiet | {"NO_DOCS": "True"}) as target:
        yield target


@contextlib.contextmanager
def _gateway(name: str, build: Path, command: list[str], env: dict[str, str]) -> Iterator[Target]:
    port, began = _free_port(), time.perf_counter()
    with _running(_pinned("1", [*command, str(port)]), build, env) as process:
        while not _alive(port):
            if process.poll() is not None or time.perf_counter() - began > 120:
                raise SystemExit(f"{name} does not answer")
            time.sleep(0.01)
        yield Target(name, port, psutil.Process(process.pid), time.perf_counter() - began)


def _alive(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def _running(command: list[str], build: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with (build / f"{Path(command[-3]).name}.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log, cwd=build)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()


def _load(build: Path, target: Target, scenario: tuple[bool, int, dict[str, int]], seconds: float) -> dict[str, float]:
    stream, connections, _ = scenario
    before = target.cpu_s()
    command = ["--port", target.port, "--body", build / f"body_{stream}.json", "-c", connections, "-d", seconds]
    told: dict[str, Any] = json.loads(
        subprocess.run(
            _pinned("0", [str(build / "load"), *map(str, command), "-H", f"Authorization: Bearer {KEY}"]),
            check=True,
            capture_output=True,
        ).stdout
    )
    spent = target.cpu_s() - before
    lost = stream and told["ok"] and told["chunks_min"] < CHUNKS
    return {
        "rps": told["rps"],
        "cpu_us": spent / max(1, told["issued"]) * 1e6,
        "p50_ms": told["latency_us"]["p50"] / 1e3,
        "p99_ms": told["latency_us"]["p99"] / 1e3,
        "bad": told["bad"] + told["socket_errors"] + int(bool(lost)),
    }


def _set(upstream: str, wanted: dict[str, int]) -> None:
    settings = {"delay_us": 0, "chunks": CHUNKS, "interval_us": 0, "fail_every": 0, **wanted}
    query = "&".join(f"{name}={value}" for name, value in settings.items())
    urllib.request.urlopen(f"{upstream}/_ctl?{query}", timeout=5).close()


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
