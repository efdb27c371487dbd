"""The `openai` client for Node, unchanged but for its address and key."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.router.gateway import KEY, Router

PACKAGE = "openai@6.30.1"
"""The newest that Node 20 runs."""
SCRIPT = Path(__file__).with_name("openai_node.cjs")

needs_node = pytest.mark.skipif(
    shutil.which("node") is None or shutil.which("npm") is None, reason="node and npm are not installed"
)


def modules() -> Path:
    """Where the package lies; installed once, outside of the repository."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "twolane" / "node" / PACKAGE
    if not (folder / "node_modules" / "openai" / "package.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--silent", PACKAGE]
        subprocess.run(command, check=True, timeout=150)
    return folder / "node_modules"


@needs_node
async def test_every_door(door: Router) -> None:
    """Chat, streams, tools, embeddings, responses, files, sounds, pictures and errors are as at a provider."""
    told = {
        "ROUTER": f"http://127.0.0.1:{door.port}/v1",
        "ROUTER_KEY": KEY,
        "NODE_PATH": str(await asyncio.to_thread(modules)),
    }
    running = await asyncio.create_subprocess_exec(
        "node", str(SCRIPT), env={**os.environ, **told}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, complaint = await asyncio.wait_for(running.communicate(), 60)
    assert running.returncode == 0, complaint.decode()
    assert json.loads(out) == {
        "plain": ["hello there", 5],
        "stream": "hello there",
        "usage": 5,
        "tool": '{"city":"Bergen"}',
        "embedding": [1, 2],
        "response": "hello there",
        "events": "hello there",
        "models": ["m", "busy", "broken", "long", "slow"],
        "file": [8, "b.jsonl"],
        "content": '{"custom_id":"1"}\n',
        "heard": "m heard 2000000 bytes",
        "spoken": list(b"ID3\0\1"),
        "image": "aGk=",
        "errors": [
            ["NotFoundError", 404, "model_not_found"],
            ["RateLimitError", 429, "rate_limit_exceeded"],
            ["BadRequestError", 400, "context_length_exceeded"],
            ["NotFoundError", 404, None],
            ["AuthenticationError", 401, "invalid_api_key"],
        ],
    }
