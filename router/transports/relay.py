"""The relay, the text-lane twin of a pair: the sharer group writes a hint, the receiver group answers with it.

Both halves run through `run`, the dispatcher's ordinary text path for a group, so retries, fallbacks and policy hold
for each. Nothing of a relay ever goes down the cache lane.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from router.call import Call, Reply, Usage
from router.errors import BadRequest, Refused, RouterError, TimedOut, TransportError, Unavailable, Unrecorded
from router.transports.upstream_errors import CONTEXT_CODES
from router.wire import ABSENT, Splitter, frame, read_answer, read_usage, told
from workers.hint import for_receiver, for_sharer, hint_in

Run = Callable[[Call], Awaitable[Reply]]
"""Runs a call on the text deployments of `call.model`; the Reply is the caller's to close."""

_KEPT_FOR_SHARER = ("user", "seed")

Message = dict[str, Any]
_messages = msgspec.json.Decoder(list[Message])


class _Said(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Said


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: msgspec.Raw = ABSENT


_answer = msgspec.json.Decoder(_Answer)


class Relay:
    """One `relay_params` deployment."""

    def __init__(self, run: Run, *, sharer: str, receiver: str, max_hint_tokens: int = 128) -> None:
        """`sharer` and `receiver` are model groups."""
        self._run = run
        self._sharer = sharer
        self._receiver = receiver
        self._max_hint_tokens = max_hint_tokens

    async def send(self, call: Call) -> Reply:
        if call.path != "/chat/completions":
            raise Refused("A relay answers chat completions only.", param="model", code="unsupported_endpoint")
        messages = _read(call)
        hint, spent, paid = await self._ask(call, messages)
        receiver = replace(call, id=f"{call.id}-answer", model=self._receiver, hint="text", pinned=None)
        if not hint:
            return _joined(await self._answer(receiver), hint, spent, paid)
        told = replace(receiver, fields={**call.fields, "messages": _raw(for_receiver(messages, hint))})
        try:
            return _joined(await self._answer(told), hint, spent, paid)
        except TransportError as error:
            if error.code not in CONTEXT_CODES:
                raise
        # With the hint it is too long: that is no mistake of the caller's, whose own words may fit.
        reply = _joined(await self._answer(receiver), hint, spent, paid)
        reply.hint_left_out = True
        return reply

    async def close(self) -> None:
        """Nothing of its own."""

    async def _answer(self, call: Call) -> Reply:
        try:
            return await self._run(call)
        except (TransportError, Unrecorded):
            raise
        except BadRequest as error:
            raise Refused(error.message, status=error.status, code=error.code, param=error.param) from error
        except RouterError as error:
            # Policy or configuration leaves the receiver no deployment; the caller's own group may have others.
            raise Unavailable(f"The relay's receiver failed: {error.message}", code="relay_receiver_failed") from error

    async def _ask(self, call: Call, messages: list[Message]) -> tuple[str, Usage, float | None]:
        """The hint, its tokens and what it cost in USD."""
        fields = {name: call.fields[name] for name in _KEPT_FOR_SHARER if name in call.fields}
        fields |= {
            "model": _raw(self._sharer),
            "messages": _raw(for_sharer(messages)),
            "max_tokens": _raw(self._max_hint_tokens),
            "temperature": _raw(0),
        }
        asked = replace(
            call,
            id=f"{call.id}-hint",
            model=self._sharer,
            fields=fields,
            stream=False,
            include_usage=False,
            hint="text",
            pinned=None,
            session=None,
        )
        try:
            reply = await self._run(asked)
        except (TimedOut, Unrecorded):
            raise
        except RouterError as error:
            # Even what is the caller's mistake for the sharer (a prompt too long, say) another deployment may answer.
            raise Unavailable(f"The relay's sharer failed: {error.message}", code="relay_sharer_failed") from error
        try:
            return *_hint_of(reply), _paid(reply)
        finally:
            await reply.aclose()


def _read(call: Call) -> list[Message]:
    try:
        messages = _messages.decode(call.fields.get("messages", b"[]"))
    except msgspec.DecodeError:
        raise Refused("'messages' must be a list of messages.", param="messages", code="invalid_type") from None
    if not any(m.get("role") == "user" and m.get("content") for m in messages):
        raise Refused("A relay needs a user message with content.", param="messages", code="invalid_value")
    return messages


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def _hint_of(reply: Reply) -> tuple[str, Usage]:
    try:
        answer = _answer.decode(reply.body)
        hint = hint_in(answer.choices[0].message.content or "")
    except (msgspec.DecodeError, RecursionError, IndexError):
        raise TransportError("The relay's sharer gave no readable answer.", code="relay_sharer_failed") from None
    return hint, reply.usage


def _paid(reply: Reply) -> float | None:
    return 0.0 if reply.cost is None else reply.cost(reply)


def _joined(reply: Reply, hint: str, spent: Usage, paid: float | None) -> Reply:
    """The receiver's reply with the usage and the cost of both; `frames` fills them in when they end."""

    def cost(_: Reply) -> float | None:
        rest = _paid(reply)
        return None if paid is None or rest is None else paid + rest

    joined = replace(reply, usage=Usage(), hint=hint, cost=cost)
    if reply.frames is None:
        joined.body = _with(reply.body, spent)
        _add(joined, reply, spent)
    else:
        joined.frames = _Frames(reply, joined, spent)
    return joined


def _add(joined: Reply, reply: Reply, spent: Usage) -> None:
    ours, theirs = joined.usage, reply.usage
    ours.prompt_tokens = theirs.prompt_tokens + spent.prompt_tokens
    ours.completion_tokens = theirs.completion_tokens + spent.completion_tokens
    ours.cached_tokens = theirs.cached_tokens + spent.cached_tokens
    ours.known = theirs.known and spent.known
    ours.unreadable = theirs.unreadable or spent.unreadable
    joined.run, joined.error, joined.first_frame = reply.run, reply.error, reply.first_frame


def _with(body: bytes, spent: Usage) -> bytes:
    """A plain body or event data whose `usage` counts the hint as well; anything else untouched."""
    answer = read_answer(body)
    if answer is None or not told(answer.usage):
        return body
    seen = Usage()
    read_usage(answer.usage, seen)
    if not seen.known:
        return body
    usage = msgspec.json.decode(answer.usage, type=dict[str, Any])
    usage["prompt_tokens"] = seen.prompt_tokens + spent.prompt_tokens
    usage["completion_tokens"] = seen.completion_tokens + spent.completion_tokens
    usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
    cached = seen.cached_tokens + spent.cached_tokens
    if cached:
        usage["prompt_tokens_details"] = {**(usage.get("prompt_tokens_details") or {}), "cached_tokens": cached}
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields["usage"] = _raw(usage)
    return msgspec.json.encode(fields)


class _Frames:
    """The receiver's frames; closing them, begun or not, hangs up on the receiver."""

    def __init__(self, reply: Reply, joined: Reply, spent: Usage) -> None:
        self._reply = reply
        self._joined = joined
        self._spent = spent

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        assert self._reply.frames is not None  # noqa: S101 - made for streams only
        try:
            sent = await anext(self._reply.frames)
        except StopAsyncIteration:
            _add(self._joined, self._reply, self._spent)
            raise
        return self._counted(sent) if b'"usage"' in sent else sent

    def _counted(self, sent: bytes) -> bytes:
        events = Splitter().feed(sent)
        return b"".join(frame(head, _with(data, self._spent)) for head, data in events)

    async def aclose(self) -> None:
        _add(self._joined, self._reply, self._spent)
        await self._reply.aclose()
