"""The worker's HTTP face over a real Unix socket, with a tiny model and a real store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from workers import protocol
from workers.config import Fleet, ModelConfig, PairConfig, RedisConfig, StoreConfig, WorkerConfig
from workers.engine import Engine
from workers.holdings import Holdings
from workers.protocol import WorkerState
from workers.server import Worker

HELLO = [{"role": "user", "content": "What is the tide table of the harbour?"}]


def fleet_of(folder: Path, other: Path, state: Path) -> Fleet:
    """One worker with one model, one identity pair, and one pair that cannot be."""
    return Fleet(
        models=(ModelConfig(name="tiny", model=str(folder)), ModelConfig(name="other", model=str(other))),
        pairs=(
            PairConfig(name="twin", sharer="tiny", receiver="tiny"),
            PairConfig(name="mismatch", sharer="tiny", receiver="other"),
        ),
        workers=(WorkerConfig(name="w", models=("tiny",), pairs=("twin", "mismatch"), max_running=2, max_queued=1),),
        redis=RedisConfig(url=f"unix://{state}/no-redis.sock"),
        store=StoreConfig(dir=state / "kv"),
    )


@asynccontextmanager
async def serving(fleet: Fleet, socket: Path) -> AsyncIterator[tuple[httpx.AsyncClient, Worker]]:
    """A worker as `main` builds it, in this process."""
    config = fleet.workers[0]
    holdings = Holdings(fleet, config)
    engine = Engine(holdings.runtimes, max_running=config.max_running, max_queued=config.max_queued, threads=1)
    engine.start()
    await asyncio.to_thread(holdings.load_in_background(engine).join)
    worker = Worker(config, holdings, engine, f"unix:{socket}")
    server = uvicorn.Server(uvicorn.Config(worker.app(), uds=str(socket), log_level="warning"))
    task = asyncio.create_task(server.serve())
    transport = httpx.AsyncHTTPTransport(uds=str(socket))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=30) as client:
        while not server.started:
            await asyncio.sleep(0.01)
        yield client, worker
    server.should_exit = True
    await task
    engine.close()
    holdings.close()


@pytest.fixture
async def worker(
    tiny_folder: Path, other_folder: Path, tmp_path: Path
) -> AsyncIterator[tuple[httpx.AsyncClient, Worker]]:
    async with serving(fleet_of(tiny_folder, other_folder, tmp_path), tmp_path / "w.sock") as pair:
        yield pair


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 6, "ignore_eos": True, **more}


def events(text: str) -> list[Any]:
    """The data of each event, decoded."""
    lines = [e.removeprefix("data: ") for e in text.split("\n\n") if e]
    return [e if e == "[DONE]" else json.loads(e) for e in lines]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


async def test_plain_and_streamed_answers_are_the_same(worker: tuple[httpx.AsyncClient, Worker]) -> None:
    """Text, finish reason and usage agree; the stream opens with the role and ends with [DONE]."""
    client, _ = worker
    plain = (await client.post("/v1/chat/completions", json=body())).json()
    streamed = await client.post("/v1/chat/completions", json=body(stream=True, stream_options={"include_usage": True}))
    got = events(streamed.text)
    assert got[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert got[-1] == "[DONE]"
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in got[:-1] if e["choices"])
    assert text == plain["choices"][0]["message"]["content"] != ""
    assert [e["choices"][0]["finish_reason"] for e in got[:-2]][-1] == "length"
    assert got[-2]["choices"] == []
    assert got[-2]["usage"] == plain["usage"]
    assert plain["usage"]["completion_tokens"] == 6
    assert got[-2]["twolane"]["fingerprint"] == plain["twolane"]["fingerprint"]


async def test_usage_is_sent_only_when_asked_for(worker: tuple[httpx.AsyncClient, Worker]) -> None:
    """Without include_usage no event carries it."""
    client, _ = worker
    streamed = await client.post("/v1/chat/completions", json=body(stream=True))
    assert all("usage" not in e for e in events(streamed.text)[:-1])


async def test_an_identity_pair_answers_as_its_model(worker: tuple[httpx.AsyncClient, Worker]) -> None:
    """The cache lane of the same weights gives the same tokens."""
    client, _ = worker
    alone, paired = [
        (await client.post("/v1/chat/completions", json=body(model=name))).json() for name in ("tiny", "twin")
    ]
    assert alone["choices"] == paired["choices"]
    assert alone["system_fingerprint"] != paired["system_fingerprint"]


async def test_raw_completions_are_served(worker: tuple[httpx.AsyncClient, Worker]) -> None:
    """/v1/completions goes on from the very text."""
    client, _ = worker
    answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "The tide", "max_tokens": 4})
    assert answer.json()["object"] == "text_completion"
    assert isinstance(answer.json()["choices"][0]["text"], str)


async def test_state_tells_what_is_held_and_why_not(worker: tuple[httpx.AsyncClient, Worker]) -> None:
    """Ready and failed pairs, measured rates, and nothing left loading."""
    client, _ = worker
    state = protocol.msgspec.json.decode((await client.get("/state")).content, type=WorkerState)
    assert [m.name for m in state.models if m.ready] == ["tiny"]
    assert {p.name: p.ready for p in state.pairs} == {"twin": True, "mismatch": False}
    assert "weights" in next(p.reason for p in state.pairs if p.name == "mismatch")
    assert state.rates["twin"].prefill_tokens_per_s > 0
    assert state.rates["twin"].decode_tokens_per_s > 0
    assert not state.loading
    listed = [m["id"] for m in (await client.get("/v1/models")).json()["data"]]
    assert listed == ["tiny", "twin"]


@pytest.mark.parametrize(
    ("change", "status", "code", "says"),
    [
        ({"model": "nobody"}, 404, "model_not_found", "nobody"),
        ({"model": "mismatch"}, 404, "model_not_found", "weights"),
        ({"temperature": 3}, 400, "bad_prompt", "temperature"),
        ({"temperature": "warm"}, 400, "bad_prompt", "temperature"),
        ({"max_tokens": 5000}, 400, "context_length_exceeded", "2048"),
        ({"tools": [{"type": "function"}]}, 400, "bad_prompt", "tools"),
        ({"tool_choice": "required"}, 400, "bad_prompt", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, 400, "bad_prompt", "tool_choice"),
        ({"function_call": {"name": "f"}}, 400, "bad_prompt", "function_call"),
        ({"response_format": {"type": "json_object"}}, 400, "bad_prompt", "response_format"),
        ({"messages": None}, 400, "bad_prompt", "messages"),
        ({"logit_bias": {"x": 1}}, 400, "bad_prompt", "logit_bias"),
        ({"logit_bias": {"3": 1e308}}, 400, "bad_prompt", "logit_bias"),
        ({"logprobs": 3}, 400, "bad_prompt", "logprobs"),
        ({"max_tokens": 0}, 400, "bad_prompt", "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": 0}, 400, "bad_prompt", "max_tokens"),
        ({"messages": [{"role": {}, "content": "x"}]}, 400, "bad_prompt", "role"),
    ],
)
async def test_refusals_are_openai_errors(
    worker: tuple[httpx.AsyncClient, Worker], change: dict[str, Any], status: int, code: str, says: str
) -> None:
    """Status, code and a message in the caller's terms, plain and streamed alike."""
    client, _ = worker
    for stream in (False, True):
        answer = await client.post("/v1/chat/completions", json=body(stream=stream, **change))
        assert answer.status_code == status
        error = answer.json()["error"]
        assert error["code"] == code
        assert says in error["message"]


async def test_a_hang_up_frees_the_place(worker: tuple[httpx.AsyncClient, Worker]) -> None:
    """Streamed or plain, before or after the first token: when the caller leaves, nothing runs on."""
    client, running = worker
    for stream in (True, False):
        task = asyncio.create_task(client.post("/v1/chat/completions", json=body(stream=stream, max_tokens=1900)))
        await until(lambda: running.engine.load()[0] == 1)
        task.cancel()
        await until(lambda: running.engine.load() == (0, 0))


async def test_overload_is_refused_with_retry_after(worker: tuple[httpx.AsyncClient, Worker]) -> None:
    """Two run, one waits, the fourth is told to come again."""
    client, running = worker
    tasks = [asyncio.create_task(client.post("/v1/chat/completions", json=body(max_tokens=1900))) for _ in range(3)]
    await until(lambda: sum(running.engine.load()) == 3)
    refused = await client.post("/v1/chat/completions", json=body())
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "1"
    assert refused.json()["error"]["code"] == "overloaded"
    for task in tasks:
        task.cancel()


async def test_the_deadline_header_is_kept(worker: tuple[httpx.AsyncClient, Worker]) -> None:
    """An answer that cannot be complete in time is a 504."""
    client, _ = worker
    answer = await client.post("/v1/chat/completions", json=body(max_tokens=1900), headers={protocol.DEADLINE_MS: "60"})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("header", [protocol.KV_MAX_BYTES, protocol.KV_TTL, protocol.DEADLINE_MS, protocol.WEIGHT])
@pytest.mark.parametrize("value", ["nan", "inf", "much"])
async def test_a_header_that_is_no_number_is_refused(
    worker: tuple[httpx.AsyncClient, Worker], header: str, value: str
) -> None:
    """Infinity and nan are none either."""
    client, running = worker
    answer = await client.post("/v1/chat/completions", json=body(), headers={protocol.TENANT: "t", header: value})
    assert answer.status_code == 400
    assert header in answer.json()["error"]["message"]
    assert running.engine.load() == (0, 0)


async def test_log_probabilities_have_openais_shape(worker: tuple[httpx.AsyncClient, Worker]) -> None:
    """One entry per token, each with bytes and the likeliest others."""
    client, _ = worker
    answer = await client.post("/v1/chat/completions", json=body(logprobs=True, top_logprobs=2, max_tokens=3))
    content = answer.json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    for entry in content:
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2
        assert entry["logprob"] <= 0
