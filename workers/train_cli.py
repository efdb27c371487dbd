"""`twolane pair train`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from transformers.utils import logging as quiet

from workers import together
from workers.config import Fleet, ModelConfig, parse_size
from workers.errors import LoadFailed
from workers.fit_linear import Progress as Fitting
from workers.items import read_items
from workers.kept import keeping
from workers.loader import DTYPES, Loader
from workers.options import SEED, Finite
from workers.pairs import is_plain
from workers.plan import MODES, Plan
from workers.together import Elsewhere, Team
from workers.train import Progress
from workers.train_pair import Licences, Trained, train_pair

_TELL_EVERY = 60.0
"""Seconds without a line, at most, where there is no terminal."""


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
@click.option("--rate", type=Finite(0, 1e9, min_open=True), help="Learning rate. Default: the fuser's own.")
@click.option("--seed", type=SEED, default=0, show_default=True)
@click.option("--rank", type=click.IntRange(0), default=48, show_default=True, help="Of a lite fuser.")
@click.option("--muon", type=Finite(0, 1e9), help="Rate of matrices; 0: AdamW's. Default: the fuser's own.")
@click.option(
    "--hidden", type=click.IntRange(0), default=0, show_default=True, help="Of a lite fuser's block; 0: none."
)
@click.option("--last", type=click.IntRange(0), default=0, show_default=True, help="Slots that lite fuses; 0: all.")
@click.option(
    "--deepest",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Sharer layers that a lite fuser of any two models reads, counted from the end; 0: all.",
)
@click.option(
    "--dropout",
    type=Finite(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Share of its inputs that such a fuser is trained without.",
)
@click.option("--add-only", is_flag=True, help="A lite fuser in fuse adds to the receiver's own KV without reading it.")
@click.option("--width", type=click.IntRange(1), default=1024, show_default=True, help="Of a c2c fuser.")
@click.option("--tokens", type=click.IntRange(2), default=20_000, show_default=True, help="That a linear fuser reads.")
@click.option(
    "--max-tokens", type=click.IntRange(2), default=1024, show_default=True, help="Longer items are left out."
)
@click.option("--dtype", type=click.Choice(sorted(DTYPES)), default="float32", show_default=True)
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
@click.option("--resume", is_flag=True, help="Go on with a training that was stopped.")
@click.option("--checkpoint-every", type=click.IntRange(1), default=50, show_default=True, help="Steps.")
@click.option(
    "--keep-kv",
    default="2GiB",
    show_default=True,
    help="KV of the frozen models that is kept for this run and others; 0 for none.",
)
@click.option("--sharer-licence", help="SPDX name; so of the others. A pair is exported only when all are known.")
@click.option("--receiver-licence")
@click.option("--fuser-licence")
@click.option("--data-licence")
@click.option(
    "--config", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Keep KV in this router's store."
)
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="That share each batch.")
@click.option("--json", "as_json", is_flag=True, help="Progress and result as one JSON object a line.")
@click.pass_obj
def train_command(read_fleet: ReadFleet | None, /, **options: Any) -> None:
    """Train a fuser between SHARER and RECEIVER on the items of a JSONL file, and write the pair's folder.

    Each model is a hub id, a folder, a GGUF file or package:NAME; both stay as they are. Lines are chats
    ({"messages": [...]}) or questions ({"question": ..., "answer": ..., "context": ...}). A new pair is unproven: see
    `twolane pair verify`.

    With --processes N, each takes a share of every batch: on a GPU of its own where there are GPUs, else on the CPU.
    On several machines start this command by `accelerate launch` in place of that, with --out in a shared folder.
    """
    asked = _asked(options, read_fleet)
    if options["processes"] == 1:
        status = work(asked)
    elif "WORLD_SIZE" in os.environ:
        raise click.UsageError("--processes, or the launcher's own number of processes, not both")
    else:
        status = together.start(options["processes"], work, asked)
        if why := ended_by(status):
            click.echo(f"twolane: {why}{_goes_on(asked.out)}", err=True)
    if status:
        sys.exit(status)


def ended_by(status: int) -> str:
    """What is to be said of processes of which one was ended from outside: it said nothing itself."""
    return f"one of the processes was ended by signal {status - 128}" if status > 128 + signal.SIGINT else ""


def _goes_on(out: Path) -> str:
    return f"; {out} goes on with --resume" if (out / "training").exists() else ""


ReadFleet = Callable[[Path], Fleet]
"""How a configuration is read; of the command above this one."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The command's options, understood. Goes to the processes that this one starts."""

    data: Path
    out: Path
    name: str
    parties: tuple[ModelConfig, ModelConfig]
    plan: Plan
    resume: bool
    every: int
    keep_kv: int
    fleet: Fleet | None
    """Whose store keeps KV; None for the user's own."""
    licences: Licences
    device: str
    as_json: bool


def _asked(options: dict[str, Any], read_fleet: ReadFleet | None) -> Asked:
    kind = options["kind"]
    name = options["name"] or options["out"].absolute().name
    if not is_plain(name):
        raise click.UsageError(f"--name {name!r} is not the name of a folder")
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
        muon=options["muon"],
        hidden=options["hidden"],
        last=options["last"],
        deepest=options["deepest"],
        dropout=options["dropout"],
        add_only=options["add_only"],
        width=options["width"],
        tokens=options["tokens"],
        most=options["max_tokens"],
    )
    try:
        keep_kv = int(str(parse_size(options["keep_kv"])))
        sharer, receiver = (
            ModelConfig(model=options[role], dtype=options["dtype"], layers=layers_of(options[f"{role}_layers"]))
            for role in ("sharer", "receiver")
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return Asked(
        data=options["data"],
        out=options["out"],
        name=name,
        parties=(sharer, receiver),
        plan=plan,
        resume=options["resume"],
        every=options["checkpoint_every"],
        keep_kv=keep_kv,
        fleet=read_fleet(options["config"]) if options["config"] and read_fleet else None,
        licences=Licences(*(options[f"{part}_licence"] for part in ("sharer", "receiver", "fuser", "data"))),
        device=options["device"],
        as_json=options["as_json"],
    )


def work(asked: Asked) -> int:
    """Train, in this process and in whatever others the environment names. Returns the exit status."""
    quiet.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        team = together.join(asked.device)
        told = _trained(asked, team)
        team.leave()
    except Elsewhere:
        return 0  # the status is that of the process that says why
    except LoadFailed as error:
        click.echo(f"twolane: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            click.echo(f"twolane: stopped{_goes_on(asked.out)}", err=True)
        return 130
    if told is not None:
        click.echo(told)
    return 0


def _trained(asked: Asked, team: Team) -> str | None:
    """What is to be told in the end; None in all processes but the first."""
    store = asked.fleet.store if asked.fleet else None
    redis = asked.fleet.redis if asked.fleet else None
    with ExitStack() as stack:
        with team.agreeing():
            items = read_items(asked.data)
            loader = Loader(str(team.device or asked.device))
            sharer, receiver = (loader.load(party) for party in asked.parties)
            kept = stack.enter_context(keeping(asked.keep_kv // team.size, store, redis))
        tell = None
        if team.rank == 0:
            total = asked.plan.tokens if asked.plan.kind == "linear" else asked.plan.steps
            tell = stack.enter_context(Bar(total, as_json=asked.as_json))
        done = train_pair(
            asked.out,
            asked.name,
            sharer,
            receiver,
            items,
            asked.plan,
            resume=asked.resume,
            every=asked.every,
            licences=asked.licences,
            tell=tell,
            reads=kept,
            team=team,
        )
        count = torch.tensor([kept.computed, kept.found], device=team.device)
        team.add([count])
    if done is None:
        return None
    computed, found = count.tolist()
    return (
        json.dumps(_data(asked.out, done, computed, found))
        if asked.as_json
        else _told(asked.out, done, computed, found)
    )


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
        self._told_at = time.monotonic()
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
        elif not self._json and self._due(at):
            self._told, self._told_at = at, time.monotonic()
            click.echo(str(progress), err=True)
        self._at = at

    def _due(self, at: int) -> bool:
        tenth = at - self._told >= max(1, self._total // 10)
        return tenth or at >= self._total or time.monotonic() - self._told_at >= _TELL_EVERY


def _data(out: Path, done: Trained, computed: int, found: int) -> dict[str, Any]:
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
        "left_out": done.left_out,
        "kv_computed": computed,
        "kv_reused": found,
        "seconds": done.pair.training.seconds if done.pair.training else None,
    }


def _told(out: Path, done: Trained, computed: int, found: int) -> str:
    fuser, training = done.pair.fuser, done.pair.training
    parts = [f"{out}: {fuser.kind}, {fuser.parameters / 1e6:.2f} M parameters"]
    parts.append(f"{done.pair.mode} over the {done.pair.scope}")
    if done.loss is not None:
        parts.append(f"loss {done.loss:.3f}")
    if training is not None:
        parts.append(f"{training.seconds:.0f} s")
    if done.left_out:
        parts.append(f"{done.left_out} items left out (too long, or nothing to learn from)")
    if computed or found:
        parts.append(f"{computed} texts read by a model, {found} found as kept KV")
    return f"{', '.join(parts)}\nIt is unproven: twolane pair verify {out} --data FILE"
