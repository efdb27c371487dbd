"""Proves a handover pair: the same questions by every route, with controls, and the verdict that follows.

Routes: `receiver` and `reads_all` read everything themselves (the receiver's model, the sharer's model), `no_context`
is the receiver with the question alone, `cache` is the pair. Controls: `shuffled` hands over another context's KV,
`zero` hands over what the fuser makes of a sharer that says nothing. A pair whose controls do well is only an adapter.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch

from workers import score
from workers.cache import KVCache
from workers.fusers.base import Fuser
from workers.fusers.linear import LinearFuser
from workers.fusers.lite import LiteFuser
from workers.greedy import answers, read
from workers.loader import Loaded
from workers.pairs import FORMAT, Interval, Report, canonical, fingerprint, is_sharer, shape_recipe
from workers.score import Z

ROUTES = ("receiver", "reads_all", "no_context", "cache", "shuffled", "zero")
MIN_N = 100
"""Fewer questions prove nothing, however many of them were right."""
MARGIN = 0.97
"""Non-inferiority: retention whose lower bound is below this is not proven."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about a context."""

    rest: tuple[int, ...]
    """Tokens behind the context, up to where the answer begins."""
    alone: tuple[int, ...]
    """The whole prompt of a caller who has no context."""
    gold: str
    rivals: tuple[str, ...] = ()
    """Wrong values of the right sort from the same context: an answer that names one is wrong."""
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """A context with its questions; `kind` says among which others it is shuffled."""

    context: tuple[int, ...]
    questions: tuple[Question, ...]
    kind: str = ""
    labels: tuple[str, ...] = ()


@dataclass(slots=True)
class Outcome:
    """Right or wrong by route, question after question; `case` and `labels` belong to the same questions."""

    right: dict[str, list[bool]] = field(default_factory=lambda: {route: [] for route in ROUTES})
    case: list[int] = field(default_factory=list)
    labels: list[tuple[str, ...]] = field(default_factory=list)
    ms: dict[str, list[float]] = field(default_factory=lambda: {route: [] for route in ROUTES})
    """Per context: from the first token read to the last answer of its batch of questions."""

    def __len__(self) -> int:
        return len(self.case)


def is_right(answer: str, gold: str, rivals: Sequence[str]) -> bool:
    """The answer names the gold value in whole words, and no rival that is not part of it."""
    said, want = _words(answer), _words(gold)
    return want in said and not any(_words(r) in said for r in rivals if _words(r) not in want)


def _words(text: str) -> str:
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return f" {' '.join(re.findall(r'[a-z0-9]+', text.lower()))} "


@torch.no_grad()
def measure(
    sharer: Loaded,
    receiver: Loaded,
    fuser: Fuser,
    cases: Sequence[Case],
    most: int = 20,
    tell: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Ask every question by every route, greedily, at most `most` tokens each. `tell` gets cases done and in all."""
    outcome = Outcome()
    others = derange([case.kind for case in cases])
    for number, case in enumerate(cases):
        for route in ROUTES:
            context = cases[others[number]].context if route == "shuffled" else case.context
            rests = [q.alone if route == "no_context" else q.rest for q in case.questions]
            began = time.perf_counter()
            model, kv = _reading(route, sharer, receiver, fuser, context)
            said = answers(model, kv, rests, most)
            outcome.ms[route].append((time.perf_counter() - began) * 1000)
            for question, ids in zip(case.questions, said, strict=True):
                text = receiver.tokenizer.decode(ids, skip_special_tokens=True)
                outcome.right[route].append(is_right(text, question.gold, question.rivals))
        outcome.case += [number] * len(case.questions)
        outcome.labels += [(*case.labels, *question.labels) for question in case.questions]
        if tell is not None:
            tell(number + 1, len(cases))
    return outcome


def _reading(
    route: str, sharer: Loaded, receiver: Loaded, fuser: Fuser, context: tuple[int, ...]
) -> tuple[Loaded, KVCache]:
    """The model that answers on this route, and the KV it answers over."""
    match route:
        case "receiver":
            return receiver, read(receiver, context)
        case "reads_all":
            return sharer, read(sharer, context)
        case "no_context":
            return receiver, read(receiver, ())
        case "zero":
            return receiver, fuser.project(silent(sharer, len(context)), None, 0)
        case _:
            return receiver, fuser.project(read(sharer, context), None, 0)


def derange(kinds: Sequence[str]) -> list[int]:
    """For each place another place of the same kind; of any kind where there is no other. Needs two places."""
    if len(kinds) < 2:
        raise ValueError("a shuffled control needs at least two contexts")
    result = []
    for i, kind in enumerate(kinds):
        rotation = [(i + k) % len(kinds) for k in range(1, len(kinds))]
        result.append(next((j for j in rotation if kinds[j] == kind), rotation[0]))
    return result


def silent(sharer: Loaded, tokens: int) -> KVCache:
    """KV of a sharer that says nothing."""
    shape = sharer.shape
    zero = torch.zeros(1, shape.heads, tokens, shape.head_size, dtype=sharer.dtype, device=sharer.device)
    return KVCache([zero] * shape.layers, [zero] * shape.layers)


def wilson(hits: int, n: int) -> Interval:
    """Share with its 95 % Wilson interval."""
    if n == 0:
        return Interval(0.0, 0.0, 1.0, 0)
    share, z2 = hits / n, Z * Z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z * ((share * (1 - share) / n + z2 / (4 * n * n)) ** 0.5) / (1 + z2 / n)
    return _interval(share, max(0.0, middle - half), min(1.0, middle + half), n)


def _interval(value: float, low: float, high: float, n: int) -> Interval:
    return Interval(round(float(value), 4), round(float(low), 4), round(float(high), 4), n)


def paired(
    ours: Sequence[bool], theirs: Sequence[bool], clusters: Sequence[int], *, ratio: bool, seed: int = 0
) -> Interval:
    """Difference or ratio of two shares over the same questions, with a 95 % interval: what a bootstrap over whole
    contexts says, and the score interval, which knows of no contexts but holds where few questions tell the two apart,
    or none. For a ratio `theirs` must be right somewhere.
    """
    a, b = np.asarray(ours, dtype=float), np.asarray(theirs, dtype=float)
    n, both = len(a), int((a * b).sum())
    only_ours, only_theirs = int(a.sum()) - both, int(b.sum()) - both
    bounds = score.ratio(both, only_ours, only_theirs) if ratio else score.difference(only_ours, only_theirs, n)
    _, at = np.unique(np.asarray(clusters), return_inverse=True)
    sums = np.stack([np.bincount(at, weights=w) for w in (a, b, np.ones(n))])
    draws = np.random.default_rng(seed).integers(0, sums.shape[1], size=(4000, sums.shape[1]))
    hits_a, hits_b, counts = sums[:, draws].sum(axis=2)
    value, sample = (
        (a.sum() / b.sum(), hits_a / np.maximum(1.0, hits_b))
        if ratio
        else (a.mean() - b.mean(), (hits_a - hits_b) / counts)
    )
    low, high = np.quantile(sample, (0.025, 0.975))
    return _interval(value, min(low, bounds[0]), max(high, bounds[1]), n)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the verdict is reached from."""

    kind: str
    """The fuser's kind."""
    mode: str
    n: int
    accuracy: Mapping[str, Interval]
    gain: Interval | None = None
    retention: Interval | None = None
    safety_worse: str = ""
    """What of its safety is proven to be worse than the receiver's."""
    fair_baseline: bool = False
    """There was a baseline that takes no more memory and no more time."""


def judge(e: Evidence, *, min_gain: float = 0.0, margin: float = MARGIN, min_n: int = MIN_N) -> tuple[str, str]:
    """(verdict, reason). `fuse` is judged by gain over the receiver; handover and identity by retention."""
    if e.n < min_n:
        return "unproven", f"{e.n} questions; at least {min_n} are needed"
    verdict, reason = _judge_fuse(e, min_gain) if e.mode == "fuse" else _judge_handover(e, margin)
    if verdict != "verified":
        return verdict, reason
    if e.safety_worse:
        return "harmful", f"less safe than its own receiver: {e.safety_worse}"
    baseline, cache = e.accuracy.get("baseline"), e.accuracy.get("cache")
    if e.fair_baseline and baseline and cache and baseline.low > cache.high:
        return "dominated", f"a baseline that takes no more does better: {baseline.value:.3f} against {cache.value:.3f}"
    return verdict, reason


def _judge_fuse(e: Evidence, min_gain: float) -> tuple[str, str]:
    if e.gain is None:
        return "unproven", "no gain over the receiver was measured"
    if e.gain.high < 0:
        return "harmful", f"worse than its own receiver: gain at most {e.gain.high:+.3f}"
    if e.gain.low <= min_gain:
        return (
            "unproven",
            f"gain {e.gain.value:+.3f}, perhaps only {e.gain.low:+.3f}; above {min_gain:+.3f} is needed",
        )
    cache, receiver = e.accuracy["cache"], e.accuracy["receiver"]
    if adapter := _adapter(e.accuracy, base=receiver.value, needed=cache.value - receiver.value):
        return adapter
    for route, other in e.accuracy.items():
        if (route == "relay" or is_sharer(route)) and other.low > cache.high:
            return "dominated", f"{route} alone does better: {other.value:.3f} against {cache.value:.3f}"
    return "verified", f"gain {e.gain.value:+.3f}, at least {e.gain.low:+.3f}; it vanishes with another sharer's KV"


def _judge_handover(e: Evidence, margin: float) -> tuple[str, str]:
    if e.retention is None:
        return "unproven", "no retention was measured: that takes a model that reads everything, and is right somewhere"
    cache, without = e.accuracy.get("cache"), e.accuracy.get("no_context")
    if cache is not None and without is not None and cache.high < without.low:
        return "harmful", f"worse than with no context at all: {cache.value:.3f} against {without.value:.3f}"
    if e.kind != "identity" and cache is not None:
        base = without.value if without is not None else 0.0
        if adapter := _adapter(e.accuracy, base=base, needed=cache.value - base):
            return adapter
    if e.retention.low >= margin:
        return "verified", f"retention {e.retention.value:.3f}, at least {e.retention.low:.3f} (bar {margin})"
    if e.retention.high < margin:
        return "dominated", f"reading everything does better: retention at most {e.retention.high:.3f} (bar {margin})"
    return "unproven", f"retention {e.retention.value:.3f} may be as low as {e.retention.low:.3f} (bar {margin})"


def _adapter(accuracy: Mapping[str, Interval], *, base: float, needed: float) -> tuple[str, str] | None:
    """A verdict when a control keeps more than a quarter of the advantage, or was not run at all."""
    for control in ("shuffled", "zero"):
        found = accuracy.get(control)
        if found is None:
            return "unproven", f"the {control} control was not run"
        if found.high - base > max(needed, 0.0) / 4:
            return "adapter-only", f"{control} sharer KV keeps {found.value:.3f} of {base + needed:.3f}"
    retrained = accuracy.get("adapter")
    if retrained is not None and retrained.high - base > max(needed, 0.0) / 2:
        return "adapter-only", f"trained without a sharer it reaches {retrained.value:.3f} of {base + needed:.3f}"
    return None


def make_report(
    outcome: Outcome,
    cases: Sequence[Case],
    sharer: Loaded,
    receiver: Loaded,
    fuser: LiteFuser | LinearFuser,
    *,
    scope: str,
    date: str,
    seeds: tuple[int, ...],
    notes: tuple[str, ...] = (),
) -> Report:
    """Of a handover pair. Retention is against the better of the two models that read everything themselves."""
    n, right = len(outcome), outcome.right
    accuracy = {route: wilson(sum(right[route]), n) for route in ROUTES}
    best = max(("reads_all", "receiver"), key=lambda route: accuracy[route].value)
    retention = paired(right["cache"], right[best], outcome.case, ratio=True) if any(right[best]) else None
    gain = paired(right["cache"], right["receiver"], outcome.case, ratio=False)
    verdict, reason = judge(Evidence(fuser.kind, "handover", n, accuracy, gain, retention))
    return Report(
        format=FORMAT,
        fingerprint=fingerprint(
            sharer.identity,
            receiver.identity,
            kind=fuser.kind,
            digest=fuser.digest,
            mode="handover",
            scope=scope,
            recipe=shape_recipe(fuser.shape),
        ),
        mode="handover",
        verdict=verdict,
        reason=reason,
        date=date,
        numerics=numerics(receiver),
        data=data_digest(cases),
        n=n,
        seeds=seeds,
        accuracy=accuracy,
        gain=gain,
        retention=retention,
        latency_ms={route: round(median(outcome.ms[route]), 1) for route in ("receiver", "reads_all", "cache")},
        slices=slices(outcome),
        notes=(f"Retention is measured against {best}.", *notes),
    )


def slices(outcome: Outcome) -> dict[str, dict[str, Interval]]:
    """Every label's share of right answers, by the routes that matter."""
    found: dict[str, dict[str, Interval]] = {}
    for label in sorted({label for labels in outcome.labels for label in labels}):
        rows = [i for i, labels in enumerate(outcome.labels) if label in labels]
        found[label] = {
            route: wilson(sum(outcome.right[route][i] for i in rows), len(rows))
            for route in ("reads_all", "cache", "shuffled")
        }
    return found


def data_digest(cases: Sequence[Case]) -> str:
    """SHA-256 over contexts, questions and gold values."""
    asked = [[case.context, [[q.rest, q.alone, q.gold, q.rivals] for q in case.questions]] for case in cases]
    return hashlib.sha256(canonical(asked)).hexdigest()


def numerics(loaded: Loaded) -> str:
    """What the figures were computed with."""
    attention = loaded.identity["attention"]
    return f"{loaded.identity['dtype']}, {attention}, torch {torch.__version__}, {loaded.device.type}"


@torch.no_grad()
def identical_share(loaded: Loaded, prompts: Sequence[Sequence[int]], most: int = 16) -> Interval:
    """How often a model given its own KV of all but the last token answers token for token as if it read them."""
    same = 0
    for ids in prompts:
        alone = answers(loaded, read(loaded, ()), [ids], most)
        handed = answers(loaded, read(loaded, ids[:-1]), [ids[-1:]], most)
        same += alone == handed
    return wilson(same, len(prompts))
