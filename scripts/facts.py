"""Synthetic passages with questions: people, places and products, each with several facts, in several forms.

Names and values are cut into three parts (train, validation, test) that share none of them, and so are the wordings of
some questions. Everything is drawn from a seed: the same seed and part give the same passages.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from scripts import words

Part = Literal["train", "validation", "test"]
Form = Literal["sentences", "grouped", "list", "dialogue", "memo"]
FORMS: tuple[Form, ...] = ("sentences", "grouped", "list", "dialogue", "memo")

# By position in a pool, modulo ten.
_SHARE: dict[Part, frozenset[int]] = {
    "train": frozenset({0, 1, 2, 4, 5, 7, 8}),
    "validation": frozenset({3}),
    "test": frozenset({6, 9}),
}


@dataclass(frozen=True, slots=True)
class Attribute:
    """One fact that a kind of subject has. `{s}` is the subject, `{p}` its pronoun, `{v}` the value."""

    label: str
    pool: str
    says: tuple[str, ...]
    asks: tuple[str, ...]
    """The last wording is never trained."""


@dataclass(frozen=True, slots=True)
class Item:
    """One question about a passage."""

    question: str
    label: str
    value: str
    rivals: tuple[str, ...]
    """Other values of the same sort in the same passage."""
    new_wording: bool
    """The question is put in words that no training question has."""
    sort: str
    """Of the value: a number, a word that fits the question, a word that need not (`odd word`), or an invented name."""

    @property
    def answer(self) -> str:
        """What the pair is trained to say: the value stands as in the passage, behind a space."""
        return f"The {self.label.lower()} is {self.value}."


@dataclass(frozen=True, slots=True)
class Passage:
    """A document and its questions."""

    text: str
    items: tuple[Item, ...]
    form: Form
    subjects: int


PERSON = (
    Attribute(
        "City",
        "city",
        ("{s} lives in {v}.", "{s} has a flat in {v}.", "The home of {s} is in {v}."),
        ("Where does {s} live?", "In which city does {s} live?", "What city is {s} at home in?"),
    ),
    Attribute(
        "Job",
        "job",
        ("{s} works as a {v}.", "By trade, {s} is a {v}.", "{s} earns a living as a {v}."),
        ("What is {s}'s job?", "What does {s} do for a living?", "What does {s} work as?"),
    ),
    Attribute(
        "Favorite food",
        "food",
        ("{s} likes to eat {v}.", "The favorite food of {s} is {v}.", "{s} loves {v} most of all dishes."),
        ("What does {s} like to eat?", "What is {s}'s favorite food?", "Which food does {s} love?"),
    ),
    Attribute(
        "Pet",
        "animal",
        ("{s} has a pet {v}.", "{s} keeps a {v} at home.", "The pet of {s} is a {v}."),
        ("What pet does {s} have?", "Which animal does {s} keep?", "What kind of pet lives with {s}?"),
    ),
    Attribute(
        "Hobby",
        "hobby",
        ("{s} enjoys {v} on weekends.", "In the evening {s} spends time on {v}.", "The hobby of {s} is {v}."),
        ("What is {s}'s hobby?", "What does {s} enjoy?", "What does {s} do for fun?"),
    ),
    Attribute(
        "Instrument",
        "instrument",
        ("{s} plays the {v}.", "{s} is learning the {v}.", "The instrument of {s} is the {v}."),
        ("Which instrument does {s} play?", "What does {s} play?", "What is {s}'s instrument?"),
    ),
    Attribute(
        "Birth year",
        "year",
        ("{s} was born in {v}.", "The birth year of {s} is {v}.", "{s} came into the world in {v}."),
        ("When was {s} born?", "In which year was {s} born?", "What is {s}'s year of birth?"),
    ),
    Attribute(
        "Employer",
        "coined",
        ("{s} is employed by {v}.", "{s} has a contract with {v}.", "The employer of {s} is {v}."),
        ("Who employs {s}?", "Which company does {s} work for?", "What is the name of {s}'s employer?"),
    ),
)

PLACE = (
    Attribute(
        "Landmark",
        "sight",
        ("{s} is famous for its {v}.", "Visitors come to {s} to see the {v}.", "The pride of {s} is its {v}."),
        ("What is {s} famous for?", "What do visitors see in {s}?", "What is {s} known for?"),
    ),
    Attribute(
        "Main trade",
        "trade",
        ("People in {s} live from {v}.", "The main trade of {s} is {v}.", "Most jobs in {s} are in {v}."),
        ("What is the main trade of {s}?", "What do people in {s} live from?", "Which industry matters most in {s}?"),
    ),
    Attribute(
        "Population",
        "number",
        ("{s} has {v} inhabitants.", "The population of {s} is {v}.", "In {s} there are {v} residents."),
        ("What is the population of {s}?", "How many people live in {s}?", "How many inhabitants does {s} have?"),
    ),
    Attribute(
        "Founding year",
        "year",
        ("{s} was founded in {v}.", "The town of {s} dates from {v}.", "{s} was established in {v}."),
        ("When was {s} founded?", "In which year was {s} founded?", "What year does {s} date from?"),
    ),
    Attribute(
        "Mayor",
        "coined",
        ("The mayor of {s} is called {v}.", "{s} is governed by {v}.", "In {s}, the mayor is {v}."),
        ("Who is the mayor of {s}?", "Who governs {s}?", "What is the name of {s}'s mayor?"),
    ),
    Attribute(
        "Weather",
        "weather",
        ("The weather in {s} is mostly {v}.", "Days in {s} tend to be {v}.", "The climate of {s} is {v}."),
        ("What is the weather like in {s}?", "What is the climate of {s}?", "How are the days in {s}?"),
    ),
)

PRODUCT = (
    Attribute(
        "Color",
        "colour",
        ("The color of {s} is {v}.", "{s} comes in {v}.", "{s} is painted {v}."),
        ("What color is {s}?", "Which color does {s} come in?", "What is the color of {s}?"),
    ),
    Attribute(
        "Material",
        "material",
        ("{s} is made of {v}.", "The material of {s} is {v}.", "{s} is built from {v}."),
        ("What is {s} made of?", "Which material is used for {s}?", "What material is {s} built from?"),
    ),
    Attribute(
        "Price",
        "number",
        ("{s} costs {v} dollars.", "The price of {s} is {v} dollars.", "{s} sells for {v} dollars."),
        ("How much does {s} cost?", "What is the price of {s}?", "How many dollars does {s} sell for?"),
    ),
    Attribute(
        "Factory city",
        "city",
        ("{s} is made in {v}.", "The factory of {s} is in {v}.", "{s} is produced in {v}."),
        ("Where is {s} made?", "In which city is {s} made?", "Where does {s} come from?"),
    ),
    Attribute(
        "Designer",
        "coined",
        ("{s} was designed by {v}.", "The designer of {s} is {v}.", "{s} is the work of {v}."),
        ("Who designed {s}?", "Who is the designer of {s}?", "Whose work is {s}?"),
    ),
    Attribute(
        "Launch year",
        "year",
        ("{s} came out in {v}.", "{s} was launched in {v}.", "{s} has been sold since {v}."),
        ("When did {s} come out?", "In which year was {s} launched?", "Since when has {s} been sold?"),
    ),
)

_KINDS = {"person": PERSON, "place": PLACE, "product": PRODUCT}
_POOLS = {
    "city": words.CITY,
    "job": words.JOB,
    "food": words.FOOD,
    "animal": words.ANIMAL,
    "hobby": words.HOBBY,
    "instrument": words.INSTRUMENT,
    "colour": words.COLOUR,
    "material": words.MATERIAL,
    "sight": words.SIGHT,
    "trade": words.TRADE,
    "weather": words.WEATHER,
    "first": words.FIRST,
    "product": words.PRODUCT,
}
_KNOWN = frozenset(word for pool in _POOLS.values() for word in pool.split())


def _split() -> dict[tuple[Part, str], list[str]]:
    """Words by part and pool. A word of two pools belongs to the first part that has it in either."""
    split: dict[tuple[Part, str], list[str]] = {}
    earlier: set[str] = set()
    for part, share in _SHARE.items():
        for pool, text in _POOLS.items():
            mine = [w for i, w in enumerate(text.split()) if i % 10 in share]
            split[part, pool] = [w for w in mine if w.lower() not in earlier]
        earlier |= {w.lower() for (p, _), mine in split.items() if p == part for w in mine}
    return split


_SPLIT = _split()
_ONSETS = ("b", "br", "d", "dr", "f", "g", "h", "k", "kl", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v", "z")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ei")
_ENDS = ("", "l", "n", "r", "s", "m", "ck", "nd", "rt")


Fact = tuple[str, Attribute, str]
"""Subject, attribute, value."""


def passage(
    seed: int, part: Part, *, subjects: int | None = None, form: Form | None = None, wide: Sequence[str] = ()
) -> Passage:
    """One to three subjects of one kind (or as many as asked) with two to five facts each.

    Half of the values come from `wide` where it is given: with the pools alone a fuser learns the pools, and is proven
    on little else.
    """
    rng = random.Random(f"{part}:{seed}")  # noqa: S311 - drawn to be repeated, not to be secret
    count = subjects or rng.choice((1, 2, 2, 2, 3))
    drawn: Form = form if form is not None else rng.choice(FORMS)
    kind = rng.choice(("person", "person", "place", "product"))
    attributes = _KINDS[kind]
    per_subject = {1: 5, 2: 4, 3: 3}.get(count, 3)
    taken: set[str] = set()
    names = [name for _ in range(count) if (name := _unused(taken, partial(_name, rng, part, kind))) is not None]
    facts: list[Fact] = []
    for name in names:
        for attribute in rng.sample(attributes, min(per_subject, len(attributes))):
            value = _unused(taken, partial(_value, rng, part, attribute.pool, wide))
            if value is not None:
                facts.append((name, attribute, value))
    pronoun = rng.choice(("He", "She")) if kind == "person" else "It"
    return Passage(_write(rng, facts, drawn, pronoun), _items(rng, facts, part, frozenset(wide)), drawn, count)


def _unused(taken: set[str], draw: Callable[[], str]) -> str | None:
    """A word that the passage does not have yet; None when the pool seems used up."""
    for _ in range(100):
        word = draw()
        if word not in taken:
            taken.add(word)
            return word
    return None


def _from_pool(rng: random.Random, part: Part, pool: str) -> str:
    return rng.choice(_SPLIT[part, pool])


def _coined(rng: random.Random, part: Part) -> str:
    """An invented name of two or three syllables; a digest of it decides which part it belongs to."""
    while True:
        syllables = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.choice((2, 2, 3)))]
        word = ("".join(syllables) + rng.choice(_ENDS)).capitalize()
        if _in_part(word, part):
            return word


def _in_part(word: str, part: Part) -> bool:
    return zlib.crc32(word.lower().encode()) % 10 in _SHARE[part]


def words_of(part: Part, vocabulary: Iterable[str]) -> list[str]:
    """Those of the words that may stand in passages of the part: none that another part may draw."""
    kept = {w.lower() for (other, _), pool in _SPLIT.items() if other != part for w in pool}
    return sorted({w for w in vocabulary if w not in kept and _in_part(w, part)})


def _value(rng: random.Random, part: Part, pool: str, wide: Sequence[str]) -> str:
    if wide and pool not in {"year", "number"} and rng.random() < 0.5:
        word = rng.choice(wide)
        return word.capitalize() if pool in {"coined", "city"} else word
    if pool == "coined":
        return f"{_from_pool(rng, part, 'first')} {_coined(rng, part)}" if rng.random() < 0.5 else _coined(rng, part)
    if pool in {"year", "number"}:
        while True:
            n = rng.randint(1700, 2025) if pool == "year" else rng.randint(11, rng.choice((99, 999, 9999)))
            if _in_part(str(n), part):
                return str(n)
    if pool == "city" and rng.random() < 0.3:
        return _coined(rng, part)
    return _from_pool(rng, part, pool)


def _name(rng: random.Random, part: Part, kind: str) -> str:
    if kind == "place":
        return _coined(rng, part)
    if kind == "product":
        return f"the {_coined(rng, part)} {_from_pool(rng, part, 'product')}"
    first = _from_pool(rng, part, "first")
    return first if rng.random() < 0.4 else f"{first} {_coined(rng, part)}"


def _sort(value: str, wide: frozenset[str]) -> str:
    if value.isdigit():
        return "number"
    if value in _KNOWN:
        return "word"
    return "odd word" if value.lower() in wide else "invented name"


def _items(rng: random.Random, facts: list[Fact], part: Part, wide: frozenset[str]) -> tuple[Item, ...]:
    items = []
    for name, attribute, value in facts:
        wording = rng.choice(attribute.asks if part == "test" else attribute.asks[:-1])
        rivals = tuple(v for _, a, v in facts if v != value and a.pool == attribute.pool)
        new = wording == attribute.asks[-1]
        items.append(Item(wording.format(s=name), attribute.label, value, rivals, new, _sort(value, wide)))
    rng.shuffle(items)
    return tuple(items)


def _write(rng: random.Random, facts: list[Fact], form: Form, pronoun: str) -> str:
    match form:
        case "sentences":
            lines = [_sentence(rng, *fact) for fact in facts]
            rng.shuffle(lines)
            if rng.random() < 0.3:
                fillers = [f for row in words.FILLER.strip().splitlines() for f in row.split("|")]
                lines.insert(rng.randint(0, len(lines)), rng.choice(fillers))
            return " ".join(lines)
        case "grouped":
            return "\n".join(_paragraph(rng, group, pronoun) for group in _by_subject(facts))
        case "list":
            blocks = []
            for group in _by_subject(facts):
                lines = [f"- {a.label}: {v}" for _, a, v in group]
                blocks.append("\n".join([_capital(group[0][0]), *lines]))
            return "\n\n".join(blocks)
        case "dialogue":
            turns = []
            for name, attribute, value in rng.sample(facts, len(facts)):
                turns.append(f"A: {_capital(rng.choice(attribute.asks[:-1]).format(s=name))}")
                turns.append(f"B: {_sentence(rng, name, attribute, value)}")
            return "\n".join(turns)
        case "memo":
            lines = [f"{i}. {_sentence(rng, *fact)}" for i, fact in enumerate(rng.sample(facts, len(facts)), 1)]
            return "\n".join(["Memo", "For the file, please note:", *lines, "End of memo."])


def _by_subject(facts: list[Fact]) -> list[list[Fact]]:
    groups: dict[str, list[Fact]] = {}
    for fact in facts:
        groups.setdefault(fact[0], []).append(fact)
    return list(groups.values())


def _paragraph(rng: random.Random, group: list[Fact], pronoun: str) -> str:
    """The first sentence names the subject; later ones may use the pronoun where it opens the sentence."""
    lines = []
    for i, (name, attribute, value) in enumerate(group):
        says = rng.choice(attribute.says)
        short = i > 0 and says.startswith("{s} ")
        lines.append(_capital(says.format(s=pronoun if short else name, v=value)))
    return " ".join(lines)


def _sentence(rng: random.Random, name: str, attribute: Attribute, value: str) -> str:
    return _capital(rng.choice(attribute.says).format(s=name, v=value))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
