"""What is seen from outside: Prometheus metrics and one log event per finished request.

Labels take their values from the configuration; whatever else a caller makes up is counted under `other`, so the
number of series is bounded. Counters are plain numbers in dicts: a finished request costs some microseconds, and
text is made when it is asked for. Neither metrics nor events hold keys or content.
"""

from __future__ import annotations

import logging
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

import msgspec
import structlog

from router.log_lines import Sink

Outcome = Literal["ok", "refused", "error", "cut", "abandoned"]
OUTCOMES: dict[Outcome, str] = {
    "ok": "answered whole",
    "refused": "the caller's mistake, a limit or policy: 4xx",
    "error": "failed before the first frame: 5xx",
    "cut": "the stream began and ended with an error event",
    "abandoned": "the caller hung up",
}
OTHER = "other"
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the latency histograms in seconds."""
_MOST_REASONS = 100


class Event(msgspec.Struct, gc=False, omit_defaults=True):
    """One finished request. What is not known stays None and is left out of the log."""

    request_id: str
    tenant: str
    model: str
    outcome: Outcome
    status: int
    total_ms: float
    stream: bool = msgspec.field(default_factory=bool)  # what a factory makes is always written
    deployment: str | None = None
    transport: str | None = None
    reason: str | None = None
    """Code of the decision."""
    error: str | None = None
    """Code of what went wrong."""
    limit: str | None = None
    """The tenant's limit that refused it."""
    ttft_ms: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    usage: str | None = None
    """`unreadable`: the upstream told what no answer can have used."""
    hint: str | None = None
    """`left_out`: the receiver of a relay had no room for it, and answered alone."""
    kv_reused: int | None = None
    kv_total: int | None = None
    retries: int = msgspec.field(default_factory=int)
    fallbacks: int = msgspec.field(default_factory=int)
    ttft_p90_ms: float | None = None
    """What was predicted; a finished answer beyond it is counted as missed."""
    total_p90_ms: float | None = None
    cost: float | None = None


Ended = tuple[Event, bytes, float]
"""A finished request, the same as JSON, and when (Unix seconds)."""


@dataclass(slots=True)
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds


@dataclass(slots=True)
class _Series:
    """All counters of one deployment."""

    id: str
    transport: str
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    ttft: _Histogram = field(default_factory=_Histogram)
    total: _Histogram = field(default_factory=_Histogram)
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("prompt", "completion", "cached"), 0))
    kv: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("reused", "computed"), 0))
    checked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("ttft", "total"), 0))
    missed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("ttft", "total"), 0))
    retries: int = 0
    cooldowns: int = 0
    in_flight: int = 0


Sample = tuple[Mapping[str, str], float]


@dataclass(frozen=True, slots=True)
class _Watched:
    kind: Literal["gauge", "counter"]
    name: str
    help: str
    read: Callable[[], Iterable[Sample]]


class Metrics:
    """All metrics of one router."""

    def __init__(self, deployments: Iterable[tuple[str, str, str]] = (), tenants: Iterable[str] = ()) -> None:
        """`deployments` as (id, model group, transport)."""
        self._series: dict[str, _Series] = {OTHER: _Series(OTHER, OTHER)}
        self._models: set[str] = set()
        self._tenants: set[str] = set()
        self._requests: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self._fallbacks: defaultdict[str, int] = defaultdict(int)
        self._limited: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._decisions: dict[str, int] = {}
        self._watched: list[_Watched] = []
        self.before: Callable[[], None] | None = None
        """Called before text is made: counts requests that have just ended."""
        self.configure(deployments, tenants)

    def configure(self, deployments: Iterable[tuple[str, str, str]], tenants: Iterable[str]) -> None:
        """Take in what a (re)loaded configuration names; counters go on, names that left keep theirs."""
        for id, model, transport in deployments:
            self._models.add(model)
            if id not in self._series:
                self._series[id] = _Series(id, transport)
        self._tenants.update(tenants)

    def watch(
        self, name: str, help: str, read: Callable[[], Iterable[Sample]], kind: Literal["gauge", "counter"] = "gauge"
    ) -> None:
        """A metric another part keeps: `read` gives (labels, value) when text is asked for, bounded by config too."""
        self._watched.append(_Watched(kind, f"twolane_{name}", help, read))

    def begin(self, deployment: str) -> None:
        """A deployment is being asked; every `begin` is followed by one `end`."""
        (self._series.get(deployment) or self._series[OTHER]).in_flight += 1

    def end(self, deployment: str) -> None:
        """It is not any more, whatever came of it."""
        (self._series.get(deployment) or self._series[OTHER]).in_flight -= 1

    def in_flight(self, deployment: str) -> int:
        """Requests a deployment runs now."""
        return (self._series.get(deployment) or self._series[OTHER]).in_flight

    def retried(self, deployment: str) -> None:
        """The same deployment was asked again."""
        self._of(deployment).retries += 1

    def cooled(self, deployment: str) -> None:
        """A deployment was benched."""
        self._of(deployment).cooldowns += 1

    def finish(self, event: Event) -> None:
        """Count a request at its very end."""
        tenant = event.tenant if event.tenant in self._tenants else OTHER
        model = event.model if event.model in self._models else OTHER
        self._requests[tenant, model, event.outcome] += 1
        if event.fallbacks:
            self._fallbacks[model] += event.fallbacks
        if event.limit is not None:
            self._limited[tenant, event.limit] += 1
        if event.reason in self._decisions:
            self._decisions[event.reason] += 1
        elif event.reason is not None:
            self._decided(event.reason)
        if event.deployment is not None:
            _count(self._of(event.deployment), event)

    def _of(self, deployment: str) -> _Series:
        return self._series.get(deployment) or self._series[OTHER]

    def _decided(self, reason: str) -> None:
        if len(self._decisions) >= _MOST_REASONS:
            reason = OTHER
        self._decisions[reason] = self._decisions.get(reason, 0) + 1

    def render(self) -> bytes:
        """Prometheus text, version 0.0.4."""
        if self.before is not None:
            self.before()
        page = _Page()
        page.family("counter", "twolane_requests_total", "Finished requests by how they ended.")
        for (tenant, model, outcome), count in self._requests.items():
            page.sample("twolane_requests_total", {"tenant": tenant, "model": model, "outcome": outcome}, count)
        page.family("counter", "twolane_decisions_total", "Decisions by reason code.")
        for reason, count in self._decisions.items():
            page.sample("twolane_decisions_total", {"reason": reason}, count)
        page.family("counter", "twolane_fallbacks_total", "Model groups that were asked after the first.")
        for model, count in self._fallbacks.items():
            page.sample("twolane_fallbacks_total", {"model": model}, count)
        page.family("counter", "twolane_limited_total", "Requests refused by a limit of the tenant.")
        for (tenant, limit), count in self._limited.items():
            page.sample("twolane_limited_total", {"tenant": tenant, "limit": limit}, count)
        self._render_deployments(page)
        for watched in self._watched:
            page.family(watched.kind, watched.name, watched.help)
            for labels, value in watched.read():
                page.sample(watched.name, labels, value)
        return page.encode()

    def _render_deployments(self, page: _Page) -> None:
        used = [s for s in self._series.values() if s.id != OTHER or any(s.outcomes.values())]

        def counters(name: str, help: str, label: str, read: Callable[[_Series], Mapping[str, int]]) -> None:
            page.family("counter", name, help)
            for s in used:
                for key, count in read(s).items():
                    page.sample(name, {"deployment": s.id, "transport": s.transport, label: key}, count)

        def single(kind: str, name: str, help: str, read: Callable[[_Series], int]) -> None:
            page.family(kind, name, help)
            for s in used:
                page.sample(name, {"deployment": s.id, "transport": s.transport}, read(s))

        name = "twolane_deployment_requests_total"
        counters(name, "Finished requests by the deployment that answered.", "outcome", lambda s: s.outcomes)
        counters("twolane_tokens_total", "Tokens as answers told them.", "kind", lambda s: s.tokens)
        counters("twolane_kv_tokens_total", "Prompt tokens of the cache lane by origin.", "origin", lambda s: s.kv)
        name = "twolane_estimates_checked_total"
        counters(name, "Whole answers whose latency had been predicted.", "of", lambda s: s.checked)
        counters("twolane_estimates_missed_total", "Those beyond the predicted p90.", "of", lambda s: s.missed)
        single("counter", "twolane_retries_total", "Attempts after the first.", lambda s: s.retries)
        single("counter", "twolane_cooldowns_total", "Times it was benched.", lambda s: s.cooldowns)
        single("gauge", "twolane_in_flight", "Requests it runs now.", lambda s: s.in_flight)
        name = "twolane_time_to_first_token_seconds"
        page.family("histogram", name, "From the request's first byte to the answer's first frame.")
        for s in used:
            page.histogram(name, {"deployment": s.id, "transport": s.transport}, s.ttft)
        page.family("histogram", "twolane_request_seconds", "From the request's first byte to the answer's last.")
        for s in used:
            page.histogram("twolane_request_seconds", {"deployment": s.id, "transport": s.transport}, s.total)


def _count(series: _Series, event: Event) -> None:
    series.outcomes[event.outcome] += 1
    tokens = series.tokens
    tokens["prompt"] += event.prompt_tokens or 0
    tokens["completion"] += event.completion_tokens or 0
    tokens["cached"] += event.cached_tokens or 0
    if event.kv_total is not None:
        reused = event.kv_reused or 0
        series.kv["reused"] += reused
        series.kv["computed"] += max(event.kv_total - reused, 0)
    if event.ttft_ms is not None:
        series.ttft.add(event.ttft_ms / 1000.0)
    if event.outcome != "ok":
        return
    series.total.add(event.total_ms / 1000.0)
    if event.ttft_p90_ms is not None and event.ttft_ms is not None:
        series.checked["ttft"] += 1
        series.missed["ttft"] += event.ttft_ms > event.ttft_p90_ms
    if event.total_p90_ms is not None:
        series.checked["total"] += 1
        series.missed["total"] += event.total_ms > event.total_p90_ms


class _Page:
    """Prometheus text in the making."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def family(self, kind: str, name: str, help: str) -> None:
        self._lines += (f"# HELP {name} {help}", f"# TYPE {name} {kind}")

    def sample(self, name: str, labels: Mapping[str, str], value: float) -> None:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        self._lines.append(f"{name}{{{inside}}} {value}" if inside else f"{name} {value}")

    def histogram(self, name: str, labels: Mapping[str, str], of: _Histogram) -> None:
        below = 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), of.counts, strict=True):
            below += count
            self.sample(f"{name}_bucket", {**labels, "le": bound}, below)
        self.sample(f"{name}_sum", labels, of.total)
        self.sample(f"{name}_count", labels, below)

    def encode(self) -> bytes:
        return "\n".join([*self._lines, ""]).encode()


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_log = structlog.get_logger("twolane.request")


def log_requests(ended: Iterable[Ended]) -> None:
    """Write the one event of each: `warning` where something failed, else `info`.

    In one system call where nobody has to render them for people.
    """
    sink = structlog.get_config()["logger_factory"]
    if isinstance(sink, Sink) and sink.json:
        sink.write([_line(*entry) for entry in ended if _level(entry[0]) >= sink.level])
        return
    for event, _, _ in ended:
        write = _log.info if _level(event) == logging.INFO else _log.warning
        write("request", **as_dict(event))


def _level(event: Event) -> int:
    return logging.WARNING if event.outcome in ("error", "cut") else logging.INFO


def _line(event: Event, said: bytes, at: float) -> bytes:
    level = b"info" if _level(event) == logging.INFO else b"warning"
    moment = msgspec.json.encode(datetime.fromtimestamp(at, UTC))
    return b'{"event":"request","level":"%b","timestamp":%b,%b' % (level, moment, said[1:])


def as_dict(event: Event) -> dict[str, Any]:
    """The event as it is logged."""
    return {key: value for key, value in msgspec.structs.asdict(event).items() if value is not None}


def configure_logging(
    level: str = "info", *, format: Literal["auto", "json", "console"] = "auto", stream: TextIO | None = None
) -> None:
    """One JSON object per line to stderr, or lines for people on a terminal; libraries' logs take the same way."""
    out = sys.stderr if stream is None else stream
    json = format == "json" or (format == "auto" and not out.isatty())
    number = logging.getLevelNamesMapping()[level.upper()]
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: structlog.typing.Processor = (
        structlog.processors.JSONRenderer(serializer=_dumps) if json else structlog.dev.ConsoleRenderer()
    )
    failures: list[structlog.typing.Processor] = [structlog.processors.format_exc_info] if json else []
    structlog.configure(
        processors=[*shared, *failures, render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=Sink(out, number, json=json),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *failures, render],
            foreign_pre_chain=shared,
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(number, logging.WARNING) if number > logging.DEBUG else number)


def _dumps(value: Any, **_: Any) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()
