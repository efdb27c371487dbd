"""KVIndex: where stored KV lies, in Redis. Knows ids, sizes and lives; no tokens, no bytes, no files. Torch-free.

Each call is one round trip to a function of `index.lua`, bounded by a timeout; a breaker keeps a sick Redis from
costing every request that bound. A call that Redis did not answer raises IndexDown: the caller computes instead.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, Literal, cast

import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from workers.redis_servers import Servers

Owner = tuple[str, str]
"""(tag, object) of a segment."""


class IndexDown(Exception):
    """Redis is absent, slow, or refuses; says which class of error, never a key."""


@dataclass(frozen=True, slots=True)
class Found:
    """One segment of a match: the first `used` of its `blocks` blocks serve."""

    obj: str
    used: int
    blocks: int
    size: int
    """Bytes of the whole segment."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What is charged: segments being written count from their `begin`."""

    bytes: int
    segments: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A segment as the index sees it."""

    tag: str
    obj: str
    """32 hex digits."""
    size: int
    """Bytes charged."""
    first: int
    """Blocks of the chain that stand before it."""
    parent: bytes
    """Id of the block before it; empty at the chain's start."""
    ids: tuple[bytes, ...]
    life: float
    """Seconds from now."""


@dataclass(frozen=True, slots=True)
class Begun:
    """`have`: all blocks are there. `orphan`: the block before is not. `full`: no room within the budgets."""

    status: Literal["ok", "have", "orphan", "full"]
    victims: tuple[Owner, ...]
    """Segments that were dropped to make room or were past their time; the caller deletes their files."""


class Breaker:
    """Closed until `errors` calls in a row fail; then open for `rest` seconds; then one call at a time may try."""

    def __init__(self, errors: int = 3, rest: float = 2.0) -> None:
        self._errors, self._rest = errors, rest
        self._failed = 0
        self._until = 0.0
        self._lock = Lock()

    @property
    def open(self) -> bool:
        return self._failed >= self._errors

    def admit(self) -> bool:
        """May the next call go out? While open, one caller per `rest` seconds gets True, as a probe."""
        if not self.open:
            return True
        with self._lock:
            now = time.monotonic()
            if now < self._until:
                return False
            self._until = now + self._rest
            return True

    def report(self, *, ok: bool) -> None:
        with self._lock:
            self._failed = 0 if ok else self._failed + 1
            if self._failed >= self._errors:
                self._until = time.monotonic() + self._rest


class KVIndex:
    """The entries of one store (`store`: its tag) in the Redis at `url`. Safe for several threads.

    Opens no connection before the first call. `timeout` in seconds bounds connecting and each reply. In a cluster all
    entries lie on one node; while their slot moves to another, the index is down.
    """

    def __init__(self, url: str, store: str, *, timeout: float = 0.05, breaker: Breaker | None = None) -> None:
        self._servers = Servers(url, timeout)
        self._root = f"kv:{{{store}}}"
        self.breaker = breaker or Breaker()

    def match(self, tag: str, ids: Sequence[bytes]) -> list[Found]:
        """The longest stored prefix of a chain, as segments in order; marks them as used. Any length in one trip."""
        reply = self._call("match", tag, b"".join(ids))
        fields = reply[1:]
        return [
            Found(obj.decode(), used, blocks, size)
            for obj, used, blocks, size in zip(*(fields[i::4] for i in range(4)), strict=True)
        ]

    def begin(self, entry: Entry, *, tenant_limit: int, store_limit: int, deadline: float = 60.0) -> Begun:
        """Charge the bytes and announce a write that commits within `deadline` seconds; makes room if it must."""
        status, *victims = self._call(
            "begin",
            entry.tag,
            entry.obj,
            entry.size,
            entry.first,
            entry.parent,
            b"".join(entry.ids),
            max(1, int(entry.life * 1000)),
            tenant_limit,
            store_limit,
            int(deadline * 1000),
        )
        return Begun(status.decode(), _owners(victims))

    def commit(self, tag: str, obj: str) -> Literal["ok", "have", "lost", "orphan"]:
        """Make a written segment findable. Anything but `ok` means: it is not in the index, delete its file."""
        status = self._call("commit", tag, obj).decode()
        return cast(Literal["ok", "have", "lost", "orphan"], status)

    def abort(self, tag: str, obj: str) -> int:
        """Refund a write that failed. Returns bytes."""
        return int(self._call("forget", tag, obj))

    def gone(self, tag: str, obj: str) -> int:
        """Forget a segment whose payload is missing or damaged. Returns bytes."""
        return int(self._call("forget", tag, obj))

    def used(self, tag: str, last: bytes) -> None:
        """Mark the segments from block `last` back to the chain's start as used."""
        self._call("used", tag, last)

    def tidy(self, most: int = 256) -> tuple[Owner, ...]:
        """Drop segments past their life and writes past their deadline; the caller deletes their files."""
        return _owners(self._call("tidy", most))

    def purge(self, tag: str, slice_: int = 200) -> Usage:
        """Drop all that a tag holds, in slices so that nobody waits long. Returns what was dropped."""
        segments = size = 0
        while True:
            count, freed = self._call("purge", tag, slice_)
            if not count:
                return Usage(size, segments)
            segments, size = segments + count, size + freed

    def known(self, tag: str, objects: Sequence[str]) -> list[bool]:
        """Which of them are indexed or being written."""
        return [bool(n) for n in self._call("known", tag, *objects)] if objects else []

    def usage(self, tag: str | None = None) -> Usage:
        """Charged to one tag, or to the whole store."""
        key = f"{self._root}:{tag}:use" if tag else f"{self._root}:use"
        size, segments = self._guard(lambda client: client.hmget(key, "bytes", "segments"))
        return Usage(int(size or 0), int(segments or 0))

    def up(self) -> bool:
        """False when this Redis does not know what lies on disk: it is new, was emptied or lost its memory."""
        return bool(self._guard(lambda client: client.exists(f"{self._root}:up")))

    def mark_up(self, life: float = 3600.0) -> None:
        """Say that the index knows what lies on disk; to be repeated within `life` seconds."""
        self._guard(lambda client: client.set(f"{self._root}:up", 1, px=int(life * 1000)))

    def claim(self, tag: str, block: bytes, owner: str, life: float) -> bool:
        """Announce that `owner` computes this block; False while another's claim lives."""
        key = f"{self._root}:{tag}:c:".encode() + block
        return bool(self._guard(lambda client: client.set(key, owner, nx=True, px=max(1, int(life * 1000)))))

    def claimed(self, tag: str, block: bytes) -> bool:
        """Does somebody's claim live?"""
        return bool(self._guard(lambda client: client.exists(f"{self._root}:{tag}:c:".encode() + block)))

    def release(self, tag: str, block: bytes, owner: str) -> bool:
        """Give a claim up; False when it was no longer the owner's."""
        return bool(self._call("release", owner, key=f"{self._root}:{tag}:c:".encode() + block))

    def close(self) -> None:
        self._servers.close()

    def _call(self, function: str, *arguments: str | bytes | int, key: str | bytes | None = None) -> Any:
        library, source = _library()

        def run(client: redis.Redis) -> Any:
            return client.fcall(f"{library}_{function}", 1, key or self._root, *arguments)

        def run_or_load(client: redis.Redis) -> Any:
            try:
                return run(client)
            except ResponseError as error:
                if "Function not found" not in str(error):
                    raise
            client.function_load(source, replace=True)
            return run(client)

        return self._guard(run_or_load)

    def _guard(self, run: Callable[[redis.Redis], Any]) -> Any:
        if not self.breaker.admit():
            raise IndexDown("breaker open")
        try:
            reply = self._servers.ask(self._root, run)
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            self.breaker.report(ok=False)
            raise IndexDown(type(error).__name__) from error
        except RedisError as error:
            self.breaker.report(ok=False)
            raise IndexDown(f"{type(error).__name__}: {str(error).split(' ', 1)[0]}") from error
        self.breaker.report(ok=True)
        return reply


def _owners(members: Iterable[bytes]) -> tuple[Owner, ...]:
    return tuple(cast(Owner, tuple(m.decode().split(":", 1))) for m in members)


@cache
def _library() -> tuple[str, str]:
    """Name and source; the name carries a digest, so that two versions may use one Redis."""
    source = Path(__file__).with_name("index.lua").read_text()
    name = "twolanekv_" + hashlib.sha256(source.encode()).hexdigest()[:8]
    return name, source.replace("@LIBRARY@", name)
