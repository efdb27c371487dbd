"""What of a stream's events reaches the caller does not depend on how they were cut into reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.call import Reply
from router.transports.stream import Stream
from router.wire import DONE

WORD = b'data: {"choices":[{"delta":{"content":"word"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\n'
BOTH = b'data: {"choices":[{"delta":{}}],"usage":{"prompt_tokens":5,"completion_tokens":6}}\n\n'
RUN = b'data: {"choices":[],"twolane":{"a":1},"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\n'
LAST = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
ODD = [
    WORD,
    USAGE,
    BOTH,
    RUN,
    LAST,
    WORD.replace(b"}\n\n", b',"usage":null}\n\n'),
    WORD.replace(b"word", b'\\"usage\\" \\"error\\"'),
    b'data: {"a":[{}\n\n',
    b"data: {}]}\n\n",
    b"data: {},{}\n\n",
    b"data: [1]\n\n",
    b'data: {"choices":\n[]}\n\n',
    b": comment\n\n",
    b"data: {broken\n\n",
    b'data:{"choices":[]}\n\n',
    b'event: ping\ndata: {"choices":[]}\n\n',
    b'data: {"choices":\ndata: []}\n\n',
    WORD.replace(b"\n", b"\r\n"),
    b"\n\n",
    b'data: {"error":{"message":"over","code":"x"}}\n\n',
    b"data: [DONE]\n\n",
]


def fed(pieces: list[bytes], *, asked: bool, worker: bool) -> tuple[bytes, Reply, Stream]:
    reply = Reply(200, "text/event-stream")
    stream = Stream(reply, path="/chat/completions", asked=asked, worker=worker)
    out = b""
    for piece in pieces:
        if stream.done:
            break
        out += stream.feed(piece)
    return (out if stream.done else out + stream.finish()), reply, stream


@given(st.lists(st.sampled_from(ODD), max_size=12), st.data(), st.booleans(), st.booleans())
def test_reads_do_not_matter(events: list[bytes], data: st.DataObject, asked: bool, worker: bool) -> None:
    """Cut anywhere, or not at all, the caller gets the same bytes, and the same is known of the answer."""
    whole = b"".join(events)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    bytewise = [whole[i : i + 1] for i in range(len(whole))]
    seen = [fed(p, asked=asked, worker=worker) for p in (bytewise, pieces, [whole])]
    assert len({out for out, _, _ in seen}) == 1
    assert len({(str(r.usage), r.error, bytes(r.run or b"")) for _, r, _ in seen}) == 1


@pytest.mark.parametrize("asked", [False, True])
def test_what_is_ours_stays_inside(asked: bool) -> None:
    """Usage reaches who asked for it, a worker's figures reach nobody, and nearly all else passes as it came."""
    out, reply, _ = fed([WORD + WORD + LAST, RUN, DONE], asked=asked, worker=True)
    assert out.startswith(WORD + WORD + LAST)
    assert (b"usage" in out) == asked
    assert b"twolane" not in out
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 4)
    assert out.endswith(DONE)


def test_a_stream_without_its_end_is_told() -> None:
    """One that stops before the answer is whole ends in an error event; one that only lacks `[DONE]` gets it."""
    cut, reply, _ = fed([WORD], asked=False, worker=False)
    assert (cut.startswith(WORD), b'"error"' in cut, reply.error) == (True, True, "upstream_unavailable")
    whole, reply, _ = fed([WORD + LAST], asked=False, worker=False)
    assert (whole, reply.error) == (WORD + LAST + DONE, None)


def test_reads_without_anything_for_us_pass_as_they_came() -> None:
    """Whole events pass as the very bytes that were read, also where their usage is null, as many servers write it."""
    stream = Stream(Reply(200, "text/event-stream"), path="/chat/completions", asked=False)
    for read in (WORD, WORD * 3, WORD.replace(b"}\n\n", b',"usage": null}\n\n') * 2):
        assert stream.feed(read) is read
