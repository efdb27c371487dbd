"""`twolane audit erase|hold|holds|retain`: what is kept, for how long, and who said so."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from router import audit_verify
from router.audit_custody import Custody, UnderHold
from router.audit_keys import AuditError
from router.audit_options import log_folder, which_log

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")


def _in_charge(command: _F) -> _F:
    """Whose, by whom and why; all of it stands in the log, the person by a digest only."""
    tenant = click.option("--tenant", required=True)
    subject = click.option("--subject", help="One person, as requests name them; - reads the name from standard input.")
    by = click.option("--by", required=True, help="Name of the person who asks; stands in the log.")
    reason = click.option("--reason", required=True, help="Stands in the log: name nobody in it.")
    return which_log(tenant(subject(by(reason(command)))))


@click.command("erase")
@_in_charge
@click.confirmation_option(prompt="Destroy the key of all these texts recorded so far?")
def erase(root: Path | None, config: Path | None, tenant: str, subject: str | None, by: str, reason: str) -> None:
    """Make all texts of a tenant, or of one person, unreadable for ever; the chain still holds.

    The router may be running. Exit status 1, and nothing erased, under a legal hold.
    """
    person = _person(subject)
    custody = _custody(root, config, tenant)
    _do(lambda: custody.erase(by, reason, person))
    click.echo(f"{tenant}: texts {'of one person ' if person else ''}erased")


@click.command("hold")
@_in_charge
@click.option("--release", is_flag=True, help="End the holds on this tenant as a whole, or on this person.")
def hold(
    root: Path | None, config: Path | None, tenant: str, subject: str | None, by: str, reason: str, release: bool
) -> None:
    """Put a tenant or one person under a legal hold: no erasure and no end of retention until it is released."""
    person = _person(subject)
    custody = _custody(root, config, tenant)
    if release:
        ended = _do(lambda: custody.release(by, reason, person))
        click.echo(f"{tenant}: {ended} hold{'s' if ended != 1 else ''} released")
    else:
        name = _do(lambda: custody.hold(by, reason, person))
        click.echo(f"{tenant}: {f'person {name}' if name else 'the tenant'} is on hold")


@click.command("holds")
@which_log
@click.argument("tenants", nargs=-1)
def holds(root: Path | None, config: Path | None, tenants: tuple[str, ...]) -> None:
    """List the legal holds in force on TENANTS, or on all."""
    folder = log_folder(root, config)
    for tenant in tenants or audit_verify.tenants(folder):
        custody = _custody(folder, None, tenant)
        for one in _do(custody.holds):
            whom = f"person {one.subject}" if one.subject else "the tenant"
            click.echo(f"{tenant}: {whom} since {one.since} by {one.who}: {one.reason}")


@click.command("retain")
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--by", default="command", show_default=True, help="Name of the person who asks; stands in the log.")
def retain(config: Path, by: str) -> None:
    """Destroy what is older than its tenant's `audit.retention`; a running router does so by itself every hour."""
    from router import settings
    from router.source import ConfigError
    from router.tenants import TenantSource

    try:
        loaded = settings.load(config)
        source = TenantSource(loaded)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    folder, failed = loaded.audit.dir, False
    known = set(audit_verify.tenants(folder)) if folder.is_dir() else set()
    for name in source.names:
        tenant = source.get(name)
        if tenant is None or tenant.audit.retention is None or name not in known:
            continue
        seconds = tenant.audit.retention
        try:
            done = Custody(folder, name).retain(seconds, by)
        except (AuditError, OSError) as error:
            failed = True
            click.echo(f"{name}: {error}", err=True)
            continue
        told = f"{name}: kept from {done.before} on; {done.records} records removed"
        click.echo(f"{told}; {done.held}" if done.held else told)
    if failed:
        raise SystemExit(1)


def _custody(root: Path | None, config: Path | None, tenant: str) -> Custody:
    folder = log_folder(root, config)
    if tenant not in audit_verify.tenants(folder):
        raise click.ClickException(f"{folder}: no chain of {tenant!r}")
    return _do(lambda: Custody(folder, tenant))


def _person(subject: str | None) -> str | None:
    return sys.stdin.readline().strip() if subject == "-" else subject


def _do(work: Callable[[], _T]) -> _T:
    try:
        return work()
    except UnderHold as error:
        raise click.ClickException(f"nothing was erased: {error}") from error
    except (AuditError, OSError) as error:
        raise click.ClickException(str(error)) from error
