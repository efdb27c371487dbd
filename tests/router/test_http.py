"""Headers as they leave: whatever an upstream said in one, it stays one line of ASCII."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from router.http import encoded, head_lines, text_lines

_NAMES = st.text("abcXYZ-_", min_size=1, max_size=9)


@given(st.dictionaries(_NAMES, st.text(max_size=20), max_size=4))
@example({"x-request-id": "req_1", "openai-version": "2020-10-01"})
@example({"x-a": "one\r\nset-cookie: two\nthree\x00", "x-b": "über \ud800"})
def test_text_becomes_lines(headers: dict[str, str]) -> None:
    """There is one line for each header and none besides, the same as if each were written with care."""
    lines = text_lines(headers)
    assert lines == head_lines(encoded(headers))
    assert lines.decode("ascii").count("\r\n") == lines.count(b"\n") == len(headers)
