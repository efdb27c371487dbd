"""The relay's wording: what a sharer is asked for a hint, and how a receiver is told one. Torch-free."""

from __future__ import annotations

from typing import Any

ASK = (
    "Another model will answer the last user message; you only help it. Do not answer. Write a short hint with the "
    "facts, figures or steps that it needs and might lack. Plain text, no preamble."
)
TELL = "Hint from another model, to be used where it helps and ignored where it does not:"
"""The whole wording of a relay. The hint follows on its own lines, before `END`."""
END = "(End of hint.)"

_READ_BY_SHARER = frozenset({"system", "developer", "user", "assistant"})

Message = dict[str, Any]


def for_sharer(messages: list[Message]) -> list[Message]:
    """What the sharer reads: the conversation's texts, and what it is asked for."""
    return place([m for m in messages if m.get("role") in _READ_BY_SHARER and m.get("content")], ASK)


def for_receiver(messages: list[Message], hint: str) -> list[Message]:
    """What the receiver reads: the conversation with the hint, which is not empty."""
    return place(messages, f"{TELL}\n{hint}\n{END}")


def hint_in(text: str) -> str:
    """The hint of a sharer's answer: one that contained a mark would pass what follows for no hint."""
    return text.strip().replace(END, "").replace(TELL, "").strip()


def place(messages: list[Message], text: str) -> list[Message]:
    """The conversation with `text` added where every chat template takes it.

    A leading system message is extended, else the last user message: a second system message, or one where a template
    knows none, would be refused by some.
    """
    at = 0
    if not messages or messages[0].get("role") not in ("system", "developer"):
        at = max(i for i, m in enumerate(messages) if m.get("role") == "user")
    message = messages[at]
    content = message.get("content")
    if isinstance(content, list):
        content = [*content, {"type": "text", "text": text}]
    else:
        content = f"{content}\n\n{text}" if content else text
    return [*messages[:at], {**message, "content": content}, *messages[at + 1 :]]
