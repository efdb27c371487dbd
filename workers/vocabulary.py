"""Do two tokenizers mean the same by the same ids? Knows vocabularies only. Torch-free.

A pair that is not aligned gives the receiver's ids to the sharer as they are. That is right for one tokenizer, and for
tokenizers that grew from one another: what both know must be the same, and what only the receiver knows must at least
have a row in the sharer's embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two vocabularies, compared by id and by token."""

    receiver_tokens: int
    sharer_tokens: int
    shared_strings: int
    """Tokens that are in both, under whatever id."""
    same: int
    """Ids that mean the same token in both."""
    different: int
    """Ids that both know and that mean different tokens."""
    unknown: int
    """Ids that only the receiver knows, and that have a row in the sharer's embedding."""
    outside: int
    """The receiver's ids that are beyond the sharer's embedding."""

    @property
    def ids_pass(self) -> bool:
        """The sharer may read the receiver's ids."""
        return self.same > 0 and not self.different and not self.outside

    @property
    def one_vocabulary(self) -> bool:
        return self.same == self.receiver_tokens == self.sharer_tokens

    def __str__(self) -> str:
        return (
            f"of the receiver's {self.receiver_tokens} token ids {self.same} mean the same to the sharer, "
            f"{self.different} mean another token, {self.unknown} are unknown to it and {self.outside} are beyond its "
            "embedding"
        )


def compare(receiver: Mapping[str, int], sharer: Mapping[str, int], rows: int) -> Overlap:
    """Vocabularies token -> id; `rows` is the length of the sharer's embedding."""
    theirs = {i: token for token, i in sharer.items()}
    ids = {i: token for token, i in receiver.items()}
    known = [i for i in ids if i in theirs and i < rows]
    same = sum(ids[i] == theirs[i] for i in known)
    outside = sum(i >= rows for i in ids)
    return Overlap(
        receiver_tokens=len(ids),
        sharer_tokens=len(theirs),
        shared_strings=len(receiver.keys() & sharer.keys()),
        same=same,
        different=len(known) - same,
        unknown=len(ids) - len(known) - outside,
        outside=outside,
    )
