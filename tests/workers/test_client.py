"""The registry on a real server, with real faults."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import msgspec
import redis.asyncio as aredis

from workers.client import LIFE_S, NAMES, Registry
from workers.config import RedisConfig
from workers.embedded import EmbeddedRedis
from workers.protocol import WorkerState


def state(name: str = "w", epoch: str = "1") -> WorkerState:
    return WorkerState(
        name=name, epoch=epoch, url="unix:/x", pid=1, models=(), pairs=(), rates={}, running=0, queued=0,
        max_running=1, max_queued=1, free_bytes=1, at=time.time(),
    )  # fmt: skip


async def test_what_one_publishes_another_finds(tmp_path: Path) -> None:
    """Heartbeats travel whole; every key has an expiry; withdrawn ones are gone."""
    with EmbeddedRedis(tmp_path) as server:
        one, two = (Registry(RedisConfig(url=server.url)) for _ in range(2))
        published = [state("a"), state("b")]
        for each in published:
            assert await one.publish(each)
        assert await two.discover() == published
        client = aredis.Redis.from_url(server.url)
        assert all([await client.pttl(key) > 0 for key in await client.keys("*")])
        assert await client.pttl(f"{NAMES}:a") <= LIFE_S * 1000
        await one.withdraw(state("a"))
        assert await two.discover() == [published[1]]
        for each in (one, two):
            await each.close()
        await client.aclose()


async def test_a_successor_is_not_withdrawn(tmp_path: Path) -> None:
    """A worker that ends late does not remove the heartbeat of the one that replaced it."""
    with EmbeddedRedis(tmp_path) as server:
        registry = Registry(RedisConfig(url=server.url))
        await registry.publish(state("a", epoch="new"))
        await registry.withdraw(state("a", epoch="old"))
        assert [s.epoch for s in await registry.discover() or []] == ["new"]
        await registry.close()


async def test_a_frozen_server_costs_a_bounded_time_and_is_taken_up_again(tmp_path: Path) -> None:
    """Frozen: False and None within the bound. Thawed: as before, on the same object."""
    with EmbeddedRedis(tmp_path) as server:
        registry = Registry(RedisConfig(url=server.url), bound=0.3)
        assert await registry.publish(state())
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        began = time.monotonic()
        assert not await registry.publish(state())
        assert await registry.discover() is None
        assert time.monotonic() - began < 3
        os.kill(server.pid, signal.SIGCONT)
        async with asyncio.timeout(5):
            while not await registry.publish(state()):
                await asyncio.sleep(0.05)
        assert await registry.discover() is not None
        await registry.close()


async def test_a_foreign_value_is_passed_over(tmp_path: Path) -> None:
    """What is no heartbeat is not a worker, and hides no other."""
    with EmbeddedRedis(tmp_path) as server:
        registry = Registry(RedisConfig(url=server.url))
        await registry.publish(state("good"))
        client = aredis.Redis.from_url(server.url)
        await client.set(f"{NAMES}:bad", b"\x80nonsense", px=5000)
        await client.sadd(NAMES, "bad")
        found = await registry.discover()
        assert found is not None
        assert [s.name for s in found] == ["good"]
        assert msgspec.json.decode(msgspec.json.encode(found[0]), type=WorkerState) == found[0]
        await registry.close()
        await client.aclose()
