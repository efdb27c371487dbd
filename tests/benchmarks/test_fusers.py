"""benchmarks/fusers: it learns from what the bundled reader learnt from, and the table says what was measured."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec
import pytest

from benchmarks.fusers import Row, against, kept, steps_of, table, write_passages
from scripts.questions import lesson
from tests import tiny
from workers.items import read_items
from workers.lessons import lessons_of

WIDE = ["harbour", "lantern", "meadow", "pebble", "ribbon", "saddle", "thimble", "walnut"]


def row(variant: str, right: list[bool], *, parameters: int = 10_000_000, cpu_s: float = 100.0) -> Row:
    return Row(
        variant=variant,
        mode="fuse",
        parameters=parameters,
        steps=20,
        cpu_s=cpu_s,
        loss=0.5,
        right=right,
        exact=[False] * len(right),
        passage=[n // 4 for n in range(len(right))],
        gates_open=0.25,
    )


def test_the_command_learns_the_lessons_of_the_bundled_reader(tmp_path: Path) -> None:
    """Passages written as JSONL become, question for question and token for token, the lessons of the script."""
    tokenizer, file = tiny.tokenizer(), tmp_path / "train.jsonl"
    write_passages(file, 12, WIDE)
    learnt = lessons_of(tokenizer, read_items(file), scope="context", most=10_000, options={})
    assert learnt == [lesson(tokenizer, number, WIDE) for number in range(12)]


def test_the_table_holds_the_small_against_the_official() -> None:
    """Shares of parameters and of time, and the difference with its interval, are those of the rows; what was trained
    elsewhere is in the table and is held against nothing.
    """
    shipped = msgspec.structs.replace(row("shipped", [True] * 40), steps=0, cpu_s=0.0)
    official = row("c2c", [True] * 10 + [False] * 30, parameters=270_000_000, cpu_s=600.0)
    small = row("lite", [True] * 30 + [False] * 10)
    lines = table([shipped, official, small])
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["shipped", "c2c", "lite"]
    assert "| elsewhere |" in lines[2]
    assert "| 270.00 M | 20 | 600 | 0.500 | 0.250 (0.14-0.40) of 40 | 0.000 | 25% |" in lines[3]
    (told,) = against([shipped, official, small])
    assert told.startswith("lite against c2c: 1/27.0 of the parameters, 1/6.0 of the CPU time, right +0.500 (")
    assert told.endswith("p 2e-06")


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    """A row that lies in the work folder is taken as it is."""
    made = kept(tmp_path / "row.json", lambda: row("lite", [True, False]))

    def never() -> Row:
        raise AssertionError("measured twice")

    assert kept(tmp_path / "row.json", never) == made


@pytest.mark.parametrize("text", ["lite", "lite=", "lite=0", "lite=-1", "lite=x", "mix=3", "=3"])
def test_steps_need_a_variant_and_a_number(text: str) -> None:
    """What cannot be trained is refused before anything is."""
    with pytest.raises(argparse.ArgumentTypeError, match="VARIANT=N is expected"):
        steps_of(text)
    assert steps_of("lite, fuse=12") == ("lite, fuse", 12)
