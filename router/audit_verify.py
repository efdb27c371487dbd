"""Does a chain hold? Reads what lies on disk and the public key; needs no secret and writes nothing.

Found are: an edited, dropped, added or reordered record, a cut end, a missing file, a chain put in another tenant's
place, a checkpoint or head by another key. With heads that were anchored elsewhere also: a chain put back to an earlier
state, and a history rewritten by whoever holds the signing key, up to the last anchored head. What is younger than
that, only the next anchored head protects.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from router.audit_chain import CONTENT_HEAD, bound
from router.audit_keys import (
    KEYS,
    POLICIES,
    ROUTER,
    SIGNING,
    AuditError,
    chain_folder,
    key_id,
    load_public,
    pruned_statement,
    signed_by,
    statement,
)
from router.audit_lines import (
    BATCH,
    FORMAT,
    NOTHING,
    Anchored,
    Head,
    Pruned,
    Record,
    open_line,
    read_head,
    read_lines,
    read_pruned,
    segments,
)
from router.audit_vault import Vault, day_of


@dataclass(slots=True)
class Report:
    """What was found in one chain. It holds when `faults` is empty."""

    tenant: str
    key: str = ""
    """Short name of the public key that all signatures were checked with."""
    chain: str = ""
    records: int = 0
    checkpoints: int = 0
    unsigned: int = 0
    """Records after the signed head: a crash left them before anybody was promised them."""
    recovered: int = 0
    open_intents: list[str] = field(default_factory=list)
    """Ids of intents without an outcome: running now, or their process was killed."""
    pruned: str = ""
    """Files of days before this one (YYYYMMDD) were removed when their retention ended."""
    anchored: int | None = None
    """The last record that a head anchored elsewhere covers; None where no anchor was given."""
    faults: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.faults


def tenants(root: Path) -> list[str]:
    """Names with a chain below this folder, the router's own included; also those of which only the key is left."""
    chains = {path.name for path in root.iterdir() if path.is_dir() and path.name not in (KEYS, POLICIES)}
    keyed = {path.stem for path in (root / KEYS).glob("*.key") if path.stem != SIGNING}
    return sorted(name if name == ROUTER else unquote(name) for name in chains | keyed)


def records(root: Path, tenant: str) -> Iterator[Record]:
    """All records in order. Raises AuditError at the first that is none; checks nothing else."""
    folder = chain_folder(root, tenant)
    mark = read_pruned(folder)
    for segment in segments(folder, 0 if mark is None else mark.segment):
        for line, whole in read_lines(segment.path):
            if whole:
                yield open_line(line)


def chain_of(root: Path, tenant: str) -> str:
    """Id of a tenant's chain. Raises AuditError where there is none."""
    head = read_head(chain_folder(root, tenant))
    if head is None:
        raise AuditError(f"{tenant}: there is no signed head")
    return head.chain


def verify(
    root: Path,
    tenant: str,
    public: bytes | None = None,
    *,
    anchored: Sequence[Anchored] | None = None,
    retention: float | None = None,
) -> Report:
    """Check one chain from its first byte.

    `public` is a key kept elsewhere; None takes the one beside the log. `anchored` are heads kept elsewhere, of any
    tenants, in the order in which they were written. `retention` in seconds, where known: nothing younger may be gone.
    """
    report = Report(tenant)
    folder = chain_folder(root, tenant)
    try:
        key = public or load_public(root)
        report.key = key_id(key)
        head = read_head(folder)
        if head is None:
            raise AuditError("there is no signed head")
        own = None if anchored is None else [line for line in anchored if line.tenant == tenant]
        _Walk(report, key, head, own).walk(folder, retention)
    except (AuditError, OSError) as error:
        report.faults.append(str(error))
    return report


def content(root: Path, tenant: str, chain: str, record: Record, vault: Vault | None = None) -> dict[str, str]:
    """Sealed texts of a record in clear. Raises AuditError when a key was erased."""
    kept: dict[str, Any] = record.body.get("content", {})
    if kept.get("keep") != "full":
        return {}
    vault = vault or Vault.load(root, tenant)
    if vault.id != kept.get("key"):
        raise AuditError(f"the key {kept.get('key')} of this content was erased")
    key = vault.content_key(str(kept.get("day")), kept.get("subject"))
    texts = {name: text for name, text in kept.items() if name not in CONTENT_HEAD}
    id = record.body.get("id", "")
    return {n: key.open(t, bound(tenant, chain, id, n)).decode(errors="replace") for n, t in texts.items()}


class _Walk:
    """One pass over a chain."""

    def __init__(self, report: Report, public: bytes, head: Head, anchored: list[Anchored] | None) -> None:
        self._report, self._public, self._head = report, public, head
        self._seq, self._prev = 0, NOTHING
        self._mark: Pruned | None = None
        self._marked = False
        """A record says what the mark says."""
        self._anchored = anchored or []
        self._elsewhere = {line.seq: line for line in self._anchored}
        report.anchored = None if anchored is None else max((line.seq for line in anchored), default=-1)
        self._intents: dict[str, None] = {}
        self._later: dict[int, str] = {}
        """Hashes of the records after the head: a router may be writing while we read."""
        self._torn = 0
        """Torn bytes at the end of the file before, which the next record must own up to."""

    def walk(self, folder: Path, retention: float | None) -> None:
        self._check_signed(self._head)
        self._check_anchored()
        self._begin(read_pruned(folder), retention)
        gone = 0 if self._mark is None else self._mark.segment
        for number, segment in enumerate(segments(folder, gone), start=gone + 1):
            if segment.number != number:
                raise AuditError(f"file {number:06d} is missing or doubled")
            self._file(segment.path)
        self._end(read_head(folder) or self._head)

    def _check_anchored(self) -> None:
        for line in self._anchored:
            where = f"the head of record {line.seq}, anchored {line.ts},"
            if not signed_by(self._public, line.sig, statement(line.tenant, line.chain, line.seq, line.hash)):
                raise AuditError(f"{where} is not signed by this log's key")
            if line.chain != self._head.chain:
                raise AuditError(f"{where} belongs to another chain: this one was begun anew")

    def _begin(self, mark: Pruned | None, retention: float | None) -> None:
        """Where files were removed, go on after the last record of the last of them."""
        if mark is None:
            return
        tenant, head = self._report.tenant, self._head
        said = pruned_statement(tenant, mark.chain, mark.seq, mark.hash, mark.segment, mark.before)
        if mark.chain != head.chain or not signed_by(self._public, mark.sig, said):
            raise AuditError("the mark of what was removed is not signed for this chain by this key")
        if retention is not None and mark.before > day_of(time.time() - retention):
            raise AuditError(f"records of days before {mark.before} were removed, which today's retention keeps")
        for earlier, line in pairwise(self._anchored):
            # What stands between two anchored heads was written after the earlier one was handed over.
            if earlier.seq < line.seq <= mark.seq and earlier.ts[:10].replace("-", "") >= mark.before:
                raise AuditError(f"record {line.seq} is younger than {earlier.ts}, and was removed as older")
        elsewhere = self._elsewhere.get(mark.seq)
        if elsewhere is not None and elsewhere.hash != mark.hash:
            raise AuditError(f"record {mark.seq} is not the one whose head was anchored {elsewhere.ts}")
        self._mark, self._seq, self._prev = mark, mark.seq + 1, mark.hash
        self._report.pruned = mark.before

    def _check_signed(self, head: Head) -> None:
        said = statement(self._report.tenant, head.chain, head.seq, head.hash)
        if not signed_by(self._public, head.sig, said) or head.key != self._report.key:
            raise AuditError("the head is not signed for this tenant by this key")

    def _file(self, path: Path) -> None:
        for line_number, (line, whole) in enumerate(read_lines(path), start=1):
            if not whole:
                self._torn += len(line)
                return
            try:
                self._record(open_line(line))
            except AuditError as error:
                raise AuditError(f"{path.name} line {line_number}: {error}") from error

    def _record(self, record: Record) -> None:
        body = record.body
        if record.seq != self._seq:
            raise AuditError(f"record {record.seq} stands where {self._seq} belongs")
        if record.prev != self._prev:
            raise AuditError(f"record {record.seq} is not chained to the one before")
        if body.get("tenant") != self._report.tenant:
            raise AuditError(f"record {record.seq} belongs to another tenant")
        if record.seq == 0:
            self._first(body)
        elsewhere = self._elsewhere.get(record.seq)
        if elsewhere is not None and elsewhere.hash != record.hash:
            raise AuditError(f"record {record.seq} is not the one whose head was anchored {elsewhere.ts}")
        if record.seq == self._head.seq and record.hash != self._head.hash:
            raise AuditError(f"record {record.seq} is not the one that was signed")
        if record.seq > self._head.seq:
            self._later[record.seq] = record.hash
        self._kind(record)
        self._seq, self._prev = record.seq + 1, record.hash

    def _first(self, body: dict[str, Any]) -> None:
        if body.get("chain") != self._head.chain:
            raise AuditError("the head is another chain's")
        if body.get("format") != FORMAT:
            raise AuditError(f"format {body.get('format')!r} is unknown here; this program reads {FORMAT}")

    def _kind(self, record: Record) -> None:
        body, id = record.body, str(record.body.get("id", ""))
        torn = 0
        match body.get("kind"):
            case "intent":
                self._intents[id] = None
            case "outcome":
                self._intents.pop(id, None)
            case "chunk":
                pass
            case "checkpoint":
                said = statement(self._report.tenant, self._head.chain, record.seq - 1, record.prev)
                if not signed_by(self._public, str(body.get("sig", "")), said):
                    raise AuditError(f"checkpoint {record.seq} is not signed by this key")
                self._report.checkpoints += 1
            case "control":
                detail = body.get("detail", {})
                torn = detail.get("torn_bytes", 0) if body.get("what") in ("opened", "recovered") else 0
                self._report.recovered += body.get("what") == "recovered"
                if self._mark is not None and body.get("what") == "pruned":
                    self._marked |= (detail.get("seq"), detail.get("hash")) == (self._mark.seq, self._mark.hash)
            case kind:
                raise AuditError(f"record {record.seq} is of no known kind: {kind!r}")
        if torn != self._torn:
            raise AuditError(f"{self._torn} torn bytes stand before record {record.seq}, which names {torn}")
        self._torn = 0

    def _end(self, latest: Head) -> None:
        """`latest` is the head after the last record was read."""
        report = self._report
        report.chain, report.records, report.open_intents = self._head.chain, self._seq, list(self._intents)
        if self._mark is not None and not self._marked:
            raise AuditError("no record says what the mark of removed files says")
        if report.anchored is not None and self._seq - 1 < report.anchored:
            raise AuditError(f"the records end at {self._seq - 1}, a head was anchored at {report.anchored}")
        if self._seq - 1 < self._head.seq:
            raise AuditError(f"the records end at {self._seq - 1}, the signed head at {self._head.seq}")
        self._check_signed(latest)
        if latest.chain != self._head.chain or self._later.get(latest.seq, latest.hash) != latest.hash:
            raise AuditError(f"record {latest.seq} is not the one that was signed")
        report.unsigned = max(0, self._seq - 1 - latest.seq)
        if report.unsigned > BATCH + 1:
            raise AuditError(f"{report.unsigned} records after the signed head: more than a crash leaves")
