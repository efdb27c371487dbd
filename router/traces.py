"""OpenTelemetry traces by the GenAI conventions: one span for a request, one below it for the deployment that answered.

What they say is taken from what the log event tells too, so they hold no key and no content. The packages are imported
where `otel` is configured, and then only; without it a caller's trace goes on to upstreams as it came.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from router.source import ConfigError
from shapes import Field
from workers.config import Config

if TYPE_CHECKING:
    from router.call import Call
    from router.course import Course
    from router.deployments import Deployment
    from router.telemetry import Event

_OPERATIONS = {
    "/chat/completions": "chat",
    "/completions": "text_completion",
    "/embeddings": "embeddings",
    "/responses": "chat",
    "/messages": "chat",
    "/images/generations": "generate_content",
    "/audio/speech": "generate_content",
}
_PROVIDERS = {
    "mistral": "mistral_ai",
    "xai": "x_ai",
    "bedrock": "aws.bedrock",
    "azure": "azure.ai.openai",
    "azure_ai": "azure.ai.inference",
    "vertex_ai": "gcp.vertex_ai",
    "gemini": "gcp.gemini",
}
"""LiteLLM's names that the conventions write otherwise."""


_IDS = r"-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
_TRACEPARENT = re.compile(rf"00{_IDS}|(?!00|ff)[0-9a-f]{{2}}{_IDS}(?:-[!-~]*)?")
"""W3C Trace Context; versions to come may have more at the end."""
_TRACESTATE = re.compile(r"[ -~\t]{1,2048}")
_SENDS_S = 2.0
"""Seconds for one batch, its repetitions included: a collector that is away delays the router's end by no more."""


class OtelConfig(Config):
    """`otel`: where traces are sent."""

    endpoint: str = Field(pattern=r"^https?://[^\s/]+")
    """An OTLP/HTTP collector; `/v1/traces` is added where it is not there."""
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    service_name: str = "twolane"
    sample: float = Field(1.0, ge=0, le=1)
    """Share of the requests that are traced where the caller's `traceparent` does not say."""


def follow(call: Call, traces: Traces | None, *, onward: bool) -> None:
    """Join the caller's trace, or begin one where traces are sent; `onward`: whoever is asked is told of it."""
    said: dict[str, str] = {}
    if call.trace is not None and _TRACEPARENT.fullmatch(call.trace):
        said["traceparent"] = call.trace
        if call.trace_state is not None and _TRACESTATE.fullmatch(call.trace_state):
            said["tracestate"] = call.trace_state
    told = said if traces is None else traces.begin(call, said)
    call.onward = told if onward and told else None


class Traces:
    """Takes ended requests, and sends their spans from a thread of its own."""

    def __init__(self, config: OtelConfig) -> None:
        """Raises ConfigError where the packages are not installed."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
            from opentelemetry.trace import SpanKind, Status, StatusCode
            from opentelemetry.trace.propagation import set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError(f"otel: {error.name} is missing; pip install 'twolane-router[otel]'") from None
        base = config.endpoint.rstrip("/")
        url = base if base.endswith("/v1/traces") else f"{base}/v1/traces"
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(config.sample)),
            resource=Resource.create({"service.name": config.service_name}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(OTLPSpanExporter(url, headers=config.headers, timeout=_SENDS_S))
        )
        self._tracer = self._provider.get_tracer("twolane")
        self._context = TraceContextTextMapPropagator()
        self._below = set_span_in_context
        self._server, self._client = SpanKind.SERVER, SpanKind.CLIENT
        self._failed = Status(StatusCode.ERROR)

    def begin(self, call: Call, above: Mapping[str, str]) -> dict[str, str]:
        """Open the request's span below the caller's; the headers for those that are to stand below it."""
        ago = time.perf_counter() - call.started
        method = "POST" if call.raw is None else call.raw.method
        call.span = self._tracer.start_span(
            f"{method} {_door(call.path)}",
            self._context.extract(above),
            self._server,
            start_time=time.time_ns() - int(ago * 1e9),
        )
        told: dict[str, str] = {}
        self._context.inject(told, self._below(call.span))
        return told

    def finished(self, course: Course, event: Event, deployment: Deployment | None) -> None:
        """Close the span of a request; `deployment` is the one that answered."""
        call, span = course.call, course.call.span
        if span is None or not span.is_recording():
            return
        now, clock = time.time_ns(), time.perf_counter()
        span.set_attributes(_request(course, event, "POST" if call.raw is None else call.raw.method))
        failed = event.outcome in ("error", "cut")
        if deployment is not None:
            operation = _OPERATIONS.get(call.path, _door(call.path).strip("/"))
            name = f"{operation} {deployment.upstream_model}"
            asked = now - int((clock - course.asked) * 1e9)
            inner = self._tracer.start_span(
                name, self._below(span), self._client, _answer(operation, event, deployment), None, asked
            )
            if failed:
                inner.set_status(self._failed)
            inner.end(now)
        if failed:
            span.set_status(self._failed)
        span.end(now)

    async def close(self) -> None:
        """Send what waits."""
        await asyncio.to_thread(self._provider.shutdown)


def _door(path: str) -> str:
    """A path without ids, so that the number of span names is bounded."""
    return path if path in _OPERATIONS else "/" + path.split("/")[1]


def _request(course: Course, event: Event, method: str) -> dict[str, Any]:
    told = {
        "http.request.method": method,
        "http.route": _door(course.call.path),
        "http.response.status_code": event.status,
        "error.type": event.error,
        "twolane.request": event.request_id,
        "twolane.tenant": event.tenant,
        "twolane.model": event.model,
        "twolane.deployment": event.deployment,
        "twolane.transport": event.transport,
        "twolane.reason": event.reason,
        "twolane.outcome": event.outcome,
        "twolane.limit": event.limit,
        "twolane.retries": event.retries,
        "twolane.fallbacks": event.fallbacks,
        "twolane.tried": [attempt.deployment for attempt in course.tries] or None,
        "twolane.cost_usd": event.cost,
        "twolane.kv.reused_tokens": event.kv_reused,
    }
    return {name: value for name, value in told.items() if value is not None}


def _answer(operation: str, event: Event, deployment: Deployment) -> dict[str, Any]:
    provider = deployment.provider
    told = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _PROVIDERS.get(provider, provider) or "twolane",
        "gen_ai.request.model": deployment.upstream_model,
        "gen_ai.request.stream": event.stream,
        "gen_ai.response.time_to_first_chunk": None if event.ttft_ms is None else event.ttft_ms / 1000,
        "gen_ai.usage.input_tokens": event.prompt_tokens,
        "gen_ai.usage.output_tokens": event.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": event.cached_tokens,
        "error.type": event.error,
        "twolane.deployment": deployment.id,
        "twolane.transport": event.transport,
    }
    return {name: value for name, value in told.items() if value is not None}
