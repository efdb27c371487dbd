"""A model whose logits are no numbers fails its own requests, and ends nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.workers.test_engine import Asked, some_ids
from workers.config import ModelConfig
from workers.engine import Engine
from workers.errors import NoNumbers
from workers.jobs import Failed, Started
from workers.loader import Loaded, Loader
from workers.runtime import Alone


class _Broken(torch.nn.Module):
    """A head whose logits are broken from a number of calls on."""

    def __init__(self, head: torch.nn.Module, after: int, value: float) -> None:
        super().__init__()
        self.head, self.left, self.value = head, after, value

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(hidden)
        self.left -= 1
        if self.left < 0:
            logits = logits.clone()
            logits[..., 7] = self.value
        return logits


@pytest.fixture(params=[(0, "nan"), (0, "inf"), (3, "nan")], ids=lambda p: f"{p[1]} after {p[0]}")
def running(request: pytest.FixtureRequest, tiny: Loaded, other_folder: Path) -> Iterator[Engine]:
    after, value = request.param
    bad = Loader("cpu").load(ModelConfig(name="bad", model=str(other_folder)))
    bad.model.lm_head = _Broken(bad.model.lm_head, after, float(value))
    runtimes = {"tiny": Alone("tiny", tiny, None, 32), "bad": Alone("bad", bad, None, 32)}
    engine = Engine(runtimes, max_running=4, threads=1, pack=False)  # type: ignore[arg-type]
    engine.start()
    yield engine
    engine.close()


@pytest.mark.parametrize("asked", [{}, {"temperature": 1.0, "n": 2}, {"logprobs": 2}], ids=str)
def test_its_requests_fail_and_a_neighbours_answer_goes_on(running: Engine, asked: dict[str, float]) -> None:
    """Greedy, sampled or with log probabilities, at the first token or later: an error, and a worker that serves on."""
    expected = Asked(running, some_ids(9)).text()
    neighbour = Asked(running, some_ids(9))
    events = Asked(running, some_ids(5), "bad", **asked).all()
    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error, NoNumbers)
    assert neighbour.text() == expected
    assert running.alive
    assert running.load() == (0, 0)
    first_token = Asked(running, some_ids(5), "bad").all()
    assert not any(isinstance(event, Started) for event in first_token)
