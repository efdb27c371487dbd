"""The bundled pair, as it is shipped: it answers about documents it has never seen, and only about those."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.prove_bundled import Kept, Parts, ask_together
from scripts.questions import asked
from workers.loader import Loader
from workers.pairs import read_report
from workers.verify_cli import hold

PAIR = Path(__file__).parents[2] / "pairs" / "smol-reader"


@pytest.mark.real_model
def test_it_reads_for_another() -> None:
    """With the document's KV unseen questions are answered; with another document's KV hardly any."""
    held, _ = hold(PAIR, Loader("cpu"))
    items = [item for seed in range(1000, 1003) for item in asked(seed, "test", (), subjects=1)]
    measured = ask_together(Parts.of(held), items, ("cache", "shuffled"), Kept())
    assert sum(measured.right("cache")) / len(items) >= 0.4
    assert sum(measured.right("shuffled")) / len(items) <= 0.1
    report = read_report(PAIR)
    assert report is not None
    assert report.fingerprint == held.state.fingerprint
    assert held.state.verdict == "verified"
