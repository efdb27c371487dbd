"""The bundled pair, as it is shipped: it answers about documents it has never seen, and only about those."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.train_smol_reader import RECEIVER, SHARER, accuracy, case
from workers.fusers.lite import LiteFuser
from workers.loader import Loader
from workers.pairs import fingerprint, read_pair, read_report, shape_recipe
from workers.verify import Case

PAIR = Path(__file__).parents[2] / "pairs" / "smol-reader"


@pytest.mark.real_model
def test_it_reads_for_another() -> None:
    """With the document's KV unseen questions are answered; with another document's KV hardly any."""
    loader = Loader("cpu")
    sharer, receiver = loader.load(SHARER), loader.load(RECEIVER)
    fuser = LiteFuser.from_folder(PAIR, receiver.dtype)
    cases = [case(sharer.tokenizer, seed, "test", subjects=1) for seed in range(1000, 1004)]
    other = [Case(cases[i - 1].context, c.questions) for i, c in enumerate(cases)]
    assert accuracy(sharer, receiver, fuser, cases) >= 0.3
    assert accuracy(sharer, receiver, fuser, other) <= 0.1
    report = read_report(PAIR)
    assert report is not None
    pair = read_pair(PAIR)
    assert report.fingerprint == fingerprint(
        sharer.identity,
        receiver.identity,
        kind="lite",
        digest=pair.fuser.digest,
        mode=pair.mode,
        scope=pair.scope,
        recipe=shape_recipe(fuser.shape),
    )
