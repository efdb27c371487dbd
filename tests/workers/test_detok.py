from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import tokenizer
from workers.detok import Detokenizer

TOKENIZER = tokenizer()
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
STOPS = st.lists(st.text(min_size=1, max_size=4), max_size=3)


def run(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    """Pieces as they are sent, one token at a time."""
    detokenizer = Detokenizer(TOKENIZER, stop)
    pieces = []
    for token in TOKENIZER(text)["input_ids"]:
        pieces.append(detokenizer.push(token))
        if detokenizer.stopped:
            break
    pieces.append(detokenizer.flush())
    return pieces, detokenizer


@given(TEXT)
def test_pieces_are_the_text(text: str) -> None:
    """What is sent piece by piece is what the tokens decode to."""
    assert "".join(run(text)[0]) == TOKENIZER.decode(TOKENIZER(text)["input_ids"])


@given(st.text(st.sampled_from("北京łódź👩é x"), max_size=20))
def test_no_piece_holds_a_broken_character(text: str) -> None:
    """A character that several tokens make is sent once it is whole."""
    assert all("�" not in piece for piece in run(text)[0])


@given(TEXT, STOPS)
def test_a_stop_string_never_leaks(text: str, stops: list[str]) -> None:
    """All that stands before the first stop string is sent, and nothing of it or after it."""
    pieces, detokenizer = run(text, tuple(stops))
    whole = TOKENIZER.decode(TOKENIZER(text)["input_ids"])
    found = [at for s in stops if (at := whole.find(s)) >= 0]
    sent = "".join(pieces)
    if not found:
        assert sent == whole
        assert not detokenizer.stopped
    else:
        assert detokenizer.stopped
        assert not any(s in sent for s in stops)
        assert whole.startswith(sent)


def test_the_part_before_the_earliest_stop_is_sent() -> None:
    """With two stop strings in one piece, the earlier one counts."""
    pieces, detokenizer = run("price, buyer, date", (", date", ", buyer"))
    assert "".join(pieces) == "price"
    assert detokenizer.stopped
