"""Public data sets as items: real `datasets`, on files in exactly their forms, from a folder and from a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from datasets import Dataset

from router.cli import main
from tests import hub
from workers import pairs
from workers.errors import LoadFailed
from workers.items import Chosen, Item, Said
from workers.loader import Loaded
from workers.pair_file import publish
from workers.pairs import FuserInfo
from workers.public_data import BRANCH, SOURCES, load_public, named

ROOT = Path(__file__).parents[2]


def arc(**changed: Any) -> dict[str, Any]:
    choices = {"text": ["air", "wood", "iron"], "label": ["A", "B", "C"]}
    return {"id": "Mercury_1", "question": "What conducts best?", "choices": choices, "answerKey": "C"} | changed


def redux(**changed: Any) -> dict[str, Any]:
    row = {"question": "2 + 2?", "choices": ["3", "4", "5", "6"], "answer": 1, "error_type": "ok", "source": None}
    return row | {"correct_answer": None, "potential_reason": None} | changed


def ceval(**changed: Any) -> dict[str, Any]:
    row = {"id": 0, "question": "下列说法正确的是____", "A": "甲", "B": "乙", "C": "丙", "D": "丁"}
    return row | {"answer": "D", "explanation": ""} | changed


NUMBERED = arc(choices={"text": ["air", "wood", "iron", "salt"], "label": ["1", "2", "3", "4"]}, answerKey="4")
BOOK = {
    "id": "7-980",
    "question_stem": "The sun",
    "choices": {"text": ["a", "b"], "label": ["A", "B"]},
    "answerKey": "B",
}
ANATOMY = [
    redux(),
    redux(error_type="wrong_groundtruth", correct_answer="D"),
    redux(choices=["p", "q", "r", "s"], error_type="wrong_groundtruth", correct_answer="2"),
    redux(choices=["p", "q", "r", "s"], error_type="wrong_groundtruth", correct_answer="s"),
    redux(error_type="wrong_groundtruth", correct_answer="2"),
    redux(choices=["0", "1", "2", "3"], error_type="wrong_groundtruth", correct_answer="2"),
    redux(choices=["3", "1", "2", "0"], error_type="wrong_groundtruth", correct_answer="3"),
    redux(error_type="wrong_groundtruth", correct_answer=None),
    redux(error_type="no_correct_answer"),
    redux(error_type="bad_question_clarity"),
]
FILES: dict[str, dict[str, list[dict[str, Any]]]] = {
    "arc-challenge": {
        "ARC-Challenge/test": [arc(), NUMBERED],
        "ARC-Challenge/validation": [arc()],
        "ARC-Easy/test": [],
    },
    "openbookqa": {"main/test": [BOOK], "additional/test": [BOOK | {"fact1": "the sun is a star"}]},
    "mmlu-redux": {"anatomy/test": ANATOMY, "virology/test": [redux(question="1 + 2?", answer=0)]},
    "c-eval": {
        "law/val": [ceval(), ceval(answer="A")],
        "law/test": [ceval(answer="")],
        "logic/val": [ceval(answer="B")],
        "logic/dev": [ceval()],
    },
}


def written(folder: Path, name: str) -> Path:
    """The parquet branch of a data set, as the hub lays it out."""
    for place, rows in FILES[name].items():
        if rows:
            (folder / place).mkdir(parents=True)
            Dataset.from_list(rows).to_parquet(folder / place / "0000.parquet")
    return folder


def load(folder: Path, text: str) -> Chosen:
    found = named(text)
    assert found is not None
    return load_public(*found, folder)


def test_every_name_is_read_in_its_own_form(tmp_path: Path) -> None:
    """Question, choices, letter of the right one and subject, of each of the four forms; labels may be numbers."""
    found = {name: load(written(tmp_path / name, name), name).items for name in FILES}
    assert [(i.choices, i.answers, i.kind) for i in found["arc-challenge"]] == [
        (("air", "wood", "iron"), ("C",), "ARC-Challenge"),
        (("air", "wood", "iron", "salt"), ("D",), "ARC-Challenge"),
    ]
    assert found["arc-challenge"][0].messages == (
        Said("user", "What conducts best?\n\nA. air\nB. wood\nC. iron\n\nAnswer with the letter only."),
    )
    assert [(i.messages[0].content.split("\n")[0], i.answers, i.kind) for i in found["openbookqa"]] == [
        ("The sun", ("B",), "main")
    ]
    assert [(i.answers, i.kind) for i in found["c-eval"]] == [(("D",), "law"), (("A",), "law"), (("B",), "logic")]
    assert {i.kind for i in found["mmlu-redux"]} == {"anatomy", "virology"}
    assert set(SOURCES) == {*FILES, "arc-easy"}


def test_wrong_answers_are_corrected_or_left_out(tmp_path: Path) -> None:
    """MMLU-Redux: a correction counts where it names one choice by letter, place or text; other errors are left out."""
    found = load(written(tmp_path, "mmlu-redux"), "mmlu-redux")
    assert [i.answers[0] for i in found.items if i.kind == "anatomy"] == ["B", "D", "C", "D", "C", "C"]
    assert found.notes == (
        "The items are test of a copy of edinburgh-dawg/mmlu-redux-2.0.",
        "1 of its rows were left out: its annotators say bad_question_clarity.",
        "1 of its rows were left out: its annotators say no_correct_answer.",
        "2 of its rows were left out: its annotators say wrong_groundtruth, and not which choice is right.",
    )


UNCLEAR: list[tuple[str, dict[str, Any], str]] = [
    ("arc-challenge", arc(choices={"text": ["x", "y", "x"], "label": ["A", "B", "C"]}), "two of the choices are alike"),
    ("arc-challenge", arc(choices={"text": ["x", " ", "y"], "label": ["A", "B", "C"]}), "a text is missing"),
    ("arc-challenge", arc(choices={"text": ["x", None, "y"], "label": ["A", "B", "C"]}), "a text is missing"),
    ("arc-challenge", arc(question=None), "a text is missing"),
    ("arc-challenge", arc(choices={"text": ["x"], "label": ["C"]}), "not 2 to 26 choices"),
    ("arc-challenge", arc(choices={"text": ["x", "y"], "label": ["A", "B", "C"]}), "the answer is none of the choices"),
    ("arc-challenge", arc(answerKey=""), "no answer"),
    ("openbookqa", BOOK | {"answerKey": "E"}, "no answer"),
    ("mmlu-redux", redux(answer=4), "the answer is none of the choices"),
    ("mmlu-redux", redux(answer=-1), "the answer is none of the choices"),
    ("c-eval", ceval(B="甲"), "two of the choices are alike"),
    ("c-eval", ceval(answer=None), "no answer"),
]
PLACES = {
    "arc-challenge": "ARC-Challenge/test",
    "openbookqa": "main/test",
    "mmlu-redux": "law/test",
    "c-eval": "law/val",
}


def test_a_row_without_one_right_letter_is_left_out_and_counted(tmp_path: Path) -> None:
    """Choices that are alike or missing, an answer that is none of them, no answer: each beside a row that is asked."""
    good = {"arc-challenge": arc(), "openbookqa": BOOK, "mmlu-redux": redux(), "c-eval": ceval()}
    for number, (name, row, why) in enumerate(UNCLEAR):
        folder = tmp_path / str(number)
        (folder / PLACES[name]).mkdir(parents=True)
        Dataset.from_list([row, good[name]]).to_parquet(folder / PLACES[name] / "0000.parquet")
        found = load(folder, name)
        assert (len(found.items), found.notes[1:]) == (1, (f"1 of its rows were left out: {why}.",)), (name, row)


def test_another_split(tmp_path: Path) -> None:
    """NAME:SPLIT; one that is not there is named beside those that are, and one without answers says so."""
    arcs, exams = written(tmp_path / "arc", "arc-challenge"), written(tmp_path / "exam", "c-eval")
    assert len(load(arcs, "arc-challenge:validation").items) == 1
    with pytest.raises(LoadFailed, match=r"no split 'train' of ARC-Challenge; there are: test, validation"):
        load(arcs, "arc-challenge:train")
    with pytest.raises(LoadFailed, match=r"test of .*: nothing can be asked: no answer"):
        load(exams, "c-eval:test")
    with pytest.raises(LoadFailed, match="no file there is CONFIG/SPLIT"):
        load(tmp_path, "arc-easy")


def test_what_is_not_in_its_form_is_refused(tmp_path: Path) -> None:
    """Rows of another data set, and a file that is no parquet: an error that names the place."""
    (tmp_path / "main" / "test").mkdir(parents=True)
    file = tmp_path / "main" / "test" / "0000.parquet"
    Dataset.from_list([redux()]).to_parquet(file)
    with pytest.raises(LoadFailed, match="main holds rows of another form"):
        load(tmp_path, "openbookqa")
    (tmp_path / "law" / "test").mkdir(parents=True)
    Dataset.from_list([redux(answer="B")]).to_parquet(tmp_path / "law" / "test" / "0000.parquet")
    with pytest.raises(LoadFailed, match="law holds rows of another form"):
        load(tmp_path, "mmlu-redux")
    file.write_bytes(b"PAR1 but no more")
    with pytest.raises(LoadFailed, match="cannot be read"):
        load(tmp_path, "openbookqa")


def test_some_of_each_kind_are_drawn() -> None:
    """As many of each kind as asked, by the seed alone: what is drawn of one kind does not hang on the others."""
    items = [Item((Said("user", str(i)),), ("x",), kind="ab"[i % 3 == 0]) for i in range(30)]
    some = Chosen(items).drawn(4, seed=1)
    assert ([i.kind for i in some.items].count("a"), [i.kind for i in some.items].count("b")) == (4, 4)
    assert some.items == sorted(some.items, key=items.index)
    assert some == Chosen(items).drawn(4, seed=1)
    assert some.items != Chosen(items).drawn(4, seed=2).items
    alone = Chosen([i for i in items if i.kind == "a"]).drawn(4, seed=1)
    assert alone.items == [i for i in some.items if i.kind == "a"]
    assert (some.seeds, some.notes) == ((1,), ("Of each kind at most 4 items were drawn, 8 of 30 in all.",))
    assert Chosen(items).drawn(99, seed=1).items == items


def test_a_pair_is_verified_by_the_name_of_a_data_set(tmp_path: Path, tiny: Loaded) -> None:
    """`pair verify --data mmlu-redux --data-from`: the report says what was asked, of which subject, drawn by what."""
    folder, data = tmp_path / "twin", written(tmp_path / "data", "mmlu-redux")
    info = FuserInfo("identity", "identity")
    publish(folder, "twin", tiny, tiny, info, mode="handover", scope="prompt", made="2026-01-31")
    arguments = ["--data", "mmlu-redux", "--data-from", str(data), "--limit", "2", "--seed", "7", "--no-relay"]
    verify = ["pair", "verify", str(folder), "--device", "cpu"]
    done = CliRunner().invoke(main, [*verify, *arguments])
    report = pairs.read_report(folder)
    assert report is not None, done.output
    assert (report.n, report.seeds) == (3, (7,))
    assert report.slices["kind:anatomy"]["cache"].n == 2
    assert any("3 of 4 in all" in note for note in report.notes)
    unknown = CliRunner().invoke(main, [*verify, "--data", "mmlu"])
    assert (unknown.exit_code, "there are arc-challenge, arc-easy, c-eval" in unknown.stderr) == (2, True)
    mixed = CliRunner().invoke(main, [*verify, "--data", "x.jsonl", "--data-from", str(data)])
    assert (mixed.exit_code, "--data-from goes with" in mixed.stderr) == (2, True)


SCRIPT = """
import json, sys
from workers.errors import LoadFailed
from workers.public_data import load_public, named
for text in sys.argv[1:]:
    try:
        found = load_public(*named(text))
        print(json.dumps([found.notes[0], [item.answers[0] for item in found.items]]))
    except LoadFailed as error:
        print(json.dumps(str(error)))
"""


def test_from_a_hub(tmp_path: Path) -> None:
    """Its parquet branch at one commit, through `datasets` as a user has it; what is missing is told with a way out."""
    home = str(tmp_path / "home")
    with hub.running() as server:
        for name in ("arc-challenge", "c-eval"):
            folder = written(tmp_path / name, name)
            repo = server.repos[f"datasets/{SOURCES[name].repo}"] = hub.Repo()
            repo.commit({"ceval-exam.py": b"raise SystemExit('never run')"})
            files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.parquet")}
            repo.commit(files, BRANCH)
        said = run(["arc-challenge", "c-eval", "openbookqa"], server.environment(home))
        commit = server.repos["datasets/allenai/ai2_arc"].refs[BRANCH]
    arcs, exams, missing = said
    assert arcs == [f"The items are test of allenai/ai2_arc at {commit[:12]}.", ["C", "D"]]
    assert exams[1] == ["D", "A", "B"]
    assert "allenai/openbookqa: cannot be had from the hub" in missing
    assert "--data-from takes a folder that holds its branch refs/convert/parquet" in missing


def run(names: list[str], environment: dict[str, str]) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_without_the_library(tmp_path: Path) -> None:
    """`datasets` is not needed for anything else, and its absence is told with what to install."""
    (tmp_path / "datasets.py").write_text("raise ImportError('not installed')")
    [said] = run(["arc-easy"], {"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert said == "public data sets need `datasets`: pip install 'twolane-router[datasets]'"
