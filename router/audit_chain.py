"""Chain: the records of one tenant, appended in batches. Knows files; knows no requests, no event loop.

Several processes may write one chain: each commit holds an exclusive `flock` on `lock`, and reads the signed head to
see whether another has written since. A record counts as promised when it and the head that covers it are on disk.
Nothing that was promised is ever changed; what a crash left behind stays, and a `recovered` record says so.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from router.audit_keys import AuditError, Signer, chain_folder, signed_by, statement, sync_folder
from router.audit_lines import (
    FORMAT,
    HEAD,
    NOTHING,
    Head,
    Segment,
    check_unsigned,
    last_line,
    open_line,
    read_head,
    seal,
    segments,
)
from router.audit_vault import Vault, day_of

Content = Literal["none", "hash", "full"]
CONTENT_HEAD = ("keep", "key", "day", "subject")
"""Members of a record's `content` that are no texts."""

_LOCK_PATIENCE = 5.0

_sync = getattr(os, "fdatasync", os.fsync)  # macOS has only the second


Body = dict[str, Any] | msgspec.Struct | msgspec.Raw
"""Members of a record besides those that every record has; none has a name of theirs."""


class Entry(msgspec.Struct):
    """A record to be. `content` holds named plain texts, kept as `keep` says."""

    kind: Literal["intent", "chunk", "outcome", "control"]
    body: Body
    id: str = ""
    content: dict[str, bytes] = {}
    keep: Content = "none"
    subject: str | None = None
    """The person whom the content is about, as the caller names them. Never written as it stands."""
    at: float = msgspec.field(default_factory=time.time)


@dataclass(slots=True)
class _State:
    """Where the next record goes."""

    chain: str
    seq: int
    """Of the next record."""
    prev: str
    segment: Segment | None
    size: int


class Chain:
    """One tenant's chain. Use from one thread at a time."""

    def __init__(
        self,
        root: Path,
        tenant: str,
        signer: Signer,
        *,
        rotate_bytes: int = 64 * 2**20,
        checkpoint_every: int = 1024,
    ) -> None:
        self.root = root
        self.tenant = tenant
        self.folder = chain_folder(root, tenant)
        self._signer, self._key_id = signer, signer.id
        self._lock, self._head = os.fspath(self.folder / "lock"), os.fspath(self.folder / HEAD)
        self._rotate_bytes = rotate_bytes
        self._every = checkpoint_every
        self._state: _State | None = None
        self._vault: Vault | None = None
        self._loose = 0
        """Records of ours since the last checkpoint."""

    def append(self, entries: Sequence[Entry]) -> list[Exception | None]:
        """Write at most BATCH entries and return once they are durable: None, or why an entry is no record.

        Raises AuditError or OSError when nothing could be written; then nothing was.
        """
        with self.locked():
            return self.write(entries)

    def close(self) -> None:
        """Put a checkpoint over what this process wrote."""
        if self._loose:
            with self.locked():
                state = self._current()
                lines = _Lines(self, state, self.vault())
                lines.add_checkpoint(self._signer)
                self._commit(state, lines)

    def write(self, entries: Sequence[Entry]) -> list[Exception | None]:
        """`append` for who holds the lock already."""
        state = self._current()
        lines = _Lines(self, state, self.vault())
        results = [lines.add(entry) for entry in entries]
        if (state.seq - 1) // self._every != (lines.seq - 1) // self._every:
            lines.add_checkpoint(self._signer)
        self._commit(state, lines)
        return results

    def note(self, what: str, who: str, detail: dict[str, Any]) -> None:
        """One control record, durable on return, under the lock. Raises AuditError or OSError."""
        for error in self.write([control(what, who, detail)]):
            if error is not None:
                raise AuditError(f"the record cannot be written: {error}") from error

    def vault(self) -> Vault:
        """The keys of this tenant's content as they are now."""
        if self._vault is None or not self._vault.fresh():
            self._vault = None
            self._vault = Vault.load(self.root, self.tenant)
        return self._vault

    def begin(self) -> None:
        """Make sure that there is a chain, under the lock."""
        self._current()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else writes to this chain meanwhile. Raises AuditError when somebody else does, for seconds."""
        fd = self._lock_file()
        try:
            deadline = time.monotonic() + _LOCK_PATIENCE
            while not _try_lock(fd):
                if time.monotonic() > deadline:
                    raise AuditError(f"{self.folder}: another process holds the lock")
                time.sleep(0.002)
            yield
        finally:
            os.close(fd)

    def _lock_file(self) -> int:
        try:
            return os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)

    def _current(self) -> _State:
        """What we remember where it still holds, else what lies on disk."""
        head = read_head(self.folder)
        state = self._state
        if state is not None and state.segment is not None and head is not None:
            known = (head.chain, head.seq, head.hash) == (state.chain, state.seq - 1, state.prev)
            if known and _size(state.segment.path) == state.size:
                return state
        self._state = self._read(head)
        return self._state

    def _read(self, head: Head | None) -> _State:
        found = segments(self.folder)
        if head is None:
            if found:
                raise AuditError(f"{self.folder}: records without {HEAD}")
            head = self._begin()
        if not signed_by(self._signer.public, head.sig, statement(self.tenant, head.chain, head.seq, head.hash)):
            raise AuditError(f"{self.folder / HEAD}: not signed by our key")
        if head.seq < 0:
            self._vault = Vault.create(self.root, self.tenant, day_of(time.time()))
        state, torn = _end(head, found)
        last = state.seq - 1
        if last < head.seq or (last == head.seq and state.prev != head.hash):
            raise AuditError(f"{self.folder}: the records end before, or differ from, the signed head at {head.seq}")
        if last > head.seq:
            check_unsigned(head, found, state.prev)
        if torn:
            # Nothing is written after torn bytes: the next record opens a new file.
            state.segment, state.size = Segment(found[-1].number, "", found[-1].path), 0
        if state.seq == 0:
            self._note(state, "opened", {"key": self.vault().id, "torn_bytes": torn})
        elif last > head.seq or torn:
            self._note(state, "recovered", {"unsigned": last - head.seq, "torn_bytes": torn})
        return state

    def _begin(self) -> Head:
        head = self._sign(secrets.token_hex(16), -1, NOTHING)
        fd = os.open(self.folder / HEAD, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(fd, head.encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        sync_folder(self.folder)
        sync_folder(self.root)
        return head

    def _note(self, state: _State, what: str, detail: dict[str, Any]) -> None:
        lines = _Lines(self, state, self.vault())
        lines.add(control(what, "router", detail))
        self._commit(state, lines)

    def _sign(self, chain: str, seq: int, hash: str) -> Head:
        sig = self._signer.sign(statement(self.tenant, chain, seq, hash))
        return Head(chain, seq, hash, self._key_id, sig)

    def _commit(self, state: _State, lines: _Lines) -> None:
        """Records first, then the head over them; where either fails, the file is as it was before."""
        if not lines.lines:
            return
        lines.vault.save()
        block = b"".join(lines.lines)
        segment, size = self._segment(state)
        fd = os.open(segment.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            if not size:
                sync_folder(self.folder)
            try:
                _write(fd, block)
                _sync(fd)
                self._write_head(self._sign(state.chain, lines.seq - 1, lines.prev))
            except OSError:
                self._state = None
                os.ftruncate(fd, size)
                raise
        finally:
            os.close(fd)
        state.segment, state.size = segment, size + len(block)
        state.seq, state.prev = lines.seq, lines.prev
        self._loose = 0 if lines.checkpointed else self._loose + len(lines.lines)

    def _segment(self, state: _State) -> tuple[Segment, int]:
        """The file for the next batch and its size: a new one each day, and when the last is full."""
        today = day_of(time.time())
        last = state.segment
        if last is not None and last.date == today and state.size < self._rotate_bytes:
            return last, state.size
        number = last.number + 1 if last is not None else 1
        return Segment(number, today, self.folder / f"{number:06d}-{today}.jsonl"), 0

    def _write_head(self, head: Head) -> None:
        fd = os.open(self._head, os.O_WRONLY | os.O_DSYNC)
        try:
            os.pwrite(fd, head.encode(), 0)
        finally:
            os.close(fd)


class _Lines:
    """The lines of one commit, in the making."""

    def __init__(self, chain: Chain, state: _State, vault: Vault) -> None:
        self.seq, self.prev = state.seq, state.prev
        self.lines: list[bytes] = []
        self.checkpointed = False
        self._tenant, self._chain, self.vault = chain.tenant, state.chain, vault
        self._whose = f'"tenant":{msgspec.json.encode(chain.tenant).decode()}'
        self._second, self._written = -1, ""

    def add(self, entry: Entry) -> Exception | None:
        """None, or why the entry cannot be written as JSON."""
        try:
            named = b',"id":' + msgspec.json.encode(entry.id) if entry.id else b""
            texts = self._content(entry) if entry.keep != "none" and entry.content else b""
            self._add(entry.kind, entry.at, named, msgspec.json.encode(entry.body), texts)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            return error
        return None

    def add_checkpoint(self, signer: Signer) -> None:
        """A signed record over all before it."""
        sig = signer.sign(statement(self._tenant, self._chain, self.seq - 1, self.prev))
        self._add("checkpoint", time.time(), b"", msgspec.json.encode({"key": signer.id, "sig": sig}), b"")
        self.checkpointed = True

    def _add(self, kind: str, at: float, named: bytes, body: bytes, texts: bytes) -> None:
        """Put a line together from JSON: members that begin with a comma, and the body, an object of its own."""
        head = f'{{"seq":{self.seq},"prev":"{self.prev}","ts":"{self._moment(at)}",{self._whose},"kind":"{kind}"'
        if self.seq == 0:
            head += f',"chain":"{self._chain}","format":{FORMAT}'
        comma = b"," if len(body) > 2 else b""
        line, self.prev = seal((head.encode(), named, comma, body[1:-1], texts))
        self.lines.append(line)
        self.seq += 1

    def _moment(self, at: float) -> str:
        """In UTC with microseconds, as `datetime.isoformat` writes it; a second's records share the most of it."""
        second, micro = divmod(round(at * 1e6), 1_000_000)
        if second != self._second:
            self._second, self._written = second, datetime.fromtimestamp(second, UTC).isoformat()[:19]
        return f"{self._written}.{micro:06d}+00:00"

    def _content(self, entry: Entry) -> bytes:
        vault = self.vault
        day = day_of(entry.at)
        if day < vault.first:
            day = vault.first
        kept = {"keep": entry.keep, "key": vault.id, "day": day}
        if entry.subject is not None:
            kept["subject"] = vault.subject(entry.subject)
        key = vault.content_key(day, kept.get("subject"))
        if entry.keep == "hash":
            for name, text in entry.content.items():
                kept[name] = key.digest(text)
        else:
            for name, text in entry.content.items():
                kept[name] = key.seal(text, bound(self._tenant, self._chain, entry.id, name))
        return b',"content":' + msgspec.json.encode(kept)


def control(what: str, who: str, detail: dict[str, Any]) -> Entry:
    """A record of something done to the router, by whom."""
    return Entry("control", {"what": what, "who": who, "detail": detail})


def bound(tenant: str, chain: str, id: str, name: str) -> bytes:
    """What sealed content belongs to: moved to another record, it does not open."""
    return msgspec.json.encode(["twolane-audit-content/1", tenant, chain, id, name])


def _end(head: Head, found: list[Segment]) -> tuple[_State, int]:
    """Where the last whole record stands, and how many torn bytes follow it."""
    torn_bytes = 0
    newest = found[-1] if found else None
    size = newest.path.stat().st_size if newest else 0
    for segment in reversed(found):
        line, torn = last_line(segment.path)
        torn_bytes += torn
        if line is not None:
            last = open_line(line)
            return _State(head.chain, last.seq + 1, last.hash, newest, size), torn_bytes
    return _State(head.chain, 0, NOTHING, newest, size), torn_bytes


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(fd: int, block: bytes) -> None:
    rest = memoryview(block)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return -1
