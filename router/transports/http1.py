"""HTTP/1.1 to one server, over connections that are kept: POST a body, read the answer as it comes.

The hot path's client: a general one is the largest part of what a request costs here. This one knows what the router
needs and no more: no redirects, no cookies, no compression, no proxies. httptools (llhttp) reads the wire.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import cast
from urllib.parse import unquote, urlsplit

import httptools

from router.outbox import outbox

KEPT_S = 4.0
"""Seconds that an idle connection is used again. uvicorn's servers close theirs after 5: one picked up in that moment
would fail."""
HEAD = 2**16
"""Bytes of status and headers that an answer may have."""
HIGH = 2**18
"""Bytes of an answer that wait to be read before the server is made to wait."""


class NotReached(OSError):
    """No connection could be made."""


class Dropped(OSError):
    """The connection ended before the answer was whole."""


class Malformed(ValueError):
    """What came is not HTTP."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a base URL leads. Equal ones share their connections."""

    host: str
    """Host name, or the path of a Unix socket."""
    port: int
    """0 for a Unix socket."""
    tls: bool = False

    @classmethod
    @lru_cache
    def of(cls, base: str) -> Address:
        """`http(s)://HOST[:PORT][/PATH]` or `unix:PATH`."""
        if base.startswith("unix:"):
            return cls(base.removeprefix("unix:"), 0)
        parts = urlsplit(base)
        tls = parts.scheme == "https"
        return cls(parts.hostname or "", parts.port or (443 if tls else 80), tls)


def request_head(base: str, path: str, headers: Mapping[str, str]) -> bytes:
    """The head of a POST but for `content-length` and the empty line. Raises ValueError for a line end in a header."""
    if base.startswith("unix:"):
        netloc, prefix, login = "worker", "/v1", ""
    else:
        parts = urlsplit(base)
        login, _, netloc = parts.netloc.rpartition("@")
        prefix = parts.path.rstrip("/")
    written = {"host": netloc, "accept": "*/*", "accept-encoding": "identity", "user-agent": "twolane"}
    if login:
        token = base64.b64encode(unquote(login).encode()).decode()
        written["authorization"] = f"Basic {token}"
    return f"POST {prefix}{path} HTTP/1.1\r\n".encode() + header_lines({**written, **headers})


def header_lines(headers: Mapping[str, str]) -> bytes:
    """Headers as they stand in a request. Raises ValueError for a line end in one."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers) or "\0" in lines:
        raise ValueError("a header holds a line end")
    return lines.encode()


class Answer:
    """One answer as it comes. Whoever got it reads it to its end or closes it."""

    __slots__ = (
        "_close",
        "_error",
        "_loop",
        "_parts",
        "_paused",
        "_sink",
        "_size",
        "_waiter",
        "headers",
        "status",
        "through",
        "whole",
    )

    def __init__(self, close: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """By lower-case name; of several of one name the last."""
        self.whole = False
        """All of it has come, read or not; the connection already serves others."""
        self._close = close
        self._loop = loop
        self._parts: list[bytes] = []
        self._size = 0
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused: asyncio.ReadTransport | None = None
        self._sink: Callable[[bytes], bool] | None = None
        self.through: Callable[[bytes], bool] | None = None
        """Offered reads as they are, where they begin with a chunk; takes one whole, or leaves it (False)."""

    @property
    def at_end(self) -> bool:
        """All of it has been read."""
        return self.whole and not self._parts

    def now(self) -> bytes:
        """What has come and was not read; nothing where nothing has. Raises what ended the answer early."""
        if self._parts:
            return self._take()
        if self._error is not None:
            raise self._error
        return b""

    def rest(self) -> bytes:
        """All that was not read, where all has come, as of most answers with their head; else nothing."""
        return self._take() if self.whole and self._parts else b""

    async def some(self) -> bytes:
        """What has come, as soon as there is anything; nothing at the end. Raises OSError, TimeoutError, Malformed."""
        while not self._parts and not self.whole:
            await self._wait()
        return self.now()

    async def pour(self, sink: Callable[[bytes], bool], through: Callable[[bytes], bool] | None = None) -> None:
        """Give what comes straight to `sink`, until that answers False, `stop`, the answer is whole, or it fails.

        Nothing may be waiting to be read. Both are called by the connection, in the middle of its reading: they must
        not raise, nor wait. Of what ends the answer early the next `now` tells.
        """
        self._sink, self.through = sink, through
        try:
            while self._sink is not None and not self.whole and self._error is None:
                await self._wait()
        finally:
            self._sink = self.through = None

    def stop(self) -> None:
        """Pour no more: what comes from now on waits to be read."""
        self._sink = self.through = None
        self._wake()

    def close(self) -> None:
        """Hang up, unless all of it has come. Safe to call twice."""
        if not self.whole:
            self.fail(Dropped("closed"))

    def fail(self, error: Exception) -> None:
        """End it here: whoever reads gets what had come, then the error; the connection is given up."""
        if not self.whole and self._error is None:
            self._error = error
            self._wake()
            self._close()

    async def head(self) -> None:
        """Wait until status and headers are known. Raises like `some`."""
        while not self.status:
            await self._wait()

    # -- told by the connection

    def begin(self, status: int, headers: dict[str, str]) -> None:
        self.headers = headers
        self.status = status
        self._wake()

    def feed(self, body: bytes, transport: asyncio.ReadTransport) -> None:
        if self._sink is not None:
            if not self._sink(body):
                self.stop()
            return
        self._parts.append(body)
        self._size += len(body)
        if self._size > HIGH and self._paused is None:
            transport.pause_reading()
            self._paused = transport
        if self._waiter is not None:
            self._wake()

    def end(self) -> None:
        self.whole = True
        self._resume()
        if self._waiter is not None:
            self._wake()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        waiter = self._waiter = self._loop.create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _take(self) -> bytes:
        parts, self._parts, self._size = self._parts, [], 0
        if self._paused is not None:
            self._resume()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _resume(self) -> None:
        if self._paused is not None:
            paused, self._paused = self._paused, None
            if not paused.is_closing():
                paused.resume_reading()


class Connection(asyncio.Protocol):
    """One connection, one answer at a time. Told what comes by asyncio, and what that means by httptools."""

    def __init__(self, idle: Callable[[Connection], None], lost: Callable[[Connection], None]) -> None:
        self.since = 0.0
        """`time.monotonic` since which it is idle."""
        self._loop = asyncio.get_running_loop()
        self._outbox = outbox()
        self._idle = idle
        self._lost = lost
        self._parts: list[bytes] = []
        self.on_body = self._parts.append
        """For httptools: pieces that share a read are handed on together, and none of them costs a call of ours."""
        self._between = False
        """The parser has read a chunk to its end, and nothing of another: whole ones may pass it by."""
        self._headers: dict[bytes, bytes] = {}
        self.on_header = self._headers.__setitem__
        """For httptools: a header costs no call of ours either."""
        self._parser = httptools.HttpResponseParser(self)
        # What browsers and other clients forgive a server, too.
        self._parser.set_dangerous_leniencies(lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True)
        self._answer: Answer | None = None
        self._framed = False
        """The answer says where it ends; else it ends with the connection."""
        self._head = 0
        """Bytes that came before the answer began."""

    def post(self, request: bytes, *, soon: bool = False) -> Answer:
        """Send one request, or have it sent `soon`, at the end of the turn. The connection must be idle."""
        self._answer = answer = Answer(self.abort, self._loop)
        self._head = 0
        if soon:
            self._outbox.put(self._transport, request)
        else:
            self._transport.write(request)
        return answer

    def abort(self) -> None:
        """Give it up at once."""
        self._transport.abort()

    @property
    def usable(self) -> bool:
        return not self._transport.is_closing()

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nothing was asked
            self.abort()
            return
        if self._between and answer.through is not None and answer.through(data):
            return
        if not answer.status:
            # The parser has no bound of its own: a head without end would fill memory.
            self._head += len(data)
            if self._head > HEAD + HIGH:  # a read may bring the beginning of the body along
                answer.fail(Malformed("the head has no end"))
                return
        try:
            self._parser.feed_data(data)
            # A piece that ends before its read does is the last of its chunk.
            parts = self._parts
            self._between = bool(parts) and parts[-1].endswith(b"\n\n") and data.endswith(b"\n\n\r\n")
            if parts:
                self._hand_on()
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._hand_on()
            if self._answer is not None:
                self._answer.fail(Malformed(type(error).__name__))
            self.abort()

    def _hand_on(self) -> None:
        parts = self._parts
        if parts:
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            if self._answer is not None:
                self._answer.feed(body, self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._lost(self)
        answer, self._answer = self._answer, None
        if answer is None:
            return
        if answer.status and not self._framed and error is None:
            answer.end()
        else:
            answer.fail(Dropped("the connection ended"))

    # -- httptools

    def on_message_begin(self) -> None:
        if self._answer is None:
            raise Malformed("an answer that nobody asked for")
        self._headers.clear()

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._answer is not None:
            headers = {name.decode("latin-1").lower(): v.decode("latin-1") for name, v in self._headers.items()}
            self._framed = "content-length" in headers or "transfer-encoding" in headers
            self._answer.begin(status, headers)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200 or self._answer is None:  # 100 Continue, 103 Early Hints
            return
        self._hand_on()
        answer, self._answer = self._answer, None
        # A server that was tired of waiting (408) may not have seen the request, and answer it yet.
        keep = self._parser.should_keep_alive() and answer.status != 408
        answer.end()
        if keep:
            self._idle(self)
        else:
            self._transport.close()


class Server:
    """Connections to one address, made as they are needed."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    async def post(self, head: bytes, body: bytes, *, soon: bool = False) -> Answer:
        """Send one request; its answer may still be all to come. `head` as `request_head` makes it.

        `soon`: it may wait for what else is written in this turn of the loop, where other requests are under way.
        Raises NotReached.
        """
        request = b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)
        connection = self._kept() or await self._connect()
        return connection.post(request, soon=soon and len(self._all) - len(self._idle) > 1)

    def close(self) -> None:
        """End all connections, whatever they are doing."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in tuple(self._all):
            connection.abort()
        self._idle.clear()

    def _kept(self) -> Connection | None:
        """The connection that was used last, so that those in excess grow old."""
        oldest = time.monotonic() - KEPT_S
        while self._idle:
            connection = self._idle.pop()
            if connection.since >= oldest and connection.usable:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        loop, address = asyncio.get_running_loop(), self._address
        try:
            if address.port == 0:
                _, connection = await loop.create_unix_connection(self._made, address.host)
            else:
                context = _tls() if address.tls else None
                _, connection = await loop.create_connection(self._made, address.host, address.port, ssl=context)
        except TimeoutError:
            raise
        except (OSError, UnicodeError) as error:
            raise NotReached(str(error)) from error
        self._all.add(connection)
        return connection

    def _made(self) -> Connection:
        return Connection(self._became_idle, self._lost)

    def _became_idle(self, connection: Connection) -> None:
        connection.since = time.monotonic()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(KEPT_S, self._swept)

    def _swept(self) -> None:
        """End what has been idle for long, and look again while anything is."""
        loop = asyncio.get_running_loop()
        oldest = time.monotonic() - KEPT_S
        old = [c for c in self._idle if c.since < oldest]
        self._idle = [c for c in self._idle if c.since >= oldest]
        for connection in old:
            connection.abort()
        self._sweep = loop.call_later(KEPT_S, self._swept) if self._idle else None

    def _lost(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


@lru_cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
