"""A `multipart/form-data` body on its way: finds its field `model`, and puts another name in its place.

Strict where servers differ in what they forgive: whoever hides a field from this reader must not show it to an
upstream. Holds no more than one part's head, or the value of `model`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from router.errors import BadRequest

_CHARSET = r'(?:\s*;\s*charset="?[\w-]+"?)?'
_BOUNDARY = re.compile(
    rf'multipart/form-data{_CHARSET}\s*;\s*boundary=(?:"([^"\\;]{{1,70}})"|([^\s";,]{{1,70}})){_CHARSET}\s*\Z',
    re.IGNORECASE,
)
_HEADER = re.compile(rb"[!#-'*+\-.0-9A-Z^_`a-z|~]+:[ \t]*[^\r\n\0]*\Z")
_DISPOSITION = re.compile(
    rb'form-data[ \t]*;[ \t]*name=(?:"(?P<quoted>[^"\\]*)"|(?P<bare>[^\s";=]+))'
    rb"(?P<file>(?:[ \t]*;[ \t]*filename\*?=(?:\"(?:[^\"\\]|\\.)*\"|[^\s\";]+))*)[ \t]*\Z",
    re.IGNORECASE,
)
_MOST_HEAD = 16 * 2**10
_MOST_NAME = 1024
_SHORT = 64
TOLD = frozenset({"n", "size", "quality", "seconds", "duration", "service_tier"})
"""Short fields that tell what the request may cost. They are read and pass unchanged."""


def boundary_of(content_type: str) -> bytes:
    """The boundary. Raises BadRequest for any other content type."""
    found = _BOUNDARY.match(content_type.strip())
    if found is None:
        raise _unreadable("its content-type must be multipart/form-data with a boundary and nothing else")
    return (found[1] or found[2]).encode("latin-1")


class Form:
    """Bytes in, bytes out. `model` is what the field says, once it has been read."""

    def __init__(self, boundary: bytes, rename: Callable[[str], str]) -> None:
        """`rename` gives the name that takes the place of what the field says; it may raise."""
        self.model: str | None = None
        self.told: dict[str, str] = {}
        """Those of TOLD that were read; empty where one is written twice."""
        self._rename = rename
        self._mark = b"\n--" + boundary
        self._rest = b"\r\n"  # as if a line had ended: the first boundary is one like the others
        self._extra = 2
        """Bytes of the output that nobody sent."""
        self._state = self._pass
        self._wants_more = False
        self._field = ""

    def feed(self, data: bytes) -> bytes:
        """What may go on. Raises BadRequest where the body is not well formed."""
        self._rest += data
        out: list[bytes] = []
        self._wants_more = False
        while not self._wants_more:
            out.append(self._state())
        said = b"".join(out)
        if self._extra and said:
            cut = min(self._extra, len(said))
            said, self._extra = said[cut:], self._extra - cut
        return said

    def finish(self) -> None:
        """The body has ended. Raises BadRequest where the form has not."""
        if self._state != self._after:
            raise _unreadable("it ends before its last boundary")

    def _pass(self) -> bytes:
        """Preamble, or the value of a field that is not ours to read."""
        rest, at = self._rest, self._find()
        if at < 0:
            self._wants_more = True
            kept = min(len(rest), len(self._mark))  # and the CR before it
            out, self._rest = rest[: len(rest) - kept], rest[len(rest) - kept :]
            return out
        return self._boundary(at, rest[: at + len(self._mark)])

    def _name(self) -> bytes:
        """The value of `model`."""
        rest, at = self._rest, self._find()
        if (len(rest) if at < 0 else at) > _MOST_NAME + len(self._mark):
            raise BadRequest("'model' must name a model group.", param="model", code="unknown_model")
        if at < 0:
            self._wants_more = True
            return b""
        if self.model is not None:
            raise BadRequest("The field 'model' is written twice.", param="model", code="invalid_multipart")
        try:
            self.model = rest[: at - 1].decode()
        except UnicodeDecodeError:
            raise _unreadable("'model' is not text in UTF-8") from None
        return self._boundary(at, self._rename(self.model).encode() + b"\r" + self._mark)

    def _head(self) -> bytes:
        """From a boundary to the value after it."""
        rest = self._rest
        if rest.startswith(b"--"):
            self._rest, self._state = rest[2:], self._after
            return b"--"
        end = rest.find(b"\r\n\r\n")
        if end < 0:
            if len(rest) > _MOST_HEAD or (len(rest) >= 2 and not rest.startswith(b"\r\n")):
                raise _unreadable("a part's head is not well formed")
            self._wants_more = True
            return b""
        head, self._rest = rest[: end + 4], rest[end + 4 :]
        name = _field(head)
        self._field = name
        self._state = self._name if name == "model" else self._short if name in TOLD else self._pass
        return head

    def _short(self) -> bytes:
        """A value that is read on its way, where it is short."""
        at = self._find()
        if at < 0 and len(self._rest) <= _SHORT + len(self._mark):
            self._wants_more = True
            return b""
        if 0 < at <= _SHORT:
            said = self._rest[: at - 1].decode(errors="replace")
            self.told[self._field] = "" if self._field in self.told else said
        self._state = self._pass
        return b""

    def _after(self) -> bytes:
        """Nothing may follow but the end of the line."""
        self._wants_more = True
        rest, self._rest = self._rest, b""
        if rest.strip(b"\r\n"):
            raise _unreadable("something follows its last boundary")
        return rest

    def _find(self) -> int:
        at = self._rest.find(self._mark)
        if at == 0 or (at > 0 and self._rest[at - 1 : at] != b"\r"):
            raise _unreadable("a boundary stands where no line has ended by CR LF")
        return at

    def _boundary(self, at: int, out: bytes) -> bytes:
        self._rest, self._state = self._rest[at + len(self._mark) :], self._head
        return out


def _field(head: bytes) -> str:
    """The name of a part's field, in lower case. Raises BadRequest for a head that servers may read in two ways."""
    lines = head.split(b"\r\n")
    if lines[0] or any(_HEADER.match(line) is None for line in lines[1:-2]):
        raise _unreadable("a part's head is not well formed")
    written = [line.partition(b":") for line in lines[1:-2]]
    dispositions = [value.strip() for name, _, value in written if name.lower() == b"content-disposition"]
    found = _DISPOSITION.match(dispositions[0]) if len(dispositions) == 1 else None
    if found is None:
        raise _unreadable("a part needs one content-disposition of the kind form-data, with a name")
    field: bytes = (found["quoted"] if found["bare"] is None else found["bare"]).strip().lower()
    if field != b"model":
        return field.decode("latin-1")
    if found["file"] or any(name.lower() == b"content-transfer-encoding" for name, _, _ in written):
        raise _unreadable("the field 'model' must be plain text")
    return "model"


def _unreadable(why: str) -> BadRequest:
    return BadRequest(f"The form cannot be read: {why}.", code="invalid_multipart")
