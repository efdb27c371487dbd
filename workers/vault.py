"""Vaults: small records of secrets that several processes share, each with its own checksum. Torch-free.

A folder's vault is for one machine, or for several that mount the folder: a change is seen at once. A remote one lies
beside the shared tier, in any fsspec filesystem: a change is seen by others at their next `refresh`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from workers.remote import Remote

_log = structlog.get_logger(__name__)

Fields = dict[str, object]
SUFFIX = ".key"
_EVERY = 5.0
"""Seconds between two listings of a remote vault: so long another machine's purge may stay unseen."""
_PATIENCE = 1.0
"""Seconds that a request of a tenant who was never seen before may wait for a remote vault."""
_LISTING = 5.0
"""Seconds that a listing may take."""
_CALLS = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Secret:
    """What a purge destroys: without it the tenant's tag, block ids and data key cannot be derived again."""

    epoch: int
    value: bytes = field(repr=False)

    @classmethod
    def of(cls, fields: Mapping[str, object]) -> Secret:
        return cls(int(str(fields["epoch"])), bytes.fromhex(str(fields["secret"])))

    def fields(self) -> Fields:
        return {"epoch": self.epoch, "secret": self.value.hex()}


class Vault(Protocol):
    """Records by name. All but `stamp` raise OSError where the place refuses or cannot be reached."""

    def stamp(self, name: str) -> object:
        """Changes whenever the record does; None where it is missing or cannot be looked at. Costs no network."""

    def read_or_create(self, name: str, make: Callable[[], Fields]) -> Fields:
        """A record that is missing, or fails its checksum, is made; of several makers all read one winner's."""

    def replace(self, name: str, fields: Fields) -> None: ...

    def names(self) -> list[str]: ...

    def refresh(self) -> None:
        """Learn what others changed; may cost network, and never raises: what is known stays known."""


class FolderVault:
    """`FOLDER/NAME.key`, files of mode 0600."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def stamp(self, name: str) -> tuple[int, int, int] | None:
        try:
            stat = self._path(name).stat()
        except OSError:  # missing, or a mount that is gone: `read_or_create` tells which
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def read_or_create(self, name: str, make: Callable[[], Fields]) -> Fields:
        path = self._path(name)
        found = _read(path)
        if found is not None:
            return found
        with _lock(path.parent):
            found = _read(path)
            if found is None:
                if path.exists():
                    _log.warning("kv_key_damaged", file=path.name)
                found = make()
                self.replace(name, found)
        return found

    def replace(self, name: str, fields: Fields) -> None:
        path = self._path(name)
        aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_pack(fields))
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise

    def names(self) -> list[str]:
        return [path.stem for path in self._folder.glob(f"*{SUFFIX}")]

    def refresh(self) -> None:
        """Nothing to do: each `stamp` looks."""

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{SUFFIX}"


class RemoteVault:
    """`tenants/NAME.key` beside the shared tier.

    Where the filesystem cannot create a file only if it is absent, two machines that meet a tenant for the first time
    in the same moment may write different secrets. The later one stays; what was stored under the other is a miss.

    A place that refuses or is late is left alone, and what was known stays known, until a `refresh` is answered.
    """

    FOLDER = "tenants"

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._stamps: dict[str, object] = {}
        self._due = 0.0
        self._away = False
        self._calls = ThreadPoolExecutor(_CALLS, "kv-vault")

    def stamp(self, name: str) -> object:
        return self._stamps.get(name)

    def read_or_create(self, name: str, make: Callable[[], Fields]) -> Fields:
        if self._away:
            raise OSError("shared tier: away")
        return self._within(_PATIENCE, lambda: self._read_or_create(name, make))

    def _read_or_create(self, name: str, make: Callable[[], Fields]) -> Fields:
        path = self._path(name)
        found = self._read(path)
        if found is None:
            made = make()
            if not self._remote.create(path, _pack(made)) and self._read(path) is None:
                _log.warning("kv_key_damaged", file=f"{name}{SUFFIX}")
                self._remote.write(path, _pack(made))
            found = self._read(path) or made
        self._stamps[name] = self._remote.stamp(path)
        return found

    def replace(self, name: str, fields: Fields) -> None:
        self._remote.write(self._path(name), _pack(fields))
        self._stamps[name] = self._remote.stamp(self._path(name))

    def names(self) -> list[str]:
        return [path.rsplit("/", 1)[-1].removesuffix(SUFFIX) for path in self._remote.files(self.FOLDER)]

    def refresh(self) -> None:
        """One listing, at most every few seconds."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _EVERY
        try:
            listed = self._within(_LISTING, lambda: self._remote.files(self.FOLDER))
        except OSError as error:
            _log.warning("kv_vault_unreachable", error=str(error) or "late")
            return
        self._away = False
        self._stamps = {path.rsplit("/", 1)[-1].removesuffix(SUFFIX): stamp for path, (_, stamp) in listed.items()}

    def _within(self, seconds: float, call: Callable[[], T]) -> T:
        """What `call` returns, or OSError when that takes longer; it may end later all the same."""
        future = self._calls.submit(call)
        try:
            return future.result(seconds)
        except OSError:  # also what `result` raises when the time is up
            future.cancel()
            self._away = True
            raise

    def _read(self, path: str) -> Fields | None:
        try:
            return _unpack(self._remote.read(path))
        except FileNotFoundError:
            return None

    def _path(self, name: str) -> str:
        return f"{self.FOLDER}/{name}{SUFFIX}"


def _read(path: Path) -> Fields | None:
    try:
        return _unpack(path.read_bytes())
    except FileNotFoundError:
        return None


def _unpack(data: bytes) -> Fields | None:
    """The record's fields, or None where it fails its own checksum."""
    try:
        fields: Fields = json.loads(data)
        check = fields.pop("check")
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    return fields if check == _check(fields) else None


def _pack(fields: Fields) -> bytes:
    return json.dumps({**fields, "check": _check(fields)}).encode()


def _check(fields: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
