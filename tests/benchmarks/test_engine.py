"""benchmarks/engine: what it measures is the pair that ships."""

from __future__ import annotations

import pytest

from benchmarks.engine import MODEL, reader
from workers.config import Fleet, ModelConfig
from workers.loader import Loader
from workers.pairing import hold_pair


@pytest.mark.real_model
def test_the_bundled_reader_is_held() -> None:
    """As its file describes it, so that another reader can ship without a change here."""
    smol = ModelConfig(name="smol", model=MODEL)
    _, pair = reader()
    held = hold_pair(Fleet(models=(smol,), pairs=(pair,)), pair, Loader("cpu"), None, 512)
    assert held.state.verdict == "verified"
