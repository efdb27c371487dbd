"""A `lite` pair whose two models have different tokenizers. Knows fusers and models; knows no HTTP.

Each model reads the chat as it would alone (`workers.matching`), so what each has read is stored under its own ids and
serves every other use of that model. Projected slots are not stored: they belong to two readings, not to a prefix of
one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Listing
from typing import Any

import torch

from workers.cache import KVCache
from workers.errors import BadPrompt, PromptTooLong
from workers.fusers.mix import MixFuser
from workers.loader import Loaded
from workers.matching import Matcher
from workers.prompt import Heard, Message, Prompt, plain_messages, refuse_control_tokens
from workers.runtime import Changed, Keep, Paired, Prefilled, Spent, Steps, changes


class MatchedPair(Paired):
    """Sharer and receiver with tokenizers of their own."""

    def __init__(
        self,
        name: str,
        sharer: Loaded,
        receiver: Loaded,
        fuser: MixFuser,
        *,
        scope: str,
        template: Mapping[str, bool],
        **more: Any,
    ) -> None:
        """`more` is as `Paired` takes it."""
        super().__init__(name, sharer, receiver, fuser, scope=scope, template=template, piecewise=False, **more)
        self._fuser = fuser
        # The sharer's own tokens are counted when a chat is read.
        self.context = receiver.context
        self._matcher = Matcher(receiver.tokenizer, sharer.tokenizer, scope, template)
        self.spaces = self.spaces[:-1]

    def chat(self, messages: Listing[Message]) -> Prompt:
        """Through both models' templates."""
        plain = plain_messages(messages)
        for model in (self.decoder, self.sharer):
            refuse_control_tokens(model.tokenizer, plain)
        prompt = self._matcher.match(plain)
        if prompt.heard is not None and len(prompt.heard.ids) > self.sharer.context:
            raise PromptTooLong(
                f"the sharer of {self.name} reads {self.sharer.context} tokens at most, and these messages are "
                f"{len(prompt.heard.ids)} in its own tokens. Please reduce the length of the messages."
            )
        return prompt

    def text(self, text: str) -> Prompt:
        """Refused: only messages can be matched."""
        raise BadPrompt(f"pair {self.name} has two tokenizers and reads chats only; use /v1/chat/completions")

    def rehearsal(self, tokens: int) -> Prompt:
        """A chat of about so many tokens; half of them are context."""
        half = "the " * (tokens // 2)
        turns = [("user", half), ("assistant", "the"), ("user", half)]
        return self.chat([{"role": role, "content": text} for role, text in turns])

    def read_by_sharer(self, prompt: Prompt) -> tuple[int, ...]:
        return self._heard(prompt).ids

    def prefill(self, prompt: Prompt, keep: Keep | None) -> Steps[Prefilled]:
        spent, ids, heard = Spent(gates_open=self.fuser.change().gates_open), prompt.ids, self._heard(prompt)
        shared = self._shared(prompt)
        target = self._receiver.sequence(len(ids))
        [read], own, [known, *others] = yield from self._read_all(heard.ids, ids[:shared], keep, spent)
        reused = min([sum(place < known for place in heard.places), *others])
        target.put(self._projected(read, own, heard, spent))
        yield None
        spent.reused = reused
        logits = yield from self._receiver.read(target, ids, spent)
        spent.computed_tokens = len(ids) - reused
        return Prefilled(target.kv(), logits, spent)

    def _projected(self, read: KVCache, own: KVCache | None, heard: Heard, spent: Spent) -> KVCache:
        clock = time.perf_counter()
        places = torch.tensor(heard.places, device=self.decoder.device)
        projected = self._fuser.project(read.pick(places), own, 0, places)
        if own is not None:
            spent.change = Changed.of([(1, changes(projected, own))])
        spent.fuse_s = time.perf_counter() - clock
        return projected

    def _heard(self, prompt: Prompt) -> Heard:
        if prompt.heard is None:
            raise BadPrompt(f"pair {self.name} reads chats only")
        return prompt.heard
