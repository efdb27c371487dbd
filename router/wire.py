"""Views of OpenAI bodies, and the framing of server-sent events. Knows bytes; knows no HTTP and no deployment.

Bodies are read shallowly: the top-level values stay as they were sent, and only those that routing needs are decoded.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated, TypeVar

import msgspec

from router.call import Reply, Usage
from router.errors import BadRequest, RouterError

DONE = b"data: [DONE]\n\n"
MAX_EVENT = 32 * 2**20
"""Bytes one event may have: an image comes in one piece, an endless event must not fill memory."""

NULL = msgspec.Raw(b"null")
ABSENT = msgspec.Raw()

TOO_DEEP = "The body is nested too deeply."

T = TypeVar("T")

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str | None)
_flag = msgspec.json.Decoder(bool | None)
_whole = msgspec.json.Decoder(int | None)
_finished = re.compile(rb'"finish_reason"\s*:\s*"')
_responded = re.compile(rb'"type"\s*:\s*"response\.(?:completed|incomplete|failed)"')


def read_body(body: bytes) -> dict[str, msgspec.Raw]:
    """The body's top-level values, undecoded. Raises BadRequest for anything but a JSON object in UTF-8."""
    try:
        body.decode()
        return _fields.decode(body)
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body must be a JSON object: {error}.", code="invalid_json") from None
    except UnicodeDecodeError as error:
        what = "it is compressed" if body.startswith(b"\x1f\x8b") else f"byte {error.start} is not UTF-8"
        raise BadRequest(f"The body must be a JSON object: {what}.", code="invalid_json") from None
    except RecursionError:
        raise BadRequest(TOO_DEEP, code="invalid_json") from None


def given(fields: dict[str, msgspec.Raw], name: str) -> bool:
    """Present and not null."""
    raw = fields.get(name)
    return raw is not None and raw != NULL


def read_text(fields: dict[str, msgspec.Raw], name: str) -> str | None:
    """The named string; None where absent or null. Raises BadRequest naming the field."""
    return _read(fields, name, _text, "a string")


def read_flag(fields: dict[str, msgspec.Raw], name: str) -> bool:
    """The named boolean; False where absent or null. Raises BadRequest naming the field."""
    return _read(fields, name, _flag, "true or false") or False


def read_whole(fields: dict[str, msgspec.Raw], name: str) -> int | None:
    """The named whole number; None where absent or null. Raises BadRequest naming the field."""
    return _read(fields, name, _whole, "a whole number")


def _read(fields: dict[str, msgspec.Raw], name: str, decoder: msgspec.json.Decoder[T | None], wanted: str) -> T | None:
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return decoder.decode(raw)
    except msgspec.DecodeError:
        raise BadRequest(f"{name!r} must be {wanted}.", param=name, code="invalid_type") from None


class StreamOptions(msgspec.Struct):
    """`stream_options` of a request, as far as we read it."""

    include_usage: bool | None = None


_options = msgspec.json.Decoder(StreamOptions | None)


def wants_usage(fields: dict[str, msgspec.Raw]) -> bool:
    """The caller asked for the usage event itself. Raises BadRequest when `stream_options` is not an object."""
    options = _read(fields, "stream_options", _options, "an object")
    return bool(options and options.include_usage)


MOST = 10**8
"""Tokens, seconds or images that one answer may tell of at most; more is a mistake, and nobody's bill."""
Count = Annotated[int, msgspec.Meta(ge=0, le=MOST)]


class CachedDetails(msgspec.Struct):
    """Of what kinds the cached tokens were."""

    audio_tokens: Count | None = None
    image_tokens: Count | None = None


class StoredDetails(msgspec.Struct):
    """For how long tokens were stored upstream."""

    ephemeral_1h_input_tokens: Count | None = None


class Searches(msgspec.Struct):
    """Tools that ran upstream."""

    web_search_requests: Count | None = None


class TokenDetails(msgspec.Struct):
    """Of what kinds the tokens of one direction were."""

    cached_tokens: Count | None = None
    cached_tokens_details: CachedDetails | None = None
    cache_creation_tokens: Count | None = None
    cache_write_tokens: Count | None = None
    cache_creation_token_details: StoredDetails | None = None
    web_search_requests: Count | None = None
    audio_tokens: Count | None = None
    image_tokens: Count | None = None
    reasoning_tokens: Count | None = None


class _UsageView(msgspec.Struct):
    """Chat and completions say prompt and completion, responses say input and output."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    total_tokens: Count | None = None
    prompt_tokens_details: TokenDetails | None = None
    input_tokens_details: TokenDetails | None = None
    completion_tokens_details: TokenDetails | None = None
    output_tokens_details: TokenDetails | None = None
    cache_creation_input_tokens: Count | None = None
    server_tool_use: Searches | None = None
    num_search_queries: Count | None = None
    search_context_size: str | None = None
    citation_tokens: Count | None = None


_usage = msgspec.json.Decoder(_UsageView)


def read_usage(raw: msgspec.Raw | bytes, into: Usage) -> None:
    """Take the figures of a `usage` object. One that no answer can have used counts as none, and is `unreadable`."""
    try:
        view = _usage.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        unread(into)
        return
    details = view.prompt_tokens_details or view.input_tokens_details
    prompt = view.input_tokens if view.prompt_tokens is None else view.prompt_tokens
    answer = view.output_tokens if view.completion_tokens is None else view.completion_tokens
    if answer is None and prompt is not None and view.total_tokens is not None:  # embeddings tell no other
        answer = view.total_tokens - prompt
    cached = (details and details.cached_tokens) or 0
    if prompt is None or answer is None or answer < 0 or cached > prompt:
        unread(into)
        return
    into.prompt_tokens = prompt
    into.completion_tokens = answer
    into.cached_tokens = cached
    into.known, into.unreadable = True, False
    count_kinds(details, view.completion_tokens_details or view.output_tokens_details, into)
    if view.cache_creation_input_tokens and not (into.counted and "stored" in into.counted):
        kept = None if details is None else details.cache_creation_token_details
        count_stored(into, view.cache_creation_input_tokens, kept)
    if view.citation_tokens:
        count(into, "cited", view.citation_tokens)
    tools = view.server_tool_use
    searches = (tools and tools.web_search_requests) or (details and details.web_search_requests)
    searches = searches or view.num_search_queries or (1 if view.search_context_size else 0)
    if searches:
        count_searches(into, searches, view.search_context_size)


def count_stored(into: Usage, tokens: int, details: StoredDetails | None) -> None:
    """Note tokens that the upstream stored; those for an hour have a price of their own."""
    long = min(tokens, (details and details.ephemeral_1h_input_tokens) or 0)
    count(into, "stored", tokens - long)
    if long:
        count(into, "stored_1h", long)


def count_searches(into: Usage, searches: int, size: str | None = None) -> None:
    """Note searches that the upstream made; `size` is `low`, `medium` or `high`."""
    count(into, f"searches_{size if size in ('low', 'high') else 'medium'}", searches)


class _Action(msgspec.Struct):
    type: str | None = None


class _Item(msgspec.Struct):
    type: str | None = None
    action: _Action | None = None


class _Response(msgspec.Struct):
    id: msgspec.Raw = ABSENT
    output: msgspec.Raw = ABSENT


_response = msgspec.json.Decoder(_Response)
_items = msgspec.json.Decoder(list[_Item])


def read_response(answer: bytes, reply: Reply) -> None:
    """Note the id of what `/responses` answered, and the searches among its items."""
    said = _response.decode(answer)
    if told(said.id):
        reply.id = said.id
    if b'"web_search_call"' in bytes(said.output):
        _count_searches(said.output, reply.usage)


def _count_searches(output: msgspec.Raw, into: Usage) -> None:
    """To open a page that was found is none."""
    with suppress(msgspec.DecodeError):  # another shape: nothing that we know of was done
        items = [item for item in _items.decode(output) if item.type == "web_search_call"]
        searches = sum(item.action is None or item.action.type in (None, "search") for item in items)
        if searches:
            count_searches(into, searches)


def count_kinds(read: TokenDetails | None, written: TokenDetails | None, into: Usage) -> None:
    """Note the tokens of kinds that may have a price of their own; most answers have none."""
    if read is not None:
        again = read.cached_tokens_details
        heard, seen = (0, 0) if again is None else (again.audio_tokens or 0, again.image_tokens or 0)
        if heard or seen:
            count(into, "heard_again", heard)
            count(into, "seen_again", seen)
        if read.audio_tokens:
            count(into, "heard", max(0, read.audio_tokens - heard))
        if read.image_tokens:
            count(into, "seen", max(0, read.image_tokens - seen))
        if stored := read.cache_creation_tokens or read.cache_write_tokens:
            count_stored(into, stored, read.cache_creation_token_details)
    if written is not None:
        if written.reasoning_tokens:
            count(into, "reasoned", written.reasoning_tokens)
        if written.audio_tokens:
            count(into, "spoken", written.audio_tokens)
        if written.image_tokens:
            count(into, "drawn", written.image_tokens)


def read_tier(raw: msgspec.Raw, into: Usage) -> None:
    """Note the service tier that an answer says it had; what is no text is none."""
    if raw is ABSENT:
        return
    with suppress(msgspec.DecodeError):
        into.tier = _text.decode(raw) or into.tier


def unread(into: Usage) -> None:
    """What was told cannot be, so nothing is known; what was counted besides stands."""
    into.prompt_tokens = into.completion_tokens = into.cached_tokens = 0
    into.known, into.unreadable = False, True


def count(into: Usage, what: str, amount: float) -> None:
    """Note an amount by its name in `router.prices`."""
    if into.counted is None:
        into.counted = {}
    into.counted[what] = amount


class Answer(msgspec.Struct, gc=False):
    """What we read of a plain body or of one event; decoding it also proves the JSON."""

    usage: msgspec.Raw = ABSENT
    error: msgspec.Raw = ABSENT
    twolane: msgspec.Raw = ABSENT
    service_tier: msgspec.Raw = ABSENT
    response: msgspec.Raw = ABSENT
    """`/responses` puts the whole answer, usage included, into its last event."""

    @property
    def bare(self) -> bool:
        """None of them is there, as in nearly every event."""
        return self.usage is ABSENT and self.error is ABSENT and self.twolane is ABSENT and self.response is ABSENT


_answer = msgspec.json.Decoder(Answer)


prove = _answer.decode
"""Raises msgspec.DecodeError where bytes are no JSON object, and RecursionError where they are nested too deeply."""


def read_answer(body: bytes) -> Answer | None:
    """The view of a plain body or event data; None when it is not a JSON object."""
    try:
        return _answer.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None


def told(raw: msgspec.Raw) -> bool:
    """The field was there and is not null."""
    return raw is not ABSENT and raw != NULL and raw != ABSENT


class Splitter:
    """Cuts a byte stream into events, whatever the reads and the line ends. Comments and bare controls vanish."""

    def __init__(self) -> None:
        self.rest = b""
        """Of an event that is under way."""

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """Events that `data` completes, as (head, data): `event` and `id` lines as sent, and the data unprefixed.

        Raises ValueError when an event exceeds MAX_EVENT.
        """
        data = self.rest + data
        if b"\r" in data:
            # A CR at the end may be half of a CRLF: it waits for the next read.
            held = data.endswith(b"\r")
            data = data[:-1] if held else data
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + (b"\r" if held else b"")
        *blocks, self.rest = data.split(b"\n\n")
        if len(self.rest) > MAX_EVENT:
            raise ValueError("an event exceeds the limit")
        return [event for block in blocks if (event := _event(block)) is not None]

    def flush(self) -> list[tuple[bytes, bytes]]:
        """What the stream's end leaves behind: an upstream may forget the last blank line."""
        event = _event(self.rest.rstrip(b"\r\n"))
        self.rest = b""
        return [event] if event is not None else []


def _event(block: bytes) -> tuple[bytes, bytes] | None:
    if block.startswith(b"data: ") and b"\n" not in block:
        return b"", block[6:]
    head, lines = b"", []
    for line in block.split(b"\n"):
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
        elif line.startswith((b"event:", b"id:")):
            head += line + b"\n"
    data = b"\n".join(lines)
    return (head, data) if data.strip() else None


def frame(head: bytes, data: bytes) -> bytes:
    """One event as bytes."""
    if b"\n" in data:
        data = data.replace(b"\n", b"\ndata: ")
    return b"%bdata: %b\n\n" % (head, data)


def error_frame(error: RouterError) -> bytes:
    """The event that ends a stream which failed after its first frame."""
    return b"data: " + error.body() + b"\n\n"


def finished(tail: bytes, path: str) -> bool:
    """The last events say that the answer is whole, whether or not `[DONE]` followed."""
    return bool((_responded if path == "/responses" else _finished).search(tail))


_message = msgspec.json.Decoder(dict[str, msgspec.Raw])


def without_usage(data: bytes) -> bytes | None:
    """Event data with `usage` taken out; None when nothing but usage was in it."""
    fields = _message.decode(data)
    choices = fields.get("choices")
    if choices is None or bytes(choices).strip() in (b"[]", b"null"):
        return None
    fields.pop("usage", None)
    return msgspec.json.encode(fields)


def without_run(data: bytes) -> bytes:
    """A body or event data with the worker's `twolane` taken out."""
    fields = _message.decode(data)
    fields.pop("twolane", None)
    return msgspec.json.encode(fields)
