"""Asks the running router as three tenants, and shows lane, reason, time to first token and answer side by side.

Starts a router of its own when none listens, and ends it afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
from twolane import TwoLane, lane_of

TENANTS = ("lab", "bank", "kiosk")
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
DOCUMENT = (
    "Answer from this document.\n\nMarta Velik is a violin maker from Tartu. She is 47 years old and keeps bees. "
    "Her favourite colour is ochre. Ivo Sandrel is a ferry pilot from Bergen. He is 31 years old and collects maps."
)
READING = [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": "Where is Ivo Sandrel from?"}]


@dataclass(frozen=True)
class Row:
    """One answer, as the caller saw it."""

    model: str
    tenant: str
    lane: str
    reason: str
    reused: str
    ttft_ms: float
    answer: str


def ask(base: str, tenant: str, model: str, messages: list[dict[str, str]]) -> Row:
    """One streamed answer through the SDK."""
    with TwoLane(base_url=f"{base}/v1", api_key=f"sk-{tenant}", max_retries=0, timeout=120) as client:
        began = time.perf_counter()
        first = 0.0
        text = ""
        stream = client.chat.completions.create(
            model=model, messages=messages, temperature=0, max_tokens=24, stream=True
        )
        for chunk in stream:
            piece = chunk.choices[0].delta.content if chunk.choices else None
            if piece:
                first = first or time.perf_counter()
                text += piece
        lane = lane_of(stream)
    reused = f"{lane.kv_reused}/{lane.kv_total}" if lane.kv_total else "-"
    return Row(model, tenant, lane.transport or "?", lane.reason or "?", reused, (first - began) * 1e3, text.strip())


def show(rows: list[Row]) -> None:
    """A table on standard output."""
    head = ("model", "tenant", "lane", "reason", "KV reused", "TTFT ms", "answer")
    cells = [(r.model, r.tenant, r.lane, r.reason, r.reused, f"{r.ttft_ms:.0f}", r.answer) for r in rows]
    widths = [max(len(row[i]) for row in (head, *cells)) for i in range(len(head))]
    for row in (head, *cells):
        print("  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True)).rstrip())


@contextlib.contextmanager
def router(base: str, config: str, port: int) -> Iterator[None]:
    """The router that listens already, else one of our own."""
    process = None
    if not alive(base):
        print(
            f"no router on port {port} yet: starting one (the first start converts the bundled model)", file=sys.stderr
        )
        process = subprocess.Popen(
            [sys.executable, "-m", "router.cli", "serve", "--config", config, "--port", str(port)]
        )
    try:
        wait_ready(base, process)
        yield
    finally:
        if process is not None:
            process.terminate()
            process.wait()


def alive(base: str) -> bool:
    """Whether a router answers there."""
    try:
        return httpx.get(f"{base}/health/liveliness", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def wait_ready(base: str, process: subprocess.Popen[bytes] | None) -> None:
    """Until the worker holds all that the config names; five minutes at most."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            sys.exit("the router ended; its last lines above say why")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{base}/health/readiness", timeout=2).status_code == 200:
                return
        time.sleep(0.5)
    sys.exit("the workers were not ready within five minutes")


def main() -> None:
    """Twice each, so that the second shows what was reused."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--port", type=int, default=4000)
    options.add_argument("--config", default="config.example.yaml")
    asked = options.parse_args()
    base = f"http://127.0.0.1:{asked.port}"
    with router(base, asked.config, asked.port):
        rows = [ask(base, tenant, "assistant", QUESTION) for tenant in TENANTS for _ in range(2)]
        rows += [ask(base, "lab", "reader", READING) for _ in range(2)]
        show(rows)


if __name__ == "__main__":
    main()
