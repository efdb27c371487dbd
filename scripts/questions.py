"""What `smol-reader` learns from and is asked: passages of `scripts.facts` as lessons and as items."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from scripts.facts import FORMS, Form, Part, Passage, passage, words_of
from workers.items import Item, Said
from workers.prompt import Message, split_context
from workers.train import Ask, Lesson

_LEADS = (
    "Answer from this document.\n\n{d}",
    "Answer the question from the document.\n\nDocument:\n{d}",
    "Use the following document to answer.\n\n{d}",
    "You are a helpful assistant. Answer from this text:\n{d}",
    "{d}",
)
_AT_ONCE = 8
"""Questions that are asked about one document, at most."""


def wide_words(tokenizer: Any, part: Part) -> list[str]:
    """Whole lower-case words of the tokenizer's vocabulary that the part's passages may use as values."""
    return words_of(part, (t[1:] for t in tokenizer.get_vocab() if re.fullmatch("\u0120[a-z]{4,10}", t)))


def opening(document: Passage, rng: random.Random) -> list[Message]:
    """The messages before the question: mostly the document as system message, sometimes as an earlier turn."""
    text = rng.choice(_LEADS).format(d=document.text)
    if rng.random() < 0.15:
        return [{"role": "user", "content": text}, {"role": "assistant", "content": "I have read it."}]
    messages = [{"role": "system", "content": text}]
    if rng.random() < 0.15:
        earlier = rng.choice(document.items)
        messages.append({"role": "user", "content": earlier.question})
        messages.append({"role": "assistant", "content": earlier.answer})
    return messages


def opened(seed: int, wide: Sequence[str], part: Part) -> tuple[Passage, list[Message]]:
    """A passage, and the messages that open a conversation about it."""
    document = passage(seed, part, wide=wide)
    rng = random.Random(f"opening:{seed}")  # noqa: S311 - drawn to be repeated, not to be secret
    return document, opening(document, rng)


def lines(seed: int, wide: Sequence[str], part: Part = "train", most: int = 6) -> list[dict[str, Any]]:
    """One passage as lines of a JSONL file, from which `twolane pair train` makes what `lesson` is."""
    document, before = opened(seed, wide, part)
    return [
        {"messages": [*before, {"role": "user", "content": item.question}], "answer": item.answer}
        for item in document.items[:most]
    ]


def lesson(tokenizer: Any, seed: int, wide: Sequence[str], part: Part = "train", most: int = 6) -> Lesson:
    """One passage as a lesson of at most so many questions."""
    document, before = opened(seed, wide, part)
    context: list[int] = []
    asks = []
    for item in document.items[:most]:
        context, rest = split_context(tokenizer, [*before, {"role": "user", "content": item.question}])
        answer = tokenizer(item.answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        asks.append(Ask(tuple(rest), tuple(answer)))
    return Lesson(tuple(context), (tuple(asks),))


def asked(
    seed: int, part: Part, wide: Sequence[str], *, subjects: int | None = None, form: Form | None = None
) -> list[Item]:
    """The questions about one passage, which is the system message."""
    document = passage(seed, part, subjects=subjects, form=form, wide=wide)
    before = Said("system", _LEADS[0].format(d=document.text))
    people = f"subjects:{document.subjects}" + (" (never trained)" if document.subjects > 3 else "")
    return [
        Item(
            messages=(before, Said("user", item.question)),
            answers=(item.answer, item.value),
            rivals=item.rivals,
            kind=document.form,
            labels=(people, f"value:{item.sort}", "wording:new" if item.new_wording else "wording:trained"),
        )
        for item in document.items[:_AT_ONCE]
    ]


def reader_items(tokenizer: Any, documents: int, first: int) -> list[Item]:
    """Test passages of every form in turn; one in six has four subjects, more than any in training."""
    wide = wide_words(tokenizer, "test")
    found = []
    for n in range(documents):
        form = FORMS[n % len(FORMS)]
        found += asked(first + n, "test", wide, subjects=4 if n % 6 == 5 else None, form=form)
    return found


def twin_items(documents: int) -> list[Item]:
    """Questions about short test passages: for a pair whose answers are compared, not judged."""
    return [item for seed in range(documents) for item in asked(seed, "test", (), subjects=1)]
