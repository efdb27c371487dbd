"""The doors that are passed through, by real HTTP on both sides."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web
from yarl import URL

from router.audit_verify import records
from tests.router.gateway import KEY, UP_KEY, Router, router, until
from tests.router.test_guardrails import own

MIB = 2**20
AUTH = {"authorization": f"Bearer {KEY}"}


@dataclass
class Got:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Up:
    """An upstream that remembers every request, and answers `{"ok": true}` where nothing else is said."""

    base: str = ""
    got: list[Got] = field(default_factory=list)
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    read: bool = True
    hung_up: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read() if self.read else b""
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.got.append(Got(request.method, request.raw_path, headers, body))
        try:
            return web.json_response({"ok": True}) if self.answer is None else await self.answer(request)
        except asyncio.CancelledError:
            self.hung_up += 1
            raise


@contextlib.asynccontextmanager
async def serving() -> AsyncIterator[Up]:
    up = Up()
    app = web.Application(client_max_size=1024 * MIB)
    app.router.add_route("*", "/{path:.*}", up.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    up.base = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield up
    finally:
        await runner.cleanup()


@pytest.fixture
async def up() -> AsyncIterator[Up]:
    async with serving() as state:
        yield state


def entry(name: str, base: str, **params: Any) -> dict[str, Any]:
    info = params.pop("info", {})
    written = {"model": f"openai/up-{name}", "api_base": base, "api_key": UP_KEY, "num_retries": 0, **params}
    return {"model_name": name, "litellm_params": written, "model_info": info}


@contextlib.asynccontextmanager
async def door(folder: Path, *entries: dict[str, Any], **config: Any) -> AsyncIterator[Router]:
    async with router(folder, {"model_list": list(entries), "general_settings": {}, **config}) as running:
        yield running


@pytest.fixture
async def one(tmp_path: Path, up: Up) -> AsyncIterator[Router]:
    async with door(tmp_path, entry("m", up.base, info={"id": "d1"})) as running:
        yield running


async def ask(to: Router, method: str, path: str, **options: Any) -> tuple[int, dict[str, str], bytes]:
    headers = {**AUTH, **options.pop("headers", {})}
    async with to.session.request(method, path, headers=headers, **options) as answer:
        return answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read()


@pytest.mark.parametrize("version", ["", "/v1"])
@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/audio/speech", {"model": "m", "input": "hi", "odd": [1.50, None]}),
        ("POST", "/images/generations", {"prompt": "a cat", "n": 2}),
        ("POST", "/messages", {"model": "m", "max_tokens": 5, "messages": []}),
        ("POST", "/messages/count_tokens", {"messages": []}),
        ("GET", "/files?limit=2&after=a%20b", None),
        ("GET", "/files/file-1/content", None),
        ("DELETE", "/files/file-1", None),
        ("POST", "/batches", {"input_file_id": "file-1", "endpoint": "/v1/chat/completions"}),
        ("POST", "/batches/b%3A1/cancel", None),
    ],
)
async def test_requests_arrive_as_they_were(
    method: str, path: str, body: dict[str, Any] | None, version: str, one: Router, up: Up
) -> None:
    """Method, path, query and body reach the deployment but for the model's name; keys are exchanged for its own."""
    headers = {
        "cookie": "a=b",
        "x-api-key": KEY,
        "x-odd": "1",
        "connection": "x-odd",
        "anthropic-version": "2023-06-01",
    }

    told: dict[str, Any] = {} if body is None else {"json": body}
    url = URL(f"http://127.0.0.1:{one.port}{version}{path}", encoded=True)
    async with one.session.request(method, url, headers={**AUTH, **headers}, **told) as answer:
        assert (answer.status, await answer.json()) == (200, {"ok": True})
        assert answer.headers["x-twolane-deployment"] == "d1"
    got = up.got[0]
    assert (got.method, got.target) == (method, f"/v1{path}")
    renamed = None if body is None else {**body, **({"model": "up-m"} if "model" in body else {})}
    assert (json.loads(got.body) if got.body else None) == renamed
    assert got.headers["authorization"] == f"Bearer {UP_KEY}"
    assert got.headers["anthropic-version"] == "2023-06-01"
    assert got.headers.get("x-api-key") == (UP_KEY if path.startswith("/messages") else None)
    assert KEY not in str(got.headers)
    assert not {"cookie", "x-odd"} & set(got.headers)


async def test_answers_pass_without_credentials(one: Router, up: Up) -> None:
    """Status, type and bytes of an answer arrive; cookies and what is nobody's business do not."""

    async def answer(request: web.Request) -> web.StreamResponse:
        headers = {"set-cookie": "a=b", "x-api-key": "s", "content-disposition": "attachment", "x-request-id": "r"}
        return web.Response(body=b"\0\1\2", content_type="audio/mpeg", status=201, headers=headers)

    up.answer = answer
    status, headers, body = await ask(one, "POST", "/v1/audio/speech", json={"input": "hi"})
    assert (status, body, headers["content-type"], headers["content-length"]) == (201, b"\0\1\2", "audio/mpeg", "3")
    assert (headers["content-disposition"], headers["x-request-id"]) == ("attachment", "r")
    assert not {"set-cookie", "x-api-key"} & set(headers)


@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({"json": {"model": "b"}}, "up-b"),
        ({"json": {"prompt": "x"}, "params": {"model": "b"}}, None),
        ({"json": {}, "headers": {"x-twolane-model": "b"}}, None),
        ({"json": {"model": "b"}, "params": {"model": "a"}}, "up-b"),
        ({"headers": {"x-twolane-deployment": "id-b"}}, None),
    ],
    ids=["body", "query", "header", "body wins", "deployment"],
)
async def test_how_a_group_is_named(options: dict[str, Any], model: str | None, tmp_path: Path, up: Up) -> None:
    """The group is named in the body, the query or a header, or by its deployment; where nobody names it, by nobody."""
    entries = [entry("a", up.base, info={"id": "id-a"}), entry("b", up.base, info={"id": "id-b"})]
    async with door(tmp_path, *entries) as to:
        assert json.loads((await ask(to, "GET", "/v1/files"))[2])["error"]["code"] == "missing_model"
        status, headers, _ = await ask(to, "POST", "/v1/images/generations", **options)
    assert (status, headers["x-twolane-deployment"]) == (200, "id-b")
    assert up.got[0].target == "/v1/images/generations", "?model= is for us alone"
    if model is not None:
        assert json.loads(up.got[0].body)["model"] == model


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/json; gzip"])
async def test_no_model_slips_through_unread(kind: str, one: Router, up: Up) -> None:
    """A body in which an upstream may find a model that we did not read is refused."""
    kind, _, coding = kind.partition("; ")
    headers = {"content-type": kind, **({"content-encoding": coding} if coding else {})}
    told = {"data": b'{"model":"dearest"}', "headers": headers}
    status, _, body = await ask(one, "POST", "/v1/messages?model=m", **told)
    assert (status, json.loads(body)["error"]["code"]) == (415, "unsupported_media_type")
    status, _, body = await ask(one, "POST", "/v1/messages?model=m", json={"MODEL": "dearest"})
    assert (status, json.loads(body)["error"]["code"]) == (400, "unknown_field")
    assert not up.got


async def test_only_groups_that_can_are_counted(tmp_path: Path, up: Up) -> None:
    """The one group that the tenant may use and that HTTP serves needs no name; another lane cannot be asked."""
    spoken = {"model_name": "spoken", "litellm_params": {"model": "openai/x", "mock_response": "hi"}}
    tenants = [{"name": "a", "key": KEY, "models": ["a", "spoken"]}]
    async with door(tmp_path, entry("a", up.base), entry("b", up.base), spoken, tenants=tenants) as to:
        assert (await ask(to, "GET", "/v1/files"))[0] == 200
        status, _, body = await ask(to, "GET", "/v1/files?model=spoken")
        assert (status, json.loads(body)["error"]["code"]) == (400, "needs_unsupported")
        status, _, body = await ask(to, "GET", "/v1/files?model=b")
        assert (status, json.loads(body)["error"]["code"]) == (403, "model_not_allowed")


def upload(content: bytes, *, model_first: bool) -> aiohttp.FormData:
    form = aiohttp.FormData()
    if model_first:
        form.add_field("model", "m")
    form.add_field("file", io.BytesIO(content), filename="a.mp3", content_type="audio/mpeg")
    if not model_first:
        form.add_field("model", "m")
    return form


@pytest.mark.parametrize("model_first", [True, False])
async def test_forms_are_renamed(model_first: bool, one: Router, up: Up) -> None:
    """A form reaches the upstream with its model's name, the file untouched, and a length that is true."""
    said: list[tuple[str, bytes]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        for name, value in (await request.post()).items():
            said.append((name, value.file.read() if isinstance(value, web.FileField) else str(value).encode()))
        return web.json_response({"text": "hi", "usage": {"type": "tokens", "input_tokens": 7, "output_tokens": 2}})

    up.answer = answer
    up.read = False
    content = bytes(range(256)) * 2000
    status, headers, _ = await ask(
        one, "POST", "/v1/audio/transcriptions", data=upload(content, model_first=model_first)
    )
    assert status == 200
    assert sorted(said) == [("file", content), ("model", b"up-m")]
    assert "transfer-encoding" not in up.got[0].headers
    happened = (await one.get(f"/v1/decisions/{headers['x-twolane-decision']}")).json["happened"]
    assert (happened["prompt_tokens"], happened["completion_tokens"]) == (7, 2)


def heard(**more: object) -> dict[str, object]:
    return {"text": "hi", **more}


@pytest.mark.parametrize(
    ("path", "prices", "answer", "usd"),
    [
        ("images/generations", {"output_cost_per_image": 0.5}, {"data": [{"url": "u"}, {"url": "v"}]}, 1.0),
        ("images/generations", {"output_cost_per_image": 0.5}, {"created": 1}, None),
        ("audio/transcriptions", {"input_cost_per_second": 0.5}, heard(usage={"type": "duration", "seconds": 3}), 1.5),
        ("audio/transcriptions", {"input_cost_per_second": 0.5}, heard(duration=2.5), 1.25),
        ("audio/transcriptions", {"input_cost_per_second": 0.5}, heard(duration="2.5"), 1.25),
        ("audio/transcriptions", {"input_cost_per_second": 0.5}, heard(), None),
        ("audio/speech", {"input_cost_per_character": 0.125}, b"sound", 0.5),
        ("audio/speech", {"output_cost_per_second": 0.125}, b"sound", None),
        (
            "audio/transcriptions",
            {"input_cost_per_token": 1.0, "input_cost_per_audio_token": 3.0},
            heard(usage={"input_tokens": 5, "output_tokens": 1, "input_token_details": {"audio_tokens": 4}}),
            13.0,
        ),
        (
            "messages",
            {"input_cost_per_token": 1.0, "cache_creation_input_token_cost": 1.25},
            {"usage": {"input_tokens": 2, "cache_creation_input_tokens": 4, "output_tokens": 1}},
            7.0,
        ),
        ("messages/count_tokens", {"input_cost_per_token": 1.0}, {"input_tokens": 5}, 0.0),
        ("batches", {"input_cost_per_token": 1.0}, {"id": "batch_1"}, 0.0),
        ("images/generations", {}, {"created": 1}, 0.0),
    ],
)
async def test_what_doors_of_images_and_sound_cost(
    tmp_path: Path, up: Up, path: str, prices: dict[str, float], answer: dict[str, object] | bytes, usd: float | None
) -> None:
    """Images, seconds, characters and kinds of tokens are billed; what neither side tells costs an unknown sum."""

    async def says(request: web.Request) -> web.StreamResponse:
        if isinstance(answer, bytes):
            return web.Response(body=answer, content_type="audio/mpeg")
        return web.json_response(answer)

    up.answer = says
    async with door(tmp_path, entry("m", up.base, **prices)) as to:
        got = await to.post(f"/v1/{path}", model="m", input="höre")
        assert got.status == 200
    [outcome] = [r.body for r in records(tmp_path / "audit", "a") if "result" in r.body]
    assert outcome["cost"] == usd


async def test_a_model_behind_a_long_file(tmp_path: Path, up: Up) -> None:
    """A field `model` that comes too late must name the group that was chosen without it."""
    big = upload(b"x" * (2 * MIB), model_first=False)
    async with door(tmp_path, entry("m", up.base), entry("n", up.base)) as to:
        assert (await ask(to, "POST", "/v1/files?model=m", data=big))[0] == 200
        assert b'name="model"\r\n\r\nup-m\r\n' in up.got[0].body
        big = upload(b"x" * (2 * MIB), model_first=False)
        status, _, body = await ask(to, "POST", "/v1/files?model=n", data=big)
        assert (status, json.loads(body)["error"]["code"]) == (400, "model_too_late")


MESSAGES = [
    (
        "message_start",
        {"type": "message_start", "message": {"usage": {"input_tokens": 9, "cache_read_input_tokens": 4}}},
    ),
    ("content_block_delta", {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "hé"}}),
    ("message_delta", {"type": "message_delta", "usage": {"output_tokens": 5}}),
]


async def events(request: web.Request, *, more: float = 0.0, broken: bool = False) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for name, event in MESSAGES:
        await response.write(f"event: {name}\ndata: {json.dumps(event)}\n\n".encode())
    if broken:
        assert request.transport is not None
        request.transport.close()
    await asyncio.sleep(more)
    return response


async def test_messages_stream(tmp_path: Path, up: Up) -> None:
    """Anthropic's events arrive byte for byte, for a key in Anthropic's header, and their tokens are billed."""
    up.answer = events
    price = {"input_cost_per_token": 1e-3, "output_cost_per_token": 1e-2, "cache_read_input_token_cost": 1e-4}
    async with door(tmp_path, entry("m", up.base, **price)) as to:
        body = {"model": "m", "stream": True, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        async with to.session.post("/v1/messages", json=body, headers={"x-api-key": KEY}) as answer:
            said = await answer.read()
            id = answer.headers["x-twolane-decision"]
        metrics = (await to.get("/metrics")).raw.decode()
        happened = (await to.get(f"/v1/decisions/{id}")).json["happened"]
    assert said == b"".join(f"event: {name}\ndata: {json.dumps(event)}\n\n".encode() for name, event in MESSAGES)
    assert (happened["prompt_tokens"], happened["cached_tokens"], happened["completion_tokens"]) == (13, 4, 5)
    assert happened["cost"] == pytest.approx(9e-3 + 4e-4 + 5e-2)
    assert 'twolane_requests_total{tenant="a",model="m",outcome="ok"} 1' in metrics


async def peak(work: Awaitable[Any]) -> tuple[Any, float]:
    """What it gives, and by how many MiB this process grew meanwhile at most."""
    process = psutil.Process()
    before = most = process.memory_info().rss
    task = asyncio.ensure_future(work)
    while not task.done():
        most = max(most, process.memory_info().rss)
        await asyncio.sleep(0.005)
    return task.result(), (most - before) / MIB


async def test_64_mib_each_way(tmp_path: Path, up: Up) -> None:
    """A large body streams through in either direction: it is never held, and arrives as it was."""
    piece, times = bytes(range(256)) * 256, 1024
    digest = hashlib.sha256(piece * times).hexdigest()
    seen = hashlib.sha256()
    up.read = False

    async def take(request: web.Request) -> web.StreamResponse:
        async for part in request.content.iter_any():
            seen.update(part)
        return web.json_response({"id": "file-1"})

    async def give(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(times):
            await response.write(piece)
        return response

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(times):
            yield piece

    async def down(to: Router) -> str:
        got = hashlib.sha256()
        async with to.session.get("/v1/files/f/content", headers=AUTH) as answer:
            async for part in answer.content.iter_any():
                got.update(part)
        return got.hexdigest()

    settings = {"master_key": "sk-master-0123456789", "max_request_size_mb": 80}
    async with door(tmp_path, entry("m", up.base), general_settings=settings) as to:
        up.answer = take
        (status, _, _), grown = await peak(ask(to, "POST", "/v1/files", data=pieces()))
        assert (status, seen.hexdigest()) == (200, digest)
        assert grown < 24
        up.answer = give
        got, grown = await peak(down(to))
        assert got == digest
        assert grown < 24


@pytest.mark.parametrize("declared", [True, False])
async def test_bodies_are_bounded(declared: bool, tmp_path: Path, up: Up) -> None:
    """A body beyond the limit is refused, whether it says so before or not."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(48):
            yield b"x" * 2**16

    async with door(tmp_path, entry("m", up.base), general_settings={"max_request_size_mb": 2}) as to:
        body = io.BytesIO(b"x" * (3 * MIB)) if declared else pieces()
        status, _, said = await ask(to, "POST", "/v1/files", data=body)
    assert (status, json.loads(said)["error"]["code"]) == (413, "body_too_large")
    assert not up.got


async def test_a_caller_who_hangs_up_is_not_uploaded_for(one: Router, up: Up) -> None:
    """When the caller goes while its body is on the way, the upstream's request ends too, and the call is abandoned."""
    up.read = False
    began, broken = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            async for _ in request.content.iter_any():
                began.set()
        except (ConnectionError, asyncio.CancelledError, aiohttp.ClientError):
            broken.set()
            raise
        return web.json_response({})

    up.answer = answer
    _, writer = await asyncio.open_connection("127.0.0.1", one.port)
    head = f"POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 100000\r\n\r\n"
    writer.write(head.encode() + b"x" * 1000)
    await asyncio.wait_for(began.wait(), 5)
    writer.close()
    await asyncio.wait_for(broken.wait(), 5)
    await ended(one, "abandoned")


async def ended(to: Router, outcome: str) -> None:
    wanted = f'outcome="{outcome}"}} 1'
    async with asyncio.timeout(5):
        while wanted not in (await to.get("/metrics")).raw.decode():
            await asyncio.sleep(0.02)


async def test_a_caller_who_hangs_up_is_not_answered_for(one: Router, up: Up) -> None:
    """When the caller goes amid an answer, the upstream is hung up on."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return await events(request, more=30)

    up.answer = answer
    async with one.session.post("/v1/messages", json={"stream": True}, headers=AUTH) as got:
        await got.content.readany()
        got.close()
    await until(lambda: up.hung_up == 1)
    await ended(one, "abandoned")


async def test_an_upstream_that_hangs_up_amid_events(one: Router, up: Up) -> None:
    """Events that break off end with one that says so."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return await events(request, broken=True)

    up.answer = answer
    status, _, body = await ask(one, "POST", "/v1/messages", json={"stream": True})
    assert status == 200
    last = body.strip().split(b"\n\n")[-1]
    assert last.startswith(b"event: error\ndata: ")
    said = json.loads(last.split(b"data: ")[1])
    assert (said["type"], said["error"]["code"]) == ("error", "upstream_unavailable")
    await ended(one, "cut")


async def test_an_upstream_that_hangs_up_amid_a_file(one: Router, up: Up) -> None:
    """A file that breaks off does not look whole to the caller, whether its length was told or not."""
    length: dict[str, str] = {}

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=length)
        await response.prepare(request)
        await response.write(b"x" * 1000)
        assert request.transport is not None
        request.transport.close()
        return response

    up.answer = answer
    for told in ({}, {"content-length": "5000"}):
        length.update(told)
        with pytest.raises(aiohttp.ClientPayloadError):
            await ask(one, "GET", "/v1/files/f/content")


def closed_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/v1"


@pytest.mark.parametrize(
    ("path", "body", "first", "status", "asked"),
    [
        ("/v1/files", "big", None, 200, 1),  # not reached: nothing has left
        ("/v1/messages", "json", None, 200, 1),
        ("/v1/messages", "json", 500, 200, 2),  # changes nothing at the upstream
        ("/v1/audio/transcriptions", "small", 503, 200, 2),
        ("/v1/audio/transcriptions", "big", 503, 503, 1),  # its body has left
        ("/v1/files", "small", 500, 500, 1),  # the file may be there now
        ("/v1/files", "small", 429, 200, 2),  # it is not
        ("/v1/batches", "json", 500, 500, 1),
        ("/v1/messages", "json", 400, 400, 1),  # the caller's own
    ],
)
async def test_who_is_asked_next(
    path: str, body: str, first: int | None, status: int, asked: int, tmp_path: Path, up: Up
) -> None:
    """Another deployment is asked when nothing has left, or when it can do no harm; then only."""
    statuses = [] if first is None else [first]

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"ok": True}, status=statuses.pop() if statuses else 200)

    up.answer = answer
    base = closed_port() if first is None else up.base
    entries = [entry("m", base, order=1, info={"id": "d1"}), entry("m", up.base, order=2, info={"id": "d2"})]
    sent: dict[str, Any] = {
        "json": {"json": {"messages": []}},
        "small": {"data": upload(b"x" * 1000, model_first=True)},
        "big": {"data": upload(b"x" * (3 * MIB), model_first=True)},
    }[body]
    async with door(tmp_path, *entries, router_settings={"num_retries": 0}) as to:
        got, headers, said = await ask(to, "POST", path, **sent)
    assert (got, len(up.got)) == (status, asked), said
    if got == 200:
        assert headers["x-twolane-deployment"] == "d2"
        assert all(g.body == up.got[0].body for g in up.got) or body != "json"


@pytest.mark.parametrize(
    ("status", "body", "shown", "code"),
    [
        (404, {"error": {"message": "No such File object: f", "code": None}}, 404, None),
        (404, "nothing here", 502, "upstream_not_found"),
        (401, {"error": {"message": f"bad key {UP_KEY}"}}, 502, "upstream_auth"),
        (422, {"error": {"message": f"odd {UP_KEY}", "code": "odd"}}, 422, "odd"),
    ],
)
async def test_upstream_errors(status: int, body: Any, shown: int, code: str | None, one: Router, up: Up) -> None:
    """What is missing at the upstream is the caller's to know; the router's own account is not."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    up.answer = answer
    got, _, said = await ask(one, "GET", "/v1/files/f")
    assert (got, json.loads(said)["error"]["code"]) == (shown, code)
    assert UP_KEY not in said.decode()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/files/../chat/completions",
        "/v1/files/%2e%2e/chat/completions",
        "/v1/files/..%2fadmin",
        "/v1/files/%252e%252e/admin",
        "/v1/files//x",
        "/v1/files/a%5c..%5cb",
        "/v1/files/a%00b",
    ],
)
async def test_paths_that_play(path: str, one: Router, up: Up) -> None:
    """A path that an upstream may read as another one is refused."""
    reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n\r\n".encode())
    said = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert said.startswith(b"HTTP/1.1 400")
    assert b"invalid_path" in said
    assert not up.got


async def test_who_may_not(tmp_path: Path, up: Up) -> None:
    """No key, a regulated tenant, a region that the tenant's policy does not list, a used-up limit: nothing is sent."""
    tenants = [
        {"name": "bank", "key": "sk-bank-0123456789", "regulated": True},
        {"name": "kr", "key": "sk-kr-0123456789", "regions": ["kr"]},
        {"name": "few", "key": "sk-few-0123456789", "rpm_limit": 1},
    ]
    async with door(tmp_path, entry("m", up.base, info={"region": "us"}), tenants=tenants) as to:
        for key, status, code in [
            ("nobody", 401, "invalid_api_key"),
            ("sk-bank-0123456789", 403, "regulated_not_recorded"),
            ("sk-kr-0123456789", 403, "region_not_allowed"),
        ]:
            got, _, said = await ask(to, "GET", "/v1/files", headers={"authorization": f"Bearer {key}"})
            assert (got, json.loads(said)["error"]["code"]) == (status, code)
        assert not up.got
        few = {"authorization": "Bearer sk-few-0123456789"}
        assert [(await ask(to, "GET", "/v1/files", headers=few))[0] for _ in range(2)] == [200, 429]


async def test_guardrails(tmp_path: Path, up: Up) -> None:
    """What can be read is checked and rewritten on both ways; what cannot is refused, and nothing of it leaves."""
    said = {"content": [{"type": "text", "text": "a swordfish"}], "usage": {"input_tokens": 1, "output_tokens": 1}}

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("content"):
            return web.Response(body=b"swordfish", content_type="text/plain")
        return web.json_response(said)

    up.answer = answer
    guard = own("hides", options={"replace": "swordfish", "by": "carp"})
    blocks = [
        {"type": "tool_result", "content": [{"type": "text", "text": "swordfish"}]},
        {"type": "tool_use", "input": {"q": ["swordfish"]}},
    ]
    body = {"system": "swordfish", "messages": [{"role": "user", "content": blocks}]}
    async with door(tmp_path, entry("m", up.base), guardrails=[guard]) as to:
        status, headers, got = await ask(to, "POST", "/v1/messages", json=body)
        assert (status, headers["x-litellm-applied-guardrails"]) == (200, "hides")
        assert json.loads(got) == {**said, "content": [{"type": "text", "text": "a carp"}]}
        assert json.loads(up.got[0].body) == json.loads(json.dumps(body).replace("swordfish", "carp"))
        await ask(to, "POST", "/v1/images/generations", json={"prompt": "swordfish"})
        assert json.loads(up.got[1].body) == {"prompt": "carp"}
        refused = [
            ("POST", "/v1/files", {"data": upload(b"swordfish", model_first=True)}, 400, "guardrail_unreadable"),
            ("POST", "/v1/batches", {"json": {"input_file_id": "f"}}, 400, "guardrail_unreadable"),
            ("POST", "/v1/messages", {"json": {**body, "stream": True}}, 400, "guardrail_unreadable"),
            ("GET", "/v1/files/f/content", {}, 503, "guardrail_failed"),
        ]
        for method, path, options, status, code in refused:
            got_status, _, got = await ask(to, method, path, **options)
            assert (got_status, json.loads(got)["error"]["code"]) == (status, code), path
            assert b"swordfish" not in got
        assert [g.target for g in up.got[2:]] == ["/v1/files/f/content"]


@pytest.mark.parametrize("content", ["full", "none"])
async def test_records(content: str, tmp_path: Path, up: Up) -> None:
    """Each request leaves one outcome that names method, path, decision and tokens; its content as the tenant says."""
    up.answer = events
    tenants = [{"name": "a", "key": KEY, "audit": {"content": content}}]
    async with door(tmp_path, entry("m", up.base, info={"id": "d1"}), tenants=tenants) as to:
        await ask(to, "POST", "/v1/messages", json={"stream": True, "messages": []})
        await ask(to, "DELETE", "/v1/files/f")
    told = [r.body for r in records(tmp_path / "audit", "a") if r.body["kind"] == "outcome"]
    assert [(o["method"], o["path"], o["deployment"], o["result"]) for o in told] == [
        ("POST", "/messages", "d1", "answered"),
        ("DELETE", "/files/f", "d1", "answered"),
    ]
    assert told[0]["usage"]["completion_tokens"] == 5
    kept = {"answer", "request"}
    assert all(kept & set(o.get("content", {})) == (kept if content == "full" else set()) for o in told)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stored_response_is_asked_for_where_it_lies(stream: bool, tmp_path: Path, up: Up) -> None:
    """What goes on from a response, reads, cancels or deletes it goes to the deployment that answered it, of however
    many; one that nobody here has answered goes anywhere that policy allows."""
    told = iter(range(10))

    async def answer(request: web.Request) -> web.StreamResponse:
        body = {"id": f"resp_{next(told)}", "object": "response", "status": "completed", "output": []}
        body["usage"] = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
        if not stream or not await request.read():
            return web.json_response(body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        event = {"type": "response.completed", "response": body}
        await response.write(b"event: response.completed\ndata: " + json.dumps(event).encode() + b"\n\n")
        return response

    up.answer = answer
    entries = [entry("m", up.base, model=f"openai/{name}", info={"id": name}) for name in ("a", "b", "c", "d")]
    async with door(tmp_path, *entries) as to:

        async def deployment_of(method: str, path: str, **options: Any) -> tuple[str, str]:
            status, headers, _ = await ask(to, method, path, **options)
            assert status == 200
            return headers["x-twolane-deployment"], headers["x-twolane-reason"]

        begun = {"model": "m", "input": "hi", "stream": stream}
        first, _ = await deployment_of("POST", "/v1/responses", json=begun)
        for number in range(4):
            on = {**begun, "previous_response_id": f"resp_{number}"}
            assert await deployment_of("POST", "/v1/responses", json=on) == (first, "sticky")
        assert await deployment_of("GET", "/v1/responses/resp_4?include=x") == (first, "sticky")
        assert await deployment_of("GET", "/responses/resp_2/input_items") == (first, "sticky")
        assert await deployment_of("POST", "/v1/responses/resp_0/cancel") == (first, "sticky")
        assert await deployment_of("DELETE", "/v1/responses/resp_4") == (first, "sticky")
        assert (await deployment_of("GET", "/v1/responses/other"))[1] != "sticky"
    assert [got.target for got in up.got[-5:]] == [
        "/v1/responses/resp_4?include=x",
        "/v1/responses/resp_2/input_items",
        "/v1/responses/resp_0/cancel",
        "/v1/responses/resp_4",
        "/v1/responses/other",
    ]


@pytest.mark.parametrize(
    ("key", "body", "status"),
    [("sk-no", {"model": "m"}, 401), (KEY, {"model": "nobody"}, 404), (KEY, {"model": "m"}, 429)],
)
async def test_anthropics_clients_can_read_errors(
    key: str, body: dict[str, Any], status: int, one: Router, up: Up
) -> None:
    """What goes wrong at `/messages`, whoever says so, is an error in Anthropic's shape and in OpenAI's."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"type": "error", "error": {"type": "rate_limit_error", "message": "no"}}, status=429)

    up.answer = answer
    async with one.session.post("/v1/messages", json=body, headers={"x-api-key": key}) as got:
        said = await got.json()
        assert (got.status, said["type"]) == (status, "error")
        assert set(said["error"]) == {"message", "type", "param", "code"}
