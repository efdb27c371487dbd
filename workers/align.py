"""Token alignment for a pair whose tokenizers differ: one prompt, two id lists of equal length, slot for slot.

Template text keeps each model's own tokens, the shorter side padded; message text keeps the receiver's tokens, and the
sharer reads each of them re-encoded. Only message text is fused. Knows tokenizers and chat templates; knows no models.

Messages are found by rendering the template once more with a mark in place of every message, so a message that equals
a role name, or that the template trims, cannot be mistaken. What cannot be aligned is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from jinja2.exceptions import TemplateError

from workers.errors import BadPrompt, LoadFailed

Mode = Literal["generate", "train", "logits"]
Kind = Literal["template", "message"]
Span = tuple[int, int]

_BROKEN = "\ufffd"
"""What decodes from part of a multi-byte character."""


@dataclass(frozen=True, slots=True)
class Part:
    """Slots start..stop-1 are of one kind."""

    kind: Kind
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Aligned:
    """Ids and padding of both models, all of one length; positions run over padding too."""

    receiver_ids: tuple[int, ...]
    sharer_ids: tuple[int, ...]
    receiver_padding: tuple[bool, ...]
    sharer_padding: tuple[bool, ...]
    parts: tuple[Part, ...]
    receiver_text: str
    sharer_text: str
    mode: Mode

    @property
    def message_mask(self) -> tuple[bool, ...]:
        return tuple(p.kind == "message" for p in self.parts for _ in range(p.start, p.stop))

    @property
    def supervised_from(self) -> int:
        """First slot of the answer to be learnt (`train`); elsewhere the length."""
        if self.mode != "train":
            return len(self.receiver_ids)
        return next((p.start for p in reversed(self.parts) if p.kind == "message"), len(self.receiver_ids))

    @property
    def codes(self) -> tuple[int, ...]:
        """Fusion code per slot: 1 for message text, -1 for template text and for the answer to be learnt."""
        first = self.supervised_from
        return tuple(1 if message and i < first else -1 for i, message in enumerate(self.message_mask))

    @property
    def labels(self) -> tuple[int, ...]:
        """The receiver's ids from the answer on, -100 before it and on padding."""
        first = self.supervised_from
        slots = enumerate(zip(self.receiver_ids, self.receiver_padding, strict=True))
        return tuple(-100 if blank or i < first else token for i, (token, blank) in slots)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One part before padding; None is a slot that this side leaves blank."""

    kind: Kind
    receiver: tuple[int | None, ...]
    sharer: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as one model sees it."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[Span, ...]
    """Characters of each token."""

    def tokens(self, span: Span) -> range:
        """Tokens that touch the span: from the first that ends after its start to the first that starts at its end."""
        count = len(self.ids)
        first = next((i for i in range(count) if self.offsets[i][1] > span[0]), count)
        stop = next((i for i in range(first, count) if self.offsets[i][0] >= span[1]), count)
        return range(first, max(first, stop))


class Aligner:
    """Aligns chats for one receiver and sharer tokenizer, which it reads and never changes.

    Of several sharer tokens for one receiver token `strategy` takes the `first`, or the one with the `longest` text.
    """

    def __init__(self, receiver: Any, sharer: Any, strategy: Literal["first", "longest"] = "first") -> None:
        if strategy not in ("first", "longest"):
            raise LoadFailed(f"alignment strategy {strategy!r}: first or longest is expected")
        self.receiver = receiver
        self.sharer = sharer
        self.strategy = strategy
        self._pads = (_pad(receiver, "receiver"), _pad(sharer, "sharer"))
        self._special = frozenset(receiver.all_special_ids)
        self._roles = _roles(receiver, sharer)
        self._control = (_control(receiver), _control(sharer))
        self._encoded: dict[int, tuple[int, ...]] = {}
        self._alone: dict[int, tuple[int, ...]] = {}
        self._texts: dict[int, str] = {}

    def align(
        self, messages: Sequence[Mapping[str, Any]], mode: Mode = "generate", *, enable_thinking: bool | None = False
    ) -> Aligned:
        """`generate`: the template with its generation prompt. `train`: the whole conversation. `logits`: as
        `generate` for all messages but the last, whose text follows raw. `enable_thinking` is the template's; None
        leaves it out. Raises BadPrompt.
        """
        _check(messages, mode)
        texts = tuple(render(t, messages, mode, enable_thinking) for t in (self.receiver, self.sharer))
        views = tuple(_view(t, text) for t, text in zip((self.receiver, self.sharer), texts, strict=True))
        chunks = list(self._chunks(messages, mode, enable_thinking, views[0], views[1]))
        return self._join(chunks, views[0].text, views[1].text, mode)

    def convert(self, token: int) -> int:
        """The sharer's token for one receiver token, looked at alone."""
        return self._pick(self.candidates(token))

    def candidates(self, token: int) -> tuple[int, ...]:
        """The sharer's tokens for one receiver token; never none."""
        if token in self._special:
            same = self.sharer.get_vocab().get(self.receiver.convert_ids_to_tokens(token))
            found = self._roles.get(token, same)
            return (self._unknown if found is None else int(found),)
        return self._plain(token) or (self._unknown,)

    def _plain(self, token: int) -> tuple[int, ...]:
        """A receiver token's text as the sharer encodes it; may be nothing."""
        if token not in self._encoded:
            self._encoded[token] = self._encode(self._text(token))
        return self._encoded[token]

    def _read(self, token: int) -> tuple[int, ...]:
        """What the sharer reads for one receiver token that stands alone in a message: one token, or none."""
        if token not in self._alone:
            found = self.candidates(token) if token in self._special else self._plain(token)
            self._alone[token] = self._fit(found, 1)
        return self._alone[token]

    def _text(self, token: int) -> str:
        """A receiver token decoded alone."""
        if token not in self._texts:
            self._texts[token] = self.receiver.decode([token])
        return self._texts[token]

    @property
    def _unknown(self) -> int:
        return int(self.sharer.unk_token_id or 0)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.sharer.encode(text, add_special_tokens=False))

    def _pick(self, ids: tuple[int, ...]) -> int:
        if self.strategy == "first":
            return ids[0]
        return max(ids, key=lambda i: len(self.sharer.decode([i])))

    def _fit(self, ids: tuple[int, ...], slots: int) -> tuple[int, ...]:
        """At most `slots` of the ids, in their order; never part of a character, and blanks last."""
        if len(ids) <= slots:
            return ids
        if slots == 1 and _BROKEN not in self.sharer.decode([one := self._pick(ids)]):
            return (one,)
        units = list(self._units(ids))
        texts = [self.sharer.decode(list(unit)) for unit in units]
        longest = self.strategy == "longest"
        chosen: set[int] = set()
        for i in sorted(range(len(units)), key=lambda i: (not texts[i].strip(), -len(texts[i]) if longest else 0)):
            if len(units[i]) <= slots and _BROKEN not in texts[i]:
                chosen.add(i)
                slots -= len(units[i])
        return tuple(token for i in sorted(chosen) for token in units[i])

    def _units(self, ids: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """The sharer's tokens, those of one character together."""
        start = 0
        for stop in range(1, len(ids) + 1):
            if stop == len(ids) or _BROKEN not in self.sharer.decode(list(ids[start:stop])):
                yield ids[start:stop]
                start = stop

    def _chunks(
        self,
        messages: Sequence[Mapping[str, Any]],
        mode: Mode,
        enable_thinking: bool | None,
        receiver: Rendered,
        sharer: Rendered,
    ) -> Iterator[Chunk]:
        ours = spans(self.receiver, messages, mode, enable_thinking, receiver.text, "receiver")
        theirs = spans(self.sharer, messages, mode, enable_thinking, sharer.text, "sharer")
        done, cursor = 0, 0
        for index, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            if mine is None and other is None:
                continue
            if mine is None or other is None:
                role = "receiver" if mine is None else "sharer"
                raise BadPrompt(f"the {role}'s chat template leaves out message {index}, which the other's keeps")
            if mine[0] == mine[1]:  # blank, and trimmed away: on the other side it is template text
                continue
            tokens = receiver.tokens(mine)
            if tokens.start < done:
                raise BadPrompt(f"one of the receiver's tokens spans message {index} and the one before it")
            yield Chunk("template", receiver.ids[done : tokens.start], self._piece(sharer, (cursor, other[0])))
            yield Chunk(
                "message", receiver.ids[tokens.start : tokens.stop], self._message(receiver, tokens, mine, index)
            )
            done, cursor = tokens.stop, other[1]
        tail = self._piece(sharer, (cursor, len(sharer.text)))
        # No sharer runs on the last part. What it has beyond the receiver's would only put padding where the next
        # token is chosen.
        yield Chunk("template", receiver.ids[done:], tail[: len(receiver.ids) - done])

    def _piece(self, view: Rendered, span: Span) -> tuple[int, ...]:
        """Template text as tokens: those of the whole text where they end where the piece does, else encoded alone."""
        if span[0] == span[1]:
            return ()
        tokens = view.tokens(span)
        whole = view.offsets[tokens.start : tokens.stop]
        if whole and whole[0][0] >= span[0] and whole[-1][1] <= span[1]:
            return view.ids[tokens.start : tokens.stop]
        return self._encode(view.text[span[0] : span[1]])

    def _message(self, view: Rendered, tokens: range, span: Span, index: int) -> tuple[int | None, ...]:
        """A sharer token, or None, for each of the receiver's tokens of a message."""
        slots: list[int | None] = []
        for group in self._groups(view, tokens):
            ids = [view.ids[i] for i in group]
            self._refuse_control("receiver", ids, index)
            first, last = view.offsets[group[0]], view.offsets[group[-1]]
            if first[0] < span[0] or last[1] > span[1]:
                found = self._encode(view.text[max(first[0], span[0]) : min(last[1], span[1])])
                chosen = self._fit(found, len(ids))
            elif len(ids) == 1:
                chosen = self._read(ids[0])
            else:
                chosen = self._fit(self._encode(self.receiver.decode(ids)), len(ids))
            self._refuse_control("sharer", chosen, index)
            slots += [*chosen, *[None] * (len(ids) - len(chosen))]
        return tuple(slots)

    def _refuse_control(self, role: Literal["receiver", "sharer"], ids: Sequence[int], index: int) -> None:
        """A caller's text must not act as the template does."""
        tokenizer, control = (
            (self.receiver, self._control[0]) if role == "receiver" else (self.sharer, self._control[1])
        )
        for token in ids:
            if token in control:
                name = tokenizer.convert_ids_to_tokens(token)
                raise BadPrompt(f"message {index} contains {name}, a special token of the {role}")

    def _groups(self, view: Rendered, tokens: range) -> Iterator[range]:
        """Tokens one by one; those that share a multi-byte character together."""
        start = tokens.start
        while start < tokens.stop:
            stop = start + 1
            text = self._text(view.ids[start])
            while _BROKEN in text and stop < tokens.stop and _BROKEN in self._text(view.ids[stop]):
                stop += 1
                text = self.receiver.decode(list(view.ids[start:stop]))
            yield range(start, stop)
            start = stop

    def _join(self, chunks: Sequence[Chunk], receiver_text: str, sharer_text: str, mode: Mode) -> Aligned:
        receiver: list[int | None] = []
        sharer: list[int | None] = []
        parts: list[Part] = []
        for chunk in chunks:
            length = max(len(chunk.receiver), len(chunk.sharer))
            if length:
                parts.append(Part(chunk.kind, len(receiver), len(receiver) + length))
            receiver += [*chunk.receiver, *[None] * (length - len(chunk.receiver))]
            sharer += [*chunk.sharer, *[None] * (length - len(chunk.sharer))]
        return Aligned(
            receiver_ids=tuple(self._pads[0] if i is None else i for i in receiver),
            sharer_ids=tuple(self._pads[1] if i is None else i for i in sharer),
            receiver_padding=tuple(i is None for i in receiver),
            sharer_padding=tuple(i is None for i in sharer),
            parts=tuple(parts),
            receiver_text=receiver_text,
            sharer_text=sharer_text,
            mode=mode,
        )


def _pad(tokenizer: Any, role: str) -> int:
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    if pad is None:
        raise LoadFailed(f"the {role}'s tokenizer has neither a pad nor an eos token, so nothing can be padded")
    return int(pad)


def _control(tokenizer: Any) -> frozenset[int]:
    """Every special token that text can be mistaken for, also those that the tokenizer's own list leaves out, as Llama
    3's does. An unknown token with no other role is none: it stands for text.
    """
    listed = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    others = {tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    return frozenset(listed - ({tokenizer.unk_token_id} - others))


def _roles(receiver: Any, sharer: Any) -> dict[int, int]:
    """Special receiver tokens that the sharer has in the same role; a pad that is missing is eos. Later roles win."""
    table: dict[int, int] = {_pad(receiver, "receiver"): _pad(sharer, "sharer")}
    for role in ("eos_token_id", "bos_token_id", "unk_token_id"):
        ours, theirs = getattr(receiver, role), getattr(sharer, role)
        if ours is not None and theirs is not None:
            table[int(ours)] = int(theirs)
    return table


def _check(messages: Sequence[Mapping[str, Any]], mode: Mode) -> None:
    if not messages:
        raise BadPrompt("there are no messages")
    for index, message in enumerate(messages):
        if not isinstance(message.get("content"), str):
            raise BadPrompt(f"message {index} is not plain text; a pair with two tokenizers reads only text")
    if mode != "generate" and messages[-1].get("role") != "assistant":
        raise BadPrompt(f"the last message must be the assistant's in mode {mode}")


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], mode: Mode, enable_thinking: bool | None) -> str:
    """The chat as text. Raises BadPrompt when the template refuses it."""
    options: dict[str, Any] = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    shown = list(messages[:-1] if mode == "logits" else messages)
    try:
        text = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=mode != "train", **options)
    except (TemplateError, ValueError, TypeError, KeyError) as error:
        raise BadPrompt(f"a chat template refuses these messages ({type(error).__name__})") from error
    return str(text) + (messages[-1]["content"] if mode == "logits" else "")


def _view(tokenizer: Any, text: str) -> Rendered:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return Rendered(text, tuple(encoded["input_ids"]), tuple((int(a), int(b)) for a, b in encoded["offset_mapping"]))


def spans(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    mode: Mode,
    enable_thinking: bool | None,
    text: str,
    role: str,
) -> list[Span | None]:
    """Where each message's text lies in the rendered chat; None where it is empty or left out. Raises BadPrompt when
    the template repeats, reorders or rewrites a message.
    """
    marks = [f"\ue000{i}\ue001" if m["content"] else "" for i, m in enumerate(messages)]
    marked = [{**m, "content": mark} for m, mark in zip(messages, marks, strict=True)]
    outline = render(tokenizer, marked, mode, enable_thinking)
    places = [(i, outline.find(mark)) for i, mark in enumerate(marks) if mark and mark in outline]
    if any(outline.count(marks[i]) > 1 for i, _ in places) or any(a[1] > b[1] for a, b in pairwise(places)):
        raise BadPrompt(f"the {role}'s chat template repeats or reorders messages")
    pattern, cursor = "", 0
    for i, place in places:
        forms = "|".join(re.escape(form) for form in _forms(messages[i]["content"]))
        pattern += f"{re.escape(outline[cursor:place])}({forms})"
        cursor = place + len(marks[i])
    found = re.fullmatch(pattern + re.escape(outline[cursor:]), text)
    if found is None:
        raise BadPrompt(f"the {role}'s chat template rewrites a message, so its text cannot be found again")
    result: list[Span | None] = [None] * len(messages)
    for group, (i, _) in enumerate(places, start=1):
        result[i] = found.span(group)
    return result


def _forms(content: str) -> list[str]:
    """What templates make of a message: as it is, trimmed, or without its thinking."""
    answer = content.rpartition("</think>")[2]
    trimmed = [form for text in (content, answer) for form in (text, text.strip(), text.lstrip(), text.rstrip())]
    return list(dict.fromkeys([*trimmed, answer.lstrip("\n")]))
