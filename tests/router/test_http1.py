"""The hot path's HTTP client against servers that say exactly these bytes."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.transports import http1
from router.transports.http1 import Address, Answer, Dropped, Malformed, NotReached, Server, header_lines, request_head
from router.transports.openai_http import Bound, Clock

BODY = b'{"a": 1}'
LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 8\r\n\r\n" + BODY
CHUNKED = b'HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{"a\r\n5\r\n": 1}\r\n0\r\n\r\n'
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nX-Two: one\r\nx-two: two\r\n\r\n" + BODY
OLD = b"HTTP/1.0 200 OK\r\n\r\n" + BODY
HINTED = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + LENGTH
CLOSING = LENGTH.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")
LONE_LF = LENGTH.replace(b"\r\n", b"\n")


@dataclass
class Script:
    """What a server does with each connection, and what it saw."""

    port: int = 0
    connections: int = 0
    requests: list[bytes] = field(default_factory=list)
    hung_up: asyncio.Event = field(default_factory=asyncio.Event)


Act = Callable[[Script, asyncio.StreamWriter], object]


@contextlib.asynccontextmanager
async def served(
    act: Act, *, unix: Path | None = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[Script, str]]:
    """A server that reads one whole request after another and does `act` for each."""
    script = Script()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.startswith(b"content-length"))
                script.requests.append(head + await reader.readexactly(length))
                done = act(script, writer)
                if asyncio.iscoroutine(done):
                    await done
        except (asyncio.IncompleteReadError, ConnectionError):
            script.hung_up.set()
        finally:
            writer.close()

    if unix is not None:
        server = await asyncio.start_unix_server(handle, unix)
        base = f"unix:{unix}"
    else:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
        script.port = server.sockets[0].getsockname()[1]
        base = f"{'https' if tls else 'http'}://localhost:{script.port}/v1"
    async with server:
        yield script, base


def says(data: bytes, *, piece: int | None = None, then_close: bool = False) -> Act:
    async def act(script: Script, writer: asyncio.StreamWriter) -> None:
        for at in range(0, len(data), piece or len(data)):
            writer.write(data[at : at + (piece or len(data))])
            await writer.drain()
            if piece:
                await asyncio.sleep(0)
        if then_close:
            writer.close()

    return act


async def ask(server: Server, base: str, body: bytes = b"{}") -> Answer:
    return await server.post(request_head(base, "/chat/completions", {"authorization": "Bearer k"}), body)


async def read(answer: Answer) -> bytes:
    await answer.head()
    parts = []
    while part := await answer.some():
        parts.append(part)
    return b"".join(parts)


@contextlib.asynccontextmanager
async def client(base: str) -> AsyncIterator[Server]:
    server = Server(Address.of(base))
    try:
        yield server
    finally:
        server.close()


@pytest.mark.parametrize("piece", [None, 1, 2, 3, 7, 64])
@pytest.mark.parametrize(
    ("data", "kept"),
    [
        (LENGTH, True),
        (CHUNKED, True),
        (HINTED, True),
        (LONE_LF, True),
        (CLOSING, False),
        (UNTIL_CLOSE, False),
        (OLD, False),
    ],
)
async def test_answers_are_read_however_they_come(data: bytes, kept: bool, piece: int | None) -> None:
    """Every framing, cut anywhere: the body is whole, and a connection that may be used again is."""
    async with served(says(data, piece=piece, then_close=not kept)) as (script, base), client(base) as server:
        for _ in range(3):
            answer = await ask(server, base)
            assert await read(answer) == BODY
            assert (answer.status, answer.at_end) == (200, True)
        assert script.connections == (1 if kept else 3)
    assert len(script.requests) == 3
    head = script.requests[0].lower()
    assert head.startswith(b"post /v1/chat/completions http/1.1\r\nhost: localhost:")
    assert b"\r\nauthorization: bearer k\r\n" in head


async def test_headers_are_by_lower_case_name() -> None:
    """Of several headers of one name the last counts."""
    async with served(says(UNTIL_CLOSE, then_close=True)) as (_, base), client(base) as server:
        answer = await ask(server, base)
        await answer.head()
        assert answer.headers["x-two"] == "two"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", Dropped),
        (LENGTH[:-3], Dropped),
        (CHUNKED[:-5], Dropped),
        (LENGTH[:20], Dropped),
        (b"SSH-2.0-OpenSSH\r\n", Malformed),
        (b"HTTP/1.1 abc\r\n\r\n", Malformed),
        (CHUNKED.replace(b"\r\n5\r\n", b"\r\nxyz\r\n"), Malformed),
    ],
)
async def test_what_is_cut_or_no_http_is_told(data: bytes, error: type[Exception]) -> None:
    """An answer that ends early or is none raises, after what had come of it; the connection is not used again."""
    async with served(says(data, then_close=True)) as (script, base), client(base) as server:
        answer = await ask(server, base)
        with pytest.raises(error):
            await read(answer)
        with pytest.raises(error):
            await answer.some()
        await asyncio.sleep(0)
        with pytest.raises((Dropped, Malformed)):
            await read(await ask(server, base))
        assert script.connections == 2


async def test_more_than_was_asked_for_ends_the_connection() -> None:
    """A server that says more than one answer is not believed: its next words would answer somebody else."""
    async with served(says(LENGTH + LENGTH)) as (script, base), client(base) as server:
        assert await read(await ask(server, base)) == BODY
        await asyncio.sleep(0.05)
        assert await read(await ask(server, base)) == BODY
        assert script.connections == 2


@pytest.mark.parametrize("when", ["before", "head", "body"])
async def test_closing_hangs_up(when: str) -> None:
    """Closing an answer ends its connection in every phase, so that the server may stop working."""

    async def act(script: Script, writer: asyncio.StreamWriter) -> None:
        if when == "head":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
        if when == "body":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nsome")

    async with served(act) as (script, base), client(base) as server:
        answer = await ask(server, base)
        if when != "before":
            await answer.head()
        if when == "body":
            assert await answer.some() == b"some"
        answer.close()
        answer.close()
        async with asyncio.timeout(5):
            await script.hung_up.wait()
        with pytest.raises(Dropped):
            await answer.some()


async def test_a_slow_reader_makes_the_server_wait() -> None:
    """What is not read is bounded: the server cannot send an endless answer into our memory."""
    sent = 0

    async def act(script: Script, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while sent < 64 * 2**20:
            writer.write(b"x" * 2**16)
            sent += 2**16
            await writer.drain()
        writer.close()

    async with served(act) as (_, base), client(base) as server:
        answer = await ask(server, base)
        await answer.head()
        await asyncio.sleep(0.5)
        held = sent
        assert held < 32 * 2**20
        size = 0
        while part := await answer.some():
            size += len(part)
        assert (size, sent) == (64 * 2**20, 64 * 2**20)
        assert answer.at_end


@pytest.mark.parametrize(
    "piece", [b"x-more: " + b"y" * 1000 + b"\r\n", b"y" * 1000], ids=["headers without end", "one header without end"]
)
async def test_a_head_without_end_is_not_read_for_ever(piece: bytes) -> None:
    """A server that never ends its headers is told off within a bound, and the connection is given up."""
    sent = 0

    async def act(script: Script, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\nx-first: ")
        while sent < 64 * 2**20:
            writer.write(piece)
            sent += len(piece)
            await writer.drain()

    async with served(act) as (script, base), client(base) as server:
        answer = await ask(server, base)
        async with asyncio.timeout(20):
            with pytest.raises(Malformed):
                await answer.head()
            await script.hung_up.wait()
        assert sent < 32 * 2**20


async def test_idle_connections_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that was idle for too long is closed by itself, and not picked up."""
    monkeypatch.setattr(http1, "KEPT_S", 0.2)
    async with served(says(LENGTH)) as (script, base), client(base) as server:
        await read(await ask(server, base))
        await read(await ask(server, base))
        assert script.connections == 1
        async with asyncio.timeout(5):
            await script.hung_up.wait()
        await read(await ask(server, base))
        assert script.connections == 2


async def test_a_server_that_was_tired_of_waiting_is_not_asked_again_there() -> None:
    """A 408 may have been on its way before the request: what the connection says next is no answer to another."""
    tired = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n"

    def act(script: Script, writer: asyncio.StreamWriter) -> None:
        writer.write(LENGTH if script.connections > 1 else tired)

    async with served(act) as (script, base), client(base) as server:
        first = await ask(server, base)
        assert await read(first) == b""
        assert first.status == 408
        assert await read(await ask(server, base)) == BODY
        assert script.connections == 2


@pytest.mark.parametrize("way", ["plain", "unix", "tls"])
async def test_requests_that_leave_in_a_row_get_their_own_answers(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the server is reached; one of many whose caller goes before the turn is over is never sent."""
    context = _certificate(tmp_path) if way == "tls" else None
    if way == "tls":
        trusting = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        monkeypatch.setattr(http1, "_tls", lambda: trusting)

    def act(script: Script, writer: asyncio.StreamWriter) -> None:
        body = script.requests[-1].split(b"\r\n\r\n")[1]
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    async def one(server: Server, base: str, body: bytes, *, goes: bool = False) -> bytes:
        head = request_head(base, "/chat/completions", {"authorization": "Bearer k"})
        answer = await server.post(head, body, soon=True)
        if goes:
            answer.close()
            return b""
        return await read(answer)

    unix = tmp_path / "s.sock" if way == "unix" else None
    async with served(act, unix=unix, tls=context) as (script, base), client(base) as server:
        bodies = [b"%d" % number for number in range(20)]
        for _ in range(3):
            assert await asyncio.gather(*(one(server, base, body) for body in bodies)) == bodies
        mixed = await asyncio.gather(*(one(server, base, body, goes=body in bodies[1::2]) for body in bodies))
        assert mixed == [b"" if body in bodies[1::2] else body for body in bodies]
        assert len(script.requests) == 70


async def test_the_last_used_is_used_first() -> None:
    """Connections in excess grow old: ten at once need ten, one after the other needs one."""
    async with served(says(LENGTH)) as (script, base), client(base) as server:
        together = await asyncio.gather(*(ask(server, base) for _ in range(10)))
        assert [await read(a) for a in together] == [BODY] * 10
        assert script.connections == 10
        for _ in range(10):
            await read(await ask(server, base))
        assert script.connections == 10


async def test_a_unix_socket_and_a_server_that_is_not_there(tmp_path: Path) -> None:
    """A worker's socket is called under `/v1`; where nobody listens, no name resolves or no file is, NotReached."""
    async with served(says(LENGTH), unix=tmp_path / "w.sock") as (script, base), client(base) as server:
        assert await read(await ask(server, base)) == BODY
        assert script.requests[0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\nhost: worker\r\n")
    for away in (f"unix:{tmp_path}/none.sock", "http://127.0.0.1:1/v1", "http://no-such-host.invalid/v1"):
        async with client(away) as server:
            with pytest.raises(NotReached):
                await ask(server, away)


def _certificate(folder: Path) -> ssl.SSLContext:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context


async def test_tls_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is believed only with a certificate that the system trusts; then all is as without TLS."""
    context = _certificate(tmp_path)
    async with served(says(LENGTH), tls=context) as (script, base):
        async with client(base) as server:
            with pytest.raises(NotReached):
                await ask(server, base)
        trusting = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        monkeypatch.setattr(http1, "_tls", lambda: trusting)
        async with client(base) as server:
            assert await read(await ask(server, base)) == BODY
            assert await read(await ask(server, base)) == BODY
        assert len(script.requests) == 2


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_chunks_can_pass_the_parser_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: bool) -> None:
    """Reads that begin with a chunk are offered as they are; what is not taken is parsed, and the answer ends well."""
    chunks = [b"9\r\nevent %d\n\n\r\n" % at for at in range(6)]

    async def act(script: Script, writer: asyncio.StreamWriter) -> None:
        for piece in (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)

    parsed, passed = list[bytes](), list[bytes]()

    def sink(body: bytes) -> bool:
        parsed.append(body)
        return True

    def through(read: bytes) -> bool:
        if len(passed) < 3 and read in chunks:
            passed.append(read)
            return True
        return False

    context = _certificate(tmp_path) if tls else None
    if tls:
        monkeypatch.setattr(http1, "_tls", lambda: ssl.create_default_context(cafile=str(tmp_path / "cert.pem")))
    async with served(act, tls=context) as (script, base), client(base) as server:
        for _ in range(2):
            parsed.clear()
            passed.clear()
            answer = await ask(server, base)
            await answer.head()
            await answer.pour(sink, through)
            assert (answer.at_end, len(passed)) == (True, 3)
            assert b"".join(passed + parsed).count(b"event") == 6
            assert b"".join(parsed) == b"".join(chunk[3:-2] for chunk in chunks if chunk not in passed)
        assert script.connections == 1


def test_addresses_and_logins() -> None:
    """Ports, IPv6 hosts, logins and paths of a base URL end where they belong."""
    assert Address.of("https://api.example.com/v1") == Address("api.example.com", 443, True)
    assert Address.of("http://[::1]:8080") == Address("::1", 8080)
    assert Address.of("unix:/run/w.sock") == Address("/run/w.sock", 0)
    head = request_head("http://me:p%40ss@host:81/base/", "/completions", {})
    assert head.startswith(b"POST /base/completions HTTP/1.1\r\nhost: host:81\r\n")
    assert b"authorization: Basic bWU6cEBzcw==\r\n" in head
    own = request_head("http://me:x@host/v1", "/completions", {"authorization": "Bearer k"})
    assert own.count(b"authorization") == 1
    assert b"Bearer k" in own


@settings(max_examples=200)
@given(st.text(), st.text())
def test_no_header_smuggles_another(name: str, value: str) -> None:
    """Whatever stands in a header, it stays one line, or there is no request."""
    try:
        lines = header_lines({"x-first": "1", name: value})
    except (ValueError, UnicodeEncodeError):
        return
    assert lines.count(b"\n") == len({"x-first", name}) == lines.count(b"\r\n")


async def test_each_exchange_has_its_own_time() -> None:
    """One that ends in time frees only itself, and one that does not is ended when its own time is over."""
    loop, clock = asyncio.get_running_loop(), Clock(0.2)
    begun = loop.time()
    first, second, third = (Answer(lambda: None, loop) for _ in range(3))
    with contextlib.ExitStack() as under_way:
        under_way.enter_context(Bound(clock)).ends(first)
        with Bound(clock) as quick:
            quick.ends(second)
        await asyncio.sleep(0.1)
        under_way.enter_context(Bound(clock)).ends(third)
        for answer, least in ((first, 0.2), (third, 0.3)):
            with pytest.raises(TimeoutError):
                await answer.head()
            assert loop.time() - begun > least - 0.01
    assert second.now() == b""
