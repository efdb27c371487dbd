"""What lies on disk: lines, segments, the signed head, the mark of what was removed. Reads and shapes only.

A line is a JSON object whose last member is `hash`: SHA-256 over the line's bytes without that member. A segment is a
file `NNNNNN-YYYYMMDD.jsonl`; numbers have no gap, the date is the UTC day it was begun. `head.json` is 512 bytes,
overwritten in place, and says which record was the last one acknowledged. `pruned.json`, where there is one, is signed
and says up to which record files were removed because their retention had ended.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from router.audit_keys import AuditError

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

NOTHING = "0" * 64
"""`prev` of the first record."""
HEAD = "head.json"
PRUNED = "pruned.json"
FORMAT = 1
"""Of records; named by the first of a chain."""
HEAD_BYTES = 512
BATCH = 256
"""Records that one commit may hold; a crash leaves at most so many that nobody was promised."""

_LOCKED = 2047
"""Bytes that hashlib takes at most without giving up the interpreter's lock."""
_SHORT = 2**17
"""Bytes that are digested in less time (0.1 ms) than it takes to have the lock back from a busy loop (5 ms)."""
_SEGMENT = re.compile(r"^(\d{6})-(\d{8})\.jsonl$")
_TAIL = re.compile(rb',"hash":"([0-9a-f]{64})"\}$')
_BACK = 1 << 16


class Head(msgspec.Struct, frozen=True):
    """The last record that was promised, signed. `seq` is -1 before the first."""

    chain: str
    seq: int
    hash: str
    key: str
    sig: str

    def encode(self) -> bytes:
        return msgspec.json.encode(self).ljust(HEAD_BYTES - 1) + b"\n"


class Pruned(msgspec.Struct, frozen=True):
    """Files that are no more: all up to number `segment`, with records up to `seq`, of days before `before`."""

    chain: str
    seq: int
    hash: str
    segment: int
    before: str
    key: str
    sig: str


class Anchored(msgspec.Struct, frozen=True):
    """A signed head as it was handed elsewhere, and when."""

    v: int
    ts: str
    tenant: str
    chain: str
    seq: int
    hash: str
    key: str
    sig: str


class Record(msgspec.Struct, frozen=True):
    """One record and what proves it. `body` holds every member but `hash`."""

    seq: int
    prev: str
    hash: str
    body: dict[str, Any]


class Segment(msgspec.Struct, frozen=True):
    """One file of a chain."""

    number: int
    date: str
    path: Path


def feed(digest: Hash, text: bytes) -> None:
    """Digest it; of a short one in pieces, so that the lock is kept: a batch has hundreds of them."""
    if len(text) <= _LOCKED or len(text) > _SHORT:
        digest.update(text)
        return
    rest = memoryview(text)
    for start in range(0, len(text), _LOCKED):
        digest.update(rest[start : start + _LOCKED])


def seal_line(body: dict[str, Any]) -> tuple[bytes, str]:
    """The line with its newline, and its hash."""
    return seal([msgspec.json.encode(body)[:-1]])


def seal(parts: Iterable[bytes]) -> tuple[bytes, str]:
    """The same of a record that is JSON already, in parts and without the last brace."""
    record = b"".join(parts)
    digest = hashlib.sha256()
    feed(digest, record)
    digest.update(b"}")
    hash = digest.hexdigest()
    return b'%b,"hash":"%b"}\n' % (record, hash.encode()), hash


def open_line(line: bytes) -> Record:
    """Raises AuditError when the line is no record, or not the one that was written."""
    tail = _TAIL.search(line)
    if tail is None:
        raise AuditError("not a record")
    payload = line[: tail.start()] + b"}"
    if hashlib.sha256(payload).hexdigest().encode() != tail[1]:
        raise AuditError("its hash does not fit its bytes")
    try:
        body = msgspec.json.decode(payload, type=dict[str, Any])
        return Record(body["seq"], body["prev"], tail[1].decode(), body)
    except (msgspec.MsgspecError, KeyError) as error:
        raise AuditError(f"not a record ({type(error).__name__})") from error


def segments(folder: Path, after: int = 0) -> list[Segment]:
    """In order of their numbers; only those beyond `after`."""
    named = ((match, path) for path in folder.iterdir() if (match := _SEGMENT.match(path.name)))
    found = sorted((Segment(int(m[1]), m[2], path) for m, path in named), key=lambda s: s.number)
    return [segment for segment in found if segment.number > after]


def read_lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """(line without newline, whole). Only the last can be torn; a torn line was never promised."""
    with path.open("rb") as file:
        for line in file:
            yield line.removesuffix(b"\n"), line.endswith(b"\n")


def read_head(folder: Path) -> Head | None:
    """None where there is none. Raises AuditError when it cannot be read."""
    try:
        raw = (folder / HEAD).read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(raw, type=Head)
    except msgspec.MsgspecError as error:
        raise AuditError(f"{folder / HEAD}: not a head ({error})") from error


def read_pruned(folder: Path) -> Pruned | None:
    """None where nothing was removed. Raises AuditError when it cannot be read."""
    try:
        return msgspec.json.decode((folder / PRUNED).read_bytes(), type=Pruned)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise AuditError(f"{folder / PRUNED}: cannot be read ({error})") from error


def check_unsigned(head: Head, found: list[Segment], last: str) -> None:
    """Records after the head are what a crash leaves: few, and chained to it, up to the hash `last`.

    Raises AuditError where they are not.
    """
    later: list[Record] = []
    for segment in reversed(found):
        lines = [open_line(line) for line, whole in read_lines(segment.path) if whole]
        later = [record for record in lines if record.seq > head.seq] + later
        if any(record.seq <= head.seq for record in lines):
            break
    hash = head.hash
    for record in later:
        if record.prev != hash:
            raise AuditError(f"record {record.seq} after the signed head is not chained to it")
        hash = record.hash
    if hash != last or len(later) > BATCH + 1:
        raise AuditError(f"{len(later)} records after the signed head: more than a crash leaves")


def last_line(path: Path) -> tuple[bytes | None, int]:
    """(last whole line or None, torn bytes after it), read from the end of the file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start, block = size, b""
        while start > 0 and block.count(b"\n") < 2:
            step = min(start, max(_BACK, len(block)))
            start -= step
            file.seek(start)
            block = file.read(step) + block
    whole, newline, torn = block.rpartition(b"\n")
    return (whole.rpartition(b"\n")[2] if newline else None), len(torn)
