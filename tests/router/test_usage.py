"""What upstreams tell of their answers' use, where it cannot be true: it is no bill, and the record says so."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from router.audit_verify import records
from router.call import Usage
from router.prices import FREE, written
from router.transports.raw_usage import UsageReader
from router.wire import MOST, read_usage
from tests.router.gateway import KEY, PLAIN, Router, Seen, Upstream, chunk, deployment, plain, router, upstream

NONSENSE: list[dict[str, Any]] = [
    {"prompt_tokens": -3, "completion_tokens": 2, "total_tokens": 5},
    {"prompt_tokens": 3, "completion_tokens": -(10**6), "total_tokens": 5},
    {"prompt_tokens": 3, "completion_tokens": 10**18, "total_tokens": 5},
    {"prompt_tokens": 3, "completion_tokens": 1e18},
    {"prompt_tokens": 3.5, "completion_tokens": 2},
    {"prompt_tokens": "3", "completion_tokens": "2"},
    {"prompt_tokens": None, "completion_tokens": None},
    {"prompt_tokens": 3, "completion_tokens": None},
    {"prompt_tokens": True, "completion_tokens": []},
    {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 900}},
    {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": -900}},
    {"prompt_tokens": 3, "completion_tokens": 2, "completion_tokens_details": {"reasoning_tokens": -1}},
]
PRICES: dict[str, Any] = {
    "input_cost_per_token": 1e-3,
    "output_cost_per_token": 1e-3,
    "cache_read_input_token_cost": 1e-6,
}


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


def told(usage: dict[str, Any], path: str) -> dict[str, Any]:
    """The same in the words of a door."""
    if path == "/v1/chat/completions" or path.endswith(("completions", "embeddings")):
        return usage
    names = {"prompt_tokens": "input_tokens", "completion_tokens": "output_tokens"}
    names |= {f"{old}_details": f"{new}_details" for old, new in names.items()}
    return {names.get(name, name): value for name, value in usage.items()}


async def ask(door: Router, path: str, stream: bool) -> tuple[dict[str, str], dict[str, Any]]:
    body: dict[str, Any] = {"stream": True} if stream else {}
    got = await door.post(path, model="m", input="hi", prompt="hi", **body)
    assert got.status == 200
    happened = (await door.get(f"/v1/decisions/{got.headers['x-twolane-decision']}")).json["happened"]
    return got.headers, happened


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        *(
            (f"/v1/{door}", stream)
            for door in ("chat/completions", "completions", "responses")
            for stream in (False, True)
        ),
        ("/v1/embeddings", False),
    ],
)
async def test_nonsense_is_billed_to_nobody(path: str, stream: bool, tmp_path: Path, up: Upstream) -> None:
    """Usage that no answer can have had counts as none on every door, plain and streamed, and is named; the caller
    gets it as it came, and what the request reserved of its budget stays spent."""
    usage: dict[str, Any] = {}

    async def says(seen: Seen) -> web.StreamResponse:
        body = {**PLAIN, "usage": told(usage, path)}
        if not seen.body.get("stream"):
            return plain(200, body)
        if path == "/v1/responses":
            return await seen.stream({"type": "response.completed", "response": body}, done=False)
        return await seen.stream(chunk("a", "stop"), {"choices": [], "usage": body["usage"]})

    up.answers["m"] = says
    config = {
        "model_list": [deployment("m", up, **PRICES)],
        "tenants": [{"name": "a", "key": KEY, "max_budget": 100.0, "rpm_limit": 1000}],
    }
    async with router(tmp_path, config) as door:
        for usage in NONSENSE:
            headers, happened = await ask(door, path, stream)
            assert "x-litellm-response-cost" not in headers, usage
            assert (happened["cost"], happened["prompt_tokens"], happened["usage"]) == (None, None, "unreadable"), usage
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        _, happened = await ask(door, path, stream)
        assert happened["cost"] == pytest.approx(5e-3)
        assert happened["usage"] is None
        spent = door.app.parts.limits._windows["a"].spent
    outcomes = [r.body for r in records(tmp_path / "audit", "a") if "result" in r.body]
    assert [o["usage"]["unreadable"] for o in outcomes] == [True] * len(NONSENSE) + [False]
    assert [o["cost"] for o in outcomes[:-1]] == [None] * len(NONSENSE)
    assert 5e-3 < spent < 5e-3 + len(NONSENSE) * 0.3


SIZES = {"search_context_size_low": 1.0, "search_context_size_medium": 2.0, "search_context_size_high": 4.0}
FINE: dict[str, Any] = {
    "input_cost_per_token": 1e-3,
    "output_cost_per_token": 0,
    "cache_read_input_token_cost": 1e-4,
    "cache_creation_input_token_cost": 2e-3,
    "cache_creation_input_token_cost_above_1hr": 3e-3,
    "cache_read_input_audio_token_cost": 5e-4,
    "input_cost_per_audio_token": 1e-2,
    "citation_cost_per_token": 1e-2,
    "search_context_cost_per_query": SIZES,
}
TOLD: dict[str, tuple[dict[str, Any], float]] = {
    "stored, as Anthropic says": ({"cache_creation_input_tokens": 4}, 14e-3),
    "stored, as litellm says": (
        {
            "cache_creation_input_tokens": 4,
            "prompt_tokens_details": {
                "cache_creation_tokens": 4,
                "cache_creation_token_details": {"ephemeral_5m_input_tokens": 1, "ephemeral_1h_input_tokens": 3},
            },
        },
        17e-3,
    ),
    "stored, as OpenRouter says": ({"prompt_tokens_details": {"cache_write_tokens": 4}}, 14e-3),
    "sound read again": (
        {
            "prompt_tokens_details": {
                "cached_tokens": 5,
                "audio_tokens": 6,
                "cached_tokens_details": {"audio_tokens": 4, "text_tokens": 1},
            }
        },
        3e-3 + 2e-2 + 1e-4 + 4 * 5e-4,
    ),
    "searches, as Anthropic says": ({"server_tool_use": {"web_search_requests": 3}}, 6.01),
    "searches, as litellm says": ({"prompt_tokens_details": {"web_search_requests": 2}}, 4.01),
    "searches, as Perplexity says": (
        {"search_context_size": "low", "num_search_queries": 2, "citation_tokens": 1},
        2.02,
    ),
    "a search of one size": ({"search_context_size": "high"}, 4.01),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("told_as", TOLD)
async def test_finer_usage_is_billed_in_whoevers_words(
    told_as: str, stream: bool, tmp_path: Path, up: Upstream
) -> None:
    """What is stored, read again, cited and searched costs what it costs, whichever names an upstream has for it."""
    more, usd = TOLD[told_as]
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12, **more}

    async def says(seen: Seen) -> web.StreamResponse:
        if not seen.body.get("stream"):
            return plain(200, {**PLAIN, "usage": usage})
        return await seen.stream(chunk("a", "stop"), {"choices": [], "usage": usage})

    up.answers["m"] = says
    async with router(tmp_path, {"model_list": [deployment("m", up, **FINE)]}) as door:
        _, happened = await ask(door, "/v1/chat/completions", stream)
    assert happened["cost"] == pytest.approx(usd)
    sent = up.seen[0].body.keys() & FINE.keys()
    assert not sent, "prices are not the model's to read"


@pytest.mark.parametrize("stream", [False, True])
async def test_searches_of_responses_are_counted_by_their_items(stream: bool, tmp_path: Path, up: Upstream) -> None:
    """Each search that `/responses` made is billed; to open a page that it found is none."""
    calls = [{"type": "web_search_call", "action": {"type": kind}} for kind in ("search", "open_page", "search")]
    usage = {"input_tokens": 10, "output_tokens": 2, "total_tokens": 12}
    answer = {"id": "r", "output": [*calls, {"type": "message", "content": []}], "usage": usage}

    async def says(seen: Seen) -> web.StreamResponse:
        if not seen.body.get("stream"):
            return plain(200, answer)
        return await seen.stream({"type": "response.completed", "response": answer}, done=False)

    up.answers["m"] = says
    async with router(tmp_path, {"model_list": [deployment("m", up, **FINE)]}) as door:
        _, happened = await ask(door, "/v1/responses", stream)
    assert happened["cost"] == pytest.approx(4.01)


def test_a_message_tells_what_it_stored_and_searched() -> None:
    """`/messages` counts beside its input what it stored for how long, and its searches."""
    usage = Usage()
    stored = {"ephemeral_5m_input_tokens": 1, "ephemeral_1h_input_tokens": 3}
    said = {"input_tokens": 6, "output_tokens": 2, "cache_creation_input_tokens": 4, "cache_creation": stored}
    UsageReader(usage, "/messages").whole(
        json.dumps({"usage": {**said, "server_tool_use": {"web_search_requests": 1}}}).encode()
    )
    assert written(FINE, FREE, SIZES).bill(usage) == pytest.approx(6e-3 + 2e-3 + 9e-3 + 2.0)


@pytest.mark.parametrize("usage", NONSENSE)
@pytest.mark.parametrize("path", ["/messages", "/images/generations", "/audio/transcriptions"])
def test_nonsense_of_doors_that_are_passed_through(usage: dict[str, Any], path: str) -> None:
    """What these doors tell is held to the same measure, whole or event by event, and more does not mend it."""
    said = told(usage, path)
    if path == "/messages" and "input_tokens_details" in said:
        said = {"input_tokens": 3, "output_tokens": 2, "cache_read_input_tokens": -900}
    if None in said.values():
        said = {**said, "input_tokens": 1.5}
    whole, streamed = Usage(), Usage()
    UsageReader(whole, path).whole(json.dumps({"data": [{}], "usage": said}).encode())
    reader = UsageReader(streamed, path)
    reader.feed(b"data: " + json.dumps({"usage": said}).encode() + b"\n\n")
    reader.feed(b'data: {"usage": {"input_tokens": 3, "output_tokens": 2}}\n\n')
    for read in (whole, streamed):
        assert (read.known, read.unreadable, read.prompt_tokens, read.completion_tokens) == (False, True, 0, 0)
        assert written(PRICES, FREE).bill(read) is None


@pytest.mark.parametrize("seconds", [-1, 1e18, "x"])
def test_sound_of_no_length_is_not_billed(seconds: object) -> None:
    """A transcript that lasted less than nothing, or for ages, tells no seconds."""
    for body in ({"duration": seconds}, {"usage": {"type": "duration", "seconds": seconds}}):
        usage = Usage()
        UsageReader(usage, "/audio/transcriptions").whole(json.dumps(body).encode())
        assert written({"input_cost_per_second": 1.0}, FREE).bill(usage) is None


def test_a_message_that_breaks_off_is_not_billed_by_its_beginning() -> None:
    """What a stream of events tells at its beginning is no bill: most of the answer was still to be written."""
    usage = Usage()
    reader = UsageReader(usage, "/messages")
    reader.feed(b'data: {"message": {"usage": {"input_tokens": 5, "output_tokens": 1}}}\n\n')
    assert (usage.known, usage.prompt_tokens) == (False, 5)
    reader.feed(b'data: {"usage": {"output_tokens": 7}}\n\n')
    assert (usage.known, usage.prompt_tokens, usage.completion_tokens) == (True, 5, 7)


def test_later_usage_stands_for_the_whole() -> None:
    """Of events that each tell how much it was so far the last holds, be it better or worse; the bound is inclusive."""
    usage = Usage()
    read_usage(b'{"prompt_tokens": 3, "completion_tokens": -1}', usage)
    assert usage.unreadable
    read_usage(json.dumps({"prompt_tokens": 3, "completion_tokens": MOST}).encode(), usage)
    assert (usage.known, usage.unreadable, usage.completion_tokens) == (True, False, MOST)
    read_usage(json.dumps({"prompt_tokens": 3, "completion_tokens": MOST + 1}).encode(), usage)
    assert (usage.known, usage.unreadable) == (False, True)
    read_usage(b'{"prompt_tokens": 3, "total_tokens": 3}', usage)
    assert (usage.known, usage.completion_tokens) == (True, 0)
