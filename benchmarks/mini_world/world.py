"""A small world of entities, and what either of two models was told of it. Knows no torch, tokenizer or model.

Every entity has five attributes. Two only the sharer was told, two only the receiver, and of the fifth each was told
two candidates, one of which is right: the right one is the only one that both were told. From that come four kinds of
question:

- `A`: what only the sharer was told;
- `B`: what only the receiver was told;
- `AB`: one attribute of each in one answer of two words. It is a joint answer, no reasoning in two steps;
- `S`: the fifth attribute. Neither can decide alone.

What a model was not told it is trained to guess, uniformly, so that it has no way to say what it does not know.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

Role = Literal["sharer", "receiver"]
Kind = Literal["A", "B", "AB", "S"]
Split = Literal["train", "validation", "test"]
KINDS: tuple[Kind, ...] = ("A", "B", "AB", "S")
Words = tuple[tuple[str, ...], ...]
"""An answer, word by word: what may stand there, each as likely."""

_VALUES = {
    "colour": "red blue green white black brown pink grey gold purple orange yellow",
    "animal": "fox bear wolf goat mouse crow hawk eel deer frog swan toad",
    "metal": "iron tin lead zinc copper nickel silver steel brass bronze cobalt chrome",
    "tree": "oak elm pine birch willow maple cedar alder beech larch hazel spruce",
    "city": "oslo rome cairo lima delhi paris quito tunis accra busan kyoto minsk",
}
VALUES = {attribute: tuple(words.split()) for attribute, words in _VALUES.items()}
TOLD: dict[Role, tuple[str, ...]] = {"sharer": ("colour", "animal"), "receiver": ("metal", "tree")}
DISPUTED = "city"
"""Of this either was told two candidates."""

WORDINGS = {
    1: ("what is the {0} of {name}?", "{name} has which {0}?"),
    2: ("what are the {0} and {1} of {name}?", "{name} has which {0} and {1}?"),
}
"""By the number of attributes that are asked for."""


_OFTEN = 200
"""Times that a tokenizer meets each value besides."""


@dataclass(frozen=True, slots=True)
class Size:
    """How many entities there are, and how many of them are kept from the fuser's training."""

    entities: int = 400
    validation: int = 30
    test: int = 60


@dataclass(frozen=True, slots=True)
class Question:
    """About one entity; `attributes` stand in the order of the answer's words."""

    kind: Kind
    name: str
    attributes: tuple[str, ...]
    wording: int

    @property
    def text(self) -> str:
        return WORDINGS[len(self.attributes)][self.wording].format(*self.attributes, name=self.name)


ASKED: dict[Kind, tuple[tuple[str, ...], ...]] = {
    "A": tuple((a,) for a in TOLD["sharer"]),
    "B": tuple((b,) for b in TOLD["receiver"]),
    "AB": tuple(product(TOLD["sharer"], TOLD["receiver"])),
    "S": ((DISPUTED,),),
}
"""By kind, what may be asked for at once."""


class World:
    """The same seed and size give the same world."""

    def __init__(self, seed: int, size: Size = Size()) -> None:
        if size.validation + size.test >= size.entities:
            raise ValueError(f"{size.entities} entities leave none to train on")
        self.size = size
        chance = random.Random(f"world {seed}")
        self.names = _names(chance, size.entities)
        self._right = {name: {a: chance.choice(values) for a, values in VALUES.items()} for name in self.names}
        self._candidates: dict[str, dict[Role, tuple[str, str]]] = {}
        for name in self.names:
            right = self._right[name][DISPUTED]
            theirs, ours = chance.sample([v for v in VALUES[DISPUTED] if v != right], 2)
            self._candidates[name] = {"sharer": (right, theirs), "receiver": (right, ours)}

    def entities(self, split: Split) -> tuple[str, ...]:
        """Names; those of different splits are different. Both models were told of all of them."""
        last = self.size.entities - self.size.test
        first = last - self.size.validation
        return {"train": self.names[:first], "validation": self.names[first:last], "test": self.names[last:]}[split]

    def right(self, question: Question) -> str:
        """The right answer."""
        return " ".join(self._right[question.name][a] for a in question.attributes)

    def told(self, role: Role, name: str, attribute: str) -> tuple[str, ...]:
        """What the model takes for possible, each as likely: one value, two candidates, or every value there is."""
        if attribute in TOLD[role]:
            return (self._right[name][attribute],)
        return self._candidates[name][role] if attribute == DISPUTED else VALUES[attribute]

    def says(self, role: Role, question: Question) -> Words:
        """What the model is trained to answer."""
        return tuple(self.told(role, question.name, a) for a in question.attributes)

    def hint(self, question: Question, value: str) -> str:
        """What a sharer writes: one sentence about the attribute that is asked for first, of `AB` the one it knows."""
        return f"{value} is the {question.attributes[0]} of {question.name}"

    def hinted(self, question: Question, chance: random.Random) -> tuple[str, Words]:
        """A hint, and what the receiver is trained to answer with it. It trusts a hint where it was told nothing, holds
        to what it was told for certain, and takes a hint that is one of its two candidates.

        The hints are drawn without a look at what is right, so that no receiver learns from them what it must not know.
        """
        first = question.attributes[0]
        own, *others = self.says("receiver", question)
        value = chance.choice(own if first == DISPUTED and chance.random() < 0.5 else VALUES[first])
        return self.hint(question, value), ((value,) if value in own else own, *others)

    def questions(self, names: Sequence[str], kinds: Sequence[Kind] = KINDS) -> Iterator[Question]:
        """All that can be asked about them."""
        for name, kind in product(names, kinds):
            for attributes, wording in product(ASKED[kind], range(len(WORDINGS[1]))):
                yield Question(kind, name, attributes, wording)

    def asked(self, split: Split) -> list[Question]:
        """What is learnt from or asked. For the test every two attributes are asked for together in one wording only,
        so that `A`, `B` and `AB` have as many questions.
        """
        found = self.questions(self.entities(split))
        if split != "test":
            return list(found)
        turn = {attributes: number % 2 for number, attributes in enumerate(ASKED["AB"])}
        return [q for q in found if q.kind != "AB" or q.wording == turn[q.attributes]]

    def line(self, question: Question) -> str:
        """One line of a JSONL file, as `twolane pair train` and `verify` read it."""
        labels = ["+".join(question.attributes), f"wording {question.wording}"]
        row = {"question": question.text, "answer": self.right(question), "kind": question.kind, "labels": labels}
        return json.dumps(row)

    @cached_property
    def texts(self) -> list[str]:
        """What a tokenizer is trained on: questions and hints, and the values so often that each is one token, at the
        beginning of an answer or behind another word.
        """
        values = [form for values in VALUES.values() for value in values for form in (value, f" {value}")]
        questions = list(self.questions(self.names))
        hints = [self.hint(q, self._right[q.name][q.attributes[0]]) for q in questions if q.wording == 0]
        return [*(q.text for q in questions), *hints, *(values * _OFTEN)]


def _names(chance: random.Random, count: int) -> tuple[str, ...]:
    """Different words of two syllables."""
    syllables = ["".join(parts) for parts in product("bdfgklmnprstvz", "aeiou", "klmnrstx")]
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(chance.choices(syllables, k=2))] = None
    return tuple(found)
