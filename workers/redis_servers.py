"""Which Redis server to ask for a key: the only one there is, or the node of a cluster that holds the key's slot.

Every call of ours touches keys of one hash tag, so the owner of one slot is all that it needs. Owners are learnt from
`CLUSTER SLOTS` before the first call and after a node was lost, and from `MOVED` in between. Torch-free, and redis-py
is imported only where a connection is opened: a router without Redis never pays for it.
"""

from __future__ import annotations

import time
from binascii import crc_hqx
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    import redis
    from redis.asyncio import Redis as AsyncRedis

T = TypeVar("T")

SLOTS = 16384
MOST_MOVES = 3
"""Redirections that one call follows."""
_SCHEMES = ("redis", "rediss", "unix")
_CLUSTER = "+cluster"


@dataclass(frozen=True, slots=True)
class Address:
    """A URL as redis-py reads it for each server that was named; several only with `cluster`."""

    servers: tuple[str, ...]
    cluster: bool = False

    @classmethod
    def of(cls, url: str) -> Address:
        """`redis+cluster://[USER:PASSWORD@]HOST:PORT[,HOST:PORT...]` names a cluster, `rediss+cluster://` one with TLS.

        Raises ValueError, without repeating a password, for what is none of these and no `redis://`, `rediss://` or
        `unix://`.
        """
        parts = urlsplit(url)
        scheme = parts.scheme.removesuffix(_CLUSTER)
        if scheme not in _SCHEMES or parts.scheme == f"unix{_CLUSTER}":
            raise ValueError("expected embedded, redis://, rediss://, unix://, redis+cluster:// or rediss+cluster://")
        if not parts.scheme.endswith(_CLUSTER):
            return cls((url,))
        if parts.path not in ("", "/", "/0"):
            raise ValueError("a Redis Cluster has database 0 only: leave the number out")
        login, _, hosts = parts.netloc.rpartition("@")
        named = [_host_and_port(host) for host in hosts.split(",")]
        return cls(
            tuple(
                urlunsplit((scheme, _netloc(login, host, port), "", parts.query, parts.fragment))
                for host, port in named
            ),
            cluster=True,
        )

    def node(self, host: str, port: int) -> str:
        """The URL of another node of the cluster: with the login and options of the ones that were named."""
        parts = urlsplit(self.servers[0])
        return urlunsplit(parts._replace(netloc=_netloc(parts.netloc.rpartition("@")[0], host, port)))


def slot_of(key: str | bytes) -> int:
    """The slot of a key, by its hash tag where it has one."""
    name = key.encode() if isinstance(key, str) else key
    begin = name.find(b"{")
    end = name.find(b"}", begin + 1)
    if begin >= 0 and end > begin + 1:
        name = name[begin + 1 : end]
    return crc_hqx(name, 0) % SLOTS


class Route:
    """Who holds which slot of a cluster, as far as is known. Asks nobody. Safe for several threads."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._lock = Lock()
        self._starts: list[int] = []
        self._owners: list[tuple[int, str]] = []
        """Last slot and owner of each range that begins at the same place of `_starts`."""
        self._moved: dict[int, str] = {}
        self._turn = 0

    @property
    def known(self) -> bool:
        """Owners were learnt, and no node was lost since."""
        return bool(self._starts)

    def owner(self, slot: int) -> str | None:
        """The node to ask; None where nobody is known to hold the slot."""
        with self._lock:
            moved = self._moved.get(slot)
            at = bisect_right(self._starts, slot) - 1
            if moved is not None or at < 0:
                return moved
            last, node = self._owners[at]
            return node if slot <= last else None

    def nodes(self) -> list[str]:
        """Owners that are known."""
        with self._lock:
            return list(dict.fromkeys([*(node for _, node in self._owners), *self._moved.values()]))

    def someone(self) -> str:
        """Whom to ask for the owners: all that were named or met, in turn, as any of them may be away."""
        with self._lock:
            everybody = list(
                dict.fromkeys([*self.address.servers, *(n for _, n in self._owners), *self._moved.values()])
            )
            self._turn += 1
            return everybody[self._turn % len(everybody)]

    def learn(self, slots: Sequence[Any], told_by: str) -> None:
        """Take in an answer to `CLUSTER SLOTS`."""
        ranges = sorted((int(first), int(last), self._node(master, told_by)) for first, last, master, *_ in slots)
        with self._lock:
            self._starts = [first for first, _, _ in ranges]
            self._owners = [(last, node) for _, last, node in ranges]
            self._moved.clear()

    def moved(self, slot: int, host: str, port: int, told_by: str) -> None:
        """Take in a `MOVED`."""
        with self._lock:
            self._moved[slot] = self._node((host, port), told_by)

    def doubt(self) -> None:
        """A node was lost: another may hold its slots by now. Its addresses stay known to `someone`."""
        with self._lock:
            self._starts = []

    def _node(self, named: Sequence[Any], told_by: str) -> str:
        """A node that does not know its own name is the one that was asked."""
        host = named[0].decode() if isinstance(named[0], bytes) else named[0] or ""
        return self.address.node(host if host not in ("", "?") else urlsplit(told_by).hostname or "", int(named[1]))


class Servers:
    """Blocking: `ask` calls a function with the client of the server that holds a key. Safe for several threads.

    Opens no connection before the first call. `timeout` in seconds bounds connecting and each reply; in a cluster a
    call takes up to two replies, or one more where the first came late.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self._route = Route(Address.of(url))
        self._timeout = timeout
        self._clients: dict[str, redis.Redis] = {}
        self._lock = Lock()

    def ask(self, key: str | bytes, run: Callable[[redis.Redis], T]) -> T:
        """What `run` returns. Raises what redis-py raises; a slot that is moving right now is an AskError.

        A moving slot is not followed to where it goes: a function of ours reads and writes many keys, and half of them
        may still be here.
        """
        if not self._route.address.cluster:
            return run(self._client(self._route.address.servers[0]))
        from redis.exceptions import AskError, ClusterDownError, MovedError
        from redis.exceptions import ConnectionError as RedisConnectionError
        from redis.exceptions import TimeoutError as RedisTimeoutError

        slot, until = slot_of(key), time.monotonic() + self._timeout
        for _ in range(MOST_MOVES):
            try:
                node = self._owner(slot)
                return run(self._client(node))
            except MovedError as error:
                self._route.moved(slot, error.host, error.port, node)
                if time.monotonic() > until:
                    raise
            except AskError:
                raise
            except (RedisConnectionError, RedisTimeoutError, ClusterDownError, OSError):
                self._route.doubt()
                raise
        raise RedisConnectionError("the cluster's nodes do not agree who holds a slot")

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for client in self._clients.values():
                client.close()

    def _owner(self, slot: int) -> str:
        from redis.exceptions import ConnectionError as RedisConnectionError

        if not self._route.known:
            node = self._route.someone()
            slots = self._client(node).execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            self._route.learn(slots, node)
        found = self._route.owner(slot)
        if found is None:
            raise RedisConnectionError("no node of the cluster holds the slot")
        return found

    def _client(self, node: str) -> redis.Redis:
        with self._lock:
            if node not in self._clients:
                import redis
                from redis.backoff import NoBackoff
                from redis.retry import Retry

                self._clients[node] = redis.Redis.from_url(
                    node,
                    socket_timeout=self._timeout,
                    socket_connect_timeout=self._timeout,
                    retry=Retry(NoBackoff(), 0),
                    protocol=2,
                )
            return self._clients[node]


class AsyncServers:
    """For one event loop: commands of one slot go out together, answered in order. The caller bounds the time."""

    def __init__(self, url: str, timeout: float) -> None:
        """`timeout` in seconds bounds connecting and each reply."""
        self._route = Route(Address.of(url))
        self._timeout = timeout
        self._clients: dict[str, AsyncRedis] = {}

    async def ask(self, key: str | bytes, *commands: tuple[Any, ...]) -> list[Any]:
        """Raises what redis-py raises. Commands are single: a slot that is moving is followed key by key."""
        if not self._route.address.cluster:
            return await self._together(self._route.address.servers[0], commands)
        from redis.exceptions import AskError, MovedError, RedisError

        slot = slot_of(key)
        try:
            if not self._route.known:
                node = self._route.someone()
                (slots,) = await self._together(node, [("CLUSTER SLOTS",)])
                self._route.learn(slots, node)
            replies: list[Any] = [None] * len(commands)
            open_: list[int] = list(range(len(commands)))
            for _ in range(MOST_MOVES):
                node = self._route.owner(slot) or self._route.someone()
                answered = await self._together(node, [commands[at] for at in open_], whole=False)
                for at, reply in zip(open_, answered, strict=True):
                    if isinstance(reply, AskError) and not isinstance(reply, MovedError):
                        there = self._route.address.node(reply.host, reply.port)
                        _, reply = await self._together(there, [("ASKING",), commands[at]])
                    replies[at] = reply
                moved = [reply for reply in replies if isinstance(reply, MovedError)]
                for error in moved:
                    self._route.moved(slot, error.host, error.port, node)
                open_ = [at for at in open_ if isinstance(replies[at], MovedError)]
                if not open_:
                    break
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
            return replies
        except (RedisError, OSError):
            self._route.doubt()
            raise

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients.values():
            await client.aclose()

    async def _together(self, node: str, commands: Sequence[tuple[Any, ...]], *, whole: bool = True) -> list[Any]:
        """`whole`: raise the first error; else errors stand among the answers."""
        pipe = self._client(node).pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        return await pipe.execute(raise_on_error=whole)

    def _client(self, node: str) -> AsyncRedis:
        if node not in self._clients:
            from redis.asyncio import Redis

            self._clients[node] = Redis.from_url(
                node,
                socket_timeout=self._timeout,
                socket_connect_timeout=self._timeout,
                health_check_interval=10,
                retry=None,
            )
        return self._clients[node]


def _host_and_port(named: str) -> tuple[str, int]:
    """Of `HOST:PORT` or `[IPV6]:PORT`; 6379 where there is no port. Raises ValueError."""
    host, port = named, "6379"
    if ":" in named.rpartition("]")[2]:
        host, _, port = named.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError("a cluster's URL names HOST:PORT, several of them with commas between")
    return host, int(port)


def _netloc(login: str, host: str, port: int) -> str:
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return f"{login}@{at}" if login else at
