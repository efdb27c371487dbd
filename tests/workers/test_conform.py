"""workers.conform: every vector of the official code is reproduced, and a vector that is off is found."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from workers.conform import conform, conform_command
from workers.conform_checks import Case, Checks

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {case.name: case for case in conform(GOLDEN)}


def test_every_vector_of_the_official_code_is_reproduced(cases: dict[str, Case]) -> None:
    """All of them pass: networks, runs in every mode, the training loss with gradients, aligned chats."""
    assert [case for case in cases.values() if not case.passed] == []


@pytest.mark.parametrize("kind", ["eval", "train"])
@pytest.mark.parametrize("file", sorted((GOLDEN / "projector").glob("*.projector.json")), ids=lambda f: f.name)
def test_every_network_was_compared(file: Path, kind: str, cases: dict[str, Case]) -> None:
    """Each network has a case for evaluation, and one for training where it has such vectors."""
    stem = file.name.removesuffix(".projector.json")
    expected = kind == "eval" or "train.out.key" in load_file(file.with_name(f"{stem}.safetensors"))
    assert (f"projector/{stem} {kind}" in cases) is expected


@pytest.mark.parametrize(
    "file", sorted((GOLDEN / "e2e").glob("*/expected*.json")), ids=lambda f: f"{f.parent.name}/{f.stem}"
)
def test_every_run_was_compared(file: Path, cases: dict[str, Case]) -> None:
    """Each run of each pair has a case that compared numbers, not only ids."""
    suffix = file.stem.removeprefix("expected").replace("_", "/", 1)
    runs = json.loads(file.read_text()).get("runs")
    names = [f"e2e/{file.parent.name}{suffix}/{run}" for run in runs] if runs else [f"e2e/{file.parent.name}{suffix}"]
    for name in names:
        assert cases[name].tolerance > 0, name


def test_every_aligned_chat_was_compared(cases: dict[str, Case]) -> None:
    """Each chat of the alignment vectors has a case, and so has every token of the vocabulary."""
    rows = json.loads((GOLDEN / "alignment" / "cases.json").read_text())["cases"]
    compared = [name for name in cases if name.startswith("alignment/")]
    assert len(compared) == len(rows) + len(json.loads((GOLDEN / "alignment" / "every_token.json").read_text())["runs"])


def _tensor(file: str, name: str, amount: float) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / file)
        tensors[name].view(-1)[0] += amount
        save_file(tensors, folder / file)

    return apply


def _json(file: str, old: str, new: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new, 1))

    return apply


def _said(file: str, *path: str | int) -> Callable[[Path], None]:
    """Change one value of a JSON file: a number by one, anything else to another text."""

    def apply(folder: Path) -> None:
        held = json.loads((folder / file).read_text())
        place = held
        for key in path[:-1]:
            place = place[key]
        old = place[path[-1]]
        place[path[-1]] = old + 1 if isinstance(old, (int, float)) else "other"
        (folder / file).write_text(json.dumps(held))

    return apply


OFF: dict[str, Callable[[Path], None]] = {
    "projector/deep eval": _tensor("projector/deep.safetensors", "out.value", 1e-3),
    "projector/deep train": _tensor("projector/deep.safetensors", "train.grad.key_in.weight", 1e-2),
    "projector/gates_closed eval": _tensor("projector/gates_closed.safetensors", "out.key", 1e-3),
    "projector/bf16 eval": _tensor("projector/bf16.safetensors", "out.key", 0.1),
    "projector/layer_mapping": _json("projector/layer_mapping.json", '"targets": 3', '"targets": 4'),
    "projector/temperature_schedule": _json("projector/temperature_schedule.json", "0.69900", "0.69800"),
    "e2e/same_tokenizer/full": _tensor("e2e/same_tokenizer/expected_full.safetensors", "fused.key.2", 1e-3),
    "e2e/same_tokenizer/off": _tensor("e2e/same_tokenizer/expected_off.safetensors", "step_logits", 1e-3),
    "e2e/same_tokenizer/include_response/full": _tensor(
        "e2e/same_tokenizer/expected_include_response.safetensors", "sharer_1.value.5", 1e-3
    ),
    "e2e/same_tokenizer/batch_loss": _tensor("e2e/same_tokenizer/expected_batch_loss.safetensors", "loss", 1e-2),
}


SAID: dict[str, Callable[[Path], None]] = {
    "projector/single_token eval": _said("projector/single_token.meta.json", "N"),
    "projector/same_dims eval": _said("projector/same_dims.projector.json", "init_args", "dtype", "value"),
    "projector/bf16 eval": _said("projector/bf16.meta.json", "out_dtype"),
    "e2e/aligned/full": _said("e2e/aligned/expected.json", "runs", "full", "padmasked_greedy", 7),
    "e2e/aligned/alignment": _said("e2e/aligned/expected.json", "sharer_pad_count"),
    "e2e/k_nearest_fewer_sharer_layers/full": _said(
        "e2e/k_nearest_fewer_sharer_layers/expected.json", "input_ids", 0, 1
    ),
    "e2e/same_tokenizer/front_half": _said("e2e/same_tokenizer/expected.json", "runs", "front_half", "min_top2_margin"),
    "e2e/same_tokenizer/batch_loss": _said("e2e/same_tokenizer/expected_batch_loss.json", "loss"),
    "alignment/every_token longest": _said("alignment/every_token.json", "runs", 1, "sharer_ids", 20),
}


@pytest.mark.parametrize("name", SAID)
def test_what_stands_beside_the_tensors_is_compared_too(name: str, tmp_path: Path) -> None:
    """One value changed in a JSON file fails the case that it describes, and no other."""
    part = name.partition("/")[0]
    pair = name.split("/")[1] if part == "e2e" else ""
    shutil.copytree(GOLDEN / part / pair, tmp_path / part / pair)
    (tmp_path / "alignment" / "cases.json").unlink(missing_ok=True)
    SAID[name](tmp_path)
    assert [case.name for case in conform(tmp_path) if not case.passed] == [name]


@pytest.mark.parametrize("name", OFF)
def test_a_vector_that_is_off_is_found(name: str, tmp_path: Path) -> None:
    """One number changed in one file fails that case and no other."""
    part = name.partition("/")[0]
    pair = name.split("/")[1] if part == "e2e" else ""
    shutil.copytree(GOLDEN / part / pair, tmp_path / part / pair)
    OFF[name](tmp_path)
    failed = [case for case in conform(tmp_path) if not case.passed]
    assert [case.name for case in failed] == [name]
    assert failed[0].error > failed[0].tolerance
    assert failed[0].detail


def test_other_folders_of_the_layout_are_discovered(tmp_path: Path) -> None:
    """Names are taken from the folder: renamed and repeated cases are run as they are called there."""
    shutil.copytree(GOLDEN / "e2e" / "k_nearest_fewer_sharer_layers", tmp_path / "e2e" / "other")
    (tmp_path / "projector").mkdir()
    for name in ("one", "two"):
        for suffix in (".projector.json", ".meta.json", ".safetensors"):
            shutil.copy(GOLDEN / "projector" / f"same_dims{suffix}", tmp_path / "projector" / f"{name}{suffix}")
    found = conform(tmp_path)
    assert all(case.passed for case in found)
    assert [case.name for case in found] == [
        "projector/one eval",
        "projector/one train",
        "projector/two eval",
        "projector/two train",
        "e2e/other/full",
    ]


def _without(file: str, name: str, instead: str | None = None) -> Callable[[Path], None]:
    """Take a tensor out, or give it another name."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / file)
        tensor = tensors.pop(name)
        save_file(tensors if instead is None else {**tensors, instead: tensor}, folder / file)

    return apply


BROKEN: dict[str, Callable[[Path], object]] = {
    "e2e: weights gone": lambda p: (p / "e2e/k/fuser/final/projector_0.safetensors").unlink(),
    "e2e: model gone": lambda p: shutil.rmtree(p / "e2e/k/sharer"),
    "e2e: vectors gone": lambda p: (p / "e2e/k/expected_full.safetensors").unlink(),
    "e2e: vectors torn": lambda p: (p / "e2e/k/expected_full.safetensors").write_bytes(b"torn"),
    "e2e: not named": lambda p: (p / "e2e/k/expected.json").write_text('{"runs": {}}'),
    "e2e: not JSON": lambda p: (p / "e2e/k/expected.json").write_text("{"),
    "e2e: not an object": lambda p: (p / "e2e/k/expected.json").write_text("[]"),
    "e2e: nothing expected": lambda p: [f.unlink() for f in (p / "e2e/k").glob("expected*")],
    "e2e: a model's config is null": lambda p: (p / "e2e/k/receiver/config.json").write_text("null"),
    "e2e: a model's tensor gone": _without("e2e/k/sharer/model.safetensors", "model.norm.weight"),
    "e2e: a model's tensor too many": _without(
        "e2e/k/sharer/model.safetensors", "model.norm.weight", "model.norm.wait"
    ),
    "projector: a network's file gone": lambda p: (p / "projector/deep.projector.json").unlink(),
    "projector: a network's arguments": _json(
        "projector/deep.projector.json", '"init_args": {', '"init_args": [1], "other": {'
    ),
    "projector: a gradient of nothing": _without(
        "projector/deep.safetensors", "train.grad.key_in.weight", "train.grad.nothing"
    ),
    "projector: no steps": _json("projector/temperature_schedule.json", '"anneal_steps": 1929', '"anneal_steps": 0'),
    "alignment: no aligned chats": lambda p: (p / "alignment/cases.json").write_text("{}"),
    "alignment: no aligned chat": lambda p: (p / "alignment/cases.json").write_text('{"cases": []}'),
    "alignment: chats not JSON": lambda p: (p / "alignment/cases.json").write_text("{"),
    "alignment: a chat without a name": lambda p: (p / "alignment/cases.json").write_text('{"cases": [{}]}'),
    "alignment: tokenizers alone": lambda p: [
        (p / "alignment" / f).unlink() for f in ("cases.json", "every_token.json")
    ],
    "alignment: a tokenizer torn": lambda p: (p / "alignment/tokenizers/sharer/tokenizer.json").write_text(
        '{"model": {}}'
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_cannot_be_run_has_failed(what: str, tmp_path: Path) -> None:
    """A case whose files are missing, torn or unexplained fails with its reason; it is never passed over."""
    part = what.partition(":")[0]
    pair = part == "e2e"
    source = GOLDEN / "e2e" / "k_nearest_fewer_sharer_layers" if pair else GOLDEN / part
    shutil.copytree(source, tmp_path / part / "k" if pair else tmp_path / part)
    BROKEN[what](tmp_path)
    failed = [case for case in conform(tmp_path) if not case.passed]
    assert failed
    assert all(case.detail and "\n" not in case.detail for case in failed)


VECTORS = [
    *(("projector", name) for name in ("deep", "bf16", "gates_closed")),
    ("e2e/k_nearest_fewer_sharer_layers", "expected_full"),
    ("e2e/same_tokenizer", "expected_batch_loss"),
]


@pytest.mark.parametrize(("part", "stem"), VECTORS, ids=lambda v: str(v))
def test_a_vector_that_is_no_number_is_found(part: str, stem: str, tmp_path: Path) -> None:
    """NaN in what the official code is said to have given is never taken for agreement, whichever tensor it is in."""
    shutil.copytree(GOLDEN / part, tmp_path / part)
    for file in (tmp_path / part).glob("*.safetensors" if part == "projector" else "expected*.safetensors"):
        if file.stem != stem:
            file.unlink()
            file.with_name(f"{file.stem}.projector.json").unlink(missing_ok=True)
    file = tmp_path / part / f"{stem}.safetensors"
    tensors = load_file(file)
    given = ("in.", "state.", "train.u_", "attention_mask")
    kinds = {name.rstrip("0123456789."): name for name, t in tensors.items() if t.is_floating_point()}
    for name in [name for name in kinds.values() if not name.startswith(given)]:
        broken = {n: t.clone() for n, t in tensors.items()}
        broken[name].view(-1)[-1] = float("nan")
        save_file(broken, file)
        found = [case for case in conform(tmp_path) if not case.passed and name in case.detail]
        assert [case.error for case in found] == [float("inf")], name


def test_the_command_counts_and_fails_when_one_is_out(tmp_path: Path) -> None:
    """`twolane pair conform` prints a line per case and the count last; its status is 1 when one is out."""
    shutil.copytree(GOLDEN / "projector", tmp_path / "projector")
    good = CliRunner().invoke(conform_command, [str(tmp_path)])
    assert good.exit_code == 0
    lines = good.output.strip().splitlines()
    assert lines[-1] == f"{len(lines) - 1} passed, 0 failed"
    OFF["projector/deep eval"](tmp_path)
    bad = CliRunner().invoke(conform_command, [str(tmp_path)])
    assert bad.exit_code == 1
    assert bad.output.strip().splitlines()[-1] == f"{len(lines) - 2} passed, 1 failed"
    assert "FAIL  projector/deep eval" in bad.output


def test_the_command_speaks_json(tmp_path: Path) -> None:
    """With --json standard output is one object per case and nothing else."""
    shutil.copytree(GOLDEN / "projector", tmp_path / "projector")
    result = CliRunner().invoke(conform_command, [str(tmp_path), "--json"])
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert {"name", "passed", "error", "tolerance", "detail"} == set(rows[0])
    assert all(row["passed"] for row in rows)


def test_a_folder_without_cases_is_bad_usage(tmp_path: Path) -> None:
    """A folder that holds nothing to compare proves nothing: status 2."""
    assert CliRunner().invoke(conform_command, [str(tmp_path)]).exit_code == 2


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("got", "want", "passed"),
    [(NAN, 1.0, False), (INF, 1.0, False), (1.0, NAN, False), (NAN, NAN, False), (1.0, INF, False), (-INF, INF, False),
     (INF, INF, True), (1.0, 1.0, True)],
)  # fmt: skip
def test_what_is_not_a_number_is_never_close(got: float, want: float, passed: bool) -> None:
    """NaN on either side fails, and so does infinity beside anything but itself."""
    checks = Checks()
    checks.close("x", torch.tensor([1.0, got]), torch.tensor([1.0, want]))
    assert checks.case("x").passed is passed
