from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from twolane import TwoLane, lane_of

from router.audit_verify import content, records, verify
from tests.sdk.conftest import Server

CONFIG = """
model_list:
  - model_name: assistant
    litellm_params: {{model: openai/assistant, api_base: "{upstream}", api_key: sk-upstream}}
tenants:
  - {{name: lab, key: sk-lab}}
  - {{name: bank, key: sk-bank, regulated: true, transports: [text]}}
audit: {{dir: audit}}
state_dir: state
store: {{dir: kv}}
"""


@pytest.fixture
def router(server: Server, tmp_path: Path) -> Iterator[str]:
    """`twolane serve` before the small server; its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (tmp_path / "config.yaml").write_text(CONFIG.format(upstream=server.url))
    command = [sys.executable, "-m", "router.cli", "serve", "--config", "config.yaml", "--port", str(port)]
    here = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONWARNINGS": "default"}
    with subprocess.Popen(command, cwd=tmp_path, env=here, stdout=subprocess.DEVNULL) as process:
        try:
            wait_for(f"http://127.0.0.1:{port}/health/liveliness", process)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "the router ended"
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:
            time.sleep(0.1)
    pytest.fail("the router never came up")


def test_all_of_it(router: str, tmp_path: Path) -> None:
    """The client and the router agree: lane, decision before and after, refusal; and a regulated call is on record."""
    asked = [{"role": "user", "content": "marker-4711"}]
    with TwoLane(base_url=router, api_key="sk-bank", max_retries=0) as client:
        before = client.decide(model="assistant", messages=asked)
        assert (before.transport, before.ranked) == ("text", (before.chosen,))
        answer = client.chat.completions.create(model="assistant", messages=asked)
        lane = lane_of(answer)
        assert (answer.choices[0].message.content, lane.transport, lane.deployment) == ("hello", "text", before.chosen)
        stream = client.lane(transport="text").chat.completions.create(model="assistant", messages=asked, stream=True)
        assert lane_of(stream).transport == "text"
        assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == "hello"
        assert client.decision(lane.decision).id == lane.decision
        with pytest.raises(openai.APIStatusError) as refused:
            client.lane(transport="cache").chat.completions.create(model="assistant", messages=asked)
        assert lane_of(refused.value).decision
    with TwoLane(base_url=router, api_key="sk-lab", max_retries=0) as other, pytest.raises(openai.NotFoundError):
        other.decision(lane.decision)
    report = verify(tmp_path / "audit", "bank")
    assert (report.faults, report.open_intents) == ([], [])
    # A stream that takes its time is recorded in pieces.
    kept = [r for r in records(tmp_path / "audit", "bank") if "id" in r.body and r.body["kind"] != "chunk"]
    assert [r.body["kind"] for r in kept] == ["intent", "outcome", "intent", "outcome", "outcome"]
    texts = [content(tmp_path / "audit", "bank", report.chain, r) for r in kept]
    assert all("marker-4711" in texts[n]["request"] for n in (0, 2, 4))
    assert "hello" in texts[1]["answer"]
    assert "hel" in texts[3]["answer"]
    assert b"marker-4711" not in b"".join(p.read_bytes() for p in (tmp_path / "audit").rglob("*") if p.is_file())
