"""A full run with a marker in every key and every text, and then a search for markers wherever anything comes out."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis
from aiohttp import web

from router.audit_verify import tenants, verify
from tests.router.gateway import PLAIN, Seen, Upstream, chunk, failure, plain, upstream
from tests.running import Router, serving
from tests.tiny import make_model
from workers.embedded import EmbeddedRedis

CONFIG = """
model_list:
  - {{model_name: local, cache_params: {{pair: twin}}, model_info: {{id: fused}}}}
  - {{model_name: local, local_params: {{model: tiny, order: 1}}, model_info: {{id: alone}}}}
  - {{model_name: far, litellm_params: {{model: openai/far, api_base: "{up}", api_key: sk-marker-upstream}}}}
  - {{model_name: broken, litellm_params: {{model: openai/broken, api_base: "{up}", api_key: sk-marker-upstream}}}}
  - {{model_name: both, relay_params: {{sharer: wise, receiver: far, max_hint_tokens: 8}}}}
  - {{model_name: wise, litellm_params: {{model: openai/wise, api_base: "{up}", api_key: sk-marker-upstream}}}}
models: [{{name: tiny, model: {model}}}]
pairs: [{{name: twin, sharer: tiny, receiver: tiny, fuser: identity}}]
workers: [{{name: w, spawn: true, models: [tiny], pairs: [twin], threads: 1}}]
redis: {{url: embedded}}
store: {{dir: kv}}
audit: {{dir: audit, anchor: {{to: heads, every: 1}}}}
state_dir: state
router_settings: {{num_retries: 0, fallbacks: [{{broken: [far]}}], allowed_fails: 100}}
tenants:
  - {{name: none, key: sk-marker-none, audit: {{content: none, subject: user}}, rpm_limit: 50}}
  - {{name: hash, key: sk-marker-hash, audit: {{content: hash, subject: user}}, sticky: conversation}}
  - {{name: bank, key: sk-marker-bank, regulated: true, audit: {{subject: "header:x-person"}}}}
general_settings: {{master_key: sk-marker-master}}
"""

MARKER = "marker"
TEXT = "marker-prompt of some length, so that blocks of it are kept for whoever asks again, word for word. " * 6


async def answers(seen: Seen) -> web.StreamResponse:
    said = "marker-hint" if seen.body["model"] == "wise" else "marker-answer"
    if seen.body.get("stream"):
        return await seen.stream(chunk(said), chunk(f" {said}"), chunk(finish="stop"))
    choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
    return plain(200, {**PLAIN, "choices": [choice]})


async def fails(seen: Seen) -> web.StreamResponse:
    return failure(500, "marker-error: sk-marker-upstream was used for marker-prompt")


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        state.answers |= {"far": answers, "wise": answers, "broken": fails}
        yield state


class Caller:
    """Asks with markers in every place that a request has, and keeps what came back that should hold none."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.decisions: list[tuple[str, str]] = []
        self.ours: list[str] = []
        """Bodies that are ours: errors, decisions, pages. Headers of all answers."""

    async def ask(self, tenant: str, model: str, *, wrong: bool = False, **more: Any) -> int:
        headers = {
            "authorization": f"Bearer sk-marker-{tenant}",
            "x-session-id": "marker-session",
            "x-person": "marker-user",
        }
        headers |= more.pop("headers", {})
        messages = [{"role": "system", "content": "marker-system"}, {"role": "user", "content": TEXT}]
        body = {"model": model, "messages": messages, "user": "marker-user", "max_tokens": 4, **more}
        if wrong:
            body["temperature"] = "marker-temperature"
        async with self._session.post("/v1/chat/completions", json=body, headers=headers) as response:
            text = await response.text()
            self.ours.append(json.dumps(dict(response.headers)))
            if response.status >= 400 and model in ("local", "nothing"):
                self.ours.append(text)
            if "x-twolane-decision" in response.headers and response.status < 400:
                self.decisions.append((tenant, response.headers["x-twolane-decision"]))
            return response.status

    async def read(self, method: str, path: str, key: str) -> str:
        async with self._session.request(method, path, headers={"authorization": f"Bearer {key}"}) as response:
            text = await response.text()
            assert response.status == 200, (path, text)
            self.ours.append(text)
            return text


async def everything(caller: Caller) -> None:
    """Both lanes, cold and warm, streamed and not, a relay, a fallback, errors of all kinds, a reload, a purge."""
    for tenant in ("none", "hash"):
        for model in ("local", "local", "far", "both", "broken"):
            for stream in (False, True):
                assert await caller.ask(tenant, model, stream=stream) == 200
        hint = {"x-twolane-transport": "text"}
        assert await caller.ask(tenant, "local", headers=hint, seed=7, prompt_cache_key="marker-cache-key") == 200
    for model in ("local", "far", "both"):
        assert await caller.ask("bank", model, stream=True) == 200
    assert await caller.ask("wrong", "local") == 401
    assert await caller.ask("none", "nothing") == 404
    assert await caller.ask("none", "local", wrong=True) == 400
    assert await caller.ask("none", "local", headers={"x-twolane-transport": "marker-lane"}) == 400
    assert await caller.ask("bank", "local", headers={"x-twolane-transport": "cache"}) == 403
    assert await caller.ask("none", "local", max_tokens=10**7) == 400
    await caller.read("POST", "/admin/reload", "sk-marker-master")
    for tenant, id in caller.decisions:
        await caller.read("GET", f"/v1/decisions/{id}", f"sk-marker-{tenant}")
    for path in ("/admin/workers", "/admin/pairs", "/admin/kv", "/metrics", "/health/readiness", "/v1/models"):
        await caller.read("GET", path, "sk-marker-master")


def stored(client: redis.Redis[bytes]) -> bytes:
    """Every key of the server with all that it holds, in whatever shape."""
    found: list[bytes] = []
    for key in client.scan_iter(count=1000):
        found.append(key)
        match client.type(key):
            case b"string":
                found.append(client.get(key) or b"")
            case b"hash":
                found += [part for pair in client.hgetall(key).items() for part in pair]
            case b"set":
                found += client.smembers(key)
            case b"zset":
                found += client.zrange(key, 0, -1)
            case b"list":
                found += client.lrange(key, 0, -1)
            case b"stream":
                found.append(repr(client.xrange(key)).encode())
            case other:
                raise AssertionError(f"{key!r}: a key of type {other!r} is not searched")
    assert found
    return b"\n".join(found)


def in_files(folder: Path) -> dict[str, list[bytes]]:
    """Markers in names and contents of all files below, by file; also those written in base64."""
    found: dict[str, list[bytes]] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        text = path.read_bytes() if path.is_file() else b""
        hits = re.findall(rb"\S*marker\S*", name.encode() + b"\n" + text)
        hits += [part for part in re.findall(rb"[A-Za-z0-9+/]{16,}={0,2}", text) if MARKER.encode() in decoded(part)]
        if hits:
            found[name] = hits[:3]
    return found


def decoded(part: bytes) -> bytes:
    whole = part.rstrip(b"=")
    return base64.b64decode(whole[: len(whole) // 4 * 4])


async def test_nothing_secret_comes_out(tmp_path: Path, up: Upstream) -> None:
    """No key, prompt, system text, user, session, hint, answer or upstream error stands in a log line, a metric, a
    decision, an error, a header, an admin page, Redis, the audit log (whatever it keeps), its anchor, or the name or
    content of a stored file; the log holds."""
    config = CONFIG.format(up=up.base, model=make_model(tmp_path / "model"))
    run = tmp_path / "run"
    run.mkdir()
    with ExitStack() as stack:
        router: Router = await asyncio.to_thread(lambda: stack.enter_context(serving(run, config)))
        async with AsyncExitStack() as sessions:
            session = await sessions.enter_async_context(aiohttp.ClientSession(router.base))
            caller = Caller(session)
            await everything(caller)
            client = redis.Redis.from_url(EmbeddedRedis(run.resolve() / "state" / "redis").url)
            sessions.callback(client.close)
            assert re.findall(rb".*marker.*", await asyncio.to_thread(stored, client)) == []
            assert json.loads(await caller.read("GET", "/admin/kv", "sk-marker-master"))["data"][0]["kv"]["counters"][
                "hits"
            ]
            assert (run / "kv").exists()
            await caller.read("DELETE", "/admin/tenants/none/kv", "sk-marker-master")
            assert not [text for text in caller.ours if MARKER in text]
        await asyncio.to_thread(stack.close)
    (run / "config.yaml").unlink()  # the one place where keys were written, by a person
    assert in_files(run) == {}
    assert "request" in router.log.read_text()
    assert set(tenants(run / "audit")) >= {"none", "hash", "bank", "_router"}
    assert all(verify(run / "audit", name).holds for name in tenants(run / "audit"))
