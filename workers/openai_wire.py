"""OpenAI bodies of a worker's own HTTP face: requests in, chunks and completions out. Torch-free."""

from __future__ import annotations

import time
import uuid
from typing import Any, Literal

import msgspec

from workers.errors import BadPrompt, WorkerError
from workers.protocol import Counterfactual, Run


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool = False


class Body(msgspec.Struct):
    """What a worker reads of /chat/completions and /completions; the rest is ignored, as llama.cpp and vLLM do."""

    model: str
    messages: list[Any] | None = None
    prompt: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    ignore_eos: bool = False
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    tool_choice: Any = None
    function_call: Any = None
    response_format: dict[str, Any] | None = None


_BODY = msgspec.json.Decoder(Body)


def read_body(data: bytes, *, chat: bool) -> Body:
    """Raises BadPrompt naming the field and what was expected."""
    try:
        body = _BODY.decode(data)
    except msgspec.DecodeError as error:
        raise BadPrompt(f"the request body cannot be read: {error}") from error
    if chat and body.messages is None:
        raise BadPrompt("messages is required")
    if not chat and body.prompt is None:
        raise BadPrompt("prompt is required")
    if body.tools or body.functions:
        raise BadPrompt("a local model cannot call tools")
    for name in ("tool_choice", "function_call"):
        if getattr(body, name) not in (None, "none", "auto"):
            raise BadPrompt(f"{name} asks for a call, and a local model cannot call tools")
    if body.response_format is not None and body.response_format.get("type", "text") != "text":
        raise BadPrompt("a local model cannot be held to a response_format")
    if chat and not isinstance(body.logprobs, bool | None):
        raise BadPrompt(f"logprobs must be true or false, and was {body.logprobs}")
    if not chat and body.logprobs:
        raise BadPrompt("logprobs are served by /v1/chat/completions only")
    return body


_COUNTERFACTUAL = msgspec.json.Decoder(Counterfactual)


def read_counterfactual(data: bytes) -> Counterfactual:
    """Raises BadPrompt naming the field and what was expected."""
    try:
        return _COUNTERFACTUAL.decode(data)
    except msgspec.DecodeError as error:
        raise BadPrompt(f"the request body cannot be read: {error}") from error


class Answer:
    """Names one answer and writes its frames. `kind` tells chat from plain completions."""

    def __init__(self, model: str, fingerprint: str, *, chat: bool) -> None:
        self.chat = chat
        self.head = {
            "id": ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex,
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"fp_{fingerprint}",
        }

    def opening(self, index: int) -> bytes:
        """The first event of a choice: its role."""
        return self._event([{"index": index, "delta": {"role": "assistant", "content": ""}, **_OPEN}])

    def delta(self, index: int, text: str, logprobs: dict[str, Any] | None) -> bytes:
        """New text of a choice."""
        if self.chat:
            choice = {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": None}
        else:
            choice = {"index": index, "text": text, **_OPEN}
        return self._event([choice])

    def finish(self, index: int, reason: str) -> bytes:
        """The end of a choice."""
        content: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return self._event([{"index": index, **content, "logprobs": None, "finish_reason": reason}])

    def usage(self, usage: dict[str, Any], run: Run) -> bytes:
        """The last event before [DONE]: what the answer cost, and what the worker knows of it."""
        return self._event([], usage=usage, twolane=run)

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, Any], run: Run) -> bytes:
        """The body of an answer that was not streamed."""
        return msgspec.json.encode({**self.head, "choices": choices, "usage": usage, "twolane": run})

    def _event(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind: Literal["chat.completion.chunk", "text_completion"]
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return b"data: " + msgspec.json.encode({**self.head, "object": kind, "choices": choices, **more}) + b"\n\n"


_OPEN: dict[str, Any] = {"logprobs": None, "finish_reason": None}
DONE = b"data: [DONE]\n\n"


def usage_of(prompt: int, completion: int, reused: int) -> dict[str, Any]:
    """OpenAI's `usage`; `cached_tokens` are prompt tokens whose KV came from the store."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": reused},
    }


def error_body(error: WorkerError) -> bytes:
    """OpenAI's error shape."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return msgspec.json.encode(
        {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}},
    )


def error_event(error: WorkerError) -> bytes:
    """The last event of a stream that broke."""
    return b"data: " + error_body(error) + b"\n\n"
