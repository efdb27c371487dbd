"""The vault: keys of one tenant's content. Whoever destroys a key destroys what it sealed, and no record is touched.

Beside the signing key in `_keys/`, readable by the router alone:
- `TENANT.key`: the tenant key in hex; on the second line the first day that can still be read, and that day's key. A
  later day's key follows from an earlier one's and never the other way, so that one step forward destroys all before.
- `TENANT.subjects`: one line per person, the name digested under the tenant key and a random key sealed by it.
- `TENANT.kept`: of persons under a legal hold, the content keys of days that have expired for everybody else.

Content is sealed under a key made of its day's key and its person's key: either one gone, it is gone. Records name a
person by a digest of that random key, which leads back to nobody once the line is gone. Whoever writes here holds the
chain's lock.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import hashlib
import hmac
import os
import secrets
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from router.audit_keys import (
    AuditError,
    create_secret,
    key_id,
    key_path,
    read_private,
    replace_secret,
    sync_folder,
)
from router.audit_lines import feed

if TYPE_CHECKING:
    from hashlib import _Hash as Hash

_NONCE = 12
_HMAC_BLOCK = 64
"""Bytes of a block of SHA-256, which HMAC pads its key to."""
_MOST_KEYS = 4096
"""Content keys that are remembered."""


def day_of(at: float) -> str:
    """YYYYMMDD of a moment, UTC: content is kept, and expires, by the day."""
    return _written_day(int(at // 86400))


@lru_cache(maxsize=16)
def _written_day(day: int) -> str:
    return datetime.fromtimestamp(day * 86400, UTC).strftime("%Y%m%d")


@dataclass(frozen=True, slots=True)
class ContentKey:
    """Seals and digests content."""

    raw: bytes
    _keyed: tuple[Hash, Hash] = field(init=False, repr=False, compare=False)
    """The inner and the outer hash of HMAC, made ready once: every record is digested, and the key of a day serves
    many. `hmac` takes three times as long to go on from there."""

    def __post_init__(self) -> None:
        key = _derived(self.raw, b"digest").ljust(_HMAC_BLOCK, b"\0")
        inner, outer = (hashlib.sha256(bytes([byte ^ pad for byte in key])) for pad in (0x36, 0x5C))
        object.__setattr__(self, "_keyed", (inner, outer))

    @property
    def id(self) -> str:
        return key_id(self.raw)

    def seal(self, plain: bytes, bound: bytes) -> str:
        """AES-256-GCM under a random nonce; opens only together with `bound`."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # only where a tenant has content kept

        nonce = secrets.token_bytes(_NONCE)
        return base64.b64encode(nonce + AESGCM(self.raw).encrypt(nonce, plain, bound)).decode()

    def open(self, sealed: str, bound: bytes) -> bytes:
        """Raises AuditError when the key is another one or the text was changed."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        try:
            raw = base64.b64decode(sealed, validate=True)
            return AESGCM(self.raw).decrypt(raw[:_NONCE], raw[_NONCE:], bound)
        except (InvalidTag, ValueError) as error:
            raise AuditError("content does not open: its key was erased, or it was changed") from error

    def digest(self, plain: bytes) -> str:
        """Keyed SHA-256: tells equal content from different, and cannot be guessed without the key."""
        inner, outer = self._keyed
        inner, outer = inner.copy(), outer.copy()
        feed(inner, plain)
        outer.update(inner.digest())
        return outer.hexdigest()


@dataclass(slots=True)
class Vault:
    """One tenant's keys as they lie on disk; `fresh` says whether they still do. Use from one thread at a time."""

    root: Path
    tenant: str
    key: ContentKey
    id: str
    """Short name of the tenant key."""
    first: str
    """The first day whose content can be read."""
    _path: Path
    _first_key: bytes
    _stamp: tuple[object, ...]
    _subjects: _Subjects
    _kept: dict[str, dict[str, str]]
    _days: dict[str, bytes] = field(default_factory=dict)
    _made: dict[tuple[str, str | None], ContentKey] = field(default_factory=dict)

    @classmethod
    def load(cls, root: Path, tenant: str) -> Vault:
        """Raises AuditError where the tenant's key is missing, malformed or readable by others."""
        path = key_path(root, tenant)
        stamp = _stamp(path)
        try:
            key, first, first_key = read_private(path).split()
            raw, day = bytes.fromhex(key), bytes.fromhex(first_key)
            date.fromisoformat(first)
        except ValueError as error:
            raise AuditError(f"{path}: not the keys of a tenant") from error
        if len(raw) != 32 or len(day) != 32:
            raise AuditError(f"{path}: not keys of 32 bytes")
        sealer = ContentKey(raw)
        kept = path.with_suffix(".kept")
        held = msgspec.json.decode(read_private(kept), type=dict[str, dict[str, str]]) if kept.exists() else {}
        return cls(
            root,
            tenant,
            sealer,
            sealer.id,
            first,
            path,
            day,
            stamp,
            _Subjects(path.with_suffix(".subjects"), sealer),
            held,
        )

    @classmethod
    def create(cls, root: Path, tenant: str, today: str) -> Vault:
        """The first keys of a chain; existing ones are kept."""
        create_secret(key_path(root, tenant), _written(secrets.token_bytes(32), today, secrets.token_bytes(32)))
        return cls.load(root, tenant)

    def fresh(self) -> bool:
        """Whether nobody has replaced these keys; persons added by others are taken in."""
        self._subjects.refresh()
        return _stamp(self._path) == self._stamp

    def content_key(self, day: str, subject: str | None) -> ContentKey:
        """The key of a day's content of one person (None: of nobody in particular).

        Raises AuditError when one of the two keys was destroyed.
        """
        found = self._made.get((day, subject))
        if found is None:
            if len(self._made) >= _MOST_KEYS:
                self._made.clear()
            found = self._made[day, subject] = self._make(day, subject)
        return found

    def _make(self, day: str, subject: str | None) -> ContentKey:
        kept = self._kept.get(subject or "", {}).get(day)
        if kept is not None:
            return ContentKey(self.key.open(kept, b"kept"))
        if day < self.first:
            raise AuditError(f"the key of {day} was destroyed when its retention ended")
        person = b"" if subject is None else self._subjects.key(subject)
        return ContentKey(hmac.digest(self._day(day), b"content" + person, "sha256"))

    def _day(self, day: str) -> bytes:
        if day not in self._days:
            behind = [known for known in self._days if known < day]
            start = max(behind, default=self.first)
            key = self._days.get(start, self._first_key)
            for _ in range((date.fromisoformat(day) - date.fromisoformat(start)).days):
                key = _derived(key, b"next day")
            self._days[day] = key
        return _derived(self._days[day], b"day")

    def subject(self, who: str) -> str:
        """The name that records give a person; a new person's key is kept on disk by `save`."""
        return self._subjects.find(who) or self._subjects.add(who)

    def find(self, who: str) -> str | None:
        """The same where the person has a key."""
        return self._subjects.find(who)

    def save(self) -> None:
        """Make the keys of new persons durable: before the first record that needs them."""
        self._subjects.save()

    def erase(self, today: str) -> None:
        """Destroy all keys and begin anew."""
        path = key_path(self.root, self.tenant)
        replace_secret(path, _written(secrets.token_bytes(32), today, secrets.token_bytes(32)))
        for name in (path.with_suffix(".subjects"), path.with_suffix(".kept")):
            name.unlink(missing_ok=True)
        sync_folder(path.parent)

    def erase_subject(self, who: str) -> None:
        """Destroy one person's key, and what was kept of the person under a hold."""
        subject = self.subject(who)
        self._subjects.remove(who)
        self._keep({name: days for name, days in self._kept.items() if name != subject})
        self._replace(self.first, self._first_key)  # whoever holds these keys in memory reads them anew

    def expire(self, first: str, held: Collection[str]) -> None:
        """Destroy the keys of all days before `first`, except of the persons `held`; of others also what was kept."""
        kept = {name: dict(days) for name, days in self._kept.items() if name in held}
        step = date.fromisoformat(self.first).toordinal()
        days = [f"{date.fromordinal(n):%Y%m%d}" for n in range(step, date.fromisoformat(first).toordinal())]
        for subject in held:
            known = kept.setdefault(subject, {})
            for day in days:
                known[day] = self.key.seal(self.content_key(day, subject).raw, b"kept")
        self._keep(kept)
        if days:
            self._day(first)
            self._replace(first, self._days[first])

    def stale(self, first: str, held: Collection[str]) -> bool:
        """Whether `expire` would destroy anything."""
        return self.first < first or any(name not in held for name in self._kept)

    def _replace(self, first: str, first_key: bytes) -> None:
        replace_secret(key_path(self.root, self.tenant), _written(self.key.raw, first, first_key))

    def _keep(self, kept: dict[str, dict[str, str]]) -> None:
        path = key_path(self.root, self.tenant).with_suffix(".kept")
        if kept != self._kept:
            replace_secret(path, msgspec.json.encode(kept).decode())


@dataclass(slots=True)
class _Subjects:
    """The persons of one tenant, by the digest of their name. Lines are added at the end; removal writes all anew."""

    path: Path
    tenant_key: ContentKey
    _lines: dict[str, str] = field(default_factory=dict)
    _keys: dict[str, bytes] = field(default_factory=dict)
    """By what records call the person."""
    _new: list[str] = field(default_factory=list)
    _end: int = 0
    """Bytes of whole lines."""

    _name_key: bytes = b""
    _name: str = ""

    def __post_init__(self) -> None:
        self._name = os.fspath(self.path)
        self._name_key = _derived(self.tenant_key.raw, b"subject")
        self._read()

    def refresh(self) -> None:
        """Take in whom other processes added."""
        try:
            size = os.stat(self._name).st_size
        except FileNotFoundError:
            size = 0
        if size != self._end:
            self._read()

    def key(self, subject: str) -> bytes:
        if subject not in self._keys:
            raise AuditError("the key of this person was erased")
        return self._keys[subject]

    def find(self, who: str) -> str | None:
        return self._lines.get(self._digest(who))

    def add(self, who: str) -> str:
        key = secrets.token_bytes(32)
        self._new.append(f"{self._digest(who)} {self.tenant_key.seal(key, b'subject')}\n")
        return self._know(self._digest(who), key)

    def save(self) -> None:
        if not self._new:
            return
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        block = "".join(self._new).encode()
        try:
            os.ftruncate(fd, self._end)  # a line that a crash tore was never relied on
            if os.write(fd, block) != len(block):
                raise OSError(errno.ENOSPC, "only a part was written", str(self.path))
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, self._end)
            raise
        finally:
            os.close(fd)
        if not self._end:
            sync_folder(self.path.parent)
        self._end += len(block)
        self._new.clear()

    def remove(self, who: str) -> None:
        gone = self._digest(who)
        lines = read_private(self.path).splitlines(keepends=True)
        replace_secret(self.path, "".join(line for line in lines if line.split()[0] != gone).removesuffix("\n"))

    def _read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._end)
            whole = file.read().rpartition(b"\n")[0]
        self._end += len(whole) + bool(whole)
        for line in whole.decode().splitlines():
            digest, _, sealed = line.partition(" ")
            # A line that does not open was written under a tenant key that was destroyed, and is as good as gone.
            with contextlib.suppress(AuditError):
                self._know(digest, self.tenant_key.open(sealed, b"subject"))

    def _know(self, digest: str, key: bytes) -> str:
        subject = key_id(key)
        self._lines[digest] = subject
        self._keys[subject] = key
        return subject

    def _digest(self, who: str) -> str:
        return hmac.digest(self._name_key, who.encode("utf-8", "surrogatepass"), "sha256").hex()


def _derived(key: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, b"twolane-audit/1 " + purpose, "sha256")


def _written(key: bytes, first: str, first_key: bytes) -> str:
    return f"{key.hex()}\n{first} {first_key.hex()}"


def _stamp(path: Path) -> tuple[object, ...]:
    try:
        status = path.stat()
    except OSError as error:
        raise AuditError(f"{path}: no key ({type(error).__name__})") from error
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode
