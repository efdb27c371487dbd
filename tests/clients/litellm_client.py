"""Run by test_litellm.py in a process of its own, for importing litellm takes seconds; prints what it saw as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

import litellm

litellm.suppress_debug_info = True
TOLD: dict[str, Any] = {"api_base": os.environ["ROUTER"], "api_key": os.environ["ROUTER_KEY"], "num_retries": 0}
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def seen(provider: str) -> dict[str, Any]:
    def ask(model: str = "m", **more: Any) -> Any:
        return litellm.completion(model=f"{provider}/{model}", messages=HI, **{**TOLD, **more})

    def failure(**more: Any) -> list[Any]:
        try:
            ask(**more)
        except Exception as error:
            return [type(error).__name__, getattr(error, "status_code", None)]
        return []

    plain = ask()
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True))
    called = ask(tools=[TOOL]).choices[0].message.tool_calls
    vectors = litellm.embedding(model=f"{provider}/m", input=["a", "b"], encoding_format="float", **TOLD)
    return {
        "plain": [plain.choices[0].message.content, plain.usage.total_tokens],
        "lane": plain._hidden_params["additional_headers"]["llm_provider-x-twolane-transport"],
        "stream": streamed,
        "tool": called[0].function.arguments,
        "embedding": vectors.data[1]["embedding"],
        "errors": [
            failure(model="nowhere"),
            failure(model="busy"),
            failure(model="long"),
            failure(api_key="sk-wrong"),
        ],
    }


if __name__ == "__main__":
    print(json.dumps({provider: seen(provider) for provider in ("openai", "litellm_proxy")}))
