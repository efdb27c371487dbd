"""Forms on their way: the field `model` renamed, everything else as it was, and nothing hidden from us."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import BadRequest
from router.form import Form, boundary_of

B = b"xYzZY"


def part(value: bytes, disposition: bytes, *more: bytes) -> bytes:
    lines = b"".join(line + b"\r\n" for line in (b"Content-Disposition: " + disposition, *more))
    return b"--" + B + b"\r\n" + lines + b"\r\n" + value + b"\r\n"


def field(name: str, value: bytes) -> bytes:
    return part(value, b'form-data; name="%s"' % name.encode())


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--" + B + b"--\r\n"


def run(body: bytes, cuts: list[int], model: str = "up") -> tuple[bytes, str | None]:
    passed = Form(B, lambda name: model)
    edges = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    out = b"".join(passed.feed(body[a:b]) for a, b in pairwise(edges))
    passed.finish()
    return out, passed.model


values = st.binary(max_size=40).filter(lambda value: B not in value)
crlfs = st.lists(st.sampled_from([b"\r", b"\n", b"--", b"\r\n--", b"x", B[:3]]), max_size=8).map(b"".join)


@given(st.lists(values | crlfs, max_size=3), st.lists(values | crlfs, max_size=3), st.lists(st.integers(0), max_size=9))
def test_only_the_model_is_another(before: list[bytes], after: list[bytes], cuts: list[int]) -> None:
    """However a form is cut on its way, all of it arrives as it was but for the value of `model`."""
    name = b'form-data; name="file"; filename="model"'

    def written(model: bytes) -> bytes:
        files = [part(v, name, b"Content-Type: audio/mpeg") for v in before]
        return form(*files, field("model", model), *(field("prompt", v) for v in after))

    assert run(written(b"group"), cuts) == (written(b"up"), "group")


@given(st.lists(values | crlfs, max_size=4), st.lists(st.integers(0), max_size=9))
def test_a_form_without_a_model_is_itself(fields: list[bytes], cuts: list[int]) -> None:
    """Where there is no field `model`, not a byte changes."""
    body = form(*(field("purpose", value) for value in fields))
    assert run(body, cuts) == (body, None)


@pytest.mark.parametrize(
    "body",
    {
        "line ends of other servers": form(field("a", b"1")).replace(b"\r\n--" + B, b"\n--" + B),
        "a folded header": form(part(b"m", b"form-data;\r\n name=model")),
        "a name in another notation": form(part(b"m", b"form-data; name*=utf-8''model")),
        "two names": form(part(b"m", b'form-data; name="a"; name="model"')),
        "two dispositions": form(part(b"m", b'form-data; name="a"', b'Content-Disposition: form-data; name="model"')),
        "an escaped quote": form(part(b"m", b'form-data; name="a\\"; name="model"')),
        "another kind": form(part(b"m", b'attachment; name="model"')),
        "a model that is a file": form(part(b"m", b'form-data; name="model"; filename="a"')),
        "a coded model": form(part(b"bQ==", b'form-data; name="model"', b"Content-Transfer-Encoding: base64")),
        "two models": form(field("model", b"a"), field("model", b"b")),
        "a model that is no text": form(field("model", b"\xff")),
        "an endless model": form(field("model", b"m" * 5000)),
        "something after the end": form(field("a", b"1")) + field("model", b"m"),
        "no end": field("a", b"1"),
        "a boundary that goes on": form(field("a", b"1")).replace(b"--" + B + b"\r\n", b"--" + B + b" x\r\n"),
        "no headers": form(b"--" + B + b"\r\n\r\nm\r\n"),
    }.items(),
    ids=lambda item: item[0],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_what_servers_read_differently_is_refused(body: tuple[str, bytes], size: int) -> None:
    """A form in which one server may see a field that another does not is refused, in whatever pieces it comes."""
    whole = body[1]
    cuts = list(range(0, len(whole), size))
    with pytest.raises(BadRequest) as refused:
        run(whole, cuts)
    assert refused.value.code in ("invalid_multipart", "unknown_model")


@pytest.mark.parametrize(
    ("kind", "boundary"),
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('Multipart/Form-Data; charset=utf-8; boundary="a b"', b"a b"),
        ("multipart/form-data", None),
        ("multipart/form-data; boundary=a; boundary=b", None),
        ("multipart/mixed; boundary=a", None),
    ],
)
def test_boundary(kind: str, boundary: bytes | None) -> None:
    """A content type has one boundary, or the form is refused."""
    if boundary is None:
        with pytest.raises(BadRequest):
            boundary_of(kind)
    else:
        assert boundary_of(kind) == boundary
