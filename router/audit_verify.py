"""Does a chain hold? Reads what lies on disk and the public key; needs no secret and writes nothing.

Found are: an edited, dropped, added or reordered record, a cut end, a missing file, a chain put in another tenant's
place, a checkpoint or head by another key. Not found, because nothing on this disk can show it: a chain, its head and
its tenant key put back together to an earlier state, and a history rewritten by whoever holds the signing key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from router.audit_chain import bound
from router.audit_keys import (
    KEYS,
    POLICIES,
    ROUTER,
    SIGNING,
    AuditError,
    DataKey,
    chain_folder,
    key_id,
    load_public,
    signed_by,
    statement,
)
from router.audit_lines import BATCH, NOTHING, Head, Record, open_line, read_head, read_lines, segments


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
    for segment in segments(chain_folder(root, tenant)):
        for line, whole in read_lines(segment.path):
            if whole:
                yield open_line(line)


def verify(root: Path, tenant: str, public: bytes | None = None) -> Report:
    """Check one chain from its first byte. `public` is a key kept elsewhere; None takes the one beside the log."""
    report = Report(tenant)
    folder = chain_folder(root, tenant)
    try:
        key = public or load_public(root)
        report.key = key_id(key)
        head = read_head(folder)
        if head is None:
            raise AuditError("there is no signed head")
        _Walk(report, key, head).walk(folder)
    except (AuditError, OSError) as error:
        report.faults.append(str(error))
    return report


def content(root: Path, tenant: str, chain: str, record: Record) -> dict[str, str]:
    """Sealed texts of a record in clear. Raises AuditError when the key was erased."""
    kept: dict[str, Any] = record.body.get("content", {})
    if kept.get("keep") != "full":
        return {}
    key = DataKey.load(root, tenant)
    if key.id != kept.get("key"):
        raise AuditError(f"the key {kept.get('key')} of this content was erased")
    texts = {name: text for name, text in kept.items() if name not in ("keep", "key")}
    id = record.body.get("id", "")
    return {n: key.open(t, bound(tenant, chain, id, n)).decode(errors="replace") for n, t in texts.items()}


class _Walk:
    """One pass over a chain."""

    def __init__(self, report: Report, public: bytes, head: Head) -> None:
        self._report, self._public, self._head = report, public, head
        self._seq, self._prev = 0, NOTHING
        self._intents: dict[str, None] = {}
        self._later: dict[int, str] = {}
        """Hashes of the records after the head: a router may be writing while we read."""
        self._torn = 0
        """Torn bytes at the end of the file before, which the next record must own up to."""

    def walk(self, folder: Path) -> None:
        self._check_signed(self._head)
        for number, segment in enumerate(segments(folder), start=1):
            if segment.number != number:
                raise AuditError(f"file {number:06d} is missing or doubled")
            self._file(segment.path)
        self._end(read_head(folder) or self._head)

    def _check_signed(self, head: Head) -> None:
        said = statement(self._report.tenant, head.chain, head.seq, head.hash)
        if not signed_by(self._public, head.sig, said):
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
        if record.seq == 0 and body.get("chain") != self._head.chain:
            raise AuditError("the head is another chain's")
        if record.seq == self._head.seq and record.hash != self._head.hash:
            raise AuditError(f"record {record.seq} is not the one that was signed")
        if record.seq > self._head.seq:
            self._later[record.seq] = record.hash
        self._kind(record)
        self._seq, self._prev = record.seq + 1, record.hash

    def _kind(self, record: Record) -> None:
        body, id = record.body, str(record.body.get("id", ""))
        torn = 0
        match body.get("kind"):
            case "intent":
                self._intents[id] = None
            case "outcome":
                self._intents.pop(id, None)
            case "checkpoint":
                said = statement(self._report.tenant, self._head.chain, record.seq - 1, record.prev)
                if not signed_by(self._public, str(body.get("sig", "")), said):
                    raise AuditError(f"checkpoint {record.seq} is not signed by this key")
                self._report.checkpoints += 1
            case "control":
                detail = body.get("detail", {})
                torn = detail.get("torn_bytes", 0) if body.get("what") in ("opened", "recovered") else 0
                self._report.recovered += body.get("what") == "recovered"
            case kind:
                raise AuditError(f"record {record.seq} is of no known kind: {kind!r}")
        if torn != self._torn:
            raise AuditError(f"{self._torn} torn bytes stand before record {record.seq}, which names {torn}")
        self._torn = 0

    def _end(self, latest: Head) -> None:
        """`latest` is the head after the last record was read."""
        report = self._report
        report.chain, report.records, report.open_intents = self._head.chain, self._seq, list(self._intents)
        if self._seq - 1 < self._head.seq:
            raise AuditError(f"the records end at {self._seq - 1}, the signed head at {self._head.seq}")
        self._check_signed(latest)
        if latest.chain != self._head.chain or self._later.get(latest.seq, latest.hash) != latest.hash:
            raise AuditError(f"record {latest.seq} is not the one that was signed")
        report.unsigned = max(0, self._seq - 1 - latest.seq)
        if report.unsigned > BATCH + 1:
            raise AuditError(f"{report.unsigned} records after the signed head: more than a crash leaves")
