"""Alarms and standings of pairs: what is promised about samples, and the way out and back."""

from __future__ import annotations

import random
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.alarms import Alarm
from router.demotion import Demotion, Standing, Step
from workers.config import DemotionLimits

LIMITS = DemotionLimits()


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class House:
    """One pair `duo`, its clock, and the steps that were told."""

    def __init__(self, **limits: object) -> None:
        self.clock = Clock()
        self.steps: list[Step] = []
        written = DemotionLimits.model_validate({"probation": {"share": 0.5, "samples": 3}, **limits})
        self.demotion = Demotion({"duo": written}, changed=self.steps.append, clock=self.clock)

    @property
    def state(self) -> str:
        return self.demotion.standing("duo").state

    def fail(self, most: int = 1000) -> int:
        """Errors in a row until the pair is out; how many that took."""
        for n in range(1, most + 1):
            self.demotion.observe_error("duo", True)
            if self.state == "demoted":
                return n
        raise AssertionError("never demoted")

    def rest(self) -> float:
        """Let the rest pass; its seconds."""
        until = self.demotion.standing("duo").until
        seconds = until - self.clock.now
        self.clock.now = until
        return seconds


# -- the numbers


@given(
    history=st.lists(st.booleans(), max_size=200),
    limit=st.floats(0.01, 0.8),
    patience=st.floats(20, 1e5),
)
def test_all_bad_is_found_within_the_stated_number(history: list[bool], limit: float, patience: float) -> None:
    """However good a stream was before, nothing but bad observations ring within the number that `within` states."""
    alarm = Alarm.of_share(limit, patience)
    if any(alarm.see(float(bad)) for bad in history):
        return
    assert any(alarm.see(1.0) for _ in range(alarm.within(1.0)))


@pytest.mark.parametrize("limit", [0.02, 0.1, 0.2, 0.4])
def test_false_alarms_are_rare(limit: float) -> None:
    """A stream whose rate is exactly the limit rings less often than once in `patience` observations."""
    draw = random.Random(7)
    patience = 200.0
    lengths = []
    for _ in range(60):
        alarm, n = Alarm.of_share(limit, patience), 1
        while not alarm.see(float(draw.random() < limit)):
            n += 1
        lengths.append(n)
    assert mean(lengths) > patience


def test_a_mean_at_its_limit_rings_rarely_and_far_from_it_soon() -> None:
    """Numbers with any spread: at the limit at least `patience` pass on average; a lasting excess is found."""
    draw = random.Random(3)

    def length(centre: float) -> int:
        alarm, n = Alarm.of_mean(0.15, 200.0, low=-1.0), 1
        while n < 20_000 and not alarm.see(min(1.0, max(-1.0, draw.gauss(centre, 0.3)))):
            n += 1
        return n

    assert mean(length(0.15) for _ in range(30)) > 200
    assert median(length(0.6) for _ in range(30)) < 40


@pytest.mark.parametrize(
    ("signal", "value", "most"),
    [("errors", 1.0, 8), ("harm", 1.0, 7), ("drift", 1.0, 15), ("agreement", 0.0, 38)],
)
def test_documented_delays_hold_by_default(signal: str, value: float, most: int) -> None:
    """With the default limits a pair that is all wrong is out after the number of samples that the manual states."""
    demotion = Demotion({"duo": LIMITS})
    for _ in range(500):  # a long good time before makes no difference
        _observe(demotion, signal, 1.0 if signal == "agreement" else 0.0)
    n = 0
    while demotion.standing("duo").state == "active" and n < 100:
        _observe(demotion, signal, value)
        n += 1
    assert (n, demotion.standing("duo").why) == (most, signal)


def test_documented_rates_are_found() -> None:
    """Twice the limit of errors is found in 48 samples in the middle, three times in 17: what the manual states."""
    draw = random.Random(11)

    def length(rate: float) -> int:
        alarm, n = Alarm.of_share(0.2, 1000), 1
        while not alarm.see(float(draw.random() < rate)):
            n += 1
        return n

    assert median(length(0.4) for _ in range(400)) <= 60
    assert median(length(0.6) for _ in range(400)) <= 20


def _observe(demotion: Demotion, signal: str, value: float) -> None:
    match signal:
        case "errors":
            demotion.observe_error("duo", bool(value))
        case "harm":
            demotion.observe_harm("duo", bool(value))
        case "drift":
            demotion.observe_drift("duo", value)
        case _:
            demotion.observe_agreement("duo", bool(value), value)


# -- the way out and back


def test_a_pair_goes_out_and_comes_back() -> None:
    """Errors demote; after the rest so many good answers reinstate; every step is told."""
    house = House(rest=60)
    house.fail()
    assert house.rest() == 60
    assert house.state == "probation"
    for _ in range(3):
        assert house.state == "probation"
        house.demotion.observe_error("duo", False)
    assert house.state == "active"
    assert [s.what for s in house.steps] == ["pair_demoted", "pair_probation", "pair_reinstated"]
    assert [s.new.why for s in house.steps] == ["errors", "errors", "probation passed"]


def test_a_bad_probation_rests_longer() -> None:
    """Each alarm on probation doubles the rest, up to a day, and takes fewer samples than the first one."""
    house = House(rest=60)
    first = house.fail()
    rests = []
    for _ in range(14):
        rests.append(house.rest())
        assert house.state == "probation"
        assert house.fail() < first
    assert rests[:4] == [60, 120, 240, 480]
    assert rests[-1] == 86400


def test_a_long_good_time_is_forgiven() -> None:
    """After a day in force the next demotion begins with the shortest rest again; before that it goes on doubling."""
    house = House(rest=60)
    for gone, expected in ((0, 60), (3600, 120), (2 * 86400, 60)):
        house.clock.now += gone
        house.fail()
        assert house.rest() == expected
        assert house.state == "probation"
        for _ in range(3):
            house.demotion.observe_error("duo", False)


def test_a_swap_is_seen() -> None:
    """The first fingerprint is accepted; another demotes, or, with a verified report, goes on probation."""
    house = House()
    assert house.demotion.observe_fingerprint("duo", "aaaa", "verified").state == "active"
    assert house.demotion.observe_fingerprint("duo", "aaaa", "unproven").state == "active"
    assert house.demotion.observe_fingerprint("duo", "bbbb", "unproven").state == "demoted"
    assert house.steps[-1].detail == {"before": "aaaa", "now": "bbbb", "verdict": "unproven"}
    house.rest()
    assert house.demotion.observe_fingerprint("duo", "bbbb", "unproven").state == "probation"
    assert house.demotion.observe_fingerprint("duo", "cccc", "verified").state == "probation"
    assert house.demotion.observe_fingerprint("duo", "", "unproven").state == "probation"
    assert house.demotion.observe_fingerprint("other", "dddd", "unproven") == Standing()


def test_a_person_may_reinstate() -> None:
    """Reinstated by a person, a pair is in force at once and its rests begin anew; an unknown name is an error."""
    house = House(rest=60)
    house.fail()
    assert house.demotion.reinstate("duo", "kim", "cable was loose").state == "active"
    assert (house.steps[-1].who, house.steps[-1].what) == ("kim", "pair_reinstated")
    house.fail()
    assert house.rest() == 60
    with pytest.raises(KeyError):
        house.demotion.reinstate("other", "kim", "")


def test_news_from_elsewhere_count_by_their_order() -> None:
    """A newer standing of another process is put in force, an older one is not; neither is told as a step of ours."""
    one, other = House(), House()
    one.fail()
    found = one.demotion.standing("duo")
    assert other.demotion.take("duo", found)
    assert other.state == "demoted"
    assert not other.demotion.take("duo", found)
    assert not other.demotion.take("duo", Standing(seq=1))
    assert other.steps == []
    other.rest()
    assert other.state == "probation"
    assert one.demotion.take("duo", other.demotion.standing("duo"))
    assert one.demotion.known()["duo"].state == "probation"


def test_a_reload_keeps_standings() -> None:
    """New limits are watched anew, standings stay, and a pair that left is left aside."""
    house = House()
    house.fail()
    house.demotion.configure({"duo": DemotionLimits(max_errors=0.5), "new": LIMITS})
    assert house.state == "demoted"
    house.demotion.configure({"new": LIMITS})
    house.demotion.observe_error("duo", True)
    assert [name for name, _ in house.demotion.states()] == ["new"]


def test_an_unwatched_figure_never_demotes() -> None:
    """A limit of null leaves its signal alone."""
    house = House(max_errors=None, min_agreement=None, max_harm=None, max_drift=None)
    for _ in range(2000):
        for signal, bad in (("errors", 1.0), ("harm", 1.0), ("drift", 1.0), ("agreement", 0.0)):
            _observe(house.demotion, signal, bad)
    assert house.state == "active"


def test_figures_are_shown() -> None:
    """Metrics have one sample for each configured pair and each signal, and a mean of what was compared."""
    house = House()
    house.demotion.observe_agreement("duo", True, 0.8)
    house.demotion.observe_agreement("duo", False, 0.4)
    house.demotion.observe_agreement("made-up", False, 0.4)
    assert list(house.demotion.samples("demoted")) == [({"pair": "duo"}, 0.0)]
    assert {labels["signal"] for labels, _ in house.demotion.levels()} == {"agreement", "harm", "drift", "errors"}
    assert list(house.demotion.agreed()) == [({"pair": "duo"}, 0.5)]
    [(_, f1)] = house.demotion.agreement()
    assert 0.7 < f1 < 0.8
    assert house.demotion.share("duo") == 0.5
    assert house.demotion.share("made-up") == 0.0
