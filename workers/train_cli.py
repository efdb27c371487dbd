"""`twolane pair train`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from transformers.utils import logging as quiet

from workers.config import ModelConfig, parse_size
from workers.errors import LoadFailed
from workers.fit_linear import Progress as Fitting
from workers.items import read_items
from workers.loader import DTYPES, Loader
from workers.train import Progress
from workers.train_pair import MODES, Keeping, Licences, Plan, Trained, train_pair


@click.command("train")
@click.argument("sharer")
@click.argument("receiver")
@click.option(
    "--data", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True, help="JSONL to learn from."
)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="The pair's folder.")
@click.option("--fuser", "kind", type=click.Choice(sorted(MODES)), default="lite", show_default=True)
@click.option("--mode", type=click.Choice(["fuse", "handover"]), help="Default: what the fuser is made for.")
@click.option(
    "--scope", type=click.Choice(["prompt", "context"]), help="Default: prompt for fuse, context for handover."
)
@click.option("--name", help="Default: the folder's.")
@click.option("--sharer-layers", help="Keep these decoder layers of the sharer only, e.g. 0-9,20-29.")
@click.option("--receiver-layers", help="The same of the receiver.")
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Contexts in a step.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Learning rate. Default: the fuser's own.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--rank", type=click.IntRange(0), default=48, show_default=True, help="Of a lite fuser.")
@click.option("--muon", type=click.FloatRange(0, min_open=True), help="Rate of matrices. Default: the fuser's own.")
@click.option(
    "--hidden", type=click.IntRange(0), default=0, show_default=True, help="Of a lite fuser's block; 0: none."
)
@click.option("--last", type=click.IntRange(0), default=0, show_default=True, help="Slots that lite fuses; 0: all.")
@click.option("--width", type=click.IntRange(1), default=1024, show_default=True, help="Of a c2c fuser.")
@click.option("--tokens", type=click.IntRange(2), default=20_000, show_default=True, help="That a linear fuser reads.")
@click.option(
    "--max-tokens", type=click.IntRange(2), default=1024, show_default=True, help="Longer items are left out."
)
@click.option("--dtype", type=click.Choice(sorted(DTYPES)), default="float32", show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
@click.option("--resume", is_flag=True, help="Go on with a training that was stopped.")
@click.option("--checkpoint-every", type=click.IntRange(1), default=50, show_default=True, help="Steps.")
@click.option("--keep-kv", default="2GiB", show_default=True, help="KV of the frozen models that is kept on disk.")
@click.option("--sharer-licence", help="SPDX name; so of the others. A pair is exported only when all are known.")
@click.option("--receiver-licence")
@click.option("--fuser-licence")
@click.option("--data-licence")
@click.option("--json", "as_json", is_flag=True, help="Progress and result as one JSON object a line.")
def train_command(data: Path, out: Path, sharer: str, receiver: str, **options: Any) -> None:
    """Train a fuser between SHARER and RECEIVER on the items of a JSONL file, and write the pair's folder.

    Each model is a hub id, a folder, a GGUF file or package:NAME; both stay as they are. Lines are chats
    ({"messages": [...]}) or questions ({"question": ..., "answer": ..., "context": ...}). A new pair is unproven: see
    `twolane pair verify`.
    """
    kind, as_json = options["kind"], options["as_json"]
    mode = options["mode"] or MODES[kind][0]
    plan = Plan(
        kind,
        mode,
        options["scope"] or ("context" if mode == "handover" else "prompt"),
        steps=options["steps"],
        seed=options["seed"],
        batch=options["batch"],
        rate=options["rate"] or 0.0,
        rank=options["rank"],
        muon=options["muon"] or 0.0,
        hidden=options["hidden"],
        last=options["last"],
        width=options["width"],
        tokens=options["tokens"],
        most=options["max_tokens"],
    )
    try:
        keeping = Keeping(options["checkpoint_every"], int(str(parse_size(options["keep_kv"]))))
        parties = [
            ModelConfig(model=model, dtype=options["dtype"], layers=layers_of(options[f"{role}_layers"]))
            for role, model in (("sharer", sharer), ("receiver", receiver))
        ]
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        items = read_items(data)
        quiet.disable_progress_bar()  # type: ignore[no-untyped-call]
        loader = Loader(options["device"])
        first, second = (loader.load(party) for party in parties)
        with Bar(plan.steps if kind != "linear" else plan.tokens, as_json=as_json) as tell:
            done = train_pair(
                out,
                options["name"] or out.name,
                first,
                second,
                items,
                plan,
                resume=options["resume"],
                keeping=keeping,
                licences=Licences(*(options[f"{part}_licence"] for part in ("sharer", "receiver", "fuser", "data"))),
                tell=tell,
            )
    except LoadFailed as error:
        click.echo(f"twolane: {error}", err=True)
        sys.exit(1)
    click.echo(json.dumps(_data(out, done)) if as_json else _told(out, done))


def layers_of(text: str | None) -> tuple[int, ...] | None:
    """`0-2,5` -> (0, 1, 2, 5). Raises ValueError."""
    if not text:
        return None
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            found += range(int(first), int(last or first) + 1)
        except ValueError:
            raise ValueError(f"{text!r} names no layers; write e.g. 0-9,20-29") from None
    return tuple(found)


class Bar:
    """Progress: a bar on a terminal, else a line now and then; with `as_json` one object for each step, on stdout."""

    def __init__(self, total: int, *, as_json: bool) -> None:
        self._total, self._json = total, as_json
        self._terminal = not as_json and sys.stderr.isatty()
        self._at = self._told = 0
        self._bar: Any = None

    def __enter__(self) -> Callable[[Progress | Fitting], None]:
        if self._terminal:
            self._bar = click.progressbar(
                length=self._total, file=sys.stderr, show_eta=False, item_show_func=lambda item: item and str(item)
            )
            self._bar.__enter__()
        return self._tell

    def __exit__(self, *exc: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*exc)

    def _tell(self, progress: Progress | Fitting) -> None:
        at = progress.step if isinstance(progress, Progress) else progress.tokens
        if self._json and isinstance(progress, Progress):
            row = {"step": at, "loss": progress.loss, "gates_open": progress.gates_open, "left_s": progress.left_s}
            click.echo(json.dumps(row))
        elif self._bar is not None:
            self._bar.update(at - self._at, progress)
        elif not self._json and (at == self._total or at - self._told >= max(1, self._total // 10)):
            self._told = at
            click.echo(str(progress), err=True)
        self._at = at


def _data(out: Path, done: Trained) -> dict[str, Any]:
    fuser = done.pair.fuser
    return {
        "folder": str(out),
        "name": done.pair.name,
        "fuser": fuser.kind,
        "digest": fuser.digest,
        "parameters": fuser.parameters,
        "mode": done.pair.mode,
        "scope": done.pair.scope,
        "loss": done.loss,
        "resumed_at": done.resumed_at,
        "kv_computed": done.computed,
        "kv_reused": done.reused,
        "seconds": done.pair.training.seconds if done.pair.training else None,
    }


def _told(out: Path, done: Trained) -> str:
    fuser, training = done.pair.fuser, done.pair.training
    parts = [f"{out}: {fuser.kind}, {fuser.parameters / 1e6:.2f} M parameters"]
    parts.append(f"{done.pair.mode} over the {done.pair.scope}")
    if done.loss is not None:
        parts.append(f"loss {done.loss:.3f}")
    if training is not None:
        parts.append(f"{training.seconds:.0f} s")
    if done.reused:
        parts.append(f"KV of {done.computed} contexts computed and used again {done.reused} times")
    return f"{', '.join(parts)}\nIt is unproven: twolane pair verify {out} --data FILE"
