"""A real HTTP server that speaks the documented headers, and remembers what it was asked."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

REFUSED = {"rule": "region", "allowed": False, "code": "region_not_allowed", "means": "Not in a region it may use."}
DECISION = {
    "id": "dec_1",
    "model": "assistant",
    "object": "twolane.decision",
    "deployment": "duo",
    "transport": "cache",
    "ranked": ["duo", "solo"],
    "reason": "cache_preferred",
    "judged": [
        {"deployment": "duo", "transport": "cache", "verdicts": [{"allowed": True, "code": "ok", "detail": ""}]},
        {"deployment": "far", "transport": "text", "verdicts": [REFUSED]},
    ],
    "budget_missed": False,
    "estimates": {"duo": {"ttft_p50": 40.0}},
}


@dataclass
class Server:
    """`asked` holds the headers of every request, oldest first."""

    url: str = ""
    asked: list[dict[str, str]] = field(default_factory=list)
    bodies: list[dict[str, object]] = field(default_factory=list)

    def lane_headers(self) -> dict[str, str]:
        transport = self.asked[-1].get("x-twolane-transport", "cache")
        headers = {
            "x-twolane-decision": f"dec_{len(self.asked)}",
            "x-twolane-transport": transport,
            "x-twolane-deployment": "duo" if transport == "cache" else "solo",
            "x-twolane-reason": f"{transport}_preferred",
            "x-request-id": "req_1",
        }
        return headers | ({"x-twolane-kv": "48/64"} if transport == "cache" else {})

    async def chat(self, request: Request) -> Response:
        body = await self.note(request)
        if body["model"] == "closed":
            error = {"message": "no", "type": "permission_error", "param": None, "code": "regulated_text_only"}
            return JSONResponse({"error": error}, 403, self.lane_headers())
        if body["model"] == "elsewhere":
            return JSONResponse(completion("chat.completion", "message", "hello"))
        if body.get("stream"):
            return StreamingResponse(events(), media_type="text/event-stream", headers=self.lane_headers())
        content = '{"city": "Seoul"}' if "response_format" in body else "hello"
        return JSONResponse(completion("chat.completion", "message", content), headers=self.lane_headers())

    async def decide(self, request: Request) -> Response:
        await self.note(request)
        return JSONResponse(DECISION)

    async def decision(self, request: Request) -> Response:
        self.asked.append(dict(request.headers))
        if request.path_params["id"] == "list":
            return JSONResponse([])
        if request.path_params["id"] != "dec_1":
            return JSONResponse({"error": {"message": "unknown", "type": "x", "param": None, "code": "x"}}, 404)
        return JSONResponse(DECISION | {"outcome": {"status": "answered"}})

    async def note(self, request: Request) -> dict[str, object]:
        self.asked.append(dict(request.headers))
        self.bodies.append(await request.json())
        return self.bodies[-1]


def completion(kind: str, key: str, content: str) -> dict[str, object]:
    choice = {"index": 0, key: {"role": "assistant", "content": content}, "finish_reason": "stop"}
    return {"id": "c1", "object": kind, "created": 1, "model": "assistant", "choices": [choice]}


async def events() -> AsyncIterator[str]:
    for text in ("hel", "lo"):
        yield f"data: {json.dumps(completion('chat.completion.chunk', 'delta', text))}\n\n"
    yield "data: [DONE]\n\n"


@contextmanager
def running_server() -> Iterator[Server]:
    """The server, on a port of its own."""
    state = Server()
    routes = [
        Route("/v1/chat/completions", state.chat, methods=["POST"]),
        Route("/v1/decide", state.decide, methods=["POST"]),
        Route("/v1/decisions/{id}", state.decision),
    ]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        state.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        http = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="warning", ws="none"))
        thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]})
        thread.start()
        while not http.started:
            time.sleep(0.01)
        try:
            yield state
        finally:
            http.should_exit = True
            thread.join(timeout=10)


@pytest.fixture
def server() -> Iterator[Server]:
    with running_server() as running:
        yield running


@pytest.fixture(autouse=True)
def no_ambient_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TWOLANE_API_KEY", "TWOLANE_BASE_URL", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai-secret")
