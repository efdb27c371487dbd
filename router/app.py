"""Builds each object once, opens and closes it: the only place where the router's parts meet."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import structlog
import uvicorn
from starlette.applications import Starlette

from router import memory
from router import settings as config
from router.admins import Admins
from router.advice import nowhere
from router.audit import Audit
from router.audit_house import open_audit, sweep_for_ever
from router.backups import unbacked
from router.books import Books
from router.conversations import Conversations
from router.course import Decisions
from router.deployments import Deployment
from router.dispatch import Dispatcher
from router.endpoints import Endpoint
from router.estimates import Estimates
from router.gather import Gatherer
from router.guardrails import Guardrails
from router.health import Health
from router.http import Receive, Scope, Send
from router.lane_house import LaneHouse, record_or_log
from router.limits import Limits
from router.pages import Pages
from router.passthrough import Passthrough
from router.peers import Member, Peers, shared_socket
from router.places import Allowance
from router.server import HotProtocol
from router.settings import ConfigError, Settings
from router.shadow import Shadow
from router.telemetry import Metrics, configure_logging
from router.tenants import TenantSource
from router.till import Till
from router.traces import Traces
from router.transports.base import Transport
from router.transports.cache import Fleet, KnownFleet, OnWorker, Role
from router.transports.openai_http import Pools
from router.transports.relay import Relay
from router.transports.text_http import TextHTTP
from router.transports.text_litellm import LiteLLMThread, TextLiteLLM
from router.worker_metrics import watch_workers

log = structlog.get_logger("twolane.router")

_LOOK_EVERY = 1.0
"""Seconds between two looks at the configuration's file and the tenants'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What outlives a reload."""

    fleet: Fleet
    tenants: TenantSource
    limits: Limits
    metrics: Metrics
    audit: Audit
    pools: Pools
    estimates: Estimates
    decisions: Decisions
    books: Books
    conversations: Conversations
    admins: Admins
    lane: LaneHouse
    shadow: Shadow
    traces: Traces | None
    peers: Peers | None


class App:
    """The ASGI application: hot routes raw, the rest through Starlette."""

    def __init__(self, settings: Settings, parts: Parts, path: Path | None) -> None:
        self.parts = parts
        self._path = path
        self._seen = _stamp(path)
        self._litellm: LiteLLMThread | None = None
        self.endpoint = Endpoint(self._dispatcher(settings), parts.tenants, settings.max_body_bytes)
        self._hot = {path.decode() for path in self.endpoint.hot}
        self._passthrough = Passthrough(self.endpoint)
        pages = Pages(
            self.endpoint,
            fleet=parts.fleet,
            limits=parts.limits,
            metrics=parts.metrics,
            admins=parts.admins,
            stops=parts.lane.stops,
            reload=self.reload,
            peers=parts.peers,
        )
        self._rest = pages.app(self._lifespan)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._hot:
            await self.endpoint(scope, receive, send)
        elif scope["type"] == "http" and self._passthrough.serves(scope):
            await self._passthrough(scope, receive, send)
        else:
            await self._rest(scope, receive, send)

    async def reload(self, who: str = "signal") -> dict[str, Any]:
        """Put the files as they are now in force. Raises ConfigError, and then all stays as it was."""
        self._seen = _stamp(self._path)
        old, before = self.endpoint.dispatcher.settings, self.parts.tenants.digests
        try:
            settings = old if self._path is None else config.load(self._path)
            dispatcher = self._dispatcher(settings)
            change = self.parts.tenants.reload(settings)
        except ConfigError:
            await record_or_log(self.parts.audit, "reload_refused", who, {"config": old.digest})
            raise
        self.parts.metrics.configure(_labels(settings), self.parts.tenants.names)
        self.parts.admins.configure(settings.admins, settings.general_settings.master_key)
        self.parts.lane.configure(settings)
        self.endpoint.dispatcher = dispatcher
        self.endpoint.max_body = settings.max_body_bytes
        if settings.digest != old.digest:
            _name(settings)
        told = {"added": change.added, "removed": change.removed, "changed": change.changed}
        log.info("reloaded", who=who, tenants=told, deployments=len(settings.model_list))
        after = self.parts.tenants.digests
        digests = {name: [before.get(name), after.get(name)] for group in told.values() for name in group}
        detail = {"config": [old.digest, settings.digest], "tenants": told, "digests": digests}
        recorded = await record_or_log(self.parts.audit, "reload", who, detail)
        return {"reloaded": True, "recorded": recorded, "tenants": told, "deployments": len(settings.model_list)}

    async def close(self) -> None:
        """Give up the connections of an app that was never served."""
        await self.parts.pools.close()
        await self._close_litellm()

    def _dispatcher(self, settings: Settings) -> Dispatcher:
        parts, routing = self.parts, settings.routing
        health = Health(
            settings.groups,
            allowed_fails=routing.allowed_fails,
            cooldown_time=routing.cooldown_time,
            by_kind=routing.allowed_fails_policy,
            announce=None if parts.peers is None else parts.peers.cooled,
        )
        gatherer = Gatherer(
            settings,
            fleet=parts.fleet,
            estimates=parts.estimates,
            health=health,
            metrics=parts.metrics,
            conversations=parts.conversations,
            demotion=parts.lane.demotion,
            stopped=parts.lane.stops.in_force,
        )
        transports: dict[str, Transport] = {}
        dispatcher = Dispatcher(
            settings=settings,
            transports=transports,
            deployments={d.id: d for d in settings.model_list},
            gatherer=gatherer,
            health=health,
            till=Till(parts.limits, gatherer.tariffs, settings.routing.aliases),
            metrics=parts.metrics,
            books=parts.books,
            lane=parts.lane.lane(settings),
            guardrails=Guardrails(settings.guardrails, parts.pools),
            allowances=_allowances(settings),
            decisions=parts.decisions,
            conversations=parts.conversations,
            traces=parts.traces,
            audit=parts.audit,
            shadow=parts.shadow,
        )
        transports.update((d.id, self._transport(settings, d, dispatcher)) for d in settings.model_list)
        return dispatcher

    def _transport(self, settings: Settings, deployment: Deployment, dispatcher: Dispatcher) -> Transport:
        routing, parts = settings.routing, self.parts
        waits: dict[str, Any] = {"timeout": routing.timeout, "stream_timeout": routing.stream_timeout}
        match deployment.kind:
            case "http":
                return TextHTTP(deployment, parts.pools, **waits)
            case "litellm":
                self._litellm = self._litellm or LiteLLMThread()
                return TextLiteLLM(deployment, self._litellm, **waits)
            case "relay":
                params = deployment.relay_params
                assert params is not None  # noqa: S101  (that is what makes it a relay)
                return Relay(
                    dispatcher.run_text,
                    sharer=params.sharer,
                    receiver=params.receiver,
                    max_hint_tokens=params.max_hint_tokens,
                )
            case "local" | "cache":
                role: Role = "pair" if deployment.kind == "cache" else "model"
                timeout = deployment.timeout or routing.timeout
                demotion = parts.lane.demotion
                return OnWorker(role, deployment.upstream_model, parts.fleet, parts.pools, demotion, timeout=timeout)
            case _:
                assert_never(deployment.kind)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        parts = self.parts
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(parts.books.flush)  # of calls that were cut off while all else closed
            if parts.traces is not None:
                stack.push_async_callback(parts.traces.close)
            stack.push_async_callback(parts.pools.close)
            if parts.peers is not None:
                await stack.enter_async_context(parts.peers.serving(self._rest_here, self._reload_or_keep))
            stack.push_async_callback(self._close_litellm)
            # Files may have changed while no router ran: what is in force now stands in the record of the start.
            in_force = {"config": self.endpoint.dispatcher.settings.digest, "tenants": parts.tenants.digests}
            await parts.audit.start(in_force)
            stack.push_async_callback(parts.audit.close)
            stack.callback(parts.books.flush)
            stack.push_async_callback(parts.lane.close)
            await parts.lane.start()
            await parts.limits.start()
            stack.push_async_callback(parts.limits.close)
            await parts.fleet.start()
            stack.push_async_callback(parts.fleet.close)
            await parts.shadow.start()
            stack.push_async_callback(parts.shadow.close)
            sweep = sweep_for_ever(parts.audit.root, parts.tenants)
            for work in (self._look(), sweep, memory.give_back_for_ever(), parts.lane.run()):
                stack.push_async_callback(_ended, asyncio.create_task(work))
            self._on_sighup()
            if gc.isenabled():  # the command starts without the collector, and leaves next to nothing for it
                gc.collect()
            gc.freeze()  # what is built now lives as long as the process: the collector need not walk it again
            gc.enable()
            yield

    async def _close_litellm(self) -> None:
        if self._litellm is not None:
            await self._litellm.close()

    def _on_sighup(self) -> None:
        # Only the main thread may handle signals; a router inside another program's thread reloads by its admin call.
        with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hung_up)

    def _hung_up(self) -> None:
        self._reloading = asyncio.create_task(self._reload_or_keep("signal"))

    async def _reload_or_keep(self, who: str) -> None:
        try:
            await self.reload(who)
        except ConfigError as error:
            log.error("reload_refused", who=who, error=str(error))

    def _rest_here(self, deployment: str, seconds: float) -> None:
        self.endpoint.dispatcher.health.rest(deployment, seconds)

    async def _look(self) -> None:
        """Take up the files when they change, a bad one leaves what runs in force; and see pairs that were swapped."""
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            await self.parts.lane.look(self.parts.fleet)
            if self.parts.tenants.changed() or _stamp(self._path) != self._seen:
                await self._reload_or_keep("file")


def _stamp(path: Path | None) -> tuple[int, int] | None:
    """Tells one writing of a file from another; None while it is not there."""
    try:
        return None if path is None else ((told := path.stat()).st_mtime_ns, told.st_size)
    except OSError:
        return None


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _allowances(settings: Settings) -> dict[str, Allowance]:
    routing = settings.routing
    found = {
        d.id: Allowance.of(d, rates=routing.rates_are_limits, parallel=routing.max_parallel_requests)
        for d in settings.model_list
    }
    return {id: allowance for id, allowance in found.items() if allowance is not None}


def _labels(settings: Settings) -> list[tuple[str, str, str]]:
    return [(d.id, d.model_name, d.transport) for d in settings.model_list]


def create_app(
    settings: Settings,
    path: Path | None = None,
    *,
    fleet: Fleet | None = None,
    redis_url: str | None = None,
    member: Member | None = None,
) -> App:
    """Build the router; its parts open and close with the ASGI lifespan.

    `path` is the file that a reload reads again; `redis_url` where limits, stops and demotions are shared (None keeps
    them to this process and its files). Raises ConfigError.
    """
    tenants = TenantSource(settings)
    limits = Limits(redis_url, timeout=settings.redis.timeout)
    metrics = Metrics(_labels(settings), tenants.names)
    if redis_url is not None:
        metrics.watch(
            "redis_up", "Limits are shared through Redis right now.", lambda: [({}, int(bool(limits.shared)))]
        )
    fleet = fleet or KnownFleet()
    watch_workers(metrics, fleet)
    audit = open_audit(settings.audit, metrics)
    lane = LaneHouse(settings, redis_url, audit=audit, tenants=tenants, metrics=metrics)
    fleet, pools, decisions = fleet or KnownFleet(), Pools(), Decisions()

    def barred(pair: str, name: str) -> bool:
        """As things stand now: what was sampled before a stop or a change of policy must not run after it."""
        tenant = tenants.get(name)
        allowed = tenant is not None and not tenant.policy.regulated and "cache" in tenant.policy.terms.lanes
        return not allowed or lane.stops.holds(pair, name)

    shadow = Shadow(fleet, pools, lane.demotion, audit, barred=barred)
    shadow.watch(metrics)
    estimates, traces = Estimates(), None if settings.otel is None else Traces(settings.otel)
    parts = Parts(
        fleet=fleet,
        tenants=tenants,
        limits=limits,
        metrics=metrics,
        audit=audit,
        pools=pools,
        estimates=estimates,
        decisions=decisions,
        books=Books(metrics=metrics, estimates=estimates, decisions=decisions, audit=audit, traces=traces),
        conversations=Conversations(),
        admins=Admins(settings.admins, settings.general_settings.master_key, loopback=settings.loopback),
        lane=lane,
        shadow=shadow,
        traces=traces,
        peers=None if member is None else Peers(member, pools, metrics, decisions),
    )
    return App(settings, parts, path)


def _fleet(settings: Settings, path: Path, remote: str | None) -> Fleet:
    """Workers and their registry. A router that has neither is spared redis-py and the embedded server's package."""
    from router.fleet import Fleet as SpawningFleet
    from workers.client import Registry
    from workers.config import RedisConfig
    from workers.embedded import EmbeddedRedis

    embedded = None if remote else EmbeddedRedis(settings.redis_folder)
    if embedded is not None:
        embedded.start()
    return SpawningFleet(
        settings.workers,
        config_file=path,
        folder=settings.state_dir.resolve() / "run",
        registry=Registry(RedisConfig(url=embedded.url) if embedded else settings.redis),
        embedded=embedded,
    )


def _among(settings: Settings, member: Member) -> Fleet:
    """Workers as one process of several sees them; it ends with the parent that spawned them."""
    from router.processes import end_with_parent, member_fleet

    threading.Thread(target=end_with_parent, args=(member,), name="parent", daemon=True).start()
    return member_fleet(settings, member)


def _name(settings: Settings) -> None:
    """What the file says without effect."""
    for finding in settings.findings:
        log.warning("unsupported", finding=str(finding))
    for _, note in nowhere(settings):
        log.warning("leads_nowhere", finding=note)


def serve(settings: Settings, path: Path | str, among: str | None = None) -> None:
    """Run the router until a signal ends it; `among` others, as this `Member`. Raises SystemExit(1) where it cannot."""
    path = Path(path)
    written = settings.log.format
    configure_logging(settings.log.level, format="console" if written == "text" else written)
    _name(settings)
    for problem in unbacked(settings, path):
        log.warning("no_backup", problem=problem)
    member = None if among is None else Member.decode(among)
    if member is not None:
        remote: str | None = member.redis or settings.redis.url
        fleet = _among(settings, member)
    else:
        remote = None if settings.redis.url == "embedded" else settings.redis.url
        fleet = _fleet(settings, path, remote) if settings.workers or remote else KnownFleet()
    app = create_app(settings, path, fleet=fleet, redis_url=remote, member=member)
    memory.spare()
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=settings.server.host,
            port=settings.server.port,
            loop="uvloop",
            http=HotProtocol.of(app.endpoint),
            ws="none",
            lifespan="on",
            proxy_headers=False,
            access_log=False,
            server_header=False,
            log_config=None,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=10,
        )
    )
    server.run(None if member is None else [shared_socket(settings.server.host, settings.server.port)])
    if not server.started:
        raise SystemExit(1)
