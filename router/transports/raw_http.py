"""One exchange that is passed through: any method and body, the answer as it comes; and what may be sent again.

Rare and often large, so it goes through aiohttp rather than the hot path's own client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from router.call import Call, Raw, Reply
from router.errors import TimedOut, Unavailable
from router.transports.openai_http import KEPT, Pools, Target
from router.transports.raw_usage import UsageReader, counted, makes
from router.transports.upstream_errors import refusal

if TYPE_CHECKING:
    import aiohttp

JSON, EVENTS = "application/json", "text/event-stream"
_MAX_ERROR = 64 * 2**10
_WHOLE = 16 * 2**20
"""Bytes of a JSON answer that is read before it is passed on; a longer one streams, and tells no usage."""
_KEPT = (*KEPT, "anthropic-ratelimit-")
_KEPT_TOO = frozenset({"content-disposition", "content-range", "accept-ranges"})
_SAFE = frozenset({"GET", "HEAD"})
_KEEPS_NOTHING = ("/messages", "/audio", "/images")
"""Doors that change nothing at the upstream: what failed there may be asked of another."""


async def carry(pools: Pools, target: Target, call: Call, raw: Raw) -> Reply:
    """Send the request and return once the answer has begun. Raises TransportError, and BadRequest for its body.

    On a failure `raw.spent` tells whether another may be asked.
    """
    from aiohttp import ClientConnectorError, ClientError

    raw.spent = False
    answer: aiohttp.ClientResponse | None = None
    try:
        answer = await _ask(pools, target, call, raw)
        if answer.status >= 300:
            body = await _up_to(answer, _MAX_ERROR)
            raise refusal(answer.status, body, _headers(answer), secrets=target.secrets, path=call.path)
        return await _reply(answer, call)
    except ClientConnectorError as error:
        raise Unavailable("The upstream cannot be reached.") from error
    except BaseException as error:
        if answer is not None:
            answer.close()
        if raw.upload is not None and raw.upload.failure is not None:
            raise raw.upload.failure from None
        raw.spent = not _may_go_on(raw, call.path, answer)
        match error:
            case TimeoutError():
                raise TimedOut("The upstream did not answer in time.") from error
            case ClientError() | OSError():
                raise Unavailable("The connection to the upstream failed.") from error
        raise


def _may_go_on(raw: Raw, path: str, answer: aiohttp.ClientResponse | None) -> bool:
    """The request is still at hand, and was refused, or does nothing that must not be done twice."""
    if raw.upload is not None and not raw.upload.whole:
        return False
    refused = answer is not None and 400 <= answer.status < 500
    return refused or raw.method in _SAFE or path.startswith(_KEEPS_NOTHING)


async def _ask(pools: Pools, target: Target, call: Call, raw: Raw) -> aiohttp.ClientResponse:
    from aiohttp import ClientTimeout
    from yarl import URL

    session, base = pools.session(target.base)
    headers = {**raw.headers, **target.headers, **(call.onward or {})}
    key = target.headers.get("authorization", "").removeprefix("Bearer ")
    if key and call.path.startswith("/messages"):
        headers.setdefault("x-api-key", key)
    data: bytes | AsyncIterator[bytes] | None
    async with Moving(target.timeout) as moving:
        if raw.upload is None:
            data = _json(call, target)
        else:
            data = raw.upload.pieces(target.model, moving.moved)
            if (known := raw.upload.length(target.model)) is not None:
                headers["content-length"] = str(known)
        return await session.request(
            raw.method,
            URL(base + raw.target, encoded=True),
            data=data,
            headers=headers,
            skip_auto_headers=("content-type",),
            allow_redirects=False,
            timeout=ClientTimeout(total=None, sock_read=target.timeout),
        )


class Moving:
    """A timeout that begins anew whenever something moved."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._bound = asyncio.timeout(seconds)
        self._over = False

    async def __aenter__(self) -> Moving:
        await self._bound.__aenter__()
        return self

    def moved(self) -> None:
        """Without effect once it is over: an upstream may answer before it has read everything."""
        if not self._over:
            self._bound.reschedule(asyncio.get_running_loop().time() + self._seconds)

    async def __aexit__(self, *raised: Any) -> None:
        self._over = True
        await self._bound.__aexit__(*raised)


def _json(call: Call, target: Target) -> bytes | None:
    fields = call.fields
    if not fields:
        return None
    if "model" in fields:
        fields = {**fields, "model": msgspec.Raw(msgspec.json.encode(target.model))}
    return msgspec.json.encode(fields)


async def _reply(answer: aiohttp.ClientResponse, call: Call) -> Reply:
    headers = _headers(answer)
    kept = {name: value for name, value in headers.items() if name.startswith(_KEPT) or name in _KEPT_TOO}
    kind = headers.get("content-type", "application/octet-stream")
    reply = Reply(answer.status, kind, headers=kept, usage=counted(call), cost=None if makes(call) else _nothing)
    reply.first_frame = time.perf_counter()
    first = b""
    if kind.split(";")[0].strip().lower() == JSON or answer.content.at_eof():
        first = await _up_to(answer, _WHOLE)
        if answer.content.at_eof():
            answer.release()
            reply.body = first
            UsageReader(reply.usage, call.path).whole(first)
            return reply
    if "content-length" in headers and "content-encoding" not in headers:
        kept["content-length"] = headers["content-length"]
    reader = UsageReader(reply.usage, call.path) if kind.startswith(EVENTS) else None
    reply.frames = Pieces(answer, reply, first, reader)
    return reply


def _nothing(_: Reply) -> float:
    return 0.0


def _headers(answer: aiohttp.ClientResponse) -> Mapping[str, str]:
    return {name.lower(): value for name, value in answer.headers.items()}


async def _up_to(answer: aiohttp.ClientResponse, limit: int) -> bytes:
    """What comes until the end, or until there is more than `limit`."""
    parts, size = list[bytes](), 0
    while size <= limit and (part := await answer.content.readany()):
        parts.append(part)
        size += len(part)
    return b"".join(parts)


class Pieces:
    """An answer's bytes as they come. One that breaks off ends, and `reply.error` says why; `aclose` hangs up."""

    def __init__(self, answer: aiohttp.ClientResponse, reply: Reply, first: bytes, reader: UsageReader | None) -> None:
        self._answer = answer
        self._reply = reply
        self._first = first
        self._reader = reader
        self._ended = False

    def __aiter__(self) -> Pieces:
        return self

    async def __anext__(self) -> bytes:
        piece, self._first = self._first, b""
        if not piece and not self._ended:
            piece = await self._next()
        if not piece:
            self._ended = True
            raise StopAsyncIteration
        if self._reader is not None:
            self._reader.feed(piece)
        return piece

    async def _next(self) -> bytes:
        from aiohttp import ClientError

        try:
            return await self._answer.content.readany()
        except TimeoutError:
            self._reply.error = TimedOut.code
        except (ClientError, OSError):
            self._reply.error = Unavailable.code
        self._answer.close()
        return b""

    async def aclose(self) -> None:
        """Give the connection back, or up where there is more to come."""
        if self._ended and self._reply.error is None:
            self._answer.release()
        else:
            self._ended = True
            self._answer.close()
