"""The routes that need not be fast: models, decisions, health, metrics, admin, dashboard. Starlette."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from policies.terms import Terms
from router.admin import LaneAdmin
from router.admins import Admins, who
from router.course import decision_view
from router.endpoints import PATHS, Endpoint, authenticate, new_id, read_call
from router.errors import BadRequest, RouterError, UnknownModel, Unrecorded
from router.http import bearer, first_of_each, read_all
from router.kv_admin import KVAdmin
from router.limits import Limits
from router.model_info import model_info
from router.peers import Peers
from router.source import ConfigError
from router.stops import Stops
from router.telemetry import CONTENT_TYPE, Metrics
from router.tenants import Tenant
from router.transports.cache import Fleet
from router.wildcards import STAR

log = structlog.get_logger("twolane.router")

_DASHBOARD = Path(__file__).parent / "dashboard"
_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
}

_DECISION = re.compile("dec_[0-9a-f]{24}")

Lifespan = Callable[[Starlette], AbstractAsyncContextManager[None]]
Reload = Callable[[str], Awaitable[dict[str, Any]]]


class Pages:
    """Handlers. `endpoint` holds the dispatcher and the tenants in force, `reload` puts new ones in force."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        fleet: Fleet,
        limits: Limits,
        metrics: Metrics,
        admins: Admins,
        stops: Stops,
        reload: Reload,
        peers: Peers | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._fleet = fleet
        self._limits = limits
        self._metrics = metrics
        self._admins = admins
        self._stops = stops
        self._reload = reload
        self._peers = peers
        self._started = int(time.time())

    def app(self, lifespan: Lifespan) -> Starlette:
        """The application, with OpenAI's error shape everywhere."""
        routes: list[BaseRoute] = [
            *(Route(f"{v}{path}", self._wrong_method, methods=["GET"]) for v in ("", "/v1") for path in PATHS),
            *self._both("/models", self.models),
            *self._both("/models/{id:path}", self.model),
            *self._both("/model/info", self.model_info),
            *self._both("/decide", self.decide, "POST"),
            *self._both("/decisions/{id}", self.decision),
            Route("/health/liveliness", self.alive),
            Route("/health/liveness", self.alive),
            Route("/health/readiness", self.ready),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
            *(self._admins.guard(route, self._is_tenant) for route in self._administration()),
        ]
        routes += [Route("/", self.dashboard), Mount("/dashboard", StaticFiles(directory=_DASHBOARD))]
        handlers: Any = {HTTPException: _http_error, RouterError: _router_error, Exception: _failure}
        return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)

    def _both(self, path: str, handler: Callable[[Request], Awaitable[Response]], method: str = "GET") -> list[Route]:
        return [Route(f"{version}{path}", handler, methods=[method]) for version in ("", "/v1")]

    def _tenant(self, request: Request) -> Tenant:
        return authenticate(self._endpoint.tenants, first_of_each(request.scope["headers"]))

    def _is_tenant(self, key: str | None) -> bool:
        return self._endpoint.tenants.find(key) is not None

    def _administration(self) -> list[Route]:
        """Each must stand in `admins.RIGHTS`."""
        return [
            Route("/admin/workers", self.workers),
            Route("/admin/pairs", self.pairs),
            Route("/admin/reload", self.reload, methods=["POST"]),
            *KVAdmin(self._endpoint, self._fleet).routes(),
            *LaneAdmin(self._endpoint, self._stops).routes(),
        ]

    async def models(self, request: Request) -> Response:
        tenant = self._tenant(request)
        return _json({"object": "list", "data": [self._model(name) for name in self._names(tenant)]})

    async def model(self, request: Request) -> Response:
        name, tenant = request.path_params["id"], self._tenant(request)
        group = self._endpoint.dispatcher.settings.group(name)
        fits = group is not None and STAR in group and _may(tenant.policy.terms, name, group)
        if not fits and name not in self._names(tenant):
            raise UnknownModel(f"The model {name!r} does not exist.", param="model")
        return _json(self._model(name))

    async def model_info(self, request: Request) -> Response:
        tenant = self._tenant(request)
        admin = self._admins.find(bearer(first_of_each(request.scope["headers"]))) is not None
        wanted = request.query_params.get("litellm_model_id")
        settings = self._endpoint.dispatcher.settings
        data = [
            model_info(deployment, admin=admin)
            for group, members in settings.groups.items()
            if tenant.policy.terms.allows_model(group)
            or group in {settings.group(name) for name in tenant.policy.terms.models or ()}
            for deployment in members
            if wanted in (None, deployment.id)
        ]
        if wanted is not None and not data:
            raise BadRequest("There is no such model id.", status=404, code="model_not_found", param="litellm_model_id")
        return _json({"data": data})

    def _names(self, tenant: Tenant) -> list[str]:
        settings = self._endpoint.dispatcher.settings
        routing = settings.routing
        names = dict.fromkeys((*settings.groups, *(a for a in routing.aliases if a not in routing.hidden)))
        terms = tenant.policy.terms
        found = [n for n in names if STAR not in n and _may(terms, n, settings.group(n) or n)]
        # Of a wildcard's names those that the tenant's policy writes out.
        return found + sorted(n for n in (terms.models or ()) if n not in names and settings.group(n) is not None)

    def _model(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "twolane"}

    async def decide(self, request: Request) -> Response:
        started = time.perf_counter()
        tenant = self._tenant(request)
        body = await read_all(request.receive, request.scope["headers"], self._endpoint.max_body)
        headers = first_of_each(request.scope["headers"])
        call = read_call(new_id(), tenant, headers, body, started, "/chat/completions")
        await self._endpoint.dispatcher.label(call)
        facts, decision = self._endpoint.dispatcher.decide(call)
        return _json(decision_view(call, facts, decision))

    async def decision(self, request: Request) -> Response:
        tenant = self._tenant(request)
        id = request.path_params["id"]
        found = self._endpoint.dispatcher.decisions.find(id, tenant.name)
        if found is None and self._peers is not None and _DECISION.fullmatch(id):
            found = await self._peers.decision(id, tenant.name)
        if found is None:
            raise BadRequest("There is no such decision.", status=404, code="decision_not_found", param="id")
        return Response(found, media_type="application/json")

    async def dashboard(self, request: Request) -> Response:
        """For anybody: it shows nothing that its reader's key does not open."""
        return FileResponse(_DASHBOARD / "index.html", headers=_PAGE_HEADERS)

    async def alive(self, request: Request) -> Response:
        return _json("I'm alive!")

    async def ready(self, request: Request) -> Response:
        """503 until every worker that the router spawns has loaded what it should; a later loss leaves text lanes."""
        shared, settled = self._limits.shared, self._fleet.settled
        told = {
            "status": "healthy" if settled else "loading",
            "redis": "none" if shared is None else "connected" if shared else "away",
            "workers": len(self._fleet.workers()),
        }
        audit = self._endpoint.dispatcher.audit
        if audit is not None and audit.anchor is not None:
            told["audit_anchor"] = "away" if audit.anchor.away else "reached"
        return _json(told, 200 if settled else 503)

    async def metrics(self, request: Request) -> Response:
        told = self._metrics.render() if self._peers is None else await self._peers.metrics()
        return Response(told, headers={"content-type": CONTENT_TYPE})

    async def openapi(self, request: Request) -> Response:
        return Response(_openapi(), media_type="application/json")

    async def workers(self, request: Request) -> Response:
        return _json({"object": "list", "data": list(self._fleet.workers())})

    async def pairs(self, request: Request) -> Response:
        """Configured pairs: where each stands, and what every live worker says of it."""
        states = self._fleet.workers()
        demotion = self._endpoint.dispatcher.lane.demotion
        data = [
            {
                "name": pair.name,
                "standing": demotion.standing(pair.name),
                "workers": [
                    {"worker": worker.name, "state": state}
                    for worker in states
                    for state in worker.pairs
                    if state.name == pair.name
                ],
            }
            for pair in self._endpoint.dispatcher.settings.pairs
        ]
        return _json({"object": "list", "data": data, "tenants": self._endpoint.tenants.names})

    async def reload(self, request: Request) -> Response:
        try:
            done = await self._reload(who(request))
        except ConfigError as error:
            raise BadRequest(str(error), code="bad_config", status=422) from error
        if self._peers is not None:
            await self._peers.reload(who(request))
        if not done["recorded"]:
            failed = Unrecorded("The files are in force, but the audit record of the reload could not be written.")
            return _json({**done, **msgspec.json.decode(failed.body())}, failed.status)
        return _json(done)

    async def _wrong_method(self, request: Request) -> Response:
        raise HTTPException(405, headers={"allow": "POST"})


@cache
def _openapi() -> bytes:
    from router.openapi import document  # asked for once, if ever: it must not delay the start

    return msgspec.json.encode(document())


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _router_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RouterError)  # noqa: S101  (registered for this class)
    return Response(error.body(), error.status, headers=error.headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101  (registered for this class)
    said = {404: "There is nothing at this path.", 405: "This method is not served at this path."}
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
    told = BadRequest(said.get(error.status_code, error.detail), status=error.status_code, code=code)
    return Response(told.body(), told.status, headers=dict(error.headers or {}), media_type="application/json")


async def _failure(request: Request, error: Exception) -> Response:
    told = RouterError("The router failed.", code="internal_error")
    return Response(told.body(), told.status, media_type="application/json")


def _may(terms: Terms, name: str, group: str) -> bool:
    return terms.allows_model(group) or terms.allows_model(name)
