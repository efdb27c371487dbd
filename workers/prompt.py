"""OpenAI messages -> token ids. Knows chat templates; knows no model.

A prompt carries the place where its context ends: what stands before the last user message, which in the scope
`context` one model reads for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from workers.errors import BadPrompt

if TYPE_CHECKING:
    from workers.align import Aligned

Message = dict[str, Any]

WITHOUT_THINKING = {"enable_thinking": False}
"""Options of chat templates; those that know no thinking ignore it."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, slots=True)
class Heard:
    """A chat as a sharer with its own tokenizer reads it, as far as it is shared."""

    ids: tuple[int, ...]
    places: tuple[int, ...]
    """By shared receiver slot: the sharer's slot that it takes; never falling."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids and the number of them that stand before the last user message."""

    ids: tuple[int, ...]
    context: int
    aligned: Aligned | None = None
    """The chat as two models with different tokenizers read it; `ids` are then the receiver's, without padding."""
    heard: Heard | None = None
    """What the sharer reads where that is not the receiver's ids."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def positions(self) -> int:
        """Positions the prompt takes up: padding has no KV, but it has positions."""
        return len(self.ids) if self.aligned is None else len(self.aligned.receiver_ids)


def chat_prompt(tokenizer: Any, messages: Sequence[Message], **options: bool) -> Prompt:
    """Render with the model's own chat template and its `options`. Raises BadPrompt in the caller's terms."""
    plain = plain_messages(messages)
    refuse_control_tokens(tokenizer, plain)
    return chat_ids(tokenizer, plain, **options)


def chat_ids(tokenizer: Any, messages: Sequence[Message], **options: bool) -> Prompt:
    """Of messages that are plain already. Raises BadPrompt where the template refuses them."""
    context, rest = split_context(tokenizer, messages, **options)
    return Prompt((*context, *rest), len(context))


def text_prompt(tokenizer: Any, text: str) -> Prompt:
    """A raw completion prompt: no template, no context. The tokenizer's own first token is added."""
    ids = tuple(tokenizer(text)["input_ids"])
    if not ids:
        raise BadPrompt("the prompt is empty")
    return Prompt(ids, 0)


def split_context(tokenizer: Any, messages: Sequence[Message], **options: bool) -> tuple[list[int], list[int]]:
    """Ids of what stands before the last user message, and ids of the rest with the generation prompt.

    The two are tokenized apart, so that the context's ids do not depend on the question. Where the template renders
    the beginning differently without the last message, the context is empty.
    """
    before, rest = render_split(tokenizer, messages, **options)
    return _encode(tokenizer, before), _encode(tokenizer, rest)


def render_split(tokenizer: Any, messages: Sequence[Message], **options: bool) -> tuple[str, str]:
    """Text of what stands before the last user message, and of the rest with the generation prompt."""
    full = render(tokenizer, messages, options, generation=True)
    last = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=0)
    before = render(tokenizer, messages[:last], options, generation=False) if last else ""
    if not full.startswith(before):
        before = ""
    return before, full[len(before) :]


def render(tokenizer: Any, messages: Sequence[Message], options: Mapping[str, bool], *, generation: bool) -> str:
    """Text of a chat by the model's template. Raises BadPrompt."""
    if tokenizer.chat_template is None:
        raise BadPrompt("this model has no chat template; use /v1/completions")
    try:
        shown = list(messages)
        return str(tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=generation, **options))
    except TemplateError as error:
        raise BadPrompt(f"the model's chat template refuses these messages: {error}") from error


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def plain_messages(messages: Sequence[Message]) -> list[Message]:
    """Messages with text content only, in the roles that chat templates know."""
    if not messages:
        raise BadPrompt("messages is empty")
    plain = []
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadPrompt(f"messages[{at}] is not an object")
        said = message.get("role")
        role = _ROLES.get(said) if isinstance(said, str) else None
        if role is None:
            raise BadPrompt(f"messages[{at}]: role {said!r} cannot be served by a local model")
        for calls in ("tool_calls", "function_call"):
            if message.get(calls):
                raise BadPrompt(f"messages[{at}].{calls}: calls of tools cannot be read by a local model")
        plain.append({"role": role, "content": _text(message.get("content"), at)})
    return plain


def _text(content: Any, at: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadPrompt(f"messages[{at}].content must be a string or a list of parts")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise BadPrompt(f"messages[{at}].content: parts of type {kind!r} cannot be served by a local model")
        parts.append(str(part.get("text", "")))
    return "".join(parts)


def refuse_control_tokens(tokenizer: Any, messages: Sequence[Message]) -> None:
    """A control token spelt out in content would end a message or begin another: refused, never obeyed."""
    for at, message in enumerate(messages):
        for token in tokenizer.all_special_tokens:
            if token in message["content"]:
                raise BadPrompt(f"messages[{at}].content spells the control token {token!r} of the model")
