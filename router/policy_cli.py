"""`twolane policy`: what a change of policy changes, and past decisions made again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click
import yaml

from router import audit_verify
from router.audit_keys import AuditError
from router.audit_options import log_folder, which_log
from router.policy_diff import compare_versions
from router.policy_replay import Again, replay
from router.policy_versions import Version, read_version
from router.source import ConfigError

_Written = click.Path(exists=True, path_type=Path)


@click.group("policy")
def policy_commands() -> None:
    """Compare policies before they are put in force, and decide past requests again."""


@policy_commands.command("diff")
@click.argument("old", type=_Written)
@click.argument("new", type=_Written)
@click.option(
    "--against",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of an audit log: decide its requests under both.",
)
@click.option("--no-widen", is_flag=True, help="Exit status 1 when anything widens.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def diff(old: Path, new: Path, against: Path | None, no_widen: bool, as_json: bool) -> None:
    """Name what NEW changes for each tenant of OLD: tenant files, folders of them, or configurations.

    A change widens when something is allowed, or less is guarded, that was not before; a new tenant widens too.
    """
    try:
        found = compare_versions(_read(old), _read(new), against)
    except (AuditError, OSError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps({"tenants": [asdict(entry) for entry in found]}))
    elif not found:
        click.echo("nothing changes")
    else:
        for entry in found:
            click.echo("\n".join(entry.lines()))
    raise SystemExit(1 if no_widen and any(entry.widens for entry in found) else 0)


@policy_commands.command("show")
@click.argument("path", type=_Written)
@click.option("--tenant", "wanted", help="Only this one.")
def show(path: Path, wanted: str | None) -> None:
    """Print tenants as they hold, with all that `extends` and `preset` stand for, as YAML that can be read again.

    PATH is a tenant file, a folder of them, or a configuration. Keys are printed as digests.
    """
    tenants = _read(path).tenants
    if wanted is not None and wanted not in tenants:
        raise click.ClickException(f"no tenant is called {wanted!r}; there are: {', '.join(tenants) or 'none'}")
    shown = [tenants[name].written() for name in tenants if wanted in (None, name)]
    click.echo(yaml.safe_dump_all(shown, sort_keys=False, allow_unicode=True), nl=False)


@policy_commands.command("replay")
@which_log
@click.option("--id", "wanted", help="Only this request (its decision id).")
@click.option("--json", "as_json", is_flag=True, help="One record a line, and a count at the end.")
@click.argument("tenants", nargs=-1)
def replay_decisions(
    root: Path | None, config: Path | None, wanted: str | None, as_json: bool, tenants: tuple[str, ...]
) -> None:
    """Decide again what is on record of TENANTS, or all, from the recorded facts and the policy of the time.

    Exit status 1 when a decision differs from the recorded one, cannot be made again, or the request is not there.
    """
    folder = log_folder(root, config)
    counts = {"same": 0, "differs": 0, "unknown": 0}
    for tenant in tenants or audit_verify.tenants(folder):
        try:
            for again in replay(folder, tenant, wanted):
                counts[again.result] += 1
                if as_json:
                    click.echo(json.dumps(asdict(again)))
                elif again.result != "same" or wanted:
                    click.echo(_again(again))
        except (AuditError, OSError) as error:
            raise click.ClickException(f"{tenant}: {error}") from error
    if as_json:
        click.echo(json.dumps(counts))
    else:
        click.echo("{same} records the same, {differs} differ, {unknown} cannot be decided again".format(**counts))
    wrong = counts["differs"] or counts["unknown"] or (wanted is not None and not counts["same"])
    raise SystemExit(1 if wrong else 0)


def _again(again: Again) -> str:
    word = {"same": "the same", "differs": "DIFFERS", "unknown": "cannot be decided again"}[again.result]
    return f"{again.tenant} {again.seq} {again.id}: {word}{': ' if again.why else ''}{again.why}"


def _read(path: Path) -> Version:
    try:
        return read_version(path)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
