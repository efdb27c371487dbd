"""What an answered request leaves behind: nothing that only the collector could free.

An error is another matter: its traceback holds the frames that hold it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from router.call import Call, Reply
from router.course import Course
from tests.router.gateway import KEY, Router, Seen, chunk, deployment, router, until, upstream
from tests.router.test_guardrails import own

KINDS = (Call, Course, Reply)

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/v1/chat/completions", {"model": "m"}),
    "stream": ("/v1/chat/completions", {"model": "m", "stream": True}),
    "responses": ("/v1/responses", {"model": "m", "stream": True, "input": "hi"}),
    "cut stream": ("/v1/chat/completions", {"model": "cut", "stream": True}),
    "relay": ("/v1/chat/completions", {"model": "r"}),
    "relay's stream": ("/v1/chat/completions", {"model": "r", "stream": True}),
    "guarded": ("/v1/chat/completions", {"model": "m", "guardrails": ["after"]}),
    "guarded stream": ("/v1/chat/completions", {"model": "m", "stream": True, "guardrails": ["after"]}),
    "passed through": ("/v1/messages", {"model": "m", "max_tokens": 5, "stream": True}),
}


async def _answer(seen: Seen) -> web.StreamResponse:
    if not seen.body.get("stream"):
        return await _plain(seen)
    if seen.request.path.endswith("/responses"):
        text = {"type": "response.output_text.delta", "delta": "hi"}
        whole = {"id": "resp_1", "status": "completed", "output": [], "usage": {"input_tokens": 1, "output_tokens": 1}}
        return await seen.stream(text, {"type": "response.completed", "response": whole}, done=False)
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    return await seen.stream(chunk("a"), 0.01, chunk("b", "stop"), usage)


async def _plain(seen: Seen) -> web.Response:
    message = {"role": "assistant", "content": "hint"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage})


async def _cut(seen: Seen) -> web.StreamResponse:
    return await seen.stream(chunk("a"), done=False)


@pytest.mark.parametrize("way", WAYS)
async def test_nothing_is_left_for_the_collector(way: str, tmp_path: Path) -> None:
    """Once its books are closed, no object of a request is alive, though nobody looked for cycles."""
    path, body = WAYS[way]

    async def ask(door: Router) -> None:
        await door.post(path, **body)

    await _leaves_nothing(tmp_path, ask)


async def test_a_hang_up_leaves_nothing(tmp_path: Path) -> None:
    """Of a stream whose caller went, nothing is alive either."""

    async def ask(door: Router) -> None:
        asked = {"model": "slow", "stream": True, "messages": []}
        async with door.session.post(
            "/v1/chat/completions", json=asked, headers={"authorization": f"Bearer {KEY}"}
        ) as response:
            await response.content.readline()

    await _leaves_nothing(tmp_path, ask)


async def _slow(seen: Seen) -> web.StreamResponse:
    return await seen.stream(chunk("a"), 60.0, chunk("b", "stop"))


async def _leaves_nothing(folder: Path, ask: Callable[[Router], Awaitable[None]]) -> None:
    async with upstream() as up:
        up.answers |= {"m": _answer, "small": _answer, "big": _plain, "cut": _cut}
        up.answers["slow"] = _slow
        config = {
            "model_list": [
                *(deployment(name, up) for name in ("m", "small", "big", "cut", "slow")),
                {"model_name": "r", "relay_params": {"sharer": "big", "receiver": "small"}},
            ],
            "guardrails": [own("after", mode="post_call", default_on=False)],
        }
        async with router(folder, config) as door:
            await ask(door)
            with _no_collector():
                before = _alive()
                for _ in range(4):
                    await ask(door)
                with contextlib.suppress(TimeoutError):
                    await until(lambda: _alive() <= before, 2.0)
                assert _alive() <= before


def _alive() -> int:
    return sum(isinstance(one, KINDS) for one in gc.get_objects())


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
