"""What a request cannot do without, and which kind of deployment cannot do it. The one place for both.

A shallow look: values are tested for presence, messages are scanned for part types, nothing is decoded in full.
"""

from __future__ import annotations

import re

import msgspec

from router.call import Call
from router.deployments import Kind
from router.wire import MOST, read_whole

_WORKERS = frozenset({"tools", "images", "audio", "files", "json", "embeddings", "responses", "passthrough"})
CANNOT: dict[Kind, frozenset[str]] = {
    "http": frozenset(),
    "litellm": frozenset({"responses", "passthrough"}),
    "relay": frozenset({"tools", "images", "audio", "files", "completions", "embeddings", "responses", "passthrough"}),
    "local": _WORKERS,
    "cache": _WORKERS,
}
"""Features by kind that it cannot serve."""

_PARTS = {
    b"image_url": "images",
    b"input_image": "images",
    b"input_audio": "audio",
    b"file": "files",
    b"input_file": "files",
    b"tool": "tools",
    b"function": "tools",
}
_mark = re.compile(rb'"(?:type|role)"\s*:\s*"(image_url|input_image|input_audio|file|input_file|tool|function)"')
_EMPTY = frozenset({b"null", b"false", b"0", b"[]", b"{}", b'"none"', b'""'})
_DOORS = {
    "/chat/completions": frozenset[str](),
    "/completions": frozenset({"completions"}),
    "/embeddings": frozenset({"embeddings"}),
    "/responses": frozenset({"responses"}),
}
"""What a door asks of a deployment; all others are passed through."""
_PASSED = frozenset({"passthrough"})
_CALLING = ("tool_choice", "function_call")
"""Fields that ask for a call, unless they leave it to the model."""
_TELLING = frozenset(
    {"tools", "functions", *_CALLING, "logprobs", "top_logprobs", "logit_bias", "response_format", "audio", "n"}
)
"""Fields that tell of a feature besides the messages."""
_MESSAGES = ("messages", "prompt", "input")
_READ = (*_MESSAGES, "tools", "instructions")
_READ_RAW = (*_READ, "system")
"""At doors that are passed through: `/messages` has its instructions apart."""
_OUTPUT = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def needs(call: Call) -> frozenset[str]:
    """Features the request uses."""
    fields = call.fields
    found = _DOORS.get(call.path, _PASSED)
    if not _TELLING.isdisjoint(fields):
        found |= _told(fields)
    for name in _MESSAGES:
        raw = fields.get(name)
        if raw is not None and _may_mark(bytes(raw)):
            # Quotes inside a message's text are escaped there, so the bare form is a key and value of the structure.
            found |= {_PARTS[mark] for mark in _mark.findall(raw)}
    return found


def _told(fields: dict[str, msgspec.Raw]) -> set[str]:
    """Features that fields other than the messages tell of."""
    found = set()
    if any(_set(fields, name) for name in ("tools", "functions")) or any(_asks_for_call(fields, n) for n in _CALLING):
        found.add("tools")
    if _set(fields, "logprobs") or _set(fields, "top_logprobs"):
        found.add("logprobs")
    if _set(fields, "logit_bias"):
        found.add("logit_bias")
    if "response_format" in fields and b'"json' in bytes(fields["response_format"]):
        found.add("json")
    if _set(fields, "audio"):
        found.add("audio")
    if "n" in fields and bytes(fields["n"]) not in (b"1", b"null"):
        found.add("n")
    return found


def _asks_for_call(fields: dict[str, msgspec.Raw], name: str) -> bool:
    return _set(fields, name) and bytes(fields[name]).strip() != b'"auto"'


def _may_mark(messages: bytes) -> bool:
    """False where `_mark` finds nothing: looking for bytes alone costs a fraction."""
    if b'"tool"' in messages or b'"function"' in messages:
        return True
    return b"image" in messages or b'"input_' in messages or b'"file"' in messages


def _set(fields: dict[str, msgspec.Raw], name: str) -> bool:
    raw = fields.get(name)
    return raw is not None and bytes(raw).strip() not in _EMPTY


def prompt_tokens(call: Call) -> int:
    """An estimate from the bytes of what is to be read: about four to a token."""
    fields, size = call.fields, 0
    for name in _READ if call.raw is None else _READ_RAW:
        raw = fields.get(name)
        if raw is not None:
            size += len(raw) if len(raw) < _EMBEDS else _read_size(bytes(raw))
    return max(1, size // 4)


_EMBEDS = 2048
"""Bytes below which nothing of weight is embedded."""
_embedded = re.compile(rb'"(data:image[^",]{1,80};base64,)?(?:data:[^",]{0,80};base64,)?[A-Za-z0-9+/=_\\-]{1024,}+"')
"""A text without any gap: an image, sound or file. Models read it as what it is, in far fewer tokens than bytes."""
_IMAGE_TOKENS = 1500
_FILE_BYTES = 500
"""Of a file's base64, to a token; of images no more than a fixed number is read."""


def _read_size(raw: bytes) -> int:
    size = len(raw)
    if b";base64," in raw or b'"data"' in raw:
        for found in _embedded.finditer(raw):
            length = found.end() - found.start()
            tokens = _IMAGE_TOKENS if found[1] else _IMAGE_TOKENS + length // _FILE_BYTES
            size -= max(0, length - 4 * tokens)
    return size


def output_limit(call: Call) -> int | None:
    """Tokens the caller allows the answer at most; None where it sets no bound. Raises BadRequest.

    Of several the largest holds, for an upstream may read any. One below zero is no bound: some take it for none.
    """
    most: int | None = None
    fields = call.fields
    for name in _OUTPUT:
        if name in fields:
            limit = read_whole(fields, name)
            if limit is not None and limit >= 0 and (most is None or limit > most):
                most = min(limit, MOST)
    return most


class _Turn(msgspec.Struct):
    role: str = ""
    content: msgspec.Raw = msgspec.Raw()


_turns = msgspec.json.Decoder(list[_Turn])


def turns_before_question(call: Call) -> bool:
    """Something stands before the last user message. False where the messages cannot be read that way."""
    turns = _read_turns(call)
    last = max((i for i, turn in enumerate(turns) if turn.role == "user"), default=0)
    return last > 0


def first_turn(call: Call) -> bytes | None:
    """The first user message as it was sent: what names a conversation that has no name of its own."""
    return next((bytes(turn.content) for turn in _read_turns(call) if turn.role == "user"), None)


def _read_turns(call: Call) -> list[_Turn]:
    raw = call.fields.get("messages")
    if raw is None:
        return []
    try:
        return _turns.decode(raw)
    except msgspec.DecodeError:
        return []
