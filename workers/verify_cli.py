"""`twolane pair verify`."""

from __future__ import annotations

import datetime
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import msgspec
from transformers.utils import logging as quiet

from workers import pairs, verifying
from workers.asking import Asker
from workers.config import Fleet, ModelConfig, PairConfig
from workers.controls import adapter
from workers.counterfactual import otherwise, sharers_alone
from workers.engine import Engine
from workers.errors import LoadFailed, WorkerError
from workers.items import Chosen, Item, digest_of_items, read_items
from workers.loader import Loaded, Loader
from workers.options import SEED, Finite
from workers.pairing import HeldPair, hold_pair
from workers.pairs import PairFile, Party, Report
from workers.pictures import require_png
from workers.prove import Others, measure_pair, report_of
from workers.public_data import SOURCES, load_public, named
from workers.report_text import for_people, told
from workers.runtime import Alone, Runtime
from workers.verify import numerics
from workers.verifying import Heard, hearing

_CHUNK = 512


@click.command("verify")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--data", required=True, metavar="FILE|NAME[:SPLIT]", help=f"JSONL to ask, or one of {', '.join(SOURCES)}."
)
@click.option(
    "--data-from",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A copy of the named data set's parquet branch, where the hub cannot be reached.",
)
@click.option("--limit", type=click.IntRange(1), help="Ask at most so many items of each kind (of NAME: each subject).")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Draws them.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Default: the pair's folder.")
@click.option("--png", "as_png", is_flag=True, help="Write report.png too; needs the extra `pictures`.")
@click.option("--baseline", help="Another model, to be better than at the same memory and time.")
@click.option("--no-relay", is_flag=True, help="Leave out the text twin, which is the slowest route.")
@click.option("--control", type=click.Choice(["adapter"]), help="Train the fuser again without its sharer, and ask it.")
@click.option(
    "--train-data",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="What the pair was trained on.",
)
@click.option("--max-tokens", type=click.IntRange(1), default=32, show_default=True, help="Of an answer.")
@click.option("--hint-tokens", type=click.IntRange(1), default=128, show_default=True, help="Of a relay's hint.")
@click.option("--min-gain", type=Finite(), default=0.0, show_default=True, help="Of a fuse pair, to be verified.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, ...")
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON object.")
def verify_command(folder: Path, data: str, **options: Any) -> None:
    """Ask items by every route, and write report.json, report.txt and report.svg.

    FOLDER is a pair's; items are those of a JSONL file, or of a public data set by its name. The receiver, the sharer,
    the text twin and the pair answer the same items, and so do controls whose sharer reads another text or says
    nothing. Use items that the pair was not trained on. Exit status 1 when the verdict is not `verified`.
    """
    if options["control"] and not options["train_data"]:
        raise click.UsageError("--control adapter needs --train-data")
    try:
        if options["as_png"]:
            require_png()
        _require_place(options["out"] or folder)
        quiet.disable_progress_bar()  # type: ignore[no-untyped-call]
        report = _verify(folder, _items(pairs.read_pair(folder), data, options), options)
    except WorkerError as error:
        click.echo(f"twolane: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo("twolane: stopped; the same command goes on where it was", err=True)
        sys.exit(130)
    click.echo(msgspec.json.encode(report).decode() if options["as_json"] else told(report))
    try:
        _write(options["out"] or folder, report, as_png=options["as_png"])
        verifying.sweep(options["out"] or folder)
    except LoadFailed as error:
        click.echo(f"twolane: {error}", err=True)
        sys.exit(1)
    sys.exit(0 if report.verdict == "verified" else 1)


def _require_place(out: Path) -> None:
    """Before anything is asked: a report takes long to make. Raises LoadFailed."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise LoadFailed(f"{out}: cannot be written to ({error.strerror})") from error


def _write(out: Path, report: Report, *, as_png: bool) -> None:
    """Raises LoadFailed."""
    pairs.write(out, "report.json", report)
    for_people(out, report, as_png=as_png)


def _items(file: PairFile, data: str, options: dict[str, Any]) -> Chosen:
    """Of a file, or of a public data set where none is called so. Raises LoadFailed."""
    copy: Path | None = options["data_from"]
    public = None if Path(data).is_file() else named(data)
    if public is not None:
        found = load_public(*public, copy)
    elif copy is not None:
        raise click.UsageError(f"--data-from goes with one of {', '.join(SOURCES)}, and {data} is none of them")
    elif Path(data).is_file():
        found = Chosen(read_items(Path(data)))
    else:
        raise click.UsageError(
            f"--data {data}: no such file, and no data set of that name; there are {', '.join(SOURCES)}"
        )
    learnt: list[Item] = read_items(options["train_data"]) if options["train_data"] else []
    if not learnt and file.training is not None and file.training.data == digest_of_items(found.items):
        learnt = found.items
    found = found.once()
    if options["limit"] is not None:
        found = found.drawn(options["limit"], options["seed"])
    return found.beside(learnt) if learnt else found


def hold(folder: Path, loader: Loader) -> tuple[HeldPair, PairFile]:
    """The pair of a folder, with the models that its `pair.json` names. Raises LoadFailed."""
    file = pairs.read_pair(folder)
    sharers = tuple(_model(party) for party in (file.sharer, *file.others))
    named: dict[str, Any] = {"sharers": sharers} if file.others else {"sharer": sharers[0]}
    config = PairConfig(name=file.name, receiver=_model(file.receiver), fuser=str(folder.absolute()), **named)
    return hold_pair(Fleet(models=(), pairs=(config,)), config, loader, None, _CHUNK), file


def _model(party: Party) -> ModelConfig:
    layers = None if party.layers == "all" else tuple(map(int, party.layers.split(",")))
    return ModelConfig.model_validate(
        {"model": party.model, "revision": party.revision, "dtype": party.dtype, "layers": layers}
    )


def _verify(folder: Path, found: Chosen, options: dict[str, Any]) -> Report:
    loader = Loader(options["device"])
    held, file = hold(folder, loader)
    with ExitStack() as stack:
        others = _others(file, held, loader, options, stack)
        engine = Engine({}, pack=False)
        engine.start()
        stack.callback(engine.close)
        asker = Asker(engine, most=options["max_tokens"], hint=options["hint_tokens"])
        heard = stack.enter_context(hearing(options["out"] or folder, _asked(held, found, others, options)))
        if heard.earlier:
            click.echo(f"twolane: {heard.earlier} items were asked before this was stopped", err=True)
        tell = stack.enter_context(_bar(options["as_json"]))
        relay = not options["no_relay"]
        measured = measure_pair(held, found.items, asker, relay=relay, others=others, tell=tell, heard=heard)
    return report_of(
        held,
        measured,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        seeds=found.seeds,
        others=others,
        min_gain=options["min_gain"],
        notes=(*found.notes, *_baseline_note(options["baseline"], others), *_stopped_note(heard)),
    )


def _asked(held: HeldPair, found: Chosen, others: Others, options: dict[str, Any]) -> dict[str, object]:
    """All that answers follow from."""
    baseline = others.baseline.decoder.identity if others.baseline is not None else None
    adapter = digest_of_items(read_items(options["train_data"])) if options["control"] else None
    return {
        "fingerprint": held.state.fingerprint,
        "numerics": numerics(held.runtime.decoder),
        "data": digest_of_items(found.items),
        "options": [options["max_tokens"], options["hint_tokens"], options["no_relay"]],
        "baseline": baseline,
        "adapter": adapter,
    }


def _stopped_note(heard: Heard) -> tuple[str, ...]:
    if not heard.earlier:
        return ()
    return (f"{heard.earlier} of the items were asked in an earlier run, which was stopped; times are of both.",)


def _baseline_note(name: str | None, others: Others) -> tuple[str, ...]:
    """By its digest too; of a folder the last part, as a report goes out with its pair."""
    if name is None or others.baseline is None:
        return ()
    known = Path(name).name if Path(name).exists() else name
    return (f"The baseline is {known}, weights {others.baseline.decoder.digests.weights[:12]}.",)


def _others(file: PairFile, held: HeldPair, loader: Loader, options: dict[str, Any], stack: ExitStack) -> Others:
    receiver = otherwise(held.runtime, "receiver", None).decoder
    sharers = {name: alone.decoder for name, alone in sharers_alone(held.runtime).items()}
    models = {"receiver": receiver, **sharers}
    size = {route: _bytes(model) for route, model in models.items()}
    whole: dict[str, int] = {}
    for route, model in models.items():
        # The same weights lie in memory once, the layers that are kept with them.
        weights = model.digests.weights
        whole[weights] = max(size[route], whole.get(weights, 0))
    size["cache"] = file.fuser.parameters * receiver.dtype.itemsize + sum(whole.values())
    control: Runtime | None = None
    if options["control"]:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        control = adapter(file, sharers["sharer"], receiver, read_items(options["train_data"]), place, _CHUNK)
    baseline: Runtime | None = None
    if options["baseline"]:
        loaded = loader.load(ModelConfig.model_validate({"model": options["baseline"], "dtype": file.receiver.dtype}))
        baseline = Alone("baseline", loaded, None, _CHUNK)
        size["baseline"] = _bytes(loaded)
    return Others(control, baseline, size)


def _bytes(loaded: Loaded) -> int:
    return sum(p.numel() * p.element_size() for p in loaded.model.parameters())


def _bar(as_json: bool) -> Any:
    """Progress on stderr where that is a terminal."""
    if as_json or not sys.stderr.isatty():
        return _Quiet()
    return _Shown()


class _Quiet:
    def __enter__(self) -> Callable[[int, int], None]:
        return lambda done, total: None

    def __exit__(self, *exc: Any) -> None:
        pass


class _Shown:
    def __init__(self) -> None:
        self._bar: Any = None

    def __enter__(self) -> Callable[[int, int], None]:
        return self._tell

    def _tell(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = click.progressbar(length=total, file=sys.stderr, label="items")
            self._bar.__enter__()
        self._bar.update(1)

    def __exit__(self, *exc: Any) -> None:
        if self._bar is not None:
            self._bar.__exit__(*exc)
