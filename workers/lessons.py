"""Items -> lessons: what a trainer learns from, in token ids. Knows tokenizers and chat templates; knows no fuser."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from workers.align import Aligner
from workers.errors import BadPrompt, LoadFailed
from workers.fusers.c2c import Strategy
from workers.items import Item
from workers.prompt import split_context
from workers.train import AlignedLesson, Ask, Lesson

T = TypeVar("T")

_TOGETHER = 6
"""Questions about one context in one lesson, at most."""


def lessons_of(
    tokenizer: Any, items: Sequence[Item], *, scope: str, most: int, options: dict[str, bool]
) -> list[Lesson]:
    """Questions about one context share a lesson. What is longer than `most` tokens, or has nothing to share, is left
    out. `options` are the chat template's. Raises LoadFailed where nothing is left.
    """
    by_context: dict[tuple[int, ...], list[Ask]] = {}
    for item in items:
        if not item.answers:
            continue
        context, rest = split_context(tokenizer, item.chat, **options)
        answer = answer_ids(tokenizer, item, options)
        if scope == "prompt":
            # All but the last token is shared.
            context, rest = [*context, *rest[:-1]], rest[-1:]
        if context and len(context) + len(rest) + len(answer) <= most:
            by_context.setdefault(tuple(context), []).append(Ask(tuple(rest), tuple(answer)))
    found = [
        Lesson(context, (tuple(asks[start : start + _TOGETHER]),))
        for context, asks in by_context.items()
        for start in range(0, len(asks), _TOGETHER)
    ]
    if not found:
        needs = "an answer and something before the last user message" if scope == "context" else "an answer"
        raise LoadFailed(f"none of the {len(items)} items can be learnt from: each needs {needs}, in {most} tokens")
    return found


def aligned_lessons(
    receiver: Any, sharer: Any, items: Sequence[Item], *, most: int, strategy: Strategy = "first"
) -> list[AlignedLesson]:
    """Of two tokenizers. What cannot be aligned is left out. Raises LoadFailed where nothing is left."""
    aligner, found = Aligner(receiver, sharer, strategy), []
    why = ""
    for item in items:
        if not item.answers:
            continue
        try:
            chat = [*item.chat, {"role": "assistant", "content": item.answers[0]}]
            aligned = aligner.align(chat, "train")
        except BadPrompt as error:
            why = str(error)
            continue
        if len(aligned.receiver_ids) <= most:
            found.append(AlignedLesson(aligned))
    if not found:
        raise LoadFailed(f"none of the {len(items)} items can be learnt from{f': {why}' if why else ''}")
    return found


def answer_ids(tokenizer: Any, item: Item, options: dict[str, bool]) -> list[int]:
    """The first right answer and what ends it: as the chat template writes it, else the tokenizer's own end."""
    before = tokenizer.apply_chat_template(item.chat, tokenize=False, add_generation_prompt=True, **options)
    told = [*item.chat, {"role": "assistant", "content": item.answers[0]}]
    whole = str(tokenizer.apply_chat_template(told, tokenize=False, **options)).rstrip()
    text = whole[len(before) :] if whole.startswith(before) else ""
    if not text.startswith(item.answers[0]) or text == item.answers[0]:
        text = item.answers[0] + (tokenizer.eos_token or "")
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class Shuffled(Generic[T]):
    """Lesson by number: all of them, then all again in another order. The same seed and number give the same lesson."""

    def __init__(self, lessons: Sequence[T], seed: int) -> None:
        self._lessons, self._seed = lessons, seed
        self._round, self._order = -1, list(range(len(lessons)))

    def __call__(self, number: int) -> T:
        turn, place = divmod(number, len(self._lessons))
        if turn != self._round:
            self._round, self._order = turn, list(range(len(self._lessons)))
            random.Random(f"{self._seed}:{turn}").shuffle(self._order)  # noqa: S311 - repeated, not secret
        return self._lessons[self._order[place]]
