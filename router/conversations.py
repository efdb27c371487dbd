"""Conversations: what names one, and which deployment answered it last."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

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
    if mark is None:
        return None
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
