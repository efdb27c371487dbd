from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from router.call import Call, Reply
from router.deployments import Deployment
from router.errors import Refused, TimedOut, TransportError, Unavailable
from router.source import ConfigError
from router.tenants import Tenant
from router.transports.text_litellm import LiteLLMThread, TextLiteLLM

HERE = importlib.util.find_spec("litellm") is not None
needs_litellm = pytest.mark.skipif(not HERE, reason="the litellm extra is not installed")
USER = {"role": "user", "content": "hi"}
KEY = "sk-ant-secret-0123456789"

pytestmark = [
    # litellm's own, on its way through httpx and pydantic
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
]


@pytest.fixture(scope="module")
def shared() -> list[LiteLLMThread]:
    """One thread for the module: the import takes seconds."""
    return []


@pytest.fixture
async def thread(shared: list[LiteLLMThread]) -> LiteLLMThread:
    if not shared:
        shared.append(LiteLLMThread())
    # The import may take longer than a call may: on a busy machine the first test would tell of that alone.
    await shared[0].module()
    return shared[0]


class Provider:
    """A real HTTP server with Anthropic's interface, so that litellm has something to translate."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.error = "no"
        self.hang = False
        self.cut = False
        self.nonsense = False
        self.asked = asyncio.Event()
        self.hung_up = asyncio.Event()
        self.base = ""

    async def messages(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        self.asked.set()
        self.headers.append(dict(request.headers))
        if self.status != 200:
            error = {"type": "error", "error": {"type": "invalid_request_error", "message": self.error}}
            return web.json_response(error, status=self.status, headers={"retry-after": "7"})
        try:
            if body.get("stream"):
                return await self._stream(request)
            if self.hang:
                await asyncio.sleep(30)
        except asyncio.CancelledError:
            self.hung_up.set()
            raise
        if self.nonsense:
            return web.json_response({"id": "m", "content": [], "usage": {}})
        usage = {"input_tokens": 11, "output_tokens": 3}
        content = [{"type": "text", "text": "hello"}]
        answer = {"id": "m", "type": "message", "role": "assistant", "model": "claude-x", "content": content}
        return web.json_response({**answer, "stop_reason": "end_turn", "stop_sequence": None, "usage": usage})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)

        async def send(kind: str, **fields: Any) -> None:
            data = json.dumps({"type": kind, **fields})
            await response.write(f"event: {kind}\ndata: {data}\n\n".encode())

        message = {"id": "m", "type": "message", "role": "assistant", "model": "claude-x", "content": []}
        await send("message_start", message={**message, "usage": {"input_tokens": 11, "output_tokens": 1}})
        await send("content_block_start", index=0, content_block={"type": "text", "text": ""})
        for word in ("hel", "lo"):
            await send("content_block_delta", index=0, delta={"type": "text_delta", "text": word})
            if self.hang:
                await asyncio.sleep(30)
        if self.cut:
            await send("error", error={"type": "overloaded_error", "message": "Overloaded"})
            return response
        await send("content_block_stop", index=0)
        await send("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 3})
        await send("message_stop")
        return response


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    provider = Provider()
    app = web.Application()
    app.router.add_post("/v1/messages", provider.messages)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    provider.base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield provider
    await runner.cleanup()


def call(path: str = "/chat/completions", *, stream: bool = False, usage: bool = False, **more: Any) -> Call:
    fields = {"model": "m", **({"messages": [USER]} if path == "/chat/completions" else {}), **more}
    raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in fields.items()}
    return Call("dec_1", Tenant("lab"), path, "m", raw, stream, usage, time.perf_counter())


def deployed(thread: LiteLLMThread, **params: Any) -> TextLiteLLM:
    written = {"model": "anthropic/claude-x", "api_key": KEY, **params}
    return TextLiteLLM(Deployment.model_validate({"model_name": "m", "litellm_params": written}), thread, timeout=20.0)


async def events(reply: Reply) -> tuple[list[dict[str, Any]], bytes]:
    assert reply.frames is not None
    sent = b"".join([frame async for frame in reply.frames])
    await reply.aclose()
    return [json.loads(e[6:]) for e in sent.split(b"\n\n") if e.startswith(b"data: {")], sent


def text(found: list[dict[str, Any]]) -> str:
    return "".join(c["delta"].get("content") or "" for e in found for c in e.get("choices", ()))


@pytest.mark.skipif(HERE, reason="litellm is installed")
def test_not_installed() -> None:
    """Without the package a deployment that needs it stops the start, and says what to install."""
    with pytest.raises(ConfigError, match="twolane-router\\[litellm\\]"):
        LiteLLMThread()


def test_import_costs_nothing() -> None:
    """Importing the transport does not import litellm."""
    if "litellm" in sys.modules:
        pytest.skip("another test imported it")
    assert "router.transports.text_litellm" in sys.modules


@needs_litellm
async def test_mock_response(thread: LiteLLMThread) -> None:
    """litellm's own mock is honoured, plain and streamed, and usage is told."""
    transport = deployed(thread, mock_response="hello there")
    reply = await transport.send(call())
    body = json.loads(reply.body)
    assert body["choices"][0]["message"]["content"] == "hello there"
    assert body["object"] == "chat.completion"
    assert reply.usage.known
    found, sent = await events(await transport.send(call(stream=True)))
    assert text(found) == "hello there"
    assert sent.endswith(b"data: [DONE]\n\n")


@needs_litellm
async def test_plain(thread: LiteLLMThread, provider: Provider) -> None:
    """A provider with another interface is asked in its own words and answers in OpenAI's."""
    transport = deployed(thread, api_base=provider.base, temperature=0.5, max_tokens=9)
    asked = call(max_tokens=5, stop=["x"], metadata={"team": "a"})
    asked.onward = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    reply = await transport.send(asked)
    body = json.loads(reply.body)
    assert body["choices"][0]["message"]["content"] == "hello"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (11, 3)
    (seen,) = provider.seen
    assert (seen["max_tokens"], seen["temperature"], seen["stop_sequences"]) == (5, 0.5, ["x"])
    assert seen["model"] == "claude-x"
    assert provider.headers[0]["traceparent"] == asked.onward["traceparent"]
    assert reply.first_frame is not None


@needs_litellm
@pytest.mark.parametrize("usage", [True, False])
async def test_stream(thread: LiteLLMThread, provider: Provider, usage: bool) -> None:
    """A stream comes event by event; its usage event only where it was asked for, its usage always."""
    reply = await deployed(thread, api_base=provider.base).send(call(stream=True, usage=usage))
    found, sent = await events(reply)
    assert text(found) == "hello"
    assert sum(bool(e.get("usage")) for e in found) == usage
    assert any(c.get("finish_reason") == "stop" for e in found for c in e["choices"])
    assert sent.count(b"[DONE]") == 1
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (11, 3)


@needs_litellm
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("status", "message", "raised", "shown", "code"),
    [
        (400, "bad temperature", Refused, 400, None),
        (400, "prompt is too long: 9 tokens > 8 maximum", Refused, 400, "context_length_exceeded"),
        (401, f"key {KEY} is unknown", TransportError, 502, "upstream_auth"),
        (403, "no", TransportError, 502, "upstream_auth"),
        (429, "slow down", TransportError, 429, "rate_limit_exceeded"),
        (500, "broken", Unavailable, 500, "upstream_unavailable"),
        (529, "overloaded", Unavailable, None, "upstream_unavailable"),
    ],
)
async def test_errors(
    thread: LiteLLMThread,
    provider: Provider,
    stream: bool,
    status: int,
    message: str,
    raised: type[TransportError],
    shown: int | None,
    code: str | None,
) -> None:
    """Each status becomes one error of ours before the first frame, is asked once, and holds no key."""
    provider.status, provider.error = status, message
    with pytest.raises(raised) as caught:
        await deployed(thread, api_base=provider.base).send(call(stream=stream))
    assert caught.value.status == shown or (shown is None and caught.value.status >= 500)
    assert caught.value.code == code
    assert len(provider.seen) == 1
    for part in (KEY, "litellm", "AnthropicException"):
        assert part not in caught.value.message
    if 400 <= status < 500 and code != "upstream_auth":
        assert caught.value.message == message
    if status == 429:
        assert caught.value.headers == {"retry-after": "7"}


@needs_litellm
async def test_an_answer_that_litellm_cannot_read(thread: LiteLLMThread, provider: Provider) -> None:
    """Where litellm falls over an answer, the caller is told so, and nothing of its code and files."""
    provider.nonsense = True
    with pytest.raises(TransportError) as caught:
        await deployed(thread, api_base=provider.base).send(call())
    assert caught.value.status >= 500
    for inner in ("Traceback", ".py", "litellm"):
        assert inner not in caught.value.message


@needs_litellm
async def test_error_in_the_stream(thread: LiteLLMThread, provider: Provider) -> None:
    """A stream that breaks ends with one error event, and the reply says so."""
    provider.cut = True
    reply = await deployed(thread, api_base=provider.base).send(call(stream=True))
    found, sent = await events(reply)
    assert text(found) == "hello"
    assert "error" in found[-1]
    assert b"[DONE]" not in sent
    assert reply.error is not None


@needs_litellm
@pytest.mark.parametrize("name", ["api_base", "base_url", "api_key", "custom_llm_provider", "mock_response", "timeout"])
async def test_callers_cannot_reconfigure(thread: LiteLLMThread, provider: Provider, name: str) -> None:
    """What litellm would take for its own settings is refused by name and never reaches it."""
    with pytest.raises(Refused) as caught:
        await deployed(thread, api_base=provider.base).send(call(**{name: "http://elsewhere"}))
    assert caught.value.param == name
    assert provider.seen == []


@needs_litellm
async def test_unknown_fields(thread: LiteLLMThread, provider: Provider) -> None:
    """An unknown field passes where the entry allows it, and is dropped where the entry drops."""
    allowed = deployed(thread, api_base=provider.base, allowed_openai_params=["min_p"])
    await allowed.send(call(min_p=0.1))
    assert provider.seen[-1]["min_p"] == 0.1
    await deployed(thread, api_base=provider.base, drop_params=True).send(call(api_base="http://elsewhere", odd=1))
    assert "odd" not in provider.seen[-1]
    assert len(provider.seen) == 2


@needs_litellm
@pytest.mark.parametrize("stream", [True, False])
async def test_cancel(thread: LiteLLMThread, provider: Provider, stream: bool) -> None:
    """A caller who hangs up before the first frame hangs up on the provider."""
    provider.hang = not stream
    transport = deployed(thread, api_base=provider.base)
    if stream:
        provider.hang = True
        reply = await transport.send(call(stream=True))
        await reply.aclose()
    else:
        task = asyncio.create_task(transport.send(call()))
        await provider.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with asyncio.timeout(5):
        await provider.hung_up.wait()


@needs_litellm
@pytest.mark.parametrize("stream", [True, False])
async def test_timeout(thread: LiteLLMThread, provider: Provider, stream: bool) -> None:
    """No answer, or no next event, in time is a timeout: an error before the first frame, an event after it."""
    provider.hang = True
    transport = deployed(thread, api_base=provider.base, timeout=0.5)
    if not stream:
        with pytest.raises(TimedOut):
            await transport.send(call())
        return
    reply = await transport.send(call(stream=True))
    found, _ = await events(reply)
    assert found[-1]["error"]["code"] == "upstream_timeout"
    assert reply.error == "upstream_timeout"


@needs_litellm
async def test_other_endpoints(thread: LiteLLMThread) -> None:
    """Completions and embeddings are served, anything else is refused."""
    transport = deployed(thread, model="gpt-3.5-turbo-instruct", mock_response="hello", custom_llm_provider="openai")
    body = json.loads((await transport.send(call("/completions", prompt="hi"))).body)
    assert body["choices"][0]["text"] == "hello"
    transport = deployed(thread, model="cohere/embed", mock_response=[0.25, 0.5])
    body = json.loads((await transport.send(call("/embeddings", input=["hi"]))).body)
    assert body["data"][0]["embedding"] == [0.25, 0.5]
    with pytest.raises(Refused):
        await transport.send(call("/responses", input="hi"))


@needs_litellm
async def test_the_loop_is_free(thread: LiteLLMThread) -> None:
    """Calls run in the thread, not in the router's loop, and many may run at once."""
    transport = deployed(thread, mock_response="hello")
    replies = await asyncio.gather(*[transport.send(call()) for _ in range(20)])
    assert all(json.loads(r.body)["choices"] for r in replies)
    ident = await asyncio.wrap_future(thread.submit(_ident()))
    assert ident != threading.get_ident()


async def _ident() -> int:
    return threading.get_ident()


@needs_litellm
async def test_close(provider: Provider) -> None:
    """Closing the thread ends what still runs in it."""
    own = LiteLLMThread()
    provider.hang = True
    reply = await deployed(own, api_base=provider.base).send(call(stream=True))
    await own.close()
    async with asyncio.timeout(5):
        await provider.hung_up.wait()
    await reply.aclose()
    assert not own._thread.is_alive()
