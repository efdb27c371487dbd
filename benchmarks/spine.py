"""TTFT of both lanes, cold and warm, against a running router: `python -m benchmarks.spine [--port 4000]`.

Each round asks a fresh text twice on each lane, streamed, greedy; medians and ratios of one run.
"""

from __future__ import annotations

import argparse
import statistics
import time
import uuid

from twolane import TwoLane, lane_of

WORDS = "The harbour keeps a table of tides, hour by hour and day by day, for every boat that comes and goes. "


def ttft(client: TwoLane, lane: str, text: str) -> tuple[float, int, int]:
    """Milliseconds to the first content, prompt tokens reused, prompt tokens in all."""
    began = time.perf_counter()
    stream = client.lane(transport=lane).chat.completions.create(  # type: ignore[arg-type]
        model="assistant", messages=[{"role": "user", "content": text}], temperature=0, max_tokens=4, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    first, cached, prompt = 0.0, 0, 0
    for chunk in stream:
        if not first and chunk.choices and chunk.choices[0].delta.content:
            first = (time.perf_counter() - began) * 1e3
        if chunk.usage is not None:
            prompt = chunk.usage.prompt_tokens
            details = chunk.usage.prompt_tokens_details
            cached = (details.cached_tokens or 0) if details else 0
    assert lane_of(stream).transport == lane
    return first, cached, prompt


def main() -> None:
    """A table by prompt length."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--port", type=int, default=4000)
    options.add_argument("--rounds", type=int, default=5)
    asked = options.parse_args()
    print(f"{'prompt tokens':>14} {'lane':>6} {'cold ms':>9} {'warm ms':>9} {'reused':>7} {'cold/warm':>10}")
    with TwoLane(base_url=f"http://127.0.0.1:{asked.port}/v1", api_key="sk-lab", max_retries=0) as client:
        for repeat in (4, 20, 44):
            for lane in ("cache", "text"):
                cold, warm, reused, tokens = [], [], 0, 0
                for _ in range(asked.rounds):
                    text = f"{uuid.uuid4()} {WORDS * repeat}"
                    cold.append(ttft(client, lane, text)[0])
                    again, reused, tokens = ttft(client, lane, text)
                    warm.append(again)
                a, b = statistics.median(cold), statistics.median(warm)
                print(f"{tokens:>14} {lane:>6} {a:>9.0f} {b:>9.0f} {reused:>7} {a / b:>10.1f}")


if __name__ == "__main__":
    main()
