"""`twolane serve --workers N`: several router processes on one port, and the parent that keeps them.

The parent owns what they share: the port, the embedded Redis, the spawned workers. It answers no request,
so there is little in it that can fail. A process that ends is replaced; when the parent ends they all do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

import structlog

from router.backups import unbacked
from router.fleet import Fleet, failures_after
from router.peers import Member, shared_socket
from router.settings import Settings
from router.telemetry import configure_logging
from workers.client import Registry
from workers.config import WorkerConfig
from workers.embedded import EmbeddedRedis

log = structlog.get_logger("twolane.router")

_BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_ENDS_S = 15.0
"""Requests that run have ten seconds to end; then the rest is closed."""


class MemberFleet(Fleet):
    """Workers as a process sees them that spawns none: by their heartbeats."""

    def __init__(self, configs: tuple[WorkerConfig, ...], registry: Registry) -> None:
        super().__init__((), config_file=None, folder=Path(), registry=registry)
        self._wanted = {config.name for config in configs if config.spawn}

    @property
    def settled(self) -> bool:
        """Every worker that the parent spawns has once loaded all it should."""
        self._wanted -= {state.name for state in self.workers() if not state.loading}
        return not self._wanted


def member_fleet(settings: Settings, member: Member) -> Fleet:
    """For one process."""
    redis = settings.redis if member.redis is None else settings.redis.model_copy(update={"url": member.redis})
    return MemberFleet(settings.workers, Registry(redis))


def end_with_parent(member: Member) -> None:
    """Wait for the pipe to close, then ask this process to end. For a thread."""
    os.read(member.alive, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def serve(settings: Settings, path: Path, count: int) -> None:
    """Run `count` processes until a signal ends them. Raises SystemExit(1) where the port is taken."""
    written = settings.log.format
    configure_logging(settings.log.level, format="console" if written == "text" else written)
    for problem in unbacked(settings, path):
        log.warning("no_backup", problem=problem)
    try:
        if settings.server.port:
            _taken(settings.server.host, settings.server.port)
        held = shared_socket(settings.server.host, settings.server.port)
    except OSError as error:
        log.error("cannot_listen", host=settings.server.host, port=settings.server.port, error=error.strerror)
        raise SystemExit(1) from None
    with held:  # nobody else can take the port while all are down
        there = settings.with_server(None, held.getsockname()[1])
        asyncio.run(Processes(there, path, count).run())


def _deaf() -> None:
    """Of a process that starts: to be told to reload must not end it, and it is about to read the files anyway."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _taken(host: str, port: int) -> None:
    """Raises OSError where anybody listens: others that share their port, too, must not get half of our requests."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host, port), family=family).close()


class Processes:
    """Started together, kept alive one by one, ended together."""

    def __init__(self, settings: Settings, path: Path, count: int) -> None:
        self._settings = settings
        self._path = path
        self._count = count
        self._folder = settings.state_dir.resolve() / "run"
        self._running: dict[int, asyncio.subprocess.Process] = {}
        self._ending = asyncio.Event()

    async def run(self) -> None:
        """Until SIGTERM or SIGINT."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._ending.set)
        loop.add_signal_handler(signal.SIGHUP, self._tell, signal.SIGHUP)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        embedded = None
        if self._settings.redis.url == "embedded":
            embedded = EmbeddedRedis(self._settings.redis_folder)
            embedded.start()
        url = None if embedded is None else embedded.url
        fleet = Fleet(
            self._settings.workers, config_file=self._path, folder=self._folder, registry=None, embedded=embedded
        )
        alive, ours = os.pipe()
        try:
            await fleet.start()
            keeping = [asyncio.create_task(self._keep(i, url, alive)) for i in range(self._count)]
            await self._ending.wait()
            self._tell(signal.SIGTERM)
            await asyncio.wait(keeping, timeout=_ENDS_S)
            self._tell(signal.SIGKILL)
            await asyncio.wait(keeping)
        finally:
            os.close(ours)
            os.close(alive)
            await fleet.close()

    async def _keep(self, index: int, redis: str | None, alive: int) -> None:
        """One process, started again whenever it ends."""
        failures = 0
        while not self._ending.is_set():
            began = time.monotonic()
            process = self._running[index] = await self._start(index, redis, alive)
            status = await process.wait()
            if self._ending.is_set():
                return
            failures = failures_after(failures, status, time.monotonic() - began)
            pause = _BACKOFF_S[min(max(failures, 1), len(_BACKOFF_S)) - 1]
            log.warning("router_process_ended", process=index, status=status, restart_in_s=pause)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)

    async def _start(self, index: int, redis: str | None, alive: int) -> asyncio.subprocess.Process:
        server = self._settings.server
        member = Member(index, self._count, alive, redis, str(self._folder / f"port-{server.port}"))
        told = ["--config", str(self._path), "--host", server.host, "--port", str(server.port)]
        log.info("router_process_starts", process=index)
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "router.cli", "serve", *told, "--member", member.encode()),
            pass_fds=(alive,),
            stdin=asyncio.subprocess.DEVNULL,
            preexec_fn=_deaf,
            start_new_session=True,  # a terminal's Ctrl-C reaches the parent, and through it all others, once
        )

    def _tell(self, signum: int) -> None:
        for process in self._running.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(signum)
