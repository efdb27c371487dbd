"""The dispatcher's story: decision, attempts, fallbacks and the books, through real HTTP on both sides."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from policies.facts import Decision, Judged, Verdict
from router.errors import BadRequest, Forbidden, RouterError, Unavailable
from router.refusal import refusal
from tests.router.gateway import KEY, PLAIN, Seen, Upstream, chunk, deployment, failure, plain, router, upstream

OTHER_KEY = "sk-tenant-b-0123456789"


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


def fails(status: int, message: str = "boom", **headers: str) -> Callable[[Seen], Awaitable[web.StreamResponse]]:
    async def answer(seen: Seen) -> web.StreamResponse:
        return failure(status, message, **headers)

    return answer


def says(text: str) -> Callable[[Seen], Awaitable[web.StreamResponse]]:
    async def answer(seen: Seen) -> web.StreamResponse:
        return plain(200, {**PLAIN, "said": text})

    return answer


async def test_twin_serves_while_the_failing_one_rests(tmp_path: Path, up: Upstream) -> None:
    """A failing deployment costs a few requests a second try, then none, and every caller is answered."""
    up.answers["bad"] = fails(500)
    config = {
        "model_list": [deployment("m", up, "bad"), deployment("m", up, "good")],
        "router_settings": {"allowed_fails": 2, "cooldown_time": 60},
    }
    async with router(tmp_path, config) as door:
        got = [await door.post(model="m") for _ in range(20)]
    assert {g.status for g in got} == {200}
    assert (up.count("bad"), up.count("good")) == (2, 20)
    assert {g.headers["x-litellm-attempted-retries"] for g in got} == {"0", "1"}


async def test_only_deployment_never_rests(tmp_path: Path, up: Upstream) -> None:
    """Without a twin, failures are passed on and the next request still reaches the upstream."""
    up.answers["m"] = fails(500, "hiccup")
    config = {"model_list": [deployment("m", up)], "router_settings": {"allowed_fails": 1, "cooldown_time": 60}}
    async with router(tmp_path, config) as door:
        got = [await door.post(model="m") for _ in range(4)]
        up.answers["m"] = says("back")
        assert (await door.post(model="m")).status == 200
    assert [(g.status, g.error["message"]) for g in got] == [(500, "hiccup")] * 4
    assert up.count("m") == 5


@pytest.mark.parametrize(
    ("status", "retries", "expected"), [(500, 2, 3), (429, 1, 2), (408, 1, 2), (400, 2, 1), (401, 2, 1), (404, 2, 1)]
)
async def test_tries_are_bounded(tmp_path: Path, up: Upstream, status: int, retries: int, expected: int) -> None:
    """Only what a pause may cure is tried again, and as often as was said beforehand."""
    up.answers["m"] = fails(status)
    async with router(tmp_path, {"model_list": [deployment("m", up, num_retries=retries)]}) as door:
        assert (await door.post(model="m")).status >= 400
    assert up.count("m") == expected


@pytest.mark.parametrize(("told", "count"), [("1", 2), ("60", 1)])
async def test_retry_after_is_kept(tmp_path: Path, up: Upstream, told: str, count: int) -> None:
    """A short Retry-After is waited for, a long one is the caller's to honour."""
    up.answers["m"] = fails(429, retry_after=told)
    async with router(tmp_path, {"model_list": [deployment("m", up, num_retries=1)]}) as door:
        began = time.monotonic()
        got = await door.post(model="m")
    assert (got.status, got.headers["retry-after"], up.count("m")) == (429, told, count)
    assert time.monotonic() - began >= (1 if count == 2 else 0)


FALLBACKS: dict[str, Any] = {
    "num_retries": 0,
    "fallbacks": [{"m": ["spare"]}, {"loop": ["loop2"]}, {"loop2": ["loop", "m"]}],
    "default_fallbacks": ["last"],
    "context_window_fallbacks": [{"m": ["long"]}],
    "content_policy_fallbacks": [{"m": ["lenient"]}],
}


@pytest.mark.parametrize(
    ("model", "status", "error", "answered"),
    [
        ("m", 500, None, "spare"),
        ("m", 429, None, "spare"),
        ("m", 401, None, "spare"),
        ("m", 404, None, "spare"),
        ("m", 400, None, None),
        ("m", 400, "context_length_exceeded", "long"),
        ("m", 400, "content_filter", "lenient"),
        ("other", 503, None, "last"),
    ],
)
async def test_fallback_groups(
    tmp_path: Path, up: Upstream, model: str, status: int, error: str | None, answered: str | None
) -> None:
    """Each kind of failure goes to the group made for it; a mistake no model can mend goes nowhere."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return plain(status, {"error": {"message": "no", "type": "t", "param": None, "code": error}})

    up.answers[model] = answer
    names = ("m", "other", "spare", "long", "lenient", "last")
    for name in names:
        if name != model:
            up.answers[name] = says(name)
    config = {"model_list": [deployment(name, up) for name in names], "router_settings": FALLBACKS}
    async with router(tmp_path, config) as door:
        got = await door.post(model=model)
    if answered is None:
        assert got.status == status
        assert len(up.seen) == 1
    else:
        assert got.json["said"] == answered
        assert got.headers["x-litellm-attempted-fallbacks"] == "1"
        assert [s.body["model"] for s in up.seen] == [model, answered]


async def test_fallbacks_that_circle_end(tmp_path: Path, up: Upstream) -> None:
    """Groups that point at each other are visited once each."""
    for name in ("loop", "loop2", "m", "spare", "last"):
        up.answers[name] = fails(503)
    names = ("loop", "loop2", "m", "spare", "last")
    config = {"model_list": [deployment(name, up) for name in names], "router_settings": FALLBACKS}
    async with router(tmp_path, config) as door:
        got = await door.post(model="loop")
    assert got.status == 503
    assert sorted(s.body["model"] for s in up.seen) == sorted(names)


async def test_policy_holds_in_fallbacks(tmp_path: Path, up: Upstream) -> None:
    """A fallback never leaves what the tenant may use."""
    up.answers["m"] = fails(503)
    config = {
        "model_list": [deployment("m", up), deployment("spare", up)],
        "router_settings": FALLBACKS,
        "tenants": [{"name": "a", "key": KEY, "models": ["m"]}],
    }
    async with router(tmp_path, config) as door:
        assert (await door.post(model="m")).status == 503
        refused = await door.post(model="spare")
    assert (refused.status, refused.error["code"]) == (403, "model_not_allowed")
    assert up.count("spare") == 0


async def test_nothing_follows_the_first_frame(tmp_path: Path, up: Upstream) -> None:
    """Once a delta has gone out there is no retry and no fallback."""

    async def answer(seen: Seen) -> web.StreamResponse:
        response = await seen.stream(chunk("half"), 0.1, done=False)
        assert seen.request.transport is not None
        seen.request.transport.abort()
        return response

    up.answers["m"] = answer
    config = {"model_list": [deployment("m", up, num_retries=3), deployment("spare", up)], "router_settings": FALLBACKS}
    async with router(tmp_path, config) as door:
        got = await door.post(model="m", stream=True)
    assert (got.status, got.text) == (200, "half")
    assert set(got.events[-1]) == {"error"}
    assert len(up.seen) == 1


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"x-twolane-transport": "text"}, 200, None),
        ({"x-twolane-transport": "cache"}, 403, "hint_cache"),
        ({"x-twolane-deployment": "one"}, 200, None),
        ({"x-twolane-deployment": "none-such"}, 403, "pinned_elsewhere"),
        ({"x-twolane-latency-budget-ms": "1"}, 200, None),
    ],
)
async def test_hints_narrow(
    tmp_path: Path, up: Upstream, headers: dict[str, str], status: int, code: str | None
) -> None:
    """Hints of the caller narrow the choice, and what they leave empty is refused with the reason."""
    entry = {**deployment("m", up), "model_info": {"id": "one"}}
    async with router(tmp_path, {"model_list": [entry]}) as door:
        got = await door.post(model="m", headers=headers)
    assert got.status == status
    if code is not None:
        assert got.error["code"] == code
        assert up.seen == []


def _judged(*codes: str) -> tuple[Judged, ...]:
    return tuple(Judged(f"d{i}", "text", (Verdict(True, "ok"), Verdict(False, code))) for i, code in enumerate(codes))


@pytest.mark.parametrize(
    ("codes", "kind"),
    [
        (("pair_unavailable",), Unavailable),
        (("deployment_unavailable", "hint_text"), Unavailable),
        (("hint_text", "model_not_allowed"), Forbidden),
        (("context_too_long",), BadRequest),
        (("needs_unsupported",), BadRequest),
        (("regulated_text_only",), Forbidden),
    ],
)
def test_refusals(codes: tuple[str, ...], kind: type[Exception]) -> None:
    """What comes back by itself is a 503, what the caller can mend a 400, and the rest a 403."""
    error = refusal(Decision("m", (), codes[0], _judged(*codes)))
    assert type(error) is kind
    assert ("retry-after" in getattr(error, "headers", {})) == (kind is Unavailable)


@pytest.mark.parametrize(
    ("codes", "kind", "code"),
    [
        (("deployment_unavailable", "needs_unsupported"), BadRequest, "needs_unsupported"),
        (("pair_unavailable", "context_too_long"), BadRequest, "context_length_exceeded"),
        (("pair_unavailable", "regulated_text_only"), Forbidden, "regulated_text_only"),
    ],
)
def test_what_would_be_refused_by_a_live_worker_too_is_refused_for_that(
    codes: tuple[str, ...], kind: type[RouterError], code: str
) -> None:
    """A caller is not told to wait, nor that a worker is away, where waiting changes nothing."""
    verdicts = tuple(Verdict(False, each) for each in codes)
    error = refusal(Decision("m", (), codes[0], (Judged("d0", "text", verdicts),)))
    assert isinstance(error, kind)
    assert error.code == code
    assert codes[0] not in str(error)


async def test_dead_worker_is_a_503_or_a_fallback(tmp_path: Path, up: Upstream) -> None:
    """A group whose worker is away answers 503 with Retry-After, or lets its fallback answer."""
    local = {"model_name": "local", "local_params": {"model": "tiny"}}
    config: dict[str, Any] = {
        "models": [{"name": "tiny", "model": "none/none"}],
        "model_list": [local, {**local, "model_name": "backed"}, deployment("spare", up)],
        "router_settings": {"fallbacks": [{"backed": ["spare"]}], "num_retries": 0},
    }
    async with router(tmp_path, config) as door:
        alone = await door.post(model="local")
        backed = await door.post(model="backed")
    assert (alone.status, alone.error["code"]) == (503, "deployment_unavailable")
    assert alone.headers["retry-after"].isdigit()
    assert backed.status == 200


async def test_places_are_given_back(tmp_path: Path, up: Upstream) -> None:
    """With one request at a time allowed, the next one runs after every way the last one ended."""

    async def slow(seen: Seen) -> web.StreamResponse:
        return await seen.stream(*(e for _ in range(100) for e in (chunk("t"), 0.05)))

    async def silent(seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(30)
        return plain()

    up.answers |= {"bad": fails(500), "slow": slow, "silent": silent}
    config = {
        "model_list": [deployment(n, up, timeout=0.3) for n in ("ok", "bad", "slow", "silent")],
        "tenants": [{"name": "a", "key": KEY, "max_parallel_requests": 1}],
    }
    async with router(tmp_path, config) as door:
        running = asyncio.create_task(door.post(model="slow", stream=True))
        await asyncio.sleep(0.3)
        second = await door.post(model="ok")
        running.cancel()
        await asyncio.wait([running])
        await asyncio.sleep(0.2)
        ends = [(await door.post(model=m)).status for m in ("ok", "bad", "ok", "silent", "ok", "none-such", "ok")]
    assert (second.status, second.error["type"]) == (429, "rate_limit_error")
    assert int(second.headers["retry-after"]) >= 1
    assert ends == [200, 500, 200, 504, 200, 404, 200]


async def test_decisions_are_the_tenants_own(tmp_path: Path, up: Upstream) -> None:
    """A past decision tells verdicts and what happened, without content, and to its own tenant only."""
    config = {
        "model_list": [deployment("m", up)],
        "tenants": [{"name": "a", "key": KEY}, {"name": "b", "key": OTHER_KEY}],
    }
    async with router(tmp_path, config) as door:
        got = await door.post(model="m", user="marker-5521")
        path = f"/v1/decisions/{got.headers['x-twolane-decision']}"
        own, others = await door.get(path), await door.get(path, key=OTHER_KEY)
        decided = await door.post("/v1/decide", model="m")
    assert own.json["deployment"] == got.headers["x-twolane-deployment"]
    assert own.json["judged"][0]["verdicts"][0] == {"rule": "model", "allowed": True, "code": "ok", "detail": ""}
    assert own.json["happened"]["outcome"] == "ok"
    assert "marker-5521" not in own.raw.decode()
    assert (others.status, others.error["code"]) == (404, "decision_not_found")
    assert decided.json["reason"] == "only_survivor"
    assert len(up.seen) == 1


async def test_relay_runs_both_halves(tmp_path: Path, up: Upstream) -> None:
    """A relay asks its sharer, then its receiver, on their ordinary text deployments."""

    async def sharer(seen: Seen) -> web.StreamResponse:
        message = {"role": "assistant", "content": "the hint is 41"}
        return plain(200, {**PLAIN, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})

    up.answers["big"] = sharer
    relay = {"model_name": "m", "relay_params": {"sharer": "big", "receiver": "small"}}
    config = {"model_list": [relay, deployment("big", up), deployment("small", up)]}
    async with router(tmp_path, config) as door:
        got = await door.post(model="m")
        metrics = door.app.parts.metrics
        assert all(metrics.in_flight(d.id) == 0 for d in door.app.endpoint.dispatcher.settings.model_list)
    assert got.status == 200
    assert got.json["usage"]["prompt_tokens"] == 6
    assert [s.body["model"] for s in up.seen] == ["big", "small"]
    assert "the hint is 41" in str(up.seen[1].body["messages"])


@pytest.mark.parametrize("stream", [False, True])
async def test_regulated_answers_are_recorded_or_not_given(tmp_path: Path, up: Upstream, stream: bool) -> None:
    """A regulated tenant's answer has an intent and an outcome on disk, and without a log there is no answer."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return await seen.stream(chunk("said", "stop")) if stream else plain()

    up.answers["m"] = answer
    tenant = {"name": "bank", "key": KEY, "regulated": True, "transports": ["text"]}
    async with router(tmp_path, {"model_list": [deployment("m", up)], "tenants": [tenant]}) as door:
        assert (await door.post(model="m", stream=stream)).status == 200
        records = b"".join(p.read_bytes() for p in sorted((tmp_path / "audit" / "bank").glob("*.jsonl")))
        assert records.count(b'"intent"') == 1
        assert records.count(b'"outcome"') == 1
        await door.app.parts.audit.close()
        refused = await door.post(model="m", stream=stream)
        assert (refused.status, refused.error["code"]) == (503, "audit_unavailable")
    assert len(up.seen) == 1


async def test_only_a_stream_shows_a_first_token(tmp_path: Path, up: Upstream) -> None:
    """The time to the first token is told of streams; a plain answer, which shows none, teaches and tells none."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return await seen.stream(chunk("said", "stop", usage=PLAIN["usage"]))

    up.answers["s"] = answer
    async with router(tmp_path, {"model_list": [deployment("m", up), deployment("s", up)]}) as door:
        told = []
        for model in ("m", "s"):
            got = await door.post(model=model, stream=model == "s")
            told.append((await door.get(f"/v1/decisions/{got.headers['x-twolane-decision']}")).json["happened"])
    assert told[0]["ttft_ms"] is None
    assert 0 < told[1]["ttft_ms"] <= told[1]["total_ms"]


async def test_calls_sent_together_keep_to_the_budget(tmp_path: Path, up: Upstream) -> None:
    """Money is reserved before a call runs: of calls sent at once only as many run as the budget can pay for."""

    async def slow(seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(0.2)
        return plain()

    up.answers["m"] = slow
    config = {
        "model_list": [deployment("m", up, input_cost_per_token=0.0, output_cost_per_token=0.01)],
        "tenants": [{"name": "a", "key": KEY, "max_budget": 0.25}],
    }
    async with router(tmp_path, config) as door:
        got = await asyncio.gather(*(door.post(model="m", max_tokens=10) for _ in range(6)))
        later = await door.post(model="m", max_tokens=10)
    assert sorted(g.status for g in got) == [200, 200, 429, 429, 429, 429]
    assert {g.error["code"] for g in got if g.status == 429} == {"insufficient_quota"}
    assert later.status == 200, "what was reserved and not used is given back"
