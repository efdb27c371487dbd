"""Guardrails on every door, in both lanes, through streams and fallbacks: nothing passes unchecked."""

from __future__ import annotations

import json
import re
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from router.guardrail_texts import of_answer, of_request
from router.guardrails import Blocked, Content
from router.settings import ConfigError, load_text
from router.tenants import TenantSource
from router.transports.cache import KnownFleet
from tests.router.gateway import KEY, PLAIN, Seen, Upstream, chunk, deployment, failure, plain, router, upstream
from tests.router.test_cache import config as lanes
from tests.router.test_cache import worker

OWN = "tests.router.own_guardrails"


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


def own(name: str = "g", kind: str = "Words", **rest: Any) -> dict[str, Any]:
    options = rest.pop("options", {})
    return {"guardrail_name": name, "own": {"use": f"{OWN}:{kind}", "options": options}, **rest}


ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "swordfish"}]},
    "/v1/completions": {"prompt": ["a", "swordfish"]},
    "/v1/embeddings": {"input": "swordfish"},
    "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "swordfish"}]}]},
}


@pytest.mark.parametrize("path", ASKED)
async def test_each_door_is_checked_and_rewritten(path: str, tmp_path: Path, up: Upstream) -> None:
    """What a guardrail replaces reaches the upstream replaced, what it blocks reaches nobody, at every door."""
    body = ASKED[path]
    async with router(
        tmp_path,
        {
            "model_list": [deployment("m", up)],
            "guardrails": [
                own("hides", options={"replace": "swordfish", "by": "carp"}, default_on=False),
                own("blocks", options={"block": "swordfish"}, default_on=False),
            ],
        },
    ) as door:
        rewritten = await door.post(path, model="m", guardrails=["hides"], **body)
        blocked = await door.post(path, model="m", guardrails=["blocks"], **body)
        both = await door.post(path, model="m", guardrails=["blocks", "hides"], **body)
    assert (rewritten.status, rewritten.headers["x-litellm-applied-guardrails"]) == (200, "hides")
    assert (blocked.status, blocked.error["code"], blocked.error["message"]) == (
        400,
        "guardrail_blocked",
        "request may not say that.",
    )
    assert both.status == 200, "each is given what the one before left"
    sent = [{k: v for k, v in s.body.items() if k != "model"} for s in up.seen]
    assert sent == [json.loads(json.dumps(body).replace("swordfish", "carp"))] * 2, "and `guardrails` is not passed on"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("lane", ["text", "cache"])
async def test_answers_are_checked_before_any_of_them_leaves(
    stream: bool, lane: str, tmp_path: Path, up: Upstream
) -> None:
    """In both lanes, plain or streamed: a word cut in two by events is found, replaced or blocked."""
    tenants = [
        {"name": "a", "key": KEY, "guardrails": ["hides"]},
        {"name": "b", "key": "sk-b-0123456789", "guardrails": ["blocks"]},
    ]
    guardrails = [
        own("hides", mode="post_call", options={"replace": "swordfish", "by": "carp"}, default_on=False),
        own("blocks", mode="post_call", options={"block": "swordfish"}, default_on=False),
    ]
    usage = {"prompt_tokens": 7, "completion_tokens": 3}

    async def answer(seen: Seen) -> web.StreamResponse:
        if seen.body.get("stream"):
            pieces = [chunk("a sword"), chunk("fish", "stop"), {"id": "c", "choices": [], "usage": usage}]
            return await seen.stream(*pieces)
        message = {"role": "assistant", "content": "a swordfish"}
        return plain(body={**PLAIN, "choices": [{"index": 0, "message": message}], "usage": usage})

    async with upstream(unix=tmp_path / "w.sock") as on_worker:
        on_worker.answers["duo"] = up.answers["text"] = answer
        config = {**lanes(up), "tenants": tenants, "guardrails": guardrails}
        async with router(tmp_path, config, KnownFleet([worker(on_worker.base)])) as door:
            asked: dict[str, Any] = {"model": "m", "stream": stream, "headers": {"x-twolane-transport": lane}}
            hidden = await door.post(**asked)
            blocked = await door.post(**asked, key="sk-b-0123456789")
            told = await door.get(f"/v1/decisions/{blocked.headers['x-twolane-decision']}", key="sk-b-0123456789")
    assert (hidden.status, hidden.headers["x-twolane-transport"]) == (200, lane)
    assert b"sword" not in hidden.raw
    said = hidden.text if stream else hidden.json["choices"][0]["message"]["content"]
    assert said == "a carp"
    if stream:
        assert hidden.events[-1] == "[DONE]"
        assert [e["choices"][0]["finish_reason"] for e in hidden.events[:-1]] == [None, "stop"]
    assert (blocked.status, blocked.error["code"]) == (400, "guardrail_blocked")
    assert b"sword" not in blocked.raw
    assert told.json["happened"]["prompt_tokens"] == 7, "what was blocked on its way out was paid for"


async def test_a_checked_request_holds_no_stream_back(tmp_path: Path, up: Upstream) -> None:
    """Where only the request is checked, or the answer passes, the stream is what the upstream sent, byte for byte."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return await seen.stream(chunk("one"), chunk("two", "stop"))

    up.answers["m"] = answer
    config = {
        "model_list": [deployment("m", up)],
        "guardrails": [own(mode="pre_call"), own("after", mode="post_call", default_on=False)],
    }
    async with router(tmp_path, config) as door:
        passed = await door.post(model="m", stream=True)
        held = await door.post(model="m", stream=True, guardrails=["after"])
    assert passed.raw == held.raw
    assert passed.text == "onetwo"


async def test_fallbacks_are_checked_too(tmp_path: Path, up: Upstream) -> None:
    """The answer of a fallback group is checked like any other, and it got the request as it was rewritten."""

    async def fails(seen: Seen) -> web.StreamResponse:
        return failure(500)

    up.answers["m"] = fails
    config = {
        "model_list": [deployment("m", up), deployment("spare", up)],
        "router_settings": {"fallbacks": [{"m": ["spare"]}], "num_retries": 0},
        "guardrails": [own(options={"replace": "ok", "by": "checked"})],
    }
    async with router(tmp_path, config) as door:
        got = await door.post(model="m", messages=[{"role": "user", "content": "ok?"}])
    assert got.json["choices"][0]["message"]["content"] == "checked"
    assert up.seen[-1].body["messages"][0]["content"] == "checked?"


@pytest.mark.parametrize("how", ["raises", "hangs", "too few", "no texts", "one text", "exits", "cancels"])
@pytest.mark.parametrize("mode", ["pre_call", "post_call"])
async def test_one_that_cannot_check_refuses(how: str, mode: str, tmp_path: Path, up: Upstream) -> None:
    """Whatever a guardrail does instead of answering, the caller gets 503 and none of the answer."""
    config = {
        "model_list": [deployment("m", up)],
        "guardrails": [own(kind="Breaks", options={"how": how}, mode=mode, within="200ms")],
    }
    async with router(tmp_path, config) as door:
        got, _ = [await door.post(model="m", messages=[{"role": "user", "content": "hello"}]) for _ in range(2)]
    assert (got.status, got.error["code"]) == (503, "guardrail_failed")
    assert b"secret-detail" not in got.raw
    assert up.count("m") == (0 if mode == "pre_call" else 2)


async def test_a_slow_one_does_not_stop_the_router(tmp_path: Path, up: Upstream) -> None:
    """A `check` that is not async runs beside the loop, in a thread."""
    config = {"model_list": [deployment("m", up)], "guardrails": [own(kind="Waits")]}
    async with router(tmp_path, config) as door:
        assert (await door.post(model="m")).status == 200


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/v1/completions", {"prompt": [1, 2, 3]}, "guardrail_unreadable"),
        ("/v1/embeddings", {"input": [[1], [2]]}, "guardrail_unreadable"),
        ("/v1/chat/completions", {"messages": "hello"}, "guardrail_unreadable"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "guardrail_unreadable"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "aa"}}]}]},
            "guardrail_unreadable",
        ),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "guardrail_unreadable",
        ),
        ("/v1/chat/completions", {"messages": [], "guardrails": ["nobody"]}, "unknown_guardrail"),
        ("/v1/chat/completions", {"messages": [], "guardrails": "g"}, "unknown_guardrail"),
    ],
)
async def test_what_cannot_be_read_does_not_pass(
    path: str, body: dict[str, Any], code: str, tmp_path: Path, up: Upstream
) -> None:
    """Token ids, foreign shapes and names that nobody configured are the caller's mistake, told by name."""
    async with router(tmp_path, {"model_list": [deployment("m", up)], "guardrails": [own()]}) as door:
        got = await door.post(path, model="m", **body)
    assert (got.status, got.error["code"]) == (400, code)
    assert up.seen == []


async def test_asking_for_protection_that_is_not_there_is_refused(tmp_path: Path, up: Upstream) -> None:
    """Without any guardrail configured, a request that names one gets no answer."""
    async with router(tmp_path, {"model_list": [deployment("m", up)]}) as door:
        got = await door.post(model="m", guardrails=["pii"])
    assert (got.status, got.error["code"]) == (400, "unknown_guardrail")


async def test_litellms_http_interface(tmp_path: Path, up: Upstream) -> None:
    """The three answers of the generic guardrail API do what they say, and any other answer refuses."""
    asked: list[tuple[dict[str, str], dict[str, Any]]] = []

    async def guard(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append((dict(request.headers), body))
        word = body["texts"][0]
        if word == "broken":
            return web.Response(status=500)
        answers: dict[str, dict[str, Any]] = {
            "fine": {"action": "NONE"},
            "bad": {"action": "BLOCKED", "blocked_reason": "not here"},
            "odd": {"action": "MAYBE"},
        }
        texts = ["other" for _ in body["texts"]]
        return web.json_response(answers.get(word, {"action": "GUARDRAIL_INTERVENED", "texts": texts}))

    app = web.Application()
    app.router.add_post("/beta/litellm_basic_guardrail_api", guard)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    params = {
        "guardrail": "generic_guardrail_api",
        "mode": "pre_call",
        "api_base": f"http://127.0.0.1:{port}",
        "api_key": "guard-key",
        "default_on": True,
        "additional_provider_specific_params": {"level": 3},
    }
    config = {
        "model_list": [deployment("m", up)],
        "guardrails": [{"guardrail_name": "http", "litellm_params": params}],
    }
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    try:
        async with router(tmp_path, config) as door:

            async def said(word: str) -> Any:
                content = [{"type": "text", "text": word}, image]
                return await door.post(model="m", messages=[{"role": "user", "content": content}])

            fine, bad, other = await said("fine"), await said("bad"), await said("else")
            odd, broken = await said("odd"), await said("broken")
            await site.stop()
            await runner.cleanup()
            gone = await said("fine")
    finally:
        await runner.cleanup()
    assert (fine.status, other.status) == (200, 200)
    assert (bad.status, bad.error["code"], bad.error["message"]) == (400, "guardrail_blocked", "not here")
    assert [(g.status, g.error["code"]) for g in (odd, broken, gone)] == [(503, "guardrail_failed")] * 3
    assert [s.body["messages"][0]["content"][0]["text"] for s in up.seen] == ["fine", "other"]
    headers, body = asked[0]
    assert headers["x-api-key"] == "guard-key"
    assert (body["input_type"], body["texts"], body["images"]) == ("request", ["fine"], ["data:image/png;base64,AA"])
    assert (body["model"], body["request_data"]) == ("m", {"user_api_key_alias": "a"})
    assert body["additional_provider_specific_params"] == {"level": 3}


words = st.text(max_size=8)
parts = st.lists(st.builds(lambda text: {"type": "text", "text": text}, words), max_size=3)
messages = st.lists(st.builds(lambda role, said: {"role": role, "content": said}, words, words | parts), max_size=4)


@given(messages)
def test_reading_and_writing_are_one(messages: list[dict[str, Any]]) -> None:
    """Texts written back in their places read as they were written, and writing what was read changes nothing."""
    body = {"messages": messages}
    before = json.dumps(body)
    texts = of_request("/chat/completions", body)
    texts.write(texts.read)
    assert json.dumps(body) == before
    texts.write([f"<{text}>" for text in texts.read])
    assert of_request("/chat/completions", body).read == texts.read
    assert all(text.startswith("<") for text in texts.read)


def test_all_that_an_answer_says_is_read() -> None:
    """Contents, reasoning, refusals and tool calls' arguments are texts, of whichever door."""
    message = {
        "content": "1",
        "reasoning_content": "2",
        "refusal": "3",
        "tool_calls": [{"function": {"name": "f", "arguments": "4"}}],
    }
    own_words = {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}, {"type": "text", "text": "b"}],
        "reasoning_details": [{"type": "reasoning.text", "text": "c", "signature": "s"}],
        "tool_calls": [{"id": "1", "type": "custom", "custom": {"name": "f", "input": "d"}}],
    }
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "6"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "7"}, {"type": "refusal", "refusal": "8"}]},
        {"type": "function_call", "arguments": "9"},
    ]
    assert of_answer({"choices": [{"message": message}, {"text": "5"}]}).read == ("1", "2", "3", "4", "5")
    assert of_answer({"output": output}).read == ("6", "7", "8", "9")
    assert sorted(of_answer({"choices": [{"message": own_words}]}).read) == ["a", "b", "c", "d"]


def event(kind: str, **rest: object) -> dict[str, Any]:
    return {"type": f"response.{kind}", "sequence_number": 1, **rest}


def answer_of(text: str, kind: str = "completed") -> dict[str, Any]:
    output = [{"type": "message", "id": "i", "content": [{"type": "output_text", "text": text}]}] if text else []
    return event(kind, response={"id": "r", "status": kind, "output": output})


def delta(text: str) -> dict[str, Any]:
    return event("output_text.delta", item_id="i", output_index=0, content_index=0, delta=text, obfuscation="xyz")


LEAKS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "said in pieces, and not at last": ("/v1/responses", [delta("sword"), delta("fish"), answer_of("")]),
    "said, then failed": ("/v1/responses", [delta("swordfish"), answer_of("", "failed")]),
    "another at last": ("/v1/responses", [delta("swordfish"), answer_of("carp")]),
    "said as done": ("/v1/responses", [event("output_text.done", item_id="i", text="swordfish"), answer_of("carp")]),
    "another answer before": ("/v1/responses", [answer_of("swordfish", "in_progress"), answer_of("carp")]),
    "an item": (
        "/v1/responses",
        [event("output_item.done", item={"type": "custom_tool_call", "input": "swordfish"}), answer_of("carp")],
    ),
    "lists of parts": (
        "/v1/chat/completions",
        [
            {"choices": [{"index": 0, "delta": {"content": [{"type": "text", "text": "swordfish"}]}}]},
            {"choices": [{"index": 0, "delta": {"content": [{"type": "text", "text": "carp"}]}}]},
            chunk(None, "stop"),
        ],
    ),
    "words of its own": (
        "/v1/chat/completions",
        [
            {"choices": [{"index": 0, "delta": {"thoughts": "sword"}}]},
            {"choices": [{"index": 0, "delta": {"thoughts": "fish"}}]},
            chunk(None, "stop"),
        ],
    ),
    "another shape": (
        "/v1/chat/completions",
        [{"choices": [{"index": "0", "delta": {"content": "swordfish"}}]}, chunk("carp", "stop")],
    ),
}


@pytest.mark.parametrize("leak", LEAKS)
async def test_nothing_leaves_by_an_event_that_was_not_read(leak: str, tmp_path: Path, up: Upstream) -> None:
    """Of a stream every event is checked, whatever its last one says, and in whatever pieces and shapes it comes."""
    path, events = LEAKS[leak]
    up.answers["m"] = lambda seen: seen.stream(*events, done=path != "/v1/responses")
    config = {"model_list": [deployment("m", up)], "guardrails": [own(options={"block": "swordfish"})]}
    body = {"input": "hi"} if path == "/v1/responses" else {}
    async with router(tmp_path, config) as door:
        got = await door.post(path, model="m", stream=True, **body)
    assert got.error["code"] == ("guardrail_failed" if leak == "another shape" else "guardrail_blocked")


async def test_an_honest_stream_of_responses_is_read_once(tmp_path: Path, up: Upstream) -> None:
    """Pieces of what the last event says are no other texts: what a guardrail lets pass leaves byte for byte."""
    events = [delta("car"), delta("p"), event("output_text.done", item_id="i", text="carp"), answer_of("carp")]
    up.answers["m"] = lambda seen: seen.stream(*events, done=False)
    config = {"model_list": [deployment("m", up)], "guardrails": [own(kind="Words", options={"replace": "carpcarp"})]}
    async with router(tmp_path, config) as door:
        got = await door.post("/v1/responses", model="m", stream=True, input="hi")
    assert got.events == events


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_do_not_tell_what_was_rewritten(stream: bool, tmp_path: Path, up: Upstream) -> None:
    """Where a guardrail puts another text, the tokens of the old one are not sent beside it."""
    tokens = {"content": [{"token": "swordfish", "logprob": 0, "bytes": None, "top_logprobs": []}]}

    async def answer(seen: Seen) -> web.StreamResponse:
        if seen.body.get("stream"):
            part = chunk("swordfish")
            part["choices"][0]["logprobs"] = tokens
            return await seen.stream(part, chunk(None, "stop"))
        body = json.loads(json.dumps(PLAIN))
        body["choices"][0] |= {"message": {"role": "assistant", "content": "swordfish"}, "logprobs": tokens}
        return plain(200, body)

    up.answers["m"] = answer
    config = {"model_list": [deployment("m", up)], "guardrails": [own(options={"replace": "swordfish", "by": "carp"})]}
    async with router(tmp_path, config) as door:
        got = await door.post(model="m", stream=stream, logprobs=True)
    assert b"carp" in got.raw
    assert b"swordfish" not in got.raw


@pytest.mark.parametrize(
    "entry",
    [
        {"guardrail_name": "a,b", "own": {"use": f"{OWN}:Words"}},
        {"guardrail_name": "x", "own": {"use": f"{OWN}:Nothing"}},
        {"guardrail_name": "x", "own": {"use": f"{OWN}:asyncio"}},
        {"guardrail_name": "x", "own": {"use": f"{OWN}:Words", "options": {"nope": 1}}},
        {"guardrail_name": "x"},
        {"guardrail_name": "x", "litellm_params": {"guardrail": "generic_guardrail_api", "mode": "pre_call"}},
    ],
)
def test_a_guardrail_that_cannot_be_meant_stops_the_start(entry: dict[str, Any]) -> None:
    """A class that is not there, options it does not take, no address: told with the key."""
    with pytest.raises(ConfigError, match="guardrails"):
        load_text(json.dumps({"model_list": [], "guardrails": [entry]}))


def test_a_tenants_guardrails_are_configured() -> None:
    """A tenant that names a guardrail which nobody configured stops the start."""
    written = {"model_list": [], "tenants": [{"name": "a", "key": KEY, "guardrails": ["pii"]}]}
    with pytest.raises(ConfigError, match="'pii', which is not configured"):
        TenantSource(load_text(json.dumps(written)))


async def test_the_documented_class_works() -> None:
    """The example in docs/guardrails.md blocks, rewrites and passes as the page says."""
    page = (Path(__file__).parents[2] / "docs" / "guardrails.md").read_text()
    found = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert found is not None
    module = types.ModuleType("acme_guards")
    exec(compile(found[1], "guardrails.md", "exec"), module.__dict__)
    guard = module.Words(["swordfish"])

    def content(stage: Any, text: str) -> Content:
        return Content(stage, (text,), (), "m", "a", "dec_1")

    with pytest.raises(Blocked):
        await guard.check(content("request", "a swordfish"))
    assert await guard.check(content("response", "a swordfish, fool")) == ["a swordfish, friend"]


@pytest.mark.parametrize("status", [200, 400])
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_an_answer_nested_beyond_reading_is_not_the_callers_fault(
    path: str, guarded: bool, status: int, tmp_path: Path, up: Upstream
) -> None:
    """What cannot be read passes no guardrail, and in no case is the caller told that it was the request."""

    async def answer(seen: Seen) -> web.StreamResponse:
        text = json.dumps({**PLAIN, "deep": 0}).replace('"deep": 0', '"deep": ' + "[" * 3000 + "]" * 3000)
        return web.Response(text=text, content_type="application/json", status=status)

    up.answers["m"] = answer
    config = {"model_list": [deployment("m", up)], "guardrails": [own(mode="post_call", default_on=guarded)]}
    async with router(tmp_path, config) as door:
        got = await door.post(path, model="m", **ASKED.get(path, {"messages": [], "max_tokens": 3}))
    assert b"The body is nested" not in got.raw
    assert got.status >= 500 or (got.status == status and not (guarded and status == 200))
    assert not guarded or b'"ok"' not in got.raw
