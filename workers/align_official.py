"""The official aligner's own way of finding messages, for conformance only: it searches the rendered text.

It takes a role name for the message that equals it, fails on templates that trim, and damages characters that several
tokens share. `workers.align` does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from workers.align import Aligner, Chunk, Kind, Mode, Rendered, Span
from workers.errors import BadPrompt

_BEGIN_OF_TEXT = re.compile(r"<\|?begin_of_text\|?>")


class OfficialAligner(Aligner):
    """As published; where the official code stops with an assertion, BadPrompt."""

    def _chunks(
        self,
        messages: Sequence[Mapping[str, Any]],
        mode: Mode,
        enable_thinking: bool | None,
        receiver: Rendered,
        sharer: Rendered,
    ) -> Iterator[Chunk]:
        contents = [m["content"] for m in messages if m["content"]]
        ours, theirs = (_sections(view, _search(view.text, contents)) for view in (receiver, sharer))
        for mine, other in zip_longest(ours, theirs):
            if mine is None or other is None or mine[0] != other[0]:
                raise BadPrompt("the two rendered chats have different sections")
            kind, ids = mine
            read = tuple(self.convert(i) for i in ids) if kind == "message" else other[1]
            yield Chunk(kind, ids, read)


def _search(text: str, contents: Sequence[str]) -> list[Span]:
    """Left to right; a content that is not found has no span."""
    spans: list[Span] = []
    cursor = 0
    for content in contents:
        start = _first(text, content, cursor)
        if start is not None:
            spans.append((start, start + len(content)))
            cursor = start + len(content)
    return spans


def _first(text: str, content: str, cursor: int) -> int | None:
    """A hit followed by `<` or by the end, else any hit after the cursor, else any hit."""
    hidden = [m.span() for m in _BEGIN_OF_TEXT.finditer(text)]
    every = [m.start() for m in re.finditer(f"(?={re.escape(content)})", text)]
    hits = [h for h in every if not any(a <= h < b for a, b in hidden)]
    later = [h for h in hits if h >= cursor]
    closed = [h for h in later if text[h + len(content) : h + len(content) + 1] in ("", "<")]
    return next(iter([*closed, *later, *hits]), None)


def _sections(view: Rendered, spans: Sequence[Span]) -> list[tuple[Kind, tuple[int, ...]]]:
    sections: list[tuple[Kind, tuple[int, ...]]] = []
    done = 0
    for span in spans:
        tokens = view.tokens(span)
        sections += [("template", view.ids[done : tokens.start]), ("message", view.ids[tokens.start : tokens.stop])]
        done = tokens.stop
    sections.append(("template", view.ids[done:]))
    return [section for section in sections if section[1]]
