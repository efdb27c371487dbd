"""The workers as they stand now: those the router spawns, kept alive, and those found in the registry.

A spawned worker is asked over its own socket, so it is known also while Redis is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec
import structlog

from workers.client import Registry, read_state
from workers.config import WorkerConfig
from workers.embedded import EmbeddedFailed, EmbeddedRedis
from workers.protocol import WorkerState

log = structlog.get_logger("fleet")

_EVERY_S = 1.0
_FRESH_S = 5.0
"""A state older than this says nothing any more."""
_HANGS_S = 60.0
"""An engine that has work and has not turned for so long hangs; the longest step is a chunk of a few seconds."""
_STEADY_S = 60.0
"""A worker that lived so long begins again with the shortest backoff."""
_ENDS_S = 12.0
"""Requests that run may end (5 s), then the store writes what waits (5 s)."""
_BACKOFF_S = (0.2, 1.0, 2.0, 5.0, 10.0, 30.0)


def failures_after(failures: int, status: int, lived: float) -> int:
    """Failures in a row, now that a process ended. Status 0: somebody asked it to end, which is none."""
    return 0 if status == 0 or lived > _STEADY_S else failures + 1


class Spawned:
    """One worker process under supervision: restarted with backoff when it ends or hangs."""

    def __init__(self, config: WorkerConfig, config_file: Path, folder: Path, *, silent_s: float = 20.0) -> None:
        self.config = config
        self.silent_s = silent_s
        """A process that does not answer `/state` for so long hangs."""
        self.url = f"unix:{folder / (config.name + '.sock')}"
        self.state: WorkerState | None = None
        self.restarts = 0
        self.loaded = False
        """It has once loaded all it should."""
        self._config_file = config_file
        self._seen = 0.0
        self._process: asyncio.subprocess.Process | None = None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(self.url.removeprefix("unix:"), limit=2),
            timeout=aiohttp.ClientTimeout(total=2.0),
        )

    @property
    def fresh(self) -> bool:
        return self.state is not None and time.monotonic() - self._seen < _FRESH_S

    async def keep_alive(self) -> None:
        """Start it, and start it again whenever it ends; for ever."""
        failures = 0
        while True:
            began = time.monotonic()
            self._process = await self._start()
            watch = asyncio.create_task(self._watch(self._process))
            status = await self._process.wait()
            self.state = None
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
            failures = failures_after(failures, status, time.monotonic() - began)
            pause = _BACKOFF_S[min(max(failures, 1), len(_BACKOFF_S)) - 1]
            self.restarts += 1
            log.warning("worker ended", worker=self.config.name, status=status, restart_in_s=pause)
            await asyncio.sleep(pause)

    async def close(self) -> None:
        """End the process: asked first, then forced."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.terminate()
            try:
                async with asyncio.timeout(_ENDS_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        await self._session.close()

    async def _start(self) -> asyncio.subprocess.Process:
        arguments = ["worker", "--config", str(self._config_file), "--name", self.config.name, "--url", self.url]
        log.info("worker starts", worker=self.config.name)
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "router.cli",
            *arguments,
            env={**os.environ, "TWOLANE_SPAWNED": str(os.getpid())},
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Ask for the state each second; kill a process that answered once and now hangs."""
        while True:
            await asyncio.sleep(0.1 if self.state is None else _EVERY_S)
            try:
                async with self._session.get("http://worker/state") as response:
                    self.state = read_state(await response.read())
                self._seen = time.monotonic()
                self.loaded = self.loaded or not self.state.loading
            except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError) as error:
                # Ordinary while it loads torch; a process that died is seen by its exit.
                log.debug("worker does not answer", worker=self.config.name, error=type(error).__name__)
            if self.state is not None and (
                self.state.stalled_s > _HANGS_S or time.monotonic() - self._seen > self.silent_s
            ):
                log.error("worker hangs; killed", worker=self.config.name)
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signal.SIGKILL)
                return


class Fleet:
    """Spawned and foreign workers. `workers()` costs no I/O."""

    def __init__(
        self,
        configs: Sequence[WorkerConfig],
        *,
        config_file: Path | None,
        folder: Path,
        registry: Registry | None,
        embedded: EmbeddedRedis | None = None,
    ) -> None:
        self._configs = [c for c in configs if c.spawn]
        self._config_file, self._folder = config_file, folder
        self._registry = registry
        self._embedded = embedded
        """Already started, on the thread that runs this fleet; kept alive and stopped here."""
        self.spawned: list[Spawned] = []
        self._foreign: list[WorkerState] = []
        self._found = 0.0
        self._tasks: list[asyncio.Task[None]] = []

    def workers(self) -> Sequence[WorkerState]:
        """Those whose heartbeat is fresh."""
        states = [s.state for s in self.spawned if s.fresh and s.state is not None]
        if self._foreign and time.monotonic() - self._found < _FRESH_S:
            own = {s.config.name for s in self.spawned}
            states += [state for state in self._foreign if state.name not in own]
        return states

    @property
    def settled(self) -> bool:
        """Every spawned worker has once loaded all it should."""
        return len(self.spawned) == len(self._configs) and all(s.loaded for s in self.spawned)

    async def start(self) -> None:
        """Start what is to be spawned, and begin to look for others. Returns at once."""
        if self._configs and self._config_file is not None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.spawned = [Spawned(c, self._config_file, self._folder) for c in self._configs]
            self._tasks += [asyncio.create_task(s.keep_alive()) for s in self.spawned]
        if self._registry is not None:
            self._tasks.append(asyncio.create_task(self._discover(self._registry)))
        if self._embedded is not None:
            self._tasks.append(asyncio.create_task(self._keep_redis(self._embedded)))

    async def close(self) -> None:
        """End the spawned workers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(s.close() for s in self.spawned))
        if self._registry is not None:
            await self._registry.close()
        if self._embedded is not None:
            self._embedded.stop()

    async def _discover(self, registry: Registry) -> None:
        while True:
            found = await registry.discover()
            if found is not None:
                self._foreign, self._found = found, time.monotonic()
            await asyncio.sleep(_EVERY_S)

    async def _keep_redis(self, embedded: EmbeddedRedis) -> None:
        """Start the embedded server anew when it ends; its socket stays the same."""
        while True:
            await asyncio.sleep(_EVERY_S)
            if embedded.ended:
                log.warning("embedded redis ended; started anew")
                with contextlib.suppress(EmbeddedFailed):  # tried again in a second
                    embedded.start(timeout=2.0)
