"""Latency per deployment, learnt online from what happened. Knows numbers only: no clock, no I/O, no policy.

A deployment's latency is two linear laws in milliseconds, each with non-negative weights, so that predictions are
monotone in tokens and queue:

    TTFT          ~ a + b · uncached prompt tokens + c · queue
    total − TTFT  ~ d + e · output tokens + f · output tokens · queue

The weights are fitted by recursive least squares on *relative* errors, clipped, with forgetting. Around the mean lies
a window of the last ratios actual/predicted, whose order statistics give p50 and p90: no shape is assumed for the
noise. A run of answers that all lie beyond the window's edge on one side is a step change: the law is rescaled to
them at once, forgets, and fits again.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from math import exp, log

from policies.facts import Estimate

_WINDOW = 64
_RUN = 5
"""Answers in a row beyond the same edge that count as a step change; by chance once in some 10^5."""
_RENEW = 1 / 0.985
"""What each answer multiplies the weights' variance by: how fast old answers are forgotten."""
_NOISE = 0.09
"""Assumed variance of the relative error (σ = 0.3); sets how fast weights move, not the quantiles."""
_FLOOR_MS = 0.05
_CLIP = 1.0
_SPREAD = tuple(0.35 * z for z in (-1.5, -1.0, -0.67, -0.4, -0.2, 0.0, 0.2, 0.4, 0.67, 1.0, 1.5))
"""Log ratios that a window starts with, pushed out by real ones: a cold estimate is not a certain one."""

USUAL_TOKENS_PER_S = 40.0
"""Output rate of a deployment whose prior states none."""

_UNSEEN_SHARE = 0.2
"""Of the first total, what is taken for TTFT when that was not seen."""

_PROMPT, _OUTPUT = 256.0, 64.0
"""Tokens that count as 1 inside the laws, so that weights are of like size."""

Vector = tuple[float, float, float]


class _Law:
    """A mean with three weights, refitted with every answer."""

    __slots__ = ("_cov", "_start", "weights")

    def __init__(self, weights: Vector, scale: float) -> None:
        self.weights = weights
        self._start = tuple(max(w, 0.2 * scale, _FLOOR_MS) ** 2 for w in weights)
        self._cov = self._diagonal()

    def _diagonal(self) -> tuple[float, ...]:
        """Upper triangle of the weights' covariance: 00, 01, 02, 11, 12, 22."""
        a, b, c = self._start
        return (a, 0.0, 0.0, b, 0.0, c)

    def mean(self, x: Vector) -> float:
        """Milliseconds, never zero."""
        a, b, c = self.weights
        return a * x[0] + b * x[1] + c * x[2] + _FLOOR_MS

    def fit(self, x: Vector, actual: float, mean: float) -> None:
        """One step of least squares on actual/mean, whose target is 1."""
        error = actual / mean - 1.0
        error = _CLIP if error > _CLIP else error
        x0, x1, x2 = x
        x0, x1, x2 = x0 / mean, x1 / mean, x2 / mean
        p00, p01, p02, p11, p12, p22 = self._cov
        g0 = p00 * x0 + p01 * x1 + p02 * x2
        g1 = p01 * x0 + p11 * x1 + p12 * x2
        g2 = p02 * x0 + p12 * x1 + p22 * x2
        gain = 1.0 / (_NOISE + x0 * g0 + x1 * g1 + x2 * g2)
        w0, w1, w2 = self.weights
        h0, h1, h2 = gain * g0, gain * g1, gain * g2
        w0, w1, w2 = w0 + error * h0, w1 + error * h1, w2 + error * h2
        self.weights = (w0 if w0 > 0.0 else 0.0, w1 if w1 > 0.0 else 0.0, w2 if w2 > 0.0 else 0.0)
        p00 -= h0 * g0
        p11 -= h1 * g1
        p22 -= h2 * g2
        # Requests that are all alike teach one direction only; forgetting the others would let them blow up.
        a, b, c = self._start
        r = _RENEW if p00 < a and p11 < b and p22 < c else 1.0
        self._cov = (r * p00, r * (p01 - h0 * g1), r * (p02 - h0 * g2), r * p11, r * (p12 - h1 * g2), r * p22)

    def rescale(self, factor: float) -> None:
        """All answers became `factor` times as long: believe it, and be open to another shape."""
        a, b, c = self.weights
        self.weights = (a * factor, b * factor, c * factor)
        self._start = tuple(v * factor * factor for v in self._start)
        self._cov = self._diagonal()


class _Ratios:
    """The last log ratios actual/mean, in order of time and of size."""

    __slots__ = ("_recent", "_run", "_sorted", "known")

    def __init__(self) -> None:
        self._recent: deque[float] = deque(_SPREAD)
        self._sorted: list[float] = list(_SPREAD)
        self._run = 0
        self.known: tuple[float, float] | None = None
        """What `quantiles` gave since the last answer."""

    def quantiles(self) -> tuple[float, float]:
        """p50 and p90 of actual/mean; p90 one rank up, as a finite window asks for."""
        if self.known is None:
            values = self._sorted
            n = len(values)
            self.known = exp(values[n // 2]), exp(values[9 * (n + 1) // 10])
        return self.known

    def add(self, ratio: float) -> float | None:
        """Take in actual/mean; the factor to rescale by when a step change is seen."""
        value = log(ratio if ratio > 1e-6 else 1e-6)
        values, run = self._sorted, self._run
        n = len(values)
        if value > values[9 * (n + 1) // 10]:
            run = run + 1 if run > 0 else 1
        elif value < values[n // 10]:
            run = run - 1 if run < 0 else -1
        else:
            run = 0
        self._run = run
        self.known = None
        self._recent.append(value)
        insort(values, value)
        if n >= _WINDOW:
            del values[bisect_left(values, self._recent.popleft())]
        return self._step() if run >= _RUN or run <= -_RUN else None

    def _step(self) -> float:
        """Keep the run alone, around its own median."""
        run = sorted(list(self._recent)[-_RUN:])
        median = run[_RUN // 2]
        centred = [v - median for v in run]
        self._recent = deque([*_SPREAD, *centred])
        self._sorted = sorted(self._recent)
        self._run = 0
        return exp(median)


class _Model:
    """One deployment."""

    __slots__ = ("output", "rest", "samples", "total", "ttft", "ttft_ratio")

    def __init__(self, ttft: Vector, rest: Vector, ttft_scale: float, rest_scale: float) -> None:
        self.ttft = _Law(ttft, ttft_scale)
        self.rest = _Law(rest, rest_scale)
        self.ttft_ratio = _Ratios()
        self.total = _Ratios()
        self.samples = 0
        self.output: float | None = None

    def learn(self, x: Vector, y: Vector, ttft_ms: float, rest_ms: float) -> None:
        """Both times were seen."""
        ttft, rest = self.ttft.mean(x), self.rest.mean(y)
        ttft_step = self.ttft_ratio.add(ttft_ms / ttft)
        total_step = self.total.add((ttft_ms + rest_ms) / (ttft + rest))
        if ttft_step is not None:
            self.ttft.rescale(ttft_step)
        else:
            self.ttft.fit(x, ttft_ms, ttft)
        if total_step is not None:
            self.rest.rescale(max(total_step * (ttft + rest) - self.ttft.mean(x), _FLOOR_MS) / rest)
        else:
            self.rest.fit(y, rest_ms, rest)

    def learn_total(self, x: Vector, y: Vector, total_ms: float) -> None:
        """Only their sum was seen: both laws answer for the error in proportion, and its features tell them apart."""
        ttft, rest = self.ttft.mean(x), self.rest.mean(y)
        ratio = total_ms / (ttft + rest)
        step = self.total.add(ratio)
        if step is not None:
            self.ttft.rescale(step)
            self.rest.rescale(step)
        else:
            self.ttft.fit(x, ttft * ratio, ttft)
            self.rest.fit(y, rest * ratio, rest)


class Estimates:
    """Predictions per deployment id; ids come from config, so their number is bounded by it."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    def prior(
        self,
        deployment_id: str,
        *,
        ttft_ms: float | None = None,
        tokens_per_s: float | None = None,
        prefill_tokens_per_s: float | None = None,
        decode_tokens_per_s: float | None = None,
    ) -> None:
        """State what is believed before the first answer; ignored once there is one.

        Needs a time to the first token (`ttft_ms`, `prefill_tokens_per_s` or both), ValueError otherwise; without a
        rate of output (`tokens_per_s`, or `decode_tokens_per_s` as workers say) `USUAL_TOKENS_PER_S` is assumed.
        """
        decode = decode_tokens_per_s or tokens_per_s or USUAL_TOKENS_PER_S
        if ttft_ms is None and not prefill_tokens_per_s:
            raise ValueError("a latency prior needs ttft_ms or prefill_tokens_per_s")
        known = self._models.get(deployment_id)
        if known is not None and known.samples:
            return
        per_prompt = 1000.0 * _PROMPT / prefill_tokens_per_s if prefill_tokens_per_s else 0.0
        per_output = 1000.0 * _OUTPUT / decode
        base = ttft_ms or 0.0
        # Whoever waits behind one other request waits at least for its prefill.
        self._models[deployment_id] = _Model(
            (base, per_prompt, per_prompt), (0.0, per_output, 0.0), base + per_prompt, per_output
        )

    def predict(
        self,
        deployment_id: str,
        *,
        prompt_tokens: int,
        output_tokens: int,
        cached_tokens: int = 0,
        queue: int = 0,
        cost: float = 0.0,
    ) -> Estimate | None:
        """Quantiles in milliseconds, or None for a deployment without answers and without a prior.

        `cost` in USD is the caller's to know, and stands in the estimate as given.
        """
        model = self._models.get(deployment_id)
        if model is None:
            return None
        # The means of both laws, written out: this is asked for every deployment of every request.
        uncached = (prompt_tokens - cached_tokens) / _PROMPT if prompt_tokens > cached_tokens else 0.0
        output = output_tokens / _OUTPUT
        a, b, c = model.ttft.weights
        d, e, f = model.rest.weights
        ttft = a + b * uncached + c * queue + _FLOOR_MS
        total = ttft + (d + e * output + f * (output * queue) + _FLOOR_MS)
        ttft50, ttft90 = model.ttft_ratio.known or model.ttft_ratio.quantiles()
        total50, total90 = model.total.known or model.total.quantiles()
        t50, t90 = ttft * ttft50, ttft * ttft90
        all50, all90 = total * total50, total * total90
        return Estimate(t50, t90, all50 if all50 > t50 else t50, all90 if all90 > t90 else t90, cost, model.samples)

    def learn(
        self,
        deployment_id: str,
        *,
        prompt_tokens: int,
        output_tokens: int,
        ttft_ms: float | None,
        total_ms: float,
        cached_tokens: int = 0,
        queue: int = 0,
    ) -> None:
        """Take in one finished answer: the tokens it really had, and the queue as it was at the prediction.

        `ttft_ms` is None where nobody saw a first token, as of an answer that came in one piece.
        """
        x, y = _ttft_vector(prompt_tokens, cached_tokens, queue), _rest_vector(output_tokens, queue)
        model = self._models.get(deployment_id)
        if model is None:
            seen = _UNSEEN_SHARE * total_ms if ttft_ms is None else ttft_ms
            model = self._models[deployment_id] = _first(x, y, seen, max(total_ms - seen, 0.0))
        if ttft_ms is None:
            model.learn_total(x, y, max(total_ms, _FLOOR_MS))
        else:
            ttft_ms = max(ttft_ms, _FLOOR_MS)
            model.learn(x, y, ttft_ms, max(total_ms - ttft_ms, 0.0))
        model.samples += 1
        model.output = output_tokens if model.output is None else model.output + 0.1 * (output_tokens - model.output)

    def usual_output(self, deployment_id: str) -> int | None:
        """Output tokens such answers lately had (moving mean), for callers who set no bound of their own."""
        model = self._models.get(deployment_id)
        return None if model is None or model.output is None else round(model.output)

    def forget(self, deployment_id: str) -> None:
        """Drop what was learnt, as for a deployment that left the config."""
        self._models.pop(deployment_id, None)


def _ttft_vector(prompt_tokens: int, cached_tokens: int, queue: int) -> Vector:
    return (1.0, (prompt_tokens - cached_tokens) / _PROMPT if prompt_tokens > cached_tokens else 0.0, queue)


def _rest_vector(output_tokens: int, queue: int) -> Vector:
    output = output_tokens / _OUTPUT
    return (1.0, output, output * queue)


def _first(x: Vector, y: Vector, ttft_ms: float, rest_ms: float) -> _Model:
    """Without a prior the first answer is one: half of its TTFT lies in the prompt, nearly all the rest in output."""
    ttft = (0.5 * ttft_ms, 0.5 * ttft_ms / max(x[1], 0.1), 0.0)
    rest = (0.1 * rest_ms, 0.9 * rest_ms / max(y[1], 0.02), 0.0)
    return _Model(ttft, rest, ttft_ms, rest_ms)
