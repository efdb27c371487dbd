"""`twolane audit`: does the log hold, and what does it say. What is kept and for how long: `audit_custody_cli`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from router import audit_custody_cli as custody_cli
from router import audit_pack_cli as pack_cli
from router import audit_verify
from router.audit_anchor import missing_chains, read_anchor
from router.audit_keys import AuditError
from router.audit_lines import Anchored, Record
from router.audit_options import log_folder, which_log
from router.audit_verify import Report
from router.replay_cli import replay


@click.group("audit")
def audit_commands() -> None:
    """Read and check the audit log."""


@audit_commands.command("verify")
@which_log
@click.option("--key", help="Public key (hex) kept elsewhere; without it, the one beside the log.")
@click.option(
    "--anchor",
    type=click.Path(exists=True, path_type=Path),
    help="File, or folder of files, with heads that were anchored elsewhere.",
)
@click.option("--json", "as_json", is_flag=True)
@click.argument("tenants", nargs=-1)
def verify(
    root: Path | None,
    config: Path | None,
    key: str | None,
    anchor: Path | None,
    as_json: bool,
    tenants: tuple[str, ...],
) -> None:
    """Check the chains of TENANTS, or all. Exit status 1 when one does not hold.

    With --config, records that were removed before their tenant's retention ended are a fault too.
    """
    folder = log_folder(root, config)
    known = audit_verify.tenants(folder)
    if not known and not tenants:
        raise click.ClickException(f"{folder}: no chains")
    lines = None if anchor is None else _anchored(anchor)
    lost = [] if lines is None or tenants else missing_chains(known, lines)
    kept = {} if config is None else _retentions(config)
    reports = [
        audit_verify.verify(folder, tenant, _public(key), anchored=lines, retention=kept.get(tenant))
        for tenant in tenants or known
    ]
    reports += [Report(tenant, faults=["heads of it were anchored, and the chain is not here"]) for tenant in lost]
    if as_json:
        click.echo(json.dumps([asdict(report) | {"holds": report.holds} for report in reports], indent=2))
    else:
        for report in reports:
            click.echo(_told(report))
    raise SystemExit(0 if all(report.holds for report in reports) else 1)


@audit_commands.command("show")
@which_log
@click.option("--id", "wanted", help="Only this request (its decision id).")
@click.option("--content", is_flag=True, help="Open sealed texts; needs to read the tenant's key.")
@click.option("--json", "as_json", is_flag=True, help="One record a line.")
@click.argument("tenant")
def show(root: Path | None, config: Path | None, wanted: str | None, content: bool, as_json: bool, tenant: str) -> None:
    """Print the records of TENANT (`_router`: the router's own), oldest first."""
    folder = log_folder(root, config)
    if tenant not in audit_verify.tenants(folder):
        raise click.ClickException(f"{folder}: no chain of {tenant!r}")
    try:
        chain = audit_verify.chain_of(folder, tenant)
        for record in audit_verify.records(folder, tenant):
            if wanted in (None, record.body.get("id")):
                texts = _texts(folder, tenant, chain, record) if content else {}
                shown = record.body | {"hash": record.hash} | ({"texts": texts} if texts else {})
                click.echo(json.dumps(shown, ensure_ascii=False) if as_json else _line(record, texts))
    except AuditError as error:
        raise click.ClickException(str(error)) from error


audit_commands.add_command(replay)


def _anchored(path: Path) -> list[Anchored]:
    try:
        return read_anchor(path)
    except (AuditError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _retentions(config: Path) -> dict[str, float]:
    """Seconds by tenant, where there is an end."""
    from router import settings
    from router.source import ConfigError
    from router.tenants import TenantSource

    try:
        source = TenantSource(settings.load(config))
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    tenants = [tenant for name in source.names if (tenant := source.get(name)) is not None]
    return {tenant.name: tenant.audit.retention for tenant in tenants if tenant.audit.retention is not None}


def _public(key: str | None) -> bytes | None:
    try:
        return None if key is None else bytes.fromhex(key)
    except ValueError as error:
        raise click.UsageError("--key is not hex") from error


def _told(report: Report) -> str:
    lines = [
        f"{report.tenant}: {'holds' if report.holds else 'DOES NOT HOLD'}; {report.records} records, "
        f"{report.checkpoints} checkpoints, signed by {report.key or 'nobody'}"
    ]
    lines += [f"  fault: {fault}" for fault in report.faults]
    notes = {
        "records that a crash left after the signed head": report.unsigned,
        "recoveries after a crash": report.recovered,
        "requests begun and not ended": len(report.open_intents),
    }
    lines += [f"  note: {count} {what}" for what, count in notes.items() if count]
    if report.pruned:
        lines.append(f"  note: records of days before {report.pruned} were removed when their retention ended")
    if report.anchored is not None:
        younger = report.records - 1 - report.anchored
        lines.append(
            f"  note: anchored up to record {report.anchored}; {younger} are younger than the last anchored head"
        )
    return "\n".join(lines)


def _texts(folder: Path, tenant: str, chain: str, record: Record) -> dict[str, str]:
    try:
        return audit_verify.content(folder, tenant, chain, record)
    except AuditError as error:
        return {"unreadable": str(error)}


def _line(record: Record, texts: dict[str, str]) -> str:
    body = record.body
    match body.get("kind"):
        case "intent":
            told = f"{body.get('id')} {body.get('model')} -> {body.get('chosen')}"
        case "outcome":
            told = f"{body.get('id')} {body.get('result')} {body.get('status')} {body.get('deployment') or '-'}"
        case "chunk":
            told = f"{body.get('id')}"
        case "control":
            told = f"{body.get('what')} by {body.get('who')} {json.dumps(body.get('detail'))}"
        case _:
            told = f"key {body.get('key')}"
    return "\n".join(
        [f"{record.seq:>8} {body.get('ts')} {body.get('kind'):<10} {told}"]
        + [f"         {name}: {text}" for name, text in texts.items()]
    )


for _command in (
    *(custody_cli.erase, custody_cli.hold, custody_cli.holds, custody_cli.retain),
    *(pack_cli.export, pack_cli.evidence),
):
    audit_commands.add_command(_command)
