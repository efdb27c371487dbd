"""What lies on disk: lines, segments and the signed head of one chain. Reads and shapes; writes nothing.

A line is a JSON object whose last member is `hash`: SHA-256 over the line's bytes without that member. A segment is a
file `NNNNNN-YYYYMMDD.jsonl`; numbers have no gap, the date is the UTC day it was begun. `head.json` is 512 bytes,
overwritten in place, and says which record was the last one acknowledged.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from router.audit_keys import AuditError

NOTHING = "0" * 64
"""`prev` of the first record."""
HEAD = "head.json"
HEAD_BYTES = 512
BATCH = 256
"""Records that one commit may hold; a crash leaves at most so many that nobody was promised."""

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


def seal_line(body: dict[str, Any]) -> tuple[bytes, str]:
    """The line with its newline, and its hash."""
    payload = msgspec.json.encode(body)
    hash = hashlib.sha256(payload).hexdigest()
    return payload[:-1] + b',"hash":"' + hash.encode() + b'"}\n', hash


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


def segments(folder: Path) -> list[Segment]:
    """In order of their numbers."""
    named = ((match, path) for path in folder.iterdir() if (match := _SEGMENT.match(path.name)))
    return sorted((Segment(int(m[1]), m[2], path) for m, path in named), key=lambda s: s.number)


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
