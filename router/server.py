"""uvicorn's server with a shorter way for the hot routes: from the wire to the endpoint and back, without ASGI.

A request takes it when its head says all there is to know: a POST to a hot route by HTTP/1.1, kept alive, with a short
body of known length, and nothing else under way on its connection. All others go through uvicorn as it is, and
connections, pipelining, flow control, keep-alive and shutdown are uvicorn's for both.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from typing import Any, ClassVar, Literal, Protocol

import structlog
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from router.errors import BadRequest, RouterError
from router.heads import KnownHead
from router.http import AtOnce, Header, first_of_each, head_lines, refuse
from router.outbox import outbox

log = structlog.get_logger("twolane.router")

HEAD = 64 * 2**10
"""Bytes that a request's head may have, and its trailers."""
PATIENCE = 30.0
"""Seconds that a head may take to come; and that a body may rest, once or twice as long, before its next byte."""

_HEADS = 4
"""A connection whose heads differ more often (a trace's id in each) does not pay for learning them."""


class Hot(Protocol):
    """Who answers some routes without ASGI."""

    @property
    def hot(self) -> Mapping[bytes, str]:
        """Those routes, by path as it is asked for."""

    @property
    def max_body(self) -> int:
        """Bytes; a longer body is left to the application behind ASGI."""

    def answer_hot(self, exchange: Exchange) -> Awaitable[None]:
        """Answer one request, whole or in pieces."""


class Exchange:
    """One request of a hot route, and its answer."""

    __slots__ = (
        "_begun",
        "_connection",
        "_gone",
        "_opening",
        "_task",
        "body",
        "disconnected",
        "headers",
        "keep_alive",
        "path",
        "response_complete",
    )

    def __init__(self, connection: HotProtocol, path: str, headers: dict[bytes, bytes]) -> None:
        self.path = path
        self.headers = headers
        self.body = b""
        self.keep_alive = True
        """uvicorn clears it when the server shuts down."""
        self.response_complete = False
        self.disconnected = False
        self._connection = connection
        self._begun = False
        self._gone = False
        self._opening = b""
        """A head that leaves with the first piece."""
        self._task: asyncio.Task[None] | None = None
        """What a hang-up cancels."""

    # -- for who answers

    async def whole(self, status: int, lines: bytes, body: bytes) -> None:
        self._task = None
        if not self.disconnected:
            self._begun = True
            answer = b"%bcontent-length: %d\r\n\r\n%b" % (self._head(status, lines), len(body), body)
            self._end(answer, soon=self.keep_alive and len(self._connection.tasks) > 1)

    async def begin(self, status: int, lines: bytes, *, soon: bool = False) -> None:
        if not self.disconnected:
            self._begun = True
            head = self._head(status, lines) + b"transfer-encoding: chunked\r\n\r\n"
            if soon:
                self._opening = head
            else:
                self._connection.transport.write(head)

    async def piece(self, body: bytes) -> None:
        await self.room()
        self.push(body)

    @property
    def at_once(self) -> AtOnce | None:
        return self

    def push(self, body: bytes) -> bool:
        return self.push_chunks(b"%x\r\n%b\r\n" % (len(body), body) if body else b"")

    def push_chunks(self, chunks: bytes) -> bool:
        if self._opening:
            chunks, self._opening = self._opening + chunks, b""
        connection = self._connection
        if not self.disconnected:
            connection.transport.write(chunks)
        return not connection.flow.write_paused

    async def room(self) -> None:
        if self._connection.flow.write_paused and not self.disconnected:
            await self._connection.flow.drain()

    async def end(self, body: bytes) -> None:
        await self.room()
        self._task = None
        if not self.disconnected:
            self._end(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n")

    def over(self) -> None:
        self._task = None

    # -- for the connection

    def begins(self) -> None:
        """All of the request has come."""
        self._task = task = self._connection.loop.create_task(self._run())
        self._connection.tasks.add(task)

    def gone(self) -> None:
        """The caller hung up."""
        self.disconnected = True
        if self._task is not None:
            self._gone = True
            self._task.cancel()

    async def _run(self) -> None:
        connection, task = self._connection, self._task
        try:
            await connection.answering.answer_hot(self)
        except asyncio.CancelledError:
            if not self._gone:
                raise
        except Exception as error:
            log.exception("request_failed", error=type(error).__name__)
            if not self._begun:
                await refuse(self, RouterError("The router failed.", code="internal_error"), {})
        finally:
            if task is not None:
                connection.tasks.discard(task)
            if not self.response_complete and not self.disconnected:
                connection.transport.close()  # less than was said to come: whoever reads must see that

    def _head(self, status: int, lines: bytes) -> bytes:
        """All but what frames the body."""
        closing = b"" if self.keep_alive else b"connection: close\r\n"
        return b"%b%b%b%b" % (STATUS_LINE[status], self._connection.common_lines(), lines, closing)

    def _end(self, last: bytes, *, soon: bool = False) -> None:
        """`soon`: others are under way, and may have something to say in the same turn."""
        connection = self._connection
        if soon:
            connection.outbox.put(connection.transport, last)
        else:
            connection.transport.write(self._opening + last)
        self.response_complete = True
        if not self.keep_alive:
            connection.transport.close()
        connection.on_response_complete()


class Unframed(Exchange):
    """One by HTTP/1.0, which knows no chunks: an answer in pieces ends with the connection."""

    __slots__ = ()

    def __init__(self, connection: HotProtocol, path: str, headers: dict[bytes, bytes]) -> None:
        super().__init__(connection, path, headers)
        self.keep_alive = False

    @property
    def at_once(self) -> None:
        """There are no chunks that could pass as they are."""

    async def begin(self, status: int, lines: bytes, *, soon: bool = False) -> None:
        if not self.disconnected:
            self._begun = True
            self._connection.transport.write(self._head(status, lines) + b"\r\n")

    def push(self, body: bytes) -> bool:
        if body and not self.disconnected:
            self._connection.transport.write(body)
        return not self._connection.flow.write_paused

    async def end(self, body: bytes) -> None:
        await self.room()
        self._task = None
        if not self.disconnected:
            self._end(body)


class HotProtocol(HttpToolsProtocol):
    """One connection. `of` gives the class for who answers."""

    answering: ClassVar[Hot]

    @classmethod
    def of(cls, answering: Hot) -> type[HotProtocol]:
        """For uvicorn's `http`."""
        return type("HotProtocol", (cls,), {"answering": answering})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        plain = not self.root_path and self.limit_concurrency is None and not self.config.access_log
        self._hot: Mapping[bytes, str] = self.answering.hot if plain else {}
        self._exchange: Exchange | None = None
        """The last that came this way."""
        self._known: KnownHead | None = None
        """The head of one that came this way."""
        self._heads = 0
        """How many heads have been learnt."""
        self._common: tuple[list[Header], bytes] = ([], b"")
        self._rests = False
        """Answered, and nothing was asked since."""
        self._since = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._unread = 0
        """Bytes of a head, or of trailers, that are not whole yet."""
        self._reading: Literal["", "head", "body"] = ""
        """Which part of a request is still to come."""
        self._reads = 0
        self._seen = -1
        """What `_reads` was when the alarm last found the same request not whole."""
        self._patient = True
        """The alarm is not set for a connection that rests."""

    def common_lines(self) -> bytes:
        """The headers of every answer, as lines; uvicorn makes new ones each second."""
        headers = self.server_state.default_headers
        if headers is not self._common[0]:
            self._common = (headers, head_lines(headers))
        return self._common[1]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.outbox = outbox()
        self._alarm = self.loop.call_later(PATIENCE, self._look)

    def data_received(self, data: bytes) -> None:
        self._reads += 1
        between = not self._reading
        if between and self._known is not None and self._again(self._known, data):
            return
        self._unread += len(data)
        before = self._exchange
        super().data_received(data)
        if self._unread > HEAD:
            # The parser has no bound of its own: a head without end would fill memory.
            self.send_400_response("")
        exchange = self._exchange
        whole = between and not self._reading and exchange is not None and exchange is not before
        if whole and exchange is not None and exchange.keep_alive and self._heads < _HEADS:
            self._heads += 1
            self._known = KnownHead.of(data, exchange.body, exchange.path, exchange.headers)

    def _again(self, known: KnownHead, data: bytes) -> bool:
        """Take a request whose head is known, past the parser; False leaves it to that one."""
        body = known.body(data)
        if body is None or len(body) > self._longest() or not self._idle() or self.timeout_keep_alive_task is not None:
            return False
        self._rests = False
        self._seen = -1
        self._exchange = exchange = Exchange(self, known.path, {**known.headers, b"content-length": b"%d" % len(body)})
        self.cycle = exchange  # type: ignore[assignment]
        exchange.body = body
        exchange.begins()
        return True

    def send_400_response(self, msg: str) -> None:
        """What is no request that can be read, in OpenAI's shape; the connection ends."""
        self.outbox.flush()
        if self.transport.is_closing():
            return
        if self._unread > HEAD:
            said = f"The request's head exceeds {HEAD} bytes."
            error = BadRequest(said, status=431, code="head_too_large")
        else:
            error = BadRequest("The request is not HTTP/1.1.", code="invalid_http")
        body = error.body()
        lines = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + self.common_lines() + lines + body)
        self.transport.close()

    def shutdown(self) -> None:
        """An answer that waits to leave has been given."""
        self.outbox.flush()
        super().shutdown()

    def eof_received(self) -> None:
        """The caller says no more, and the connection is closed for it: not before an answer that waits to leave."""
        self.outbox.flush()
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        exchange = self._exchange
        if exchange is not None:
            if not exchange.response_complete:
                exchange.gone()
            if self.cycle is exchange:  # type: ignore[comparison-overlap]
                self.cycle = None  # type: ignore[assignment]
        if self._alarm is not None:
            self._alarm.cancel()
        super().connection_lost(exc)

    # -- keep-alive: uvicorn sets a timer for every answer, and gives it up for every request

    def on_response_complete(self) -> None:
        """As uvicorn's, with one timer for as long as the connection lives."""
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        self._rests, self._since = True, time.monotonic()
        if self._patient and self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self._alarm is None:
            self._patient = False
            self._alarm = self.loop.call_later(self.timeout_keep_alive, self._look)

    def _look(self) -> None:
        self._alarm = None
        if not self._rests:
            self._hurry()
            return
        left = self._since + self.timeout_keep_alive - time.monotonic()
        if left > 0:
            self._alarm = self.loop.call_later(left, self._look)
        else:
            self.timeout_keep_alive_handler()

    def _hurry(self) -> None:
        """End a connection that has asked for nothing, or whose head is slow or body rests; look again at others."""
        if self._reads and not self._reading:  # it is being answered
            return
        if not self._reads or (self._seen >= 0 and (self._reading == "head" or self._reads == self._seen)):
            self.timeout_keep_alive_handler()
            return
        self._seen = self._reads
        self._patient = True
        self._alarm = self.loop.call_later(PATIENCE, self._look)

    # -- httptools

    def on_message_begin(self) -> None:
        self._rests = False
        self._reading = "head"
        self._seen = -1
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        if self._unread > HEAD and len(self.url) + sum(len(n) + len(v) for n, v in self.headers) > HEAD:
            raise ValueError("the head is too large")  # and the parser gives up
        self._unread = 0
        self._reading = "body"
        path = self._hot.get(self.url)
        headers = first_of_each(self.headers)
        kind = None if path is None else self._way(headers)
        if path is None or kind is None:
            self._by_asgi()
            return
        # uvicorn asks of what it takes for its own cycle only what `Exchange` has as well.
        self._exchange = exchange = kind(self, path, headers)
        self.cycle = exchange  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        exchange = self._exchange
        if exchange is None or self.cycle is not exchange:  # type: ignore[comparison-overlap]
            super().on_body(body)
        else:
            exchange.body = exchange.body + body if exchange.body else body

    def on_message_complete(self) -> None:
        self._unread = 0
        self._reading = ""
        exchange = self._exchange
        if exchange is None or self.cycle is not exchange:  # type: ignore[comparison-overlap]
            super().on_message_complete()
        else:
            exchange.begins()

    def _way(self, headers: Mapping[bytes, bytes]) -> type[Exchange] | None:
        """None leaves it to ASGI."""
        length = headers.get(b"content-length", b"")
        if not (
            length.isdigit()
            and len(length) < 9
            and int(length) <= self._longest()
            and self._idle()
            and not self.expect_100_continue
            and b"upgrade" not in headers
            and self.parser.get_method() == b"POST"
        ):
            return None
        match self.parser.get_http_version():
            case "1.1":
                return Exchange if self.parser.should_keep_alive() else None
            case "1.0":
                return Unframed
            case _:
                return None

    def _longest(self) -> int:
        """Bytes of a body that goes this way."""
        return min(HIGH_WATER_LIMIT, self.answering.max_body)

    def _idle(self) -> bool:
        """No answer is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _by_asgi(self) -> None:
        url, expected, headers = self.url, self.expect_100_continue, self.headers
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expected
        self.headers = self.scope["headers"] = headers
        super().on_headers_complete()
        self.headers = []  # where trailers go: they are no headers, and no proxy in front of us has looked at them
