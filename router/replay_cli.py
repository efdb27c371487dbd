"""`twolane audit replay`: a recorded request run again, and what would have been said otherwise."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, get_args

import click

from router import recorded
from router.audit_keys import AuditError
from router.recorded import NothingToReplay, Recorded, With

if TYPE_CHECKING:
    from router.replay import Replay
    from router.settings import Settings

_KINDS: tuple[With, ...] = get_args(With)
_MEANING: dict[With, str] = {
    "receiver": "the receiver alone read everything",
    "relay": "the sharer's hint, in text",
    "zero": "the sharer said nothing",
    "shuffled": "the sharer read another text",
}


def _kinds(context: click.Context, option: click.Parameter, value: str) -> tuple[With, ...]:
    names = [name.strip() for name in value.split(",") if name.strip()]
    unknown = [name for name in names if name not in _KINDS]
    if unknown:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(_KINDS)}")
    return tuple(kind for kind in _KINDS if kind in names)


@click.command("replay")
@click.option("--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--tenant", help="Look in this tenant's chain only.")
@click.option("--with", "kinds", default="", callback=_kinds, help=f"Counterfactuals: {','.join(_KINDS)}.")
@click.option("--other", help="Decision id whose text a shuffled sharer reads; the newest other one else.")
@click.option("--json", "as_json", is_flag=True)
@click.argument("id")
def replay(
    config: Path, tenant: str | None, kinds: tuple[With, ...], other: str | None, as_json: bool, id: str
) -> None:
    """Run the recorded request ID (its decision id) again and compare, token for token.

    Needs the tenant's key, and a worker that holds what answered: a running one, else one is started for it.
    Exit status 1 when the answer differs or nothing can be run.
    """
    from router.live import NoWorker
    from router.settings import ConfigError, load
    from router.telemetry import configure_logging

    configure_logging("error")  # to stderr: what is printed is the answer
    try:
        settings = load(config)
        result = asyncio.run(_replay(settings, config, id, tenant, kinds, other))
    except NothingToReplay as error:
        _fail(id, error.code, str(error), as_json)
    except (AuditError, ConfigError, NoWorker) as error:
        raise click.ClickException(str(error)) from error
    click.echo(json.dumps(asdict(result), ensure_ascii=False, indent=2) if as_json else told(result))
    raise SystemExit(0 if result.identical else 1)


async def _replay(
    settings: Settings, config: Path, id: str, tenant: str | None, kinds: Sequence[With], other: str | None
) -> Replay:
    from router import live
    from router.replay import Replayer

    root = settings.audit.dir
    found = recorded.find(root, id, tenant)
    elsewhere: list[Recorded] = []
    if "shuffled" in kinds:
        elsewhere = [recorded.find(root, other, found.tenant)] if other else recorded.others(root, found)
    workers = await live.running(settings)
    async with live.stand_ins(settings, config, _missing(settings, found, {w.name for w in workers})) as started:
        replayer = Replayer(settings, [*workers, *started])
        try:
            return await replayer.run(found, kinds, elsewhere)
        finally:
            await replayer.close()


def _missing(settings: Settings, found: Recorded, running: set[str]) -> list[str]:
    """Workers to start: those that hold what the deployment names, where none of them runs."""
    from router import live
    from router.gather import on_worker

    deployment = next((d for d in settings.model_list if d.id == found.deployment), None)
    if deployment is None:
        return []
    groups = [deployment]
    if deployment.relay_params is not None:
        halves = (deployment.relay_params.sharer, deployment.relay_params.receiver)
        groups = [d for half in halves for d in settings.groups.get(settings.group(half) or "", ())]
    wanted = {named for d in groups if (named := on_worker(d)) is not None}
    return [
        worker
        for role, name in sorted(wanted)
        for worker in live.holding(settings, role, name)
        if not running & {w.name for w in settings.workers if name in (*w.pairs, *w.models)}
    ]


def told(result: Replay) -> str:
    """For people."""
    size = f", {result.tokens} tokens" if result.tokens else ""
    lines = [f"{result.id}: {'identical' if result.identical else 'DIFFERS'} ({result.deployment}{size})"]
    if not result.promised:
        lines.append("  note: an upstream answered; nothing promises that it gives the same answer twice")
    if result.difference is not None and result.cause is not None:
        at = result.difference
        lines += [
            f"  first difference: {at.unit} {at.position} of choice {at.choice}",
            f"    recorded: {at.recorded}",
            f"    now:      {at.now}",
            f"  cause: {result.cause.code}: {result.cause.detail}",
        ]
    if result.otherwise:
        lines.append(f"  recorded answer: {result.answer}")
    for entry in result.otherwise:
        lines.append(f"  {entry.kind} ({_MEANING[entry.kind]}): " + (entry.error or f"F1 {entry.f1:.2f}"))
        lines += [f"    hint: {entry.hint}"] if entry.hint else []
        lines += [] if entry.error else [f"    {'the same answer' if entry.exact else entry.text}"]
    return "\n".join(lines)


def _fail(id: str, code: str, message: str, as_json: bool) -> NoReturn:
    if as_json:
        click.echo(json.dumps({"id": id, "identical": False, "error": {"code": code, "message": message}}))
    else:
        click.echo(f"{id}: cannot be run again: {code}: {message}", err=True)
    raise SystemExit(1)
