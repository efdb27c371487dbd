"""What a stream said, put together."""

from __future__ import annotations

import json

import pytest

from router.transcript import transcript
from router.wire import DONE
from tests.router.gateway import chunk


def frames(*events: object) -> list[bytes]:
    return [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [DONE]


def test_texts_are_joined() -> None:
    """Pieces of a text become one, per choice, and the finish and the usage are kept."""
    second = {"choices": [{"index": 1, "delta": {"content": "B"}, "finish_reason": "length"}]}
    said = transcript(frames(chunk("a"), chunk("ä"), second, chunk(finish="stop"), {"choices": [], "usage": {"x": 1}}))
    assert json.loads(said) == {
        "id": "c",
        "object": "chat.completion.chunk",
        "usage": {"x": 1},
        "choices": [
            {"index": 0, "message": {"content": "aä"}, "finish_reason": "stop"},
            {"index": 1, "message": {"content": "B"}, "finish_reason": "length"},
        ],
    }


def test_tool_calls_are_joined() -> None:
    """Arguments that come in pieces belong to the call of their index, whose id and name stay."""
    parts = [
        {"index": 0, "id": "c0", "function": {"name": "f", "arguments": ""}},
        {"index": 1, "id": "c1", "function": {"name": "g", "arguments": "{}"}},
        {"index": 0, "function": {"arguments": '{"a":'}},
        {"index": 0, "function": {"arguments": "1}"}},
    ]
    said = transcript(frames(*({"choices": [{"index": 0, "delta": {"tool_calls": [part]}}]} for part in parts)))
    calls = json.loads(said)["choices"][0]["message"]["tool_calls"]
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls] == [
        ("c0", "f", '{"a":1}'),
        ("c1", "g", "{}"),
    ]


def test_other_dialects_and_errors_are_kept() -> None:
    """Events without choices are kept as they are, completions' texts are joined."""
    said = json.loads(transcript(frames({"type": "x", "delta": "y"}, {"error": {"message": "broke"}})))
    assert said == {"events": [{"type": "x", "delta": "y"}, {"error": {"message": "broke"}}]}
    texts = [{"choices": [{"index": 0, "text": t, "finish_reason": None}]} for t in "ab"]
    assert json.loads(transcript(frames(*texts)))["choices"] == [{"index": 0, "text": "ab"}]


@pytest.mark.parametrize(
    "event",
    [
        {"choices": {"a": 1}},
        {"choices": [1]},
        {"choices": [{"index": [1], "delta": {}}]},
        {"choices": [{"index": 0, "delta": "x"}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [7]}}]},
    ],
)
def test_anything_may_come(event: dict[str, object]) -> None:
    """Events of no known shape are kept as they are and break nothing."""
    assert json.loads(transcript(frames(event))) == {"events": [event]}
