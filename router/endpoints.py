"""The hot routes: HTTP in, HTTP out. Decode, dispatch, encode.

Raw ASGI, because a framework costs as much as all the rest.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable
from typing import get_args

import msgspec
import structlog

from policies.facts import Hint
from router.call import Call, Raw
from router.course import Course
from router.dispatch import Dispatcher
from router.errors import BadRequest, RouterError, Unauthenticated, Unrecorded
from router.http import (
    Gone,
    Header,
    Receive,
    Scope,
    Send,
    Watch,
    as_value,
    bearer,
    encoded,
    picked,
    read_all,
    send_body,
    send_error,
)
from router.telemetry import Event, Outcome, log_request
from router.tenants import Tenant, TenantSource
from router.transcript import transcript
from router.wire import DONE, error_frame, read_body, read_flag, read_text, wants_usage

log = structlog.get_logger("twolane.router")

PATHS = ("/chat/completions", "/completions", "/embeddings", "/responses")
NO_KEY = "A valid API key is needed: send it as 'Authorization: Bearer KEY'."
"""The one sentence of every 401; it teaches nothing about keys."""

_HEADERS = {
    b"x-twolane-transport": "hint",
    b"x-twolane-latency-budget-ms": "budget",
    b"x-twolane-deployment": "pinned",
    b"x-session-id": "session",
    b"x-twolane-labels": "labels",
    b"traceparent": "trace",
}
_HINTS: dict[str | None, Hint] = {None: "auto", **{hint: hint for hint in get_args(Hint)}}
_STREAM = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Endpoint:
    """Answers the routes of PATHS, with and without `/v1`. `dispatcher` is replaced as a whole on a reload."""

    def __init__(self, dispatcher: Dispatcher, tenants: TenantSource, max_body: int) -> None:
        self.dispatcher = dispatcher
        self.tenants = tenants
        self.max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        id = new_id()
        tenant: Tenant | None = None
        try:
            tenant = authenticate(self.tenants, scope["headers"])
            body = await read_all(receive, scope["headers"], self.max_body)
            call = read_call(id, tenant, scope, body, started)
        except RouterError as error:
            self.refused(id, tenant, error, started)
            await send_error(send, error, {"x-twolane-decision": id})
            return
        except Gone:
            return
        with Watch(receive) as watch:
            await self.answer(call, send, watch, Streaming)

    async def answer(self, call: Call, send: Send, watch: Watch, streaming: type[Streaming]) -> None:
        """Run a call and send what comes of it."""
        dispatcher = self.dispatcher
        try:
            course = await dispatcher.dispatch(call)
        except RouterError as error:
            watch.over()
            await send_error(send, error, {"x-twolane-decision": call.id, "x-litellm-call-id": call.id})
            return
        except Exception as error:
            log.exception("request_failed", request_id=call.id, error=type(error).__name__)
            watch.over()
            await send_error(send, RouterError("The router failed.", code="internal_error"), {})
            return
        if course.reply is not None and course.reply.frames is not None:
            await streaming(dispatcher, course, send, watch).run()
        else:
            await _send_plain(dispatcher, course, send, watch)

    def refused(self, id: str, tenant: Tenant | None, error: RouterError, started: float) -> None:
        """Count and log a request that never became a call."""
        event = Event(
            request_id=id,
            tenant=tenant.name if tenant else "",
            model="",
            outcome="refused",
            status=error.status,
            total_ms=(time.perf_counter() - started) * 1000,
            error=error.code,
        )
        self.dispatcher.metrics.finish(event)
        log_request(event)


async def _send_plain(dispatcher: Dispatcher, course: Course, send: Send, watch: Watch) -> None:
    reply = course.reply
    assert reply is not None  # noqa: S101  (the dispatcher's promise)
    try:
        await dispatcher.finish(course, "ok")
    except Unrecorded as error:
        watch.over()
        await send_error(send, error, {"x-twolane-decision": course.call.id})
        return
    watch.over()
    await send_body(send, reply.status, reply.body, answer_headers(course), reply.content_type.encode("latin-1"))


class Streaming:
    """One streamed answer on its way to the caller. The last frame waits until the books are closed."""

    def __init__(self, dispatcher: Dispatcher, course: Course, send: Send, watch: Watch) -> None:
        assert course.reply is not None  # noqa: S101  (the dispatcher's promise)
        self._dispatcher = dispatcher
        self._course = course
        self._reply = course.reply
        self._send = send
        self._watch = watch
        self._said: list[bytes] | None = [] if course.sampled or dispatcher.keeps_answer(course.call) else None
        course.said = self._said
        self._hold = dispatcher.holds_stream(course.call)

    async def run(self) -> None:
        """Relay to the end; a hang-up, ours or the upstream's, closes everything in either direction."""
        outcome: Outcome = "abandoned"
        try:
            head = [(b"content-type", self._reply.content_type.encode("latin-1")), *_STREAM]
            head += answer_headers(self._course)
            await self._send({"type": "http.response.start", "status": self._reply.status, "headers": head})
            last = await self._relay()
            outcome = "cut" if self._reply.error else "ok"
            await self._end(outcome, last)
        finally:
            await self._reply.aclose()
            if not self._course.finished:
                await self._dispatcher.finish(self._course, outcome, answer=self._answer())

    async def _relay(self) -> bytes:
        """All frames but the last `[DONE]`, which is given back."""
        frames, held = self._reply.frames, b""
        assert frames is not None  # noqa: S101  (run is for streams)
        try:
            async for frame in frames:
                last = frame.endswith(DONE)
                if self._hold and not last:
                    await self._dispatcher.hold(self._course, frame)
                if self._said is not None:
                    self._said.append(frame)
                if last:
                    held = frame
                else:
                    await self._send({"type": "http.response.body", "body": frame, "more_body": True})
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
        self._watch.over()
        await self._send({"type": "http.response.body", "body": last, "more_body": False})

    def _answer(self) -> bytes | None:
        if self._said is None:
            return None
        # A digest is taken over the bytes that left; only what is kept to be read is put together.
        read = self._course.call.tenant.audit.content == "full"
        return transcript(self._said) if read else b"".join(self._said)


def new_id() -> str:
    """`dec_` and 24 hex digits. It is a name, not a secret: a decision is shown to its own tenant only."""
    return f"dec_{random.getrandbits(96):024x}"


def authenticate(tenants: TenantSource, headers: list[Header]) -> Tenant:
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


def read_call(id: str, tenant: Tenant, scope: Scope, body: bytes, started: float, path: str | None = None) -> Call:
    """The request as the dispatcher wants it. Raises BadRequest naming the field or header."""
    fields = read_body(body)
    model = read_text(fields, "model")
    refuse_another_model(fields)
    if not model:
        raise BadRequest("'model' must name a model group.", param="model", code="missing_model")
    path = path or scope["path"].removeprefix("/v1")
    stream = read_flag(fields, "stream")
    return made_call(
        id,
        tenant,
        scope["headers"],
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
    headers: list[Header],
    fields: dict[str, msgspec.Raw],
    started: float,
    *,
    model: str,
    path: str,
    stream: bool,
    include_usage: bool = False,
    raw: Raw | None = None,
) -> Call:
    """With what the headers say. Raises BadRequest naming the header."""
    told = picked(headers, _HEADERS)
    return Call(
        id=id,
        tenant=tenant,
        path=path,
        model=model,
        fields=fields,
        stream=stream,
        include_usage=include_usage,
        started=started,
        hint=_hint(told.get("hint")),
        budget_ms=_budget(told.get("budget")),
        pinned=told.get("pinned") or None,
        session=told.get("session") or None,
        subject=None if tenant.audit.subject is None else read_subject(tenant.audit.subject, fields, headers),
        told_labels=told.get("labels") or None,
        raw=raw,
        trace=told.get("trace"),
    )


def read_subject(where: str, fields: dict[str, msgspec.Raw], headers: list[Header]) -> str | None:
    """The person a request is about; None where it names none. Raises BadRequest where the field is no text."""
    if where.startswith("header:"):
        name = where.removeprefix("header:").lower().encode()
        return picked(headers, {name: "subject"}).get("subject") or None
    return read_text(fields, where) or None


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


def answer_headers(course: Course) -> list[Header]:
    """Ours, LiteLLM's where cheap, and what the upstream gave for the caller."""
    id = course.call.id.encode()
    deployment = as_value(course.deployment or "")
    spent = time.perf_counter() - course.call.started
    ours = [
        (b"x-twolane-decision", id),
        (b"x-twolane-transport", as_value(course.transport or "")),
        (b"x-twolane-deployment", deployment),
        (b"x-twolane-reason", as_value(course.decision.reason if course.decision else "")),
        (b"x-litellm-call-id", id),
        (b"x-litellm-model-id", deployment),
        (b"x-litellm-attempted-retries", b"%d" % course.retries),
        (b"x-litellm-attempted-fallbacks", b"%d" % course.fallbacks),
        (b"x-litellm-response-duration-ms", b"%.3f" % (spent * 1000)),
        (b"x-litellm-overhead-duration-ms", b"%.3f" % ((spent - course.upstream_s) * 1000)),
    ]
    if course.cost is not None:
        # A stream's cost is known after its headers have left; it is in the decision, the metrics and the record.
        ours.append((b"x-litellm-response-cost", b"%.10g" % course.cost))
    # The upstream's headers are of its own kinds (`openai_http`): none has a name of ours.
    return encoded(course.reply.headers) + ours if course.reply and course.reply.headers else ours
