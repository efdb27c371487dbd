"""One question by one route, through the engine that serves. Knows runtimes; knows no report.

A route is a runtime, or two where a hint is written first. Questions with choices are answered by the likeliest letter,
others greedily. Questions are asked one at a time, so that times are those of a request that is alone.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch

from workers.engine import Engine
from workers.errors import BadPrompt
from workers.hint import for_receiver, for_sharer, hint_in
from workers.items import LETTERS, Item
from workers.jobs import Done, Event, Failed, Finished, Request, Started, Text
from workers.prompt import Message, Prompt
from workers.protocol import Run
from workers.runtime import Keep, Prefilled, Runtime, Steps
from workers.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Answer:
    """What was said, and what it took. Milliseconds."""

    text: str
    ttft_ms: float
    total_ms: float
    run: Run


@dataclass(frozen=True, slots=True)
class Restricted:
    """Reads as the runtime within; the answer then begins with one of the given tokens, the likeliest of them."""

    inner: Runtime
    tokens: tuple[int, ...]

    def prefill(self, prompt: Prompt, keep: Keep | None) -> Steps[Prefilled]:
        read = yield from self.inner.prefill(prompt, keep)
        only = torch.full_like(read.logits, float("-inf"))
        at = list(self.tokens)
        only[at] = read.logits[at]
        return Prefilled(read.kv, only, read.spent, read.beside)


class Asker:
    """Asks one engine; `most` is the longest answer in tokens, `hint` the longest hint."""

    def __init__(self, engine: Engine, *, most: int = 32, hint: int = 128) -> None:
        self.engine = engine
        self.most, self.hint = most, hint

    def ask(self, runtime: Runtime, item: Item, chat: Sequence[Message] | None = None) -> Answer:
        """`chat` in place of the item's own. Raises WorkerError."""
        prompt = runtime.chat(list(chat or item.chat))
        if not item.choices:
            return self._run(runtime, prompt, self.most)
        letters = Restricted(runtime, letter_ids(runtime, len(item.choices)))
        return self._run(runtime, prompt, 1, letters)

    def relay(self, sharers: Sequence[Runtime], receiver: Runtime, item: Item) -> Answer:
        """The text twin: every sharer writes a hint, the receiver reads them. Times are those of all, one by one."""
        messages: list[Message] = [dict(m) for m in item.chat]
        told = [self._run(sharer, sharer.chat(for_sharer(messages)), self.hint) for sharer in sharers]
        hint = "\n".join(filter(None, (hint_in(one.text) for one in told)))
        said = self.ask(receiver, item, for_receiver(messages, hint) if hint else messages)
        before = sum(one.total_ms for one in told)
        return Answer(said.text, before + said.ttft_ms, before + said.total_ms, said.run)

    def _run(self, runtime: Runtime, prompt: Prompt, most: int, steps: Restricted | None = None) -> Answer:
        room = runtime.context - prompt.positions
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.engine.submit(
            Request(
                runtime.name,
                prompt,
                Sampling(temperature=0.0, max_tokens=max(1, min(most, room))),
                events.put,
                runtime=runtime,
                steps=None if steps is None else steps.prefill,
            )
        )
        return _heard(events)


def _heard(events: queue.SimpleQueue[Event]) -> Answer:
    parts: list[str] = []
    while True:
        match event := events.get():
            case Started() | Finished():
                pass
            case Text(text=text):
                parts.append(text)
            case Failed(error=error):
                raise error
            case Done(run=run):
                return Answer("".join(parts), run.prefill_ms, run.prefill_ms + run.decode_ms, run)
            case _:
                assert_never(event)


def letter_ids(runtime: Runtime, count: int) -> tuple[int, ...]:
    """The token that begins each letter. Raises BadPrompt where two begin alike."""
    tokenizer = runtime.decoder.tokenizer
    ids = tuple(int(tokenizer(letter, add_special_tokens=False)["input_ids"][-1]) for letter in LETTERS[:count])
    if len(set(ids)) != count:
        raise BadPrompt(f"the tokenizer of {runtime.name} does not tell {count} letters apart by one token")
    return ids
