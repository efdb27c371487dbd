"""Asks a worker what would have been said otherwise: the models of a pair alone, its controls, and its text twin.

Knows the worker's `POST /counterfactual` and the wording of a relay; decides nothing and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router.errors import TransportError, Unavailable
from router.transports.openai_http import Pools
from workers.hint import for_receiver, for_sharer, hint_in
from workers.protocol import Counterfactual, Otherwise, Run

HINT_TOKENS = 128
"""Tokens that a sharer may write to a receiver, as in a relay that says nothing else."""

Fields = Mapping[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class Said:
    """One answer; the first choice counts."""

    text: str
    run: Run
    logprob: float | None = None
    """Mean log probability of its tokens, where it was asked for."""
    hint: str | None = None
    """What the sharer wrote first, in a relay."""


class _Logprob(msgspec.Struct):
    logprob: float | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None
    logprobs: _Logprobs | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice]
    twolane: Run


class _Problem(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _Error(msgspec.Struct):
    error: _Problem = field(default_factory=_Problem)


_body = msgspec.json.Decoder(_Body)
_error = msgspec.json.Decoder(_Error)


class Twin:
    """A pair on one worker, asked beside the requests of callers."""

    def __init__(self, pools: Pools, url: str, pair: str, *, background: bool = False, timeout: float = 120.0) -> None:
        """`url` as workers tell it; `background` answers begin only in idle moments and give way."""
        self._session, _ = pools.session(url)
        base = "http://worker" if url.startswith("unix:") else url.rstrip("/").removesuffix("/v1")
        self._address = f"{base}/counterfactual"
        self._pair = pair
        self._background = background
        self._timeout = timeout

    async def ask(
        self,
        fields: Fields,
        kind: Otherwise = "same",
        *,
        chat: bool = True,
        other: list[Any] | None = None,
        score: str | None = None,
    ) -> Said:
        """One answer to a request's fields. Raises TransportError; of code `overloaded` where callers go first."""
        request = {**fields, "model": _raw(self._pair), "stream": _raw(False)}
        body = Counterfactual(
            request=_raw(request), kind=kind, chat=chat, other=other, score=score, background=self._background
        )
        import aiohttp  # `Pools` has it by now; a router without pairs is spared it

        timeout = aiohttp.ClientTimeout(total=self._timeout)
        try:
            async with self._session.post(self._address, data=msgspec.json.encode(body), timeout=timeout) as response:
                data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unavailable(f"The worker did not answer: {type(error).__name__}.") from error
        try:
            if response.status != 200:
                problem = _error.decode(data).error
                raise TransportError(problem.message, status=response.status, code=problem.code)
            answer = _body.decode(data)
        except msgspec.DecodeError as error:
            raise Unavailable("The worker's answer cannot be read.", code="upstream_malformed") from error
        return _said(answer)

    async def relay(self, fields: Fields) -> Said:
        """The sharer writes a hint, the receiver answers with it: the pair in text."""
        messages = msgspec.json.decode(fields["messages"], type=list[dict[str, Any]])
        asked = {"messages": _raw(for_sharer(messages)), "max_tokens": _raw(HINT_TOKENS), "temperature": _raw(0)}
        hint = hint_in((await self.ask(asked, "sharer")).text)
        told = {**fields, "messages": _raw(for_receiver(messages, hint))} if hint else fields
        said = await self.ask(told, "receiver")
        return Said(said.text, said.run, said.logprob, hint)


def _said(body: _Body) -> Said:
    choice = body.choices[0]
    text = choice.text if choice.message is None else choice.message.content
    told = [t.logprob for t in (choice.logprobs.content or ())] if choice.logprobs is not None else []
    known = [value for value in told if value is not None]
    return Said(text or "", body.twolane, sum(known) / len(known) if known else None)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
