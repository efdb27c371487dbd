"""The workers that run now, for a command beside a router; and workers of its own where none does.

A stand-in is announced to nobody: only the command that started it knows its socket, and it stores no KV.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import msgspec

from router.settings import Settings
from workers.client import Registry, read_state
from workers.config import RedisConfig, WorkerConfig
from workers.embedded import EmbeddedRedis
from workers.protocol import WorkerState

_ASK_S = 2.0
_LOAD_S = 600.0


class NoWorker(Exception):
    """A stand-in did not come up; the message says which and why."""


async def running(settings: Settings) -> list[WorkerState]:
    """Workers that answer on the sockets of the configuration, and those in the registry."""
    states = await asyncio.gather(*(_state(url) for url in _addresses(settings)))
    found = {state.name: state for state in states if state is not None}
    for state in await _registered(settings):
        found.setdefault(state.name, state)
    return list(found.values())


@contextlib.asynccontextmanager
async def stand_ins(settings: Settings, config: Path, wanted: Iterable[str]) -> AsyncIterator[list[WorkerState]]:
    """Start the configured workers of these names and wait until they have loaded. Raises NoWorker."""
    names = set(wanted)
    with tempfile.TemporaryDirectory(prefix="twolane-") as folder:
        processes: list[asyncio.subprocess.Process] = []
        try:
            states = []
            for worker in (w for w in settings.workers if w.name in names):
                url = f"unix:{folder}/{len(processes)}.sock"
                processes.append(await _start(config, worker, url))
                states.append(await _loaded(worker, url, processes[-1]))
            yield states
        finally:
            for process in processes:
                if process.returncode is None:
                    process.send_signal(signal.SIGTERM)
                await process.wait()


def holding(settings: Settings, role: str, name: str) -> list[str]:
    """Configured workers that are to hold a pair or model; the first is enough."""
    return [w.name for w in settings.workers if name in (w.pairs if role == "pair" else w.models)][:1]


def _addresses(settings: Settings) -> list[str]:
    run = settings.state_dir.resolve() / "run"
    spawned = [f"unix:{run / (w.name + '.sock')}" for w in settings.workers if w.spawn]
    return [*spawned, *(w.url for w in settings.workers if w.url is not None)]


async def _registered(settings: Settings) -> list[WorkerState]:
    """What the registry knows; nothing where no server answers."""
    config = settings.redis
    if config.url == "embedded":
        if not settings.redis_folder.exists():  # no router ever ran here
            return []
        config = RedisConfig(url=EmbeddedRedis(settings.redis_folder).url)
    registry = Registry(config)
    try:
        return await registry.discover() or []
    finally:
        await registry.close()


async def _state(url: str) -> WorkerState | None:
    """None where nobody answers."""
    import aiohttp

    unix = url.startswith("unix:")
    connector = aiohttp.UnixConnector(url.removeprefix("unix:")) if unix else None
    base = "http://worker" if unix else url.rstrip("/").removesuffix("/v1")
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=_ASK_S)) as session,
            session.get(f"{base}/state") as response,
        ):
            return read_state(await response.read())
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
        return None


async def _start(config: Path, worker: WorkerConfig, url: str) -> asyncio.subprocess.Process:
    arguments = ["worker", "--config", str(config), "--name", worker.name, "--url", url, "--private"]
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "router.cli",
        *arguments,
        env={**os.environ, "TWOLANE_SPAWNED": str(os.getpid())},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )


async def _loaded(worker: WorkerConfig, url: str, process: asyncio.subprocess.Process) -> WorkerState:
    deadline = time.monotonic() + _LOAD_S
    while time.monotonic() < deadline:
        if process.returncode is not None:
            raise NoWorker(f"worker {worker.name} ended with status {process.returncode} while it loaded")
        state = await _state(url)
        if state is not None and not state.loading:
            return msgspec.structs.replace(state, url=url)
        await asyncio.sleep(0.1)
    raise NoWorker(f"worker {worker.name} did not load within {_LOAD_S:g} s")
