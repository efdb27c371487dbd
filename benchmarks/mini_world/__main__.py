"""A pair whose sharer matters, made from nothing: `python -m benchmarks.mini_world`.

Trains two tiny models with tokenizers of their own for each seed, checks that the relay between them is fair, trains a
fuser between them, asks all questions about the test entities by every route, and writes `report.json`, `accuracy.svg`
and `latency.svg` beside this file. About ten minutes of CPU for each seed, two seeds at a time. `README.md` says what
is asked, and what was tried.

    --prepare DIR --seed N    only the two models and the JSONL files, for `twolane pair check|train|verify`
    --variants                several fusers on one world, judged on its validation entities
    --quick                   a world of a few entities and models that learn next to nothing: does everything run?
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from benchmarks.mini_world import pictures, variants
from benchmarks.mini_world.measure import ask, fit
from benchmarks.mini_world.models import Lessons, Recipe
from benchmarks.mini_world.prepare import MOST, GateFailed, Gates, Plan, prepare
from benchmarks.mini_world.report import report_of, table
from benchmarks.mini_world.world import Size
from workers.items import read_items
from workers.plan import Plan as Training

HERE = Path(__file__).parent
QUICK = Plan(
    seed=0,
    size=Size(entities=8, validation=2, test=2),
    recipe=Recipe(Lessons(2, 12, 700, (0.5, 0.5), batch=8), Lessons(2, 12, 900, (0.5, 0.5), batch=8)),
    gates=Gates(0.0, 0.0, 0.0, 0.0, tries=1),
)


def plan_of(options: argparse.Namespace, seed: int) -> Plan:
    return replace(QUICK, seed=seed) if options.quick else Plan(seed)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def fuser_of(options: argparse.Namespace, seed: int) -> Training:
    plan = replace(variants.CHOSEN[options.fuser], seed=seed)
    return variants.quickly(plan) if options.quick else plan


def asked(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """All that an outcome follows from, as JSON gives it back."""
    plans = {"world": asdict(plan_of(options, seed)), "fuser": asdict(fuser_of(options, seed))}
    found: dict[str, Any] = json.loads(json.dumps(plans))
    return found


def one_world(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Everything of one seed."""
    place = prepare(options.work / f"seed-{seed}", plan_of(options, seed), tell)
    # All choices are made by now: the entities that they were made on are learnt from, too.
    fitted = fit(place, options.fuser, fuser_of(options, seed), tell, splits=("train", "validation"))
    most = 3 if options.quick else MOST
    outcome = ask(fitted, read_items(place.data("test")), date=today(), seed=seed, most=most)
    tell(f"seed {seed}: {outcome.mean}")
    return {
        "seed": seed,
        "asked": asked(options, seed),
        **asdict(outcome),
        "gates": place.found,
        "fuser_parameters": fitted.parameters,
        "fuser_cpu_s": fitted.cpu_s,
    }


def all_worlds(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Each seed in a process of its own with one thread, `--jobs` at a time. What a run that was stopped has found is
    not looked for again.
    """

    def run(seed: int) -> dict[str, Any]:
        out = options.work / f"outcome-{seed}.json"
        before: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        if before.get("asked") == asked(options, seed):
            return before
        command = [sys.executable, "-m", "benchmarks.mini_world", "--one", str(out), "--seed", str(seed)]
        command += ["--work", str(options.work), "--fuser", options.fuser, *(["--quick"] if options.quick else [])]
        if subprocess.run(command, cwd=HERE.parents[1], check=False).returncode:
            raise SystemExit(f"seed {seed} failed")
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    with ThreadPoolExecutor(options.jobs) as pool:
        return list(pool.map(run, options.seeds))


def write(out: Path, report: dict[str, Any]) -> None:
    """The report and its pictures."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (out / "accuracy.svg").write_text(pictures.accuracy(report))
    (out / "latency.svg").write_text(pictures.latency(report))


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--fuser", choices=sorted(variants.CHOSEN), default=variants.DEFAULT)
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time, one thread each")
    parser.add_argument("--work", type=Path, help="where models are made, and found again; default: a temporary folder")
    parser.add_argument("--out", type=Path, help="default: beside this file; nowhere with --quick")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--prepare", type=Path, metavar="DIR")
    parser.add_argument("--variants", nargs="*", metavar="NAME", help="names, or none for all")
    parser.add_argument("--seed", type=int, default=0, help="of --prepare and --variants")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    if options.prepare:
        prepare(options.prepare, plan_of(options, options.seed), tell)
        return
    with tempfile.TemporaryDirectory() as aside:
        options.work = options.work or Path(aside)
        options.work.mkdir(parents=True, exist_ok=True)
        if options.one:
            options.one.write_text(json.dumps(one_world(options, options.seed)))
            return
        if options.variants is not None:
            place = prepare(options.work / f"seed-{options.seed}", plan_of(options, options.seed), tell)
            variants.compare(place, options.variants, quick=options.quick, tell=print)
            return
        worlds = all_worlds(options)
    fuser = {**worlds[0]["asked"]["fuser"], "parameters": worlds[0]["fuser_parameters"]}
    report = report_of(worlds, date=today(), fuser=fuser)
    print(table(report))
    if options.out or not options.quick:
        write(options.out or HERE, report)


if __name__ == "__main__":
    try:
        main()
    except GateFailed as failed:
        sys.exit(str(failed))
