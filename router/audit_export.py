"""Records of a period as JSON lines or CSV, with their texts where asked."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, TextIO

from router import audit_verify
from router.audit_keys import AuditError
from router.audit_lines import Record
from router.audit_vault import Vault

COLUMNS = (
    *("seq", "ts", "kind", "id", "model", "chosen", "reason", "deployment", "transport", "result", "status", "error"),
    *("prompt_tokens", "completion_tokens", "cached_tokens", "ttft_ms", "total_ms", "policy", "subject"),
    *("what", "who", "detail", "hash"),
)
TEXTS = ("request", "hint", "answer", "chunk", "unreadable")
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


@dataclass(frozen=True, slots=True)
class Period:
    """Whole days, UTC, both included; None is open."""

    first: date | None = None
    last: date | None = None

    def __contains__(self, record: Record) -> bool:
        try:
            day = datetime.fromisoformat(record.body["ts"]).astimezone(UTC).date()
        except (KeyError, TypeError, ValueError) as error:
            raise AuditError(f"record {record.seq} does not say when it was written") from error
        return (self.first is None or day >= self.first) and (self.last is None or day <= self.last)

    @property
    def over(self) -> bool:
        return self.last is not None and datetime.now(UTC).date() > self.last

    def __str__(self) -> str:
        return f"{self.first or 'the beginning'} to {self.last or datetime.now(UTC).date()}"


def records(root: Path, tenant: str, period: Period, person: str | None = None) -> Iterator[Record]:
    """Of the period, oldest first; of one person, those whose content is theirs. Raises AuditError."""
    subject = None
    if person is not None:
        subject = Vault.load(root, tenant).find(person)
        if subject is None:
            raise AuditError(f"{tenant}: nothing is recorded of this person, or it was erased")
    for record in audit_verify.records(root, tenant):
        if record in period and (subject is None or record.body.get("content", {}).get("subject") == subject):
            yield record


class Texts:
    """Opens the texts of one tenant's records, or says why they cannot be."""

    def __init__(self, root: Path, tenant: str) -> None:
        self._root, self._tenant = root, tenant
        self._chain = audit_verify.chain_of(root, tenant)
        self._vault = Vault.load(root, tenant)

    def of(self, record: Record) -> dict[str, str]:
        try:
            return audit_verify.content(self._root, self._tenant, self._chain, record, self._vault)
        except AuditError as error:
            return {"unreadable": str(error)}


def write_jsonl(out: TextIO, found: Iterable[Record], texts: Texts | None = None) -> int:
    """Every member of every record, its hash, and `texts`. Returns how many."""
    count = 0
    for record in found:
        count += 1
        opened = {} if texts is None else texts.of(record)
        line = record.body | {"hash": record.hash} | ({"texts": opened} if opened else {})
        out.write(json.dumps(line, ensure_ascii=False) + "\n")
    return count


def write_csv(out: TextIO, found: Iterable[Record], texts: Texts | None = None) -> int:
    """The members that people sort by. Texts that a spreadsheet would take for a formula begin with an apostrophe."""
    columns = COLUMNS if texts is None else (*COLUMNS, *TEXTS)
    table = csv.DictWriter(out, columns)
    table.writeheader()
    count = 0
    for record in found:
        count += 1
        opened = {} if texts is None else texts.of(record)
        row = _row(record) | opened
        table.writerow({name: _harmless(row.get(name)) for name in columns})
    return count


def _row(record: Record) -> dict[str, Any]:
    body = record.body
    decision = body.get("decision") or {}
    detail = body.get("detail")
    return {
        **body,
        **body.get("usage", {}),
        "hash": record.hash,
        "reason": decision.get("reason"),
        "subject": body.get("content", {}).get("subject"),
        "detail": None if detail is None else json.dumps(detail, ensure_ascii=False),
    }


def _harmless(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
