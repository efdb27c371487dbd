"""Router processes behind one port: what each can ask of the others, over Unix sockets in a folder of this user's own.

Metrics are summed, decisions are found whichever process is asked, a deployment that rests in one rests in all. A
process that does not answer is left out.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog

from router.course import Decisions
from router.telemetry import Metrics
from router.transports.openai_http import Pools

log = structlog.get_logger("twolane.router")

_PATIENCE_S = 1.0
_SUMMED_GAUGES = frozenset({"twolane_in_flight", "twolane_processes"})
_LEAST = frozenset({"twolane_redis_up"})


@dataclass(frozen=True, slots=True)
class Member:
    """One process among several; told on its command line."""

    index: int
    count: int
    alive: int
    """Descriptor of a pipe that ends with the parent."""
    redis: str | None
    """Address of the embedded server; None where one is configured, which may hold a password."""
    folder: str
    """Of this port alone: others of one `state_dir` are no peers."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Member:
        return cls(**json.loads(text))

    def socket(self, index: int) -> Path:
        """Where a process answers the others."""
        return Path(self.folder) / f"router-{index}.sock"


def shared_socket(host: str, port: int) -> socket.socket:
    """Bound, and not yet listening: the kernel spreads connections over those that do. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made


class Peers:
    """The other processes, as one of them sees them."""

    def __init__(self, member: Member, pools: Pools, metrics: Metrics, decisions: Decisions) -> None:
        self._member = member
        self._pools = pools
        self._metrics = metrics
        self._decisions = decisions
        self._telling: set[asyncio.Task[list[bytes]]] = set()
        metrics.watch("processes", "Router processes that told their figures.", lambda: [({}, 1)])

    def cooled(self, deployment: str, seconds: float) -> None:
        """A deployment began to rest here: the others let it rest too. Returns at once."""
        told = self._ask("POST", "/cooled", {"deployment": deployment, "seconds": str(seconds)})
        task = asyncio.get_running_loop().create_task(told)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def reload(self, who: str) -> None:
        """Let the others put the files as they are now in force."""
        await self._ask("POST", "/reload", {"who": who})

    @asynccontextmanager
    async def serving(
        self, rest: Callable[[str, float], None], reload: Callable[[str], Awaitable[None]]
    ) -> AsyncIterator[None]:
        """Answer the others meanwhile; `rest` and `reload` do what they tell."""
        from aiohttp import web  # a router that is alone never needs it

        async def metrics(request: web.Request) -> web.Response:
            return web.Response(body=self._metrics.render())

        async def decision(request: web.Request) -> web.Response:
            found = self._decisions.find(request.query["id"], request.query["tenant"])
            return web.Response(body=found or b"", status=404 if found is None else 200)

        async def cooled(request: web.Request) -> web.Response:
            rest(request.query["deployment"], float(request.query["seconds"]))
            return web.Response()

        async def again(request: web.Request) -> web.Response:
            await reload(request.query["who"])
            return web.Response()

        app = web.Application()
        app.router.add_post("/cooled", cooled)
        app.router.add_post("/reload", again)
        app.router.add_get("/metrics", metrics)
        app.router.add_get("/decision", decision)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        path = self._member.socket(self._member.index)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        await web.UnixSite(runner, str(path)).start()
        try:
            yield
        finally:
            await runner.cleanup()

    async def metrics(self) -> bytes:
        """Of all processes together."""
        others = await self._ask("GET", "/metrics", {})
        return added([self._metrics.render(), *others])

    async def decision(self, id: str, tenant: str) -> bytes | None:
        """One that another process made. `id` is the caller's: as part of a path it could name another tenant."""
        return next(iter(await self._ask("GET", "/decision", {"id": id, "tenant": tenant})), None)

    async def _ask(self, method: str, path: str, query: dict[str, str]) -> list[bytes]:
        others = (i for i in range(self._member.count) if i != self._member.index)
        told = await asyncio.gather(*(self._one(i, method, path, query) for i in others))
        return [body for body in told if body is not None]

    async def _one(self, index: int, method: str, path: str, query: dict[str, str]) -> bytes | None:
        from aiohttp import ClientError

        url = f"http://peer{path}"
        session, _ = self._pools.session(f"unix:{self._member.socket(index)}")
        try:
            async with asyncio.timeout(_PATIENCE_S), session.request(method, url, params=query) as answer:
                return await answer.read() if answer.status == 200 else None
        except (ClientError, OSError, TimeoutError) as error:
            log.warning("peer_away", process=index, error=type(error).__name__)
            return None


def added(pages: Iterable[bytes]) -> bytes:
    """Prometheus pages as one: counters and histograms summed; of a gauge the most, for all look at one thing.

    Likewise of workers' figures, which each process tells as it heard them.
    """
    lines: dict[str, float | None] = {}
    kinds: dict[str, str] = {}
    for page in pages:
        for line in page.decode().splitlines():
            if line.startswith("#"):
                lines.setdefault(line, None)
                if line.startswith("# TYPE "):
                    _, _, name, kind = line.split(" ")
                    kinds[name] = kind
                continue
            sample, _, value = line.rpartition(" ")
            before = lines.get(sample)
            lines[sample] = float(value) if before is None else _together(sample, kinds, before, float(value))
    # Samples that only later pages had stand behind their family, as the format wants it.
    return _in_families(lines)


def _together(sample: str, kinds: dict[str, str], one: float, other: float) -> float:
    name = sample.partition("{")[0]
    if name in _LEAST:
        return min(one, other)
    if name.startswith("twolane_worker_") or (kinds.get(name) == "gauge" and name not in _SUMMED_GAUGES):
        return max(one, other)
    return one + other


def _in_families(lines: dict[str, float | None]) -> bytes:
    families: dict[str, list[str]] = {}
    for line, value in lines.items():
        if value is None:
            families.setdefault(line.split(" ")[2], []).append(line)
            continue
        name = line.partition("{")[0]
        names = (name, *(name.removesuffix(suffix) for suffix in ("_bucket", "_sum", "_count")))
        base = next((n for n in names if n in families), name)
        families.setdefault(base, []).append(f"{line} {int(value) if value.is_integer() else value}")
    return "\n".join([*(line for family in families.values() for line in family), ""]).encode()
