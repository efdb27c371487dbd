"""`twolane audit export|evidence`: records and proof, to be handed on."""

from __future__ import annotations

import sys
import tempfile
import zipfile
from datetime import date, datetime
from pathlib import Path

import click

from router import audit_verify
from router.audit_anchor import read_anchor
from router.audit_custody import Custody
from router.audit_export import Period, Texts, records, write_csv, write_jsonl
from router.audit_keys import AuditError
from router.audit_options import log_folder, which_log

_DAY = click.DateTime(["%Y-%m-%d"])


def _day(moment: datetime | None) -> date | None:
    return None if moment is None else moment.date()


@click.command("export")
@which_log
@click.option("--from", "first", type=_DAY, help="First day (UTC).")
@click.option("--to", "last", type=_DAY, help="Last day (UTC).")
@click.option("--format", "shape", type=click.Choice(["jsonl", "csv"]), default="jsonl", show_default=True)
@click.option("--content", is_flag=True, help="With the texts; needs to read the tenant's keys.")
@click.option("--subject", help="Only what is about this person; - reads the name from standard input.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="A new file; without it, standard output.")
@click.argument("tenant")
def export(
    root: Path | None,
    config: Path | None,
    first: datetime | None,
    last: datetime | None,
    shape: str,
    content: bool,
    subject: str | None,
    out: Path | None,
    tenant: str,
) -> None:
    """Write the records of TENANT, one a line."""
    folder = log_folder(root, config)
    if tenant not in audit_verify.tenants(folder):
        raise click.ClickException(f"{folder}: no chain of {tenant!r}")
    person = sys.stdin.readline().strip() if subject == "-" else subject
    write = write_csv if shape == "csv" else write_jsonl
    try:
        texts = Texts(folder, tenant) if content else None
        found = records(folder, tenant, Period(_day(first), _day(last)), person)
        if out is None:
            write(sys.stdout, found, texts)
            return
        with out.open("x", encoding="utf-8", newline="") as file:
            # Texts of people: for the owner alone.
            out.chmod(0o600)
            count = write(file, found, texts)
    except (AuditError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{out}: {count} records")


@click.command("evidence")
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--tenant", required=True)
@click.option("--from", "first", type=_DAY, help="First day (UTC).")
@click.option("--to", "last", type=_DAY, help="Last day (UTC).")
@click.option("--anchor", type=click.Path(exists=True, path_type=Path), help="Heads that were anchored elsewhere.")
@click.option("--by", required=True, help="Name of the person who asks; stands in the pack and in the log.")
@click.argument("out", type=click.Path(path_type=Path))
def evidence(
    config: Path, tenant: str, first: datetime | None, last: datetime | None, anchor: Path | None, by: str, out: Path
) -> None:
    """Put what is known of a tenant and a period into OUT: a new folder, or a new file when it ends in .zip."""
    from router import settings
    from router.audit_evidence import Request, build
    from router.source import ConfigError
    from router.tenants import TenantSource

    if out.exists():
        raise click.ClickException(f"{out}: is there already")
    period = Period(_day(first), _day(last))
    try:
        loaded = settings.load(config)
        root = loaded.audit.dir
        if not root.is_dir() or tenant not in audit_verify.tenants(root):
            raise click.ClickException(f"{root}: no chain of {tenant!r}")
        lines = None if anchor is None else read_anchor(anchor)
        configured = TenantSource(loaded).get(tenant)
        asked = Request(
            root=root, tenant=tenant, period=period, by=by, settings=loaded, configured=configured, anchored=lines
        )
        note = _noted(root, tenant, by, period)
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".evidence-") as aside:
            made = Path(aside) / "pack"
            seen = build(asked, made)
            _put(made, out)
    except (ConfigError, AuditError, OSError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{out}: {'the chain holds' if seen.holds else 'THE CHAIN DOES NOT HOLD'}{note}")
    raise SystemExit(0 if seen.holds else 1)


def _noted(root: Path, tenant: str, by: str, period: Period) -> str:
    """Record who took the evidence; a log that takes no record any more must still be shown."""
    try:
        Custody(root, tenant).note("evidence", by, {"period": str(period)})
    except (AuditError, OSError) as error:
        return f"; not recorded in the log: {error}"
    return ""


def _put(made: Path, out: Path) -> None:
    if out.suffix != ".zip":
        made.rename(out)
        return
    with zipfile.ZipFile(out, "x", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(made.rglob("*")):
            archive.write(path, path.relative_to(made))
