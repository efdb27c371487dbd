"""What answers of the pass-through doors tell, or show, of what they used: tokens, images, seconds, characters."""

from __future__ import annotations

from typing import Annotated

import msgspec

from router.asked import characters, picture, pixels, tier
from router.call import Call, Usage
from router.wire import (
    ABSENT,
    MOST,
    Count,
    Searches,
    Splitter,
    StoredDetails,
    TokenDetails,
    count,
    count_kinds,
    count_searches,
    count_stored,
    told,
    unread,
)

_MAKE = ("/audio", "/images", "/messages", "/responses/compact")


def makes(call: Call) -> bool:
    """Whether a request makes an upstream work for money at once; what a batch costs nobody is told here."""
    path = call.path
    apart = path.startswith("/messages/batches") or path == "/messages/count_tokens"
    return call.raw is not None and call.raw.method == "POST" and path.startswith(_MAKE) and not apart


def counted(call: Call) -> Usage:
    """What the request alone tells: the characters that are to be spoken, the images' quality and size."""
    usage = Usage(tier=tier(call))
    if call.path == "/audio/speech" and (said := characters(call)):
        count(usage, "characters", said)
    if call.path.startswith("/images"):
        usage.image = picture(call)
    return usage


Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST)]


class _Usage(msgspec.Struct):
    """OpenAI's doors count what was read before among the input, `/messages` beside it."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    input_tokens_details: TokenDetails | None = None
    input_token_details: TokenDetails | None = None
    output_tokens_details: TokenDetails | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None
    cache_creation: StoredDetails | None = None
    server_tool_use: Searches | None = None
    service_tier: str | None = None
    seconds: Seconds | None = None


class _Message(msgspec.Struct):
    usage: msgspec.Raw = ABSENT


class _Answer(msgspec.Struct):
    usage: msgspec.Raw = ABSENT
    message: _Message | None = None
    """`/messages` puts what it has read into the first event of a stream."""


class _Images(msgspec.Struct):
    data: list[msgspec.Raw]
    quality: str | None = None
    size: str | None = None


class _Transcript(msgspec.Struct):
    duration: Seconds


_usage = msgspec.json.Decoder(_Usage)
_answer = msgspec.json.Decoder(_Answer)
_images = msgspec.json.Decoder(_Images)
_transcript = msgspec.json.Decoder(_Transcript, strict=False)  # some servers write the number as text


class UsageReader:
    """Reads what an answer says of its own cost, whole or event by event; what is no JSON is left unread."""

    def __init__(self, usage: Usage, path: str) -> None:
        self._usage = usage
        self._path = path
        self._beside = path.startswith("/messages")
        self._splitter: Splitter | None = Splitter()

    def feed(self, data: bytes) -> None:
        """Part of a stream of events."""
        if self._splitter is None:
            return
        try:
            events = self._splitter.feed(data)
        except ValueError:  # an endless event: it passes, and is not read
            self._splitter = None
            return
        for _, event in events:
            if b'"usage"' in event:
                self._read(event)

    def whole(self, body: bytes) -> None:
        """A whole body."""
        self._read(body)
        try:
            if self._path.startswith("/images"):
                self._pictures(_images.decode(body))
            elif self._path.startswith("/audio") and "seconds" not in (self._usage.counted or {}):
                count(self._usage, "seconds", _transcript.decode(body).duration)
        except (msgspec.DecodeError, RecursionError):  # no such figure in it
            pass

    def _pictures(self, said: _Images) -> None:
        into, (quality, size) = self._usage, self._usage.image or ("", "")
        into.image = (said.quality or quality, said.size or size)
        count(into, "images", len(said.data))
        if (each := pixels(into.image[1])) is not None:
            count(into, "pixels", len(said.data) * each)

    def _read(self, body: bytes) -> None:
        try:
            said = _answer.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return
        if said.message is not None and told(said.message.usage):
            self._take(said.message.usage, last=False)
        if told(said.usage):
            self._take(said.usage, last=True)

    def _take(self, raw: msgspec.Raw, *, last: bool) -> None:
        """`last`: not what a stream tells at its beginning, when the answer is still to be written."""
        into = self._usage
        if into.unreadable:  # what other events told may belong to it
            return
        try:
            said = _usage.decode(raw)
        except (msgspec.DecodeError, RecursionError):
            unread(into)
            return
        read, stored = said.cache_read_input_tokens, said.cache_creation_input_tokens or 0
        prompt = said.input_tokens if said.prompt_tokens is None else said.prompt_tokens
        answer = said.output_tokens if said.completion_tokens is None else said.completion_tokens
        details = said.input_tokens_details or said.input_token_details
        cached = read if self._beside else None if details is None else details.cached_tokens
        if prompt is not None:
            into.prompt_tokens = prompt + ((read or 0) + stored if self._beside else 0)
        if answer is not None:
            into.completion_tokens = answer
        if cached is not None:
            into.cached_tokens = cached
        if stored:
            count_stored(into, stored, said.cache_creation)
        if said.server_tool_use is not None and said.server_tool_use.web_search_requests:
            count_searches(into, said.server_tool_use.web_search_requests)
        if said.seconds:
            count(into, "seconds", said.seconds)
        count_kinds(details, said.output_tokens_details, into)
        if self._path.startswith("/images") and said.output_tokens_details is None and answer:
            count(into, "drawn", answer)  # of what kind they are is not told: an image's
        if said.service_tier is not None:
            into.tier = said.service_tier
        if into.cached_tokens > into.prompt_tokens:
            unread(into)
            return
        into.known = into.known or (last and (prompt is not None or answer is not None))
