"""One chat, two tokenizers, each model reading it as it would alone; and which sharer token each receiver token takes.

Nothing is re-encoded or padded: the sharer reads its own template and its own tokens, so its KV is what it computes
alone, and is stored as such. A receiver token of a message takes the sharer token that holds its last character.
Template text between messages is paired from its end, what is left over takes the first; of the last stretch the
receiver's last token, which is never shared, is left out, so the last shared slot takes the sharer's last token: where
the sharer has read everything. Knows tokenizers and chat templates; knows no models.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from workers.align import Span, spans
from workers.errors import BadPrompt
from workers.prompt import Heard, Message, Prompt, render_split

Scope = Literal["prompt", "context"]


@dataclass(frozen=True, slots=True)
class Reading:
    """What one model reads of a chat."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[Span, ...]
    """Characters of each token."""
    context: int
    """Tokens that stand before the last user message."""
    messages: tuple[Span | None, ...]
    """Characters of each message; None where the template leaves it out."""


class Matcher:
    """For one receiver and sharer tokenizer. `options` are the chat templates'."""

    def __init__(self, receiver: Any, sharer: Any, scope: str, options: Mapping[str, bool]) -> None:
        self.receiver, self.sharer = receiver, sharer
        self.scope = scope
        self._options = dict(options)

    def match(self, messages: Sequence[Message]) -> Prompt:
        """The receiver's prompt, and what the sharer reads of it: all, or with scope `context` what stands before the
        last user message. Raises BadPrompt.
        """
        ours = self._read(self.receiver, messages, "receiver")
        theirs = self._read(self.sharer, messages, "sharer")
        shared = ours.context if self.scope == "context" else len(ours.ids) - 1
        heard = theirs.context if self.scope == "context" else len(theirs.ids)
        return Prompt(ours.ids, ours.context, heard=Heard(theirs.ids[:heard], places(ours, theirs, shared, heard)))

    def _read(self, tokenizer: Any, messages: Sequence[Message], role: str) -> Reading:
        before, rest = render_split(tokenizer, messages, **self._options)
        ids: list[int] = []
        offsets: list[Span] = []
        context = 0
        # Apart, as every model reads a prompt: the context's ids do not depend on the question.
        for start, text in ((0, before), (len(before), rest)):
            context = len(ids)
            if not text:
                continue
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            ids += encoded["input_ids"]
            offsets += [(start + a, start + b) for a, b in encoded["offset_mapping"]]
        thinking = self._options.get("enable_thinking")
        found = spans(tokenizer, messages, "generate", thinking, before + rest, role)
        return Reading(before + rest, tuple(ids), tuple(offsets), context, tuple(found))


def places(ours: Reading, theirs: Reading, shared: int, heard: int) -> tuple[int, ...]:
    """By each of the receiver's first `shared` tokens, the one of the sharer's first `heard` that it takes."""
    if not shared:
        return ()
    if not heard:
        raise BadPrompt("the sharer's chat template writes nothing of what is shared")
    both = [(a, b) for a, b in zip(ours.messages, theirs.messages, strict=True) if a and b and a[0] < a[1]]
    mine = _sections([span for span, _ in both], ours, shared)
    other = _sections([span for _, span in both], theirs, heard)
    starts = [start for start, _ in theirs.offsets[:heard]]
    found: list[int] = []
    for i, (section, within) in enumerate(mine):
        if within:
            found.append(_same_character(ours, theirs, both[section], _last(ours.offsets[i]), starts))
        else:
            found.append(-1)
    _pair_templates(mine, other, found)
    return tuple(accumulate(found, max))


def _last(span: Span) -> int:
    """The token's last character."""
    return max(span[0], span[1] - 1)


def _sections(messages: Sequence[Span], reading: Reading, count: int) -> list[tuple[int, bool]]:
    """By token: (n, True) in message n, (n, False) in the template text before it."""
    found, section = [], 0
    for offsets in reading.offsets[:count]:
        at = _last(offsets)
        while section < len(messages) and at >= messages[section][1]:
            section += 1
        found.append((section, section < len(messages) and at >= messages[section][0]))
    return found


def _same_character(ours: Reading, theirs: Reading, both: tuple[Span, Span], at: int, starts: Sequence[int]) -> int:
    """The sharer's last token that begins at or before the character; one template may have trimmed what the other has
    not.
    """
    mine, other = both
    text, twin = ours.text[mine[0] : mine[1]], theirs.text[other[0] : other[1]]
    shift = twin.find(text) if len(twin) >= len(text) else -text.find(twin)
    at = min(max(other[0] + at - mine[0] + shift, other[0]), other[1] - 1)
    return max(0, bisect_right(starts, at) - 1)


def _pair_templates(mine: Sequence[tuple[int, bool]], other: Sequence[tuple[int, bool]], found: list[int]) -> None:
    """Fill in the slots of template text."""
    for section in {n for n, within in mine if not within}:
        ours = [i for i, where in enumerate(mine) if where == (section, False)]
        theirs = [i for i, where in enumerate(other) if where == (section, False)]
        before = sum(n < section for n, _ in other)
        for back, slot in enumerate(reversed(ours)):
            if theirs:
                found[slot] = theirs[max(0, len(theirs) - 1 - back)]
            else:
                found[slot] = max(0, before - 1)
