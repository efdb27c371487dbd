"""Questions and chats that a person has written down, one JSON object a line. Torch-free; knows no tokenizer.

A line is a chat whose last message is the assistant's, or a question with its answer:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"question": "...", "answer": "...", "context": "...", "kind": "...", "labels": ["..."]}
    {"question": "...", "choices": ["...", "..."], "answer": "one of them"}
    {"question": "...", "safety": "refuse"}

`answer` may list several right ones. `context` becomes the system message. `choices` are shown with letters, and the
letter is the answer. `safety` is what the answer is looked at for, in place of being right: `refuse` and `comply` for
whether it refuses, `obey` for whether it holds the words in `must`, `secret` for whether it lets out those in
`must_not`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from workers.errors import LoadFailed
from workers.pairs import canonical

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
Safety = Literal["refuse", "comply", "obey", "secret"]


class Said(msgspec.Struct, frozen=True):
    """One message."""

    role: Literal["system", "user", "assistant"]
    content: str


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: tuple[Said, ...] = ()
    question: str = ""
    answer: str | tuple[str, ...] = ""
    context: str = ""
    choices: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    kind: str = ""
    labels: tuple[str, ...] = ()
    safety: Safety | None = None
    must: tuple[str, ...] = ()
    must_not: tuple[str, ...] = ()
    id: str = ""


@dataclass(frozen=True, slots=True)
class Item:
    """One question, as messages up to the user's last, and what is right to say."""

    messages: tuple[Said, ...]
    answers: tuple[str, ...]
    """Every right one; empty where only `safety` is looked at. Of `choices` the letter."""
    choices: tuple[str, ...] = ()
    rivals: tuple[str, ...] = ()
    """An answer that names one of these is wrong."""
    kind: str = ""
    labels: tuple[str, ...] = ()
    safety: Safety | None = None
    must: tuple[str, ...] = ()
    must_not: tuple[str, ...] = ()

    @property
    def before(self) -> tuple[Said, ...]:
        """What stands before the last user message."""
        return self.messages[:-1]

    @property
    def chat(self) -> list[dict[str, str]]:
        """As chat templates take it."""
        return [{"role": m.role, "content": m.content} for m in self.messages]

    @property
    def last_only(self) -> list[dict[str, str]]:
        """The question without what stands before it."""
        return self.chat[-1:]


@dataclass(frozen=True, slots=True)
class Chosen:
    """Items to ask, what a reader must know of where they come from, and the seeds that drew them."""

    items: list[Item]
    notes: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()

    def once(self) -> Chosen:
        """Each question once: a second time it proves nothing, and would count towards what a verdict needs."""
        first: dict[object, Item] = {}
        for item in self.items:
            first.setdefault((item.messages, item.safety), item)
        if not (again := len(self.items) - len(first)):
            return self
        note = f"{again} items were left out: they ask what another one asks."
        return Chosen(list(first.values()), (*self.notes, note), self.seeds)

    def beside(self, learnt: Sequence[Item]) -> Chosen:
        """Noted how many of them ask what a training has learnt from."""
        known = {item.messages for item in learnt}
        seen = sum(item.messages in known for item in self.items)
        note = f"{seen} of the {len(self.items)} items are among those that the pair was trained on."
        return Chosen(self.items, (*self.notes, note), self.seeds)

    def drawn(self, most: int, seed: int) -> Chosen:
        """At most so many of each kind, in the order they stand in. What is drawn of one depends on no other."""
        by_kind: dict[str, list[int]] = {}
        for place, item in enumerate(self.items):
            by_kind.setdefault(item.kind, []).append(place)
        taken: set[int] = set()
        for kind, places in by_kind.items():
            draw = random.Random(f"{seed}:{kind}")  # noqa: S311 - repeated, not secret
            taken.update(draw.sample(places, min(most, len(places))))
        note = f"Of each kind at most {most} items were drawn, {len(taken)} of {len(self.items)} in all."
        return Chosen([self.items[place] for place in sorted(taken)], (*self.notes, note), (seed,))


def read_items(file: Path) -> list[Item]:
    """Raises LoadFailed, naming the line and what is wrong with it."""
    try:
        text = file.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise LoadFailed(f"{file}: cannot be read ({error})") from error
    items = [_item(f"{file}:{number}", line) for number, line in _lines(text)]
    if not items:
        raise LoadFailed(f"{file}: holds no line")
    return items


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # Not splitlines(): JSON may hold U+2028 and its like inside a string.
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _item(where: str, line: str) -> Item:
    try:
        found = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise LoadFailed(f"{where}: {error}") from error
    if bool(found.messages) == bool(found.question):
        raise LoadFailed(f"{where}: either messages or a question is expected")
    answers = (found.answer,) if isinstance(found.answer, str) else found.answer
    answers = tuple(a for a in answers if a.strip())
    messages = found.messages or _asked(found)
    if found.messages and messages[-1].role == "assistant":
        answers = answers or tuple(m.content for m in messages[-1:] if m.content.strip())
        messages = messages[:-1]
    if not messages or messages[-1].role != "user":
        raise LoadFailed(f"{where}: the message before the answer must be the user's")
    if not answers and found.safety is None:
        raise LoadFailed(f"{where}: no answer")
    if found.choices:
        messages, answers = _lettered(where, found, messages, answers)
    if (found.safety == "obey" and not found.must) or (found.safety == "secret" and not found.must_not):
        needed = "must" if found.safety == "obey" else "must_not"
        raise LoadFailed(f"{where}: safety {found.safety} needs {needed}, the words to look for")
    return Item(
        messages,
        answers,
        found.choices,
        found.rivals,
        found.kind,
        found.labels,
        found.safety,
        found.must,
        found.must_not,
    )


def _asked(line: _Line) -> tuple[Said, ...]:
    asked = Said("user", line.question)
    return (Said("system", line.context), asked) if line.context else (asked,)


def _lettered(
    where: str, line: _Line, messages: tuple[Said, ...], answers: tuple[str, ...]
) -> tuple[tuple[Said, ...], tuple[str, ...]]:
    """The question with its choices below it, and the letter of the right one."""
    if not 2 <= len(line.choices) <= len(LETTERS):
        raise LoadFailed(f"{where}: 2 to {len(LETTERS)} choices are expected")
    if len(set(line.choices)) < len(line.choices):
        raise LoadFailed(f"{where}: one of the choices stands there twice, so one letter cannot be right")
    right = [LETTERS[line.choices.index(a)] for a in answers if a in line.choices]
    if not right:
        raise LoadFailed(f"{where}: the answer is none of the choices")
    return (*messages[:-1], Said("user", with_letters(messages[-1].content, line.choices))), tuple(right)


def with_letters(question: str, choices: Sequence[str]) -> str:
    """The question as it is asked: its choices below it, each with its letter."""
    shown = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))
    return f"{question}\n\n{shown}\n\nAnswer with the letter only."


def digest_of_items(items: Sequence[Item]) -> str:
    """SHA-256 over all that is asked and all that counts as right."""
    return hashlib.sha256(canonical([msgspec.to_builtins(item) for item in items])).hexdigest()
