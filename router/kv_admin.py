"""What workers keep, and its purge: the administrator's routes, passed to every worker and answered for all of them.

Knows workers by their HTTP face only. A purge is complete when each worker that lives or is configured has said so;
a worker that did not may still hold the tenant's KV, and is named.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.admins import who
from router.endpoints import Endpoint
from router.errors import BadRequest, Unrecorded
from router.transports.cache import Fleet

log = structlog.get_logger("twolane.router")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_STATS_S = 5.0
_PURGE_S = 60.0
"""A worker deletes files meanwhile, on a disk that may be slow."""

T = TypeVar("T")


class WorkerPurge(msgspec.Struct, frozen=True):
    """What one worker destroyed; `error` is empty where it said so."""

    worker: str
    entries: int = 0
    bytes: int = 0
    error: str = ""


class WorkerKV(msgspec.Struct, frozen=True):
    """What one worker's store holds, or why it is not known. Workers of one folder name the same disk twice."""

    worker: str
    kv: dict[str, Any] | None = None
    error: str = ""


class Purge(msgspec.Struct, frozen=True):
    """What became of a purge. Segments that two workers hold in RAM count for each."""

    tenant: str
    configured: bool
    """False where no tenant of this name is configured now: one that was removed, or a misspelt one."""
    entries: int
    bytes: int
    workers: tuple[WorkerPurge, ...]
    recorded: bool
    """It stands in the audit log."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Workers that did not say that they purged."""
        return tuple(w.worker for w in self.workers if w.error)


class _Gone(msgspec.Struct):
    entries: int
    bytes: int


class _Unanswered(Exception):
    """A worker gave no answer, or none that can be read; the message says which."""


class KVAdmin:
    """Routes for `Pages`; each is guarded there."""

    def __init__(self, endpoint: Endpoint, fleet: Fleet) -> None:
        self._endpoint = endpoint
        self._fleet = fleet

    def routes(self) -> list[Route]:
        async def stats(request: Request) -> Response:
            return _json({"object": "list", "data": await self.stats()})

        async def purge(request: Request) -> Response:
            done = await self.purge(request.path_params["tenant"], who(request))
            return _json(told(done), 200 if done.recorded and not done.missing else 503)

        return [
            Route("/admin/kv", stats),
            Route("/admin/tenants/{tenant}/kv", purge, methods=["DELETE"]),
        ]

    async def stats(self) -> list[WorkerKV]:
        """What each worker's store holds."""

        async def one(name: str, url: str | None) -> WorkerKV:
            try:
                return WorkerKV(name, await ask(url, "GET", "/kv", dict[str, Any], _STATS_S))
            except _Unanswered as error:
                return WorkerKV(name, error=str(error))

        return list(await asyncio.gather(*(one(*worker) for worker in self._expected().items())))

    async def purge(self, tenant: str, who: str) -> Purge:
        """Destroy all that any worker keeps of the tenant, and record it. Raises BadRequest for an impossible name."""
        if not _NAME.fullmatch(tenant):
            raise BadRequest("No tenant can have this name.", param="tenant", code="bad_tenant")
        workers = await asyncio.gather(*(_purge(name, url, tenant) for name, url in self._expected().items()))
        entries, size = sum(w.entries for w in workers), sum(w.bytes for w in workers)
        configured = self._endpoint.tenants.get(tenant) is not None
        done = Purge(tenant, configured, entries, size, tuple(workers), recorded=True)
        log.info("kv purged", who=who, tenant=tenant, entries=entries, bytes=size, missing=done.missing)
        try:
            await self._record(done, who)
        except Unrecorded as error:
            log.error("kv purge not recorded", tenant=tenant, error=error.message)
            return msgspec.structs.replace(done, recorded=False)
        return done

    def _expected(self) -> dict[str, str | None]:
        """Workers by name with their address; None for one that is configured and does not live."""
        configured = self._endpoint.dispatcher.settings.workers
        live = {worker.name: worker.url for worker in self._fleet.workers()}
        return {**{worker.name: None for worker in configured}, **live}

    async def _record(self, done: Purge, who: str) -> None:
        audit = self._endpoint.dispatcher.audit
        if audit is None:
            raise Unrecorded("There is no audit log.")
        detail = {"tenant": done.tenant, "entries": done.entries, "bytes": done.bytes, "missing": list(done.missing)}
        # In the tenant's own chain; a name that is nobody's gets no chain.
        await audit.control("kv_purge", who, detail, done.tenant if done.configured else None)


async def _purge(name: str, url: str | None, tenant: str) -> WorkerPurge:
    try:
        gone = await ask(url, "DELETE", f"/kv/{tenant}", _Gone, _PURGE_S)
    except _Unanswered as error:
        return WorkerPurge(name, error=str(error))
    return WorkerPurge(name, gone.entries, gone.bytes)


async def ask(url: str | None, method: str, path: str, shape: type[T], timeout: float) -> T:
    """A worker's answer to one request. Raises _Unanswered."""
    if url is None:
        raise _Unanswered("not live")
    import aiohttp  # only administrators need it, and it takes a quarter of the router's start

    unix = url.startswith("unix:")
    connector = aiohttp.UnixConnector(url.removeprefix("unix:")) if unix else aiohttp.TCPConnector()
    base = "http://worker" if unix else url.rstrip("/").removesuffix("/v1")
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout)) as session,
            session.request(method, base + path, allow_redirects=False) as response,
        ):
            body = await response.read()
    except TimeoutError:
        raise _Unanswered(f"no answer within {timeout:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise _Unanswered(f"no answer ({type(error).__name__})") from error
    if response.status != 200:
        raise _Unanswered(f"status {response.status}")
    try:
        return msgspec.json.decode(body, type=shape)
    except msgspec.DecodeError as error:
        raise _Unanswered("an answer that cannot be read") from error


def told(done: Purge) -> dict[str, Any]:
    """The answer's body; with an `error` in OpenAI's shape where the purge is not complete or not recorded."""
    body: dict[str, Any] = {"complete": not done.missing, **msgspec.structs.asdict(done)}
    problems = [f"not purged on: {', '.join(done.missing)}"] if done.missing else []
    problems += [] if done.recorded else ["not recorded in the audit log"]
    if problems:
        message = f"KV of {done.tenant}: {'; '.join(problems)}. What is listed was destroyed; ask again for the rest."
        code = "purge_incomplete" if done.missing else "audit_unavailable"
        body["error"] = {"message": message, "type": "server_error", "param": None, "code": code}
    return body


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
