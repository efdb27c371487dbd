"""KVStore: KV by tenant, space and tokens; in worker RAM, on local disk and in a tier that machines share.

`find` and `load` and `save` are the engine's: a sick disk, Redis or object store makes them miss, never raise. Files
and indexes are written by threads of the store (`workers.shelf`). Without Redis there is the RAM tier alone.

The shared tier is any place that fsspec opens. Its files are always encrypted. Machines find each other's KV when they
have one Redis, one shared place and one server key (`key_file`, or the variable that `workers.keys` names). Each
tenant's secret then lies in the shared place instead of the store's folder, so that one purge ends the epoch for all:
at once where the place is a mounted folder, else within the few seconds in which each worker looks. A bucket that keeps
old versions keeps old secrets too: switch that off for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Protocol

import structlog
import torch

from workers.cache import KVCache
from workers.codec import pack
from workers.config import RedisConfig, StoreConfig
from workers.counters import Counters
from workers.embedded import EmbeddedRedis
from workers.errors import KVMismatch
from workers.flights import Claim, Flights
from workers.index import KVIndex
from workers.keys import Keyring, Scope, Space, chain, given_key
from workers.rates import Rates
from workers.remote import Remote, local_folder
from workers.segments import Damaged, Head, Segment, cut, tokens_of
from workers.shelf import Place, Resting, Shelf
from workers.tiers import DiskTier, ObjectTier, Piece, RamTier, Tier
from workers.vault import FolderVault, RemoteVault, Vault

__all__ = ["Claim", "Hit", "KVStore", "Purged", "Scope", "Space"]

SEGMENT_TOKENS = 256
"""A segment ends at a multiple of this; what is found, loaded, evicted and lost together."""
_NO_LIMIT = 2**53

_log = structlog.get_logger(__name__)


class Receives(Protocol):
    """What KV may be loaded into."""

    def put(self, kv: KVCache) -> None:
        """Append a copy."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest stored prefix: `tokens` is at most find's `limit`, and a multiple of the block size or that limit."""

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
        self.codec = config.codec
        far = _Far.of(config.shared) if config.shared is not None else None
        self._keys = Keyring(config.dir, server_key=given_key(config.key_file), vault=far.vault if far else None)
        if far is not None and not self._keys.given:
            _log.warning("kv_shared_without_key", reason="no other machine can read what this one shares")
        self._ram = RamTier(config.ram_bytes)
        self._rates = Rates()
        self._shelves = self._open(config, redis, far.tier if far else None) if redis is not None else []
        self._flights = Flights(self._shelves[-1].index, self.counters) if self._shelves else None

    def _open(self, config: StoreConfig, redis: RedisConfig, far: Tier | None) -> list[Shelf]:
        """Nearest first. The first one's thread does the chores of all."""
        embedded = EmbeddedRedis(config.dir / "redis") if redis.url == "embedded" and config.dir is not None else None
        if embedded is None and redis.url == "embedded":
            return []
        url = embedded.url if embedded is not None else redis.url
        tiers: list[tuple[Place, Tier]] = []
        if config.dir is not None:
            place = Place("disk", url, self._keys.store_tag, config.max_bytes, redis.timeout)
            tiers.append((place, DiskTier(config.dir)))
        if far is not None:
            place = Place("shared", url, self._keys.shared_tag, config.shared_bytes, redis.timeout)
            tiers.append((place, far))
        return [
            Shelf(
                place,
                tier,
                keys=self._keys,
                ram=self._ram,
                counters=self.counters,
                chores=self._chores if nearest else None,
                embedded=embedded if nearest else None,
            )
            for (place, tier), nearest in zip(tiers, [True, False], strict=False)
        ]

    @property
    def index(self) -> KVIndex | None:
        """Of the nearest tier; None where the store is RAM alone."""
        return self._shelves[0].index if self._shelves else None

    def scope(self, tenant: str, *, encrypt: bool = False) -> Scope:
        """The tenant as of now. `encrypt`: what is saved under this scope lies encrypted on disk."""
        return self._keys.scope(tenant, encrypt=encrypt)

    def find(
        self,
        scope: Scope,
        space: Space,
        token_ids: Sequence[int],
        *,
        limit: int | None = None,
        tail: bool = False,
        role: str = "",
    ) -> Hit | None:
        """The longest stored prefix of at most `limit` tokens, in whole blocks; at most one round trip for each tier.

        `tail`: also the unfull block at the limit's end, where exactly these tokens were saved with a tail.
        """
        most = max(0, len(token_ids) if limit is None else min(limit, len(token_ids)))
        ids = self._ids(scope, space, token_ids[:most], tail=tail)
        if not ids:
            return None
        pieces = self._longest(scope, ids) if self._keys.current(scope) else []
        blocks = _blocks(pieces)
        if not blocks:
            self.counters.add("misses", role=role)
            return None
        self.counters.add("hits", tier=pieces[-1].tier, role=role)
        tokens = min(blocks * self.block_tokens, most)
        return Hit(tokens, scope, space, role, self.block_tokens, tuple(ids), tuple(pieces))

    def load(self, hit: Hit, device: torch.device | None = None) -> KVCache | None:
        """KV of hit.tokens tokens, or of fewer where something is lost or slower than computing; None for none.

        The result is a copy: the caller may write to it.
        """
        parts = self._parts(hit)
        if not parts:
            return None
        kv = KVCache.concat(parts) if len(parts) > 1 else parts[0].clone()
        if device is not None and device.type != "cpu":
            kv = KVCache([k.to(device) for k in kv.keys], [v.to(device) for v in kv.values])
        return kv

    def load_into(self, hit: Hit, into: Receives, *, start: int = 0) -> int:
        """As `load`, without a copy in between, and without the first `start` tokens. Returns the prefix's length."""
        at = 0
        for part in self._parts(hit):
            length = tokens_of(part)
            if at + length > start:
                into.put(part.slice(max(0, start - at), length))
            at += length
        return at

    def _parts(self, hit: Hit) -> list[KVCache]:
        """The hit's pieces that are there and worth loading, as views that nobody may write to."""
        began = time.perf_counter()
        parts: list[KVCache] = []
        at = 0
        pieces = self._worth(hit)
        from_ram = all(self._ram.get(hit.scope.tag, p.obj) is not None for p in pieces)
        for piece in pieces:
            segment = self._fetch(hit, piece, hit.ids[at + piece.stop - piece.start - 1])
            if segment is None:
                break
            stop = min(piece.stop * hit.block, segment.head.tokens)
            parts.append(segment.kv(piece.start * hit.block, stop))
            at += piece.stop - piece.start
        if len({tuple((t.shape[1], t.shape[3], t.dtype) for t in part.keys) for part in parts}) > 1:
            for piece in hit.pieces:
                self._forget(hit, piece, "corrupt", "segments of one chain differ in shape")
            return []
        size = sum(part.nbytes for part in parts)
        if from_ram and parts:
            self._rates.loaded("ram", size, time.perf_counter() - began)
        return parts

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
        tail: bool = False,
        role: str = "",
    ) -> bytes | None:
        """Store the whole blocks of token_ids from `start` on. `kv` holds the KV of token_ids[0..] and is copied.

        `tail`: the unfull block at the end too, for who finds exactly these tokens. `ttl` in seconds from now;
        `max_bytes` bounds all that the tenant has in each tier. Returns before anything is on disk: the id of the last
        block, None where there was nothing to store.
        """
        if not self._keys.current(scope) or ttl <= 0:
            return None
        try:
            known = min(len(token_ids), tokens_of(kv))
        except KVMismatch as error:
            self.counters.add("failed")
            _log.error("kv_not_stored", reason=str(error))
            return None
        ids = self._ids(scope, space, token_ids[:known], tail=tail)
        at = max(min(start // self.block_tokens, len(ids)), self._shelve_again(scope, ids))
        if at >= len(ids):
            return None
        limit, expires = _NO_LIMIT if max_bytes is None else max_bytes, time.time() + ttl
        step = max(1, SEGMENT_TOKENS // self.block_tokens)
        while at < len(ids):
            stop = min(len(ids), (at // step + 1) * step)
            parent, own = (ids[at - 1] if at else b""), tuple(ids[at:stop])
            begin, end = at * self.block_tokens, min(stop * self.block_tokens, known)
            head = Head(
                scope.tag, token_hex(16), space.digest.hex(), role, at, parent, own, end - begin, expires, limit
            )
            segment = Segment(head, pack(cut(kv, begin, end), self.codec))
            self._keep(segment)
            self._shelve(scope, segment)
            at = stop
        return ids[-1]

    def claim(self, scope: Scope, space: Space, token_ids: Sequence[int], *, start: int) -> Claim | None:
        """Announce that this worker computes token_ids[start:], which are not stored; to be released by the caller.

        None where nobody else could use it or wait for it.
        """
        if self._flights is None or not self._keys.current(scope):
            return None
        tokens = len(token_ids) - start
        ids = self._ids(scope, space, token_ids[: start + self.block_tokens], tail=False)
        at = start // self.block_tokens
        if at >= len(ids):
            return None
        return self._flights.claim(scope.tag, ids[at], tokens, self._rates.seconds(tokens, space.digest))

    def flying(self, claim: Claim) -> bool:
        """Is another worker still computing what it claimed? One round trip."""
        return self._flights is not None and self._flights.flying(claim)

    def release(self, claim: Claim | None) -> None:
        """Give the own claim up, once what was saved meanwhile is written; returns at once."""
        if claim is not None and claim.mine and self._flights is not None:
            self._shelves[-1].release(claim.tag, claim.block, self._flights.owner)

    def rates(self, *, prefill_tokens_per_s: float, space: Space | None = None) -> None:
        """Tell how fast computing is, for one space or for all that are not told; a slower load is refused."""
        self._rates.computing(prefill_tokens_per_s, space.digest if space else None)

    def purge(self, tenant: str) -> Purged:
        """Make all that the tenant has invisible, then destroy it: in every tier, for every process that shares them.

        Raises OSError where the new epoch cannot be written even after the tenant's own files have made room.
        """
        try:
            old = self._keys.step(tenant)
        except OSError:
            tag = self._keys.scope(tenant).tag
            for shelf in self._shelves:
                shelf.destroy(tag)
            old = self._keys.step(tenant)
        sizes = {segment.head.obj: segment.size for segment in self._ram.drop_tag(old.tag)}
        destroyed: set[str] = set()
        size = 0
        for shelf in self._shelves:
            objects, freed = shelf.destroy(old.tag)
            destroyed |= objects
            size += freed
        size += sum(n for obj, n in sizes.items() if obj not in destroyed)
        entries = len(destroyed | set(sizes))
        self.counters.add("purged", entries)
        return Purged(entries, size)

    def settle(self, timeout: float = 10.0) -> bool:
        """Wait until all that was saved so far is in every tier and index, or was dropped; False after `timeout`."""
        until = time.monotonic() + timeout
        # All are waited for, also when one of them is late.
        return sum(shelf.settle(max(0.0, until - time.monotonic())) for shelf in self._shelves) == len(self._shelves)

    def stats(self) -> dict[str, object]:
        """Bytes and segments by tier, the queue, and whether the index answers."""
        shown: dict[str, object] = {"ram_bytes": self._ram.bytes, "ram_segments": len(self._ram)}
        for shelf in reversed(self._shelves):
            shown |= shelf.stats()
        return shown | {"load_bytes_per_s": self._rates.shown()}

    def close(self) -> None:
        """Write what waits (some seconds at most), end the threads, close the connections."""
        for shelf in reversed(self._shelves):
            shelf.close()
        self._keys.keep()

    def _ids(self, scope: Scope, space: Space, tokens: Sequence[int], *, tail: bool) -> list[bytes]:
        """A lossy codec has a space of its own: what went through it is never found as exact."""
        if self.codec != "exact":
            space = Space(space.kind, {"codec": self.codec, "of": space.digest.hex()})
        return chain(scope, space, tokens, self.block_tokens, tail=tail)

    def _longest(self, scope: Scope, ids: list[bytes]) -> list[Piece]:
        best = self._ram.find(scope.tag, ids)
        for shelf in self._shelves:
            if _blocks(best) == len(ids):
                if best[-1].tier == "ram":
                    shelf.note_use(scope, ids[-1])
                break
            stored = [Piece(f.obj, 0, f.used, f.size, shelf.name) for f in shelf.match(scope, ids)]
            best = stored if _blocks(stored) > _blocks(best) else best
        return best

    def _worth(self, hit: Hit) -> Sequence[Piece]:
        far = self._shelves[0].name if self._shelves else "ram"
        tiers = [
            "ram" if self._ram.get(hit.scope.tag, p.obj) is not None else far if p.tier == "ram" else p.tier
            for p in hit.pieces
        ]
        steps = [(tier, p.size, (p.stop - p.start) * hit.block) for tier, p in zip(tiers, hit.pieces, strict=True)]
        worth = self._rates.worth(steps, hit.space.digest)
        if worth < len(steps):
            self.counters.add("refused_slow", len(steps) - worth, tier=tiers[worth], role=hit.role)
        return hit.pieces[:worth]

    def _fetch(self, hit: Hit, piece: Piece, last: bytes) -> Segment | None:
        """The piece's segment, from the nearest tier; `last` is the id that its last used block must have."""
        began = time.perf_counter()
        held = self._ram.get(hit.scope.tag, piece.obj)
        if held is not None and _serves(held, piece, last):
            self._count_load(hit, piece, held, "ram", time.perf_counter() - began)
            return held
        computing = self._rates.seconds((piece.stop - piece.start) * hit.block, hit.space.digest)
        for at, shelf in enumerate(self._shelves):
            began = time.perf_counter()
            try:
                segment = shelf.read(hit.scope, piece.obj, computing)
                if not _serves(segment, piece, last):
                    raise Damaged("other blocks than the index says")
            except FileNotFoundError:
                if piece.tier == shelf.name or (piece.tier == "ram" and shelf is self._shelves[-1]):
                    self._forget(hit, piece, "missing", "no file", shelf)
            except Damaged as error:
                self._forget(hit, piece, "corrupt", str(error), shelf)
            except Resting:
                self.counters.add("disk_errors", tier=shelf.name)
            except OSError as error:
                self.counters.add("disk_errors", tier=shelf.name)
                _log.warning("kv_read_failed", tier=shelf.name, error=error.strerror or str(error) or "late")
            else:
                self._rates.loaded(shelf.name, segment.size, time.perf_counter() - began)
                self._keep(segment)
                for nearer in self._shelves[:at]:
                    nearer.offer(hit.scope, segment)
                self._count_load(hit, piece, segment, shelf.name, time.perf_counter() - began)
                return segment
        return None

    def _count_load(self, hit: Hit, piece: Piece, segment: Segment, tier: str, seconds: float) -> None:
        tokens = min(piece.stop * hit.block, segment.head.tokens) - piece.start * hit.block
        self.counters.add("tokens", tokens, tier=tier, role=hit.role)
        self.counters.add("bytes", segment.size, tier=tier, role=hit.role)
        computing = self._rates.seconds(tokens, hit.space.digest)
        if computing is not None and computing > seconds:
            self.counters.add("saved_seconds", computing - seconds, tier=tier, role=hit.role)

    def _shelve_again(self, scope: Scope, ids: list[bytes]) -> int:
        """How many leading blocks RAM holds; what of them lacks in a tier is offered to it once more."""
        here = self._ram.find(scope.tag, ids)
        for piece in here:
            held = self._ram.get(scope.tag, piece.obj)
            if held is not None:
                self._shelve(scope, held)
        return _blocks(here)

    def _keep(self, segment: Segment) -> None:
        evicted = self._ram.put(segment)
        self.counters.add("evicted", evicted, tier="ram", role=segment.head.role)

    def _shelve(self, scope: Scope, segment: Segment) -> None:
        for shelf in self._shelves:
            shelf.offer(scope, segment)

    def _forget(self, hit: Hit, piece: Piece, count: str, reason: str, *where: Shelf) -> None:
        self.counters.add(count, tier=where[0].name if where else "", role=hit.role)
        _log.warning("kv_lost", why=count, reason=reason, tag=hit.scope.tag, segment=piece.obj)
        self._ram.drop(hit.scope.tag, piece.obj)
        for shelf in where or self._shelves:
            shelf.lost(hit.scope.tag, piece.obj)

    def _chores(self) -> None:
        """In the nearest shelf's thread: what ended by time or by another process's purge goes."""
        self._keys.keep()
        self.counters.add("evicted", self._ram.expire(), tier="ram")
        for tag in self._keys.refresh():
            self._ram.drop_tag(tag)
            for shelf in self._shelves:
                shelf.destroy(tag)


@dataclass(frozen=True, slots=True)
class _Far:
    """The place that machines share: a mounted folder, or whatever else fsspec opens."""

    tier: Tier
    vault: Vault

    @classmethod
    def of(cls, url: str) -> _Far:
        folder = local_folder(url)
        if folder is not None:
            return cls(DiskTier(folder), FolderVault(folder / RemoteVault.FOLDER))
        remote = Remote(url)
        return cls(ObjectTier(remote), RemoteVault(remote))


def _serves(segment: Segment, piece: Piece, last: bytes) -> bool:
    """Is it the segment that the piece was cut from, whole?"""
    ids = segment.head.ids
    if len(ids) < piece.stop or ids[piece.stop - 1] != last:
        return False
    return tokens_of(segment.packed.kv) in (0, segment.head.tokens)


def _blocks(pieces: Sequence[Piece]) -> int:
    return sum(p.stop - p.start for p in pieces)
