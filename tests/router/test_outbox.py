"""What waits for the end of a turn leaves whole, in order, and before anything else that is done to its connection."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from router.outbox import Outbox, outbox
from router.server import HotProtocol
from tests.router.gateway import Router, Seen, Upstream, chunk, deployment, plain, router, until, upstream
from tests.router.test_server import post, wire


class Pipe(asyncio.Protocol):
    """One end of a real connection: what came."""

    def __init__(self) -> None:
        self.said = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.said += data


@contextlib.asynccontextmanager
async def pipes(folder: Path) -> AsyncIterator[list[tuple[asyncio.Transport, Pipe]]]:
    """Two transports to write to, each with who reads there."""
    loop, ends = asyncio.get_running_loop(), list[Pipe]()

    def accepted() -> Pipe:
        ends.append(Pipe())
        return ends[-1]

    server = await loop.create_unix_server(accepted, str(folder / "pipes"))
    ours = []
    for number in (1, 2):
        ours.append((await loop.create_unix_connection(Pipe, str(folder / "pipes")))[0])
        await until(functools.partial(lambda number: len(ends) == number, number))
    yield list(zip(ours, ends, strict=True))
    for transport in (*ours, *(end.transport for end in ends)):
        transport.abort()
    server.close()
    await server.wait_closed()
    await asyncio.sleep(0)


async def test_order_is_kept(tmp_path: Path) -> None:
    """For each connection: the order in which it was put, across turns, with what is written after a flush."""
    async with pipes(tmp_path) as ((one, first), (two, second)):
        box = outbox()
        assert outbox() is box
        box.put(one, b"a")
        box.put(two, b"x" * 300_000)
        box.put(one, b"b")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        box.put(one, b"c")
        box.flush()
        one.write(b"d")
        box.put(two, b"y")
        await until(lambda: len(first.said) == 4 and len(second.said) == 300_001)
        assert first.said == b"abcd"
        assert second.said.endswith(b"xy")


async def test_a_closed_connection_takes_no_other_along(tmp_path: Path) -> None:
    """Who hangs up before the turn is over gets nothing, and all others what is theirs."""
    async with pipes(tmp_path) as ((one, first), (two, second)):
        box = Outbox()
        box.put(one, b"a")
        box.put(two, b"b")
        one.abort()
        await until(lambda: second.said == b"b")
        assert first.said == b""


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


async def beside_another(door: Router, up: Upstream, say: Callable[[], None]) -> list[tuple[int, bytes]]:
    """All answers to one request that is answered while another is under way, `say` done as soon as it is."""
    held = asyncio.Event()

    async def answer(seen: Seen) -> web.StreamResponse:
        if seen.body.get("user") == "held":
            await held.wait()
        return plain()

    up.answers["m"] = answer
    async with wire(door) as other, wire(door) as own:
        other.writer.write(post(json.dumps({"model": "m", "messages": [], "user": "held"}).encode()))
        await until(lambda: len(up.seen) == 1)
        say()
        own.writer.write(post())
        found = []
        while not own.reader.at_eof():
            status, _, body = await own.answer()
            found.append((status, body))
            await asyncio.sleep(0.05)  # the end of the connection, if it ends here, has come
        held.set()
        await other.answer()
    return found


@pytest.mark.parametrize("then", ["stop", "nonsense", "end"])
async def test_an_answer_comes_before_the_end(
    then: str, tmp_path: Path, up: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops, a caller that goes on with no HTTP or says no more, in the very turn of an answer: it is
    there, whole."""
    answered = HotProtocol.on_response_complete

    def and_then(self: HotProtocol) -> None:
        answered(self)
        monkeypatch.setattr(HotProtocol, "on_response_complete", answered)
        if then == "stop":
            self.shutdown()
        elif then == "end":  # what a loop does when it reads the end of a connection
            self.eof_received()
            self.transport.close()
        else:
            self.data_received(b"\x00nonsense\r\n\r\n")

    async with router(tmp_path, {"model_list": [deployment("m", up)]}) as door:
        found = await beside_another(
            door, up, lambda: monkeypatch.setattr(HotProtocol, "on_response_complete", and_then)
        )
    assert [status for status, _ in found] == ([200, 400] if then == "nonsense" else [200])
    assert json.loads(found[0][1])["choices"]


async def test_many_at_once_get_their_own(tmp_path: Path, up: Upstream) -> None:
    """Of many callers on many connections each gets the answer to its own request, turn after turn."""

    async def echo(seen: Seen) -> web.StreamResponse:
        return plain(200, {"n": seen.body["user"], "choices": []})

    up.answers["m"] = echo

    async def caller(door: Router, number: int) -> None:
        async with wire(door) as own:
            for turn in range(10):
                said = f"{number}.{turn}"
                own.writer.write(post(json.dumps({"model": "m", "messages": [], "user": said}).encode()))
                assert json.loads((await own.answer())[2])["n"] == said

    async with router(tmp_path, {"model_list": [deployment("m", up)]}) as door:
        await asyncio.gather(*(caller(door, number) for number in range(20)))


@pytest.mark.parametrize(("stream", "beside"), [(False, True), (False, False), (True, True)])
async def test_what_waits_for_the_end_of_a_turn(
    stream: bool, beside: bool, tmp_path: Path, up: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain request and its answer, where another is under way; one that is alone, and a stream, wait for nothing."""
    held, waited = asyncio.Event(), list[bytes]()
    put = Outbox.put

    def noted(self: Outbox, transport: asyncio.Transport, data: bytes) -> None:
        waited.append(data)
        put(self, transport, data)

    async def answer(seen: Seen) -> web.StreamResponse:
        if seen.body.get("user") == "held":
            await held.wait()
        return await seen.stream(chunk("a", "stop")) if seen.body.get("stream") else plain()

    up.answers["m"] = answer
    async with router(tmp_path, {"model_list": [deployment("m", up)]}) as door, wire(door) as other, wire(door) as own:
        if beside:
            other.writer.write(post(json.dumps({"model": "m", "messages": [], "user": "held"}).encode()))
            await until(lambda: len(up.seen) == 1)
        monkeypatch.setattr(Outbox, "put", noted)
        own.writer.write(post(json.dumps({"model": "m", "messages": [], "stream": stream}).encode()))
        assert (await own.answer())[0] == 200
        assert len(waited) == (2 if beside and not stream else 0), waited
        held.set()
        if beside:
            await other.answer()
