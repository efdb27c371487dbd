"""Verifying: the verdict is a table, the intervals are laws, and the measuring tells a pair from an adapter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.tiny import tiny, tiny_pair
from workers import score
from workers.cache import KVCache
from workers.fusers.base import Change
from workers.fusers.identity import IdentityFuser
from workers.fusers.lite import LiteShape, fresh
from workers.greedy import answers, read
from workers.loader import Loaded
from workers.pairs import Interval, read_pair, read_report
from workers.verify import (
    MARGIN,
    ROUTES,
    Case,
    Evidence,
    Outcome,
    Question,
    data_digest,
    derange,
    identical_share,
    is_right,
    judge,
    make_report,
    measure,
    paired,
    slices,
    wilson,
)

BUNDLED = Path(__file__).parents[2] / "pairs"


def about(value: float, n: int = 400, width: float = 0.03) -> Interval:
    return Interval(value, value - width, value + width, n)


def handover(n: int = 400, *, cache: float, retention: float, shuffled: float = 0.02, zero: float = 0.0) -> Evidence:
    accuracy = {
        "cache": about(cache),
        "shuffled": about(shuffled),
        "zero": about(zero),
        "no_context": about(0.01),
        "reads_all": about(0.9),
    }
    return Evidence("lite", "handover", n, accuracy, retention=about(retention, width=0.02))


def fuse(
    n: int = 400, *, gain: float, shuffled: float = 0.4, sharer: float = 0.5, width: float = 0.03, relay: float = 0.6
) -> Evidence:
    accuracy = {
        "receiver": about(0.4),
        "cache": about(0.4 + gain),
        "shuffled": about(shuffled, width=0.01),
        "zero": about(0.4, width=0.01),
        "sharer": about(sharer),
        "relay": about(relay),
    }
    return Evidence("c2c", "fuse", n, accuracy, gain=about(gain, width=width))


IDENTITY = Evidence("identity", "handover", 200, {}, gain=Interval(0, 0, 0, 200), retention=Interval(1, 0.981, 1, 200))


@pytest.mark.parametrize(
    ("evidence", "verdict", "says"),
    [
        (handover(cache=0.95, retention=1.05), "verified", "retention"),
        (handover(15, cache=1.0, retention=1.2), "unproven", "15 questions"),
        (handover(99, cache=0.95, retention=1.05), "unproven", "99 questions"),
        (handover(cache=0.95, retention=1.05, shuffled=0.9), "adapter-only", "shuffled"),
        (handover(cache=0.95, retention=1.05, zero=0.6), "adapter-only", "zero"),
        (handover(cache=0.85, retention=0.9), "dominated", "reading everything"),
        (handover(cache=0.9, retention=0.98), "unproven", "as low as 0.96"),
        (IDENTITY, "verified", "retention 1.000"),
        (Evidence("lite", "handover", 400, {"cache": about(0.9)}, retention=about(1.1)), "unproven", "not run"),
        (Evidence("lite", "handover", 400, {"cache": about(0.9)}), "unproven", "no retention"),
        (
            Evidence(
                "lite",
                "handover",
                400,
                {"cache": about(0.2), "no_context": about(0.4)},
                retention=about(1.1),
            ),
            "harmful",
            "no context",
        ),
        (fuse(gain=0.3), "verified", "vanishes"),
        (fuse(15, gain=0.6), "unproven", "15 questions"),
        (fuse(gain=-0.1), "harmful", "worse than its own receiver"),
        (fuse(gain=0.1, shuffled=0.49), "adapter-only", "shuffled"),
        (fuse(gain=0.02), "unproven", "perhaps only"),
        (fuse(gain=0.2, sharer=0.9), "dominated", "sharer alone"),
        (fuse(gain=0.2, relay=0.8), "dominated", "relay alone"),
        (Evidence("c2c", "fuse", 400, {}), "unproven", "no gain"),
    ],
)
def test_verdict(evidence: Evidence, verdict: str, says: str) -> None:
    """The verdict follows from the evidence, and its reason says why."""
    found, reason = judge(evidence)
    assert (found, says in reason) == (verdict, True), (found, reason)


@given(
    cache=st.floats(0, 1),
    retention=st.floats(0.5, 1.5),
    shuffled=st.floats(0, 1),
    zero=st.floats(0, 1),
    n=st.integers(0, 300),
)
def test_verified_needs_all_of_it(cache: float, retention: float, shuffled: float, zero: float, n: int) -> None:
    """Nothing is verified without enough questions, proven retention and controls that collapse."""
    verdict, reason = judge(handover(n, cache=cache, retention=retention, shuffled=shuffled, zero=zero))
    assert reason
    if verdict == "verified":
        assert n >= 100
        assert retention - 0.02 >= 0.97
        assert max(shuffled, zero) < cache / 2 + 0.02


@pytest.mark.parametrize(
    ("answer", "gold", "rivals", "right"),
    [
        ("The city is Lisbon.", "Lisbon", (), True),
        ("lisbon", "Lisbon", (), True),
        ("She lives in Lisbon or Oslo.", "Lisbon", ("Oslo",), False),
        ("The city is Lisbonne.", "Lisbon", (), False),
        ("Vivian Deraind", "Vivian", ("Deraind Oslo",), True),
        ("The mayor is Vivian.", "Vivian Deraind", (), False),
        ("1,703 people", "1703", ("17",), True),
        ("It sells for 17030.", "1703", (), False),
        ("new Lisbon Oslo", "Lisbon Oslo", ("Oslo",), True),
        ("", "Lisbon", (), False),
    ],
)
def test_right_answers(answer: str, gold: str, rivals: tuple[str, ...], right: bool) -> None:
    """Right means the gold value in whole words and none of its rivals."""
    assert is_right(answer, gold, rivals) is right


@given(st.integers(1, 500), st.data())
def test_wilson_holds_the_share(n: int, data: st.DataObject) -> None:
    """The interval lies in [0, 1], holds the share, and is wider for fewer questions."""
    hits = data.draw(st.integers(0, n))
    found = wilson(hits, n)
    assert 0 <= found.low <= found.value <= found.high <= 1
    wider = wilson(hits, n).high - wilson(hits, n).low
    narrower = wilson(4 * hits, 4 * n)
    assert narrower.high - narrower.low < wider


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 9)), min_size=1, max_size=60))
def test_paired_intervals(rows: list[tuple[bool, bool, int]]) -> None:
    """A paired interval holds its value, is reproducible, and turns its sign with its sides."""
    ours, theirs, clusters = (list(column) for column in zip(*rows, strict=True))
    found = paired(ours, theirs, clusters, ratio=False)
    assert found.low - 1e-3 <= found.value <= found.high + 1e-3 or found.n < 20
    assert found == paired(ours, theirs, clusters, ratio=False)
    assert paired(theirs, ours, clusters, ratio=False).value == pytest.approx(-found.value)


def test_no_difference_is_no_certainty() -> None:
    """Routes that never differ have the interval that so many questions allow, not none."""
    few, many = (paired([True] * n, [True] * n, list(range(n)), ratio=True) for n in (15, 300))
    assert few.low < 0.9 < 0.97 < many.low < 1


def _likeliest(cells: Callable[[float], list[tuple[int, float]]], low: float, high: float) -> float:
    """The free share under which these counts are likeliest, by thirds: what is searched has one top."""

    def unlikely(share: float) -> float:
        return -sum(count * math.log(max(chance, 1e-300)) for count, chance in cells(share) if count)

    for _ in range(80):
        third = (high - low) / 3
        low, high = (low, high - third) if unlikely(low + third) < unlikely(high - third) else (low + third, high)
    return (low + high) / 2


def _not_rejected(statistic: Callable[[float], float], values: Sequence[float]) -> tuple[float, float]:
    kept = [value for value in values if abs(statistic(value)) <= 1.959964]
    return min(kept), max(kept)


TABLES = [(60, 12, 5, 23), (97, 0, 3, 0), (95, 4, 0, 1), (10, 6, 9, 75), (40, 0, 0, 60)]
"""Both right, ours only, theirs only, neither."""


@pytest.mark.parametrize(("both", "ours", "theirs", "neither"), TABLES)
def test_the_interval_of_a_difference_is_what_its_test_does_not_reject(
    both: int, ours: int, theirs: int, neither: int
) -> None:
    """By definition: each difference is tried, under the shares that make the counts likeliest, which are searched."""
    n = both + ours + theirs + neither

    def statistic(d: float) -> float:
        q = _likeliest(lambda q: [(ours, q + d), (theirs, q), (both + neither, 1 - 2 * q - d)], max(0, -d), (1 - d) / 2)
        return (ours - theirs - n * d) / math.sqrt(max(1e-9, n * (2 * q + d - d * d)))

    tried = [d / 500 for d in range(-100, 101)]
    assert score.difference(ours, theirs, n) == pytest.approx(_not_rejected(statistic, tried), abs=2.1e-3)


@pytest.mark.parametrize(("both", "ours", "theirs", "neither"), TABLES)
def test_the_interval_of_a_ratio_is_what_its_test_does_not_reject(
    both: int, ours: int, theirs: int, neither: int
) -> None:
    """The same of the ratio; and with the sides changed it is turned over."""
    n = both + ours + theirs + neither
    some = (both + ours + theirs) / n

    def statistic(r: float) -> float:
        def cells(q: float) -> list[tuple[int, float]]:
            return [(both, (some - q) / r - q), (ours, some - (some - q) / r), (theirs, q)]

        (_, p11), (_, p10), (_, p01) = cells(_likeliest(cells, max(0.0, some * (1 - r)), some / (1 + r)))
        return (both + ours - r * (both + theirs)) / math.sqrt(n * (p10 + r * r * p01 + (1 - r) ** 2 * p11))

    low, high = score.ratio(both, ours, theirs)
    step = (high - low) / 200
    tried = [low + step * i for i in range(-40, 241) if low + step * i > 0]
    assert (low, high) == pytest.approx(_not_rejected(statistic, tried), abs=1.1 * step)
    assert score.ratio(both, theirs, ours) == pytest.approx((1 / high, 1 / low), rel=1e-6)


@pytest.mark.parametrize("n", [100, 130, 200, 300, 600])
def test_a_pair_below_the_bar_is_seldom_verified(n: int) -> None:
    """One that keeps exactly 0.97 of what is always right passes by luck in one run of 40 at most, of all there are."""
    passes = [
        paired([i >= k for i in range(n)], [True] * n, range(n), ratio=True).low >= MARGIN for k in range(n // 50)
    ]
    chance = sum(math.comb(n, k) * 0.03**k * 0.97 ** (n - k) for k, passed in enumerate(passes) if passed)
    assert chance <= 0.025
    assert (any(passes), passes[-1]) == (n >= 130, False)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12))
def test_a_gain_is_proven_only_where_its_test_says_so(better: int, worse: int) -> None:
    """However few items tell the two apart, nothing is on one side of 0 that McNemar's test does not put there."""
    ours = [i < better for i in range(100)]
    theirs = [better <= i < better + worse for i in range(100)]
    found = paired(ours, theirs, range(100), ratio=False)
    if found.low > 0 or found.high < 0:
        assert (better - worse) ** 2 > 1.959**2 * (better + worse)


def test_clusters_widen_the_interval() -> None:
    """Questions about one document count as less evidence than as many about different ones."""
    ours, theirs = [True] * 40 + [False] * 40, [False, True] * 40
    apart = paired(ours, theirs, list(range(80)), ratio=False)
    together = paired(ours, theirs, [i // 10 for i in range(80)], ratio=False)
    assert together.high - together.low > apart.high - apart.low


@given(st.lists(st.sampled_from("ab"), min_size=2, max_size=12))
def test_derangement(kinds: list[str]) -> None:
    """Everyone gets another's context, of the same kind wherever there is one."""
    for i, j in enumerate(derange(kinds)):
        assert i != j
        assert kinds[i] == kinds[j] or kinds.count(kinds[i]) == 1


def test_derangement_needs_two() -> None:
    """One context cannot be shuffled."""
    with pytest.raises(ValueError, match="at least two"):
        derange(["a"])


class Deaf:
    """An adapter: says the same whatever the sharer has read."""

    kind = "lite"
    digest = "deaf"
    needs_own = False
    parameters = 0

    def __init__(self, model: Loaded, said: tuple[int, ...]) -> None:
        self.source_layers = frozenset(range(model.shape.layers))
        self._kv = read(model, said)

    def project(self, source: KVCache, own: KVCache | None, start: int) -> KVCache:
        return self._kv

    def change(self) -> Change:
        return Change(1.0, 0.0)


def own_answers(model: Loaded, contexts: list[tuple[int, ...]]) -> list[Case]:
    """Cases whose gold is what the model itself answers, one letter long."""
    cases = []
    for number, context in enumerate(contexts):
        rests = [(7,), (8, 9)]
        gold = [model.tokenizer.decode(a) for a in answers(model, read(model, context), rests, 6)]
        questions = tuple(
            Question(r, (1, *r), g, (), (f"q:{i}",)) for i, (r, g) in enumerate(zip(rests, gold, strict=True))
        )
        cases.append(Case(context, questions, "k", (f"case:{number}",)))
    return cases


CONTEXTS = [(i + 1, 2 * i + 2, 25 - i, 11, 3 + i) for i in range(6)]


def test_measuring_an_identity_pair() -> None:
    """A pair of one model answers by `cache` as it does reading everything; its controls do not."""
    model = tiny(4, seed=3)
    cases = own_answers(model, CONTEXTS)
    fuser = IdentityFuser(model.identity, model.identity, model.shape)
    told: list[tuple[int, int]] = []
    outcome = measure(model, model, fuser, cases, most=6, tell=lambda a, b: told.append((a, b)))
    assert len(outcome) == 12
    assert outcome.case == [i // 2 for i in range(12)]
    assert all(len(outcome.right[route]) == 12 for route in ROUTES)
    assert outcome.right["cache"] == outcome.right["reads_all"] == outcome.right["receiver"]
    assert sum(outcome.right["cache"]) > sum(outcome.right["shuffled"])
    assert told[-1] == (6, 6)
    assert set(slices(outcome)) == {"q:0", "q:1", *(f"case:{i}" for i in range(6))}


def test_measuring_an_adapter() -> None:
    """A fuser that does not listen answers the same with another's KV, and so its controls tell."""
    model = tiny(4, seed=3)
    cases = own_answers(model, CONTEXTS)
    outcome = measure(model, model, Deaf(model, CONTEXTS[0]), cases, most=6)
    assert outcome.right["cache"] == outcome.right["shuffled"] == outcome.right["zero"]


def test_report() -> None:
    """The report holds figures of every route, the digest of the questions, and the verdict of `judge`."""
    sharer, receiver = tiny_pair()
    cases = own_answers(sharer, CONTEXTS)
    fuser = fresh(LiteShape(sharer.shape, receiver.shape, (0, 3), 4), torch.float32, 0)
    fuser.digest = "f"
    outcome = Outcome()
    for number in range(70):
        outcome.case += [number, number]
        outcome.labels += [("a",), ("b",)]
        for route in ROUTES:
            outcome.right[route] += [route in {"cache", "reads_all"}] * 2
            outcome.ms[route].append(1.0 + number)
    report = make_report(
        outcome, cases, sharer, receiver, fuser, scope="context", date="2026-01-01", seeds=(0,), notes=("n",)
    )
    assert set(report.accuracy) == set(ROUTES)
    assert (report.n, report.verdict, report.data) == (140, "verified", data_digest(cases))
    assert report.retention is not None
    assert report.retention.value == 1.0
    assert report.gain is not None
    assert report.gain.value == 1.0
    assert report.notes[0] == "Retention is measured against reads_all."
    assert report.slices["a"]["cache"].n == 70
    assert report.latency_ms["cache"] == 35.5


def test_data_digest_covers_every_part() -> None:
    """Another context, question, gold or rival is another digest."""
    base = Case((1, 2), (Question((3,), (4,), "g", ("r",)),))
    others = [
        Case((1, 3), base.questions),
        Case((1, 2), (Question((4,), (4,), "g", ("r",)),)),
        Case((1, 2), (Question((3,), (5,), "g", ("r",)),)),
        Case((1, 2), (Question((3,), (4,), "h", ("r",)),)),
        Case((1, 2), (Question((3,), (4,), "g", ()),)),
    ]
    assert len({data_digest([case]) for case in (base, *others)}) == 6


def test_identical_share() -> None:
    """A model given its own KV answers token for token as alone."""
    model = tiny(3, seed=5)
    prompts = [[i + 1, 3 * i + 2, 20 - i, 7] for i in range(6)]
    assert identical_share(model, prompts, 8) == wilson(6, 6)


@pytest.mark.parametrize("name", ["smol-reader", "smol-twin"])
def test_bundled_reports(name: str) -> None:
    """A shipped pair carries a report with a verdict that `judge` gives from the report's own figures."""
    pair, report = read_pair(BUNDLED / name), read_report(BUNDLED / name)
    assert report is not None
    evidence = Evidence(pair.fuser.kind, report.mode, report.n, report.accuracy, report.gain, report.retention)
    assert judge(evidence) == (report.verdict, report.reason)
    assert report.n >= 100
    assert report.notes
