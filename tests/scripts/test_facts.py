"""The passages that pairs are trained and proven on."""

from __future__ import annotations

import itertools

import pytest

from scripts.facts import FORMS, Form, Part, passage, words_of

PARTS: tuple[Part, ...] = ("train", "validation", "test")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("part", PARTS)
def test_every_answer_stands_in_its_passage(part: Part, form: Form) -> None:
    """Values are found in the text as they stand in the answer, and no rival equals the value."""
    for seed in range(30):
        drawn = passage(seed, part, form=form)
        assert drawn.items
        for item in drawn.items:
            assert item.value in drawn.text
            assert item.answer.endswith(f" {item.value}.")
            assert item.value not in item.rivals


def test_parts_share_no_value() -> None:
    """No value of one part occurs in another, so that nothing can be answered from memory of training."""
    found = {part: {i.value for seed in range(400) for i in passage(seed, part).items} for part in PARTS}
    for a, b in itertools.combinations(PARTS, 2):
        assert not found[a] & found[b]


def test_wide_words_keep_the_parts_apart() -> None:
    """Words of a vocabulary go to one part each, and to none that draws them from a pool in another."""
    drawn = {part: {i.value for seed in range(200) for i in passage(seed, part).items} for part in PARTS}
    pools = {part: {v for v in drawn[part] if v.isalpha() and v.islower()} for part in PARTS}
    vocabulary = [*set.union(*pools.values()), *(f"plain{i}" for i in range(90))]
    wide = {part: words_of(part, vocabulary) for part in PARTS}
    for a, b in itertools.permutations(PARTS, 2):
        assert not set(wide[a]) & (set(wide[b]) | pools[b])
    for part in PARTS:
        items = [i for seed in range(20) for i in passage(seed, part, wide=wide[part]).items]
        assert {i.value.lower() in wide[part] for i in items if i.sort == "odd word"} == {True}
        assert {i.sort for i in items} == {"number", "word", "odd word", "invented name"}


def test_new_wordings_are_asked_in_the_test_part_only() -> None:
    """Training and validation never hear the wordings that are kept for the test."""
    for part in ("train", "validation"):
        assert not any(i.new_wording for seed in range(200) for i in passage(seed, part).items)
    assert any(i.new_wording for seed in range(20) for i in passage(seed, "test").items)


def test_the_same_seed_is_the_same_passage() -> None:
    """A passage depends on seed and part alone."""
    assert passage(7, "test") == passage(7, "test")
    assert passage(7, "test") != passage(8, "test")
    assert passage(7, "train").text != passage(7, "test").text


@pytest.mark.parametrize("subjects", [1, 2, 3, 4])
def test_number_of_subjects(subjects: int) -> None:
    """As many subjects as asked, each with its own facts."""
    drawn = passage(3, "test", subjects=subjects)
    assert drawn.subjects == subjects
    assert 2 * subjects <= len(drawn.items) <= subjects * {1: 5, 2: 4}.get(subjects, 3)
