"""What would have been said otherwise: by the receiver alone, by the sharer alone, with a silent sharer, with another
text's KV. And how likely a given text is as the answer. Knows runtimes; knows no requests.

Nothing here has a store: what a counterfactual computes is kept nowhere and found by nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from workers.buffers import Sequence
from workers.errors import BadPrompt, PromptTooLong, SameText
from workers.fusers.identity import IdentityFuser
from workers.loader import Loaded
from workers.prompt import Message, Prompt
from workers.protocol import Otherwise
from workers.runtime import Alone, Keep, Paired, Prefilled, Runtime, Source, Steps

_CHUNK = 64
"""Answer tokens that are scored at once: each costs a row of logits as wide as the vocabulary."""


@runtime_checkable
class Pair(Protocol):
    """A runtime whose sharer can be made to read something else."""

    decoder: Loaded
    sharer: Loaded
    """The first of several."""
    others: tuple[Loaded, ...]
    """The sharers after it."""
    chunk: int
    template: Mapping[str, bool]

    def with_source(self, source: Source) -> Runtime:
        """The same pair without a store, whose sharer reads what `source` makes of its ids; None says nothing."""

    def read_by_sharer(self, prompt: Prompt) -> tuple[int, ...]:
        """The sharer's ids of a prompt."""


def otherwise(runtime: Runtime, kind: Otherwise, other: list[Message] | None) -> Runtime:
    """The runtime that answers in place of this one. Raises BadPrompt where there is no such thing."""
    if kind == "same":
        return runtime
    pair = _as_pair(runtime)
    if pair is None:
        raise BadPrompt(f"{runtime.name} is one model: only a pair has counterfactuals")
    match kind:
        case "receiver":
            return _alone(runtime, pair.decoder, pair)
        case "sharer":
            return _alone(runtime, pair.sharer, pair)
        case "zero":
            return pair.with_source(lambda _: None)
        case "shuffled":
            if not other:
                raise BadPrompt("shuffled needs the messages of another text in `other`")
            return pair.with_source(_reading(pair.read_by_sharer(runtime.chat(other))))


def sharers_alone(runtime: Runtime) -> dict[str, Runtime]:
    """Every sharer of a pair as a model alone: `sharer`, `sharer_2` and so on. Raises BadPrompt where there is none."""
    found = {"sharer": otherwise(runtime, "sharer", None)}
    if isinstance(runtime, Pair):
        found |= {f"sharer_{n}": _alone(runtime, model, runtime) for n, model in enumerate(runtime.others, start=2)}
    return found


def _as_pair(runtime: Runtime) -> Pair | None:
    if isinstance(runtime, Pair):
        return runtime
    if isinstance(runtime, Alone) and runtime.is_pair:
        model = runtime.decoder
        fuser = IdentityFuser(model.identity, model.identity, model.shape)
        return Paired(
            runtime.name, model, model, fuser, mode="handover", scope="prompt", store=None, chunk=runtime.chunk
        )
    return None


def _alone(runtime: Runtime, loaded: Loaded, pair: Pair) -> Runtime:
    alone = Alone(runtime.name, loaded, None, pair.chunk)
    alone.template = pair.template
    alone.context = min(alone.context, runtime.context)
    return alone


def _reading(ids: tuple[int, ...]) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    """As many ids of another text as the sharer would have read of this one, from its beginning, again and again."""

    def source(own: tuple[int, ...]) -> tuple[int, ...]:
        read = (ids * (len(own) // len(ids) + 1))[: len(own)]
        if read == own:
            raise SameText("the other text is the same text")
        return read

    return source


@dataclass(slots=True)
class Scored:
    """Reads a given answer after the prompt, token by token, and tells how likely it was. Then ends."""

    inner: Runtime
    answer: tuple[int, ...]

    @classmethod
    def of(cls, inner: Runtime, text: str) -> Scored:
        """Raises BadPrompt for a text without a token."""
        ids = tuple(inner.decoder.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise BadPrompt("there is no text to score")
        return cls(inner, ids)

    def prefill(self, prompt: Prompt, keep: Keep | None) -> Steps[Prefilled]:
        """As the runtime within, and the answer behind it. `spent.score` is the mean log probability of a token."""
        if prompt.positions + len(self.answer) >= self.inner.context:
            raise PromptTooLong(f"prompt and answer together exceed {self.inner.context} tokens")
        read = yield from self.inner.prefill(prompt, None)
        if read.beside is not None:
            raise BadPrompt(f"{self.inner.name} fuses its answer as it grows: a given one cannot be scored")
        model = self.inner.decoder
        into = Sequence(model.shape, len(read.kv) + len(self.answer), model.dtype, model.device)
        into.put(read.kv)
        logits, likely = read.logits[None], []
        for start in range(0, len(self.answer), _CHUNK):
            ids = torch.tensor(self.answer[start : start + _CHUNK], device=model.device)
            first = prompt.positions + start
            out = model.model(
                input_ids=ids[None],
                position_ids=torch.arange(first, first + len(ids), device=model.device)[None],
                cache=into,
                use_cache=True,
            )
            into.advance(len(ids))
            before = torch.cat((logits, out.logits[0, :-1])).float()
            likely.append(before.log_softmax(-1).gather(1, ids[:, None]))
            logits = out.logits[0, -1:]
            yield None
        read.spent.score = float(torch.cat(likely).mean())
        return Prefilled(into.kv(), logits[0], read.spent)
