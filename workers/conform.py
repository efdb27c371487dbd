"""Does this build compute what the official code computed? Runs a folder of vectors that the official code produced.

The folder may hold `projector/` (networks alone), `e2e/CASE/` (tiny models, fusers and what a run gave) and
`alignment/` (tokenizers and aligned chats); every file of a known layout found there is one or more cases.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import click
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from workers.c2c_run import (
    Example,
    Prompt,
    Run,
    Section,
    Sharer,
    batch_loss,
    collate,
    greedy,
    layers_of,
    prefill,
    sections_of,
)
from workers.conform_align import aligned_prompt, alignment, json_of
from workers.conform_checks import ATOL, BF16_ATOL, BF16_RTOL, RTOL, Case, Cases, Checks
from workers.errors import LoadFailed
from workers.fusers.c2c import Fusion, load_official, projector_shape
from workers.fusers.projector import KINDS, LAYER_MAPS, C2CProjector, ProjectorShape, temperature
from workers.loader import kv_shape


def conform(folder: Path) -> list[Case]:
    """Every case found, in the order of their files."""
    cases = Cases()
    with _one_thread():
        for file in sorted((folder / "projector").glob("*.projector.json")):
            _projector(cases, file)
        for file in sorted((folder / "projector").glob("*.safetensors")):
            if not file.with_name(f"{file.stem}.projector.json").exists():
                cases.broken(f"projector/{file.stem}", "no .projector.json says what network it is of")
        _tables(cases, folder / "projector")
        for place in sorted(p for p in (folder / "e2e").glob("*") if p.is_dir()):
            _end_to_end(cases, place)
        alignment(cases, folder / "alignment")
    return cases.found


@contextmanager
def _one_thread() -> Iterator[None]:
    """The vectors were made with one thread; more add in another order, which is already more than the tolerance."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _projector(cases: Cases, file: Path) -> None:
    stem = file.name.removesuffix(".projector.json")
    name = f"projector/{stem}"
    with cases.case(f"{name} eval") as checks:
        projector, tensors = _read_projector(file, stem)
        narrow = tensors["in.target_key"].dtype != torch.float32
        tolerance = {"rtol": 0.0, "atol": BF16_ATOL} if narrow else {}
        with torch.no_grad():
            fused = projector(_kv(tensors, "in.source"), _kv(tensors, "in.target"))
        for kind, got, own in zip(KINDS, fused, _kv(tensors, "in.target"), strict=True):
            if projector.is_open(kind):
                checks.same(f"{kind} dtype", str(got.dtype), str(tensors[f"out.{kind}"].dtype))
            else:
                checks.same(f"{kind} is the receiver's own", torch.equal(got, own), True)
            checks.close(f"out.{kind}", got, tensors[f"out.{kind}"], **tolerance)
            if (mid := tensors.get(f"mid.{kind}_weight")) is not None:
                with torch.no_grad():
                    weight, _ = projector.weight_and_feature(kind, tensors[f"in.source_{kind}"], own)
                checks.close(f"mid.{kind}_weight", weight, mid, **tolerance)
            if (written := tensors.get(f"out.{kind}_written_to_bf16_cache")) is not None:
                checks.close(f"out.{kind}_written_to_bf16_cache", got.to(written.dtype), written, rtol=BF16_RTOL)
        _described(checks, file, stem, projector, tensors)
    if _has(file.with_name(f"{stem}.safetensors"), "train.out.key"):
        with cases.case(f"{name} train") as checks:
            _train_projector(checks, file, stem)


def _described(checks: Checks, file: Path, stem: str, projector: C2CProjector, tensors: dict[str, Tensor]) -> None:
    """What the files beside the tensors say of them."""
    dtypes = {"state": projector.get_parameter("key_in.weight").dtype, "out": tensors["out.key"].dtype}
    names = {key: str(dtype).removeprefix("torch.") for key, dtype in dtypes.items()}
    dtype = json_of(file)["init_args"].get("dtype")
    if isinstance(dtype, dict):
        checks.same("init_args.dtype", dtype.get("value"), names["state"])
    meta = file.with_name(f"{stem}.meta.json")
    said = json_of(meta) if meta.exists() else {}
    batch, _, slots, _ = tensors["in.target_key"].shape
    for key, found in (("B", batch), ("N", slots), ("dtype", names["state"]), ("out_dtype", names["out"])):
        checks.same(key, found, said.get(key, found))


def _has(file: Path, tensor: str) -> bool:
    try:
        with safe_open(file, framework="pt") as tensors:
            return tensor in tensors.keys()  # noqa: SIM118 - safe_open is no mapping
    except (OSError, SafetensorError):
        return False  # the evaluation case says so


def _read_projector(file: Path, stem: str) -> tuple[C2CProjector, dict[str, Tensor]]:
    tensors = load_file(file.with_name(f"{stem}.safetensors"))
    projector = C2CProjector(replace(projector_shape(file), dropout=0.0))
    state = {k.removeprefix("state."): t for k, t in tensors.items() if k.startswith("state.")}
    projector.load_state_dict(state, assign=True)
    return projector.eval(), tensors


def _kv(tensors: dict[str, Tensor], prefix: str) -> tuple[Tensor, Tensor]:
    return tensors[f"{prefix}_key"], tensors[f"{prefix}_value"]


def _train_projector(checks: Checks, file: Path, stem: str) -> None:
    projector, tensors = _read_projector(file, stem)
    projector.train()
    projector.anneal(json_of(file.with_name(f"{stem}.meta.json"))["train_step"])
    checks.close("train.temperature", projector.gate_temperature, tensors["train.temperature"])
    fused = projector(_kv(tensors, "in.source"), _kv(tensors, "in.target"), _kv(tensors, "train.u"))
    loss = torch.zeros(())
    for kind, got, sign in zip(KINDS, fused, (1.0, -1.0), strict=True):
        checks.close(f"train.out.{kind}", got, tensors[f"train.out.{kind}"])
        loss = loss + (got.flatten() * torch.linspace(-sign, sign, got.numel())).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    _gradients(checks, "train.grad.", tensors, projector.get_parameter)


def _gradients(checks: Checks, prefix: str, tensors: dict[str, Tensor], find: Callable[[str], Tensor]) -> None:
    for name, want in tensors.items():
        if name.startswith(prefix):
            got = find(name.removeprefix(prefix)).grad
            # A closed path is not computed, so it has no gradient where the official one has zeros.
            checks.close(name, torch.zeros_like(want) if got is None else got, want)


def _tables(cases: Cases, folder: Path) -> None:
    if (file := folder / "temperature_schedule.json").exists():
        with cases.case("projector/temperature_schedule") as checks:
            table = json_of(file)
            shape = ProjectorShape(
                1,
                1,
                initial_temperature=table["initial"],
                final_temperature=table["final"],
                anneal_steps=table["anneal_steps"],
            )
            for step, want in table["step_to_temperature"]:
                checks.close(f"step {step}", torch.tensor(temperature(shape, step)), torch.tensor(want), atol=0.0)
    if (file := folder / "layer_mapping.json").exists():
        with cases.case("projector/layer_mapping") as checks:
            for row in json_of(file):
                for name in row.keys() - {"targets", "sources"}:
                    label = f"{name} {row['targets']} from {row['sources']}"
                    checks.same(label, list(LAYER_MAPS[name](row["targets"], row["sources"])), row[name])


def _end_to_end(cases: Cases, place: Path) -> None:
    name = f"e2e/{place.name}"
    files = sorted(place.glob("expected*.json"))
    try:
        receiver, sharers, fusion = _models(place)
    except Exception as error:  # transformers raises all kinds for a model that it cannot read
        cases.broken(name, f"cannot be loaded: {error}")
        return
    if not files:
        cases.broken(name, "no expected*.json says what a run gave")
    used: set[Path] = set()
    for file in files:
        label = f"{name}{file.stem.removeprefix('expected').replace('_', '/', 1)}"
        try:
            expected = json_of(file)
        except ValueError as error:
            cases.broken(label, f"not JSON: {error}")
            continue
        if not isinstance(expected, dict) or not (expected.get("runs") or "features" in expected):
            cases.broken(label, "names no runs")
            continue
        if "features" in expected:
            used.add(file.with_suffix(".safetensors"))
            with cases.case(label) as checks:
                _batch(checks, receiver, sharers, expected, load_file(file.with_suffix(".safetensors")), fusion)
            continue
        if "messages" in expected:
            with cases.case(f"{label}/alignment") as checks:
                aligned_prompt(checks, place, expected)
        for run, facts in expected.get("runs", {}).items():
            tensors = next(
                (f for f in (place / f"{file.stem}_{run}.safetensors", file.with_suffix(".safetensors")) if f.exists()),
                place / f"{file.stem}_{run}.safetensors",
            )
            used.add(tensors)
            mode: Fusion = "parallel" if run.startswith("parallel") else fusion
            mode = "sequential" if run.startswith("sequential") else mode
            with cases.case(f"{label}/{run}") as checks:
                response, ids = "include_response" in file.stem, expected.get("input_ids")
                _run(checks, receiver, sharers, facts, load_file(tensors), mode, response, ids)
    for orphan in sorted(set(place.glob("expected*.safetensors")) - used):
        cases.broken(f"{name}/{orphan.stem}", "no expected*.json says how it was made")


def _models(place: Path) -> tuple[Any, list[Sharer], Fusion]:
    from transformers import AutoModelForCausalLM

    def load(folder: Path) -> Any:
        auto: Any = AutoModelForCausalLM
        model, told = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        for what in ("missing_keys", "unexpected_keys"):
            if found := sorted(told[what]):
                # transformers would fill in what is missing at random, and leave out what it does not know.
                raise LoadFailed(f"{folder.name}: {what.replace('_', ' ')}: {', '.join(found)}")
        return model.eval().requires_grad_(False)

    receiver = load(place / "receiver")
    sharers, fusion = [], None
    for folder in sorted((p for p in place.glob("sharer*") if p.is_dir()), key=_number):
        model = load(folder)
        official = load_official(
            place / folder.name.replace("sharer", "fuser"),
            receiver=kv_shape(receiver.config),
            sharer=kv_shape(model.config),
        )
        sharers.append(Sharer(model, official.fuser))
        fusion = fusion or official.fusion
    return receiver, sharers, fusion or "sequential"


def _number(folder: Path) -> tuple[int, str]:
    digits = folder.name.rpartition("_")[2]
    return (int(digits) if digits.isdigit() else 0, folder.name)


def _prompt(tensors: dict[str, Tensor], sections: Sequence[Section]) -> Prompt:
    if "input_ids" in tensors:
        return Prompt(tensors["input_ids"], tuple(sections))
    # Two tokenizers: one more set of ids and one more mask per sharer.
    theirs = sorted(k for k in tensors if k.startswith("input_ids.sharer"))
    return Prompt(
        tensors["input_ids.receiver"],
        tuple(sections),
        sharer_ids=tuple(tensors[k] for k in theirs),
        mask=tensors["attention_mask.receiver"],
        sharer_masks=tuple(tensors[k.replace("input_ids", "attention_mask")] for k in theirs),
        positions=tensors["position_ids"],
    )


def _run(
    checks: Checks,
    receiver: Any,
    sharers: Sequence[Sharer],
    facts: dict[str, Any],
    tensors: dict[str, Tensor],
    fusion: Fusion,
    include_response: bool,
    ids: list[list[int]] | None,
) -> None:
    prompt = _prompt(tensors, [Section(code, length) for code, length in facts["sections"]])
    if ids is not None:
        checks.same("input_ids", prompt.ids.tolist(), ids)

    def read() -> Run:
        return prefill(receiver, sharers, prompt, fusion=fusion, include_response=include_response, idle_sharers=True)

    run = read()
    checks.close("logits_last", run.logits[0, -1], tensors["logits_last"])
    _caches(checks, "fused", run.cache, tensors)
    for q, cache in enumerate(run.sharer_caches, start=1):
        _caches(checks, f"sharer_{q}", cache, tensors)
    # The official decoding forgets the mask; vectors made with it kept have a prefix of their own.
    _continued(checks, run, "", tensors, facts.get("min_top2_margin"), official_mask=True)
    if "padmasked.greedy_tokens" in tensors:
        _continued(checks, read(), "padmasked.", tensors, facts.get("padmasked_min_margin"), official_mask=False)
    for said, tensor in (("greedy", "greedy_tokens"), ("padmasked_greedy", "padmasked.greedy_tokens")):
        if facts.get(said):
            checks.same(said, tensors[tensor].tolist(), facts[said])
    if any(k.startswith("receiver_alone.") for k in tensors):
        alone = prefill(receiver, (), replace(prompt, sections=(Section(-1, prompt.ids.shape[1]),)))
        _caches(checks, "receiver_alone", alone.cache, tensors)
        checks.close("receiver_alone.logits_last", alone.logits[0, -1], tensors["receiver_alone.logits_last"])
        if facts.get("receiver_alone_greedy"):
            tokens, _ = greedy(alone, len(facts["receiver_alone_greedy"]), official_mask=True)
            checks.same("receiver_alone_greedy", tokens[0].tolist(), facts["receiver_alone_greedy"])


def _caches(checks: Checks, prefix: str, cache: Any, tensors: dict[str, Tensor]) -> None:
    layers = layers_of(cache)
    for name, want in tensors.items():
        head, _, rest = name.partition(".")
        kind, _, layer = rest.partition(".")
        if head == prefix and kind in ("key", "value") and layer:
            held = layers[int(layer)]
            checks.close(name, held.keys if kind == "key" else held.values, want)


def _continued(
    checks: Checks, run: Run, prefix: str, tensors: dict[str, Tensor], margin: float | None, *, official_mask: bool
) -> None:
    """`margin`: the smallest distance from the best logit to the second in any step."""
    want = tensors[f"{prefix}greedy_tokens"]
    tokens, logits = greedy(run, len(want), official_mask=official_mask)
    checks.same(f"{prefix}greedy_tokens", tokens[0].tolist(), want.tolist())
    checks.close(f"{prefix}step_logits", logits[0], tensors[f"{prefix}step_logits"])
    if margin is not None:
        best = logits[0].topk(2, dim=-1).values
        least = (best[:, 0] - best[:, 1]).min()
        # Of two logits, each with its own error.
        atol = 2 * (ATOL + RTOL * float(best.abs().max()))
        checks.close(f"{prefix}margin", least, torch.tensor(margin), atol=atol)


def _batch(
    checks: Checks,
    receiver: Any,
    sharers: Sequence[Sharer],
    expected: dict[str, Any],
    tensors: dict[str, Tensor],
    fusion: Fusion,
) -> None:
    examples = [
        Example(f["input_ids"], f["labels"], [code for code, _ in f["kv_cache_index"]]) for f in expected["features"]
    ]
    batch = collate(examples, expected["pad_token_id"])
    for name, got in (
        ("input_ids", batch.prompt.ids),
        ("labels", batch.labels),
        ("attention_mask", batch.prompt.mask),
        ("position_ids", batch.prompt.positions),
    ):
        if name in tensors and got is not None:
            checks.same(name, got.float().flatten().tolist(), tensors[name].float().flatten().tolist())
    checks.same("sections", *_indices(expected["features"], tensors))
    trained = [p for s in sharers for m in s.fuser.projectors.values() for p in m.parameters()]
    for parameter in trained:
        parameter.requires_grad_(True)
    try:
        result = batch_loss(receiver, sharers, batch, fusion=fusion)
        result.loss.backward()  # type: ignore[no-untyped-call]
        checks.close("loss", result.loss.reshape(1), tensors["loss"].reshape(1))
        if "loss" in expected:
            checks.close("loss as told", result.loss, torch.tensor(expected["loss"]))
        if "logits_last_section" in tensors:
            checks.close("logits_last_section", result.logits, tensors["logits_last_section"])
        _gradients(checks, "grad.", tensors, lambda name: _parameter(sharers[0], name))
    finally:
        for parameter in trained:
            parameter.requires_grad_(False)
            parameter.grad = None


def _indices(features: Sequence[dict[str, Any]], tensors: dict[str, Tensor]) -> tuple[list[Any], list[Any]]:
    """The batch's `kv_cache_index`, one list per section, of the features and of the vectors."""
    split = []
    for feature in features:
        index = feature["kv_cache_index"]
        ends = accumulate(s.length for s in sections_of([code for code, _ in index]))
        split.append([index[start:end] for start, end in pairwise((0, *ends))])
    made = []
    for column in zip(*split, strict=True):
        width = max(map(len, column))
        made.append([[*part, *[[-1, -1]] * (width - len(part))] for part in column])
    return made, [tensors[f"kv_cache_index.section_{i}"].tolist() for i in range(len(made))]


def _parameter(sharer: Sharer, name: str) -> Tensor:
    projector, _, rest = name.partition(".")
    return sharer.fuser.projectors[int(projector.removeprefix("projector_"))].get_parameter(rest)


@click.command("conform")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object per case.")
def conform_command(folder: Path, as_json: bool) -> None:
    """Compare this build with vectors that the official Cache-to-Cache code produced."""
    from transformers.utils import logging

    quiet: Any = logging
    quiet.disable_progress_bar()
    cases = conform(folder)
    if not cases:
        raise click.UsageError(f"{folder} holds no projector/, e2e/ or alignment/ cases")
    width = max(len(case.name) for case in cases)
    for case in cases:
        if as_json:
            # JSON has no infinity: null where nothing could be compared.
            row = {k: None if v in (math.inf, -math.inf) else v for k, v in asdict(case).items()}
            click.echo(json.dumps(row))
            continue
        verdict = "pass" if case.passed else "FAIL"
        line = f"{verdict}  {case.name:<{width}}  error {case.error:.2e} of {case.tolerance:.2e}"
        click.echo(f"{line}  {case.detail}".rstrip())
    failed = sum(not case.passed for case in cases)
    click.echo(f"{len(cases) - failed} passed, {failed} failed", err=as_json)
    sys.exit(1 if failed else 0)
