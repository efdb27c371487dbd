"""Real servers for tests of the router: an upstream made of a function, and the router itself under uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
import yaml
from aiohttp import web

from router.app import App, create_app
from router.server import HotProtocol
from router.settings import load_text
from router.transports.cache import Fleet

KEY = "sk-tenant-a-0123456789"
UP_KEY = "sk-upstream-0123456789"
PLAIN = {
    "id": "x",
    "object": "chat.completion",
    "created": 1,
    "model": "up",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}
Handler = Callable[["Seen"], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """One request as an upstream got it."""

    request: web.Request
    body: dict[str, Any]

    @property
    def headers(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.request.headers.items()}

    async def stream(
        self, *events: object, done: bool = True, headers: dict[str, str] | None = None
    ) -> web.StreamResponse:
        """Answer events one write at a time."""
        response = web.StreamResponse(headers={"content-type": "text/event-stream", **(headers or {})})
        await response.prepare(self.request)
        for event in events:
            if isinstance(event, float):
                await asyncio.sleep(event)
            else:
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        if done:
            await response.write(b"data: [DONE]\n\n")
        return response


def chunk(text: str | None = None, finish: str | None = None, **rest: object) -> dict[str, Any]:
    delta = {} if text is None else {"content": text}
    return {
        "id": "c",
        "object": "chat.completion.chunk",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        **rest,
    }


def plain(status: int = 200, body: object = PLAIN, **headers: str) -> web.Response:
    return web.Response(
        status=status,
        text=json.dumps(body),
        content_type="application/json",
        headers={name.replace("_", "-"): value for name, value in headers.items()},
    )


def failure(status: int, message: str = "boom", **headers: str) -> web.Response:
    return plain(status, {"error": {"message": message, "type": "t", "param": None, "code": None}}, **headers)


@dataclass
class Upstream:
    """What was asked, by the upstream's model name, and how each model answers."""

    base: str
    answers: dict[str, Handler] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    hung_up: list[str] = field(default_factory=list)

    def count(self, model: str) -> int:
        return sum(s.body.get("model") == model for s in self.seen)


@contextlib.asynccontextmanager
async def upstream(unix: Path | None = None) -> AsyncIterator[Upstream]:
    """A server on a port of its own, or on a Unix socket, answering PLAIN where nothing else is said."""
    state = Upstream("")

    async def handle(request: web.Request) -> web.StreamResponse:
        seen = Seen(request, await request.json())
        state.seen.append(seen)
        model = seen.body["model"]
        answer = state.answers.get(model)
        try:
            return plain() if answer is None else await answer(seen)
        except asyncio.CancelledError:
            state.hung_up.append(model)
            raise

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site: web.BaseSite
    if unix is None:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        state.base = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    else:
        site = web.UnixSite(runner, str(unix))
        await site.start()
        state.base = f"unix:{unix}"
    try:
        yield state
    finally:
        await runner.cleanup()


def deployment(name: str, up: Upstream, model: str | None = None, **params: object) -> dict[str, Any]:
    """One OpenAI-compatible entry of `model_list`."""
    written = {"model": f"openai/{model or name}", "api_base": up.base, "api_key": UP_KEY, "num_retries": 0, **params}
    return {"model_name": name, "litellm_params": written}


@dataclass
class Router:
    app: App
    session: aiohttp.ClientSession
    port: int

    async def post(self, path: str = "/v1/chat/completions", key: str | None = KEY, **body: object) -> Answer:
        """One call; `headers` among the fields is taken for HTTP headers."""
        headers = body.pop("headers", {})
        assert isinstance(headers, dict)
        if key is not None:
            headers = {"authorization": f"Bearer {key}", **headers}
        if path.endswith("chat/completions"):
            body.setdefault("messages", [{"role": "user", "content": "hi"}])
        async with self.session.post(path, json=body, headers=headers) as response:
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())

    async def get(self, path: str, key: str | None = KEY) -> Answer:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        async with self.session.get(path, headers=headers) as response:
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, await response.read())


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    raw: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        return found

    @property
    def events(self) -> list[Any]:
        parts = [part.removeprefix(b"data: ") for part in self.raw.split(b"\n\n") if part]
        return [part.decode() if part == b"[DONE]" else json.loads(part) for part in parts]

    @property
    def text(self) -> str:
        events = [e for e in self.events if isinstance(e, dict)]
        return "".join(c["delta"].get("content") or "" for e in events for c in e.get("choices", []))


@contextlib.asynccontextmanager
async def router(
    folder: Path,
    config: dict[str, Any],
    fleet: Fleet | None = None,
    redis_url: str | None = None,
    *,
    keep_alive: int = 5,
) -> AsyncIterator[Router]:
    """The router of `config` on a port of its own, with tenant `a` unless tenants are written.

    `keep_alive`: seconds that a connection is kept after its last answer.
    """
    written = {
        "audit": {"dir": str(folder / "audit")},
        "state_dir": str(folder / "state"),
        "general_settings": {"master_key": "sk-master-0123456789"},
        "tenants": [{"name": "a", "key": KEY}],
        **config,
    }
    file = folder / "router.yaml"
    text = yaml.safe_dump(written)
    file.write_text(text)
    app = create_app(load_text(text, "router.yaml", folder=folder), file, fleet=fleet, redis_url=redis_url)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host="127.0.0.1",
            port=0,
            http=HotProtocol.of(app.endpoint),
            ws="none",
            lifespan="on",
            proxy_headers=False,
            access_log=False,
            log_config=None,
            timeout_keep_alive=keep_alive,
        )
    )
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    serving = asyncio.create_task(_serve(server))
    try:
        while not server.started:
            assert not serving.done(), "the router did not start"
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            yield Router(app, session, port)
    finally:
        server.should_exit = True
        await serving


async def _serve(server: uvicorn.Server) -> None:
    await server.startup()
    await server.main_loop()
    await server.shutdown()


async def until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something that must come true."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.01)
