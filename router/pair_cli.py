"""`twolane pair`: what pairs there are, and what models can be one. Imports torch only where a command needs it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import ClassVar, TypeVar

import click
import msgspec

from router.cli import Commands, ConfigOption
from router.settings import ConfigError, Settings, load
from workers import hub, pairs, sealing
from workers.config import ModelConfig, PairConfig
from workers.errors import LoadFailed
from workers.pairs import Change

_T = TypeVar("_T")


class PairCommands(Commands):
    """Commands that run models lie with the workers."""

    elsewhere: ClassVar[dict[str, str]] = {
        "check": "workers.pair_check:check_command",
        "conform": "workers.conform:conform_command",
        "reinstate": "router.stops_cli:reinstate_command",
        "export": "workers.publishing_cli:export_command",
        "import": "workers.publishing_cli:import_command",
        "keygen": "workers.publishing_cli:keygen_command",
        "train": "workers.train_cli:train_command",
        "verify": "workers.verify_cli:verify_command",
        "versions": "workers.publishing_cli:versions_command",
        "withdraw": "workers.publishing_cli:withdraw_command",
    }


@click.group("pair", cls=PairCommands)
@click.pass_context
def pair_commands(context: click.Context) -> None:
    """Pairs: sharer, receiver and the fuser between them."""
    # For commands that lie with the workers, who do not know how a configuration is read.
    context.obj = lambda path: _load(path).fleet


@pair_commands.result_callback()
def _record(done: object) -> None:
    from router.pair_records import record

    record(done)


@dataclass(frozen=True, slots=True)
class Listed:
    """A pair of the configuration, and what its folder says of it."""

    name: str
    sharer: str
    receiver: str
    fuser: str
    kind: str
    mode: str
    scope: str
    workers: tuple[str, ...]
    """That hold it."""
    file: pairs.PairFile | None = None
    report: pairs.Report | None = None
    problem: str = ""
    """What of the folder cannot be read."""
    signer: str = ""
    withdrawn: str = ""
    """Why."""

    @property
    def verdict(self) -> str:
        if self.withdrawn:
            return "withdrawn"
        return self.report.verdict if self.report and not self.problem else "unproven"

    @property
    def why(self) -> str:
        return self.withdrawn or self.problem or (self.report.reason if self.report else "no report")


@pair_commands.command("list")
@ConfigOption
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def list_command(config: Path, as_json: bool) -> None:
    """Print the pairs of a configuration with their verdicts.

    A verdict counts on a worker only when the pair it has loaded has the report's fingerprint.
    """
    settings = _load(config)
    for pair in settings.pairs:
        found = _listed(pair, settings)
        click.echo(json.dumps(_data(found)) if as_json else _text(_lines(found)))


@pair_commands.command("show")
@ConfigOption
@click.argument("name")
@click.option("--check", is_flag=True, help="Read the models' files: are they those that the pair was made for?")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def show_command(config: Path, name: str, check: bool, as_json: bool) -> None:
    """Print all that is written about the pair NAME: its parties by digest, its fuser, its report, who signed it.

    Exit status 1 with --check when a model has changed.
    """
    settings = _load(config)
    pair = next((p for p in settings.pairs if p.name == name), None)
    if pair is None:
        known = ", ".join(p.name for p in settings.pairs) or "none"
        click.echo(f"twolane: {config}: no pair is called {name!r}; there are: {known}", err=True)
        sys.exit(1)
    found = _listed(pair, settings)
    changed = _changed(pair, settings, found) if check else None
    if as_json:
        told = {"changed": [change.what for change in changed]} if changed is not None else {}
        click.echo(json.dumps(_data(found) | told))
    else:
        checked = _told_changes(changed) if check else []
        click.echo(_text([*_told(found), *checked, *_told_retraining(found, changed)]))
    sys.exit(1 if changed else 0)


def _changed(pair: PairConfig, settings: Settings, found: Listed) -> list[Change] | None:
    """What of its models is not as in `pair.json`; None where there is none to hold them against."""
    if found.file is None:
        return None
    # Reads weights: torch is loaded for it and for nothing else here.
    base_check = import_module("workers.base_check")
    try:
        parties = [settings.fleet.model(ref) for ref in pair.parties]
        changed: list[Change] = base_check.changed(_folder(pair.fuser), parties, settings.fleet.model(pair.receiver))
    except LoadFailed as error:
        click.echo(f"twolane: {error}", err=True)
        sys.exit(1)
    return changed


def _told_changes(changed: list[Change] | None) -> list[str]:
    if changed is None:
        return ["  not checked: it has no pair.json that names its models by digest"]
    if not changed:
        return ["  its models are those that it was made for"]
    follows = {True: "workers refuse the pair", False: "it is unproven"}
    return [f"  CHANGED: {change.what}; {follows[change.refused]}" for change in changed]


def _told_retraining(found: Listed, changed: list[Change] | None) -> list[str]:
    if again := found.file.retraining if found.file else "":
        return [f"  {again}"]
    if any(change.refused for change in changed or ()):
        return ["  what training it took was not recorded: `twolane pair check SHARER RECEIVER` estimates it"]
    return []


def _load(path: Path) -> Settings:
    try:
        settings = load(path)
        _ = settings.fleet
    except (ConfigError, ValueError) as error:
        click.echo(f"twolane: {error}", err=True)
        sys.exit(1)
    return settings


def _listed(pair: PairConfig, settings: Settings) -> Listed:
    folder = _folder(pair.fuser)
    file, report, taken, signer, problem = None, None, None, "", ""
    if pair.fuser != "identity" and not (problem := _absent(folder)):
        # One file that cannot be read hides nothing of the others.
        file, wrong = _part(pairs.read_pair, folder) if (folder / "pair.json").exists() else (None, "")
        report, unread = _part(pairs.read_report, folder)
        taken, unclear = _part(sealing.withdrawn, folder)
        signed, unfit = _part(sealing.signer_of, folder)
        signer, problem = signed or "", wrong or unread or unclear or unfit
    kind = file.fuser.kind if file else "identity" if pair.fuser == "identity" else "c2c"
    return Listed(
        name=pair.name,
        sharer=" + ".join(_model(party, settings) for party in pair.parties),
        receiver=_model(pair.receiver, settings),
        fuser=" + ".join(pair.fusers or (pair.fuser,)),
        kind=kind,
        mode=pair.mode or (file.mode if file else "handover" if kind == "identity" else "fuse"),
        scope=pair.scope or (file.scope if file else "prompt"),
        workers=tuple(w.name for w in settings.workers if pair.name in w.pairs),
        file=file,
        report=report,
        problem=problem,
        signer=signer,
        withdrawn=f"{taken.reason} ({taken.date})" if taken is not None else "",
    )


def _folder(fuser: str) -> Path:
    """Where it lies, or would lie: a folder, or what a worker of this machine has fetched from the hub."""
    path = Path(fuser).expanduser()
    if path.is_dir() or not hub.is_name(fuser):
        return path
    return hub.cached(fuser) or path


def _absent(folder: Path) -> str:
    """Why there is nothing to read; empty where there is. A checkpoint in the official layout has no `pair.json`."""
    if not folder.is_dir():
        return "its fuser is not on this machine"
    if not any(at.exists() for at in (folder / "pair.json", folder / "config.json", folder.parent / "config.json")):
        return f"{folder} holds neither a pair.json nor a checkpoint in the official layout"
    return ""


def _part(read: Callable[[Path], _T], folder: Path) -> tuple[_T | None, str]:
    """What one file says, or why it cannot be read."""
    try:
        return read(folder), ""
    except LoadFailed as error:
        return None, str(error)


def _model(ref: ModelConfig | str, settings: Settings) -> str:
    model = settings.fleet.model(ref)
    layers = f" layers {_ranges(model.layers)}" if model.layers is not None else ""
    revision = f"@{model.revision}" if model.revision else ""
    return f"{model.model}{revision} {model.dtype}{layers}"


def _ranges(numbers: tuple[int, ...]) -> str:
    """0,1,2,5 -> 0-2,5."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _data(found: Listed) -> dict[str, object]:
    own = asdict(found) | {"verdict": found.verdict, "why": found.why}
    return own | {"file": msgspec.to_builtins(found.file), "report": msgspec.to_builtins(found.report)}


def _text(lines: Sequence[str]) -> str:
    """Each as one line, whatever its folder says."""
    return "\n".join(map(pairs.shown, lines))


def _lines(found: Listed) -> list[str]:
    figures = "".join(
        f", {name} {interval.low:.3f} or more (n {interval.n})" for name, interval in _intervals(found.report)
    )
    where = f" on {', '.join(found.workers)}" if found.workers else ", on no worker"
    return [
        f"{found.name}: {found.kind}, {found.mode} over the {found.scope}; {found.verdict}{figures}{where}",
        f"  {found.sharer} -> {found.receiver}",
        f"  {found.why}",
    ]


def _intervals(report: pairs.Report | None) -> list[tuple[str, pairs.Interval]]:
    if report is None:
        return []
    both = (("gain", report.gain), ("retention", report.retention))
    return [(name, interval) for name, interval in both if interval is not None]


def _told(found: Listed) -> list[str]:
    lines = [*_lines(found), f"  fuser {found.fuser}"]
    if found.file is not None:
        fuser = found.file.fuser
        lines.append(f"  fuser digest {fuser.digest}, {fuser.parameters / 1e6:.2f} M parameters")
        for role, party in (
            *(("sharer", s) for s in (found.file.sharer, *found.file.others)),
            ("receiver", found.file.receiver),
        ):
            lines.append(
                f"  {role} weights {party.weights}, tokenizer {party.tokenizer}, licence {party.licence or '?'}"
            )
    lines.append(f"  signed by {found.signer}" if found.signer else "  not signed")
    report = found.report
    if report is not None:
        lines.append(f"  report of {report.date} for fingerprint {report.fingerprint}, {report.numerics}, n {report.n}")
        rows = [*_intervals(report), *report.accuracy.items()]
        lines += [f"    {name:<14} {_interval(interval)}" for name, interval in rows]
        for name, routes in report.slices.items():
            lines += [f"    {name}, {route}: {_interval(interval)}" for route, interval in routes.items()]
        lines += [f"    {name} {ms:.0f} ms" for name, ms in report.latency_ms.items()]
        lines += [f"    note: {note}" for note in report.notes]
    return lines


def _interval(interval: pairs.Interval) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f}, n {interval.n})"
