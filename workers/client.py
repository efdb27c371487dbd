"""The router's side of workers: the registry in Redis, and a worker's `/state`. Torch-free.

Registry keys carry an expiry, so a worker that dies is gone within seconds; all share one hash tag, so that a cluster
keeps them on one node. Nothing here raises when Redis is away: a heartbeat is then not written, and nobody is found.
"""

from __future__ import annotations

import asyncio

import msgspec
import structlog
from redis.exceptions import RedisError

from workers.config import RedisConfig
from workers.protocol import WorkerState
from workers.redis_servers import AsyncServers

log = structlog.get_logger("registry")

NAMES = "twolane:{workers}"
LIFE_S = 5.0
"""Seconds a heartbeat counts; workers write one each second."""

_STATE = msgspec.json.Decoder(WorkerState)


def read_state(data: bytes | str) -> WorkerState:
    """Raises msgspec.DecodeError."""
    return _STATE.decode(data)


def as_text(value: bytes | str) -> str:
    """Redis answers bytes or text, as the connection was made."""
    return value.decode() if isinstance(value, bytes) else value


class Registry:
    """Heartbeats of all workers on one Redis. Safe to use while Redis is away: calls then return within the bound."""

    def __init__(self, config: RedisConfig, *, bound: float = 1.0) -> None:
        self._bound = bound
        self._servers = AsyncServers(config.url, timeout=bound)
        self._away = False

    async def publish(self, state: WorkerState) -> bool:
        """Write a heartbeat. False when Redis did not take it."""
        try:
            async with asyncio.timeout(self._bound):
                await self._servers.ask(
                    NAMES,
                    ("SET", f"{NAMES}:{state.name}", msgspec.json.encode(state), "PX", int(LIFE_S * 1000)),
                    ("SADD", NAMES, state.name),
                    ("EXPIRE", NAMES, 86400),
                )
        except (RedisError, OSError, TimeoutError) as error:
            return self._lost(error)
        return self._found()

    async def withdraw(self, state: WorkerState) -> bool:
        """Take a heartbeat back at an orderly end, unless a successor of the same name has written its own."""
        try:
            async with asyncio.timeout(self._bound):
                (data,) = await self._servers.ask(NAMES, ("GET", f"{NAMES}:{state.name}"))
                if data is not None and read_state(data).epoch == state.epoch:
                    await self._servers.ask(NAMES, ("DEL", f"{NAMES}:{state.name}"))
        except (RedisError, OSError, TimeoutError) as error:
            return self._lost(error)
        return True

    async def discover(self) -> list[WorkerState] | None:
        """Workers with a live heartbeat; None when Redis did not answer, which says nothing about them."""
        try:
            async with asyncio.timeout(self._bound):
                (members,) = await self._servers.ask(NAMES, ("SMEMBERS", NAMES))
                names = sorted(as_text(n) for n in members)
                found = await self._servers.ask(NAMES, *(("GET", f"{NAMES}:{n}") for n in names)) if names else []
        except (RedisError, OSError, TimeoutError) as error:
            self._lost(error)
            return None
        self._found()
        states = []
        for name, data in zip(names, found, strict=True):
            try:
                if data is not None:
                    states.append(read_state(data))
            except msgspec.DecodeError as error:
                log.warning("unreadable heartbeat", worker=name, error=str(error))
        return states

    async def close(self) -> None:
        """Give up the connections."""
        await self._servers.close()

    def _lost(self, error: Exception) -> bool:
        if not self._away:
            log.warning("redis is away; workers are found by their sockets only", error=type(error).__name__)
        self._away = True
        return False

    def _found(self) -> bool:
        if self._away:
            log.info("redis is back")
        self._away = False
        return True
