"""The hot routes: HTTP in, HTTP out. Decode, dispatch, encode.

Raw ASGI, because a framework costs as much as all the rest.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Awaitable, Iterable, Mapping
from functools import lru_cache
from typing import get_args

import msgspec
import structlog

from policies.facts import Hint
from router.call import Call, Raw, Reply
from router.course import Course
from router.dispatch import Dispatcher
from router.errors import BadRequest, RouterError, Unauthenticated, Unrecorded
from router.http import (
    AsgiCaller,
    Caller,
    Gone,
    Receive,
    Scope,
    Send,
    as_value,
    bearer,
    first_of_each,
    head_lines,
    header,
    read_all,
    refuse,
    text_lines,
)
from router.server import Exchange
from router.telemetry import Event, Outcome
from router.tenants import Tenant, TenantSource
from router.transcript import transcript
from router.wire import DONE, TOO_DEEP, error_frame, read_body, read_flag, read_text, wants_usage

log = structlog.get_logger("twolane.router")

PATHS = ("/chat/completions", "/completions", "/embeddings", "/responses")
LONGEST_NAME = 1024
"""Characters of a name that logs and records tell."""
NO_KEY = "A valid API key is needed: send it as 'Authorization: Bearer KEY'."
"""The one sentence of every 401; it teaches nothing about keys."""

_HINTS: dict[str | None, Hint] = {None: "auto", **{hint: hint for hint in get_args(Hint)}}
_READ = frozenset(
    {
        b"x-twolane-transport",
        b"x-twolane-latency-budget-ms",
        b"x-twolane-deployment",
        b"x-session-id",
        b"x-twolane-labels",
        b"traceparent",
        b"tracestate",
    }
)
"""Headers that a call may say something with; most say nothing."""
_STREAM = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"


class Endpoint:
    """Answers the routes of PATHS, with and without `/v1`. `dispatcher` is replaced as a whole on a reload."""

    hot: Mapping[bytes, str] = {f"{version}{path}".encode(): path for version in ("", "/v1") for path in PATHS}
    """Those of PATHS by path as it is asked for."""

    def __init__(self, dispatcher: Dispatcher, tenants: TenantSource, max_body: int) -> None:
        self.dispatcher = dispatcher
        self.tenants = tenants
        self.max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started, id, caller = time.perf_counter(), new_id(), AsgiCaller(receive, send)
        headers, tenant = first_of_each(scope["headers"]), None
        try:
            tenant = authenticate(self.tenants, headers)
            body = await read_all(receive, scope["headers"], self.max_body)
            call = read_call(id, tenant, headers, body, started, scope["path"].removeprefix("/v1"))
        except RouterError as error:
            await self._refuse(caller, id, tenant, error, started)
        except Gone:
            pass
        else:
            with caller:
                await self.answer(call, caller, Streaming)

    def answer_hot(self, exchange: Exchange) -> Awaitable[None]:
        """Answer a request whose body has come, over a way without ASGI."""
        started, id, headers, tenant = time.perf_counter(), new_id(), exchange.headers, None
        try:
            tenant = authenticate(self.tenants, headers)
            call = read_call(id, tenant, headers, exchange.body, started, exchange.path)
        except RouterError as error:
            return self._refuse(exchange, id, tenant, error, started)
        return self.answer(call, exchange, Streaming)

    async def _refuse(self, caller: Caller, id: str, tenant: Tenant | None, error: RouterError, started: float) -> None:
        self.refused(id, tenant, error, started)
        await refuse(caller, error, {"x-twolane-decision": id})

    async def answer(self, call: Call, caller: Caller, streaming: type[Streaming]) -> None:
        """Run a call and send what comes of it."""
        dispatcher = self.dispatcher
        try:
            course = await dispatcher.dispatch(call)
        except RouterError as error:
            await refuse(caller, error, {"x-twolane-decision": call.id, "x-litellm-call-id": call.id})
            return
        except RecursionError:  # of what was read later than its outermost level
            await refuse(caller, BadRequest(TOO_DEEP, code="invalid_json"), {})
            return
        except Exception as error:
            log.exception("request_failed", request_id=call.id, error=type(error).__name__)
            await refuse(caller, RouterError("The router failed.", code="internal_error"), {})
            return
        reply = course.reply
        assert reply is not None  # noqa: S101  (the dispatcher's promise)
        if reply.frames is not None:
            await streaming(dispatcher, course, caller).run()
            return
        try:
            await dispatcher.finish(course, "ok")
        except Unrecorded as error:
            await refuse(caller, error, {"x-twolane-decision": call.id})
            return
        await caller.whole(reply.status, answer_lines(course, reply), reply.body)

    def refused(self, id: str, tenant: Tenant | None, error: RouterError, started: float) -> None:
        """Count and log a request that never became a call."""
        event = Event(
            request_id=id,
            tenant=tenant.name if tenant else "",
            model="",
            outcome="refused",
            status=error.status,
            total_ms=round((time.perf_counter() - started) * 1000, 3),
            error=error.code,
        )
        self.dispatcher.books.refused(event)


class Streaming:
    """One streamed answer on its way to the caller. The last frame waits until the books are closed."""

    def __init__(self, dispatcher: Dispatcher, course: Course, caller: Caller) -> None:
        assert course.reply is not None  # noqa: S101  (the dispatcher's promise)
        self._dispatcher = dispatcher
        self._course = course
        self._reply = course.reply
        self._caller = caller
        self._said: list[bytes] | None = [] if course.sampled or dispatcher.keeps_answer(course.call) else None
        course.said = self._said
        self._hold = dispatcher.holds_stream(course.call)

    async def run(self) -> None:
        """Relay to the end; a hang-up, ours or the upstream's, closes everything in either direction."""
        outcome: Outcome = "abandoned"
        try:
            lines = answer_lines(self._course, self._reply) + _STREAM
            await self._caller.begin(self._reply.status, lines, soon=self._reply.push is not None and not self._hold)
            last = await self._relay()
            outcome = "cut" if self._reply.error else "ok"
            await self._end(outcome, last)
        finally:
            await self._reply.aclose()
            if not self._course.finished:
                await self._dispatcher.finish(self._course, outcome, answer=self._answer())

    async def _relay(self) -> bytes:
        """All frames but the last, which is given back."""
        frames, held = self._reply.frames, b""
        assert frames is not None  # noqa: S101  (run is for streams)
        push, at_once = self._reply.push, self._caller.at_once
        try:
            if push is not None and at_once is not None and not self._hold:
                held = await push(at_once, self._said)
                if self._said is not None:
                    self._said.append(held)
                return held
            async for frame in frames:
                last = frame.endswith(DONE)
                if self._hold and not last:
                    await self._dispatcher.hold(self._course, frame)
                if self._said is not None:
                    self._said.append(frame)
                if last:
                    held = frame
                else:
                    await self._caller.piece(frame)
        except Unrecorded as error:
            self._reply.error = error.code
            return error_frame(error)
        except Exception as error:
            log.exception("stream_failed", request_id=self._course.call.id, error=type(error).__name__)
            self._reply.error = "internal_error"
            return error_frame(RouterError("The router failed.", code="internal_error"))
        return held

    async def _end(self, outcome: Outcome, last: bytes) -> None:
        try:
            await self._dispatcher.finish(self._course, outcome, answer=self._answer())
        except Unrecorded as error:
            last = error_frame(error)
        await self._caller.end(last)

    def _answer(self) -> bytes | None:
        if self._said is None:
            return None
        # A digest is taken over the bytes that left; only what is kept to be read is put together.
        read = self._course.call.tenant.audit.content == "full"
        return transcript(self._said) if read else b"".join(self._said)


def new_id() -> str:
    """`dec_` and 24 hex digits. It is a name, not a secret: a decision is shown to its own tenant only."""
    return f"dec_{random.getrandbits(96):024x}"


def authenticate(tenants: TenantSource, headers: Mapping[bytes, bytes]) -> Tenant:
    """Who asks. Raises Unauthenticated, the same for every cause."""
    tenant = tenants.find(bearer(headers))
    if tenant is None:
        raise Unauthenticated(NO_KEY, headers={"www-authenticate": "Bearer"})
    return tenant


def refuse_another_model(fields: Iterable[str]) -> None:
    """Raises BadRequest for `MODEL` and its like: an upstream that reads keys without regard to case might obey it."""
    for name in fields:
        if len(name) == 5 and name != "model" and name.lower() == "model":
            raise BadRequest(f"{name!r} is not a field; did you mean 'model'?", param=name, code="unknown_field")


def read_call(id: str, tenant: Tenant, headers: Mapping[bytes, bytes], body: bytes, started: float, path: str) -> Call:
    """The request as the dispatcher wants it. Raises BadRequest naming the field or header."""
    fields = read_body(body)
    model = read_text(fields, "model")
    refuse_another_model(fields)
    if not model:
        raise BadRequest("'model' must name a model group.", param="model", code="missing_model")
    stream = read_flag(fields, "stream")
    return made_call(
        id,
        tenant,
        headers,
        fields,
        started,
        model=model,
        path=path,
        stream=stream and path != "/embeddings",
        include_usage=stream and wants_usage(fields),
    )


def made_call(
    id: str,
    tenant: Tenant,
    headers: Mapping[bytes, bytes],
    fields: dict[str, msgspec.Raw],
    started: float,
    *,
    model: str,
    path: str,
    stream: bool,
    include_usage: bool = False,
    raw: Raw | None = None,
) -> Call:
    """With what the headers say. Raises BadRequest naming the header, or the model that is too long to be one."""
    if len(model) > LONGEST_NAME:
        raise too_long("model")
    call = Call(id, tenant, path, model, fields, stream, include_usage, started, raw=raw)
    if not _READ.isdisjoint(headers):
        call.hint = _hint(header(headers, b"x-twolane-transport"))
        call.budget_ms = _budget(header(headers, b"x-twolane-latency-budget-ms"))
        call.pinned = header(headers, b"x-twolane-deployment")
        call.session = header(headers, b"x-session-id")
        call.told_labels = header(headers, b"x-twolane-labels")
        call.trace = header(headers, b"traceparent")
        call.trace_state = header(headers, b"tracestate")
    if tenant.audit.subject is not None:
        call.subject = read_subject(tenant.audit.subject, fields, headers)
    return call


def read_subject(where: str, fields: dict[str, msgspec.Raw], headers: Mapping[bytes, bytes]) -> str | None:
    """The person a request is about; None where it names none. Raises BadRequest for what is no text, or too long."""
    if where.startswith("header:"):
        name = header(headers, where.removeprefix("header:").lower().encode())
    else:
        name = read_text(fields, where) or None
    if name is not None and len(name) > LONGEST_NAME:
        raise too_long(where)
    return name


def too_long(param: str) -> BadRequest:
    """A name that would fill logs and records."""
    return BadRequest(f"{param!r} exceeds {LONGEST_NAME} characters.", param=param, code="name_too_long")


def _hint(value: str | None) -> Hint:
    hint = _HINTS.get(value.lower() if value else None)
    if hint is not None:
        return hint
    name = "x-twolane-transport"
    raise BadRequest(f"{name} must be text, cache or auto.", param=name, code="invalid_header")


def _budget(value: str | None) -> float | None:
    if value is None:
        return None
    name = "x-twolane-latency-budget-ms"
    try:
        budget = float(value)
    except ValueError:
        budget = math.nan
    if not 0 < budget < math.inf:
        raise BadRequest(f"{name} must be a positive number of milliseconds.", param=name, code="invalid_header")
    return budget


def answer_lines(course: Course, reply: Reply) -> bytes:
    """Headers: ours, LiteLLM's where cheap, and what the upstream gave for the caller."""
    id = course.call.id.encode()
    reason = course.decision.reason if course.decision else ""
    spent = time.perf_counter() - course.call.started
    lines = _LINES % (
        _who(reply.content_type, course.transport or "", course.deployment or "", reason, course.fingerprint),
        id,
        id,
        course.retries if course.tries else 0,
        course.fallbacks,
        spent * 1000,
        (spent - course.upstream_s) * 1000,
    )
    if course.cost is not None:
        # A stream's cost is known after its headers have left; it is in the decision, the metrics and the record.
        lines += b"x-litellm-response-cost: %.10g\r\n" % course.cost
    # The upstream's headers are of its own kinds (`openai_http`): none has a name of ours.
    return lines + text_lines(reply.headers) if reply.headers else lines


_LINES = (
    b"%bx-twolane-decision: %b\r\nx-litellm-call-id: %b\r\n"
    b"x-litellm-attempted-retries: %d\r\nx-litellm-attempted-fallbacks: %d\r\n"
    b"x-litellm-response-duration-ms: %.3f\r\nx-litellm-overhead-duration-ms: %.3f\r\n"
)


@lru_cache(maxsize=256)
def _who(content_type: str, transport: str, deployment: str, reason: str, fingerprint: str) -> bytes:
    """Lines that one answer after another has in common."""
    return head_lines(
        [
            (b"content-type", content_type.encode("latin-1")),
            (b"x-twolane-transport", as_value(transport)),
            (b"x-twolane-deployment", as_value(deployment)),
            (b"x-twolane-reason", as_value(reason)),
            (b"x-twolane-fingerprint", b"fp_" + fingerprint.encode()),
            (b"x-litellm-model-id", as_value(deployment)),
        ]
    )
