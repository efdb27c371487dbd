"""One connection to Redis for commands on the path of requests. Knows no limits.

Commands that come while others are under way go out together, so a busy router pays one write and one read for many,
and a caller who hangs up cancels only its own waiting: replies never get out of step. A batch that fails or is late
takes the connection with it. redis-py is imported when it is used: a router that counts alone never pays for it.

In a cluster there is one connection to each node, and a command goes to the owner of its key's slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from workers.redis_servers import MOST_MOVES, Address, Route, slot_of

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.connection import AbstractConnection

CONNECT_S = 1.0
"""Bound on connecting ahead of time; no request waits so long."""

T = TypeVar("T")
Callbacks = Callable[[str], tuple[Callable[[], None], Callable[[Exception], None]]]
"""For a node's URL: what to call when a batch was answered, and when it was not."""
Command = tuple[str | bytes | int | float, ...]


class Away(Exception):
    """Redis did not answer in time, or is known not to."""


def client(url: str) -> Redis:
    """A client whose commands are not retried behind our back; `Line` and probes bound their time."""
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=4,
        timeout=CONNECT_S,
        socket_timeout=None,
        socket_connect_timeout=CONNECT_S,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )
    return Redis(connection_pool=pool)


class Line:
    """Batches commands over one connection of `redis`, which it closes in the end."""

    def __init__(
        self,
        redis: Redis,
        *,
        timeout: float,
        scripts: Sequence[str],
        answered: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """`timeout`: seconds for a batch. `scripts` are loaded on connecting. The callbacks run once per batch."""
        from redis.exceptions import AskError, RedisError, TryAgainError

        self._faults = (RedisError, OSError, TimeoutError)
        self._elsewhere = (AskError, TryAgainError)
        self._redis = redis
        self._timeout = timeout
        self._scripts = scripts
        self._answered = answered
        self._failed = failed
        self._connection: AbstractConnection | None = None
        self._waiting: list[tuple[Command, Callable[[Any], Any], asyncio.Future[Any]]] = []
        self._draining: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()

    def ask(self, command: Command, read: Callable[[Any], T]) -> asyncio.Future[T]:
        """Queue a command; the future holds its answer as `read` gives it, or `Away`. Cancelling recalls nothing.

        In a cluster it may also hold a MovedError, AskError or TryAgainError: the node is well, and has not done it.
        """
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_seen)
        self._waiting.append((command, read, future))
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        return future

    async def ready(self) -> None:
        """Connect within a second and have one command answered within the bound of requests; else `Away`."""
        try:
            async with self._lock:
                async with asyncio.timeout(CONNECT_S):
                    connection = await self._connected()
                async with asyncio.timeout(self._timeout):
                    await connection.send_command("PING")
                    await connection.read_response()
        except self._faults as error:
            await self._drop()
            raise Away(str(error)) from error

    async def close(self) -> None:
        """Let what is under way end, within its bound, and give up the connections."""
        if self._draining is not None:
            await asyncio.wait([self._draining])
        await self._drop()
        await self._redis.aclose(close_connection_pool=True)

    async def _drain(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                async with self._lock:
                    await self._exchange(batch)
        finally:
            self._draining = None

    async def _exchange(self, batch: list[tuple[Command, Callable[[Any], Any], asyncio.Future[Any]]]) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                connection = await self._connected()
                packed = connection.pack_commands([command for command, _, _ in batch])
                await connection.send_packed_command(packed, check_health=False)
                for _, read, future in batch:
                    try:
                        answer = read(await connection.read_response())
                    except self._elsewhere as error:
                        if not future.done():
                            future.set_exception(error)
                        continue
                    if not future.done():
                        future.set_result(answer)
        except self._faults as error:
            await self._drop()
            self._failed(error)
        else:
            self._answered()
        finally:
            for _, _, future in batch:
                if not future.done():
                    future.set_exception(Away())

    async def _connected(self) -> AbstractConnection:
        if self._connection is None or not self._connection.is_connected:
            await self._drop()
            connection: AbstractConnection = self._redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
            self._connection = connection
            await connection.connect()  # type: ignore[no-untyped-call]
            for script in self._scripts:
                await connection.send_command("SCRIPT", "LOAD", script)
                await connection.read_response()
        return self._connection

    async def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.disconnect(nowait=True)


class Lines:
    """One line to the only server, or one to each node of a cluster that owns slots."""

    def __init__(self, url: str, *, timeout: float, scripts: Sequence[str], callbacks: Callbacks) -> None:
        """As `Line`; raises ValueError where `url` is none that `Address` reads."""
        self._route = Route(Address.of(url))
        self._timeout = timeout
        self._scripts = scripts
        self._callbacks = callbacks
        self._lines: dict[str, Line] = {}
        self._only = None if self._route.address.cluster else self._line(self._route.address.servers[0])

    def ask(self, key: str, command: Command, read: Callable[[Any], T]) -> asyncio.Future[T]:
        """As `Line.ask`, of who holds `key`. What was moved is followed; what is moving right now is `Away`."""
        if self._only is not None:
            return self._only.ask(command, read)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.add_done_callback(_seen)
        self._send(slot_of(key), command, read, future, MOST_MOVES)
        return future

    async def ready(self) -> None:
        """As `Line.ready`; of a cluster that is well by its own word, every node that owns slots now."""
        if self._only is not None:
            return await self._only.ready()
        told_by = self._route.someone()
        line = self._line(told_by)
        await line.ready()
        self._route.learn(await line.ask(("CLUSTER", "SLOTS"), list), told_by)
        owners = self._route.nodes()
        if not owners:
            raise Away("no node of the cluster owns slots")
        for node in owners:
            await self._line(node).ready()
            if b"cluster_state:ok" not in await self._line(node).ask(("CLUSTER", "INFO"), bytes):
                raise Away("the cluster is down")
        for node in self._lines.keys() - owners:
            await self._lines.pop(node).close()
        return None

    async def close(self) -> None:
        """As `Line.close`."""
        for line in list(self._lines.values()):
            await line.close()

    def _line(self, node: str) -> Line:
        if node not in self._lines:
            answered, failed = self._callbacks(node)
            self._lines[node] = Line(
                client(node), timeout=self._timeout, scripts=self._scripts, answered=answered, failed=failed
            )
        return self._lines[node]

    def _send(
        self, slot: int, command: Command, read: Callable[[Any], T], future: asyncio.Future[T], moves: int
    ) -> None:
        from redis.exceptions import AskError, MovedError, TryAgainError

        node = self._route.owner(slot)
        if node is None:
            future.set_exception(Away("no node of the cluster holds the slot"))
            return

        def answered(asked: asyncio.Future[T]) -> None:
            error = asked.exception()
            if isinstance(error, MovedError) and moves > 1:
                self._route.moved(slot, error.host, error.port, node)
                self._send(slot, command, read, future, moves - 1)
            elif future.done():
                return  # its caller hung up
            elif isinstance(error, AskError | TryAgainError):
                future.set_exception(Away("the slot is moving"))
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(asked.result())

        self._line(node).ask(command, read).add_done_callback(answered)


def _seen(future: asyncio.Future[Any]) -> None:
    """A caller who hung up does not read the answer; that is no reason to complain about an unread failure."""
    if not future.cancelled():
        future.exception()
