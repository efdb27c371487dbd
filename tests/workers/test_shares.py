from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.shares import CREDIT_S, Line, Shares

NAMES = ("a", "b", "c")


@dataclass(eq=False)
class Waiting:
    account: str


def backlogged(weights: dict[str, float], costs: list[float]) -> dict[str, float]:
    """Seconds that each account got, all waiting all the time, served one quantum after the other."""
    shares = Shares()
    line: Line[Waiting] = Line(shares)
    for name in weights:
        line.add(Waiting(name))
    got = dict.fromkeys(weights, 0.0)
    for cost in costs:
        who = next(line.heads()).account
        shares.charge(who, cost, weights[who])
        got[who] += cost
    return got


@given(
    st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 2.0, 4.0]) for name in NAMES}),
    st.lists(st.floats(0.001, 0.5), min_size=20, max_size=200),
)
def test_those_who_always_wait_share_by_weight(weights: dict[str, float], costs: list[float]) -> None:
    """Whatever each quantum costs, time by weight never differs by more than the largest quantum by weight."""
    got = backlogged(weights, costs)
    by_weight = [got[name] / weights[name] for name in weights]
    assert max(by_weight) - min(by_weight) <= max(costs) / min(weights.values()) + 1e-9


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 5)), max_size=60))
def test_nobody_saves_up_more_than_the_credit(history: list[tuple[str, float]]) -> None:
    """After any history, no account stands more than the credit before another."""
    shares = Shares()
    for name, seconds in history:
        shares.meet(name)
        shares.charge(name, seconds)
    used = [shares.used(name) for name in NAMES]
    assert max(used) - min(used) <= CREDIT_S + 1e-9


def test_a_quiet_account_goes_before_a_busy_one() -> None:
    """Who was met and then used little goes first as long as its credit lasts; equals keep their order of arrival."""
    shares = Shares()
    line: Line[Waiting] = Line(shares)
    busy, quiet = Waiting("busy"), Waiting("quiet")
    line.add(busy)
    line.add(quiet)
    assert list(line.heads()) == [busy, quiet]
    shares.charge("busy", 100.0)
    assert list(line.heads()) == [quiet, busy]
    assert shares.before("quiet", ["busy"])
    shares.charge("quiet", CREDIT_S + 0.1)
    assert list(line.heads()) == [busy, quiet]


def test_a_newcomer_has_no_credit() -> None:
    """What one used while nobody else asked is not held against it."""
    shares = Shares()
    shares.meet("old")
    shares.charge("old", 1000.0)
    shares.meet("new")
    assert not shares.before("new", ["old"])
    assert shares.used("new") == shares.used("old")


def test_one_account_is_served_in_order_of_arrival() -> None:
    """Of one account the first to come is the head; the one that gives way is the last of the longest queue."""
    line: Line[Waiting] = Line(Shares())
    jobs = [Waiting("a"), Waiting("a"), Waiting("b")]
    for job in jobs:
        line.add(job)
    assert [job for job in line.heads() if job.account == "a"] == [jobs[0]]
    assert line.longest() is jobs[1]
    assert line.remove(jobs[0])
    assert not line.remove(jobs[0])
    assert len(line) == 2
    assert bool(line)


@pytest.mark.parametrize("weight", [1.0, 4.0])
def test_weight_is_a_divisor(weight: float) -> None:
    """The same work counts a quarter for an account of weight four."""
    shares = Shares()
    shares.meet("a")
    shares.charge("a", 1.0, weight)
    assert shares.used("a") == pytest.approx(1.0 / weight)
