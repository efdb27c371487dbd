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


GIVEN = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        ({"traceparent": GIVEN}, {"traceparent": GIVEN}),
        (
            {"traceparent": GIVEN, "tracestate": "a=1,b=x y"},
            {"traceparent": GIVEN, "tracestate": "a=1,b=x y"},
        ),
        ({"traceparent": f"01-{TRACE}-{PARENT}-00-more"}, {"traceparent": f"01-{TRACE}-{PARENT}-00-more"}),
        ({"traceparent": f"{GIVEN}-more", "tracestate": "a=1"}, {}),
        ({"traceparent": f"ff-{TRACE}-{PARENT}-01"}, {}),
        ({"traceparent": f"00-{'0' * 32}-{PARENT}-01"}, {}),
        ({"traceparent": f"00-{TRACE}-{'0' * 16}-01"}, {}),
        ({"traceparent": GIVEN.upper()}, {}),
        ({"traceparent": GIVEN, "tracestate": "a=é"}, {"traceparent": GIVEN}),
        ({"traceparent": GIVEN, "tracestate": "a=" + "1" * 5000}, {"traceparent": GIVEN}),
        ({"tracestate": "a=1"}, {}),
        ({}, {}),
    ],
)
async def test_a_trace_goes_on(tmp_path: Path, up: Upstream, sent: dict[str, str], got: dict[str, str]) -> None:
    """A caller's trace context reaches the upstream as it came; what is none, and a state without it, does not."""
    async with router(tmp_path, {"model_list": [deployment("m", up)]}) as door:
        assert (await door.post(model="m", headers=sent)).status == 200
    assert _told(up) == [got]


@pytest.mark.parametrize("otel", [False, True])
async def test_a_trace_goes_every_way(tmp_path: Path, up: Upstream, collector: Collector, otel: bool) -> None:
    """Streams, a fallback group, a relay's halves and what is passed through: all asked are told of the trace."""

    async def fails(seen: Seen) -> web.StreamResponse:
        return failure(500)

    up.answers["bad"] = fails
    relay = {"model_name": "r", "relay_params": {"sharer": "m", "receiver": "m"}}
    config = {
        "model_list": [deployment("m", up), deployment("bad", up), relay],
        "router_settings": {"num_retries": 0, "fallbacks": [{"bad": ["m"]}]},
    }
    if otel:
        config["otel"] = {"endpoint": collector.base}
    async with router(tmp_path, config) as door:
        for path, model in (("chat/completions", "bad"), ("chat/completions", "r"), ("audio/speech", "m")):
            answer = await door.post(f"/v1/{path}", model=model, input="x", headers={"traceparent": GIVEN})
            assert answer.status == 200
        await door.post(model="m", stream=True, headers={"traceparent": GIVEN})
    told = [headers.get("traceparent", "") for headers in _told(up)]
    assert [value[:36] for value in told] == [GIVEN[:36]] * 6
    spans = {collector.spans[name].span_id.hex() for name in collector.spans if name.startswith("POST")}
    assert spans <= {value[36:52] for value in told}
    assert bool(spans) is otel
    assert (GIVEN in told) is not otel


@pytest.mark.parametrize("sample", [0.0, 1.0])
async def test_a_trace_begins_here(tmp_path: Path, up: Upstream, collector: Collector, sample: float) -> None:
    """Without a trace of the caller's the router begins one, and says whether it is sampled."""
    otel = {"endpoint": collector.base, "sample": sample}
    async with router(tmp_path, {"model_list": [deployment("m", up)], "otel": otel}) as door:
        await door.post(model="m", headers={"tracestate": "a=1"})
    [told] = _told(up)
    version, trace, parent, flags = told["traceparent"].split("-")
    assert (version, int(flags, 16) & 1, len(trace), len(parent)) == ("00", int(sample), 32, 16)
    assert "tracestate" not in told
    if sample:
        outer = collector.spans["POST /chat/completions"]
        assert (outer.trace_id.hex(), outer.span_id.hex()) == (trace, parent)


@pytest.mark.parametrize("otel", [False, True])
async def test_a_trace_that_stays(tmp_path: Path, up: Upstream, collector: Collector, otel: bool) -> None:
    """`forward_traceparent_to_llm_provider: false` tells upstreams nothing."""
    config: dict[str, Any] = {
        "model_list": [deployment("m", up)],
        "litellm_settings": {"forward_traceparent_to_llm_provider": False},
    }
    if otel:
        config["otel"] = {"endpoint": collector.base}
    async with router(tmp_path, config) as door:
        await door.post(model="m", headers={"traceparent": GIVEN, "tracestate": "a=1"})
    assert _told(up) == [{}]


def _told(up: Upstream) -> list[dict[str, str]]:
    return [{k: v for k, v in seen.headers.items() if k.startswith("trace")} for seen in up.seen]
