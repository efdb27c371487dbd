"""How a worker's process ends."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import httpx
import yaml

from workers import protocol
from workers.client import Registry
from workers.config import RedisConfig
from workers.embedded import EmbeddedRedis


async def _ask(socket: Path, process: asyncio.subprocess.Process, content: str) -> httpx.Response:
    """An answer of the worker, once it is up."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    transport = httpx.AsyncHTTPTransport(uds=str(socket))
    async with (
        asyncio.timeout(90),
        httpx.AsyncClient(
            transport=transport, base_url="http://w", timeout=30, headers={protocol.TENANT: "t"}
        ) as client,
    ):
        while process.returncode is None:
            try:
                answer = await client.post("/v1/chat/completions", json=body)
            except httpx.TransportError:
                answer = None
            if answer is not None and answer.status_code != 404:  # 404: still loading
                return answer
            await asyncio.sleep(0.1)
    raise AssertionError(f"the worker ended with {process.returncode}")


async def _outlast(socket: Path) -> bool:
    """Whether a plain answer arrived that takes longer than a worker waits at its end."""
    body = {"model": "tiny", "prompt": "The tide", "n": 8, "max_tokens": 1900, "ignore_eos": True}
    transport = httpx.AsyncHTTPTransport(uds=str(socket))
    async with httpx.AsyncClient(transport=transport, base_url="http://w", timeout=60) as client:
        try:
            return (await client.post("/v1/completions", json=body)).status_code == 200
        except httpx.TransportError:
            return False


async def test_sigterm_ends_a_worker_in_order(tmp_path: Path, tiny_folder: Path) -> None:
    """Status 0, its heartbeat is withdrawn, what the last answer left to store is on disk, and answers that outlast the
    grace are cut off without an error of the engine."""
    socket, config = tmp_path / "w.sock", tmp_path / "config.yaml"
    with EmbeddedRedis(tmp_path / "redis") as server:
        written = {
            "models": [{"name": "tiny", "model": str(tiny_folder)}],
            "workers": [{"name": "w", "device": "cpu", "threads": 1, "models": ["tiny"], "url": f"unix:{socket}"}],
            "redis": {"url": server.url},
            "store": {"dir": str(tmp_path / "kv")},
        }
        config.write_text(yaml.safe_dump(written))
        command = [sys.executable, "-m", "router.cli", "worker", "--config", str(config), "--name", "w"]
        registry = Registry(RedisConfig(url=server.url))
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        assert process.stderr is not None
        try:
            assert (await _ask(socket, process, "The tide table of the harbour. " * 20)).status_code == 200
            assert [state.name for state in await registry.discover() or []] == ["w"]
            left = [asyncio.create_task(_outlast(socket)) for _ in range(8)]
            await asyncio.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):
                log = (await process.stderr.read()).decode()
                status = await process.wait()
            assert not any(await asyncio.gather(*left))
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert status == 0
        assert "engine failed" not in log
        assert await registry.discover() == []
        await registry.close()
    assert list((tmp_path / "kv").rglob("*.safetensors"))
