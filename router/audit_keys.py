"""The key that signs heads and checkpoints, where keys lie, and how a secret is written.

All lie in `_keys/` under the audit folder, readable by the router alone: `_signing.key` (Ed25519, raw, hex),
`_signing.pub` (readable by all), and what seals content (`audit_vault`). A key that others can read is refused.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import msgspec

from router.ed25519 import PrivateKey, private_key, verify

KEYS = "_keys"
ROUTER = "_router"
"""Chain of what concerns no single tenant. No tenant's folder begins with `_`."""
POLICIES = "_policies"

SIGNING = "_signing"


class AuditError(Exception):
    """The log cannot be written or read as it stands; the message names file and cause, never content."""


def folder(tenant: str) -> str:
    """Name of a tenant's folder and key file: safe as a path component, and different for different tenants."""
    safe = quote(tenant, safe="")
    return f"%{ord(safe[0]):02X}{safe[1:]}" if safe[0] in "._" else safe


def chain_folder(root: Path, tenant: str) -> Path:
    return root / (ROUTER if tenant == ROUTER else folder(tenant))


def key_path(root: Path, tenant: str) -> Path:
    return root / KEYS / f"{ROUTER if tenant == ROUTER else folder(tenant)}.key"


def statement(tenant: str, chain: str, seq: int, hash: str) -> bytes:
    """What a signature says: record `seq` of this chain of this tenant has this hash."""
    return msgspec.json.encode(["twolane-audit/1", tenant, chain, seq, hash])


def pruned_statement(tenant: str, chain: str, seq: int, hash: str, segment: int, before: str) -> bytes:
    """What stands for files that were removed: all up to this one, whose last record this is, of days before."""
    return msgspec.json.encode(["twolane-audit-pruned/1", tenant, chain, seq, hash, segment, before])


@dataclass(frozen=True, slots=True)
class Signer:
    """Signs statements."""

    key: PrivateKey

    @classmethod
    def load(cls, root: Path) -> Signer:
        """Read the signing key; create it, and publish its public half, where there is none."""
        raw = read_secret(create_secret(root / KEYS / f"{SIGNING}.key", secrets.token_hex(32)))
        signer = cls(private_key(raw))
        public = root / KEYS / f"{SIGNING}.pub"
        if not public.exists():
            replace_secret(public, signer.public.hex())
            public.chmod(0o644)
        return signer

    @property
    def public(self) -> bytes:
        return self.key.public

    @property
    def id(self) -> str:
        return key_id(self.public)

    def sign(self, said: bytes) -> str:
        return base64.b64encode(self.key.sign(said)).decode()


def load_public(root: Path) -> bytes:
    """The public key that lies beside the log. Raises AuditError where there is none."""
    path = root / KEYS / f"{SIGNING}.pub"
    try:
        raw = bytes.fromhex(path.read_text())
    except (OSError, ValueError) as error:
        raise AuditError(f"{path}: no public key ({type(error).__name__})") from error
    return raw


def key_id(raw: bytes) -> str:
    """Short name of a key, which tells nothing of it."""
    return hashlib.sha256(b"twolane-audit-key/1" + raw).hexdigest()[:16]


def signed_by(public: bytes, signature: str, said: bytes) -> bool:
    try:
        raw = base64.b64decode(signature, validate=True)
    except ValueError:
        return False
    # The last character has bits that decode to nothing.
    return verify(public, raw, said) and base64.b64encode(raw).decode() == signature


def create_secret(path: Path, content: str) -> Path:
    """Write a file for the owner alone, whole or not at all; a file that is there already wins."""
    if path.exists():
        return path
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = _write_aside(path, content)
    try:
        os.link(aside, path)
    except FileExistsError:
        return path
    finally:
        aside.unlink()
    sync_folder(path.parent)
    return path


def replace_secret(path: Path, content: str) -> None:
    """Put a new secret in the place of an old one."""
    os.replace(_write_aside(path, content), path)
    sync_folder(path.parent)


def read_secret(path: Path) -> bytes:
    """32 bytes. Raises AuditError when the file is missing, malformed, or readable by others."""
    try:
        raw = bytes.fromhex(read_private(path))
    except ValueError as error:
        raise AuditError(f"{path}: no key ({type(error).__name__})") from error
    if len(raw) != 32:
        raise AuditError(f"{path}: not a key of 32 bytes")
    return raw


def read_private(path: Path) -> str:
    """A file's text. Raises AuditError when it is missing, or readable by others."""
    try:
        mode = path.stat().st_mode
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise AuditError(f"{path}: no key ({type(error).__name__})") from error
    if mode & 0o077:
        raise AuditError(f"{path}: others can read this key; set its mode to 0600")
    return text


def sync_folder(path: Path) -> None:
    """Make created, renamed and removed names durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_aside(path: Path, content: str) -> Path:
    aside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(content + "\n")
            file.flush()
            os.fsync(fd)
    except OSError:
        aside.unlink()
        raise
    return aside
