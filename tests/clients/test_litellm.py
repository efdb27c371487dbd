"""litellm as a client: the router is an OpenAI-compatible server to it, and as good as LiteLLM's own proxy."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import subprocess
import sys

import pytest

from tests.router.gateway import KEY, Router


@pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="litellm is not installed")
async def test_both_ways_to_name_the_router(door: Router) -> None:
    """`openai/…` and `litellm_proxy/…` give answers, streams, tools, embeddings and litellm's own errors."""
    told = {
        "ROUTER": f"http://127.0.0.1:{door.port}/v1",
        "ROUTER_KEY": KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    running = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.clients.litellm_client",
        env={**os.environ, **told},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, complaint = await asyncio.wait_for(running.communicate(), 120)
    assert running.returncode == 0, complaint.decode()
    wanted = {
        "plain": ["hello there", 5],
        "lane": "text",
        "stream": "hello there",
        "tool": '{"city":"Bergen"}',
        "embedding": [1.0, 2.0],
        "errors": [
            ["NotFoundError", 404],
            ["RateLimitError", 429],
            ["ContextWindowExceededError", 400],
            ["AuthenticationError", 401],
        ],
    }
    assert json.loads(out.splitlines()[-1]) == {"openai": wanted, "litellm_proxy": wanted}
