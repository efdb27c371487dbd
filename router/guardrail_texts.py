"""Where text stands in the bodies of all doors, for guardrails to read and rewrite. Knows no guardrail.

Of what is passed through without being known here, every text counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Place = tuple[Any, Any]
"""A list or mapping, and the index or key at which a text stands in it."""

_PART_TEXTS = ("text", "refusal")
_MESSAGE_TEXTS = ("content", "reasoning_content", "reasoning", "refusal")
_NAMES = frozenset(
    {"role", "name", "id", "type", "status", "tool_call_id", "call_id", "index", "format", "detail", "phase"}
    | {"signature", "encrypted_content", "cache_control", "annotations", "logprobs", "image_url"}
)
"""Of messages, items and their parts: what names things, is sealed, says again what is said, or is read elsewhere."""
_UNREAD = frozenset({"audio", "input_audio", "file", "input_file"})
"""Parts that say what cannot be read here."""


class Unreadable(ValueError):
    """What should be read holds no text: token ids, or another shape than OpenAI's."""


@dataclass(slots=True)
class Texts:
    """The texts of one body, in their order, and the addresses of its images."""

    places: list[Place] = field(default_factory=list)
    images: list[str] = field(default_factory=list)

    @property
    def read(self) -> tuple[str, ...]:
        return tuple(container[key] for container, key in self.places)

    def write(self, texts: Sequence[str]) -> None:
        """Put other texts in their places; as many as `read` gave."""
        for (container, key), text in zip(self.places, texts, strict=True):
            container[key] = text


def of_request(path: str, body: dict[str, Any]) -> Texts:
    """What a request says. `body` is decoded and may be written to. Raises Unreadable."""
    found = Texts()
    match path:
        case "/chat/completions":
            for message in _list(body.get("messages"), "messages"):
                _message(found, message, "messages")
        case "/responses":
            _text(found, body, "instructions")
            if isinstance(body.get("input"), str):
                _text(found, body, "input")
            else:
                for item in _list(body.get("input") or [], "input"):
                    _item(found, item)
        case "/completions":
            _plain(found, body, "prompt")
            _text(found, body, "suffix")
        case "/embeddings":
            _plain(found, body, "input")
        case "/messages" | "/messages/count_tokens":
            _blocks(found, body, "system")
            for message in _list(body.get("messages"), "messages"):
                if not isinstance(message, dict):
                    raise Unreadable("messages")
                _blocks(found, message, "content")
        case "/batches" if "input_file_id" in body:
            raise Unreadable("input_file_id")
        case _:
            _all(found, body, ("model",))
    return found


def of_raw_answer(path: str, body: Any) -> Texts:
    """What an answer of a door that is passed through says. Raises Unreadable."""
    found = Texts()
    if path == "/messages" and isinstance(body, dict):
        _blocks(found, body, "content")
    else:
        _all(found, body)
    return found


def of_answer(body: dict[str, Any]) -> Texts:
    """What an answer says, of whichever door. Raises Unreadable."""
    found = Texts()
    for choice in _list(body.get("choices") or [], "choices"):
        if not isinstance(choice, dict):
            raise Unreadable("choices")
        _text(found, choice, "text")
        if choice.get("message") is not None:
            _message(found, choice["message"], "choices")
    for item in _list(body.get("output") or [], "output"):
        _item(found, item)
    _text(found, body, "output_text")
    return found


def add_events(found: Texts, events: Sequence[dict[str, Any]]) -> None:
    """Add what events of `/responses` say and `found` does not, pieces put together. Raises Unreadable.

    What is added stands in no answer, so that nothing comes of writing to it.
    """
    beside, pieces = Texts(), dict[tuple[Any, ...], str]()
    for event in events:
        if isinstance(event.get("delta"), str):
            of = tuple(
                event.get(name) for name in ("type", "item_id", "output_index", "content_index", "summary_index")
            )
            pieces[of] = pieces.get(of, "") + event["delta"]
        if isinstance(event.get("response"), dict):
            answer = of_answer(event["response"])
            beside.places += answer.places
            found.images += [image for image in answer.images if image not in found.images]
        if event.get("item") is not None:
            _item(beside, event["item"])
        if event.get("part") is not None:
            _parts(beside, [event["part"]])
        _others(beside, event, ("delta", "response", "item", "part", "item_id", "obfuscation"))
    known = set(found.read)
    more = [text for text in dict.fromkeys((*pieces.values(), *beside.read)) if text not in known]
    found.places += ((more, index) for index in range(len(more)))


def _message(found: Texts, message: Any, where: str) -> None:
    if not isinstance(message, dict):
        raise Unreadable(where)
    for name in _MESSAGE_TEXTS:
        if isinstance(message.get(name), list):
            _parts(found, message[name])
        else:
            _text(found, message, name)
    for call in _list(message.get("tool_calls") or [], "tool_calls"):
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            _text(found, call["function"], "arguments")
        elif isinstance(call, dict):
            _others(found, call)
    if isinstance(message.get("function_call"), dict):
        _text(found, message["function_call"], "arguments")
    if isinstance(message.get("audio"), dict) and message["audio"].keys() - {"id"}:
        raise Unreadable(where)
    _others(found, message, (*_MESSAGE_TEXTS, "tool_calls", "function_call", "audio"))


def _item(found: Texts, item: Any) -> None:
    """One item of `/responses`: a message, a tool's call or what a tool gave back."""
    if not isinstance(item, dict):
        raise Unreadable("input")
    for name in ("content", "summary", "output"):
        if isinstance(item.get(name), list):
            _parts(found, item[name])
        else:
            _text(found, item, name)
    _text(found, item, "arguments")
    _others(found, item, ("content", "summary", "output", "arguments"))


def _parts(found: Texts, parts: list[Any]) -> None:
    for index, part in enumerate(parts):
        if isinstance(part, str):
            found.places.append((parts, index))
        elif isinstance(part, dict):
            if part.get("type") in _UNREAD:
                raise Unreadable(part["type"])
            for name in _PART_TEXTS:
                _text(found, part, name)
            _others(found, part, _PART_TEXTS)
            found.images.extend(_image(part))


def _image(part: dict[str, Any]) -> Iterator[str]:
    image = part.get("image_url")
    address = image.get("url") if isinstance(image, dict) else image
    if isinstance(address, str):
        yield address


def _blocks(found: Texts, container: dict[str, Any], name: str) -> None:
    """A text, or Anthropic's blocks: text, thinking, what a tool is asked and what it gave back, images, documents."""
    value = container.get(name)
    if not isinstance(value, list):
        if not isinstance(value, str | None):
            raise Unreadable(name)
        _text(found, container, name)
        return
    for block in value:
        if not isinstance(block, dict):
            raise Unreadable(name)
        for key in ("text", "thinking", "title", "context"):
            _text(found, block, key)
        _all(found, block.get("input"))
        _blocks(found, block, "content")
        if isinstance(block.get("source"), dict):
            _source(found, block["source"])


def _source(found: Texts, source: dict[str, Any]) -> None:
    kind, media = source.get("type"), str(source.get("media_type", ""))
    if kind == "url" and isinstance(source.get("url"), str):
        found.images.append(source["url"])
    elif kind == "base64" and media.startswith("image/"):
        found.images.append(f"data:{media};base64,{source.get('data')}")
    elif kind == "content":
        _blocks(found, source, "content")
    elif kind == "text":
        _text(found, source, "data")
    else:
        raise Unreadable("source")


def _all(found: Texts, value: Any, but: Sequence[str] = ()) -> None:
    """Every text at any depth; pictures among them are images."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if key in but:
            continue
        if key == "b64_json" and isinstance(inner, str):
            found.images.append(f"data:;base64,{inner}")
        elif isinstance(inner, str):
            found.places.append((value, key))
        else:
            _all(found, inner)


def _others(found: Texts, value: Any, but: Sequence[str] = ()) -> None:
    """Every text at any depth that has no name we know: servers have words of their own, `reasoning_details` or so."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        if key in but or key in _NAMES:
            continue
        if isinstance(inner, str):
            found.places.append((value, key))
        else:
            _others(found, inner)


def _plain(found: Texts, body: dict[str, Any], name: str) -> None:
    """A text or a list of texts."""
    value = body.get(name)
    if isinstance(value, list):
        if not all(isinstance(text, str) for text in value):
            raise Unreadable(name)
        found.places.extend((value, index) for index in range(len(value)))
    else:
        _text(found, body, name)


def _text(found: Texts, container: dict[str, Any], name: str) -> None:
    value = container.get(name)
    if isinstance(value, str):
        found.places.append((container, name))
    elif value is not None and name in ("content", "prompt", "input"):
        raise Unreadable(name)


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise Unreadable(name)
    return value
