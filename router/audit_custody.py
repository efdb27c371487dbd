"""How long content is kept: legal holds, erasure of a person or a tenant, and the end of retention.

Erasure and the end of retention destroy keys (`audit_vault`); the chain keeps its records and names who, why and when.
A hold stops both for whom it covers. Holds are control records and nothing else: as long as one stands, no record of
the tenant is removed, so the chain itself always says which do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from router.audit_chain import Chain
from router.audit_keys import AuditError, Signer, chain_folder, pruned_statement, replace_secret, sync_folder
from router.audit_lines import (
    PRUNED,
    Pruned,
    Segment,
    last_line,
    open_line,
    read_head,
    read_pruned,
    segments,
)
from router.audit_vault import Vault, day_of


class UnderHold(AuditError):
    """A legal hold forbids it; the message says since when and by whom."""


@dataclass(frozen=True, slots=True)
class Hold:
    """One legal hold in force."""

    subject: str | None
    """Records' name of the person; None covers the whole tenant."""
    who: str
    reason: str
    since: str


@dataclass(slots=True)
class Holds:
    """The holds in force, read from the chain; `read` goes on where it stopped."""

    folder: Path
    found: list[Hold] = field(default_factory=list)
    _at: tuple[int, int] = (0, 0)
    """Number of the last file that was read, and bytes of it."""

    def read(self) -> Holds:
        for segment in segments(self.folder, self._at[0] - 1):
            with segment.path.open("rb") as file:
                file.seek(self._at[1] if segment.number == self._at[0] else 0)
                for line in file:
                    # Few of millions of lines are of interest: parse only those.
                    if b'"kind":"control"' in line and line.endswith(b"\n"):
                        self._take(open_line(line[:-1]).body)
                self._at = (segment.number, file.tell())
        return self

    def on(self, subject: str | None) -> list[Hold]:
        """Those that forbid erasing a person, or (None) the whole tenant, where any hold does."""
        return [h for h in self.found if subject is None or h.subject in (None, subject)]

    @property
    def whole(self) -> bool:
        """The tenant as a whole is held."""
        return any(h.subject is None for h in self.found)

    @property
    def subjects(self) -> set[str]:
        return {h.subject for h in self.found if h.subject is not None}

    def _take(self, body: dict[str, Any]) -> None:
        if body.get("what") not in ("hold", "released"):
            return
        detail = body["detail"]
        subject = detail.get("subject")
        if body["what"] == "hold":
            self.found.append(Hold(subject, body["who"], detail["reason"], body["ts"]))
        else:
            self.found = [h for h in self.found if h.subject != subject]


@dataclass(frozen=True, slots=True)
class Retained:
    """What the end of a retention period destroyed in one chain."""

    before: str
    """YYYYMMDD: nothing of an earlier day should be left."""
    expired: bool = False
    """Keys were destroyed."""
    records: int = 0
    """Records that were removed with their files."""
    held: str = ""
    """Why not all of it."""


class Custody:
    """Of one tenant's chain. May be used while routers write to it. Methods raise AuditError or OSError."""

    def __init__(self, root: Path, tenant: str, signer: Signer | None = None) -> None:
        self._tenant = tenant
        self._signer = signer or Signer.load(root)
        self._chain = Chain(root, tenant, self._signer)
        self._folder = chain_folder(root, tenant)
        self._holds = Holds(self._folder)

    def holds(self) -> list[Hold]:
        """Those in force."""
        return list(self._read_holds().found)

    def hold(self, who: str, reason: str, person: str | None = None) -> str | None:
        """Stop erasure and retention of the tenant, or of one person, also of what is still to be recorded.

        Returns the records' name of the person.
        """
        with self._chain.locked():
            self._chain.begin()
            subject = None
            if person is not None:
                vault = self._chain.vault()
                subject = vault.subject(person)
                vault.save()
            self._chain.note("hold", who, _about(reason, subject))
            return subject

    def release(self, who: str, reason: str, person: str | None = None) -> int:
        """End all holds on the tenant as a whole, or on one person; says how many. Raises AuditError for none."""
        with self._chain.locked():
            subject = None if person is None else self._known(person)
            standing = [h for h in self._read_holds().found if h.subject == subject]
            if not standing:
                raise AuditError(f"{self._tenant}: there is no hold on {'this person' if person else 'the tenant'}")
            self._chain.note("released", who, _about(reason, subject, holds=len(standing)))
            return len(standing)

    def erase(self, who: str, reason: str, person: str | None = None) -> None:
        """Destroy the key of all content so far, or of one person's. Raises UnderHold, and then nothing happened."""
        self._read_holds()  # most of the chain is read before anybody has to wait for us
        with self._chain.locked():
            self._chain.begin()
            vault = self._chain.vault()
            subject = None if person is None else self._known(person)
            self._refuse_held(subject)
            self._chain.note("erasing", who, _about(reason, subject, key=vault.id))
            if person is None:
                vault.erase(day_of(time.time()))
                self._chain.note("erased", who, _about(reason, None, key=vault.id, next=self._chain.vault().id))
            else:
                vault.erase_subject(person)
                self._chain.note("erased", who, _about(reason, subject, key=vault.id))

    def retain(self, seconds: float, who: str = "router", now: float | None = None) -> Retained:
        """Destroy the keys of days that are older, then remove files that hold nothing younger."""
        before = day_of((time.time() if now is None else now) - seconds)
        self._read_holds()
        with self._chain.locked():
            if read_head(self._folder) is None:
                return Retained(before)
            self._chain.begin()
            vault, holds = self._chain.vault(), self._read_holds()
            if holds.whole:
                return Retained(before, held=_told(holds.found[0]))
            expired = self._expire(vault, before, holds.subjects, who)
            if holds.found:
                return Retained(before, expired, held=_told(holds.found[0]))
            return Retained(before, expired, self._prune(before, who))

    def note(self, what: str, who: str, detail: dict[str, Any]) -> None:
        """A control record of something that was done to this log from outside a router."""
        with self._chain.locked():
            self._chain.begin()
            self._chain.note(what, who, detail)

    def _expire(self, vault: Vault, before: str, held: set[str], who: str) -> bool:
        if not vault.stale(before, held):
            return False
        first = max(vault.first, before)
        self._chain.note("expired", who, {"before": first, "from": vault.first, "held": sorted(held)})
        vault.expire(first, held)
        return True

    def _prune(self, before: str, who: str) -> int:
        """The record first, then the signed mark, then the files: at no time does the chain look cut."""
        done = read_pruned(self._folder)
        for segment in segments(self._folder):  # left over by a crash after the mark was set
            if done is not None and segment.number <= done.segment:
                segment.path.unlink()
        last = _last_before(segments(self._folder), before)
        if last is None:
            return 0
        line, _ = last_line(last.path)
        assert line is not None  # noqa: S101  (_last_before saw it)
        record, head = open_line(line), read_head(self._folder)
        assert head is not None  # noqa: S101  (`begin` made it)
        removed = record.seq - (done.seq if done is not None else -1)
        detail = {"seq": record.seq, "hash": record.hash, "segment": last.number, "before": before, "records": removed}
        self._chain.note("pruned", who, detail)
        said = pruned_statement(self._tenant, head.chain, record.seq, record.hash, last.number, before)
        signer = self._signer
        mark = Pruned(head.chain, record.seq, record.hash, last.number, before, signer.id, signer.sign(said))
        replace_secret(self._folder / PRUNED, msgspec.json.encode(mark).decode())
        for segment in segments(self._folder):
            if segment.number <= last.number:
                segment.path.unlink()
        sync_folder(self._folder)
        return removed

    def _read_holds(self) -> Holds:
        return self._holds.read()

    def _known(self, person: str) -> str:
        subject = self._chain.vault().find(person)
        if subject is None:
            raise AuditError(f"{self._tenant}: nothing is recorded of this person, or it was erased before")
        return subject

    def _refuse_held(self, subject: str | None) -> None:
        standing = self._read_holds().on(subject)
        if standing:
            raise UnderHold(f"{self._tenant}: {_told(standing[0])}; release it first")


def _last_before(found: list[Segment], before: str) -> Segment | None:
    """The last file such that it, and all before it, hold nothing of `before` or later."""
    old = takewhile(lambda segment: segment.date < before, found[:-1])
    for segment in reversed(list(old)):
        line, torn = last_line(segment.path)
        if line is not None and not torn:  # torn bytes are owned up to by the file after: both go, or neither
            return segment
    return None


def _about(reason: str, subject: str | None, **more: Any) -> dict[str, Any]:
    return {**({} if subject is None else {"subject": subject}), "reason": reason, **more}


def _told(hold: Hold) -> str:
    whom = "the tenant" if hold.subject is None else f"person {hold.subject}"
    return f"a legal hold stands on {whom} since {hold.since[:10]}, set by {hold.who} ({hold.reason})"
