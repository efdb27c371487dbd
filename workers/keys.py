"""What KV is called: spaces, scopes and chains of block ids. Knows no tensors, no Redis and no files but its own keys.

A *space* names everything that changes the bytes except the tokens (model, revision, dtype, fuser, gates, template).
A *scope* is one tenant in one epoch. A *block id* is a keyed digest over scope, space, all tokens before and the
block's own tokens: equal ids mean equal prefixes, and without the key an id says nothing about the tokens.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock

import structlog

_log = structlog.get_logger(__name__)

ID_BYTES = 16
LAYOUT = 1
"""Raised whenever stored bytes of the same space and tokens would come out otherwise."""

Part = str | int | float | bool | None | Sequence["Part"] | Mapping[str, "Part"]


@dataclass(frozen=True, slots=True)
class Space:
    """`kind`: `plain` (what a model computes alone over these tokens) or `fused`. `parts`: all that changes bytes.

    Parts are JSON values; the order of keys does not matter, every value does. Raises TypeError or ValueError for a
    part that JSON cannot name exactly.
    """

    kind: str
    parts: Mapping[str, Part]
    digest: bytes = field(init=False, repr=False, compare=False)
    """32 bytes over kind and parts."""

    def __post_init__(self) -> None:
        text = json.dumps([self.kind, self.parts], sort_keys=True, separators=(",", ":"), allow_nan=False)
        object.__setattr__(self, "digest", hashlib.sha256(text.encode()).digest())


@dataclass(frozen=True, slots=True)
class Scope:
    """One tenant in one epoch. After a purge it names nothing any more: ask the store for a new one."""

    tenant: str = field(repr=False)
    epoch: int
    tag: str
    """32 hex digits: the tenant's name in Redis and on disk, meaningless without the server key."""
    chain_key: bytes = field(repr=False)
    seal_key: bytes = field(repr=False)
    """AES-256: authenticates the tenant's files, and encrypts them where `encrypt`."""
    encrypt: bool = False


def chain(scope: Scope, space: Space, tokens: Sequence[int], block: int) -> list[bytes]:
    """Ids of the whole blocks of `tokens`; a rest shorter than `block` has none. Token ids are 0..2^32-1."""
    whole = len(tokens) - len(tokens) % block
    packed = struct.pack(f"<{whole}I", *tokens[:whole])
    key, width = scope.chain_key, 4 * block
    parent = _digest(key, struct.pack("<II", LAYOUT, block) + space.digest)
    ids = []
    for at in range(0, len(packed), width):
        parent = _digest(key, parent + packed[at : at + width])
        ids.append(parent)
    return ids


def _digest(key: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=ID_BYTES, key=key).digest()


@dataclass(frozen=True, slots=True)
class _Secret:
    """What a purge destroys: without it the tenant's tag, block ids and data key cannot be derived again."""

    epoch: int
    value: bytes


class Keyring:
    """The server key and each tenant's secret, as files of mode 0600 that all processes of one store share.

    A missing or damaged file is written again by a process that knows it, else made anew, which makes what it protected
    unreachable: a cold cache, never a wrong hit. With no folder the keys live and die with this object.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._cache: dict[str, tuple[tuple[int, int, int] | None, _Secret]] = {}
        self._known: dict[str, str] = {}
        self._mutex = RLock()
        if folder is None:
            self._server = secrets.token_bytes(32)
            return
        (folder / "tenants").mkdir(mode=0o700, parents=True, exist_ok=True)
        self._server = bytes.fromhex(str(_read_or_create(folder / "server.key", _new_server_key)["key"]))

    @property
    def store_tag(self) -> str:
        """Names this store among all that share one Redis."""
        return self._derive("store", b"").hex()[:16]

    def scope(self, tenant: str, *, encrypt: bool = False) -> Scope:
        """The tenant's scope as of now; notices a purge by any process. Costs one stat."""
        name = self._known.get(tenant)
        if name is None:
            name = self._known[tenant] = self._derive("tenant", tenant.encode()).hex()[:32]
        return self._scope(tenant, name, self._secret(name), encrypt=encrypt)

    def current(self, scope: Scope) -> bool:
        """False once the tenant was purged."""
        return self.scope(scope.tenant).tag == scope.tag

    def step(self, tenant: str) -> Scope:
        """Begin a new epoch: replaces the tenant's secret, for every process at once. Returns the scope that ended.

        Raises OSError where the disk refuses, and the epoch goes on.
        """
        with self._mutex:
            old = self.scope(tenant)
            name = self._known[tenant]
            fresh = _new_secret(old.epoch + 1)
            if self.folder is None:
                self._cache[name] = (None, _parse_secret(fresh))
            else:
                _replace(self.folder / "tenants" / f"{name}.key", fresh)
            return old

    def keep(self) -> None:
        """Put the server key back where somebody deleted or damaged its file under a running process."""
        if self.folder is None:
            return
        try:
            _read_or_create(self.folder / "server.key", lambda: {"key": self._server.hex()})
        except OSError as error:
            _log.warning("kv_key_not_kept", error=error.strerror)

    def live(self) -> dict[str, Scope]:
        """By tag, the scopes of all tenants that the store's folder knows, in their present epochs. They name none."""
        names = self._cache if self.folder is None else [p.stem for p in (self.folder / "tenants").glob("*.key")]
        scopes = [self._scope("", name, self._secret(name), encrypt=False) for name in list(names)]
        return {scope.tag: scope for scope in scopes}

    def _scope(self, tenant: str, name: str, secret: _Secret, *, encrypt: bool) -> Scope:
        root = name.encode() + struct.pack("<Q", secret.epoch) + secret.value
        return Scope(
            tenant,
            secret.epoch,
            self._derive("tag", root).hex()[:32],
            self._derive("chain", root),
            self._derive("seal", root),
            encrypt,
        )

    def _secret(self, name: str) -> _Secret:
        with self._mutex:
            stamp, secret = self._cache.get(name, (None, None))
            if self.folder is None:
                secret = secret or _parse_secret(_new_secret(0))
                self._cache[name] = (None, secret)
                return secret
            path = self.folder / "tenants" / f"{name}.key"
            now = _stamp(path)
            if secret is None or now is None or now != stamp:
                own = _fields_of(secret) if secret else _new_secret(0)
                try:
                    secret = _parse_secret(_read_or_create(path, lambda: own))
                except OSError as error:  # a full disk must not stop the tenant: this process alone knows the secret
                    _log.warning("kv_key_not_kept", error=error.strerror)
                    secret, now = _parse_secret(own), None
                self._cache[name] = (now, secret)
            return secret

    def _derive(self, use: str, data: bytes) -> bytes:
        return hmac.digest(self._server, use.encode() + b"\0" + data, "sha256")


def _new_server_key() -> dict[str, object]:
    return {"key": secrets.token_hex(32)}


def _new_secret(epoch: int) -> dict[str, object]:
    return {"epoch": epoch, "secret": secrets.token_hex(32)}


def _fields_of(secret: _Secret) -> dict[str, object]:
    return {"epoch": secret.epoch, "secret": secret.value.hex()}


def _parse_secret(fields: Mapping[str, object]) -> _Secret:
    return _Secret(int(str(fields["epoch"])), bytes.fromhex(str(fields["secret"])))


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _read(path: Path) -> dict[str, object] | None:
    """The file's fields, or None where it is missing or fails its own checksum."""
    try:
        fields = json.loads(path.read_bytes())
        check = fields.pop("check")
    except (FileNotFoundError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return fields if check == _check(fields) else None


def _read_or_create(path: Path, make: Callable[[], dict[str, object]]) -> dict[str, object]:
    """Of several processes that create the file at once, one wins and all read the same."""
    found = _read(path)
    if found is not None:
        return found
    with _lock(path.parent):
        found = _read(path)
        if found is None:
            if path.exists():
                _log.warning("kv_key_damaged", file=path.name)
            found = make()
            _replace(path, found)
    return found


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _replace(path: Path, fields: dict[str, object]) -> None:
    os.replace(_write_aside(path, fields), path)


def _write_aside(path: Path, fields: dict[str, object]) -> Path:
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({**fields, "check": _check(fields)}, file)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    return aside


def _check(fields: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]
