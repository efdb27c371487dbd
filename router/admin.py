"""Administration of the cache lane: stop buttons and demoted pairs. HTTP in, HTTP out; what it does is recorded."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.admins import who
from router.audit import Audit
from router.endpoints import Endpoint
from router.errors import BadRequest, Unrecorded
from router.http import read_all
from router.stops import Stops
from router.stops_file import BadStops, Stop, Wish, read_target, read_words
from router.tenants import TenantSource

log = structlog.get_logger("twolane.router")

_LARGEST = 16 * 2**10


class _Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reason: str
    target: str = ""
    by: str | None = None
    """On whose behalf, where that is not whoever holds the key."""
    drill: bool = False


class LaneAdmin:
    """Routes for `Pages`; each is guarded there."""

    def __init__(self, endpoint: Endpoint, stops: Stops) -> None:
        self._endpoint = endpoint
        self._stops = stops

    def routes(self) -> list[Route]:
        return [
            Route("/admin/stops", self.show),
            Route("/admin/stops", self.stop, methods=["POST"]),
            Route("/admin/stops", self.start, methods=["DELETE"]),
            Route("/admin/pairs/{pair}/reinstate", self.reinstate, methods=["POST"]),
        ]

    async def show(self, request: Request) -> Response:
        """What is stopped, and what runs on the cache lane all the same."""
        return _json(self._told())

    async def stop(self, request: Request) -> Response:
        """In force here when this answers; recorded afterwards, so that a log that fails delays no stop."""
        wish = await self._wish(request, stopped=True)
        reach = await self._stops.put(wish)
        recorded = await self._recorded(request, reach.stop)
        return self._answer(reach.stop, reach.file, reach.redis, recorded)

    async def start(self, request: Request) -> Response:
        """Recorded first: without a record nothing is lifted."""
        wish = await self._wish(request, stopped=False)
        known = self._stops.known(wish.target)
        if known is None or not known.stopped:
            raise BadRequest(f"{wish.target} is not stopped.", status=404, code="not_stopped", param="target")
        if not await self._recorded(request, wish.after(known, time.time())):
            raise Unrecorded("The audit record could not be written, so nothing was lifted.")
        reach = await self._stops.put(wish)
        return self._answer(reach.stop, reach.file, reach.redis, True)

    async def reinstate(self, request: Request) -> Response:
        """Puts a demoted pair, or one that was swapped, in force on a person's word; recorded first."""
        asked, pair = await _read(request), request.path_params["pair"]
        demotion = self._endpoint.dispatcher.lane.demotion
        if pair not in dict(demotion.states()):
            raise BadRequest("No pair has this name.", status=404, code="unknown_pair", param="pair")
        try:
            reason = read_words(asked.reason, "reason")
            by = who(request) if asked.by is None else read_words(asked.by, "by")
        except BadStops as error:
            raise BadRequest(str(error), code="bad_reason") from error
        detail = {"pair": pair, "reason": reason, "by": by, "fingerprint": demotion.standing(pair).fingerprint}
        audit = self._endpoint.dispatcher.audit
        if audit is None:
            raise Unrecorded("There is no audit log, so nothing was changed.")
        await audit.control("pair_reinstated", who(request), detail)
        return _json({"pair": pair, "standing": demotion.reinstate(pair, who(request), reason)})

    async def _wish(self, request: Request, *, stopped: bool) -> Wish:
        asked = await _read(request)
        try:
            target = read_target(asked.target)
            reason = read_words(asked.reason, "reason")
            by = who(request) if asked.by is None else read_words(asked.by, "by")
        except BadStops as error:
            raise BadRequest(str(error), code="bad_stop") from error
        if stopped:
            self._check_known(target)
        known = self._stops.known(target)
        drill = asked.drill if stopped or known is None else known.drill
        return Wish(target, stopped, reason, by, drill)

    def _check_known(self, target: str) -> None:
        """A misspelt name must not look like a stop."""
        kind, _, name = target.partition(":")
        names: tuple[str, ...] = ()
        if kind == "pair":
            names = tuple(pair.name for pair in self._endpoint.dispatcher.settings.pairs)
        elif kind == "tenant":
            names = self._endpoint.tenants.names
        if kind != "cache" and name not in names:
            message = f"There is no {kind} {name!r}; there are: {', '.join(names) or 'none'}."
            raise BadRequest(message, status=404, code=f"unknown_{kind}", param="target")

    async def _recorded(self, request: Request, stop: Stop) -> bool:
        return await record_stop(self._endpoint.dispatcher.audit, self._endpoint.tenants, who(request), stop)

    def _answer(self, stop: Stop, unsaved: str, redis: bool | None, recorded: bool) -> Response:
        problems = [f"not in the file ({unsaved})"] if unsaved else []
        problems += [] if recorded else ["not recorded in the audit log"]
        done = {"done": stop, "reach": {"here": True, "file": not unsaved, "redis": redis}, "recorded": recorded}
        body: dict[str, Any] = {**done, **self._told()}
        if redis is False:
            body["note"] = "Redis does not answer: routers of other hosts do not hear of it now."
        if problems:
            state = "stopped" if stop.stopped else "lifted"
            message = f"{stop.target} is {state} on this router, but {' and '.join(problems)}."
            body["error"] = {"message": message, "type": "server_error", "param": None, "code": "stop_incomplete"}
        return _json(body, 503 if problems else 200)

    def _told(self) -> dict[str, Any]:
        now = time.perf_counter()
        running = self._endpoint.dispatcher.lane.running.values()
        return {
            "object": "list",
            "data": self._stops.entries(),
            "running": [
                {"id": r.id, "tenant": r.tenant, "pair": r.pair, "seconds": round(now - r.started, 3)} for r in running
            ],
        }


async def _read(request: Request) -> _Asked:
    body = await read_all(request.receive, request.scope["headers"], _LARGEST)
    try:
        return msgspec.json.decode(body, type=_Asked)
    except msgspec.DecodeError as error:
        raise BadRequest(f"The body cannot be read: {error}", code="bad_stop") from error


async def record_stop(audit: Audit | None, tenants: TenantSource, person: str, stop: Stop) -> bool:
    """In the tenant's own chain where it is about one; False, and a line in the log, where it cannot be written."""
    what = ("drill" if stop.drill else "stop") if stop.stopped else "start"
    detail = {"target": stop.target, "reason": stop.reason, "by": stop.by, "drill": stop.drill}
    kind, _, name = stop.target.partition(":")
    try:
        if audit is None:
            raise Unrecorded("There is no audit log.")
        await audit.control(what, person, detail, name if kind == "tenant" and tenants.get(name) is not None else None)
    except Unrecorded as error:
        log.error("stop_not_recorded", target=stop.target, error=error.message)
        return False
    return True


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
