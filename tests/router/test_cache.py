"""Deployments on workers, through a real socket: pairs and single models."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from router.transports.cache import KnownFleet, holders
from tests.router.gateway import KEY, PLAIN, Seen, Upstream, chunk, deployment, failure, plain, router, until, upstream
from workers.protocol import ModelState, PairState, Rates, Run, WorkerState

RUN = msgspec.to_builtins(Run(prefill_ms=12.5, reused_tokens=2, fingerprint="f" * 8))
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 2}}


def worker(url: str, *, ready: bool = True, name: str = "w", running: int = 0) -> WorkerState:
    pair = PairState("duo", "f" * 8, "handover", "prompt", "identity", 4096, ready=ready, reason="loading")
    return WorkerState(
        name=name,
        epoch="e",
        url=url,
        pid=1,
        models=(ModelState("tiny", "m" * 8, 4096),),
        pairs=(pair,),
        rates={"duo": Rates(1000.0, 50.0)},
        running=running,
        queued=0,
        max_running=8,
        max_queued=64,
        free_bytes=0,
        at=time.time(),
    )


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


@pytest.fixture
async def on_worker(tmp_path: Path) -> AsyncIterator[Upstream]:
    async with upstream(unix=tmp_path / "w.sock") as state:
        yield state


def config(up: Upstream, **tenant: object) -> dict[str, Any]:
    model = {"model": "none/none"}
    return {
        "models": [{"name": "tiny", **model}],
        "pairs": [{"name": "duo", "sharer": model, "receiver": model}],
        "model_list": [
            {"model_name": "m", "cache_params": {"pair": "duo"}},
            {"model_name": "alone", "cache_params": {"pair": "duo"}},
            {"model_name": "tiny", "local_params": {"model": "tiny"}},
            deployment("m", up, "text"),
        ],
        "tenants": [{"name": "a", "key": KEY, **tenant}],
        "router_settings": {"num_retries": 0},
    }


async def test_pair_answers(tmp_path: Path, up: Upstream, on_worker: Upstream) -> None:
    """A pair is called by its name on its worker's socket; what the worker says of the run stays inside."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return plain(200, {**PLAIN, "usage": USAGE, "twolane": RUN}, x_twolane_kv="2/3")

    on_worker.answers["duo"] = answer
    async with router(tmp_path, config(up), KnownFleet([worker(on_worker.base)])) as door:
        got = await door.post(model="m")
        told = await door.get(f"/v1/decisions/{got.headers['x-twolane-decision']}")
    assert got.json == {**PLAIN, "usage": USAGE}
    assert got.headers["x-twolane-transport"] == "cache"
    assert got.headers["x-twolane-kv"] == "2/3"
    assert told.json["happened"]["kv_reused"] == 2
    assert told.json["judged"][0]["estimate"]["samples"] == 0
    assert on_worker.seen[0].request.path == "/v1/chat/completions"
    assert up.seen == []


async def test_pair_streams(tmp_path: Path, up: Upstream, on_worker: Upstream) -> None:
    """A stream of the cache lane has its KV header before the first frame, and no event of ours in it."""

    async def answer(seen: Seen) -> web.StreamResponse:
        last = {"choices": [], "usage": USAGE, "twolane": RUN}
        return await seen.stream(chunk("a"), chunk("b", "stop"), last, headers={"x-twolane-kv": "2/3"})

    on_worker.answers["duo"] = answer
    async with router(tmp_path, config(up), KnownFleet([worker(on_worker.base)])) as door:
        silent = await door.post(model="m", stream=True)
        asked = await door.post(model="m", stream=True, stream_options={"include_usage": True})
    assert (silent.text, silent.headers["x-twolane-kv"], silent.events[-1]) == ("ab", "2/3", "[DONE]")
    assert not any("usage" in e or "twolane" in e for e in silent.events[:-1])
    assert [e["usage"] for e in asked.events[:-1] if "usage" in e] == [USAGE]
    assert "twolane" not in str(asked.events)


@pytest.mark.parametrize(
    ("kv", "scope"),
    [
        ({"reuse": "tenant", "ttl": "2h", "max_bytes": "1KiB"}, ("a", "7200", "1024")),
        ({"reuse": "none"}, (None, None, None)),
    ],
)
async def test_scope_is_the_tenants(
    tmp_path: Path, up: Upstream, on_worker: Upstream, kv: dict[str, str], scope: tuple[str | None, ...]
) -> None:
    """KV is scoped by the tenant's name and bounds, whatever a caller sends; without reuse there is no scope."""
    async with router(tmp_path, config(up, kv=kv), KnownFleet([worker(on_worker.base)])) as door:
        await door.post(model="m", headers={"x-twolane-tenant": "other", "x-twolane-kv-ttl": "1"})
    told = on_worker.seen[0].headers
    names = ("x-twolane-tenant", "x-twolane-kv-ttl", "x-twolane-kv-max-bytes")
    assert tuple(told.get(name) for name in names) == scope


async def test_a_worker_knows_when_nobody_waits_any_more(tmp_path: Path, up: Upstream, on_worker: Upstream) -> None:
    """A plain call tells the timeout and a second; a stream, which may go on as long as it brings something, none."""
    settings = config(up) | {"router_settings": {"num_retries": 0, "timeout": 7}}
    async with router(tmp_path, settings, KnownFleet([worker(on_worker.base)])) as door:
        await door.post(model="m")
        await door.post(model="m", stream=True)
    assert [seen.headers.get("x-twolane-deadline-ms") for seen in on_worker.seen] == ["8000", None]


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "overloaded"), (404, "model_not_found"), (400, "context_length_exceeded"), (500, "worker_error")],
)
async def test_text_lane_takes_over(tmp_path: Path, up: Upstream, on_worker: Upstream, status: int, code: str) -> None:
    """Whatever a worker answers instead of tokens, the text lane of the group may still answer."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return plain(status, {"error": {"message": "no", "type": "t", "param": None, "code": code}})

    on_worker.answers["duo"] = answer
    async with router(tmp_path, config(up), KnownFleet([worker(on_worker.base)])) as door:
        got = await door.post(model="m")
        alone = await door.post(model="alone")
    assert (got.status, got.headers["x-twolane-transport"], up.count("text")) == (200, "text", 1)
    assert alone.status == (503 if status in (404, 503) else status)


async def test_whether_a_prompt_fits_an_open_ended_answer_is_the_workers_to_say(
    tmp_path: Path, up: Upstream, on_worker: Upstream
) -> None:
    """The estimate of its tokens refuses only what cannot fit; what the worker refuses goes to the fallback."""
    settings = config(up)
    settings["model_list"].append(deployment("long", up, "long"))
    settings["router_settings"]["context_window_fallbacks"] = [{"alone": ["long"]}]
    words = [{"role": "user", "content": "internationalisation " * 1000}]

    async def refuses(seen: Seen) -> web.StreamResponse:
        return plain(400, {"error": {"message": "no", "type": "t", "param": None, "code": "context_length_exceeded"}})

    async with router(tmp_path, settings, KnownFleet([worker(on_worker.base)])) as door:
        fits = await door.post(model="alone", messages=words)
        on_worker.answers["duo"] = refuses
        refused = await door.post(model="alone", messages=words)
        asked = len(on_worker.seen)
        bounded = await door.post(model="alone", messages=words, max_tokens=256)
        cannot = await door.post(model="alone", messages=[{"role": "user", "content": "x" * 200_000}])
    assert (fits.status, fits.headers["x-twolane-transport"]) == (200, "cache")
    assert asked == 2
    for spared in (refused, bounded, cannot):
        assert (spared.status, spared.headers["x-twolane-transport"]) == (200, "text")
    assert (up.count("long"), len(on_worker.seen)) == (3, asked)


async def test_a_pair_that_did_not_load_is_refused_for_that(tmp_path: Path, up: Upstream, on_worker: Upstream) -> None:
    """It has no context yet; no caller is told that the prompt is too long for it."""
    held = worker(on_worker.base, ready=False)
    unloaded = msgspec.structs.replace(held.pairs[0], context=0)
    fleet = KnownFleet([msgspec.structs.replace(held, pairs=(unloaded,))])
    async with router(tmp_path, config(up), fleet) as door:
        for limit in ({}, {"max_tokens": 4}):
            got = await door.post(model="alone", **limit)
            assert (got.status, got.error["code"]) == (503, "pair_unavailable")
            assert "context" not in got.error["message"]


async def test_dead_socket_falls_back(tmp_path: Path, up: Upstream) -> None:
    """A worker that died a moment ago costs nothing but the attempt."""
    async with router(tmp_path, config(up), KnownFleet([worker(f"unix:{tmp_path}/gone.sock")])) as door:
        got = await door.post(model="m")
    assert (got.status, got.headers["x-twolane-transport"]) == (200, "text")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"tools": [{"type": "function"}]}, "needs_unsupported"),
        ({"messages": [{"role": "tool", "content": "42"}]}, "needs_unsupported"),
        ({"tool_choice": "required"}, "needs_unsupported"),
        ({"function_call": {"name": "f"}}, "needs_unsupported"),
        ({"response_format": {"type": "json_object"}}, "needs_unsupported"),
        ({"max_tokens": 100_000}, "context_too_long"),
    ],
)
async def test_what_the_lane_cannot_do_goes_to_text(
    tmp_path: Path, up: Upstream, on_worker: Upstream, body: dict[str, Any], reason: str
) -> None:
    """A request that needs more than the pair can do is answered by text, and the reason says why."""
    async with router(tmp_path, config(up), KnownFleet([worker(on_worker.base)])) as door:
        got = await door.post(model="m", **body)
    assert (got.headers["x-twolane-transport"], got.headers["x-twolane-reason"]) == ("text", reason)
    assert on_worker.seen == []


async def test_regulated_tenants_never_reach_a_pair(tmp_path: Path, up: Upstream, on_worker: Upstream) -> None:
    """A regulated tenant has the text lane only, also when that lane is down."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return failure(503)

    up.answers["text"] = answer
    settings = config(up, regulated=True, transports=["text"])
    async with router(tmp_path, settings, KnownFleet([worker(on_worker.base)])) as door:
        got = await door.post(model="m")
        forced = await door.post(model="m", headers={"x-twolane-transport": "cache"})
    assert (got.status, forced.status) == (503, 403)
    assert on_worker.seen == []


async def test_model_of_a_worker_is_text(tmp_path: Path, up: Upstream, on_worker: Upstream) -> None:
    """A worker's single model answers as a text deployment."""
    async with router(tmp_path, config(up), KnownFleet([worker(on_worker.base)])) as door:
        got = await door.post(model="tiny")
        refused = await door.post(model="tiny", tools=[{"type": "function"}])
    assert (got.status, got.headers["x-twolane-transport"]) == (200, "text")
    assert (refused.status, refused.error["code"]) == (400, "needs_unsupported")


async def test_hang_up_reaches_the_worker(tmp_path: Path, up: Upstream, on_worker: Upstream) -> None:
    """A caller who leaves frees the worker."""

    async def answer(seen: Seen) -> web.StreamResponse:
        await asyncio.sleep(30)
        return plain()

    on_worker.answers["duo"] = answer
    async with router(tmp_path, config(up), KnownFleet([worker(on_worker.base)])) as door:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await door.post(model="m")
        await until(lambda: on_worker.hung_up == ["duo"])
    assert up.seen == []


def test_ready_and_idle_workers_first() -> None:
    """Among workers that hold a pair, the ready and least busy come first; names of models are another matter."""
    busy, idle = worker("unix:/a", name="busy", running=5), worker("unix:/b", name="idle")
    loading = worker("unix:/c", name="loading", ready=False)
    found = holders(KnownFleet([busy, loading, idle]), "pair", "duo")
    assert [h.worker.name for h in found] == ["idle", "busy", "loading"]
    assert holders(KnownFleet([busy]), "model", "duo") == []


async def test_an_answers_fingerprint_names_what_answered(tmp_path: Path, up: Upstream, on_worker: Upstream) -> None:
    """The header names the pair on the cache lane and the deployment's entry on the text lane, whatever its key and its
    id; plain and streamed; an upstream's own `system_fingerprint` passes as it came."""

    async def says(seen: Seen) -> web.StreamResponse:
        own = {"system_fingerprint": "fp_theirs"}
        return await seen.stream(chunk("a", "stop", **own)) if seen.body.get("stream") else plain(200, {**PLAIN, **own})

    up.answers |= {"up": says}
    written = config(up)
    text = next(one for one in written["model_list"] if "litellm_params" in one)
    text |= {"model_name": "t", "model_info": {"id": "named"}}
    up.answers[text["litellm_params"]["model"].removeprefix("openai/")] = says
    told = []
    for key in ("sk-upstream-1", "sk-upstream-2"):
        text["litellm_params"]["api_key"] = key
        async with router(tmp_path, written, KnownFleet([worker(on_worker.base)])) as door:
            on_cache = await door.post(model="m")
            plainly, streamed = await door.post(model="t"), await door.post(model="t", stream=True)
        assert on_cache.headers["x-twolane-fingerprint"] == "fp_" + "f" * 8
        assert plainly.headers["x-twolane-deployment"] == "named"
        assert plainly.json["system_fingerprint"] == streamed.events[0]["system_fingerprint"] == "fp_theirs"
        told += [plainly.headers["x-twolane-fingerprint"], streamed.headers["x-twolane-fingerprint"]]
    assert len(set(told)) == 1
    assert re.fullmatch(r"fp_[0-9a-f]{12}", told[0])
