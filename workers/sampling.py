"""Logits -> the next token, one row at a time. Knows no model and no text.

Order as in vLLM and OpenAI: logit bias, penalties over what was generated and prompted, temperature, top-k, top-p.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import torch

from workers.errors import BadPrompt

_COLD = 1e-5
"""A temperature below which only the likeliest token can be drawn: dividing by less would leave no numbers."""
_FEW = 256
"""Tokens among which the nucleus is sought first."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What a caller may ask of the choice of tokens. The defaults are OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    logprobs: int | None = None
    """Number of alternatives to report beside each token; None reports nothing."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 2.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
            ("n", 1, 128),
            ("top_k", -1, 1 << 31),
            ("repetition_penalty", 0.01, 100.0),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise BadPrompt(f"{name} must be between {low} and {high}, and was {value}")
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise BadPrompt(f"logit_bias must be between -100 and 100, and was {bias} for token {token}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise BadPrompt(f"max_tokens must be at least 1, and was {self.max_tokens}")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise BadPrompt(f"top_logprobs must be between 0 and 20, and was {self.logprobs}")
        if len(self.stop) > 16:
            raise BadPrompt(f"at most 16 stop strings may be given, and there were {len(self.stop)}")

    @property
    def cold(self) -> bool:
        """The likeliest token is taken, nothing is drawn."""
        return self.temperature < _COLD

    @property
    def greedy(self) -> bool:
        """The token with the largest logit, nothing else to do: rows like this are chosen together."""
        return (
            self.cold
            and not self.logit_bias
            and not self.presence_penalty
            and not self.frequency_penalty
            and self.repetition_penalty == 1.0
            and self.logprobs is None
        )


@dataclass(frozen=True, slots=True)
class Chosen:
    """A token, with its log probability and the likeliest others where they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The state of one row: its random generator and what it has produced."""

    def __init__(self, sampling: Sampling, prompt: tuple[int, ...], index: int = 0) -> None:
        self.sampling = sampling
        self._prompt = frozenset(prompt) if sampling.repetition_penalty != 1.0 else frozenset()
        self._counts: Counter[int] = Counter()
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed((sampling.seed + index) & 0x7FFF_FFFF_FFFF_FFFF)

    def choose(self, logits: torch.Tensor) -> Chosen:
        """`logits` of shape (vocabulary,). Log probabilities are those before temperature, as OpenAI's."""
        asked = self.sampling
        if asked.greedy:
            return self._take(int(logits.argmax()))
        row = logits.float().cpu().clone()
        self._bias(row)
        token = int(row.argmax()) if asked.cold else self._draw(row / asked.temperature)
        if asked.logprobs is None:
            return self._take(token)
        logprobs = torch.log_softmax(row, dim=-1)
        values, ids = logprobs.topk(asked.logprobs) if asked.logprobs else (row[:0], row[:0])
        top = tuple((int(i), float(v)) for i, v in zip(ids, values, strict=True))
        return self._take(token, float(logprobs[token]), top)

    def record(self, token: int) -> Chosen:
        """Take a token that was chosen together with other greedy rows."""
        return self._take(token)

    def _take(self, token: int, logprob: float | None = None, top: tuple[tuple[int, float], ...] = ()) -> Chosen:
        self._counts[token] += 1
        return Chosen(token, logprob, top)

    def _bias(self, row: torch.Tensor) -> None:
        asked = self.sampling
        for token, bias in asked.logit_bias.items():
            row[token] += bias
        if asked.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(self._prompt | set(self._counts)), dtype=torch.long)
            values = row[seen]
            row[seen] = torch.where(values > 0, values / asked.repetition_penalty, values * asked.repetition_penalty)
        if (asked.presence_penalty or asked.frequency_penalty) and self._counts:
            made = torch.tensor(list(self._counts), dtype=torch.long)
            times = torch.tensor(list(self._counts.values()), dtype=row.dtype)
            row[made] -= asked.presence_penalty + asked.frequency_penalty * times

    def _draw(self, row: torch.Tensor) -> int:
        asked = self.sampling
        if 0 < asked.top_k < row.shape[0]:
            floor = row.topk(asked.top_k).values[-1]
            row = row.masked_fill(row < floor, float("-inf"))
        probabilities = torch.softmax(row, dim=-1)
        if asked.min_p:
            probabilities = probabilities.masked_fill(probabilities < asked.min_p * probabilities.max(), 0.0)
        if asked.top_p < 1.0:
            probabilities = nucleus(probabilities, asked.top_p)
        return draw(probabilities, float(torch.rand(1, generator=self._random, dtype=torch.float64)))


def likeliest(logits: torch.Tensor) -> list[tuple[int, bool]]:
    """Of each row of (rows, vocabulary): its likeliest token, and whether its logits are numbers. One wait for the
    device.
    """
    # NaN, and what is infinite, is what argmax finds.
    tokens = logits.argmax(dim=-1, keepdim=True)
    found = torch.cat([tokens.double(), logits.gather(1, tokens).double()], dim=1).tolist()
    return [(int(token), math.isfinite(value)) for token, value in found]


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The likeliest tokens whose mass reaches top_p, the one that crosses it included, as in vLLM; the others 0."""
    # Ordering a whole vocabulary takes milliseconds, and the mass lies in few tokens nearly always.
    ordered, ids = probabilities.topk(min(_FEW, probabilities.shape[0]))
    if ordered[-1] > 0 and ordered.sum() < top_p:
        ordered, ids = probabilities.sort(descending=True)
    within = ordered.cumsum(0) - ordered < top_p
    within[0] = True
    kept = torch.zeros_like(probabilities)
    kept[ids[within]] = ordered[within]
    return kept


def draw(probabilities: torch.Tensor, at: float) -> int:
    """The token at the share `at`, from 0 to below 1, of the mass; never one of probability 0.

    torch.multinomial takes 25 times as long for a vocabulary of 49152.
    """
    reached = probabilities.cumsum(0, dtype=torch.float64)
    whole = float(reached[-1])
    return int(torch.searchsorted(reached, min(at * whole, math.nextafter(whole, 0.0)), right=True))
