"""What KV is called: spaces, scopes and chains of block ids. Knows no tensors and no Redis; secrets lie in a vault.

A *space* names everything that changes the bytes except the tokens (model, revision, dtype, fuser, gates, template).
A *scope* is one tenant in one epoch. A *block id* is a keyed digest over scope, space, all tokens before and the
block's own tokens: equal ids mean equal prefixes, and without the key an id says nothing about the tokens.

Every key derives from two things: the *server key*, which no shared place ever holds, and the tenant's *secret*, which
lies in the vault and is replaced by a purge. Stores of several machines serve each other when both are the same: the
server key is then given from outside, and the vault is the shared place. Who reads that place alone can decrypt
nothing; who holds the server key alone cannot either, once the secret is gone.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock

import structlog

from workers.vault import FolderVault, Secret, Vault

_log = structlog.get_logger(__name__)

KEY_VARIABLE = "TWOLANE_KV_KEY"
"""Environment variable that may hold the server key, as 64 hex digits."""

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


def chain(scope: Scope, space: Space, tokens: Sequence[int], block: int, *, tail: bool = False) -> list[bytes]:
    """Ids of the whole blocks of `tokens`. Token ids are 0..2^32-1.

    A rest shorter than `block` has an id of its own only with `tail`: it names exactly this rest, and nothing follows
    it, as what goes on after it has other blocks.
    """
    count = len(tokens) if tail else len(tokens) - len(tokens) % block
    packed = struct.pack(f"<{count}I", *tokens[:count])
    key, width = scope.chain_key, 4 * block
    parent = _digest(key, struct.pack("<II", LAYOUT, block) + space.digest)
    ids = []
    for at in range(0, len(packed), width):
        parent = _digest(key, parent + packed[at : at + width])
        ids.append(parent)
    return ids


def _digest(key: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=ID_BYTES, key=key).digest()


class Keyring:
    """The server key and, through the vault, each tenant's secret.

    A missing or damaged secret is written again by a process that knows it, else made anew, which makes what it
    protected unreachable: a cold cache, never a wrong hit. With no folder the keys live and die with this object.
    `server_key`: 32 bytes given from outside; None takes the folder's own. `vault`: None takes the folder's own.
    """

    def __init__(self, folder: Path | None, *, server_key: bytes | None = None, vault: Vault | None = None) -> None:
        self.folder = folder
        self.given = server_key is not None
        self._cache: dict[str, tuple[object, Secret]] = {}
        self._known: dict[str, str] = {}
        self._ended: set[str] = set()
        self._mutex = RLock()
        self._own = FolderVault(folder) if folder is not None else None
        self._vault = vault if vault is not None else FolderVault(folder / "tenants") if folder is not None else None
        self._place = ""
        if server_key is None and self._own is not None:
            server_key = bytes.fromhex(str(self._own.read_or_create("server", _new_server_key)["key"]))
        elif self._own is not None:
            self._place = str(self._own.read_or_create("store", lambda: {"id": secrets.token_hex(16)})["id"])
        self._server = server_key or secrets.token_bytes(32)

    @property
    def store_tag(self) -> str:
        """Names this folder's store among all that share one Redis."""
        return self._derive("store", self._place.encode()).hex()[:16]

    @property
    def shared_tag(self) -> str:
        """Names the shared tier of this server key among all that share one Redis."""
        return self._derive("shared", b"").hex()[:16]

    def scope(self, tenant: str, *, encrypt: bool = False) -> Scope:
        """The tenant's scope as of now; notices a purge by any process as soon as the vault shows it."""
        name = self._known.get(tenant)
        if name is None:
            name = self._known[tenant] = self._derive("tenant", tenant.encode()).hex()[:32]
        return self._scope(tenant, name, self._secret(name), encrypt=encrypt)

    def current(self, scope: Scope) -> bool:
        """False once the tenant was purged."""
        return self.scope(scope.tenant).tag == scope.tag

    def kept(self, scope: Scope) -> bool:
        """False while this process alone knows the secret: what it stores, others would take for a dead tenant's."""
        if self._vault is None:
            return True
        stamp, _ = self._cache.get(self._known.get(scope.tenant, ""), (None, None))
        return stamp is not None

    def step(self, tenant: str) -> Scope:
        """Begin a new epoch: replaces the tenant's secret. Returns the scope that ended.

        Raises OSError where the vault refuses, and the epoch goes on.
        """
        with self._mutex:
            old = self.scope(tenant)
            name = self._known[tenant]
            fresh = _new_secret(old.epoch + 1)
            if self._vault is not None:
                self._vault.replace(name, fresh.fields())
            self._cache[name] = (self._vault.stamp(name) if self._vault else None, fresh)
            return old

    def keep(self) -> None:
        """Put the folder's server key back where somebody deleted or damaged its file under a running process."""
        if self._own is None or self.given:
            return
        try:
            self._own.read_or_create("server", lambda: {"key": self._server.hex()})
        except OSError as error:
            _log.warning("kv_key_not_kept", error=error.strerror or str(error))

    def refresh(self) -> set[str]:
        """Look whether others began new epochs. Returns the tags that ended since the last call; they never return."""
        if self._vault is not None:
            self._vault.refresh()
        for name in list(self._cache):
            self._secret(name)
        with self._mutex:
            ended, self._ended = self._ended, set()
            return ended

    def live(self) -> dict[str, Scope]:
        """By tag, the scopes of all tenants that the vault knows, in their present epochs. They name none.

        Raises OSError where the vault cannot be listed, or one of its records not be read.
        """
        names = list(self._cache) if self._vault is None else self._vault.names()
        scopes = [self._scope("", name, self._secret(name, strict=True), encrypt=False) for name in names]
        return {scope.tag: scope for scope in scopes}

    def _scope(self, tenant: str, name: str, secret: Secret, *, encrypt: bool) -> Scope:
        root = name.encode() + struct.pack("<Q", secret.epoch) + secret.value
        return Scope(
            tenant,
            secret.epoch,
            self._derive("tag", root).hex()[:32],
            self._derive("chain", root),
            self._derive("seal", root),
            encrypt,
        )

    def _secret(self, name: str, *, strict: bool = False) -> Secret:
        """`strict`: raises OSError instead of going on with what this process alone knows."""
        with self._mutex:
            stamp, known = self._cache.get(name, (None, None))
            if self._vault is None:
                secret = known or _new_secret(0)
                self._cache[name] = (None, secret)
                return secret
            now = self._vault.stamp(name)
            if known is not None and now is not None and now == stamp:
                return known
            own = known or _new_secret(0)
            try:
                secret = Secret.of(self._vault.read_or_create(name, own.fields))
            except OSError as error:  # a full disk must not stop the tenant: this process alone knows the secret
                if strict:
                    raise
                if known is None:
                    _log.warning("kv_key_not_kept", error=error.strerror or str(error) or "late")
                secret, now = own, None
            if known is not None and secret != known:
                self._ended.add(self._scope("", name, known, encrypt=False).tag)
            self._cache[name] = (now, secret)
            return secret

    def _derive(self, use: str, data: bytes) -> bytes:
        return hmac.digest(self._server, use.encode() + b"\0" + data, "sha256")


def given_key(file: Path | None) -> bytes | None:
    """The server key from `file`, else from the environment; None where neither is there.

    Raises ValueError where it is not 64 hex digits, and OSError where the file cannot be read.
    """
    text = file.read_text().strip() if file is not None else os.environ.get(KEY_VARIABLE, "").strip()
    where = f"key file {file.name}" if file is not None else KEY_VARIABLE
    if not text and file is None:
        return None
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ValueError(f"{where} must hold 64 hex digits")
    return key


def _new_server_key() -> dict[str, object]:
    return {"key": secrets.token_hex(32)}


def _new_secret(epoch: int) -> Secret:
    return Secret(epoch, secrets.token_bytes(32))
