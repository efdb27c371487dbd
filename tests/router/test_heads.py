"""A head that is known is taken past the parser: only where the parser would have read the same."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.heads import KnownHead

LINES = [
    b"host: x",
    b"authorization: Bearer k",
    b"Content-Type: application/json",
    b"Content-Length: %d",
    b"content-length:%d",
    b"X-Content-Length: 7",
    b"transfer-encoding: chunked",
    b"connection: close",
    b"expect: 100-continue",
    b"x-empty:",
]
BODIES = [b"{}", b'{"a": 1}', b"", b"x" * 1000, b"a\r\n\r\nb", b"POST / HTTP/1.1\r\n\r\n"]


class Parsed:
    """What the parser makes of bytes."""

    def __init__(self, data: bytes) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.messages = 0
        self.whole = False
        parser = httptools.HttpRequestParser(self)
        parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.messages += 1
        self.whole = False

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.whole = True


def request(lines: list[bytes], body: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    told = [line % len(body) if b"%d" in line else line for line in lines]
    return b"\r\n".join([b"POST %b HTTP/1.1" % path, *told, b"", b""]) + body


def head_of(data: bytes, body: bytes) -> KnownHead | None:
    return KnownHead.of(data, body, "/chat/completions", dict(Parsed(data).headers))


@given(
    st.lists(st.sampled_from(LINES), unique=True, max_size=6),
    st.sampled_from(BODIES),
    st.sampled_from(BODIES),
    st.integers(0, 200),
    st.binary(max_size=3),
)
@example([LINES[0], LINES[3], LINES[1]], b"{}", b"x" * 1000, 0, b"")
def test_what_is_taken_is_what_the_parser_reads(
    lines: list[bytes], first: bytes, then: bytes, at: int, put: bytes
) -> None:
    """A read taken by a known head is one whole request with that head's headers, whatever was changed in it."""
    learnt = request(lines, first)
    try:
        known = head_of(learnt, first)
    except httptools.HttpParserError:  # two lengths, or a length and chunks: never learnt from
        return
    if known is None:
        return
    whole = request(lines, then)
    read = whole[:at] + put + whole[at + len(put) :]
    body = known.body(read)
    if body is not None:
        parsed = Parsed(read)
        assert (parsed.messages, parsed.whole, parsed.body, parsed.url) == (1, True, body, b"/v1/chat/completions")
        assert dict(parsed.headers) == {**known.headers, b"content-length": b"%d" % len(body)}
    elif whole == read:
        assert b"transfer-encoding: chunked" in lines


@pytest.mark.parametrize(
    "read",
    [
        request([b"content-length: 3"], b"{}"),
        request([b"content-length: 1"], b"{}"),
        request([b"content-length: %d"], b"{}", b"/v1/completions"),
        request([b"content-length: %d", b"authorization: Bearer k"], b"{}"),
        request([b"content-length: %d"], b"{}") * 2,
        request([b"content-length: %d"], b"{}")[:-1],
        request([b"content-length: -2"], b"{}"),
        request([b"content-length: 0000000002"], b"{}"),
        request([b"content-length: "], b""),
        request([b"content-length: %d"], b"{}").replace(b"\r\n", b"\n"),
        b"",
    ],
)
def test_all_else_is_left_to_the_parser(read: bytes) -> None:
    """Another head, another length than was said, part of a request or more than one is not taken."""
    known = head_of(request([b"content-length: %d"], b'{"a": 1}'), b'{"a": 1}')
    assert known is not None
    assert known.body(request([b"content-length: %d"], b"{}")) == b"{}"
    assert known.body(read) is None
