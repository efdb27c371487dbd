"""What text would have said in place of a pair's answer, and how far the two agree. Knows a Twin; keeps nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from router.agreement import exact, token_f1
from router.errors import TransportError
from router.twin import Fields, Twin

Route = Literal["relay", "sharer"]

APART = 0.3
"""Token F1 below which two answers do not say the same at all."""
SURE = math.log(0.5)
"""Mean log probability of a token above which a model is sure of its answer."""

_ZERO = msgspec.Raw(b"0")
_TRUE = msgspec.Raw(b"true")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One answer of a pair beside the one of its text route."""

    route: Route
    """`relay`: the sharer's hint, read by the receiver, for a pair that fuses. `sharer`: the sharer alone, which read
    everything, for a pair that hands over."""
    greedy: bool
    """The caller's own answer was compared; a sampled one was made again without chance, as its twin is."""
    text: str
    hint: str | None
    exact: bool
    f1: float
    likelihood: float | None
    """Mean log probability that the pair gives a token of the text route's answer; None where that is empty."""
    sureness: float | None
    """Mean log probability that the text route gave its own answer."""

    @property
    def suspect(self) -> bool:
        """Harm is suspected: the text route was sure of an answer that shares next to nothing with the pair's."""
        return self.f1 < APART and self.sureness is not None and self.sureness > SURE


async def compare(twin: Twin, fields: Fields, answer: str, mode: str, *, chat: bool) -> Comparison:
    """Ask the text route, and compare. Raises TransportError."""
    told = fields.get("temperature")
    greedy = told is not None and msgspec.json.decode(told) == 0
    asked = {**{name: value for name, value in fields.items() if name != "seed"}, "temperature": _ZERO}
    asked.pop("stream_options", None)
    if not greedy:
        answer = (await twin.ask(asked, chat=chat)).text
    telling = {**asked, "logprobs": _TRUE} if chat else asked
    route: Route = "relay" if mode == "fuse" and chat else "sharer"
    said = await (twin.relay(telling) if route == "relay" else twin.ask(telling, "sharer", chat=chat))
    scored = await _score(twin, asked, said.text, chat=chat) if said.text else None
    return Comparison(
        route=route,
        greedy=greedy,
        text=said.text,
        hint=said.hint,
        exact=exact(answer, said.text),
        f1=token_f1(answer, said.text),
        likelihood=scored,
        sureness=said.logprob,
    )


async def _score(twin: Twin, asked: Fields, text: str, *, chat: bool) -> float | None:
    """None where the worker cannot say: the text is too long behind the prompt, or the pair fuses its answers too."""
    try:
        return (await twin.ask(asked, chat=chat, score=text)).run.score
    except TransportError as error:
        if error.status != 400:
            raise
    return None
