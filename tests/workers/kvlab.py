"""What the tests of KV reuse share: a real server, stores on it, and random KV that can be compared bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import redis
import torch

from workers.cache import KVCache
from workers.config import RedisConfig, StoreConfig
from workers.keys import Space
from workers.redis_servers import Address
from workers.store import KVStore

BLOCK = 4
PLAIN = Space("plain", {"model": "tiny", "revision": "1", "dtype": "float32"})


def random_kv(tokens: int, seed: int = 0, *, layers: int = 3, dtype: torch.dtype = torch.float32) -> KVCache:
    """KV of `tokens` tokens whose every number follows from the seed; 192 bytes a token in float32."""
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(1, 2, tokens, 4, generator=generator).to(dtype) for _ in range(2 * layers)]
    return KVCache(draw[:layers], draw[layers:])


def same(left: KVCache | None, right: KVCache) -> bool:
    """Equal in every bit, shape and dtype."""
    assert left is not None
    pairs = zip([*left.keys, *left.values], [*right.keys, *right.values], strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all()) for a, b in pairs)


def held(store: KVStore, tokens: Sequence[int]) -> int:
    """How many tokens are found. Beginnings are found before the whole."""
    found = get(store, tokens)
    return 0 if found is None else found.keys[0].shape[2]


@contextlib.contextmanager
def opened(
    folder: Path | None,
    url: str | None,
    *,
    max_bytes: int = 2**30,
    ram_bytes: int = 2**28,
    timeout: float = 1.0,
) -> Iterator[KVStore]:
    """A store that is closed at the end; `url` None has no index."""
    config = StoreConfig(dir=folder, max_bytes=max_bytes, ram_bytes=ram_bytes, block_tokens=BLOCK)
    store = KVStore(config, RedisConfig(url=url, timeout=timeout) if url else None)
    try:
        assert store.settle(20)
        yield store
    finally:
        store.close()


def put(store: KVStore, tokens: Sequence[int], kv: KVCache, *, tenant: str = "a", settle: bool = True) -> None:
    """Save all whole blocks and wait until they are on disk."""
    store.save(store.scope(tenant), PLAIN, tokens, kv)
    if settle:
        assert store.settle(20)


def get(store: KVStore, tokens: Sequence[int], *, tenant: str = "a", space: Space = PLAIN) -> KVCache | None:
    """Find and load."""
    hit = store.find(store.scope(tenant), space, tokens)
    return store.load(hit) if hit else None


def files(folder: Path) -> list[Path]:
    """All segment files of a store."""
    return sorted((folder / "segments").rglob("*.safetensors"))


def keys(url: str) -> list[bytes]:
    """All keys that the server holds, or that a cluster's nodes hold."""
    return sorted(lives(url))


def lives(url: str) -> dict[bytes, int]:
    """All keys, and the milliseconds that each has left; -1 for ever."""
    found: dict[bytes, int] = {}
    for server in Address.of(url).servers:
        with redis.Redis.from_url(server) as client:
            found |= {key: client.pttl(key) for key in client.scan_iter("*")}
    return found


def empty(url: str) -> None:
    """Take a server's memory away, or that of all of a cluster's nodes."""
    for server in Address.of(url).servers:
        with redis.Redis.from_url(server) as client:
            client.flushall()
