"""One recorded request, read back from the audit log with its texts in clear. Reads; writes nothing."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from router import audit_verify
from router.audit_keys import ROUTER, AuditError
from router.audit_lines import Record
from workers.protocol import Run

With = Literal["receiver", "relay", "zero", "shuffled"]
"""Counterfactuals of a pair's answer."""


class NothingToReplay(Exception):
    """There is nothing to run again; `code` is stable: not_found, no_answer, no_content, erased, unknown_deployment,
    no_worker, no_text, refused."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Recorded:
    """What was asked and answered, and what ran."""

    id: str
    tenant: str
    path: str
    deployment: str
    transport: str
    request: dict[str, msgspec.Raw]
    answer: dict[str, Any]
    hint: str | None = None
    """What a relay's sharer wrote."""
    run: Run | None = None
    """None where no worker of ours answered."""
    tokens: tuple[tuple[int, ...], ...] = ()
    """By choice; empty where a guardrail ran, or no worker of ours answered."""
    guardrails: tuple[str, ...] = ()
    """Those that ran, and may have changed the answer before it was recorded."""


@dataclass(slots=True)
class _Found:
    body: dict[str, Any] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def find(root: Path, id: str, tenant: str | None = None) -> Recorded:
    """The request with this decision id. Raises NothingToReplay, and AuditError where the log cannot be read."""
    if not root.is_dir():
        raise NothingToReplay("not_found", f"{root}: no audit log")
    for name in [tenant] if tenant else [t for t in audit_verify.tenants(root) if t != ROUTER]:
        found = _look(root, name, id)
        if found is not None:
            return _recorded(name, found)
    raise NothingToReplay("not_found", f"no record of {id}" + (f" in the chain of {tenant}" if tenant else ""))


def others(root: Path, recorded: Recorded, most: int = 32) -> list[Recorded]:
    """Other requests of the tenant that the same deployment answered and that can be read, the newest first, from among
    the last `most`."""
    wanted = ("outcome", "answered", recorded.deployment)
    last: deque[Record] = deque(maxlen=most)
    chain = ""
    for record in audit_verify.records(root, recorded.tenant):
        body = record.body
        chain = body.get("chain", chain)
        if (body["kind"], body.get("result"), body.get("deployment")) == wanted and body.get("id") != recorded.id:
            last.append(record)
    found = [_Found() for _ in last]
    for entry, record in zip(found, last, strict=True):
        _take(entry, root, recorded.tenant, chain, record)
    return [_recorded(recorded.tenant, e) for e in reversed(found) if {"request", "answer"} <= e.texts.keys()]


def _look(root: Path, tenant: str, id: str) -> _Found | None:
    found, chain = _Found(), ""
    for record in audit_verify.records(root, tenant):
        chain = record.body.get("chain", chain)
        if record.body.get("id") == id and record.body.get("kind") in ("intent", "outcome"):
            _take(found, root, tenant, chain, record)
            if record.body["kind"] == "outcome":
                break
    return found if found.body else None


def _take(found: _Found, root: Path, tenant: str, chain: str, record: Record) -> None:
    """Add one record; what cannot be opened stays closed, and `_recorded` says why."""
    found.body |= record.body
    try:
        found.texts |= audit_verify.content(root, tenant, chain, record)
    except AuditError as error:
        found.texts["unreadable"] = str(error)


def _recorded(tenant: str, found: _Found) -> Recorded:
    body, texts = found.body, found.texts
    id = body["id"]
    if body.get("result") != "answered":
        told = body.get("result") or "begun and not ended"
        raise NothingToReplay("no_answer", f"{id} was {told}: there is no answer to compare with")
    if "unreadable" in texts:
        raise NothingToReplay("erased", f"the texts of {id} cannot be read: {texts['unreadable']}")
    if "request" not in texts or "answer" not in texts:
        keep = body.get("content", {}).get("keep", "none")
        raise NothingToReplay("no_content", f"the tenant keeps {keep} of its texts; only audit.content full can be run")
    run = body.get("run")
    return Recorded(
        id=id,
        tenant=tenant,
        path=body["path"],
        deployment=body.get("deployment") or "",
        transport=body.get("transport") or "",
        request=msgspec.json.decode(texts["request"], type=dict[str, msgspec.Raw]),
        answer=msgspec.json.decode(texts["answer"], type=dict[str, Any]),
        hint=texts.get("hint"),
        run=None if run is None else msgspec.convert(run, Run),
        guardrails=tuple(body.get("guardrails") or ()),
        tokens=msgspec.json.decode(texts["tokens"], type=tuple[tuple[int, ...], ...]) if "tokens" in texts else (),
    )


def texts_of(answer: dict[str, Any]) -> list[str]:
    """The text of each choice of an OpenAI answer. Raises NothingToReplay where it has none."""
    if "choices" in answer:
        return [_choice(choice) for choice in answer["choices"]]
    if "output" in answer:
        parts = [part for item in answer["output"] for part in item.get("content") or ()]
        return ["".join(part.get("text", "") for part in parts)]
    raise NothingToReplay("no_text", "the recorded answer has no text: only answers of text are compared")


def _choice(choice: dict[str, Any]) -> str:
    message = choice.get("message")
    if message is None:
        return str(choice.get("text") or "")
    calls = message.get("tool_calls")
    return str(message.get("content") or "") + (msgspec.json.encode(calls).decode() if calls else "")
