"""The evidence pack: what log and configuration show of one tenant and one period, in files that name each other.

`build` writes a folder. Its `manifest.json` holds the SHA-256 of every other file and is signed by the log's key. It
never says that a rule is kept; `README.md` says which file speaks to which requirement, and what is open.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from router import audit_requirements, audit_verify
from router.audit_custody import Holds
from router.audit_export import COLUMNS, Period, records, write_csv
from router.audit_keys import POLICIES, ROUTER, Signer, chain_folder, load_public
from router.audit_lines import Anchored, Record, open_line, read_lines, read_pruned, segments
from router.audit_requirements import Seen
from router.settings import Settings
from router.tenants import Tenant
from workers import pairs
from workers.errors import LoadFailed

_CUSTODY = frozenset({"expired", "pruned", "erasing", "erased", "hold", "released"})
_INCIDENTS = frozenset({"lost", "recovered", "pair_demoted", "pair_probation"})
_NOT_CHANGES = frozenset({"opened", "started", "stopped", "evidence"}) | _CUSTODY | _INCIDENTS
_NOBODY = frozenset({"file", "signal", "local", "command", "master", "master key"})
"""Of `who`: what names no person, though one must have done it. `router` is the router itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to show."""

    root: Path
    tenant: str
    period: Period
    by: str
    settings: Settings
    configured: Tenant | None
    """The tenant as it is configured now; None where it is not."""
    anchored: Sequence[Anchored] | None = None
    public: bytes | None = None


@dataclass(slots=True)
class _Found:
    """One pass over the tenant's chain and one over the router's."""

    requests: list[Record] = field(default_factory=list)
    controls: list[Record] = field(default_factory=list)
    results: Counter[str] = field(default_factory=Counter)
    lanes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    deployments: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    fingerprints: Counter[str] = field(default_factory=Counter)
    policies: set[str] = field(default_factory=set)
    opened: dict[str, str] = field(default_factory=dict)
    """Intents without an outcome, with their time."""


def build(asked: Request, out: Path) -> Seen:
    """Write the pack into a new folder. Raises AuditError or OSError; then the folder may hold a part of it."""
    out.mkdir()
    found = _read(asked)
    reports = {
        tenant: audit_verify.verify(
            asked.root, tenant, asked.public, anchored=asked.anchored, retention=_kept(asked, tenant)
        )
        for tenant in (asked.tenant, ROUTER)
    }
    missing = _inventory(asked, found, out)
    _chain_proof(asked, reports, out)
    _policies(asked, found, out)
    controls = [r.body | {"hash": r.hash} for r in found.controls]
    about = {
        "changes.json": [*(c for c in controls if c["what"] not in _NOT_CHANGES), *_unwatched(asked.tenant, controls)],
        "drills.json": [c for c in controls if c["what"] == "drill"],
        "incidents.json": _incidents(found, controls),
        "retention.json": _retention(asked, controls),
        "summary.json": _summary(asked, found),
    }
    for name, value in about.items():
        _write(out / name, value)
    _tables(found, out)
    seen = _seen(asked, found, reports[asked.tenant], missing, about)
    (out / "README.md").write_text(_readme(asked, seen, reports), encoding="utf-8")
    _manifest(asked, out)
    return seen


def _kept(asked: Request, tenant: str) -> float | None:
    return asked.configured.audit.retention if asked.configured is not None and tenant == asked.tenant else None


def _read(asked: Request) -> _Found:
    found = _Found()
    for record in records(asked.root, asked.tenant, asked.period):
        body = record.body
        match body["kind"]:
            case "control":
                found.controls.append(record)
            case "intent":
                found.opened[body["id"]] = body["ts"]
            case "outcome":
                found.opened.pop(body["id"], None)
                _count(found, record)
    if asked.tenant != ROUTER:
        found.controls += [r for r in records(asked.root, ROUTER, asked.period) if r.body["kind"] == "control"]
        found.controls.sort(key=lambda record: str(record.body["ts"]))
    return found


def _count(found: _Found, record: Record) -> None:
    body = record.body
    found.requests.append(Record(record.seq, record.prev, record.hash, _without_texts(body)))
    found.results[body["result"]] += 1
    found.lanes[body.get("transport") or "none"] += 1
    found.deployments[body.get("deployment") or "none"] += 1
    found.reasons[(body.get("decision") or {}).get("reason") or "none"] += 1
    if body.get("error"):
        found.errors[body["error"]] += 1
    found.fingerprints.update(f"{name} {digest}" for name, digest in body.get("fingerprints", {}).items())
    if body.get("policy"):
        found.policies.add(body["policy"])


def _without_texts(body: dict[str, Any]) -> dict[str, Any]:
    """What the tables need, so that a year of records fits in memory: all the rest is in records.jsonl."""
    kept = body.get("content", {})
    slim = {name: body[name] for name in (*COLUMNS, "tried", "usage") if name in body}
    slim["decision"] = {"reason": (body.get("decision") or {}).get("reason")}
    return slim | ({"content": {"subject": kept["subject"]}} if "subject" in kept else {})


def _tables(found: _Found, out: Path) -> None:
    with (out / "requests.csv").open("w", encoding="utf-8", newline="") as file:
        write_csv(file, found.requests)
    with (out / "refusals.csv").open("w", encoding="utf-8", newline="") as file:
        write_csv(file, (r for r in found.requests if r.body["result"] == "refused"))


def _incidents(found: _Found, controls: list[dict[str, Any]]) -> dict[str, Any]:
    failed = [
        {name: r.body.get(name) for name in ("id", "ts", "model", "deployment", "status", "error", "tried")}
        for r in found.requests
        if r.body["result"] == "failed"
    ]
    return {
        "failed": failed,
        "open_intents": [{"id": id, "ts": moment} for id, moment in found.opened.items()],
        "log": [c for c in controls if c["what"] in _INCIDENTS],
        "stops": [c for c in controls if c["what"] in ("stop", "start")],
    }


def _unwatched(tenant: str, controls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Starts of a router that found another configuration or policy than the one last told: changed while none ran."""
    found = []
    last: dict[str, Any] = {}
    for control in controls:
        detail = control["detail"]
        if control["what"] == "started" and "config" in detail:
            now = {"config": detail["config"], "policy": detail["tenants"].get(tenant)}
            differing = {name: [last[name], now[name]] for name in last if last[name] != now[name]}
            if differing:
                shown = {"ts": control["ts"], "hash": control["hash"], "kind": "control"}
                found.append({**shown, "what": "changed_while_off", "who": "file", "detail": differing})
            last = now
        elif control["what"] == "reload" and last and "config" in detail:
            last["config"] = detail["config"][1]
            last["policy"] = detail["digests"].get(tenant, [None, last["policy"]])[1]
    return found


def _retention(asked: Request, controls: list[dict[str, Any]]) -> dict[str, Any]:
    audit = None if asked.configured is None else asked.configured.audit
    return {
        "configured_seconds": None if audit is None else audit.retention,
        "content": None if audit is None else audit.content,
        "subject": None if audit is None else audit.subject,
        "holds_in_force": [asdict(hold) for hold in Holds(chain_folder(asked.root, asked.tenant)).read().found],
        "records": [c for c in controls if c["what"] in _CUSTODY],
    }


def _summary(asked: Request, found: _Found) -> dict[str, Any]:
    return {
        "tenant": asked.tenant,
        "period": str(asked.period),
        "requests": len(found.requests),
        "by_result": dict(found.results),
        "by_lane": dict(found.lanes),
        "by_reason": dict(found.reasons),
        "by_deployment": dict(found.deployments),
        "by_error": dict(found.errors),
        "by_fingerprint": dict(found.fingerprints),
    }


def _inventory(asked: Request, found: _Found, out: Path) -> tuple[str, ...]:
    """Models, deployments and pairs as configured now, and digests as recorded. Returns pairs without a report."""
    settings, missing, described = asked.settings, list[str](), list[dict[str, Any]]()
    for pair in settings.pairs:
        told: dict[str, Any] = pair.model_dump(mode="json")
        folder = Path(pair.fuser).expanduser()
        if pair.fuser != "identity" and folder.is_dir():
            told |= _pair_files(folder, out / "pairs" / pair.name)
        if "report" not in told:
            missing.append(pair.name)
        described.append(told)
    deployments = [
        {"id": d.id, "model_name": d.model_name, "transport": d.transport, "kind": d.kind, "model": d.upstream_model}
        for d in settings.model_list
    ]
    inventory = {
        "deployments": deployments,
        "models": [model.model_dump(mode="json") for model in settings.models],
        "pairs": described,
        "recorded": [
            dict(zip(("kind", "digest", "requests"), (*name.split(" ", 1), count), strict=True))
            for name, count in found.fingerprints.items()
        ],
    }
    _write(out / "inventory.json", inventory)
    return tuple(missing)


def _pair_files(folder: Path, out: Path) -> dict[str, Any]:
    """Digests, licences and verdict of one pair; its own files beside."""
    try:
        file = pairs.read_pair(folder) if (folder / "pair.json").exists() else None
        report = pairs.read_report(folder)
    except LoadFailed as error:
        return {"problem": str(error)}
    out.mkdir(parents=True)
    for name in ("pair.json", "report.json"):
        if (folder / name).exists():
            shutil.copyfile(folder / name, out / name)
    told: dict[str, Any] = {}
    if file is not None:
        told["parties"] = msgspec.to_builtins({"sharer": file.sharer, "receiver": file.receiver, "others": file.others})
        told["fuser_digest"], told["fuser_kind"] = file.fuser.digest, file.fuser.kind
        licences = {"sharer": file.sharer.licence, "receiver": file.receiver.licence, "fuser": file.fuser.licence}
        told["licences"] = licences | {"data": file.data_licence}
    if report is not None:
        told["report"] = {"verdict": report.verdict, "reason": report.reason, "n": report.n, "date": report.date}
        told["report"] |= {"fingerprint": report.fingerprint, "numerics": report.numerics, "data": report.data}
    return told


def _policies(asked: Request, found: _Found, out: Path) -> None:
    """Every policy that a record of the period names, as it was kept."""
    (out / "policies").mkdir()
    for digest in sorted(found.policies):
        kept = asked.root / POLICIES / f"{digest}.json"
        if digest.isalnum() and kept.exists():
            shutil.copyfile(kept, out / "policies" / kept.name)


def _chain_proof(asked: Request, reports: dict[str, audit_verify.Report], out: Path) -> None:
    """The lines of the period as they lie in the log, up to the next signature, and what was found of both chains."""
    folder = chain_folder(asked.root, asked.tenant)
    mark, lines, ended = read_pruned(folder), list[bytes](), False
    for segment in segments(folder, 0 if mark is None else mark.segment):
        for line, whole in read_lines(segment.path):
            if whole and not ended:
                record = open_line(line)
                inside = record in asked.period
                if inside or lines:
                    lines.append(line)
                ended = bool(lines) and not inside and record.body["kind"] == "checkpoint"
    (out / "records.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))
    for tenant in reports:
        for name in ("head.json", "pruned.json"):
            source = chain_folder(asked.root, tenant) / name
            if source.exists():
                (out / "heads").mkdir(exist_ok=True)
                shutil.copyfile(source, out / "heads" / f"{tenant}.{name}")
    public = asked.public or load_public(asked.root)
    checked = {tenant: asdict(report) | {"holds": report.holds} for tenant, report in reports.items()}
    kept = [msgspec.to_builtins(line) for line in asked.anchored or () if line.tenant in reports]
    _write(out / "chain.json", {"public_key": public.hex(), "reports": checked, "anchored": kept})


def _seen(
    asked: Request, found: _Found, report: audit_verify.Report, missing: tuple[str, ...], about: dict[str, Any]
) -> Seen:
    lost = sum(c["detail"].get("records", 0) for c in about["incidents.json"]["log"] if c["what"] == "lost")
    configured, first = asked.configured, asked.period.first
    return Seen(
        holds=report.holds,
        lost=lost,
        anchored=report.anchored is not None,
        content="" if configured is None else configured.audit.content,
        regulated=configured is not None and configured.policy.regulated,
        retention=None if configured is None else configured.audit.retention,
        removed=bool(report.pruned) and (first is None or report.pruned > f"{first:%Y%m%d}"),
        unreported=missing,
        drills=len(about["drills.json"]),
        named=all(c["who"] not in _NOBODY for c in about["changes.json"]),
    )


def _readme(asked: Request, seen: Seen, reports: dict[str, audit_verify.Report]) -> str:
    held = "; ".join(f"{tenant}: {'holds' if r.holds else 'DOES NOT HOLD'}" for tenant, r in reports.items())
    return f"""# Evidence of tenant {asked.tenant}, {asked.period}

Made {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by {asked.by}. These files show what was recorded and configured.
They do not say that any rule is kept; that is for people to judge.

- `records.jsonl`: the log's own lines of the period, texts sealed, up to the next signature. `chain.json`: what a check
  of the chain found, the public key, the anchored heads. `heads/`: the signed heads. The chains: {held}.
- `requests.csv`, `refusals.csv`, `summary.json`: what was asked, decided and answered, without texts.
- `inventory.json`, `pairs/`: models, deployments and pairs as configured now, with digests, licences and reports, and
  the digests that answered in the period. `policies/`: what was enforced, named by the digest that records name.
- `changes.json`, `drills.json`, `incidents.json`: who changed what and why (`changed_while_off`: what a router that
  started found changed); drills; failures, losses, stops.
- `retention.json`: how long texts are kept, what expired, was erased or is on hold.
- `manifest.json`: SHA-256 of each file. `manifest.sig`: the log's key over
  `["twolane-audit-evidence/1", tenant, SHA-256 of manifest.json]` (base64, Ed25519).

## Requirements, files, gaps

{audit_requirements.table(seen)}
"""


def _manifest(asked: Request, out: Path) -> None:
    digests = {
        path.relative_to(out).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }
    _write(out / "manifest.json", digests)
    digest = hashlib.sha256((out / "manifest.json").read_bytes()).hexdigest()
    (out / "manifest.sig").write_text(Signer.load(asked.root).sign(evidence_statement(asked.tenant, digest)) + "\n")


def evidence_statement(tenant: str, manifest: str) -> bytes:
    """What the signature of a pack says."""
    return msgspec.json.encode(["twolane-audit-evidence/1", tenant, manifest])


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
