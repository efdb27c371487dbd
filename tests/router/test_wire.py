"""Views of bodies and the framing of events."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.call import Usage
from router.errors import BadRequest
from router.wire import (
    Splitter,
    finished,
    frame,
    read_body,
    read_flag,
    read_text,
    read_usage,
    read_whole,
    wants_usage,
    without_run,
    without_usage,
)

_TEXT = st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), min_size=1, max_size=20)
_DATA = _TEXT.map(lambda t: msgspec.json.encode({"content": t}))


def _cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(p % (len(data) + 1) for p in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(
    st.lists(_DATA, max_size=6),
    st.sampled_from([b"\n", b"\r\n", b"\r"]),
    st.lists(st.integers(0, 10_000), max_size=30),
    st.booleans(),
)
def test_cuts_change_nothing(events: list[bytes], eol: bytes, places: list[int], comments: bool) -> None:
    """However the bytes are cut, ended and commented, every event arrives once, in order and unchanged."""
    pieces = [b"data: " + event + eol + eol for event in events]
    if comments:
        pieces = [b": ping" + eol + eol + piece + b"retry: 5" + eol + eol for piece in pieces]
    splitter = Splitter()
    got = [event for part in _cut(b"".join(pieces), places) for event in splitter.feed(part)] + splitter.flush()
    assert got == [(b"", event) for event in events]


@given(st.lists(st.tuples(st.sampled_from([b"", b"event: x\n"]), _DATA), max_size=5))
def test_frames_split_back(events: list[tuple[bytes, bytes]]) -> None:
    """Splitting what was framed gives back heads and data."""
    assert Splitter().feed(b"".join(frame(head, data) for head, data in events)) == events


def test_odd_events_are_read() -> None:
    """A missing blank after the colon, several data lines and an unended last event are all understood."""
    splitter = Splitter()
    assert splitter.feed(b'data:{"a":1}\n\nid: 7\nevent: e\ndata: {"a":\ndata: 2}\n\ndata: [DONE]') == [
        (b"", b'{"a":1}'),
        (b"id: 7\nevent: e\n", b'{"a":\n2}'),
    ]
    assert splitter.flush() == [(b"", b"[DONE]")]
    assert frame(b"", b'{"a":\n2}') == b'data: {"a":\ndata: 2}\n\n'


@pytest.mark.parametrize("body", [b"", b"[]", b"nul", b'{"a":1', b'"x"', b'{"a":"\xff"}', b'{"model":"m"} x'])
def test_bodies_refused(body: bytes) -> None:
    """What is not one JSON object in UTF-8 is the caller's mistake."""
    with pytest.raises(BadRequest) as refused:
        read_body(body)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


def test_values_are_kept_as_sent() -> None:
    """Numbers, escapes and nesting stay byte for byte."""
    fields = read_body(b'{"t": 1.0, "e": 1e-7, "s": "\\u00e9", "n": {"a": [1, null]}}')
    assert msgspec.json.encode(fields) == b'{"t":1.0,"e":1e-7,"s":"\\u00e9","n":{"a": [1, null]}}'


@pytest.mark.parametrize(
    ("reader", "name", "body", "value"),
    [
        (read_text, "model", b'{"model": "m"}', "m"),
        (read_text, "model", b'{"model": null}', None),
        (read_text, "model", b"{}", None),
        (read_flag, "stream", b'{"stream": true}', True),
        (read_flag, "stream", b'{"stream": null}', False),
        (read_whole, "n", b'{"n": 3}', 3),
    ],
)
def test_fields_are_read(reader, name: str, body: bytes, value: object) -> None:  # type: ignore[no-untyped-def]
    """A field is read, and absent or null stands for nothing."""
    assert reader(read_body(body), name) == value


@pytest.mark.parametrize(
    ("reader", "name", "body"),
    [
        (read_text, "model", b'{"model": 3}'),
        (read_flag, "stream", b'{"stream": "yes"}'),
        (read_whole, "n", b'{"n": 1.5}'),
        (lambda fields, _: wants_usage(fields), "stream_options", b'{"stream_options": 4}'),
    ],
)
def test_wrong_types_are_named(reader, name: str, body: bytes) -> None:  # type: ignore[no-untyped-def]
    """A field of the wrong type is a 400 that names it."""
    with pytest.raises(BadRequest) as refused:
        reader(read_body(body), name)
    assert refused.value.param == name


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b'{"prompt_tokens":7,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}', (7, 2, 4, True)),
        (b'{"input_tokens":7,"output_tokens":2,"input_tokens_details":{"cached_tokens":4}}', (7, 2, 4, True)),
        (b'{"prompt_tokens":7,"total_tokens":7,"prompt_tokens_details":null}', (7, 0, 0, True)),
        (b'{"prompt_tokens":7,"prompt_tokens_details":null}', (0, 0, 0, False)),
        (b'{"prompt_tokens":"many"}', (0, 0, 0, False)),
        (b"[]", (0, 0, 0, False)),
    ],
)
def test_usage_is_read(raw: bytes, expected: tuple[int, int, int, bool]) -> None:
    """Both dialects of usage are understood; a foreign shape, or half of it, is none."""
    usage = Usage()
    read_usage(raw, usage)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.known) == expected


def test_usage_and_run_are_taken_out() -> None:
    """Only what is ours is removed; an event that held usage alone vanishes."""
    assert without_usage(b'{"choices":[],"usage":{"x":1}}') is None
    assert without_usage(b'{"choices":[{"a":1}],"usage":{"x":1},"z":1.0}') == b'{"choices":[{"a":1}],"z":1.0}'
    assert without_run(b'{"id":"x","twolane":{"a":1},"usage":null}') == b'{"id":"x","usage":null}'


@pytest.mark.parametrize(
    ("tail", "path", "whole"),
    [
        (b'{"choices":[{"finish_reason":"stop"}]}', "/chat/completions", True),
        (b'{"choices":[{"finish_reason": "length"}]}', "/completions", True),
        (b'{"choices":[{"finish_reason":null}]}', "/chat/completions", False),
        (b'{"content":"\\"finish_reason\\":\\"stop\\""}', "/chat/completions", False),
        (b'{"type":"response.completed"}', "/responses", True),
        (b'{"type":"response.output_text.delta"}', "/responses", False),
    ],
)
def test_ends_are_recognised(tail: bytes, path: str, whole: bool) -> None:
    """A finish in the structure ends an answer; the same words inside a text do not."""
    assert finished(tail, path) is whole
