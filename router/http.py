"""ASGI without a framework: what the hot routes need of it. Knows nothing of models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

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


def bearer(headers: Iterable[Header]) -> str | None:
    """The key of `Authorization: Bearer KEY`; None where there is none. No other place is looked at."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            return key.strip() or None if scheme.lower() == "bearer" else None
    return None


def picked(headers: Iterable[Header], wanted: Mapping[bytes, str]) -> dict[str, str]:
    """Values of the wanted headers under the names they are given here; the first of each counts."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name in wanted:
            found.setdefault(wanted[name], value.decode("latin-1").strip())
    return found


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
    """A header's value: what does not fit is written as escapes, and no line end gets through."""
    if text.isascii() and text.isprintable():
        return text.encode()
    return text.encode("ascii", "backslashreplace").replace(b"\n", b" ").replace(b"\r", b" ")


async def send_body(send: Send, status: int, body: bytes, headers: list[Header], content_type: bytes = _JSON) -> None:
    """One whole answer."""
    head = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *headers]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, error: RouterError, headers: Mapping[str, str] | None = None) -> None:
    """A failure in OpenAI's shape."""
    await send_body(send, error.status, error.body(), encoded({**(headers or {}), **error.headers}))


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
