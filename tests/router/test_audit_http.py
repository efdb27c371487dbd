"""The audit log through the public door: what a caller gets, and what then stands on record."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from router.audit_chain import Chain, Entry
from router.audit_custody import Custody
from router.audit_keys import AuditError, Signer
from router.audit_vault import Vault, day_of
from router.audit_verify import chain_of, content, records, verify
from tests.router.gateway import (
    KEY,
    PLAIN,
    Seen,
    Upstream,
    chunk,
    deployment,
    failure,
    plain,
    router,
    until,
    upstream,
)
from tests.router.test_audit import file_limit
from tests.running import Router as Running
from tests.running import serving


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


def outcomes(folder: Path, tenant: str = "a") -> list[dict[str, Any]]:
    assert verify(folder / "audit", tenant).faults == []
    return [r.body for r in records(folder / "audit", tenant) if r.body["kind"] == "outcome"]


async def test_every_decision_of_a_request_is_recorded(tmp_path: Path, up: Upstream) -> None:
    """After a group's fallback and in a relay, the record holds the first decision and all that came after it."""

    async def fails(seen: object) -> Any:
        return failure(503)

    up.answers["m"] = fails
    relay = {"model_name": "duo", "relay_params": {"sharer": "other", "receiver": "spare", "max_hint_tokens": 8}}
    names = ("m", "spare", "other")
    config = {
        "model_list": [*(deployment(name, up) for name in names), relay],
        "router_settings": {"num_retries": 0, "fallbacks": [{"m": ["spare"]}]},
    }
    async with router(tmp_path, config) as door:
        for model in ("m", "duo", "spare"):
            assert (await door.post(model=model)).status == 200
    told = [(o["decision"]["model"], [d["model"] for d in o.get("later", [])]) for o in outcomes(tmp_path)]
    assert told == [("m", ["spare"]), ("duo", ["other", "spare"]), ("spare", [])]


REGULATED = {"name": "a", "key": KEY, "regulated": True, "audit": {"subject": "user", "retention": "1d"}}


def texts(folder: Path, kind: str, tenant: str = "a") -> list[dict[str, str]]:
    root = folder / "audit"
    chain = chain_of(root, tenant)
    return [content(root, tenant, chain, r) for r in records(root, tenant) if r.body["kind"] == kind]


async def test_a_piece_is_on_record_before_it_is_relayed(tmp_path: Path, up: Upstream) -> None:
    """What a regulated caller has read of a stream stands in the log at that moment, byte for byte and in order."""
    go_on = asyncio.Event()

    async def answer(seen: Seen) -> Any:
        response = await seen.stream(chunk("one"), done=False)
        await go_on.wait()
        for event in (chunk(" two"), chunk(finish="stop")):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    up.answers["m"] = answer
    config = {"model_list": [deployment("m", up)], "tenants": [REGULATED]}
    async with router(tmp_path, config) as door:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "user": "ann"}
        headers = {"authorization": f"Bearer {KEY}"}
        async with door.session.post("/v1/chat/completions", json=body, headers=headers) as response:
            read = await response.content.readany()
            recorded = "".join(t["chunk"] for t in texts(tmp_path, "chunk"))
            assert b"one" in read
            assert recorded == read.decode()
            assert outcomes(tmp_path) == []
            go_on.set()
            read += await response.read()
    pieces = [r.body for r in records(tmp_path / "audit", "a") if r.body["kind"] == "chunk"]
    assert [p["n"] for p in pieces] == list(range(len(pieces)))
    recorded = "".join(t["chunk"] for t in texts(tmp_path, "chunk"))
    assert read.decode().startswith(recorded)
    assert json.loads(texts(tmp_path, "outcome")[0]["answer"])["choices"][0]["message"]["content"] == "one two"
    assert len({p["content"]["subject"] for p in pieces}) == 1


async def test_a_stream_whose_pieces_cannot_be_recorded_ends(tmp_path: Path, up: Upstream) -> None:
    """The disk is full after the intent: no piece reaches the caller, who is told why."""

    async def answer(seen: Seen) -> Any:
        with suppress(ConnectionError):
            return await seen.stream(*(chunk("secret " * 200) for _ in range(20)))

    up.answers["m"] = answer
    config = {"model_list": [deployment("m", up)], "tenants": [REGULATED]}
    async with router(tmp_path, config) as door:
        assert (await door.post(model="m", stream=True, max_tokens=1)).status == 200
        with file_limit(size_of_log(tmp_path) + size_of_intent(tmp_path) + 800):
            got = await door.post(model="m", stream=True)
    assert (got.status, b"secret" in got.raw) == (200, False)
    assert got.events[-1]["error"]["code"] == "audit_unavailable"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("harm", ["full", "key", "head", "records"])
async def test_no_record_no_answer(tmp_path: Path, up: Upstream, harm: str, stream: bool) -> None:
    """A full disk, a missing key, head or file of records: a regulated caller gets 503 and a clear error and the model
    is not even asked; another tenant is answered as before."""
    lab = {"name": "b", "key": "sk-tenant-b-0123456789"}
    config = {"model_list": [deployment("m", up)], "tenants": [REGULATED, lab]}
    async with router(tmp_path, config) as door:
        assert (await door.post(model="m")).status == 200
        chain = tmp_path / "audit" / "a"
        with ExitStack() as stack:
            match harm:
                case "full":
                    stack.enter_context(file_limit(size_of_log(tmp_path)))
                case "key":
                    (tmp_path / "audit" / "_keys" / "a.key").unlink()
                case "head":
                    (chain / "head.json").unlink()
                case _:
                    next(chain.glob("*.jsonl")).unlink()
            got = await door.post(model="m", stream=stream)
            other = await door.post(model="m", key=lab["key"])
    assert (got.status, got.error["code"]) == (503, "audit_unavailable")
    assert "could not be written" in got.error["message"]
    assert other.status == 200
    assert up.count("m") == 2


async def test_an_outcome_that_cannot_be_recorded_holds_the_answer_back(tmp_path: Path, up: Upstream) -> None:
    """The model has answered, and then the disk is full: the caller gets 503 and nothing of the answer."""

    async def answer(seen: Seen) -> Any:
        return plain(200, {**PLAIN, "said": "secret " * 400})

    up.answers["m"] = answer
    config = {"model_list": [deployment("m", up)], "tenants": [REGULATED]}
    async with router(tmp_path, config) as door:
        assert (await door.post(model="m")).status == 200
        with file_limit(size_of_log(tmp_path) + size_of_intent(tmp_path) + 800):
            got = await door.post(model="m")
    assert (got.status, got.error["code"], b"secret" in got.raw) == (503, "audit_unavailable", False)
    assert up.count("m") == 2


@pytest.mark.parametrize(
    ("where", "asked"), [("user", {"user": "ann"}), ("header:x-person", {"headers": {"X-Person": "ann"}})]
)
async def test_a_person_is_named_by_no_record(tmp_path: Path, up: Upstream, where: str, asked: dict[str, Any]) -> None:
    """Requests of one person share a name that is not theirs, others have none; who asks in no words is refused."""
    tenant = {"name": "a", "key": KEY, "audit": {"content": "full", "subject": where}}
    async with router(tmp_path, {"model_list": [deployment("m", up)], "tenants": [tenant]}) as door:
        for more in (asked, asked, {}):
            assert (await door.post(model="m", **more)).status == 200
        if where == "user":
            assert (await door.post(model="m", user=7)).error["param"] == "user"
    names = [o["content"].get("subject") for o in outcomes(tmp_path)]
    assert names[0] == names[1] not in (None, "ann")
    assert names[2] is None
    Custody(tmp_path / "audit", "a").erase("carol", "asked", "ann")
    with pytest.raises(AuditError, match="key of this person was erased"):
        texts(tmp_path, "outcome")


async def test_a_running_router_ends_retention(tmp_path: Path, up: Upstream) -> None:
    """Texts that are too old when the router starts are gone soon after."""
    root = tmp_path / "audit"
    old = Entry("outcome", {}, "dec_old", {"answer": b"text"}, "full", None, time.time() - 3 * 86400)
    Vault.create(root, "a", day_of(old.at))
    Chain(root, "a", Signer.load(root)).append([old])
    async with router(tmp_path, {"model_list": [deployment("m", up)], "tenants": [REGULATED]}):
        await until(lambda: any(r.body.get("what") == "expired" for r in records(root, "a")))
    with pytest.raises(AuditError, match="retention ended"):
        texts(tmp_path, "outcome")


def size_of_log(folder: Path, tenant: str = "a") -> int:
    return max(path.stat().st_size for path in (folder / "audit" / tenant).glob("*.jsonl"))


async def test_killed_in_the_middle_of_a_stream(tmp_path: Path, up: Upstream) -> None:
    """kill -9 while a regulated stream runs: every byte that the caller got is on record, the intent stays open, the
    log holds, and the next start goes on with it."""

    async def answer(seen: Seen) -> Any:
        with suppress(ConnectionError):
            return await seen.stream(*(part for n in range(2000) for part in (chunk(f"word {n} "), 0.005)))

    up.answers["m"] = answer
    config = yaml.safe_dump(
        {"model_list": [deployment("m", up)], "tenants": [REGULATED], "audit": {"dir": "audit"}, "state_dir": "state"}
    )
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    headers = {"authorization": f"Bearer {KEY}"}
    with serving_in_thread(tmp_path, config) as started:
        running = await started
        async with aiohttp.ClientSession() as session:
            read = b""
            async with session.post(f"{running.base}/v1/chat/completions", json=body, headers=headers) as response:
                with suppress(aiohttp.ClientError):
                    while part := await response.content.readany():
                        read += part
                        if len(read) > 5000 and running.process.poll() is None:
                            running.process.kill()
    report = verify(tmp_path / "audit", "a")
    assert (report.faults, len(report.open_intents)) == ([], 1)
    recorded = "".join(t["chunk"] for t in texts(tmp_path, "chunk")).encode()
    assert len(read) > 5000
    assert recorded.startswith(read)
    async with router(tmp_path, {"model_list": [deployment("n", up)], "tenants": [REGULATED]}) as door:
        assert (await door.post(model="n")).status == 200
    assert verify(tmp_path / "audit", "a").open_intents == report.open_intents


def size_of_intent(folder: Path) -> int:
    lines = b"".join(path.read_bytes() for path in (folder / "audit" / "a").glob("*.jsonl")).splitlines()
    return max(len(line) for line in lines if b'"kind":"intent"' in line)


@contextmanager
def serving_in_thread(folder: Path, config: str) -> Iterator[asyncio.Future[Running]]:
    """`serving`, started beside the loop that answers as its upstream."""
    with ExitStack() as stack:
        yield asyncio.get_running_loop().run_in_executor(None, lambda: stack.enter_context(serving(folder, config)))
