"""What a streamed answer said, put together as its plain twin would have said it: for the record."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from router.wire import Splitter

_WHOLE = frozenset({"role", "name", "id", "type", "tool_call_id"})
"""What a delta says as a whole, if again; its other texts and lists come in pieces."""


class _Call(msgspec.Struct):
    index: int = 0
    function: dict[str, Any] | None = None


class _Delta(msgspec.Struct):
    tool_calls: list[_Call] | None = None


class _Part(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None


class _Shape(msgspec.Struct):
    """What an event must look like to be put together; an upstream may send anything."""

    choices: list[_Part]


_shape = msgspec.json.Decoder(_Shape)
_event = msgspec.json.Decoder(dict[str, Any])


def transcript(frames: Iterable[bytes]) -> bytes:
    """JSON with the answer's own head and its choices in full; events of another dialect are kept one by one."""
    head: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    others: list[Any] = []
    splitter = Splitter()
    for frame in frames:
        for _, data in splitter.feed(frame):
            if data == b"[DONE]":
                continue
            event = _event.decode(data)
            if not _joinable(data):
                others.append(event)
                continue
            parts = event.pop("choices")
            head |= {name: value for name, value in event.items() if value is not None}
            for part in parts:
                _join(choices.setdefault(part.get("index", 0), {}), part)
    if choices:
        head["choices"] = [choices[index] for index in sorted(choices)]
    if others:
        head["events"] = others
    return msgspec.json.encode(head)


def _joinable(data: bytes) -> bool:
    try:
        _shape.decode(data)
    except msgspec.ValidationError:
        return False
    return True


def _join(choice: dict[str, Any], part: dict[str, Any]) -> None:
    """Add one event's share of a choice; a delta becomes part of the message."""
    for name, value in part.items():
        if name == "delta":
            _merge(choice.setdefault("message", {}), value or {})
        elif name == "text" and isinstance(value, str):
            choice[name] = choice.get(name, "") + value
        elif value is not None:
            choice[name] = value


def _merge(into: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            for call in value or ():
                _merge_call(into.setdefault("tool_calls", []), call)
        elif isinstance(value, str | list) and name not in _WHOLE:
            into[name] = _longer(into.get(name), value)
        elif value is not None:
            into[name] = value


def _longer(said: Any, more: str | list[Any]) -> Any:
    """Texts as one, and lists; a text among lists is a part of its own."""
    if not isinstance(said, str | list) or not said:
        return more
    if isinstance(said, str) and isinstance(more, str):
        return said + more
    return [
        part
        for piece in (said, more)
        for part in ([{"type": "text", "text": piece}] if isinstance(piece, str) else piece)
    ]


def _merge_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    index = part.get("index", 0)
    found = next((call for call in calls if call.get("index", 0) == index), None)
    if found is None:
        calls.append(found := {"index": index})
    function = part.get("function")
    if function:
        _merge(found.setdefault("function", {}), function)
    found |= {name: value for name, value in part.items() if name != "function" and value is not None}
