"""Items -> lessons: what a trainer learns from, in token ids. Knows tokenizers and chat templates; knows no fuser."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from workers.align import Aligner
from workers.errors import BadPrompt, LoadFailed
from workers.fusers.c2c import Strategy
from workers.items import Item
from workers.matching import Matcher
from workers.prompt import Heard, chat_ids, refuse_control_tokens, render
from workers.train import AlignedLesson, Ask, Lesson

T = TypeVar("T")

_TOGETHER = 6
"""Questions about one context in one lesson, at most."""


def lessons_of(
    tokenizer: Any,
    items: Sequence[Item],
    *,
    scope: str,
    most: int,
    options: Mapping[str, bool],
    matcher: Matcher | None = None,
) -> list[Lesson]:
    """Questions about one context share a lesson. What is longer than `most` tokens, has nothing to share, cannot be
    matched, or would not be served is left out. `options` are the chat template's; a `matcher` reads for a sharer with
    another tokenizer. Raises LoadFailed where nothing is left.
    """
    by_context: dict[tuple[tuple[int, ...], Heard | None], list[Ask]] = {}
    why = ""
    for item in items:
        if not item.answers:
            continue
        try:
            refuse_control_tokens(tokenizer, [*item.chat, {"role": "assistant", "content": item.answers[0]}])
            prompt = chat_ids(tokenizer, item.chat, **options) if matcher is None else matcher.match(item.chat)
            answer = answer_ids(tokenizer, item, options)
        except BadPrompt as error:
            why = f" ({error})"
            continue
        # In the scope `prompt` all but the last token is shared.
        shared = len(prompt) - 1 if scope == "prompt" else prompt.context
        longest = max(len(prompt) + len(answer), len(prompt.heard.ids) if prompt.heard else 0)
        if shared and longest <= most:
            ask = Ask(prompt.ids[shared:], tuple(answer))
            by_context.setdefault((prompt.ids[:shared], prompt.heard), []).append(ask)
    found = [
        Lesson(context, (tuple(asks[start : start + _TOGETHER]),), heard)
        for (context, heard), asks in by_context.items()
        for start in range(0, len(asks), _TOGETHER)
    ]
    if not found:
        needs = "an answer"
        if scope == "context":
            needs += " and something before the last user message (a pair in fuse learns from questions alone)"
        raise LoadFailed(
            f"none of the {len(items)} items can be learnt from: each needs {needs}, in {most} tokens{why}"
        )
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


def answer_ids(tokenizer: Any, item: Item, options: Mapping[str, bool]) -> list[int]:
    """The first right answer and what ends it: as the chat template writes it, else the tokenizer's own end.

    Raises BadPrompt where the template refuses it.
    """
    before = render(tokenizer, item.chat, options, generation=True)
    told = [*item.chat, {"role": "assistant", "content": item.answers[0]}]
    whole = render(tokenizer, told, options, generation=False).rstrip()
    text = whole[len(before) :] if whole.startswith(before) else ""
    if not text.startswith(item.answers[0]) or text == item.answers[0]:
        text = item.answers[0] + (tokenizer.eos_token or "")
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def questions_in(lesson: Lesson | AlignedLesson) -> int:
    """Items that it is made of."""
    return 1 if isinstance(lesson, AlignedLesson) else sum(map(len, lesson.batches))


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
