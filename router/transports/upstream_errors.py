"""What an upstream's failure means to the caller: one table from status to error, and one from exceptions.

An upstream's JSON message is passed on with keys struck out; any other body (HTML, plain text, nothing) stays inside.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from router.errors import Refused, TimedOut, TransportError, Unavailable
from router.transports.http1 import Dropped, Malformed, NotReached
from router.wire import ABSENT, told

_KEYLIKE = re.compile(r"\b(?:sk|rk|gsk|xai)[-_][A-Za-z0-9_\-*.]{6,}|\bBearer\s+\S+")
_CONTEXT = re.compile(r"maximum context length|context window|context length|too many tokens in", re.IGNORECASE)
_RETRYABLE_CALLER = {408, 409, 425, 429}
_ROUTERS_FAULT = {401: "upstream_auth", 402: "upstream_billing", 403: "upstream_auth", 407: "upstream_auth"}
_MISPLACED = {404, 405, 410}
_KEEPS_NOTHING = frozenset({"/chat/completions", "/completions", "/embeddings"})
"""Doors whose requests name nothing but a model: what is not found there is the model or the door."""

CONTEXT_EXCEEDED = "context_length_exceeded"
CONTEXT_CODES = frozenset({CONTEXT_EXCEEDED, "context_too_long"})
"""Of an upstream, and of our own rules."""
CONTENT_CODES = frozenset({"content_filter", "content_policy_violation"})


class _Detail(msgspec.Struct):
    message: msgspec.Raw = ABSENT
    type: msgspec.Raw = ABSENT
    param: msgspec.Raw = ABSENT
    code: msgspec.Raw = ABSENT


class _Body(msgspec.Struct):
    error: _Detail | str | None = None
    message: str | None = None
    detail: msgspec.Raw = ABSENT


_body = msgspec.json.Decoder(_Body)


class Told(msgspec.Struct):
    """What an error body says, each as text or None."""

    message: str | None = None
    type: str | None = None
    param: str | None = None
    code: str | None = None


def read_error(body: bytes) -> Told:
    """The upstream's own words; empty where the body is not a JSON error."""
    try:
        view = _body.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return Told()
    match view.error:
        case _Detail() as detail:
            return Told(_word(detail.message), _word(detail.type), _word(detail.param), _word(detail.code))
        case str() as message:
            return Told(message)
        case _:
            return Told(view.message or _word(view.detail))


def _word(raw: msgspec.Raw) -> str | None:
    if not told(raw):
        return None
    value = msgspec.json.decode(raw)
    if isinstance(value, bool):
        return None
    return value if isinstance(value, str) else str(value) if isinstance(value, int | float) else bytes(raw).decode()


def scrub(message: str, secrets: tuple[str, ...]) -> str:
    """The message without the deployment's secrets and without anything that looks like a key."""
    for secret in secrets:
        message = message.replace(secret, "[removed]")
    return _KEYLIKE.sub("[removed]", message)[:4000]


def refusal(
    status: int, body: bytes, headers: Mapping[str, str], *, secrets: tuple[str, ...], path: str
) -> TransportError:
    """The error that an upstream's answer of this status stands for."""
    said = read_error(body)
    message = scrub(said.message, secrets) if said.message and said.message.strip() else None
    if status in _ROUTERS_FAULT:
        code = _ROUTERS_FAULT[status]
        return TransportError("The upstream does not accept the router's own account.", status=502, code=code)
    if status in _MISPLACED and not (path not in _KEEPS_NOTHING and message and said.code != "model_not_found"):
        return TransportError("The upstream does not know this model or path.", status=502, code="upstream_not_found")
    if 400 <= status < 500 and status not in _RETRYABLE_CALLER:
        context = message is not None and status in (400, 413, 422) and _CONTEXT.search(message)
        return Refused(
            message or f"The upstream refused the request with status {status}.",
            status=status,
            type=said.type,
            param=said.param,
            code=said.code or (CONTEXT_EXCEEDED if context else None),
        )
    kept = {"retry-after": headers["retry-after"]} if "retry-after" in headers else {}
    if status == 429:
        return TransportError(
            message or "The upstream's rate limit is reached.",
            status=429,
            type=said.type or "rate_limit_error",
            code=said.code or "rate_limit_exceeded",
            param=said.param,
            headers=kept,
        )
    if status in (408, 504):
        return TimedOut(message or "The upstream timed out.", headers=kept)
    shown = status if status in (409, 425) or 500 <= status <= 503 else 502
    return Unavailable(
        message or f"The upstream failed with status {status}.", status=shown, code=said.code, headers=kept
    )


def in_answer(raw: msgspec.Raw, *, secrets: tuple[str, ...], path: str) -> TransportError:
    """The error inside an answer of status 200, plain or as an event; its numeric `code`, if any, is the status."""
    body = b'{"error":' + bytes(raw) + b"}"
    said = read_error(body)
    status = int(said.code) if said.code and said.code.isdigit() and 400 <= int(said.code) <= 599 else 502
    return refusal(status, body, {}, secrets=secrets, path=path)


def translate(error: Exception) -> TransportError:
    """What ended an exchange, in our words; hosts and addresses stay inside."""
    match error:
        case TransportError():
            return error
        case TimeoutError():
            return TimedOut("The upstream did not answer in time.")
        case NotReached():
            return Unavailable("The upstream cannot be reached.")
        case Dropped():
            return Unavailable("The upstream closed the connection before its answer was complete.")
        case Malformed():
            return Unavailable("The upstream's answer is not valid HTTP.", code="upstream_malformed")
        case _:
            return Unavailable("The connection to the upstream failed.")
