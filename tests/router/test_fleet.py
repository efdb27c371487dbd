"""Supervision of real worker processes with a tiny model."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from router.fleet import Fleet, failures_after
from tests.tiny import make_model
from workers.client import Registry
from workers.config import RedisConfig, WorkerConfig
from workers.embedded import EmbeddedRedis

CONFIG = """
model_list: [{{model_name: m, local_params: {{model: tiny}}}}]
models: [{{name: tiny, model: {model}}}]
workers: [{{name: w, spawn: true, models: [tiny], threads: 1}}]
redis: {{url: "{redis}"}}
store: {{dir: {state}/kv}}
"""


async def until(true: Callable[[], bool], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.05)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    model = make_model(tmp_path / "model")
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(model=model, redis="unix:///nowhere/redis.sock", state=tmp_path))
    workers = [WorkerConfig(name="w", spawn=True, models=("tiny",))]
    running = Fleet(workers, config_file=config, folder=tmp_path / "run", registry=None)
    await running.start()
    running.spawned[0].silent_s = 2.0
    yield running
    await running.close()


def ready(fleet: Fleet, *, not_pid: int = 0) -> Callable[[], bool]:
    return lambda: any(w.pid != not_pid and w.models and w.models[0].ready for w in fleet.workers())


async def test_a_worker_is_started_killed_hung_and_each_time_replaced(fleet: Fleet) -> None:
    """It serves; after kill -9 and after SIGSTOP another process serves, and none is listed in between."""
    await until(ready(fleet))
    for fault in (signal.SIGKILL, signal.SIGSTOP):
        pid = fleet.workers()[0].pid
        os.kill(pid, fault)
        await until(lambda: not fleet.workers(), 10)
        await until(ready(fleet, not_pid=pid))
        transport = httpx.AsyncHTTPTransport(uds=fleet.workers()[0].url.removeprefix("unix:"))
        async with httpx.AsyncClient(transport=transport, base_url="http://w", timeout=20) as client:
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert fleet.spawned[0].restarts == 2


@pytest.mark.parametrize(
    ("before", "status", "lived", "after"),
    [(0, -9, 5.0, 1), (3, 1, 5.0, 4), (3, -9, 3600.0, 0), (3, 0, 5.0, 0), (0, 0, 3600.0, 0)],
)
def test_only_early_ends_that_nobody_asked_for_count(before: int, status: int, lived: float, after: int) -> None:
    """A crash soon after the start lengthens the pause; an orderly end and a long life do not."""
    assert failures_after(before, status, lived) == after


async def test_a_worker_ends_with_its_router(fleet: Fleet) -> None:
    """After close the process is gone."""
    await until(ready(fleet))
    pid = fleet.workers()[0].pid
    await fleet.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_foreign_workers_are_found_in_the_registry(tmp_path: Path) -> None:
    """A heartbeat in Redis is a worker of the fleet, and when it is withdrawn it is none."""
    from tests.workers.test_client import state

    with EmbeddedRedis(tmp_path / "redis") as server:
        config = RedisConfig(url=server.url)
        fleet = Fleet([], config_file=None, folder=tmp_path, registry=Registry(config))
        await fleet.start()
        worker = Registry(config)
        await worker.publish(state("far"))
        await until(lambda: [w.name for w in fleet.workers()] == ["far"], 10)
        await worker.withdraw(state("far"))
        await until(lambda: not fleet.workers(), 10)
        await worker.close()
        await fleet.close()
