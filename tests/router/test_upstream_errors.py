"""What an upstream's failure becomes."""

from __future__ import annotations

import msgspec
import pytest

from router.errors import Refused, TimedOut, TransportError, Unavailable
from router.transports.http1 import Dropped, Malformed, NotReached
from router.transports.upstream_errors import in_answer, read_error, refusal, scrub, translate

KEY = "abcdef-secret-123"


def _body(message: str = "words", **rest: object) -> bytes:
    return msgspec.json.encode({"error": {"message": message, "type": "t", "param": "p", "code": "c", **rest}})


@pytest.mark.parametrize(
    ("status", "kind", "shown", "code"),
    [
        (400, Refused, 400, "c"),
        (401, TransportError, 502, "upstream_auth"),
        (402, TransportError, 502, "upstream_billing"),
        (403, TransportError, 502, "upstream_auth"),
        (404, TransportError, 502, "upstream_not_found"),
        (408, TimedOut, 504, "upstream_timeout"),
        (409, Unavailable, 409, "c"),
        (413, Refused, 413, "c"),
        (422, Refused, 422, "c"),
        (429, TransportError, 429, "c"),
        (500, Unavailable, 500, "c"),
        (502, Unavailable, 502, "c"),
        (503, Unavailable, 503, "c"),
        (504, TimedOut, 504, "upstream_timeout"),
        (520, Unavailable, 502, "c"),
        (302, Unavailable, 502, "c"),
    ],
)
def test_statuses(status: int, kind: type[TransportError], shown: int, code: str) -> None:
    """A status tells whose fault it is, and only the caller's own 4xx and limits keep it."""
    error = refusal(status, _body(), {"retry-after": "9"}, secrets=(), path="/chat/completions")
    assert (type(error), error.status, error.code) == (kind, shown, code)
    assert ("retry-after" in error.headers) == (status not in (400, 401, 402, 403, 404, 413, 422))


@pytest.mark.parametrize("body", [b"<html>hi</html>", b"", b"[]", b'{"error": {"message": ""}}', b'{"error": 7}'])
def test_foreign_bodies_stay_inside(body: bytes) -> None:
    """Without a JSON message the error has words of our own and nothing of the body."""
    error = refusal(500, body, {}, secrets=(), path="/chat/completions")
    assert error.message == "The upstream failed with status 500."


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": "plain"}', "plain"),
        (b'{"message": "top"}', "top"),
        (b'{"detail": "fastapi"}', "fastapi"),
        (b'{"error": {"message": "m", "code": 429, "param": null}}', "m"),
    ],
)
def test_other_dialects_are_read(body: bytes, message: str) -> None:
    """Servers that shape their errors otherwise are understood."""
    assert read_error(body).message == message


def test_keys_are_struck_out() -> None:
    """Neither the deployment's key nor anything like a key gets into a message."""
    text = scrub(f"The key {KEY} or sk-proj-abc123def456 or Bearer zzz is bad", (KEY,))
    assert "secret" not in text
    assert "abc123" not in text
    assert "zzz" not in text


def test_context_errors_get_their_code() -> None:
    """An over-long prompt is recognised by its words where the upstream gives no code."""
    body = _body("This model's maximum context length is 10 tokens", code=None)
    assert refusal(400, body, {}, secrets=(), path="/chat/completions").code == "context_length_exceeded"


def test_errors_inside_an_answer() -> None:
    """A numeric code inside an answer of status 200 is taken for the status."""
    assert in_answer(msgspec.Raw(b'{"message":"x","code":429}'), secrets=(), path="/completions").status == 429
    assert in_answer(msgspec.Raw(b'{"message":"x","code":"odd"}'), secrets=(), path="/completions").status == 502


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (TimeoutError(), TimedOut),
        (NotReached("host secret.internal"), Unavailable),
        (Dropped("host secret.internal"), Unavailable),
        (Malformed("secret"), Unavailable),
        (ConnectionResetError("host secret.internal"), Unavailable),
    ],
)
def test_exceptions_are_translated(raised: Exception, kind: type[TransportError]) -> None:
    """Library errors become ours, and addresses stay inside."""
    error = translate(raised)
    assert type(error) is kind
    assert "secret" not in error.message
