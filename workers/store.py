"""KVStore: KV by tenant, space and tokens; in worker RAM and on local disk, found through the index.

`find` and `load` and `save` are the engine's: a sick disk or Redis makes them miss, never raise. Disk and index are
written by a thread of the store (`workers.shelf`). Without a folder or without Redis there is the RAM tier alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from secrets import token_hex

import structlog
import torch

from workers.cache import KVCache
from workers.config import RedisConfig, StoreConfig
from workers.counters import Counters
from workers.errors import KVMismatch
from workers.index import IndexDown, KVIndex
from workers.keys import Keyring, Scope, Space, chain
from workers.rates import Rates
from workers.segments import Damaged, Head, Segment, cut, tokens_of
from workers.shelf import Shelf
from workers.tiers import Piece, RamTier

__all__ = ["Hit", "KVStore", "Purged", "Scope", "Space"]

SEGMENT_TOKENS = 256
"""A segment ends at a multiple of this; what is found, loaded, evicted and lost together."""
_NO_LIMIT = 2**53

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest stored prefix: `tokens` is a multiple of the block size and at most find's `limit`."""

    tokens: int
    scope: Scope
    space: Space
    role: str
    block: int
    ids: tuple[bytes, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Purged:
    """What a purge destroyed: segments, in RAM or on disk, and their bytes."""

    entries: int
    bytes: int


class KVStore:
    """Opens the folder's keys at once (raises OSError where it cannot); connects to Redis when it is first needed.

    `redis.url` may be `embedded`: the store then starts a server in its own folder, or attaches to the one there.
    """

    def __init__(self, config: StoreConfig, redis: RedisConfig | None = None) -> None:
        self.block_tokens = config.block_tokens
        self.counters = Counters()
        self._keys = Keyring(config.dir)
        self._ram = RamTier(config.ram_bytes)
        self._rates = Rates()
        self._shelf: Shelf | None = None
        if config.dir is not None and redis is not None:
            self._shelf = Shelf(config.dir, config, redis, keys=self._keys, ram=self._ram, counters=self.counters)

    @property
    def index(self) -> KVIndex | None:
        """None where the store is RAM alone."""
        return self._shelf.index if self._shelf else None

    def scope(self, tenant: str, *, encrypt: bool = False) -> Scope:
        """The tenant as of now. `encrypt`: what is saved under this scope lies encrypted on disk."""
        return self._keys.scope(tenant, encrypt=encrypt)

    def find(
        self, scope: Scope, space: Space, token_ids: Sequence[int], *, limit: int | None = None, role: str = ""
    ) -> Hit | None:
        """The longest stored prefix in whole blocks, of at most `limit` tokens; at most one round trip."""
        most = len(token_ids) if limit is None else min(limit, len(token_ids))
        ids = chain(scope, space, token_ids[: max(0, most)], self.block_tokens)
        if not ids:
            return None
        pieces = self._longest(scope, ids) if self._keys.current(scope) else []
        blocks = _blocks(pieces)
        self.counters.add("hits" if blocks else "misses", role=role)
        if not blocks:
            return None
        return Hit(blocks * self.block_tokens, scope, space, role, self.block_tokens, tuple(ids), tuple(pieces))

    def load(self, hit: Hit, device: torch.device | None = None) -> KVCache | None:
        """KV of hit.tokens tokens, or of fewer where something is lost or slower than computing; None for none.

        The result is a copy: the caller may write to it.
        """
        began = time.perf_counter()
        parts: list[KVCache] = []
        at = 0
        pieces = self._worth(hit)
        from_ram = all(self._ram.get(hit.scope.tag, p.obj) is not None for p in pieces)
        for piece in pieces:
            segment = self._fetch(hit, piece, hit.ids[at + piece.stop - piece.start - 1])
            if segment is None:
                break
            parts.append(segment.kv.slice(piece.start * hit.block, piece.stop * hit.block))
            at += piece.stop - piece.start
        if not parts:
            return None
        try:
            kv = KVCache.concat(parts) if len(parts) > 1 else parts[0].clone()
        except KVMismatch as error:
            for piece in hit.pieces:
                self._forget(hit, piece.obj, "corrupt", str(error))
            return None
        if device is not None and device.type != "cpu":
            kv = KVCache([k.to(device) for k in kv.keys], [v.to(device) for v in kv.values])
        if from_ram:
            self._rates.loaded("ram", kv.nbytes, time.perf_counter() - began)
        self.counters.add("tokens", at * hit.block, role=hit.role)
        return kv

    def save(
        self,
        scope: Scope,
        space: Space,
        token_ids: Sequence[int],
        kv: KVCache,
        *,
        start: int = 0,
        ttl: float = 86400.0,
        max_bytes: int | None = None,
        role: str = "",
    ) -> None:
        """Store the whole blocks of token_ids from `start` on. `kv` holds the KV of token_ids[0..] and is copied.

        `ttl` in seconds from now; `max_bytes` bounds all that the tenant has here. Returns before anything is on disk.
        """
        if not self._keys.current(scope) or ttl <= 0:
            return
        try:
            known = min(len(token_ids), tokens_of(kv))
        except KVMismatch as error:
            self.counters.add("failed")
            _log.error("kv_not_stored", reason=str(error))
            return
        ids = chain(scope, space, token_ids[:known], self.block_tokens)
        at = max(min(start // self.block_tokens, len(ids)), self._shelve_again(scope, ids))
        limit, expires = _NO_LIMIT if max_bytes is None else max_bytes, time.time() + ttl
        step = max(1, SEGMENT_TOKENS // self.block_tokens)
        while at < len(ids):
            stop = min(len(ids), (at // step + 1) * step)
            parent, own = (ids[at - 1] if at else b""), tuple(ids[at:stop])
            head = Head(scope.tag, token_hex(16), space.digest.hex(), role, at, parent, own, expires, limit)
            segment = Segment(head, cut(kv, at * self.block_tokens, stop * self.block_tokens))
            self._keep(segment)
            self._shelve(scope, segment)
            at = stop

    def rates(self, *, prefill_tokens_per_s: float, space: Space | None = None) -> None:
        """Tell how fast computing is, for one space or for all that are not told; a slower load is refused."""
        self._rates.computing(prefill_tokens_per_s, space.digest if space else None)

    def purge(self, tenant: str) -> Purged:
        """Make all that the tenant has invisible, to every process of this folder at once; then destroy it.

        Raises OSError where the new epoch cannot be written even after the tenant's own files have made room.
        """
        try:
            old = self._keys.step(tenant)
        except OSError:
            if self._shelf is not None:
                self._shelf.destroy(self._keys.scope(tenant).tag)
            old = self._keys.step(tenant)
        held = self._ram.drop_tag(old.tag)
        sizes = {segment.head.obj: segment.size for segment in held}
        destroyed, size = self._shelf.destroy(old.tag) if self._shelf else (set(), 0)
        size += sum(n for obj, n in sizes.items() if obj not in destroyed)
        entries = len(destroyed | set(sizes))
        self.counters.add("purged", entries)
        return Purged(entries, size)

    def settle(self, timeout: float = 10.0) -> bool:
        """Wait until all that was saved so far is on disk and in the index, or was dropped; False after `timeout`."""
        return self._shelf.settle(timeout) if self._shelf else True

    def stats(self) -> dict[str, object]:
        """Bytes and segments by tier, the queue, and whether the index answers."""
        shown: dict[str, object] = {"ram_bytes": self._ram.bytes, "ram_segments": len(self._ram)}
        if self._shelf is not None:
            shown |= self._shelf.stats()
        return shown | {"load_bytes_per_s": self._rates.shown()}

    def close(self) -> None:
        """Write what waits (some seconds at most), end the thread, close the connections."""
        if self._shelf is not None:
            self._shelf.close()

    def _longest(self, scope: Scope, ids: list[bytes]) -> list[Piece]:
        pieces = self._ram.find(scope.tag, ids)
        if self._shelf is None:
            return pieces
        if _blocks(pieces) == len(ids):
            self._shelf.note_use(scope, ids[-1])
            return pieces
        try:
            stored = [Piece(f.obj, 0, f.used, f.size) for f in self._shelf.index.match(scope.tag, ids)]
        except IndexDown:
            self.counters.add("index_errors")
            return pieces
        return stored if _blocks(stored) > _blocks(pieces) else pieces

    def _worth(self, hit: Hit) -> Sequence[Piece]:
        tiers = ["ram" if self._ram.get(hit.scope.tag, p.obj) is not None else "disk" for p in hit.pieces]
        steps = [(tier, p.size, (p.stop - p.start) * hit.block) for tier, p in zip(tiers, hit.pieces, strict=True)]
        worth = self._rates.worth(steps, hit.space.digest)
        if worth < len(steps):
            self.counters.add("refused_slow", len(steps) - worth, tier=tiers[worth], role=hit.role)
        return hit.pieces[:worth]

    def _fetch(self, hit: Hit, piece: Piece, last: bytes) -> Segment | None:
        """The piece's segment, from RAM or disk; `last` is the id that its last used block must have."""
        segment = self._ram.get(hit.scope.tag, piece.obj)
        tier = "ram" if segment is not None else "disk"
        try:
            segment = segment or self._read(hit, piece)
            ids = segment.head.ids
            if len(ids) < piece.stop or ids[piece.stop - 1] != last or tokens_of(segment.kv) != len(ids) * hit.block:
                raise Damaged("other blocks than the index says")
        except FileNotFoundError:
            self._forget(hit, piece.obj, "missing", "no file")
            return None
        except Damaged as error:
            self._forget(hit, piece.obj, "corrupt", str(error))
            return None
        self.counters.add("bytes", segment.size, tier=tier, role=hit.role)
        return segment

    def _read(self, hit: Hit, piece: Piece) -> Segment:
        if self._shelf is None:
            raise FileNotFoundError(piece.obj)
        began = time.perf_counter()
        segment = self._shelf.disk.read(hit.scope, piece.obj)
        self._rates.loaded("disk", segment.size, time.perf_counter() - began)
        self._keep(segment)
        return segment

    def _shelve_again(self, scope: Scope, ids: list[bytes]) -> int:
        """How many leading blocks RAM holds; what of them is not on disk is offered to it once more."""
        here = self._ram.find(scope.tag, ids)
        for piece in here:
            held = self._ram.get(scope.tag, piece.obj)
            if held is not None and not held.durable:
                self._shelve(scope, held)
        return _blocks(here)

    def _keep(self, segment: Segment) -> None:
        evicted = self._ram.put(segment)
        self.counters.add("evicted", evicted, tier="ram", role=segment.head.role)

    def _shelve(self, scope: Scope, segment: Segment) -> None:
        if self._shelf is not None:
            self._shelf.offer(scope, segment)

    def _forget(self, hit: Hit, obj: str, count: str, reason: str) -> None:
        self.counters.add(count, role=hit.role)
        _log.warning("kv_lost", why=count, reason=reason, tag=hit.scope.tag, segment=obj)
        self._ram.drop(hit.scope.tag, obj)
        if self._shelf is not None:
            self._shelf.lost(hit.scope.tag, obj)


def _blocks(pieces: Sequence[Piece]) -> int:
    return sum(p.stop - p.start for p in pieces)
