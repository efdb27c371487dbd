"""`twolane policy`: what a change of policy changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from router.policy_versions import Version, changes, read_version
from router.source import ConfigError

_Written = click.Path(exists=True, path_type=Path)


@click.group("policy")
def policy_commands() -> None:
    """Compare policies before they are put in force."""


@policy_commands.command("diff")
@click.argument("old", type=_Written)
@click.argument("new", type=_Written)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
def diff(old: Path, new: Path, as_json: bool) -> None:
    """Name what NEW changes for each tenant of OLD: tenant files, folders of them, or configurations."""
    before, after = _read(old), _read(new)
    told = [_tenant(name, before, after) for name in sorted({*before.tenants, *after.tenants})]
    told = [entry for entry in told if entry["state"] != "same"]
    if as_json:
        click.echo(json.dumps({"tenants": told}))
        return
    for entry in told:
        click.echo(f"{entry['tenant']}: {entry['state']}")
        for change in entry["changes"]:
            click.echo(f"  {change['text']}")
    if not told:
        click.echo("nothing changes")


def _tenant(name: str, before: Version, after: Version) -> dict[str, Any]:
    old, new = before.tenants.get(name), after.tenants.get(name)
    if old is None or new is None:
        return {"tenant": name, "state": "added" if old is None else "removed", "changes": []}
    found = [{"key": c.key, "old": c.old, "new": c.new, "text": str(c)} for c in changes(old, new)]
    return {"tenant": name, "state": "changed" if found else "same", "changes": found}


def _read(path: Path) -> Version:
    try:
        return read_version(path)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
