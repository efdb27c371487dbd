"""What a worker holds while others use it: loading beside callers, and models that compute nonsense."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.tiny import make_model
from workers.config import Fleet, ModelConfig, WorkerConfig
from workers.engine import Engine
from workers.holdings import Holdings
from workers.jobs import Event, Request
from workers.loader import Loaded
from workers.prompt import Prompt
from workers.runtime import Alone
from workers.sampling import Sampling


@contextmanager
def holding(model: Path) -> Iterator[tuple[Holdings, Engine]]:
    """A worker's parts for one model, which has not been loaded yet; one place, and nobody may wait."""
    fleet = Fleet(
        models=(ModelConfig(name="m", model=str(model)),), workers=(WorkerConfig(name="w", models=("m",), threads=1),)
    )
    holdings = Holdings(fleet, fleet.workers[0])
    engine = Engine(holdings.runtimes, max_running=1, max_queued=0, threads=1)
    engine.start()
    try:
        yield holdings, engine
    finally:
        engine.close()
        holdings.close()


def test_a_model_that_is_loaded_while_the_queue_is_full_becomes_ready_when_it_is_not(
    tiny: Loaded, tiny_folder: Path
) -> None:
    """Callers of another model make the rehearsal wait; they do not make the model unavailable for ever."""
    with holding(tiny_folder) as (holdings, engine):
        events = queue.SimpleQueue[Event]()
        other = Alone("other", tiny, None, 32)
        long = Sampling(temperature=0.0, max_tokens=2000, ignore_eos=True)
        caller = engine.submit(Request("other", Prompt((5, 6), 0), long, events.put, runtime=other))
        loading = holdings.load_in_background(engine)
        while "m" not in holdings.runtimes and loading.is_alive():
            time.sleep(0.01)
        time.sleep(0.1)
        assert loading.is_alive()
        caller.cancel()
        loading.join()
        assert [(state.ready, state.reason) for state in holdings.models] == [(True, "")]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_computes_no_numbers_is_refused(value: float, tmp_path: Path) -> None:
    """Nothing can be chosen by its logits; a request with a temperature would end the whole worker."""
    folder = make_model(tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = value
    save_file(tensors, file, metadata={"format": "pt"})
    with holding(folder) as (holdings, engine):
        holdings.load_in_background(engine).join()
        (state,) = holdings.models
        assert not state.ready
        assert "no numbers" in state.reason
        assert not holdings.runtimes
