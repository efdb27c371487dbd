"""A segment: the KV of consecutive blocks of one chain, and its file. Knows bytes and keys; no index, no budget.

The file is a safetensors file. Its metadata carry the head (whose it is, which blocks, which tensors), a MAC over the
head, and an AES-256-GCM tag over head and payload under the tenant's key. Plain files are only authenticated; in an
encrypted one the payload is a single opaque tensor. A file that was cut, changed, or put in another's place is Damaged.
The last block of a segment may be short: a tail, named by exactly the tokens it holds.
"""

from __future__ import annotations

import hmac
import io
import json
import math
import os
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from workers.cache import KVCache
from workers.codec import Packed, unpack
from workers.errors import KVMismatch
from workers.keys import ID_BYTES, Scope

SUFFIX = ".safetensors"
_FORMAT = 2
_MOST_HEADER = 8 * 2**20
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int8: "I8",
}
_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


class Damaged(Exception):
    """The file is not what its writer wrote, or not what the reader asked for."""


@dataclass(frozen=True, slots=True)
class Head:
    """Which stretch of which chain a segment holds."""

    tag: str
    obj: str
    space: str
    """The space's digest, hex."""
    role: str
    first: int
    """Blocks of the chain before it."""
    parent: bytes
    """Id of the block before it; empty at the start."""
    ids: tuple[bytes, ...]
    tokens: int
    """Tokens held; no multiple of the block size where the last block is a tail."""
    expires: float
    """Unix time."""
    limit: int
    """The tenant's byte budget when it was written."""


@dataclass(slots=True)
class Segment:
    """A segment in memory; its tensors are contiguous, on the CPU, and nobody else's."""

    head: Head
    packed: Packed
    durable: set[str] = field(default_factory=set)
    """Names of the shelves that hold it and whose index says so, as far as this process knows."""
    queued: set[str] = field(default_factory=set)
    """Names of the shelves that are about to write it."""
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.packed.nbytes

    def kv(self, start: int = 0, stop: int | None = None) -> KVCache:
        """Tokens start..stop-1 of the segment; views where the codec is exact."""
        return unpack(self.packed, start, self.head.tokens if stop is None else stop)


def tokens_of(kv: KVCache) -> int:
    """Tokens held; layers that nobody needs may be empty. Raises KVMismatch where others differ in length."""
    lengths = {int(t.shape[2]) for t in (*kv.keys, *kv.values)} - {0}
    if len(lengths) > 1:
        raise KVMismatch(f"layers hold different numbers of tokens: {sorted(lengths)}")
    return lengths.pop() if lengths else 0


def cut(kv: KVCache, start: int, stop: int) -> KVCache:
    """Tokens start..stop-1 as a contiguous copy on the CPU."""
    part = kv.slice(start, stop)
    return KVCache([_own(t) for t in part.keys], [_own(t) for t in part.values])


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def write(path: Path, segment: Segment, scope: Scope) -> int:
    """Write the file: aside, synced, renamed; a reader sees all of it or nothing. Returns its bytes. Raises OSError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        handle = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            _write_to(file, segment, scope)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        os.rename(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return size


def pack(segment: Segment, scope: Scope) -> bytes:
    """What `write` writes."""
    file = io.BytesIO()
    _write_to(file, segment, scope)
    return file.getvalue()


def file_size(segment: Segment, scope: Scope) -> int:
    """Bytes that `write` will write."""
    head = _fields(segment.head, segment.packed, encrypted=scope.encrypt)
    return len(_header(head, _table(segment.packed), scope, bytes(12), bytes(16))) + segment.size


def read(path: Path, scope: Scope, obj: str) -> Segment:
    """Read and verify all of it. Raises FileNotFoundError, or Damaged for whatever else is wrong."""
    try:
        with open(path, "rb") as file:
            return read_from(file, scope, obj)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damaged(f"unreadable: {error.strerror}") from error


def read_from(file: BinaryIO, scope: Scope, obj: str) -> Segment:
    """As `read`, from an open file."""
    head, table, nonce, tag = _read_head(file, scope, obj)
    payload = bytearray(table[-1][-1] if table else 0)
    if file.readinto(payload) != len(payload) or file.read(1):  # type: ignore[attr-defined]
        raise Damaged("the payload's length is not what the head says")
    opener = Cipher(algorithms.AES(scope.seal_key), modes.GCM(nonce, tag)).decryptor()
    opener.authenticate_additional_data(_text(head, table))
    try:
        if head["encrypted"]:
            plain = bytearray(len(payload) + 15)
            opener.update_into(payload, plain)
            payload = plain
        else:
            opener.authenticate_additional_data(payload)
        opener.finalize()
    except InvalidTag:
        raise Damaged("the payload fails its tag") from None
    tensors = {row[0]: _tensor(payload, row) for row in table}
    packed = Packed.of_tensors(head["codec"], head["dtype"], tensors)
    return Segment(_head_of(head), packed)


def read_head(path: Path, scope: Scope) -> Head:
    """The verified head alone; the payload is not looked at but for its length. Raises as `read` does."""
    try:
        with open(path, "rb") as file:
            return read_head_from(file, scope, path.name.removesuffix(SUFFIX), os.fstat(file.fileno()).st_size)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damaged(f"unreadable: {error.strerror}") from error


def read_head_from(file: BinaryIO, scope: Scope, obj: str, size: int) -> Head:
    """As `read_head`, from the beginning of a file of `size` bytes."""
    head, table, _, _ = _read_head(file, scope, obj)
    if size != file.tell() + (table[-1][-1] if table else 0):
        raise Damaged("the file's length is not what the head says")
    return _head_of(head)


_Row = tuple[str, str, list[int], int, int]
"""Name, dtype, shape, first byte, byte after the last."""


def _write_to(file: BinaryIO, segment: Segment, scope: Scope) -> None:
    table = _table(segment.packed)
    head = _fields(segment.head, segment.packed, encrypted=scope.encrypt)
    nonce = secrets.token_bytes(12)
    sealer = Cipher(algorithms.AES(scope.seal_key), modes.GCM(nonce)).encryptor()
    sealer.authenticate_additional_data(_text(head, table))
    header = _header(head, table, scope, nonce, bytes(16))
    file.write(header)
    for tensor in segment.packed.tensors().values():
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
        if scope.encrypt:
            file.write(sealer.update(raw))
        else:
            sealer.authenticate_additional_data(raw)
            file.write(raw)
    sealer.finalize()
    end = file.tell()
    file.seek(0)
    file.write(_header(head, table, scope, nonce, sealer.tag))
    file.seek(end)


def _table(packed: Packed) -> list[_Row]:
    rows: list[_Row] = []
    at = 0
    for name, tensor in packed.tensors().items():
        rows.append((name, _DTYPES[tensor.dtype], list(tensor.shape), at, at + tensor.nbytes))
        at += tensor.nbytes
    return rows


def _header(head: dict[str, Any], table: Sequence[_Row], scope: Scope, nonce: bytes, tag: bytes) -> bytes:
    text = _text(head, table)
    seen = [("sealed", "U8", [table[-1][-1]], 0, table[-1][-1])] if head["encrypted"] else table
    fields: dict[str, object] = {
        "__metadata__": {
            "twolane": text.decode(),
            "head_mac": _head_mac(scope, text).hex(),
            "nonce": nonce.hex(),
            "tag": tag.hex(),
        }
    }
    for name, dtype, shape, begin, end in seen:
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    packed = json.dumps(fields, separators=(",", ":")).encode()
    packed += b" " * (-len(packed) % 8)
    return struct.pack("<Q", len(packed)) + packed


def _read_head(file: BinaryIO, scope: Scope, obj: str) -> tuple[dict[str, Any], list[_Row], bytes, bytes]:
    """Leaves the file at the payload's first byte."""
    try:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MOST_HEADER:
            raise Damaged("the header is too long")
        meta = json.loads(file.read(length))["__metadata__"]
        text, mac = meta["twolane"].encode(), bytes.fromhex(meta["head_mac"])
        nonce, tag = bytes.fromhex(meta["nonce"]), bytes.fromhex(meta["tag"])
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged(f"the header cannot be read: {type(error).__name__}") from None
    if not hmac.compare_digest(mac, _head_mac(scope, text)) or len(nonce) != 12 or len(tag) != 16:
        raise Damaged("the head fails its MAC")
    fields = json.loads(text)
    if fields["head"].get("format") != _FORMAT:
        raise Damaged("the file has another version's format")
    if fields["head"]["tag"] != scope.tag or fields["head"]["obj"] != obj:
        raise Damaged("the file belongs elsewhere")
    return fields["head"], [tuple(row) for row in fields["table"]], nonce, tag


def _tensor(payload: bytearray, row: _Row) -> torch.Tensor:
    _, dtype_name, shape, begin, _ = row
    dtype, count = _BY_NAME[dtype_name], math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype, count=count, offset=begin).view(shape)


def _text(head: dict[str, Any], table: Sequence[_Row]) -> bytes:
    return json.dumps({"head": head, "table": table}, sort_keys=True, separators=(",", ":")).encode()


def _head_mac(scope: Scope, text: bytes) -> bytes:
    return hmac.digest(hmac.digest(scope.seal_key, b"head", "sha256"), text, "sha256")


def _fields(head: Head, packed: Packed, *, encrypted: bool) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "codec": packed.codec,
        "dtype": packed.dtype,
        "tag": head.tag,
        "obj": head.obj,
        "space": head.space,
        "role": head.role,
        "first": head.first,
        "parent": head.parent.hex(),
        "ids": b"".join(head.ids).hex(),
        "tokens": head.tokens,
        "expires": head.expires,
        "limit": head.limit,
        "encrypted": encrypted,
    }


def _head_of(fields: dict[str, Any]) -> Head:
    ids = bytes.fromhex(fields["ids"])
    return Head(
        fields["tag"],
        fields["obj"],
        fields["space"],
        fields["role"],
        fields["first"],
        bytes.fromhex(fields["parent"]),
        tuple(ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES)),
        fields["tokens"],
        fields["expires"],
        fields["limit"],
    )


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
