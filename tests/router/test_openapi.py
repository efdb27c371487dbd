"""The OpenAPI page is true: it lists what is served, and what it describes never fails the router."""

from __future__ import annotations

import asyncio
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from starlette.routing import Route

from router.endpoints import PATHS
from router.openapi import document
from router.passthrough import BELOW, FAMILIES, METHODS
from tests.router.gateway import KEY, PLAIN, Router, chunk, router

ONCE = ("/v1/", "/admin/", "/health/", "/metrics", "/openapi.json")
"""The bare paths are the same doors again."""
MASTER = "sk-master-0123456789"


def listed() -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, methods in document()["paths"].items() for method in methods}


async def test_it_lists_exactly_what_is_served(tmp_path: Path) -> None:
    """Every route is on the page and nothing else is, administration and the bare paths included."""
    async with router(tmp_path, {"model_list": []}) as door:
        page = (await door.get("/openapi.json", key=None)).json
        pages: Any = door.app._rest
        served = {
            (method, route.path.replace(":path}", "}"))
            for route in pages.routes
            if isinstance(route, Route) and not getattr(route.endpoint, "__name__", "").startswith("_")
            for method in (route.methods or set()) - {"HEAD"}
        }
    prefixes = ("", "/v1")
    served |= {("POST", v + path) for v in prefixes for path in PATHS}
    served |= {(m, f"{v}/{f}{rest}") for m in METHODS for v in prefixes for f in FAMILIES for rest in ("", "/{rest}")}
    served |= {(m, f"{v}/{f}/{{rest}}") for m in METHODS for v in prefixes for f in BELOW}
    assert listed() == served
    assert page == document()


async def test_schemathesis_finds_no_failure_of_ours(tmp_path: Path) -> None:
    """Whatever the page allows, and much that it does not, gets no 5xx, and answers have the shape that is promised."""
    schemathesis = pytest.importorskip("schemathesis")

    async def provider(request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.content_type == "application/json" and request.can_read_body else {}
        if not (isinstance(body, dict) and body.get("stream")):
            return web.json_response(PLAIN)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in (chunk("hi"), chunk(finish="stop"), {"type": "response.completed"}):
            await response.write(b"data: " + web.json_response(event).body + b"\n\n")  # type: ignore[operator]
        return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", provider)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    entry = {"model_name": "m", "litellm_params": {"model": "openai/m", "api_base": base, "api_key": "k" * 20}}
    try:
        async with router(tmp_path, {"model_list": [entry]}) as door:
            failures, statuses = await asyncio.to_thread(explore, schemathesis, door)
    finally:
        await runner.cleanup()
    assert not failures, "\n".join(failures)
    assert statuses[200] > 50, "requests that are right are among them"
    assert statuses[400] > 50, "and some that are not"


def explore(schemathesis: Any, door: Router) -> tuple[list[str], Counter[int]]:
    """Run all operations of one spelling of each path; failures in words, and how often each status came."""
    from hypothesis import HealthCheck, Phase, given, settings, strategies

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's own
        schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{door.port}/openapi.json")
        modes = list(schemathesis.GenerationMode)
        found: list[str] = []
        statuses: Counter[int] = Counter()
        for result in schema.get_all_operations():
            operation = result.ok()
            if operation.method in ("head", "put", "patch") or not operation.path.startswith(ONCE):
                continue

            @settings(
                max_examples=6,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=strategies.one_of([operation.as_strategy(generation_mode=mode) for mode in modes]))
            def one(case: Any) -> None:
                key = MASTER if case.operation.path.startswith("/admin") else KEY
                if isinstance(case.body, dict) and "model" in case.body and statuses.total() % 2:
                    case.body["model"] = "m"
                case.headers.pop("Authorization", None)
                answer = case.call(headers={"authorization": f"Bearer {key}"})
                statuses[answer.status_code] += 1
                if answer.status_code >= 500:
                    found.append(f"{case.method} {case.path} {case.body!r}: {answer.status_code} {answer.text[:300]}")

            one()
    return found, statuses
