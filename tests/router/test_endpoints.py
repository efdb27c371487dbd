"""The hot routes, through real HTTP on both sides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from tests.router.gateway import (
    KEY,
    PLAIN,
    Router,
    Seen,
    Upstream,
    chunk,
    deployment,
    failure,
    plain,
    router,
    until,
    upstream,
)


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


@pytest.fixture
async def door(tmp_path: Path, up: Upstream) -> AsyncIterator[Router]:
    entries = [
        deployment("m", up, timeout=5),
        deployment("quick", up, timeout=0.3),
        {
            "model_name": "dressed",
            "litellm_params": {"model": "openai/up", "api_base": up.base, "seed": 7, "top_p": 0.5},
        },
    ]
    async with router(tmp_path, {"model_list": entries, "router_settings": {"num_retries": 0}}) as running:
        yield running


async def test_plain_answer_is_the_upstreams(door: Router, up: Upstream) -> None:
    """A plain answer arrives as given, with the decision in its headers and no credential in either direction."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return plain(200, {**PLAIN, "odd": [None, 1.5]}, set_cookie="a=b", x_request_id="up-1", x_api_key="secret")

    up.answers["m"] = answer
    got = await door.post(model="m", user="u", headers={"cookie": "c=d", "x-api-key": KEY})
    assert (got.status, got.json) == (200, {**PLAIN, "odd": [None, 1.5]})
    assert got.headers["x-request-id"] == "up-1"
    assert got.headers["x-twolane-transport"] == "text"
    assert got.headers["x-twolane-reason"] == "only_survivor"
    assert got.headers["x-twolane-decision"].startswith("dec_")
    assert not {"set-cookie", "x-api-key"} & set(got.headers)
    assert KEY not in str(up.seen[0].headers)
    assert up.seen[0].body == {"model": "m", "user": "u", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("path", ["/chat/completions", "/completions", "/embeddings", "/responses"])
async def test_no_second_name_of_the_model_gets_through(door: Router, up: Upstream, path: str) -> None:
    """Servers that read keys without regard to case would take `MODEL` for `model`, and policy never saw it."""
    got = await door.post(f"/v1{path}", model="m", input="x", prompt="x", MODEL="other")
    assert (got.status, got.error["code"], got.error["param"]) == (400, "unknown_field", "MODEL")
    assert up.seen == []


async def test_defaults_fill_only_gaps(door: Router, up: Upstream) -> None:
    """What the deployment states is put in where the caller says nothing, and only there."""
    await door.post(model="dressed", top_p=1)
    assert {k: up.seen[0].body[k] for k in ("model", "seed", "top_p")} == {"model": "up", "seed": 7, "top_p": 1}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
async def test_stream_is_relayed(door: Router, up: Upstream, path: str) -> None:
    """Deltas come in order, `[DONE]` last, and usage asked for on our own account is taken out again."""

    async def answer(seen: Seen) -> web.StreamResponse:
        assert seen.body["stream_options"] == {"include_usage": True}
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        return await seen.stream(chunk("a"), chunk("b"), chunk(finish="stop"), {"choices": [], "usage": usage})

    up.answers["m"] = answer
    got = await door.post(path, model="m", stream=True)
    assert got.text == "ab"
    assert got.events[-1] == "[DONE]"
    assert not any("usage" in e for e in got.events if isinstance(e, dict))
    told = await door.get(f"/v1/decisions/{got.headers['x-twolane-decision']}")
    assert told.json["happened"]["prompt_tokens"] == 3


async def test_stream_keeps_the_callers_options(door: Router, up: Upstream) -> None:
    """Other stream options of the caller stay beside the one we add."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return await seen.stream(chunk("a", "stop"))

    up.answers["m"] = answer
    await door.post(model="m", stream=True, stream_options={"include_usage": False, "x": 1})
    assert up.seen[0].body["stream_options"] == {"include_usage": True, "x": 1}


@pytest.mark.parametrize(
    ("events", "done", "whole"),
    [
        ((chunk("a"), chunk(finish="stop")), False, True),
        ((chunk("a"),), False, False),
        ((chunk("a"), {"error": {"message": "upstream broke", "code": 500}}), False, False),
        ((chunk("a"), 1.0, chunk("late", "stop")), True, False),
    ],
    ids=["no DONE after a finish", "cut", "error event", "silence"],
)
async def test_stream_ends(door: Router, up: Upstream, events: tuple[object, ...], done: bool, whole: bool) -> None:
    """A stream ends in `[DONE]` where the answer was whole, else in one error event."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return await seen.stream(*events, done=done)

    up.answers["quick"] = answer
    got = await door.post(model="quick", stream=True)
    assert got.status == 200
    assert got.text == "a"
    if whole:
        assert got.events[-1] == "[DONE]"
    else:
        assert set(got.events[-1]) == {"error"}
        assert got.raw.count(b"[DONE]") == 0


async def test_error_before_the_first_event_is_plain(door: Router, up: Upstream) -> None:
    """A stream whose first event is an error never begins: the caller gets a status."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return await seen.stream({"error": {"message": "no room", "code": 429}}, done=False)

    up.answers["m"] = answer
    got = await door.post(model="m", stream=True)
    assert (got.status, got.error["message"]) == (429, "no room")


@pytest.mark.parametrize("stream", [False, True])
async def test_hang_up_reaches_the_upstream(door: Router, up: Upstream, stream: bool) -> None:
    """A caller who leaves before the first byte stops the upstream, and the deployment is free again."""

    async def answer(seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(30)
        return plain()

    up.answers["m"] = answer
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.4):
            await door.post(model="m", stream=stream)
    await until(lambda: up.hung_up == ["m"])
    id = door.app.endpoint.dispatcher.settings.model_list[0].id
    await until(lambda: door.app.parts.metrics.in_flight(id) == 0)


async def test_hang_up_in_a_stream_reaches_the_upstream(door: Router, up: Upstream) -> None:
    """A caller who leaves in the middle of a stream stops the upstream."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return await seen.stream(*(e for _ in range(500) for e in (chunk("a"), 0.02)))

    up.answers["m"] = answer
    headers = {"authorization": f"Bearer {KEY}"}
    async with door.session.post("/v1/chat/completions", json={"model": "m", "stream": True}, headers=headers) as got:
        await got.content.readany()
        got.close()
    await until(lambda: up.hung_up == ["m"])


@pytest.mark.parametrize("key", [None, "", "sk-wrong", "x" * 5000, "ключ"])
async def test_unknown_keys_are_one_401(door: Router, up: Upstream, key: str | None) -> None:
    """Whatever is wrong with a key, the answer is the same and the upstream hears nothing."""
    headers = {} if key is None else {"authorization": f"Bearer {key}".encode().decode("latin-1")}
    got = await door.post(model="m", key=None, headers=headers)
    same = await door.post(model="m", key=None)
    assert (got.status, got.raw) == (401, same.raw)
    assert up.seen == []


@pytest.mark.parametrize(
    ("headers", "body", "param"),
    [
        ({"x-twolane-transport": "fast"}, {}, "x-twolane-transport"),
        ({"x-twolane-latency-budget-ms": "soon"}, {}, "x-twolane-latency-budget-ms"),
        ({"x-twolane-latency-budget-ms": "-1"}, {}, "x-twolane-latency-budget-ms"),
        ({"x-twolane-latency-budget-ms": "nan"}, {}, "x-twolane-latency-budget-ms"),
        ({}, {"stream": "yes"}, "stream"),
        ({}, {"model": 3}, "model"),
        ({}, {"model": ""}, "model"),
        ({}, {"max_tokens": "many"}, "max_tokens"),
    ],
)
async def test_bad_values_are_named(
    door: Router, up: Upstream, headers: dict[str, str], body: dict[str, object], param: str
) -> None:
    """A header or field that cannot be meant is a 400 that names it."""
    got = await door.post(**{"model": "m", **body}, headers=headers)  # type: ignore[arg-type]
    assert (got.status, got.error["param"]) == (400, param)
    assert up.seen == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_names_are_bounded(tmp_path: Path, up: Upstream, path: str) -> None:
    """A model's or a person's name of a megabyte fills no log, no record and no answer."""
    config = {
        "model_list": [deployment("m", up)],
        "tenants": [{"name": "a", "key": KEY, "audit": {"content": "none", "subject": "user"}}],
    }
    async with router(tmp_path, config) as door:
        names = ("model", "user")
        told = [await door.post(path, **{"model": "m", "messages": [], name: "x" * 10**6}) for name in names]
        fits = await door.post(path, model="m", messages=[], user="x" * 1000)
    assert [(t.status, t.error["code"], t.error["param"]) for t in told] == [
        (400, "name_too_long", "model"),
        (400, "name_too_long", "user"),
    ]
    assert fits.status == 200
    kept = await asyncio.to_thread(lambda: [f.stat().st_size for f in tmp_path.rglob("*") if f.is_file()])
    assert sum(kept) < 10**5


async def test_unknown_model_is_a_404(door: Router) -> None:
    """An unknown model is named in a 404."""
    got = await door.post(model="nope")
    assert (got.status, got.error["code"]) == (404, "model_not_found")
    assert "nope" in got.error["message"]


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'{"model": "m"} trailing'])
async def test_bad_bodies_are_a_400(door: Router, raw: bytes) -> None:
    """What is no JSON object is a 400 in OpenAI's shape."""
    headers = {"authorization": f"Bearer {KEY}"}
    async with door.session.post("/v1/chat/completions", data=raw, headers=headers) as got:
        assert got.status == 400
        assert json.loads(await got.read())["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("chunked", [False, True])
async def test_large_bodies_are_refused(tmp_path: Path, up: Upstream, chunked: bool) -> None:
    """A body past the limit is a 413, told beforehand or not."""
    settings = {"master_key": "sk-master-0123456789", "max_request_size_mb": 0.001}
    config = {"model_list": [deployment("m", up)], "general_settings": settings}

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b"x" * 100

    async with router(tmp_path, config) as door:
        headers = {"authorization": f"Bearer {KEY}"}
        data: object = parts() if chunked else b"x" * 4000
        async with door.session.post("/v1/completions", data=data, headers=headers) as got:
            assert got.status == 413


async def test_embeddings_and_responses_pass_through(door: Router, up: Upstream) -> None:
    """Other OpenAI routes reach the same path upstream."""

    async def answer(seen: Seen) -> web.StreamResponse:
        if seen.body.get("stream"):
            event = {"type": "response.completed", "response": {"usage": {"input_tokens": 4, "output_tokens": 1}}}
            return await seen.stream({"type": "response.output_text.delta", "delta": "x"}, event, done=False)
        return plain(200, {"path": seen.request.path})

    up.answers["m"] = answer
    for path in ("/v1/embeddings", "/v1/responses", "/v1/completions"):
        assert (await door.post(path, model="m", input="x")).json == {"path": path}
    got = await door.post("/v1/responses", model="m", input="x", stream=True)
    assert [e["type"] for e in got.events] == ["response.output_text.delta", "response.completed"]


async def test_many_callers_share_the_upstream(door: Router, up: Upstream) -> None:
    """Answers do not mix when many callers ask at once."""

    async def answer(seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(0.01)
        return plain(200, {"echo": seen.body["user"]})

    up.answers["m"] = answer
    got = await asyncio.gather(*(door.post(model="m", user=f"u{i}") for i in range(50)))
    assert [g.json["echo"] for g in got] == [f"u{i}" for i in range(50)]


async def test_closed_connection_is_an_error(door: Router, up: Upstream) -> None:
    """An upstream that closes without a byte is a 503 in OpenAI's shape."""

    async def answer(seen: Seen) -> web.StreamResponse:
        assert seen.request.transport is not None
        seen.request.transport.abort()
        return failure(500)

    up.answers["m"] = answer
    got = await door.post(model="m")
    assert (got.status, got.error["code"]) == (503, "upstream_unavailable")


async def test_body_broken_off_harms_nobody(door: Router) -> None:
    """A connection closed in the middle of its request's body is let go, and the next request is served."""
    _, writer = await asyncio.open_connection("127.0.0.1", door.port)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 100\r\n\r\n"
    )
    writer.write(head.encode() + b'{"model": ')
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await door.post(model="m")).status == 200


@pytest.mark.parametrize("depth", [500, 900, 1000, 100_000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/decide"])
async def test_bodies_nested_too_deeply_are_a_400(door: Router, path: str, depth: int) -> None:
    """However deep a body is, it is passed on or it is the caller's mistake, and the next one is served."""
    deep = b"[" * depth + b"]" * depth
    raw = b'{"model": "m", "messages": %b, "input": %b}' % (deep, deep)
    headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    async with door.session.post(path, data=raw, headers=headers) as answer:
        body = await answer.json()
    assert answer.status == 400 or (depth < 1000 and answer.status == 200)
    if answer.status == 400:
        assert body["error"]["code"] == "invalid_json"
    assert (await door.post(model="m")).status == 200


async def test_answers_nested_too_deeply_are_the_upstreams_fault(door: Router, up: Upstream) -> None:
    """An upstream's answer that nobody can read is its failure; in a stream the event is left out."""
    deep = "[" * 100_000 + "]" * 100_000

    async def answer(seen: Seen) -> web.StreamResponse:
        if not seen.body.get("stream"):
            return web.Response(text=f'{{"choices": {deep}}}', content_type="application/json")
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(seen.request)
        for data in (json.dumps(chunk("a")), f'{{"choices": {deep}}}', json.dumps(chunk("b", "stop")), "[DONE]"):
            await response.write(f"data: {data}\n\n".encode())
        return response

    up.answers["m"] = answer
    got = await door.post(model="m")
    assert (got.status, got.error["code"]) == (502, "upstream_malformed")
    assert (await door.post(model="m", stream=True)).text == "ab"


@pytest.mark.parametrize(
    "refusal",
    [
        {
            "error": {
                "message": "Unrecognized request argument: stream_options",
                "type": "t",
                "param": None,
                "code": None,
            }
        },
        {"error": {"message": "unknown field", "type": "t", "param": "stream_options", "code": None}},
        {"detail": [{"type": "extra_forbidden", "loc": ["body", "stream_options"], "msg": "Extra inputs"}]},
    ],
)
async def test_upstreams_that_take_no_stream_options_stream_all_the_same(
    door: Router, up: Upstream, refusal: dict[str, object]
) -> None:
    """What is added to a stream for our books fails no stream: it is left out, from then on at once. What the caller
    sent himself is refused as the upstream does."""

    async def strict(seen: Seen) -> web.StreamResponse:
        if "stream_options" in seen.body:
            return plain(422, refusal)
        return await seen.stream(chunk("a", "stop"))

    up.answers["m"] = strict
    for count in (2, 3):
        got = await door.post(model="m", stream=True)
        assert (got.status, got.text) == (200, "a")
        assert up.count("m") == count
    asked = await door.post(model="m", stream=True, stream_options={"include_usage": True})
    assert asked.status == 422
    assert up.count("m") == 4


async def test_dropped_stream_options_are_not_added(tmp_path: Path, up: Upstream) -> None:
    """Where `additional_drop_params` names them, nothing is asked of an upstream by them."""
    entry = deployment("m", up, additional_drop_params=["stream_options"])

    async def says(seen: Seen) -> web.StreamResponse:
        return await seen.stream(chunk("a", "stop"))

    up.answers["m"] = says
    async with router(tmp_path, {"model_list": [entry]}) as door:
        assert (await door.post(model="m", stream=True, stream_options={"x": 1})).status == 200
    assert "stream_options" not in up.seen[0].body
