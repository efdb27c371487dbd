"""workers.vocabulary: when may one model read another's token ids?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.vocabulary import Overlap, compare

VOCABULARIES = st.dictionaries(st.text("abcd", min_size=1, max_size=3), st.integers(0, 30), max_size=12).map(
    lambda d: {token: i for i, token in {i: token for token, i in d.items()}.items()}
)


@pytest.mark.parametrize(
    ("receiver", "sharer", "rows", "expected"),
    [
        ({"a": 0, "b": 1}, {"a": 0, "b": 1}, 2, Overlap(2, 2, 2, 2, 0, 0, 0)),
        ({"a": 0, "b": 1, "<think>": 2}, {"a": 0, "b": 1}, 4, Overlap(3, 2, 2, 2, 0, 1, 0)),
        ({"a": 0, "b": 1, "<think>": 2}, {"a": 0, "b": 1}, 2, Overlap(3, 2, 2, 2, 0, 0, 1)),
        ({"a": 0, "b": 1}, {"b": 0, "a": 1}, 2, Overlap(2, 2, 2, 0, 2, 0, 0)),
        ({"a": 0}, {"a": 0, "b": 1, "c": 2}, 3, Overlap(1, 3, 1, 1, 0, 0, 0)),
        ({"a": 0}, {"b": 1}, 3, Overlap(1, 1, 0, 0, 0, 1, 0)),
    ],
)
def test_ids_are_counted(receiver: dict[str, int], sharer: dict[str, int], rows: int, expected: Overlap) -> None:
    """Same, different, unknown and outside, as they are defined."""
    assert compare(receiver, sharer, rows) == expected


@pytest.mark.parametrize(
    ("overlap", "passes", "one"),
    [
        (Overlap(3, 3, 3, 3, 0, 0, 0), True, True),
        (Overlap(3, 2, 2, 2, 0, 1, 0), True, False),
        (Overlap(2, 3, 2, 2, 0, 0, 0), True, False),
        (Overlap(3, 3, 3, 2, 1, 0, 0), False, False),
        (Overlap(3, 2, 2, 2, 0, 0, 1), False, False),
        (Overlap(3, 3, 0, 0, 0, 3, 0), False, False),
    ],
)
def test_ids_pass_where_none_is_misread(overlap: Overlap, passes: bool, one: bool) -> None:
    """One id that means another token, or has no row, is enough to refuse; so is having nothing in common."""
    assert (overlap.ids_pass, overlap.one_vocabulary) == (passes, one)
    assert str(overlap.different) in str(overlap)


@given(VOCABULARIES, VOCABULARIES, st.integers(1, 31))
def test_every_id_is_counted_once(receiver: dict[str, int], sharer: dict[str, int], rows: int) -> None:
    """Same, different, unknown and outside add up to the receiver's ids; more rows never make an id worse."""
    found, wider = compare(receiver, sharer, rows), compare(receiver, sharer, rows + 5)
    assert found.same + found.different + found.unknown + found.outside == len(receiver)
    assert wider.outside <= found.outside
    assert compare(receiver, receiver, 31).one_vocabulary
