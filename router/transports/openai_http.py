"""One exchange with a server that speaks OpenAI's HTTP interface: an upstream, or a worker on its socket.

Knows connections, timeouts and what may cross in each direction; chooses nothing and retries nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from router.asked import tier
from router.call import Call, Reply
from router.errors import TransportError, Unavailable
from router.transports.frames import Frames
from router.transports.http1 import KEPT_S, Address, Answer, Malformed, Server, header_lines, request_head
from router.transports.stream import Stream
from router.transports.upstream_errors import in_answer, refusal, translate
from router.wire import read_answer, read_response, read_tier, read_usage, told, without_run
from workers.protocol import KV

if TYPE_CHECKING:
    import aiohttp

_JSON = "application/json"
_EVENTS = "text/event-stream"
_MAX_ERROR = 64 * 2**10
_MAX_ANSWER = 256 * 2**20
KEPT = ("openai-", "x-ratelimit-", "x-request-id", "request-id")
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
    asks_usage: bool = True
    """Streams are asked to tell their usage, whether or not the caller did."""
    worker: bool = False
    """A worker of ours: usage is always asked for and `twolane` is taken out of the answer."""
    _heads: dict[str, bytes] = field(default_factory=dict, init=False, repr=False, compare=False)

    def head(self, path: str) -> bytes:
        """The request's head for one of the paths that are served, made once."""
        found = self._heads.get(path)
        if found is None:
            found = self._heads[path] = request_head(self.base, path, {"content-type": _JSON, **self.headers})
        return found


class Pools:
    """Connections by server, opened when first needed."""

    def __init__(self) -> None:
        self._servers: dict[Address, Server] = {}
        self._by_base: dict[str, Server] = {}
        self._clocks: dict[float, Clock] = {}
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    def server(self, base: str) -> Server:
        """For the hot path: whoever answers calls."""
        server = self._by_base.get(base)
        if server is None:
            address = Address.of(base)
            server = self._by_base[base] = self._servers.setdefault(address, Server(address))
        return server

    def clock(self, seconds: float) -> Clock:
        """For exchanges that may take so long; as many as the configuration has timeouts."""
        found = self._clocks.get(seconds)
        if found is None:
            found = self._clocks[seconds] = Clock(seconds)
        return found

    def session(self, base: str) -> tuple[aiohttp.ClientSession, str]:
        """For all else: aiohttp's connections to the server of a base address, and the address to call through them."""
        if base.startswith("unix:"):
            key, address = base, "http://worker/v1"
        else:
            parts = urlsplit(base)
            key, address = f"{parts.scheme}://{parts.netloc}", base
        session = self._sessions.get(key)
        if session is None or session.closed:
            session = self._sessions[key] = _session(base)
        return session, address

    async def close(self) -> None:
        """End all connections."""
        servers, self._servers, self._by_base = self._servers, {}, {}
        for server in servers.values():
            server.close()
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()


def _session(base: str) -> aiohttp.ClientSession:
    import aiohttp  # most routers never need it, and it takes a quarter of the start

    connector: aiohttp.BaseConnector
    if base.startswith("unix:"):
        connector = aiohttp.UnixConnector(base.removeprefix("unix:"), limit=0, keepalive_timeout=KEPT_S)
    else:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S, ttl_dns_cache=60)
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"accept-encoding": "identity", "user-agent": "twolane"},
        trust_env=False,
    )


def dress(call: Call, target: Target) -> bytes:
    """The body that goes out: the caller's fields as sent, but for the model and what the deployment states."""
    fields = dict(call.fields)
    fields["model"] = msgspec.Raw(msgspec.json.encode(target.model))
    for name in target.dropped:
        fields.pop(name, None)
    for name, value in target.defaults.items():
        fields.setdefault(name, value)
    if call.stream and not call.include_usage and target.asks_usage and call.path in _USAGE_PATHS:
        fields["stream_options"] = _with_usage(fields.get("stream_options"))
    return msgspec.json.encode(fields)


def _with_usage(options: msgspec.Raw | None) -> msgspec.Raw:
    theirs = msgspec.json.decode(options, type=dict[str, msgspec.Raw] | None) if options is not None else None
    if not theirs:
        return _INCLUDE_USAGE
    return msgspec.Raw(msgspec.json.encode({**theirs, "include_usage": True}))


async def exchange(pools: Pools, target: Target, call: Call, extra: Mapping[str, str] | None = None) -> Reply:
    """Send the call and return once the first frame is certain. Raises TransportError if there will be none."""
    timeout = (target.stream_timeout if call.stream else None) or target.timeout
    head = target.head(call.path)
    if extra:
        head += header_lines(extra)
    if call.onward is not None:
        head += header_lines(call.onward)
    answer: Answer | None = None
    try:
        with Bound(pools.clock(timeout)) as bound:
            # Streams that were begun together would bring their events together as well, and slower for each.
            answer = await pools.server(target.base).post(head, dress(call, target), soon=not call.stream)
            bound.ends(answer)
            await answer.head()
            if answer.status >= 300:
                raise await _refusal(answer, target, call)
            if call.stream:
                return await _stream(answer, target, call, timeout)
            return _plain(answer, target, call, answer.rest() or await _bounded(answer, _MAX_ANSWER))
    except (OSError, Malformed) as error:
        if answer is not None:
            answer.close()
        raise translate(error) from error
    except BaseException:
        # A cancelled caller and a refused one alike: what is still to come is of no use.
        if answer is not None:
            answer.close()
        raise


class Clock:
    """Ends exchanges that take longer than so many seconds: one timer for all of them, set for the oldest."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._under_way: dict[Bound, float] = {}
        """When each must have ended; the oldest first."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, bound: Bound) -> None:
        self._under_way[bound] = time.monotonic() + self._seconds
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._look)

    def end(self, bound: Bound) -> None:
        self._under_way.pop(bound, None)

    def _look(self) -> None:
        self._timer = None
        while self._under_way:
            bound, until = next(iter(self._under_way.items()))
            left = until - time.monotonic()
            if left > 0:
                self._timer = asyncio.get_running_loop().call_later(left, self._look)
                return
            del self._under_way[bound]
            bound.late()


class Bound:
    """Holds one exchange to its time. A timeout of asyncio's for each costs far more."""

    __slots__ = ("_answer", "_clock", "_late", "_task")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._answer: Answer | None = None
        self._late = False

    def __enter__(self) -> Bound:
        self._task = asyncio.current_task()
        self._clock.begin(self)
        return self

    def ends(self, answer: Answer) -> None:
        """From here on the answer fails, rather than the task that waits for a connection."""
        self._answer = answer

    def late(self) -> None:
        """Its time is over."""
        if self._answer is not None:
            self._answer.fail(TimeoutError())
        elif self._task is not None:
            self._late = True
            self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._clock.end(self)
        if self._late and self._task is not None and self._task.uncancel() == 0 and kind is asyncio.CancelledError:
            raise TimeoutError


async def _refusal(answer: Answer, target: Target, call: Call) -> TransportError:
    """What an answer other than a success says."""
    body = await _bounded(answer, _MAX_ERROR, cut=True)
    return refusal(answer.status, body, answer.headers, secrets=target.secrets, path=call.path)


async def _bounded(answer: Answer, limit: int, *, cut: bool = False) -> bytes:
    """The body up to `limit` bytes; past it, what there is (`cut`) or Unavailable."""
    body = await answer.some()
    parts, size = [body], len(body)
    while size <= limit and (part := await answer.some()):
        parts.append(part)
        size += len(part)
    if size > limit and not cut:
        raise Unavailable("The upstream's answer exceeds the limit.", code="upstream_malformed")
    return b"".join(parts)


def _plain(answer: Answer, target: Target, call: Call, body: bytes) -> Reply:
    reply = Reply(answer.status, answer.headers.get("content-type", _JSON), body, headers=_kept(answer, target))
    if "service_tier" in call.fields:
        reply.usage.tier = tier(call)
    said = read_answer(body)
    if said is None:
        raise Unavailable("The upstream's answer is not a JSON object.", status=502, code="upstream_malformed")
    if told(said.error):
        raise in_answer(said.error, secrets=target.secrets, path=call.path)
    if told(said.usage):
        read_usage(said.usage, reply.usage)
        read_tier(said.service_tier, reply.usage)
    if call.path == "/responses":
        read_response(body, reply)
    if target.worker and told(said.twolane):
        reply.run = said.twolane
        reply.body = without_run(body)
    reply.first_frame = time.perf_counter()
    return reply


async def _stream(answer: Answer, target: Target, call: Call, timeout: float) -> Reply:
    if not answer.headers.get("content-type", "").lower().startswith(_EVENTS):
        said = read_answer(await _bounded(answer, _MAX_ERROR, cut=True))
        if said is not None and told(said.error):
            raise in_answer(said.error, secrets=target.secrets, path=call.path)
        raise Unavailable("The upstream answered no event stream.", status=502, code="upstream_malformed")
    reply = Reply(answer.status, f"{_EVENTS}; charset=utf-8", headers=_kept(answer, target))
    if "service_tier" in call.fields:
        reply.usage.tier = tier(call)
    stream = Stream(reply, path=call.path, asked=call.include_usage, worker=target.worker, secrets=target.secrets)
    first = b""
    while not first and not stream.done:
        data = await answer.some()
        first = stream.feed(data) if data else stream.finish()
        if stream.error is not None and not stream.began:
            raise stream.error
    reply.first_frame = time.perf_counter()
    reply.frames = Frames(answer, stream, first, timeout)
    return reply


def _kept(answer: Answer, target: Target) -> dict[str, str]:
    kept = {name: value for name, value in answer.headers.items() if name.startswith(KEPT)}
    if target.worker and KV in answer.headers:
        kept[KV] = answer.headers[KV]
    return kept
