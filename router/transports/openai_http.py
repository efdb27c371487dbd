"""One exchange with a server that speaks OpenAI's HTTP interface: an upstream, or a worker on its socket.

Knows connections, timeouts and what may cross in each direction; chooses nothing and retries nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import urlsplit

import aiohttp
import msgspec

from router.call import Call, Reply
from router.errors import Unavailable
from router.transports.stream import Stream
from router.transports.upstream_errors import in_answer, refusal, translate
from router.wire import read_answer, read_usage, told, without_run
from workers.protocol import KV

_JSON = "application/json"
_EVENTS = "text/event-stream"
_MAX_ERROR = 64 * 2**10
_MAX_ANSWER = 256 * 2**20
_KEPT = (b"openai-", b"x-ratelimit-", b"x-request-id", b"request-id")
"""Answer headers that reach the caller; cookies, challenges and everything unknown do not."""
_INCLUDE_USAGE = msgspec.Raw(b'{"include_usage":true}')
_USAGE_PATHS = frozenset({"/chat/completions", "/completions"})


@dataclass(frozen=True, slots=True)
class Target:
    """Where a call goes and how it is dressed for the way."""

    base: str
    """`http(s)://HOST[:PORT][/PATH]`, to which the call's path is added, or `unix:PATH`."""
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, msgspec.Raw] = field(default_factory=dict)
    """Values for keys that the caller did not send."""
    dropped: frozenset[str] = frozenset()
    """Keys that are not passed on."""
    timeout: float = 600.0
    """Seconds without an answer; in a stream, without a next event."""
    stream_timeout: float | None = None
    secrets: tuple[str, ...] = ()
    """Struck out of error texts."""
    worker: bool = False
    """A worker of ours: usage is always asked for and `twolane` is taken out of the answer."""


class Pools:
    """Connections by target, opened when first needed."""

    def __init__(self) -> None:
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    def session(self, base: str) -> tuple[aiohttp.ClientSession, str]:
        """The pool for a base address, and the address to call through it."""
        if base.startswith("unix:"):
            key, address = base, "http://worker/v1"
        else:
            parts = urlsplit(base)
            key, address = f"{parts.scheme}://{parts.netloc}", base
        session = self._sessions.get(key)
        if session is None or session.closed:
            session = self._sessions[key] = self._open(base)
        return session, address

    def _open(self, base: str) -> aiohttp.ClientSession:
        # Servers under uvicorn close idle connections after 5 s; one picked up in that moment would fail.
        connector: aiohttp.BaseConnector
        if base.startswith("unix:"):
            connector = aiohttp.UnixConnector(base.removeprefix("unix:"), limit=0, keepalive_timeout=4.0)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0, ttl_dns_cache=60)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            # Named in full: leaving one of aiohttp's own headers out makes it copy all of them for each request.
            headers={"accept": "*/*", "accept-encoding": "identity", "user-agent": "twolane"},
            trust_env=False,
            read_bufsize=2**18,
        )

    async def close(self) -> None:
        """End all connections."""
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()


def dress(call: Call, target: Target) -> bytes:
    """The body that goes out: the caller's fields as sent, but for the model and what the deployment states."""
    fields = dict(call.fields)
    fields["model"] = msgspec.Raw(msgspec.json.encode(target.model))
    for name in target.dropped:
        fields.pop(name, None)
    for name, value in target.defaults.items():
        fields.setdefault(name, value)
    if call.stream and not call.include_usage and call.path in _USAGE_PATHS:
        fields["stream_options"] = _with_usage(fields.get("stream_options"))
    return msgspec.json.encode(fields)


def _with_usage(options: msgspec.Raw | None) -> msgspec.Raw:
    theirs = msgspec.json.decode(options, type=dict[str, msgspec.Raw] | None) if options is not None else None
    if not theirs:
        return _INCLUDE_USAGE
    return msgspec.Raw(msgspec.json.encode({**theirs, "include_usage": True}))


async def exchange(pools: Pools, target: Target, call: Call, extra: Mapping[str, str] | None = None) -> Reply:
    """Send the call and return once the first frame is certain. Raises TransportError if there will be none."""
    session, address = pools.session(target.base)
    headers = {"content-type": _JSON, **target.headers, **(extra or {})}
    timeout = (target.stream_timeout if call.stream else None) or target.timeout
    body, url = dress(call, target), address + call.path
    response: aiohttp.ClientResponse | None = None
    try:
        if not call.stream:
            # aiohttp's own timer bounds all of a plain exchange, for a fifth of what a timeout of asyncio's costs.
            response = await session.post(
                url, data=body, headers=headers, allow_redirects=False, timeout=_all_within(timeout)
            )
            await _refuse(response, target, call)
            return await _plain(response, target, call)
        async with asyncio.timeout(timeout):
            response = await session.post(url, data=body, headers=headers, allow_redirects=False)
            await _refuse(response, target, call)
            return await _stream(response, target, call, timeout)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        if response is not None:
            response.close()
        raise translate(error) from error
    except BaseException:
        # A cancelled caller and a refused one alike: the connection is in no state to be used again.
        if response is not None:
            _leave(response)
        raise


@lru_cache
def _all_within(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


async def _refuse(response: aiohttp.ClientResponse, target: Target, call: Call) -> None:
    """Raise what an answer other than a success says."""
    if response.status >= 300:
        body = await _bounded(response, _MAX_ERROR, cut=True)
        raise refusal(response.status, body, response.headers, secrets=target.secrets, path=call.path)


def _leave(response: aiohttp.ClientResponse) -> None:
    if response.content.at_eof():
        response.release()
    else:
        response.close()


async def _bounded(response: aiohttp.ClientResponse, limit: int, *, cut: bool = False) -> bytes:
    """The body up to `limit` bytes; past it, what there is (`cut`) or Unavailable."""
    content = response.content
    body = await content.readany()
    if content.at_eof() and len(body) <= limit:  # most bodies come in one piece
        return body
    parts, size = [body], len(body)
    while size <= limit and (part := await content.readany()):
        parts.append(part)
        size += len(part)
    if size > limit and not cut:
        raise Unavailable("The upstream's answer exceeds the limit.", code="upstream_malformed")
    return b"".join(parts)


async def _plain(response: aiohttp.ClientResponse, target: Target, call: Call) -> Reply:
    body = await _bounded(response, _MAX_ANSWER)
    reply = Reply(response.status, response.headers.get("content-type", _JSON), body, headers=_kept(response, target))
    answer = read_answer(body)
    if answer is None:
        raise Unavailable("The upstream's answer is not a JSON object.", status=502, code="upstream_malformed")
    if told(answer.error):
        raise in_answer(answer.error, secrets=target.secrets, path=call.path)
    if told(answer.usage):
        read_usage(answer.usage, reply.usage)
    if target.worker and told(answer.twolane):
        reply.run = answer.twolane
        reply.body = without_run(body)
    reply.first_frame = time.perf_counter()
    return reply


async def _stream(response: aiohttp.ClientResponse, target: Target, call: Call, timeout: float) -> Reply:
    if not response.content_type.startswith(_EVENTS):
        body = await _bounded(response, _MAX_ERROR, cut=True)
        answer = read_answer(body)
        if answer is not None and told(answer.error):
            raise in_answer(answer.error, secrets=target.secrets, path=call.path)
        raise Unavailable("The upstream answered no event stream.", status=502, code="upstream_malformed")
    reply = Reply(response.status, f"{_EVENTS}; charset=utf-8", headers=_kept(response, target))
    stream = Stream(reply, path=call.path, asked=call.include_usage, worker=target.worker, secrets=target.secrets)
    first = b""
    while not first and not stream.done:
        data = await response.content.readany()
        first = stream.feed(data) if data else stream.finish()
        if stream.error is not None and not stream.began:
            raise stream.error
    reply.first_frame = time.perf_counter()
    reply.frames = Frames(response, stream, first, timeout)
    return reply


def _kept(response: aiohttp.ClientResponse, target: Target) -> dict[str, str]:
    kept = {
        name.decode("latin-1").lower(): value.decode("latin-1")
        for name, value in response.raw_headers
        if name.lower().startswith(_KEPT)
    }
    if target.worker and KV in response.headers:
        kept[KV] = response.headers[KV]
    return kept


class Frames:
    """The rest of a stream, from the upstream's reads to the caller's frames. Ends itself; `aclose` hangs up."""

    def __init__(self, response: aiohttp.ClientResponse, stream: Stream, first: bytes, timeout: float) -> None:
        self._response = response
        self._stream = stream
        self._first = first
        self._timeout = timeout
        self._ended = False

    def __aiter__(self) -> Frames:
        return self

    async def __anext__(self) -> bytes:
        if self._first:
            frame, self._first = self._first, b""
            return frame
        # Waiting begins when the caller asks: a slow reader is not a silent upstream, and comments are no answer.
        until = time.monotonic() + self._timeout
        while not self._stream.done:
            if frame := await self._next(until):
                return frame
        if not self._ended:
            await self._end()
        raise StopAsyncIteration

    async def _next(self, until: float) -> bytes:
        content = self._response.content
        try:
            data = content.read_nowait()
            if not data and not content.at_eof():
                # A timeout of asyncio's costs five times as much, for each event of a slow stream.
                timer = asyncio.get_running_loop().call_later(
                    until - time.monotonic(), content.set_exception, TimeoutError()
                )
                try:
                    data = await content.readany()
                finally:
                    timer.cancel()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return self._stream.fail(translate(error))
        return self._stream.feed(data) if data else self._stream.finish()

    async def _end(self) -> None:
        """Read what follows `[DONE]`, so that the connection can be used again; a stream that lingers is closed."""
        self._ended = True
        content = self._response.content
        try:
            if self._stream.error is None and not content.at_eof():
                async with asyncio.timeout(0.05):
                    while not content.at_eof():
                        await content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._response.close()
        _leave(self._response)

    async def aclose(self) -> None:
        """Hang up unless the stream has ended."""
        if not self._ended:
            self._ended = True
            self._response.close()
