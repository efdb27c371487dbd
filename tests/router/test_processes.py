"""Several router processes on one port behave as one: real processes, real signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
import yaml
from aiohttp import web

from router.audit_verify import records, verify
from router.course import Decisions, Past
from router.facts_record import DecisionRecord
from router.peers import Member, Peers, added
from router.telemetry import Metrics
from router.transports.openai_http import Pools
from tests.router.gateway import KEY, Seen, Upstream, deployment, failure, upstream
from tests.running import ROOT, Router, free_port, until_ready

MASTER = "sk-master-0123456789"
FEW = "sk-few-0123456789"


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


def started(folder: Path, base: str, *more: str) -> Router:
    rested = [{**deployment(f"c{i}", Upstream(base), order=i), "model_name": "c"} for i in (1, 2)]
    config = {
        "model_list": [deployment("m", Upstream(base)), *rested],
        "router_settings": {"allowed_fails": 1, "cooldown_time": 60},
        "tenants": [{"name": "a", "key": KEY}, {"name": "few", "key": FEW, "rpm_limit": 5}],
        "general_settings": {"master_key": MASTER},
        "redis": {"timeout": "1s"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    port, log = free_port(), folder / "router.log"
    command = [sys.executable, "-m", "router.cli", "serve", "--config", "config.yaml", "--port", str(port), *more]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=out, stderr=out
        )
    return Router(f"http://127.0.0.1:{port}", process, log)


async def ask(
    router: Router, method: str, path: str, key: str = KEY, **body: object
) -> tuple[int, dict[str, str], bytes]:
    """One request on a connection of its own, so that any process may answer."""
    async with aiohttp.ClientSession() as session:
        headers = {"authorization": f"Bearer {key}"}
        async with session.request(method, router.base + path, headers=headers, json=body or None) as answer:
            return answer.status, dict(answer.headers), await answer.read()


async def chat(router: Router, key: str = KEY) -> tuple[int, dict[str, str], bytes]:
    return await ask(
        router, "POST", "/v1/chat/completions", key, model="m", messages=[{"role": "user", "content": "hi"}]
    )


async def broken(seen: Seen) -> web.StreamResponse:
    return failure(500)


async def figure(router: Router, name: str) -> float:
    page = (await ask(router, "GET", "/metrics"))[2].decode()
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name))


async def figures(router: Router, name: str, wanted: float, seconds: float = 30.0) -> None:
    """Wait for it. Connections that the kernel had given to a process just killed are reset: then ask again."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            if await figure(router, name) == wanted:
                return
        assert time.monotonic() < deadline, router.log.read_text()
        await asyncio.sleep(0.1)


def outcomes(audit: Path) -> int:
    """Requests of tenant `a` on record."""
    return sum(record.body["kind"] == "outcome" for record in records(audit, "a"))


async def test_two_processes_are_one(tmp_path: Path, up: Upstream) -> None:
    """Limits, metrics, decisions and records are common; a process that dies is replaced; all end together."""
    router = started(tmp_path, up.base, "--workers", "2")
    parent = psutil.Process(router.process.pid)
    try:
        await asyncio.to_thread(until_ready, router, 60)
        await figures(router, "twolane_processes", 2)
        answers = await asyncio.gather(*(chat(router) for _ in range(30)))
        assert [status for status, _, _ in answers] == [200] * 30
        assert await figure(router, 'twolane_requests_total{tenant="a"') == 30
        for _, headers, _ in answers[:10]:
            id = headers["x-twolane-decision"]
            status, _, body = await ask(router, "GET", f"/v1/decisions/{id}")
            assert (status, json.loads(body)["id"]) == (200, id)
            assert (await ask(router, "GET", f"/v1/decisions/{id}", FEW))[0] == 404, "another tenant's"
        statuses = [status for status, _, _ in await asyncio.gather(*(chat(router, FEW) for _ in range(12)))]
        assert statuses.count(200) == 5
        assert statuses.count(429) == 7

        up.answers["c1"] = broken
        statuses = [(await ask(router, "POST", "/v1/embeddings", model="c", input="hi"))[0]]
        await asyncio.sleep(0.2)
        statuses += [(await ask(router, "POST", "/v1/embeddings", model="c", input="hi"))[0] for _ in range(12)]
        assert statuses == [200] * 13
        assert up.count("c1") == 1, "what one process saw fail rests in both"

        tenants = (tmp_path / "config.yaml").read_text().replace("rpm_limit: 5", "rpm_limit: 0")
        (tmp_path / "config.yaml").write_text(tenants)
        assert (await ask(router, "POST", "/admin/reload", MASTER))[0] == 200
        assert [(await chat(router, FEW))[0] for _ in range(8)] == [429] * 8

        # A record that no answer waits for may wait for others: what a process is killed with in hand is lost.
        audit = tmp_path / ".twolane" / "audit"
        deadline = time.monotonic() + 10
        while outcomes(audit) < 30 + 13 and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        members = [child for child in parent.children() if "--member" in child.cmdline()]
        assert len(members) == 2
        members[0].kill()
        await figures(router, "twolane_processes", 2)
        assert [(await chat(router))[0] for _ in range(8)] == [200] * 8
        children = parent.children(recursive=True)
    finally:
        router.process.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(router.process.wait, 30)
    assert status == 0
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert verify(audit, "a").faults == []
    assert outcomes(audit) == 30 + 13 + 8


async def test_no_process_outlives_its_parent(tmp_path: Path, up: Upstream) -> None:
    """A parent that is killed takes all that it started with it; one told to reload while they start ends none."""
    router = started(tmp_path, up.base, "--workers", "2")
    try:
        ready = asyncio.create_task(asyncio.to_thread(until_ready, router, 60))
        while not ready.done():
            if "router_process_starts" in router.log.read_text():
                router.process.send_signal(signal.SIGHUP)
            await asyncio.sleep(0.05)
        await ready
        assert "router_process_ended" not in router.log.read_text()
        children = psutil.Process(router.process.pid).children(recursive=True)
    finally:
        router.process.kill()
        await asyncio.to_thread(router.process.wait, 30)
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, 20)
    assert not alive


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    """Where somebody listens already, nothing is started, even if they would share the port."""
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        router = started(tmp_path, "http://127.0.0.1:9/v1", "--workers", "2", "--port", str(other.getsockname()[1]))
        assert router.process.wait(30) == 1
    assert "cannot_listen" in router.log.read_text()


def test_pages_are_added() -> None:
    """Counters and histograms are summed, common things and what workers tell are not, and families stay together."""
    one = b"""# HELP a_total A.
# TYPE a_total counter
a_total{x="1"} 2
# HELP h H.
# TYPE h histogram
h_bucket{le="+Inf"} 1
h_sum 0.25
h_count 1
# HELP twolane_stops S.
# TYPE twolane_stops gauge
twolane_stops 1
# HELP twolane_in_flight F.
# TYPE twolane_in_flight gauge
twolane_in_flight 1
# HELP twolane_worker_kv_hits_total W.
# TYPE twolane_worker_kv_hits_total counter
twolane_worker_kv_hits_total{worker="w"} 7
"""
    other = one.replace(b'a_total{x="1"} 2', b'a_total{x="1"} 3\na_total{x="2"} 1').replace(
        b"twolane_stops 1", b"twolane_stops 0"
    )
    lines = added([one, other]).decode().splitlines()
    assert lines[:4] == ["# HELP a_total A.", "# TYPE a_total counter", 'a_total{x="1"} 5', 'a_total{x="2"} 1']
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert values['h_bucket{le="+Inf"}'] == 2
    assert values["h_sum"] == 0.5
    assert values["twolane_stops"] == 1
    assert values["twolane_in_flight"] == 2
    assert values['twolane_worker_kv_hits_total{worker="w"}'] == 7


@pytest.mark.parametrize(
    "id", ["dec_1", "dec_1?tenant=bank", "dec_1&tenant=bank", "dec_1?tenant=bank#", "../decision?id=dec_1&tenant=bank"]
)
async def test_a_decision_is_found_for_its_own_tenant_alone(id: str, tmp_path: Path) -> None:
    """Whatever a caller writes for an id, another process shows it no other tenant's decision."""
    folder = str(tmp_path / "peers")
    made = Decisions()
    decision = DecisionRecord("m", (), "no_deployments", [], False, ())
    made.keep("bank", Past("dec_1", "m", "", [(None, decision)]), ())

    async def nothing(who: str) -> None:
        """Nobody reloads here."""

    pools = Pools()
    one, two = (
        Peers(Member(i, 2, -1, None, folder), pools, Metrics([], ()), decisions)
        for i, decisions in enumerate((made, Decisions()))
    )
    try:
        async with one.serving(lambda deployment, seconds: None, nothing):
            assert await two.decision("dec_1", "bank") is not None
            assert await two.decision(id, "lab") is None
    finally:
        await pools.close()
