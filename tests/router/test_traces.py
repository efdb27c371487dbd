"""Traces as a collector gets them, by OTLP over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.router.gateway import KEY, UP_KEY, Seen, Upstream, chunk, deployment, failure, router, upstream

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """What it was sent."""

    def __init__(self) -> None:
        self.base = ""
        self.raw = b""
        self.headers: dict[str, str] = {}
        self.spans: dict[str, Any] = {}
        """By name."""

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.headers = {name.lower(): value for name, value in request.headers.items()}
        self.raw += body
        told = ExportTraceServiceRequest.FromString(body)
        for resource in told.resource_spans:
            for scope in resource.scope_spans:
                self.spans.update({span.name: span for span in scope.spans})
        return web.Response()


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    made = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", made.take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


async def test_a_streamed_request(collector: Collector, tmp_path: Path, up: Upstream) -> None:
    """A request is a span below the caller's, the deployment's answer one below that, with tokens and no content."""

    async def answer(seen: Seen) -> web.StreamResponse:
        usage = {"prompt_tokens": 3, "completion_tokens": 2}
        return await seen.stream(chunk("swordfish"), 0.05, chunk(finish="stop"), {"choices": [], "usage": usage})

    up.answers["up"] = answer
    otel = {"endpoint": collector.base, "headers": {"x-team": "t"}, "sample": 0.0}
    async with router(tmp_path, {"model_list": [deployment("m", up, "up")], "otel": otel}) as door:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        got = await door.post(
            model="m", stream=True, headers=headers, messages=[{"role": "user", "content": "swordfish"}]
        )
        assert (await door.post(model="m", stream=True)).status == 200, "not sampled"
    assert set(collector.spans) == {"POST /chat/completions", "chat up"}
    outer, inner = collector.spans["POST /chat/completions"], collector.spans["chat up"]
    assert (outer.trace_id.hex(), outer.parent_span_id.hex()) == (TRACE, PARENT)
    assert (inner.trace_id.hex(), inner.parent_span_id) == (TRACE, outer.span_id)
    assert outer.start_time_unix_nano <= inner.start_time_unix_nano < inner.end_time_unix_nano
    assert inner.end_time_unix_nano - inner.start_time_unix_nano > 40e6
    told = attributes(outer)
    assert told["http.response.status_code"] == 200
    assert told["twolane.request"] == got.headers["x-twolane-decision"]
    assert (told["twolane.tenant"], told["twolane.reason"]) == ("a", "only_survivor")
    told = attributes(inner)
    assert told["gen_ai.operation.name"] == "chat"
    assert (told["gen_ai.provider.name"], told["gen_ai.request.model"]) == ("openai", "up")
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (3, 2)
    assert 0 < told["gen_ai.response.time_to_first_chunk"] < 5
    assert collector.headers["x-team"] == "t"
    for secret in (b"swordfish", KEY.encode(), UP_KEY.encode()):
        assert secret not in collector.raw


async def test_a_failure(collector: Collector, tmp_path: Path, up: Upstream) -> None:
    """A request that no deployment answered is one span that failed, and names whom it tried."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return failure(500)

    up.answers["up"] = answer
    config = {"model_list": [{**deployment("m", up, "up"), "model_info": {"id": "d1"}}]}
    async with router(tmp_path, {**config, "otel": {"endpoint": f"{collector.base}/v1/traces"}}) as door:
        assert (await door.post(model="m")).status == 500
    assert set(collector.spans) == {"POST /chat/completions"}
    span = collector.spans["POST /chat/completions"]
    assert span.status.code == 2
    assert not span.parent_span_id
    told = attributes(span)
    assert told["error.type"] == "upstream_unavailable"
    assert [value.string_value for value in told["twolane.tried"].values] == ["d1"]


async def test_a_collector_that_is_away(tmp_path: Path, up: Upstream) -> None:
    """Nobody notices that spans cannot be sent."""
    otel = {"endpoint": "http://127.0.0.1:9"}
    async with router(tmp_path, {"model_list": [deployment("m", up)], "otel": otel}) as door:
        assert (await door.post(model="m")).status == 200
