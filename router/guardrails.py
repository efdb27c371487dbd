"""Guardrails: checks of what a caller asks and of what is answered, on every door, in both lanes.

One that raises, or takes too long, refuses: nothing passes unchecked. A streamed answer that is to be checked is held
until it is whole, for what has left cannot be called back. Costs nothing where none applies.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import structlog

from router.call import Call, Raw, Reply
from router.errors import BadRequest, RouterError
from router.guardrail_config import GuardrailConfig, GuardrailParams, Stage
from router.guardrail_texts import Texts, Unreadable, add_events, of_answer, of_raw_answer, of_request
from router.transcript import transcript
from router.transports.openai_http import Pools
from router.wire import DONE, Splitter

log = structlog.get_logger("twolane.router")

APPLIED = "x-litellm-applied-guardrails"
_PATH = "/beta/litellm_basic_guardrail_api"
"""LiteLLM's generic guardrail API."""
_MOST = 64 * 2**20
"""Bytes of a streamed answer that is held."""
_THREADS = 4


class Blocked(Exception):
    """Raise it in `check`: the caller is refused with this reason."""


@dataclass(frozen=True, slots=True)
class Content:
    """What is checked."""

    stage: Stage
    texts: tuple[str, ...]
    """Of all messages, or of the answer, in their order."""
    images: tuple[str, ...]
    """Their addresses, `data:` ones included."""
    model: str
    tenant: str
    call_id: str


class Checks(Protocol):
    """What the class behind a guardrail's `use` offers."""

    def check(self, content: Content) -> Sequence[str] | Awaitable[Sequence[str] | None] | None:
        """None lets it pass; as many texts as were given stand in their places. Raises Blocked.

        Async, or called in a thread.
        """


class GuardrailBlocked(RouterError):
    """A guardrail does not let this request or answer pass; the message is its reason."""

    status, type, code = 400, "invalid_request_error", "guardrail_blocked"


class GuardrailFailed(RouterError):
    """A guardrail could not check; the request is refused for that."""

    status, type, code = 503, "server_error", "guardrail_failed"


@dataclass(frozen=True, slots=True)
class _Guardrail:
    config: GuardrailConfig
    checks: Checks

    @property
    def name(self) -> str:
        return self.config.guardrail_name


class Guardrails:
    """All guardrails of one configuration."""

    def __init__(self, configs: Iterable[GuardrailConfig], pools: Pools) -> None:
        self._all = {config.guardrail_name: _Guardrail(config, _checks(config, pools)) for config in configs}
        self._default = frozenset(name for name, one in self._all.items() if one.config.on)

    def __bool__(self) -> bool:
        return bool(self._all)

    async def request(self, call: Call) -> None:
        """Check what is asked, and put what guardrails make of it in its place. Raises RouterError.

        Call it before anything is decided. What the caller names under `guardrails` is added to what applies anyway.
        """
        named = call.fields.pop("guardrails", None)
        applying = self._applying(call, named)
        call.guardrails = tuple(one.name for one in applying)
        before = [one for one in applying if "request" in one.config.stages]
        if call.raw is not None:
            self._readable(call, call.raw, applying, before)
        if not before:
            return
        body = msgspec.json.decode(msgspec.json.encode(call.fields), type=dict[str, Any])
        try:
            texts = of_request(call.path, body) if body else Texts()
        except Unreadable as error:
            raise _unreadable(f"{str(error)!r}, and can read text only", str(error)) from None
        if await self._checked(before, texts, call, "request"):
            call.fields.update({k: msgspec.Raw(msgspec.json.encode(body[k])) for k in call.fields})

    async def answer(self, call: Call, reply: Reply) -> None:
        """Check what is answered, before any of it leaves. Raises RouterError, and the answer is gone."""
        if not call.guardrails:
            return
        reply.headers = {**reply.headers, APPLIED: ",".join(call.guardrails)}
        after = [self._all[name] for name in call.guardrails if "response" in self._all[name].config.stages]
        if not after:
            return
        try:
            await self._check(after, call, reply)
        except BaseException:
            reply.body = b""
            await reply.aclose()
            raise

    async def _check(self, after: list[_Guardrail], call: Call, reply: Reply) -> None:
        try:
            if call.raw is not None:
                reply.body = await self._checked_raw(after, call, reply)
            elif reply.frames is None:
                reply.body = await self._checked_body(after, call, reply.body)
            else:
                await self._hold(after, call, reply)
        except RecursionError:  # nested too deeply: not the caller's doing
            raise _foreign() from None

    def _readable(self, call: Call, raw: Raw, applying: list[_Guardrail], before: list[_Guardrail]) -> None:
        """Raises BadRequest for what is passed through and cannot be read on one of its ways."""
        if before and raw.upload is not None:
            raise _unreadable("this body, and can read JSON only", None)
        if call.stream and any("response" in one.config.stages for one in applying):
            raise _unreadable("the answer, and cannot read streams of this path", "stream")

    def _applying(self, call: Call, named: msgspec.Raw | None) -> list[_Guardrail]:
        wanted = self._default | set(call.tenant.guardrails)
        if named is not None:
            wanted |= self._asked_for(named)
        missing = wanted - self._all.keys()
        if missing:  # a tenant's, after a reload that took it away: what should be checked cannot be
            raise GuardrailFailed(f"The guardrail {min(missing)!r} is not configured.")
        return [one for name, one in self._all.items() if name in wanted]

    def _asked_for(self, named: msgspec.Raw) -> set[str]:
        try:
            names = set(msgspec.json.decode(named, type=list[str] | None) or ())
        except msgspec.DecodeError:
            names = {""}
        unknown = names - self._all.keys()
        if unknown:
            known = ", ".join(self._all) or "none"
            raise BadRequest(
                f"'guardrails' must be a list of names; configured are: {known}.",
                param="guardrails",
                code="unknown_guardrail",
            )
        return names

    async def _checked(self, guardrails: Iterable[_Guardrail], texts: Texts, call: Call, stage: Stage) -> bool:
        """One after the other, each on what the one before left. True where a text was rewritten."""
        rewritten = False
        for one in guardrails:
            content = Content(stage, texts.read, tuple(texts.images), call.model, call.tenant.name, call.id)
            answer = await _ask(one, content)
            if answer is None or tuple(answer) == content.texts:
                continue
            if len(answer) != len(content.texts):
                log.warning("guardrail_failed", request_id=call.id, guardrail=one.name, error="wrong number of texts")
                raise GuardrailFailed(f"The guardrail {one.name!r} answered another number of texts.")
            texts.write(answer)
            rewritten = True
        return rewritten

    async def _checked_body(self, guardrails: list[_Guardrail], call: Call, raw: bytes) -> bytes:
        body, texts = _read(raw)
        if not await self._checked(guardrails, texts, call, "response"):
            return raw
        _forget_tokens(body)
        return msgspec.json.encode(body)

    async def _checked_raw(self, guardrails: list[_Guardrail], call: Call, reply: Reply) -> bytes:
        if reply.frames is not None:
            raise GuardrailFailed("The answer is not JSON, or too long, so guardrails cannot read it.")
        if not reply.body:
            return b""
        try:
            body = msgspec.json.decode(reply.body)
            texts = of_raw_answer(call.path, body)
        except (msgspec.DecodeError, Unreadable):
            raise _foreign() from None
        changed = await self._checked(guardrails, texts, call, "response")
        return msgspec.json.encode(body) if changed else reply.body

    async def _hold(self, guardrails: list[_Guardrail], call: Call, reply: Reply) -> None:
        """Take all frames of a stream, check what they say together, and give them back as one that may pass."""
        assert reply.frames is not None  # noqa: S101  (the caller looked)
        frames, size = [], 0
        async for frame in reply.frames:
            frames.append(frame)
            size += len(frame)
            if size > _MOST:
                raise GuardrailFailed("The answer is too long for a guardrail to check.")
        if reply.error is not None:
            # What came before the break was not checked as a whole, so none of it leaves.
            raise GuardrailFailed("The answer broke off before a guardrail could check it.", code=reply.error)
        said, texts = _read(_whole(frames))
        if call.path == "/responses":
            _add_events(texts, frames)
        elif "events" in said:  # what is no part of a choice would pass unread
            raise _foreign()
        if await self._checked(guardrails, texts, call, "response"):
            frames = list(_as_stream(said))
        held = reply.frames
        reply.frames = _Held(frames, held)
        if reply.first_frame is not None:
            reply.first_frame = time.perf_counter()


def _unreadable(what: str, param: str | None) -> BadRequest:
    return BadRequest(f"A guardrail has to read {what}.", param=param, code="guardrail_unreadable")


class _Held:
    """Frames that were held and may go; closing hangs up on whoever sent them."""

    def __init__(self, frames: list[bytes], source: AsyncIterator[bytes]) -> None:
        self._frames = iter(frames)
        self._source = source

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        for frame in self._frames:
            return frame
        raise StopAsyncIteration

    async def aclose(self) -> None:
        close = getattr(self._source, "aclose", None)
        if close is not None:
            await close()


def _read(raw: bytes) -> tuple[dict[str, Any], Texts]:
    try:
        body = msgspec.json.decode(raw, type=dict[str, Any])
        return body, of_answer(body)
    except (msgspec.DecodeError, Unreadable):
        raise _foreign() from None


def _add_events(texts: Texts, frames: list[bytes]) -> None:
    """What events of `/responses` say that their last one does not."""
    splitter = Splitter()
    events = [data for frame in frames for _, data in splitter.feed(frame) if data != b"[DONE]"]
    try:
        add_events(texts, [msgspec.json.decode(data, type=dict[str, Any]) for data in events])
    except (msgspec.DecodeError, Unreadable):
        raise _foreign() from None


def _foreign() -> GuardrailFailed:
    return GuardrailFailed("The answer is of a shape that guardrails cannot read.")


def _whole(frames: list[bytes]) -> bytes:
    """A stream's plain twin; `/responses` tells it in its last event."""
    splitter = Splitter()
    for frame in frames:
        for _, data in splitter.feed(frame):
            if b'"response.completed"' in data or b'"response.incomplete"' in data:
                event = msgspec.json.decode(data)
                if isinstance(event, dict) and isinstance(event.get("response"), dict):
                    return msgspec.json.encode(event["response"])
    return transcript(frames)


def _forget_tokens(body: dict[str, Any]) -> None:
    """Of a rewritten answer: `logprobs` still tell what it was."""
    for choice in body.get("choices") or ():
        if choice.get("logprobs") is not None:
            choice["logprobs"] = None
    for item in body.get("output") or ():
        for part in item.get("content") or ():
            if isinstance(part, dict) and part.get("logprobs"):
                part["logprobs"] = []


def _as_stream(said: dict[str, Any]) -> Iterable[bytes]:
    """A plain twin as events again: each choice in one piece. Raises GuardrailFailed for the events of `/responses`."""
    if "choices" not in said:
        raise GuardrailFailed("A guardrail rewrote the answer, and streams of this kind cannot be rewritten.")
    _forget_tokens(said)
    usage = said.pop("usage", None)
    for choice in said.pop("choices"):
        finish = choice.pop("finish_reason", None)
        if "message" in choice:
            choice["delta"] = choice.pop("message")
        nothing: dict[str, Any] = {"delta": {}} if "delta" in choice else {"text": ""}
        end = {"index": choice.get("index", 0), **nothing, "finish_reason": finish}
        for part in ({**choice, "finish_reason": None}, end):
            yield b"data: " + msgspec.json.encode({**said, "choices": [part]}) + b"\n\n"
    if usage is not None:
        yield b"data: " + msgspec.json.encode({**said, "choices": [], "usage": usage}) + b"\n\n"
    yield DONE


async def _ask(one: _Guardrail, content: Content) -> Sequence[str] | None:
    """What a guardrail makes of the content. Raises GuardrailBlocked and GuardrailFailed."""
    try:
        async with asyncio.timeout(one.config.timeout):
            answer = one.checks.check(content)
            texts = await answer if inspect.isawaitable(answer) else answer
            if isinstance(texts, str) or (texts is not None and not all(isinstance(text, str) for text in texts)):
                raise TypeError("texts must be a list of strings")
            return texts
    except Blocked as blocked:
        reason = str(blocked) or "The content is not allowed."
        raise GuardrailBlocked(reason, param=one.name) from None
    except (Exception, asyncio.CancelledError, SystemExit) as error:
        # Another's code: whatever it does, nothing passes unchecked, and the router goes on.
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # the caller hung up
        log.warning("guardrail_failed", request_id=content.call_id, guardrail=one.name, error=type(error).__name__)
        raise GuardrailFailed(f"The guardrail {one.name!r} could not check this request.") from None


def _checks(config: GuardrailConfig, pools: Pools) -> Checks:
    if config.litellm_params is not None:
        return Generic(config.litellm_params, pools)
    assert config.own is not None  # noqa: S101  (held by the validator)
    made: Checks = config.own.made
    return made if inspect.iscoroutinefunction(made.check) else _InThread(made)


class _InThread:
    """A class whose `check` is not async: it must not stop the router while it thinks."""

    def __init__(self, made: Checks) -> None:
        self._made = made
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="guardrail")

    async def check(self, content: Content) -> Sequence[str] | None:
        answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._made.check, content)
        return await answer if isinstance(answer, Awaitable) else answer


class _Answer(msgspec.Struct):
    action: str = ""
    texts: list[str] | None = None
    blocked_reason: str | None = None


_answer = msgspec.json.Decoder(_Answer)


class Generic:
    """LiteLLM's generic guardrail API: one POST per check, and three answers."""

    def __init__(self, params: GuardrailParams, pools: Pools) -> None:
        self._params = params
        self._pools = pools
        base = params.api_base.rstrip("/")
        self._url = base if base.endswith(_PATH) else base + _PATH
        self._headers = {**params.headers, **({"x-api-key": params.api_key} if params.api_key else {})}

    async def check(self, content: Content) -> Sequence[str] | None:
        """Raises Blocked, aiohttp.ClientError, and ValueError for an answer that is none of the three."""
        session, url = self._pools.session(self._url)
        asked = {
            "input_type": content.stage,
            "litellm_call_id": content.call_id,
            "texts": content.texts,
            "images": content.images or None,
            "model": content.model,
            "request_data": {"user_api_key_alias": content.tenant},
            "additional_provider_specific_params": self._params.additional_provider_specific_params,
        }
        async with session.post(
            url,
            data=msgspec.json.encode(asked),
            headers={"content-type": "application/json", **self._headers},
            raise_for_status=True,
        ) as response:
            answer = _answer.decode(await response.read())
        match answer.action:
            case "NONE":
                return None
            case "BLOCKED":
                raise Blocked(answer.blocked_reason or "")
            case "GUARDRAIL_INTERVENED" if answer.texts is not None:
                return answer.texts
            case _:
                raise ValueError("the guardrail's answer is none of NONE, BLOCKED, GUARDRAIL_INTERVENED")
