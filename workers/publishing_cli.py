"""`twolane pair import`, `export`, `keygen`, `withdraw` and `versions`."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from workers import pairs, sealing
from workers.errors import LoadFailed
from workers.sealing import Done

_F = TypeVar("_F", bound=Callable[..., Any])
_Folder = click.Path(exists=True, file_okay=False, path_type=Path)


def _recorded(command: _F) -> _F:
    """`--by` and `--audit`: whoever names a log must say who they are."""
    by = click.option("--by", default="", help="Who does it; stands in the audit log.")
    audit = click.option(
        "--audit",
        envvar="TWOLANE_AUDIT_DIR",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Folder of the audit log that it is recorded in.",
    )
    return by(audit(command))


def _require_name(by: str, audit: Path | None) -> None:
    if audit is not None and not by.strip():
        raise click.UsageError("--by is needed beside --audit: the log names who did it")


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except (LoadFailed, OSError) as error:
        click.echo(f"twolane: {error}", err=True)
        sys.exit(1)


@click.command("import")
@click.argument("folder", type=_Folder)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="The pair's folder.")
@click.option("--sharer", help="Default: the name in the checkpoint's recipe.")
@click.option("--receiver", help="The same.")
@click.option("--name", help="Default: the folder's.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(["float32", "bfloat16"]))
@click.option("--sharer-licence")
@click.option("--receiver-licence")
@click.option("--fuser-licence")
@click.option("--data-licence")
def import_command(folder: Path, out: Path, **options: Any) -> None:
    """Make a pair folder of FOLDER, a checkpoint in the official layout.

    Its `.pt` files are read weights only, and stored as safetensors. Both models are loaded, because a pair names them
    by digest.
    """
    from workers.config import ModelConfig
    from workers.fusers.c2c import load_official
    from workers.loader import Loader
    from workers.publishing import import_official
    from workers.train_pair import Licences

    with _told():
        loader = Loader("cpu")
        named = {role: options[role] for role in ("sharer", "receiver")}
        if not all(named.values()):
            written = load_official(folder)
            named = {"sharer": named["sharer"] or written.sharer, "receiver": named["receiver"] or written.receiver}
        config = {"dtype": options["dtype"]}
        sharer, receiver = (
            loader.load(ModelConfig.model_validate({"model": named[role], **config})) for role in ("sharer", "receiver")
        )
        licences = Licences(*(options[f"{part}_licence"] for part in ("sharer", "receiver", "fuser", "data")))
        file = import_official(folder, out, options["name"] or out.absolute().name, sharer, receiver, licences)
    click.echo(f"{out}: {file.fuser.kind}, {file.fuser.parameters / 1e6:.2f} M parameters, {file.mode}")
    click.echo(f"It is unproven: twolane pair verify {out} --data FILE")


@click.command("export")
@click.argument("folder", type=_Folder)
@click.argument("out", type=click.Path(file_okay=False, path_type=Path))
@click.option("--sign", "key", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="A private key.")
@click.option("--sharer-model", help="The sharer as others find it: a hub id.")
@click.option("--receiver-model", help="The same of the receiver.")
@click.option("--push", metavar="OWNER/REPO", help="Put it on the hub too, in a folder VERSION of this repository.")
@click.option("--private", is_flag=True, help="Of a repository that --push makes.")
@_recorded
def export_command(
    folder: Path,
    out: Path,
    key: Path | None,
    push: str | None,
    private: bool,
    by: str,
    audit: Path | None,
    **models: Any,
) -> Done:
    """Copy the pair in FOLDER to OUT/NAME/VERSION with a model card, signed by a key of `twolane pair keygen`.

    The licences of both models, the fuser and the data must be known. The hub's token is taken from HF_TOKEN, or from
    where `hf auth login` has put it.
    """
    from workers import hub
    from workers.publishing import export

    _require_name(by, audit)
    named = {role: models[f"{role}_model"] for role in ("sharer", "receiver") if models[f"{role}_model"]}
    with _told():
        signing = None if key is None else sealing.read_key(key)
        # A push that failed may be tried again.
        place = export(folder, out, key=signing, models=named, again=push is not None)
        signer = sealing.signer_of(place)
        click.echo(f"{place}{f', signed by {signer}' if signer else ', not signed'}")
        if push is not None:
            click.echo(f"{push}/{place.name}: {hub.push(place, push, private=private or None)}")
        file = pairs.read_pair(place)
    detail = {
        "pair": file.name,
        "version": place.name,
        "fuser": file.fuser.digest,
        "signer": signer,
        "pushed": push or "",
    }
    return Done("pair_exported", by, detail, audit)


@click.command("keygen")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
def keygen_command(file: Path) -> None:
    """Write a new private key to FILE, and print the public one, which tenants list under `pairs.trust`."""
    with _told():
        click.echo(sealing.make_key(file))


@click.command("withdraw")
@click.argument("folder", type=_Folder)
@click.option("--reason", required=True, help="Stands in the folder, and in the audit log.")
@click.option("--undo", is_flag=True, help="Let it stand again.")
@_recorded
def withdraw_command(folder: Path, reason: str, by: str, audit: Path | None, undo: bool) -> Done:
    """Take the pair in FOLDER back: whoever loads it from now on refuses it, whatever its report says.

    A running worker keeps what it has loaded: `twolane stop` is at once.
    """
    _require_name(by, audit)
    if not reason.strip():
        raise click.UsageError("--reason says nothing")
    with _told():
        file = pairs.read_pair(folder)
        if undo:
            (folder / "withdrawn.json").unlink(missing_ok=True)
        else:
            date = datetime.datetime.now(datetime.UTC).date().isoformat()
            pairs.write(folder, "withdrawn.json", sealing.Withdrawn(date, reason, by))
    click.echo(f"{folder}: stands again ({reason})" if undo else f"{folder}: withdrawn")
    detail = {"pair": file.name, "fuser": file.fuser.digest, "reason": reason}
    return Done("pair_stands_again" if undo else "pair_withdrawn", by, detail, audit)


@click.command("versions")
@click.argument("folder", type=_Folder)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def versions_command(folder: Path, as_json: bool) -> None:
    """Print the pairs in the folders of FOLDER side by side, the newest last: what `export` writes to OUT/NAME.

    Exit status 1 when one of them cannot be read.
    """
    with _told():
        found, broken = sealing.versions(folder)
    for version in found:
        click.echo(
            json.dumps(asdict(version) | {"report": msgspec.to_builtins(version.report)})
            if as_json
            else "\n".join(map(pairs.shown, _lines(version)))
        )
    for error in broken:
        click.echo(f"twolane: {error}", err=True)
    sys.exit(1 if broken else 0)


def _lines(version: sealing.Version) -> tuple[str, str]:
    figures = []
    if version.report is not None:
        for name in ("gain", "retention"):
            interval: pairs.Interval | None = getattr(version.report, name)
            if interval is not None:
                figures.append(f"{name} {interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})")
        figures += [f"{ms:.0f} ms" for route, ms in version.report.latency_ms.items() if route == "cache"]
    head = f"{version.folder}  {version.made}  {version.fuser} {version.parameters / 1e6:.2f} M  {version.verdict}"
    signed = f"signed by {version.signer[:16]}" if version.signer else "not signed"
    return f"{head}  {'  '.join([*figures, signed])}", f"  {version.why}"
