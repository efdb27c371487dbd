"""The `openai` client for Python, unchanged but for its address and key, against every door."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.router.gateway import KEY, Router

TOOL: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
HI: Any = [{"role": "user", "content": "hi"}]


class City(BaseModel):
    city: str


@pytest.fixture
async def client(door: Router) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{door.port}/v1", api_key=KEY, max_retries=0) as client:
        yield client


async def test_chat(client: openai.AsyncOpenAI) -> None:
    """Plain answers, several choices, tools, a schema and logged ids come as from the provider."""
    answer = await client.chat.completions.create(model="m", messages=HI, n=2)
    assert [choice.message.content for choice in answer.choices] == ["hello there"] * 2
    assert answer.usage is not None
    assert answer.usage.total_tokens == 5
    called = await client.chat.completions.create(model="m", messages=HI, tools=[TOOL])
    assert called.choices[0].message.tool_calls is not None
    parsed = await client.chat.completions.parse(model="m", messages=HI, response_format=City)
    assert parsed.choices[0].message.parsed == City(city="Bergen")


async def test_streams(client: openai.AsyncOpenAI) -> None:
    """Streams come in order, with usage where it was asked for; the helper and the sync client agree."""
    options: Any = {"include_usage": True}
    stream = await client.chat.completions.create(model="m", messages=HI, stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello there"
    assert chunks[-1].usage is not None
    async with client.chat.completions.stream(model="m", messages=HI, tools=[TOOL]) as helper:
        calls = (await helper.get_final_completion()).choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.arguments == '{"city":"Bergen"}'

    def plainly() -> str:
        with openai.OpenAI(base_url=str(client.base_url), api_key=KEY) as sync:
            got = sync.chat.completions.create(model="m", messages=HI, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in got)

    assert await asyncio.to_thread(plainly) == "hello there"


async def test_other_models(client: openai.AsyncOpenAI) -> None:
    """Completions, embeddings (which the client asks for in base64), responses and models."""
    assert (await client.completions.create(model="m", prompt="hi")).choices[0].text == "hello"
    assert (await client.embeddings.create(model="m", input=["a", "b"])).data[1].embedding == [1.0, 2.0]
    assert (await client.responses.create(model="m", input="hi")).output_text == "hello there"
    async with client.responses.stream(model="m", input="hi") as stream:
        assert "".join([e.delta async for e in stream if e.type == "response.output_text.delta"]) == "hello there"
    assert "m" in [model.id async for model in client.models.list()]
    assert (await client.models.retrieve("m")).owned_by == "twolane"


async def test_files_and_batches(client: openai.AsyncOpenAI) -> None:
    """Files and batches name their group in a header, and are otherwise what they are at the provider."""
    client = client.with_options(default_headers={"x-twolane-model": "m"})
    made = await client.files.create(file=("b.jsonl", b"12345678"), purpose="batch")
    assert (made.bytes, made.filename, made.purpose) == (8, "b.jsonl", "batch")
    assert [f.id async for f in client.files.list()] == ["file-1"]
    assert (await client.files.retrieve("file-1")).status == "processed"
    assert (await client.files.content("file-1")).text == '{"custom_id":"1"}\n'
    batch = await client.batches.create(
        input_file_id="file-1", endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert (await client.batches.cancel(batch.id)).id == "batch_1"
    assert (await client.files.delete("file-1")).deleted
    with pytest.raises(openai.NotFoundError, match="No such File"):
        await client.files.retrieve("file-2")


async def test_sounds_and_pictures(client: openai.AsyncOpenAI) -> None:
    """Sounds and pictures go by the model's name, in JSON and in forms."""
    assert (await client.audio.speech.create(model="m", voice="alloy", input="hi")).content == b"ID3\0\1"
    async with client.audio.speech.with_streaming_response.create(model="m", voice="alloy", input="hi") as spoken:
        assert await spoken.read() == b"ID3\0\1"
    heard = await client.audio.transcriptions.create(model="m", file=("a.mp3", b"x" * 2_000_000))
    assert heard.text == "m heard 2000000 bytes"
    made = await client.images.generate(model="m", prompt="a cat")
    edited = await client.images.edit(model="m", prompt="a cat", image=("a.png", b"png", "image/png"))
    for pictures in (made, edited):
        assert pictures.data is not None
        assert pictures.data[0].b64_json == "aGk="


@pytest.mark.parametrize(
    ("model", "kind", "code"),
    [
        ("nowhere", openai.NotFoundError, "model_not_found"),
        ("busy", openai.RateLimitError, "rate_limit_exceeded"),
        ("broken", openai.InternalServerError, "upstream_unavailable"),
        ("long", openai.BadRequestError, "context_length_exceeded"),
        ("slow", openai.InternalServerError, "upstream_timeout"),
    ],
)
async def test_errors(
    model: str, kind: type[openai.APIStatusError], code: str | None, client: openai.AsyncOpenAI
) -> None:
    """Each failure raises the class that it raises at the provider, with its code."""
    with pytest.raises(kind) as raised:
        await client.chat.completions.create(model=model, messages=HI)
    assert raised.value.code == code


async def test_a_wrong_key(client: openai.AsyncOpenAI) -> None:
    """A wrong key is an authentication error on every kind of door."""
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="sk-wrong").chat.completions.create(model="m", messages=HI)
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="sk-wrong").files.list()
