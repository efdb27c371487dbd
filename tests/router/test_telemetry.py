from __future__ import annotations

import io
import json
import logging
import re
import time
from collections.abc import Iterator

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.telemetry import OUTCOMES, Event, Metrics, Outcome, as_dict, configure_logging, log_requests

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (-?[0-9.e+-]+)')
OK = Event("dec_1", "lab", "assistant", "ok", 200, 1500.0, True, "d1", "cache", "cache_preferred", ttft_ms=30.0)


def made() -> Metrics:
    return Metrics([("d1", "assistant", "cache"), ("d2", "assistant", "text")], ["lab", "bank"])


def samples(metrics: Metrics) -> dict[str, float]:
    """Every series by its full name; each line is well formed, each family declared before its samples."""
    found: dict[str, float] = {}
    declared: set[str] = set()
    for line in metrics.render().decode().splitlines():
        if line.startswith("# TYPE"):
            name = line.split()[2]
            assert name not in declared
            declared.add(name)
        elif not line.startswith("#"):
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert re.sub(r"_(bucket|sum|count)$", "", match[1]) in declared or match[1] in declared
            series = line.rpartition(" ")[0]
            assert series not in found
            found[series] = float(match[3])
    return found


def total(found: dict[str, float], *parts: str) -> float:
    return sum(value for series, value in found.items() if all(part in series for part in parts))


@pytest.mark.parametrize("outcome", list(OUTCOMES))
def test_the_end_is_counted(outcome: Outcome) -> None:
    """A request counts under how it ended, for its tenant and for its deployment, and nowhere else."""
    metrics = made()
    metrics.finish(replace(OK, outcome=outcome))
    found = samples(metrics)
    assert found[f'twolane_requests_total{{tenant="lab",model="assistant",outcome="{outcome}"}}'] == 1
    assert total(found, "twolane_requests_total") == 1
    assert total(found, "twolane_deployment_requests_total", 'deployment="d1"', f'outcome="{outcome}"') == 1
    assert total(found, "twolane_deployment_requests_total") == 1
    assert found['twolane_decisions_total{reason="cache_preferred"}'] == 1


def test_tokens_kv_and_misses() -> None:
    """Tokens, reused KV, fallbacks, retries, cooldowns, limits and missed estimates are each counted."""
    metrics = made()
    event = replace(OK, prompt_tokens=100, completion_tokens=20, cached_tokens=60, kv_reused=60, kv_total=100)
    metrics.finish(replace(event, ttft_p90_ms=20.0, total_p90_ms=2000.0, fallbacks=2))
    metrics.finish(Event("dec_2", "bank", "assistant", "refused", 429, 1.0, limit="rpm_limit"))
    metrics.retried("d2")
    metrics.cooled("d2")
    found = samples(metrics)
    cache = 'deployment="d1",transport="cache"'
    assert found[f'twolane_tokens_total{{{cache},kind="prompt"}}'] == 100
    assert found[f'twolane_tokens_total{{{cache},kind="completion"}}'] == 20
    assert found[f'twolane_tokens_total{{{cache},kind="cached"}}'] == 60
    assert found[f'twolane_kv_tokens_total{{{cache},origin="reused"}}'] == 60
    assert found[f'twolane_kv_tokens_total{{{cache},origin="computed"}}'] == 40
    assert found[f'twolane_estimates_missed_total{{{cache},of="ttft"}}'] == 1
    assert found[f'twolane_estimates_missed_total{{{cache},of="total"}}'] == 0
    assert found[f'twolane_estimates_checked_total{{{cache},of="total"}}'] == 1
    assert found['twolane_fallbacks_total{model="assistant"}'] == 2
    assert found['twolane_limited_total{tenant="bank",limit="rpm_limit"}'] == 1
    assert found['twolane_retries_total{deployment="d2",transport="text"}'] == 1
    assert found['twolane_cooldowns_total{deployment="d2",transport="text"}'] == 1


def test_in_flight() -> None:
    """Requests under way are a gauge that returns to nought."""
    metrics = made()
    metrics.begin("d1")
    metrics.begin("d1")
    metrics.end("d1")
    assert metrics.in_flight("d1") == 1
    assert total(samples(metrics), "twolane_in_flight") == 1
    metrics.end("d1")
    assert total(samples(metrics), "twolane_in_flight") == 0


@given(times=st.lists(st.floats(0, 500_000), min_size=1, max_size=30))
def test_histogram_is_cumulative(times: list[float]) -> None:
    """Buckets never fall, the last one holds everything, and each holds just those within its bound."""
    metrics = made()
    for ms in times:
        metrics.finish(replace(OK, total_ms=ms))
    found = samples(metrics)
    name = 'twolane_request_seconds_bucket{deployment="d1",transport="cache",le="'
    buckets = {k.removeprefix(name).rstrip('"}'): v for k, v in found.items() if k.startswith(name)}
    counts = list(buckets.values())
    assert counts == sorted(counts)
    assert counts[-1] == buckets["+Inf"] == len(times)
    for bound, count in list(buckets.items())[:-1]:
        assert count == sum(ms / 1000.0 <= float(bound) for ms in times)
    assert total(found, "twolane_request_seconds_sum", '"d1"') == pytest.approx(sum(times) / 1000.0)


def test_made_up_names_share_one_series() -> None:
    """A thousand names that no configuration holds make one series, and none of them is printed."""
    metrics = made()
    metrics.finish(replace(OK, tenant="x", model="x", deployment="x", outcome="refused"))
    before = samples(metrics)
    for i in range(1000):
        event = replace(OK, tenant=f"junk-{i}", model=f"junk-{i}", deployment=f"junk-{i}", outcome="refused")
        metrics.finish(event)
    after = samples(metrics)
    assert set(after) == set(before)
    assert after['twolane_requests_total{tenant="other",model="other",outcome="refused"}'] == 1001


def test_reload_keeps_counts() -> None:
    """A reload adds names and loses no count."""
    metrics = made()
    metrics.finish(OK)
    metrics.configure([("d1", "assistant", "cache"), ("d3", "new", "text")], ["lab", "kiosk"])
    metrics.finish(replace(OK, tenant="kiosk", model="new", deployment="d3"))
    found = samples(metrics)
    assert total(found, "twolane_requests_total", 'tenant="lab"') == 1
    assert total(found, "twolane_requests_total", 'tenant="kiosk"', 'model="new"') == 1


def test_labels_are_escaped() -> None:
    """Quotes, backslashes and line ends in configured names do not break the page."""
    odd = 'a"b\\c\nd'
    metrics = Metrics([(odd, odd, "text")], [odd])
    metrics.finish(replace(OK, tenant=odd, model=odd, deployment=odd))
    assert total(samples(metrics), r'tenant="a\"b\\c\nd"') == 1


def test_watched() -> None:
    """A metric that another part keeps is read when the page is made."""
    metrics, value = made(), [1.0]
    metrics.watch("redis_up", "Whether limits are shared.", lambda: [({}, value[0])])
    metrics.watch("workers", "By state.", lambda: [({"state": "live"}, 2), ({"state": "lost"}, 0)])
    assert samples(metrics)["twolane_redis_up"] == 1
    value[0] = 0.0
    found = samples(metrics)
    assert found["twolane_redis_up"] == 0
    assert found['twolane_workers{state="live"}'] == 2


@pytest.fixture
def logs() -> Iterator[io.StringIO]:
    """A stream that logs go to; what pytest had set is put back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def ended(event: Event) -> None:
    log_requests([(event, msgspec.json.encode(event), time.time())])


def test_one_line_per_request(logs: io.StringIO) -> None:
    """An event is one JSON object with what is known, and a level that tells failures apart."""
    configure_logging("info", format="auto", stream=logs)
    ended(OK)
    ended(replace(OK, outcome="cut", error="upstream_unavailable"))
    first, second = (json.loads(line) for line in logs.getvalue().splitlines())
    assert first["event"] == "request"
    assert first["level"] == "info"
    assert first["ttft_ms"] == 30.0
    assert first["deployment"] == "d1"
    assert "error" not in first
    assert second["level"] == "warning"
    assert second["error"] == "upstream_unavailable"
    assert as_dict(OK).keys() <= first.keys()


def test_libraries_log_the_same_way(logs: io.StringIO) -> None:
    """A library's warning is a JSON line with its traceback inside, and its chatter is left out."""
    configure_logging("info", format="json", stream=logs)
    logging.getLogger("aiohttp").info("chatter")
    try:
        raise KeyError("gone")
    except KeyError:
        logging.getLogger("aiohttp").warning("broken %s", "pipe", exc_info=True)
    (line,) = logs.getvalue().splitlines()
    told = json.loads(line)
    assert told["event"] == "broken pipe"
    assert told["level"] == "warning"
    assert "KeyError" in told["exception"]


def test_console_and_level(logs: io.StringIO) -> None:
    """For people a line is plain text, and a level that is too low is not written."""
    configure_logging("warning", format="console", stream=logs)
    ended(OK)
    assert logs.getvalue() == ""
    ended(replace(OK, outcome="error", status=503))
    assert "503" in logs.getvalue()
    with pytest.raises(KeyError):
        configure_logging("loud", stream=logs)
