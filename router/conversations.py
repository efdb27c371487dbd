"""Conversations and stored responses: what names one, and which deployment answered it last."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from urllib.parse import unquote

import msgspec

from router.call import Call
from router.features import first_turn
from router.wire import given

_NAMES = ("prompt_cache_key", "previous_response_id")


def identity(call: Call) -> bytes | None:
    """16 bytes that name the conversation within its tenant; None where nothing does."""
    mark = call.session.encode("utf-8", "surrogateescape") if call.session else None
    if mark is None:
        mark = next((bytes(call.fields[name]) for name in _NAMES if given(call.fields, name)), None)
    if mark is None:
        mark = first_turn(call)
    return None if mark is None else _named(call, mark)


def goes_on_from(call: Call) -> bytes | None:
    """16 bytes that name the stored response that a request of `/responses` goes on from, or asks for."""
    if "previous_response_id" in call.fields and given(call.fields, "previous_response_id"):
        return response(call, call.fields["previous_response_id"])
    if call.raw is not None and call.path.startswith("/responses/"):
        return response(call, msgspec.Raw(msgspec.json.encode(unquote(call.path.split("/")[2]))))
    return None


def response(call: Call, id: msgspec.Raw) -> bytes:
    """16 bytes that name a response, by its id as JSON."""
    return _named(call, b"response " + bytes(id))


def _named(call: Call, mark: bytes) -> bytes:
    return hashlib.blake2b(mark, digest_size=16, key=call.tenant.name.encode()[:64]).digest()


def share(identity: bytes | None) -> float | None:
    """The identity as a number on [0, 1), for rollouts."""
    return None if identity is None else int.from_bytes(identity[:6]) / 2**48


class Conversations:
    """The last deployment of each conversation; the least recently used are forgotten."""

    def __init__(self, most: int = 10_000) -> None:
        self._most = most
        self._last: OrderedDict[bytes, str] = OrderedDict()

    def last(self, identity: bytes | None) -> str | None:
        """Who answered before."""
        return None if identity is None else self._last.get(identity)

    def answered(self, identity: bytes | None, deployment: str) -> None:
        """Remember who answered."""
        if identity is None:
            return
        self._last[identity] = deployment
        self._last.move_to_end(identity)
        if len(self._last) > self._most:
            self._last.popitem(last=False)
