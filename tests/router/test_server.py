"""The server's two ways: whatever a request looks like on the wire, its answer is the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from router import server
from router.server import HEAD, Exchange
from router.transports.stream import Stream
from tests.router.gateway import KEY, Router, Seen, Upstream, chunk, deployment, plain, router, until, upstream

BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
STREAM = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


@pytest.fixture
async def door(tmp_path: Path, up: Upstream) -> AsyncIterator[Router]:
    async with router(tmp_path, {"model_list": [deployment("m", up)]}) as running:
        running.app.endpoint.max_body = 100_000
        yield running


class Wire:
    """A bare connection to the router."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in head[1:-2])
        if "content-length" in headers:
            return int(head[0].split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return int(head[0].split()[1]), headers, body


@contextlib.asynccontextmanager
async def wire(door: Router) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


def post(body: bytes = BODY, *lines: str, version: str = "1.1", sized: bool = True) -> bytes:
    told = [f"authorization: Bearer {KEY}", *lines, *([f"content-length: {len(body)}"] if sized else [])]
    head = "\r\n".join([f"POST /v1/chat/completions HTTP/{version}", "host: x", *told])
    return head.encode() + b"\r\n\r\n" + body


def chunked(body: bytes, *trailers: str) -> bytes:
    pieces = [body[at : at + 7] for at in range(0, len(body), 7)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    last = b"".join(trailer.encode() + b"\r\n" for trailer in trailers)
    return post(framed + b"0\r\n" + last + b"\r\n", "transfer-encoding: chunked", sized=False)


WAYS = {
    "hot": post(),
    "chunked": chunked(BODY),
    "closing": post(BODY, "connection: close"),
    "1.0": post(BODY, version="1.0"),
    "expect": post(BODY, "expect: 100-continue"),
    "trailers": chunked(BODY, "x-twolane-transport: none", "x-twolane-deployment: none"),
    "twice": post(BODY, "x-twolane-transport: text", "x-twolane-transport: cache"),
    "long": post(json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi" * 40_000}]}).encode()),
}


@pytest.mark.parametrize("way", WAYS)
async def test_every_way_gives_the_same_answer(door: Router, up: Upstream, way: str) -> None:
    """A request is answered alike however it is framed, in whatever reads it comes, and whether ASGI is passed."""
    for cut in (max(1, len(WAYS[way]) // 100), 10**6):
        up.seen.clear()
        await _answered_well(door, up, way, cut)


async def _answered_well(door: Router, up: Upstream, way: str, cut: int) -> None:
    sent = WAYS[way]
    async with wire(door) as own:
        for at in range(0, len(sent), cut):
            own.writer.write(sent[at : at + cut])
            await asyncio.sleep(0)
        if way == "expect":
            assert (await own.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        status, headers, body = await own.answer()
    assert status == 200
    assert json.loads(body)["choices"][0]["message"]["content"] == "ok"
    assert headers["content-type"].startswith("application/json")
    assert {"date", "x-twolane-decision", "x-litellm-model-id"} <= set(headers)
    assert ("connection" in headers) == (way in ("closing", "1.0"))
    assert up.count("m") == 1


@pytest.mark.parametrize("first", ["hot", "chunked", "stream"])
async def test_pipelined_requests_are_answered_in_order(door: Router, up: Upstream, first: str) -> None:
    """What is sent before an answer has come waits for it, by whichever way either goes, and nothing is mixed up."""

    async def answer(seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(0.05 if len(up.seen) == 1 else 0)
        if seen.body.get("stream"):
            return await seen.stream(chunk("a"), chunk("b", "stop"))
        return plain(200, {"n": len(up.seen), "choices": []})

    up.answers["m"] = answer
    opening = post(STREAM) if first == "stream" else WAYS[first]
    async with wire(door) as own:
        own.writer.write(opening + post() + chunked(BODY) + post())
        bodies = [(await own.answer())[2] for _ in range(4)]
    if first == "stream":
        assert bodies[0].endswith(b"data: [DONE]\n\n")
    assert [json.loads(body)["n"] for body in bodies[1:]] == [2, 3, 4]


async def test_a_connection_serves_many(door: Router, up: Upstream) -> None:
    """Plain answers, streams, refusals and pages follow one another on one connection."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return await seen.stream(chunk("a", "stop")) if seen.body.get("stream") else plain()

    up.answers["m"] = answer
    page = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n\r\n" % KEY.encode()
    async with wire(door) as own:
        for sent, expected in [(post(), 200), (page, 200), (post(STREAM), 200), (post(b"{"), 400), (post(), 200)]:
            own.writer.write(sent)
            assert (await own.answer())[0] == expected


async def test_requests_with_the_same_head_are_each_their_own(door: Router, up: Upstream) -> None:
    """On one connection each request is answered by its own body and key, in whatever reads it comes."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return plain(200, {"said": seen.body["messages"][0]["content"], "choices": []})

    up.answers["m"] = answer

    def saying(text: str) -> bytes:
        return post(json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode())

    async with wire(door) as own:

        async def said(*reads: bytes) -> tuple[int, object]:
            for read in reads:
                own.writer.write(read)
                await own.writer.drain()
                await asyncio.sleep(0.005)
            status, _, body = await own.answer()
            return status, json.loads(body).get("said")

        for text in ("a", "b", "c" * 5000, ""):
            assert await said(saying(text)) == (200, text)
        assert await said(saying("cut")[:20], saying("cut")[20:]) == (200, "cut")
        assert await said(saying("cut")[:-3], saying("cut")[-3:]) == (200, "cut")
        assert await said(saying("d").replace(KEY.encode(), b"sk-another-key-of-nobody")) == (401, None)
        assert await said(saying("e")) == (200, "e")
        own.writer.write(saying("f") + saying("g"))
        assert [json.loads((await own.answer())[2])["said"] for _ in range(2)] == ["f", "g"]
        assert await said(saying("x" * 70_000)) == (200, "x" * 70_000)
        assert (await said(saying("x" * 100_000)))[0] == 413
        assert await said(saying("h")) == (200, "h")


@pytest.mark.parametrize("sent", [post()[:-5], post(STREAM), post()], ids=["in the body", "stream", "plain"])
async def test_a_hang_up_leaves_nothing_behind(door: Router, up: Upstream, sent: bytes) -> None:
    """Whoever leaves, at whatever moment, ends what runs for them and no more; the next one is served."""

    async def answer(seen: Seen) -> web.StreamResponse:
        if len(up.seen) == 1:
            await asyncio.sleep(30)
        return plain()

    up.answers["m"] = answer
    whole = sent in (post(), post(STREAM))
    async with wire(door) as own:
        own.writer.write(sent)
        await (until(lambda: len(up.seen) == 1) if whole else asyncio.sleep(0.05))
    if whole:
        await until(lambda: up.hung_up == ["m"])
        async with wire(door) as other:
            other.writer.write(post())
            assert (await other.answer())[0] == 200
    else:
        await asyncio.sleep(0.05)
        assert up.seen == []


async def test_a_slow_reader_makes_the_upstream_wait(door: Router, up: Upstream) -> None:
    """A stream is read no faster than its caller reads it: what waits in between is bounded."""
    written = 0

    async def answer(seen: Seen) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(seen.request)
        for _ in range(100):
            await response.write(b"data: " + json.dumps(chunk("x" * 200_000)).encode() + b"\n\n")
            written += 1
        await response.write(b"data: " + json.dumps(chunk("", "stop")).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    up.answers["m"] = answer
    async with wire(door) as own:
        own.writer.write(post(STREAM))
        before = -1
        while written != before:
            before = written
            await asyncio.sleep(0.3)
        assert 0 < written < 75
        status, _, body = await own.answer()
    assert (status, body.count(b"data: ")) == (200, 102)


@pytest.mark.parametrize("size", [100_001, 70_000])
async def test_bodies_keep_their_bound(door: Router, up: Upstream, size: int) -> None:
    """A body past the bound is refused, whether its length is told or shows; a long one within it is not."""
    body = BODY + b" " * (size - len(BODY))
    async with wire(door) as own:
        own.writer.write(post(body))
        status, _, _ = await own.answer()
    async with wire(door) as own:
        own.writer.write(chunked(body))
        assert status == (await own.answer())[0] == (413 if size > 100_000 else 200)


@pytest.mark.parametrize("said", ["nothing", "comments"])
async def test_a_silent_stream_is_ended(tmp_path: Path, up: Upstream, said: str) -> None:
    """What is no event keeps no stream alive: the caller gets an error in time, and the upstream is hung up on."""

    async def answer(seen: Seen) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(seen.request)
        await response.write(b"data: " + json.dumps(chunk("a")).encode() + b"\n\n")
        for _ in range(100):
            await asyncio.sleep(0.05)
            await response.write(b": still there\n\n" if said == "comments" else b"")
        return response

    up.answers["m"] = answer
    async with router(tmp_path, {"model_list": [deployment("m", up, timeout=0.3)]}) as door, wire(door) as own:
        own.writer.write(post(STREAM))
        _, _, body = await own.answer()
        assert json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]["code"] == "upstream_timeout"
        await until(lambda: up.hung_up == ["m"])


async def test_a_fault_amid_a_stream_is_its_end(door: Router, up: Upstream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of ours while an upstream is being read ends that one stream in an error event, and nothing else."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return await seen.stream(chunk("a"), 0.1, chunk("b"), chunk("c", "stop"))

    def broken(self: Stream, data: bytes) -> bytes:
        if b'"b"' in data:
            raise RuntimeError("a fault")
        return feed(self, data)

    feed, up.answers["m"] = Stream.feed, answer
    monkeypatch.setattr(Stream, "feed", broken)
    async with wire(door) as own:
        own.writer.write(post(STREAM))
        _, _, body = await own.answer()
        assert json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]["code"] == "internal_error"
        monkeypatch.undo()
        own.writer.write(post(STREAM))
        assert (await own.answer())[2].endswith(b"data: [DONE]\n\n")


async def test_a_stopping_server_finishes_what_runs(tmp_path: Path, up: Upstream) -> None:
    """An answer under way when the server is told to stop is sent whole, and says that the connection closes."""
    let = asyncio.Event()

    async def answer(seen: Seen) -> web.StreamResponse:
        await let.wait()
        return plain()

    up.answers["m"] = answer
    running = router(tmp_path, {"model_list": [deployment("m", up)]})
    door = await running.__aenter__()
    async with wire(door) as own:
        own.writer.write(post())
        await until(lambda: len(up.seen) == 1)
        stopping = asyncio.create_task(running.__aexit__(None, None, None))
        await asyncio.sleep(0.2)
        let.set()
        status, headers, _ = await own.answer()
        assert (status, headers["connection"]) == (200, "close")
        assert await own.reader.read() == b""
        await stopping


async def test_a_fault_of_ours_is_an_answer(door: Router, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody foresaw is a 500 in OpenAI's shape, and its connection serves on."""

    async def broken(exchange: Exchange) -> None:
        raise RuntimeError("a fault")

    async with wire(door) as own:
        with monkeypatch.context() as patched:
            patched.setattr(door.app.endpoint, "answer_hot", broken)
            own.writer.write(post())
            status, _, body = await own.answer()
        assert (status, json.loads(body)["error"]["code"]) == (500, "internal_error")
        own.writer.write(post())
        assert (await own.answer())[0] == 200


async def test_idle_connections_end_after_their_last_answer(tmp_path: Path, up: Upstream) -> None:
    """A connection is kept for so long after its last answer, not after its first."""
    loop = asyncio.get_running_loop()
    config = {"model_list": [deployment("m", up)]}
    async with router(tmp_path, config, keep_alive=1) as door, wire(door) as connection, asyncio.timeout(20):
        for _ in range(5):
            await asyncio.sleep(0.3)
            asked = loop.time()
            connection.writer.write(post())
            assert (await connection.answer())[0] == 200
        assert await connection.reader.read() == b""
        assert loop.time() - asked > 0.99


@pytest.mark.parametrize("keep", [(), ("connection: keep-alive",)])
async def test_a_stream_by_http_1_0_has_no_chunks(door: Router, up: Upstream, keep: tuple[str, ...]) -> None:
    """Who speaks HTTP/1.0 gets the events as they are, and the end of the connection after the last."""
    up.answers["m"] = lambda seen: seen.stream(chunk("a"), chunk("b", "stop"))
    async with wire(door) as own:
        own.writer.write(post(STREAM, *keep, version="1.0"))
        head, _, body = (await own.reader.read()).partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert (lines[0], lines[-1]) == (b"HTTP/1.1 200 OK", b"connection: close")
    assert not any(line.startswith((b"transfer-encoding", b"content-length")) for line in lines)
    assert body.split(b"\n\n")[-2:] == [b"data: [DONE]", b""]


OPENING = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
HEADS = {
    "one header without end": OPENING + b"x-a: " + b"a" * (HEAD + 100),
    "headers without end": OPENING + b"x-a: b\r\n" * (HEAD // 6),
    "a path without end": b"POST /" + b"a" * (HEAD + 100),
    "whole, and too large": OPENING + b"x-a: " + b"a" * (HEAD + 1) + b"\r\n\r\n",
    "trailers without end": chunked(BODY)[:-2] + b"x-a: b\r\n" * (HEAD // 5),
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00",
}


@pytest.mark.parametrize("sent", HEADS)
async def test_heads_are_bounded_and_refused_in_openais_shape(door: Router, up: Upstream, sent: str) -> None:
    """What is no head that can be read, or one without end, is refused before it fills memory."""

    async def never(seen: Seen) -> web.StreamResponse:
        raise AssertionError("it was passed on")

    up.answers["m"] = never
    async with wire(door) as own:
        for at in range(0, len(HEADS[sent]), HEAD // 4):
            own.writer.write(HEADS[sent][at : at + HEAD // 4])
            await asyncio.sleep(0.01)
        status, headers, body = await own.answer()
        assert await own.reader.read() == b"", "and nothing more"
    code = "invalid_http" if sent == "no HTTP" else "head_too_large"
    assert (status, json.loads(body)["error"]["code"]) == (400 if sent == "no HTTP" else 431, code)
    assert headers["connection"] == "close"


@pytest.mark.parametrize("sent", [b"", post()[:30], post()[:-5], chunked(BODY)[:-30]])
async def test_a_silent_caller_does_not_hold_a_connection(
    door: Router, up: Upstream, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that asks for nothing, or for half of something, ends; one whose request comes slowly does not."""
    monkeypatch.setattr(server, "PATIENCE", 0.1)
    async with wire(door) as silent, wire(door) as slow, asyncio.timeout(5):
        silent.writer.write(sent)
        slow.writer.write(post()[:-10])
        for byte in post()[-10:-1]:
            await asyncio.sleep(0.05)
            slow.writer.write(bytes([byte]))
        assert await silent.reader.read() == b""
        slow.writer.write(post()[-1:])
        assert (await slow.answer())[0] == 200


async def test_a_long_answer_outlasts_the_patience_with_requests(
    door: Router, up: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has asked may wait for as long as the answer takes."""
    monkeypatch.setattr(server, "PATIENCE", 0.05)

    async def later(seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(0.3)
        return plain()

    up.answers["m"] = later
    async with wire(door) as own:
        own.writer.write(post())
        assert (await own.answer())[0] == 200
