"""Doors that are passed through as they are: files, batches, audio, images, Anthropic's messages.

The edge of them: which request is one, whose it is, which model group is meant. Policy, limits, guardrails and records
are the dispatcher's, as for every other door.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from urllib.parse import unquote_plus

from router.call import Call, Raw
from router.endpoints import Endpoint, Streaming, authenticate, made_call, new_id, refuse_another_model
from router.errors import BadRequest, Forbidden, RouterError
from router.form import boundary_of
from router.http import AsgiCaller, Gone, Header, Receive, Scope, Send, first_of_each, header, read_all, refuse
from router.telemetry import Outcome
from router.tenants import Tenant
from router.transports.raw_http import EVENTS, JSON
from router.upload import Upload
from router.wildcards import STAR
from router.wire import error_frame, read_body, read_flag, read_text

FAMILIES = ("files", "batches", "audio", "images", "messages")
_MESSAGES = re.compile(rb"(?:/v1)?/messages(?:/|\Z)")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD")
BELOW = ("responses",)
"""Families of which only what lies below is passed through: stored responses."""
_PATH = re.compile(
    rb"(?:/v1)?(/(?:%s)(?:/[^?#]*)?|/(?:%s)/[^?#]+)\Z"
    % (b"|".join(f.encode() for f in FAMILIES), b"|".join(f.encode() for f in BELOW))
)
_ODD = re.compile(r"(?:^|/)\.{1,2}(?:/|$)|//|\\|%2e|%2f|%5c|[\x00-\x1f\x7f]", re.IGNORECASE)
"""In a decoded path: what an upstream may read as another path than we did."""
_PASSED = frozenset(
    {
        b"accept",
        b"content-type",
        b"content-encoding",
        b"range",
        b"idempotency-key",
        b"anthropic-version",
        b"anthropic-beta",
        b"openai-beta",
    }
)
"""Request headers that reach the upstream; keys, cookies, hop-by-hop ones and everything unknown do not."""
_MOST_KEPT = 16 * 2**20
"""Bytes of a streamed answer of events that a record may hold."""


class Passthrough:
    """Answers METHODS on every path of FAMILIES and below them and BELOW, with and without `/v1`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def serves(self, scope: Scope) -> bool:
        """Whether a request is one of these."""
        return _PATH.match(scope["raw_path"]) is not None and scope["method"] in METHODS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        id = new_id()
        tenant: Tenant | None = None
        try:
            tenant = self._who(scope)
            call = await self._read(id, tenant, scope, receive, started)
        except RouterError as error:
            self._endpoint.refused(id, tenant, error, started)
            await refuse(_caller(scope)(receive, send), error, {"x-twolane-decision": id})
            return
        except Gone:
            return
        upload = None if call.raw is None else call.raw.upload
        with _caller(scope)(receive if upload is None else upload.after, send) as caller:
            await self._endpoint.answer(call, caller, RawStreaming)

    def _who(self, scope: Scope) -> Tenant:
        """Anthropic's clients send their key as `x-api-key`."""
        headers = first_of_each(scope["headers"])
        key = header(headers, b"x-api-key")
        if key and b"/messages" in scope["raw_path"] and b"authorization" not in headers:
            headers = {b"authorization": b"Bearer " + key.encode("latin-1")}
        return authenticate(self._endpoint.tenants, headers)

    async def _read(self, id: str, tenant: Tenant, scope: Scope, receive: Receive, started: float) -> Call:
        if tenant.policy.regulated:
            raise Forbidden(
                "This path is passed through, so what is said on it could not be recorded as a whole; regulated "
                "tenants are not served here.",
                code="regulated_not_recorded",
            )
        headers: list[Header] = scope["headers"]
        told = first_of_each(headers)
        kind = header(told, b"content-type") or ""
        target, named = _target(scope)
        path = target.partition("?")[0]
        fields, upload = {}, None
        if _is_json(headers, kind):
            body = await read_all(receive, headers, self._endpoint.max_body)
            fields = read_body(body) if body else {}
            refuse_another_model(fields)
            named = read_text(fields, "model") or named
        else:
            upload = await self._upload(receive, told, kind, path)
            named = upload.said or named
        model = named or header(told, b"x-twolane-model")
        model = model or self._only(tenant, header(told, b"x-twolane-deployment"))
        if upload is not None:
            upload.said = upload.said or model
        raw = Raw(
            method=scope["method"],
            target=target,
            headers={n.decode("latin-1"): v.decode("latin-1") for n, v in headers if n in _PASSED},
            upload=None if upload is None or upload.empty else upload,
        )
        stream = read_flag(fields, "stream")
        return made_call(id, tenant, told, fields, started, model=model, path=path, stream=stream, raw=raw)

    async def _upload(self, receive: Receive, headers: Mapping[bytes, bytes], kind: str, path: str) -> Upload:
        length = header(headers, b"content-length") or ""
        is_form = kind.lower().startswith("multipart/")
        upload = Upload(
            receive,
            length=int(length) if length.isdecimal() else None,
            limit=self._endpoint.max_body,
            boundary=boundary_of(kind) if is_form else None,
        )
        await upload.look()
        if not upload.empty and not is_form and not path.startswith("/files"):
            # Many servers read JSON under any name: a model in it would be one that nobody judged.
            raise BadRequest(
                "The body must be JSON or a form, and not compressed.", status=415, code="unsupported_media_type"
            )
        return upload

    def _only(self, tenant: Tenant, pinned: str | None) -> str:
        """The group of the deployment that the caller names, else the only one that it could mean."""
        dispatcher = self._endpoint.dispatcher
        if pinned is not None and pinned in dispatcher.deployments:
            return dispatcher.deployments[pinned].model_name
        allowed = tenant.policy.terms.allows_model
        groups = [
            group
            for group, members in dispatcher.settings.groups.items()
            if STAR not in group and allowed(group) and any(d.kind == "http" for d in members)
        ]
        if len(groups) == 1:
            return groups[0]
        raise BadRequest(
            "Name the model group: as 'model' in a JSON body or a form, as ?model= or as the header x-twolane-model.",
            param="model",
            code="missing_model",
        )


class MessagesCaller(AsgiCaller):
    """Who asked `/messages`: Anthropic's clients look for a type beside the error, others for the error alone."""

    async def whole(self, status: int, lines: bytes, body: bytes) -> None:
        await super().whole(status, lines, _marked(body) if status >= 400 else body)


def _caller(scope: Scope) -> type[AsgiCaller]:
    return MessagesCaller if _MESSAGES.match(scope["raw_path"]) else AsgiCaller


def _marked(body: bytes) -> bytes:
    return body.replace(b'{"error":', b'{"type":"error","error":', 1)


def _target(scope: Scope) -> tuple[str, str | None]:
    """Path and query for the upstream, and the group that the query names. Raises BadRequest for a path that plays."""
    found = _PATH.match(scope["raw_path"])
    assert found is not None  # noqa: S101  (`serves` has looked)
    if _ODD.search(scope["path"]) or not scope["raw_path"].isascii():
        raise BadRequest("The path must be plain.", code="invalid_path")
    pairs = [pair for pair in scope["query_string"].decode("latin-1").split("&") if pair]
    models = [pair.partition("=")[2] for pair in pairs if _names_model(pair)]
    if models and (len(models) > 1 or not models[0]):
        raise BadRequest("?model= must name one model group.", param="model", code="missing_model")
    rest = "&".join(pair for pair in pairs if not _names_model(pair))
    path = found[1].decode("ascii")
    return f"{path}?{rest}" if rest else path, unquote_plus(models[0]) if models else None


def _names_model(pair: str) -> bool:
    return unquote_plus(pair.partition("=")[0]) == "model"


def _is_json(headers: list[Header], kind: str) -> bool:
    """Whether the body can be read here."""
    coded = any(name == b"content-encoding" and value.lower() != b"identity" for name, value in headers)
    return not coded and kind.partition(";")[0].strip().lower() == JSON


class RawStreaming(Streaming):
    """An answer of any kind on its way to the caller. One that breaks off ends with an error event, or unfinished."""

    async def run(self) -> None:
        """Relay to the end."""
        self._events = self._reply.content_type.lower().startswith(EVENTS)
        if not self._events:
            self._said = None  # of any size and kind: a record has no use for it
        await super().run()

    async def _relay(self) -> bytes:
        frames, size = self._reply.frames, 0
        assert frames is not None  # noqa: S101  (run is for streams)
        async for piece in frames:
            if self._hold:
                try:
                    await self._dispatcher.hold(self._course, piece)
                except RouterError as error:
                    self._reply.error = error.code
                    break
            size += len(piece)
            if self._said is not None and size <= _MOST_KEPT:
                self._said.append(piece)
            await self._caller.piece(piece)
        if self._reply.error is None or not self._events:
            return b""
        failure = RouterError("The answer broke off.", type="upstream_error", code=self._reply.error)
        last = error_frame(failure)
        return b"event: error\n" + (_marked(last) if isinstance(self._caller, MessagesCaller) else last)

    async def _end(self, outcome: Outcome, last: bytes) -> None:
        if self._reply.error is None or self._events:
            await super()._end(outcome, last)
            return
        await self._dispatcher.finish(self._course, outcome, answer=self._answer())
        self._caller.over()  # and no last piece: the server closes the connection, which says that more should come

    def _answer(self) -> bytes | None:
        return None if self._said is None else b"".join(self._said)
