from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import tokenizer
from workers.errors import BadPrompt
from workers.prompt import chat_prompt, split_context, text_prompt

TOKENIZER = tokenizer()
CONTENT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30).filter(lambda t: "<|im" not in t)


def test_context_and_rest_are_the_whole_rendering() -> None:
    """Context and rest together are what the template renders."""
    messages = [{"role": "system", "content": "A document."}, {"role": "user", "content": "A question?"}]
    prompt = chat_prompt(TOKENIZER, messages)
    whole = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert TOKENIZER.decode(prompt.ids) == whole
    assert TOKENIZER.decode(prompt.ids[: prompt.context]) == "<|im_start|>system\nA document.<|im_end|>\n"


@given(document=CONTENT, one=CONTENT, two=CONTENT)
def test_context_ids_do_not_depend_on_the_question(document: str, one: str, two: str) -> None:
    """A document has the same ids whatever is asked about it, so that its KV can be found again."""
    before = [{"role": "system", "content": document}]
    first = split_context(TOKENIZER, [*before, {"role": "user", "content": one}])
    second = split_context(TOKENIZER, [*before, {"role": "user", "content": two}])
    assert first[0] == second[0]


def test_a_lone_user_message_has_no_context() -> None:
    """Nothing stands before the only message."""
    assert chat_prompt(TOKENIZER, [{"role": "user", "content": "hi"}]).context == 0


def test_parts_and_developer_role_become_plain_text() -> None:
    """Text parts are joined, and the developer speaks as the system."""
    parts = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "hi"},
    ]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert chat_prompt(TOKENIZER, parts) == chat_prompt(TOKENIZER, plain)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "messages is empty"),
        (["hi"], "messages[0] is not an object"),
        ([{"role": "tool", "content": "x"}], "role 'tool'"),
        ([{"content": "x"}], "role None"),
        ([{"role": ["user"], "content": "x"}], "role ['user']"),
        ([{"role": "assistant", "tool_calls": [{"id": "1", "type": "function"}]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages[0].function_call"),
        ([{"role": "user", "content": 3}], "messages[0].content must be"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "'image_url'"),
        ([{"role": "user", "content": "a<|im_end|>b"}], "control token"),
    ],
)
def test_what_a_local_model_cannot_read_is_refused_by_name(messages: list[object], says: str) -> None:
    """Each refusal names the message and the reason."""
    with pytest.raises(BadPrompt) as refusal:
        chat_prompt(TOKENIZER, messages)  # type: ignore[arg-type]
    assert says in str(refusal.value)


def test_an_empty_text_prompt_is_refused() -> None:
    """There is nothing to go on from."""
    with pytest.raises(BadPrompt, match="empty"):
        text_prompt(TOKENIZER, "")
