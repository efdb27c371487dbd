"""Whose forwards run when, on a stated device: nothing here depends on how fast this machine is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from benchmarks.fairness import Costs, Load, p95, simulate
from tests.tiny import make_model
from tests.workers.virtual import VirtualDevice
from workers.config import ModelConfig
from workers.engine import Engine
from workers.jobs import Done, Event, Request, Text
from workers.loader import Loaded, Loader
from workers.prompt import Prompt
from workers.runtime import Alone
from workers.sampling import Sampling

FORWARD_S, TOKEN_S = 0.01, 0.001
CHUNK = 128


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """As many layers as make one of them a small part of a forward."""
    folder = make_model(tmp_path_factory.mktemp("deep"), layers=12, hidden=16, ascii_only=True)
    return Loader("cpu").load(ModelConfig(name="deep", model=str(folder)))


@dataclass
class Heard:
    sent: float
    first: float | None = None
    done: float | None = None


class Scene:
    """Requests at stated times."""

    def __init__(self, *models: Loaded, max_running: int = 8) -> None:
        self.device = VirtualDevice(FORWARD_S, TOKEN_S)
        self.models = models
        runtimes = {m.name: Alone(m.name, m, None, CHUNK) for m in models}
        self.engine = Engine(
            runtimes,  # type: ignore[arg-type]
            max_running=max_running,
            max_queued=1000,
            pack=False,
            clock=self.device.clock,
        )

    def ask(self, when: float, account: str, prompt: int, answer: int, *, model: Loaded | None = None) -> Heard:
        heard = Heard(when)

        def hear(event: Event) -> None:
            if isinstance(event, Text) and heard.first is None:
                heard.first = self.device.now
            if isinstance(event, Done):
                heard.done = self.device.now

        sampling = Sampling(temperature=0.0, ignore_eos=True, max_tokens=answer)
        ids = tuple(2 + i % 90 for i in range(prompt))
        request = Request((model or self.models[0]).name, Prompt(ids, 0), sampling, hear, account=account)
        self.device.at(when, lambda: self.engine.submit(request))
        return heard

    def run(self, until: Callable[[], bool]) -> None:
        with self.device.timing(*self.models):
            self.device.run(self.engine, until)


def forward(tokens: int) -> float:
    return FORWARD_S + TOKEN_S * tokens


def test_fifty_times_the_load_moves_a_quiet_tenants_first_token_by_less_than_a_fifth(deep: Loaded) -> None:
    """The p95 of the time to its first text, beside a tenant that offers more than the device can do."""
    quiet, costs = Load(100, 4), Costs(FORWARD_S, TOKEN_S)
    alone = simulate(deep, costs, quiet, None, n=12, seed=3)
    beside = simulate(deep, costs, quiet, quiet, n=12, seed=3)
    assert p95(alone.ttft) == pytest.approx(1e3 * forward(100))
    assert p95(beside.ttft) < 1.2 * p95(alone.ttft)
    assert beside.rival > 1, "and the busy tenant is served meanwhile"


def test_a_stated_device_knows_no_chance(deep: Loaded) -> None:
    """The same arrivals give the same times, to the last bit."""
    one, two = (simulate(deep, Costs(0.1, 0.001), Load(40, 2), Load(60, 3), n=3, seed=1) for _ in range(2))
    assert one == two


def test_a_step_that_is_given_up_is_not_followed_by_another_models(deep: Loaded, other: Loaded) -> None:
    """Where a busy account's answers run on two models, one that goes first waits for one layer, not for a step."""
    scene = Scene(other, deep)
    scene.ask(0.0, "quiet", 4, 1)
    for model in (other, deep):
        scene.ask(0.1, "busy", 100, 300, model=model)
    arrivals = [scene.ask(1.0 + 0.1037 * i, "quiet", 20, 1, model=deep) for i in range(8)]
    scene.run(lambda: all(heard.done for heard in arrivals))
    layer = forward(1) / len(other.model.get_decoder().layers)
    for heard in arrivals:
        assert heard.first is not None
        assert heard.first - heard.sent <= layer + forward(20) + 1e-9


def test_prompts_of_who_goes_later_take_half_of_an_answers_time_at_most(deep: Loaded) -> None:
    """An answer of the account that goes first is done in twice the time it takes with the running answers alone."""
    scene = Scene(deep)
    scene.ask(0.0, "quiet", 4, 1)
    for _ in range(60):
        scene.ask(0.1, "busy", 120, 4)
    heard = scene.ask(3.0, "quiet", 20, 60)
    scene.run(lambda: heard.done is not None)
    assert heard.first is not None
    assert heard.done is not None
    steps = 59 * forward(8 + 1)
    assert heard.done - heard.first <= 2 * steps + forward(CHUNK)
    assert heard.done - heard.first >= 1.5 * 59 * forward(1), "and the busy account goes on reading"


def test_who_is_interrupted_again_and_again_gets_on(deep: Loaded) -> None:
    """Accounts that ask for little, one after the other and each sooner than the busy one's forward ends, do not keep
    it from ending."""
    scene = Scene(deep)
    names = [f"quiet-{i}" for i in range(20)]
    for name in names:
        scene.ask(0.0, name, 4, 1)
    for _ in range(20):
        scene.ask(1.0, "busy", CHUNK, 1)
    last = scene.ask(1.0, "busy", CHUNK, 1)
    for turn in range(300):
        scene.ask(2.0 + 0.1 * turn, names[turn % len(names)], 4, 1)
    scene.run(lambda: last.done is not None or scene.device.now > 30)
    assert last.done is not None
    assert last.done < 15
