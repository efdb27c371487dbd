"""Administration of kept KV: real workers with a real store and Redis behind a real router."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from router.transports.cache import KnownFleet
from tests.router.gateway import KEY, Router, router, upstream
from tests.router.test_cache import config as lanes
from tests.router.test_cache import worker as state_of
from tests.tiny import make_model
from tests.workers.test_server import serving
from workers.config import Fleet, ModelConfig, PairConfig, RedisConfig, StoreConfig, WorkerConfig
from workers.embedded import EmbeddedRedis
from workers.server import Worker

MASTER = "sk-master-0123456789"
KEY_B = "sk-tenant-b-0123456789"
PROMPT = "The tide table of the harbour, hour by hour, day by day. " * 8


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


@dataclass(frozen=True)
class House:
    """A router over two workers that share one folder and one Redis."""

    door: Router
    workers: tuple[Worker, Worker]
    kv: Path
    redis_url: str
    audit: Path

    async def ask(self, key: str) -> tuple[str, int]:
        """Text and cached tokens of one answer on the cache lane."""
        body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 8}
        got = await self.door.post(key=key, model="alone", **body)
        assert got.status == 200, got.raw
        usage = got.json["usage"]
        return got.json["choices"][0]["message"]["content"], usage["prompt_tokens_details"]["cached_tokens"]

    async def fill(self) -> dict[str, str]:
        """Have both tenants' KV stored by both workers; returns the text each was answered."""
        texts = {}
        for key in (KEY, KEY_B) * 3:  # which worker answers is a draw; either way it is on the shared disk
            texts[key] = (await self.ask(key))[0]
        for worker in self.workers:
            assert await asyncio.to_thread(worker.holdings.store.settle)
        return texts

    def stored(self, tag: str) -> tuple[set[Path], set[bytes]]:
        """The tenant's files and Redis keys."""
        with redis.Redis.from_url(self.redis_url) as client:
            keys = {key for key in client.scan_iter(count=1000) if tag.encode() in key}
        return {path for path in self.kv.rglob("*") if path.is_file() and tag in str(path)}, keys

    def records(self) -> list[dict[str, Any]]:
        lines = [line for file in self.audit.rglob("*.jsonl") for line in file.read_bytes().splitlines()]
        return [record for line in lines if '"kv_purge"' in json.dumps(record := json.loads(line))]

    async def command(self, *arguments: str, key: str = MASTER) -> Ran:
        """`twolane kv ...` against this router."""
        return await run("kv", *arguments, TWOLANE_URL=f"http://127.0.0.1:{self.door.port}", TWOLANE_MASTER_KEY=key)


async def run(*arguments: str, **environment: str) -> Ran:
    """The command in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "router.cli",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **environment},
    )
    out, err = await process.communicate()
    return Ran(process.returncode or 0, out.decode(), err.decode())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("kv-admin"), ascii_only=True)


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    with EmbeddedRedis(tmp_path / "redis") as server:
        yield server.url


@pytest.fixture
async def house(tmp_path: Path, model: Path, redis_url: str) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        workers = []
        for name in ("one", "two"):
            fleet = Fleet(
                models=(ModelConfig(name="tiny", model=str(model)),),
                pairs=(PairConfig(name="duo", sharer="tiny", receiver="tiny"),),
                workers=(WorkerConfig(name=name, device="cpu", pairs=("duo",)),),
                redis=RedisConfig(url=redis_url, timeout=1.0),
                store=StoreConfig(dir=tmp_path / "kv"),
            )
            _, worker = await stack.enter_async_context(serving(fleet, tmp_path / f"{name}.sock"))
            workers.append(worker)
        up = await stack.enter_async_context(upstream())
        tenants = [{"name": "a", "key": KEY}, {"name": "b", "key": KEY_B}]
        known = KnownFleet([worker.state() for worker in workers])
        written = {**lanes(up), "tenants": tenants, "workers": [{"name": "one"}, {"name": "two"}]}
        door = await stack.enter_async_context(router(tmp_path, written, known))
        yield House(door, (workers[0], workers[1]), tmp_path / "kv", redis_url, tmp_path / "audit")


async def test_a_purge_leaves_nothing_of_the_tenant(house: House) -> None:
    """No file and no Redis key of it is left, the other tenant's stay, and the next answer is cold and the same."""
    before = await house.fill()
    store = house.workers[0].holdings.store
    mine, theirs = store.scope("a").tag, store.scope("b").tag
    files, keys = house.stored(mine)
    kept = house.stored(theirs)
    assert files
    assert keys
    assert kept[0]
    assert kept[1]
    async with house.door.session.delete("/admin/tenants/a/kv", headers={"authorization": f"Bearer {MASTER}"}) as got:
        status, told = got.status, await got.json()
    assert status == 200
    assert (told["complete"], told["recorded"], told["configured"]) == (True, True, True)
    assert {w["worker"]: w["error"] for w in told["workers"]} == {"one": "", "two": ""}
    assert told["entries"] == sum(w["entries"] for w in told["workers"]) >= len(files)
    assert told["bytes"] > 0
    assert house.stored(mine) == (set(), set())
    assert house.stored(theirs) == kept
    assert await house.ask(KEY) == (before[KEY], 0)
    text, cached = await house.ask(KEY_B)
    assert text == before[KEY_B]
    assert cached >= 16


async def test_a_purge_is_recorded_in_the_tenants_chain(house: House) -> None:
    """One control record: who asked, how much went, who did not answer."""
    await house.fill()
    await house.command("purge", "a")
    found = house.records()
    assert len(found) == 1
    record = json.dumps(found[0])
    assert '"who": "master"' in record
    assert '"missing": []' in record
    assert MASTER not in record
    assert any("a" in str(path.relative_to(house.audit)) for path in house.audit.rglob("*.jsonl"))


async def test_workers_that_do_not_answer_are_named(tmp_path: Path) -> None:
    """A dead socket and a configured worker that does not live each make a purge incomplete: 503, with their names."""
    async with upstream() as up:
        fleet = KnownFleet([msgspec.structs.replace(state_of(f"unix:{tmp_path}/none.sock"), name="dead")])
        written = {**lanes(up), "workers": [{"name": "absent"}]}
        async with router(tmp_path, written, fleet) as door:
            headers = {"authorization": f"Bearer {MASTER}"}
            async with door.session.delete("/admin/tenants/a/kv", headers=headers) as got:
                status, told = got.status, await got.json()
            stats = (await door.get("/admin/kv", key=MASTER)).json["data"]
    assert status == 503
    assert told["complete"] is False
    assert told["error"]["code"] == "purge_incomplete"
    assert {w["worker"]: w["error"] for w in told["workers"]} == {
        "absent": "not live",
        "dead": "no answer (UnixClientConnectorError)",
    }
    assert {w["worker"]: (w["kv"], bool(w["error"])) for w in stats} == {"absent": (None, True), "dead": (None, True)}


@pytest.mark.parametrize(("key", "status"), [(None, 401), (KEY, 403), ("sk-wrong", 401)])
async def test_only_the_master_key_administers(tmp_path: Path, key: str | None, status: int) -> None:
    """Others are refused, and no worker is asked."""
    async with upstream() as up, router(tmp_path, lanes(up), KnownFleet([state_of(up.base)])) as door:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with door.session.delete("/admin/tenants/a/kv", headers=headers) as got:
            assert got.status == status
        assert (await door.get("/admin/kv", key=key)).status == status
        assert up.seen == []


async def test_without_a_master_key_this_machine_administers(tmp_path: Path) -> None:
    """A router on loopback without keys takes a purge from anybody there; one that nobody could be is refused."""
    async with upstream() as up:
        written = {**lanes(up), "tenants": None, "general_settings": {}}
        async with router(tmp_path, written, KnownFleet([])) as door:
            async with door.session.delete("/admin/tenants/default/kv") as got:
                assert (got.status, (await got.json())["complete"]) == (200, True)
            async with door.session.delete("/admin/tenants/.hidden/kv") as got:
                assert (got.status, (await got.json())["error"]["code"]) == (400, "bad_tenant")


async def test_the_command_shows_and_purges(house: House) -> None:
    """`kv stats` counts what is kept, `kv purge` destroys it; both speak JSON; the exit status says whether it held."""
    await house.fill()
    shown, data = await house.command("stats"), await house.command("stats", "--json")
    assert (shown.status, data.status) == (0, 0)
    assert "one: ram " in shown.out
    assert sum(w["kv"]["counters"]["stored"] for w in json.loads(data.out)["data"]) > 0
    purged, again = await house.command("purge", "a"), await house.command("purge", "a", "--json")
    assert (purged.status, again.status) == (0, 0)
    assert " entries, " in purged.out
    assert json.loads(again.out)["entries"] == 0
    stranger = await house.command("purge", "nobody")
    assert "no tenant is called 'nobody'" in stranger.out
    refused = await house.command("purge", "a", key=KEY)
    assert refused.status == 1
    assert "master key" in refused.err


async def test_the_command_fails_when_the_purge_is_incomplete(tmp_path: Path) -> None:
    """Exit status 1, with the worker's name; the same where no router answers."""
    async with upstream() as up, router(tmp_path, {**lanes(up), "workers": [{"name": "absent"}]}) as door:
        url = f"http://127.0.0.1:{door.port}"
        done = await run("kv", "purge", "a", "--url", url, "--key", MASTER)
        stats = await run("kv", "stats", "--url", url, "--key", MASTER)
    assert (done.status, stats.status) == (1, 1)
    assert "absent: NOT PURGED, not live" in done.out
    gone = await run("kv", "purge", "a", "--url", url, "--key", MASTER)
    assert gone.status == 1
    assert "no answer that can be read" in gone.err


@pytest.mark.parametrize(
    ("kv", "sent"), [({"encrypt": True}, "1"), ({}, None), ({"reuse": "none", "encrypt": True}, None)]
)
async def test_a_tenants_wish_for_encryption_reaches_the_worker(
    tmp_path: Path, kv: dict[str, Any], sent: str | None
) -> None:
    """The worker is told to encrypt exactly where the tenant's file says so and something may be kept."""
    async with upstream() as up, upstream(unix=tmp_path / "w.sock") as on_worker:
        async with router(tmp_path, lanes(up, kv=kv), KnownFleet([state_of(on_worker.base)])) as door:
            assert (await door.post(model="alone")).status == 200
        assert [seen.headers.get("x-twolane-kv-encrypt") for seen in on_worker.seen] == [sent]
