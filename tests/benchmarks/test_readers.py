"""benchmarks/readers: what is asked for, what the tables say, and that a run that was stopped goes on."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.readers import Asked, Row, apart, kept, slices, table
from scripts.train_smol_reader import KEPT, receiver_of
from workers.items import Item, Said

HALF = "0-4,20-29"


def row(layers: str, seed: int | None, right: list[bool], loss: float = 0.5) -> Row:
    return Row(layers, seed, 40 if seed is not None else 0, 10_000_000, loss, right)


def item(label: str) -> Item:
    return Item(messages=(Said("user", "Who?"),), answers=("Ann",), kind="list", labels=(label,))


def test_a_reader_is_layers_and_a_seed() -> None:
    """Layers are those of the model, in order."""
    assert Asked.read(f"{HALF}:3") == Asked(HALF, 3)
    assert receiver_of(KEPT).layers == (*range(5), *range(15, 30))
    assert receiver_of(HALF).layers == (*range(5), *range(20, 30))


@pytest.mark.parametrize("text", ["", "1", ":1", "0-9", "0-9:", "0-9:x", "first:1", "0-9,:1"])
def test_what_is_no_reader_is_refused(text: str) -> None:
    """Before anything is trained."""
    with pytest.raises(argparse.ArgumentTypeError, match="LAYERS:SEED is expected"):
        Asked.read(text)


def test_the_table_has_every_reader_and_the_spread_over_seeds() -> None:
    """The bundled one is in no spread, and one seed has none."""
    rows = [
        row(KEPT, None, [True] * 40, 0.2),
        row(KEPT, 1, [True] * 30 + [False] * 10, 0.4),
        row(KEPT, 2, [True] * 20 + [False] * 20, 0.6),
        row(HALF, 1, [True] * 10 + [False] * 30, 0.9),
    ]
    lines = table(rows, {KEPT: [False] * 40, HALF: [True] + [False] * 39})
    assert f"| {KEPT} | bundled | as shipped | 10.00 M | 0.200 | 1.000 (0.91-1.00) of 40 | 0.000 |" in lines
    assert f"| {HALF} | 1 | 40 | 10.00 M | 0.900 | 0.250 (0.14-0.40) of 40 | 0.025 |" in lines
    assert f"| {KEPT} | 2 seeds | 40 | 10.00 M | 0.500 ± 0.141 | 0.625 ± 0.177 | |" in lines
    assert len(lines) == 7


def test_slices_are_those_of_the_items() -> None:
    """By form and label, with the number of questions."""
    rows = [row(KEPT, 1, [True, False, True]), row(HALF, 1, [False, False, True])]
    lines = slices(rows, [item("value:word"), item("value:word"), item("value:number")])
    assert lines[0] == f"| slice | n | {KEPT}, seed 1 | {HALF}, seed 1 |"
    assert lines[2:] == [
        "| form:list | 3 | 0.67 | 0.33 |",
        "| value:number | 1 | 1.00 | 1.00 |",
        "| value:word | 2 | 0.50 | 0.00 |",
    ]


def test_other_layers_are_held_against_the_same_seed() -> None:
    """On the same questions, by passage; a seed that one of them lacks is held against nothing."""
    rows = [
        row(KEPT, None, [True] * 40),
        row(KEPT, 1, [True] * 30 + [False] * 10, 0.4),
        row(KEPT, 2, [True] * 40),
        row(HALF, 1, [True] * 10 + [False] * 30, 0.9),
        row(HALF, 3, [True] * 40),
    ]
    (told,) = apart(rows, [n // 4 for n in range(40)])
    assert told.startswith(f"{HALF}, seed 1 against {KEPT}, seed 1: right -0.500 (")
    assert told.endswith("p 2e-06, loss +0.500")


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    """A row that lies in the work folder is taken as it is."""
    made = kept(tmp_path, "one", Row, lambda: row(KEPT, None, [True, False]))

    def never() -> Row:
        raise AssertionError("measured twice")

    assert kept(tmp_path, "one", Row, never) == made
