"""ASGI without a framework: what the hot routes need of it. Knows nothing of models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Protocol

from router.errors import BadRequest, RouterError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]

_JSON = b"application/json"
_WATCH_AFTER = 0.05
"""Seconds until a hang-up is watched for: most plain answers are through by then, and a watch costs as much."""


class Gone(Exception):
    """The caller hung up before its request was read."""


def first_of_each(headers: list[Header]) -> dict[bytes, bytes]:
    """Headers by lower-case name; of several of one name the first counts."""
    found = dict(headers)
    return found if len(found) == len(headers) else dict(reversed(headers))


def bearer(headers: Mapping[bytes, bytes]) -> str | None:
    """The key of `Authorization: Bearer KEY`; None where there is none. No other place is looked at."""
    value = headers.get(b"authorization")
    if value is None:
        return None
    scheme, _, key = value.decode("latin-1").partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def header(headers: Mapping[bytes, bytes], name: bytes) -> str | None:
    """The value without blanks around it; None where there is none, or nothing but blanks."""
    value = headers.get(name)
    return value.decode("latin-1").strip() or None if value is not None else None


async def read_all(receive: Receive, headers: Iterable[Header], limit: int) -> bytes:
    """The request's body. Raises BadRequest past `limit` bytes, and Gone."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise too_large(limit)
    message = await receive()
    body: bytes = message.get("body", b"")
    if message["type"] == "http.request" and not message.get("more_body"):
        if len(body) > limit:
            raise too_large(limit)
        return body
    parts, size = [body], len(body)
    while message["type"] == "http.request" and message.get("more_body"):
        message = await receive()
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise too_large(limit)
    if message["type"] != "http.request":
        raise Gone
    return b"".join(parts)


def too_large(limit: int) -> BadRequest:
    """The body exceeds what the router takes."""
    return BadRequest(f"The body exceeds {limit} bytes.", status=413, code="body_too_large")


def encoded(headers: Mapping[str, str]) -> list[Header]:
    """Headers as ASGI wants them."""
    return [(name.encode("ascii", "backslashreplace"), as_value(value)) for name, value in headers.items()]


def as_value(text: str) -> bytes:
    """A header's value: what does not fit is written as escapes, and no line end nor NUL gets through."""
    if text.isascii() and text.isprintable():
        return text.encode()
    return text.encode("ascii", "backslashreplace").replace(b"\n", b" ").replace(b"\r", b" ").replace(b"\0", b" ")


def head_lines(headers: Iterable[Header]) -> bytes:
    """Headers as they stand in an answer. Raises ValueError for a line end in one."""
    lines = [b"%b: %b\r\n" % header for header in headers]
    block = b"".join(lines)
    if block.count(b"\n") != len(lines) or block.count(b"\r") != len(lines) or b"\0" in block:
        raise ValueError("a header holds a line end")
    return block


def text_lines(headers: Mapping[str, str]) -> bytes:
    """The same of text: what does not fit is written as escapes."""
    said = "".join([*headers, *headers.values()])
    if said.isascii() and said.isprintable():  # nearly always, and then no line end is in it
        return "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode()
    return head_lines(encoded(headers))


class Caller(Protocol):
    """Who asked, to be answered once: whole, or in pieces. One who hangs up before the end cancels the answering task.

    Nothing fails because the caller is gone: what is said then goes nowhere.
    """

    async def whole(self, status: int, lines: bytes, body: bytes) -> None:
        """One whole answer; `lines` are its headers as `head_lines` makes them, but for what frames the body."""

    async def begin(self, status: int, lines: bytes, *, soon: bool = False) -> None:
        """The head of an answer in pieces. Where the first piece follows at once (`soon`), it may leave with that."""

    async def piece(self, body: bytes) -> None:
        """A piece of it, once the caller has room for that."""

    async def end(self, body: bytes) -> None:
        """The last piece."""

    @property
    def at_once(self) -> AtOnce | None:
        """The same caller, who can be told a piece without waiting; None where only `piece` can."""

    def over(self) -> None:
        """All is said, and a closed connection no hang-up. `whole` and `end` say so themselves."""


class AtOnce(Protocol):
    """A caller who is told pieces without anybody waiting. All answer whether there is room for another."""

    def push(self, body: bytes) -> bool:
        """A piece of an answer that has begun."""

    def push_chunks(self, chunks: bytes) -> bool:
        """Pieces that are framed already, as whole chunks of HTTP/1.1."""

    async def room(self) -> None:
        """Wait until there is room for another piece."""


async def refuse(caller: Caller, error: RouterError, headers: Mapping[str, str]) -> None:
    """A failure in OpenAI's shape."""
    lines = head_lines([(b"content-type", _JSON), *encoded({**headers, **error.headers})])
    await caller.whole(error.status, lines, error.body())


class AsgiCaller:
    """Who asked, behind an ASGI server. A context manager to put around the answer, once the body has been read."""

    at_once = None

    def __init__(self, receive: Receive, send: Send) -> None:
        self._send = send
        self._watch = Watch(receive)

    def __enter__(self) -> AsgiCaller:
        self._watch.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        return self._watch.__exit__(kind, *rest)

    async def whole(self, status: int, lines: bytes, body: bytes) -> None:
        self.over()
        await self.begin(status, b"%bcontent-length: %d\r\n" % (lines, len(body)))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def begin(self, status: int, lines: bytes, *, soon: bool = False) -> None:
        headers = [tuple(line.split(b": ", 1)) for line in lines.split(b"\r\n")[:-1]]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def piece(self, body: bytes) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self, body: bytes) -> None:
        self.over()
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def over(self) -> None:
        self._watch.over()


class Watch:
    """Cancels the task that made it when the caller hangs up. Use as a context manager around the answer."""

    __slots__ = ("_over", "_receive", "_task", "_timer", "_watcher", "gone")

    def __init__(self, receive: Receive) -> None:
        self.gone = False
        self._receive = receive
        self._over = False
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> Watch:
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(_WATCH_AFTER, self._begin)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> bool:
        """The cancellation that a hang-up caused ends here."""
        self.over()
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self.gone and kind is not None and issubclass(kind, asyncio.CancelledError) and self._task is not None:
            return self._task.uncancel() == 0
        return False

    def over(self) -> None:
        """The last byte is about to leave: from here on a closed connection is no hang-up."""
        self._over = True

    def _begin(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._over and self._task is not None:
            self.gone = True
            self._task.cancel()
