"""A caller's requests on one connection begin alike but for the length of what follows: such a head is read once."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LENGTH = b"content-length"
_LINE = re.compile(rb"\r\ncontent-length: ?([0-9]+)\r\n", re.IGNORECASE)
_DIGITS = 8
"""Of a length, at most."""


@dataclass(frozen=True, slots=True)
class KnownHead:
    """A head that the parser took, in two parts: what stands before and what after the digits of its length."""

    before: bytes
    after: bytes
    """Up to the empty line, with that."""
    path: str
    headers: dict[bytes, bytes]
    """As the parser told them, but for the length."""

    @classmethod
    def of(cls, request: bytes, body: bytes, path: str, headers: dict[bytes, bytes]) -> KnownHead | None:
        """That of a whole request which came in one read; None where it cannot be told again for certain."""
        head = request.removesuffix(body)
        found = _LINE.search(head)
        if found is None or head.lower().count(_LENGTH) != 1 or head.find(b"\r\n\r\n") != len(head) - 4:
            return None
        return cls(head[: found.start(1)], head[found.end(1) :], path, headers)

    def body(self, read: bytes) -> bytes | None:
        """The body of a request with this head that is all of a read; None where it is anything else."""
        start = len(self.before)
        end = read.find(b"\r\n", start, start + _DIGITS + 2)
        length = read[start:end]
        if not length.isdigit() or not read.startswith(self.before) or not read.startswith(self.after, end):
            return None
        body = read[end + len(self.after) :]
        return body if len(body) == int(length) else None
