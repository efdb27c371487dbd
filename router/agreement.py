"""How far two answers say the same. Knows texts only."""

from __future__ import annotations

import re
from collections import Counter

# Scripts without blanks between words count character by character.
_WORDS = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


def exact(one: str, other: str) -> bool:
    """The same text but for blanks around it."""
    return one.strip() == other.strip()


def token_f1(one: str, other: str) -> float:
    """Harmonic mean of the shares of words that the two have in common; case, order and punctuation do not count.

    Two texts without a word agree where they are the same.
    """
    ours, theirs = (Counter(_WORDS.findall(text.lower())) for text in (one, other))
    if not ours or not theirs:
        return float(exact(one, other))
    common = sum((ours & theirs).values())
    return 2 * common / (ours.total() + theirs.total())
