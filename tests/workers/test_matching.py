"""workers.matching: one chat, each model reading it as it would alone, and which sharer token each slot takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from tests.tiny import tokenizer
from workers.errors import BadPrompt
from workers.matching import Matcher, Reading, places
from workers.prompt import Heard, Message, Prompt, chat_ids

FOLDER = Path(__file__).parents[1] / "golden" / "alignment"
RECEIVER = AutoTokenizer.from_pretrained(FOLDER / "tokenizers" / "receiver")
SHARER = AutoTokenizer.from_pretrained(FOLDER / "tokenizers" / "sharer")
TRIMS = AutoTokenizer.from_pretrained(FOLDER / "tokenizers_trim" / "sharer")
CHAT: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who wrote łódź, 北京 and 👩‍🚀?"},
]


def matched(messages: list[Message], scope: str = "prompt", sharer: Any = SHARER) -> tuple[Prompt, Heard]:
    prompt = Matcher(RECEIVER, sharer, scope, {}).match(messages)
    assert prompt.heard is not None
    return prompt, prompt.heard


@pytest.mark.parametrize("scope", ["prompt", "context"])
def test_each_model_reads_what_it_reads_alone(scope: str) -> None:
    """Receiver and sharer ids are those of their own templates; the context ends where it ends for either alone."""
    prompt, heard = matched(CHAT, scope)
    ours, theirs = chat_ids(RECEIVER, CHAT), chat_ids(SHARER, CHAT)
    assert (prompt.ids, prompt.context) == (ours.ids, ours.context)
    assert heard.ids == (theirs.ids if scope == "prompt" else theirs.ids[: theirs.context])
    assert len(heard.places) == (len(prompt) - 1 if scope == "prompt" else prompt.context)


def test_the_last_shared_slot_takes_the_sharers_last_token() -> None:
    """There the sharer has read everything; the receiver's last token is not shared."""
    _, heard = matched(CHAT)
    assert heard.places[-1] == len(heard.ids) - 1


WORDS = st.lists(
    st.sampled_from(["the", "Tide", "北京", "łódź", "👩‍🚀", "  ", "\n", "<", "user", "123", "é"]), min_size=1
)


@settings(max_examples=60, deadline=None)
@given(first=WORDS, second=WORDS, scope=st.sampled_from(["prompt", "context"]))
def test_a_slot_of_a_message_takes_the_token_with_its_last_character(
    first: list[str], second: list[str], scope: str
) -> None:
    """Whatever is said: what the sharer has read of the messages up to a slot's place covers what the receiver has, and
    without the place's token it does not. Places never fall.
    """
    said = ["zq " + "".join(first), "qz " + " ".join(second)]
    chat = [{"role": role, "content": text} for role, text in zip(("system", "user"), said, strict=True)]
    prompt, heard = matched(chat, scope)
    assert list(heard.places) == sorted(heard.places)
    assert not heard.places or 0 <= heard.places[0] <= heard.places[-1] < len(heard.ids)
    mine = RECEIVER.decode(list(prompt.ids))
    whole = SHARER.decode(list(heard.ids))
    for message in chat[:1] if scope == "context" else chat:
        text = message["content"]
        start, twin = mine.find(text), whole.find(text)
        for slot, place in enumerate(heard.places):
            read = RECEIVER.decode(list(prompt.ids[: slot + 1]))
            covered = len(read) - start
            if read.endswith("\ufffd") or not mine.startswith(read) or not 0 < covered <= len(text):
                continue
            upto = SHARER.decode(list(heard.ids[: place + 1]))
            before = SHARER.decode(list(heard.ids[:place]))
            assert len(upto) - twin >= covered
            assert len(before.rstrip("\ufffd")) - twin < covered


def test_a_trimmed_message_is_found_by_its_characters() -> None:
    """Where the sharer's template trims blanks, the words still meet; the blanks take the word's first token."""
    chat = [{"role": "user", "content": "  Explain the cache.  "}]
    prompt, heard = matched(chat, sharer=TRIMS)
    slot = next(i for i in range(len(prompt)) if RECEIVER.decode(list(prompt.ids[: i + 1])).endswith("cache"))
    assert "cache" in SHARER.decode(list(heard.ids[: heard.places[slot] + 1]))
    assert "cache" not in SHARER.decode(list(heard.ids[: heard.places[slot]]))


def test_template_text_is_paired_from_its_end() -> None:
    """The longer side's rest takes the other's first token of that stretch, or the one before where it has none."""
    span = (4, 6)
    ours = Reading("ABCDxyEF", tuple(range(7)), ((0, 1), (1, 2), (2, 4), (4, 5), (5, 6), (6, 7), (7, 8)), 0, (span,))
    theirs = Reading("CDxyE", tuple(range(4)), ((0, 1), (1, 2), (2, 4), (4, 5)), 0, ((2, 4),))
    assert places(ours, theirs, 6, 4) == (0, 0, 1, 2, 2, 3)
    bare = Reading("xy", (0, 1), ((0, 1), (1, 2)), 0, ((0, 2),))
    assert places(ours, bare, 6, 2) == (0, 0, 0, 0, 1, 1)


def test_a_template_that_hides_what_is_shared_is_refused() -> None:
    """With nothing in the sharer's reading there is nothing to take, and a template that repeats a message says so."""
    silent = tokenizer()
    silent.chat_template = "{% if add_generation_prompt %}Go{% endif %}"
    with pytest.raises(BadPrompt, match="writes nothing of what is shared"):
        Matcher(RECEIVER, silent, "context", {}).match(CHAT)
    twice = tokenizer()
    twice.chat_template = "{% for m in messages %}{{ m['content'] }} {{ m['content'] }}{% endfor %}"
    with pytest.raises(BadPrompt, match="the sharer's chat template repeats"):
        Matcher(RECEIVER, twice, "prompt", {}).match(CHAT)
