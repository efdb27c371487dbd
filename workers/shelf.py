"""Shelf: the disk tier and the index, kept in step by one background thread.

Order of a write: charge in the index (`begin`), file aside, sync, rename, `commit`. Whatever breaks in between leaves
no entry: the charge ends by its deadline, the file by `reconcile`, which at start, and whenever Redis has lost its
memory, takes whole files into the index again and removes the rest. Without the index nothing is written.
"""

from __future__ import annotations

import time
from pathlib import Path
from threading import Lock

import structlog

from workers.background import Background
from workers.config import RedisConfig, StoreConfig
from workers.counters import Counters
from workers.embedded import EmbeddedRedis
from workers.index import Entry, IndexDown, KVIndex, Owner
from workers.keys import Keyring, Scope
from workers.segments import Head, Segment, file_size
from workers.tiers import DiskTier, RamTier

_PAUSE = 2.0
"""Seconds between chores."""
_PATIENCE = 1.0
"""Seconds that a call in the background may take."""
_BATCH = 128
_CLOSE = 5.0

_log = structlog.get_logger(__name__)


class Shelf:
    """`offer`, `lost` and `note_use` return at once; `destroy` waits for at most one write."""

    def __init__(
        self,
        folder: Path,
        config: StoreConfig,
        redis: RedisConfig,
        *,
        keys: Keyring,
        ram: RamTier,
        counters: Counters,
    ) -> None:
        self.disk = DiskTier(folder)
        self._embedded = EmbeddedRedis(folder / "redis") if redis.url == "embedded" else None
        url = self._embedded.url if self._embedded else redis.url
        self.index = KVIndex(url, keys.store_tag, timeout=redis.timeout)
        # Off the path of requests a busy server may take longer, and its trouble is not theirs.
        self._index = KVIndex(url, keys.store_tag, timeout=max(redis.timeout, _PATIENCE))
        self._keys, self._ram, self._counters = keys, ram, counters
        self._max_bytes = config.max_bytes
        self._io = Lock()
        self._reconciled = False
        self._to_purge: set[str] = set()
        self._thread = Background("kv-shelf", chores=self._chores, failed=self._failed, pause=_PAUSE)

    def offer(self, scope: Scope, segment: Segment) -> None:
        """Have the segment written; dropped, and counted, when the queue is full."""
        if segment.queued:
            return
        segment.queued = self._thread.offer(lambda: self._store(scope, segment), segment.size)
        if not segment.queued:
            self._count("dropped", segment.head)

    def lost(self, tag: str, obj: str) -> None:
        """Forget a segment whose file is missing or damaged."""
        self._thread.offer(lambda: self._remove(tag, obj))

    def note_use(self, scope: Scope, last: bytes) -> None:
        """Mark a chain that was served without the index as used there."""
        self._thread.offer(lambda: self._index.used(scope.tag, last))

    def destroy(self, tag: str) -> tuple[set[str], int]:
        """Remove all of a tag that is no longer live; returns objects and bytes that lay on disk."""
        with self._io:
            destroyed = self.disk.delete_tag(tag)
        try:
            self._index.purge(tag)
        except IndexDown:
            self._counters.add("index_errors")
            self._to_purge.add(tag)
        return destroyed

    def settle(self, timeout: float) -> bool:
        """Wait until the queue is empty; False when that took longer."""
        return self._thread.settle(timeout)

    def stats(self) -> dict[str, object]:
        """Disk figures are None while the index is down."""
        shown: dict[str, object] = {"queue_jobs": self._thread.waiting, "queue_bytes": self._thread.bytes}
        try:
            usage = self.index.usage()
        except IndexDown:
            return shown | {"index_up": False, "disk_bytes": None, "disk_segments": None}
        return shown | {"index_up": True, "disk_bytes": usage.bytes, "disk_segments": usage.segments}

    def close(self) -> None:
        """Write what waits, for some seconds at most."""
        if not self._thread.close(_CLOSE):
            _log.warning("kv_close_left_work")
        self._keys.keep()
        self.index.close()
        self._index.close()
        if self._embedded is not None:
            self._embedded.stop()

    # -- in the background thread -----------------------------------------------------------------------------------

    def _store(self, scope: Scope, segment: Segment) -> None:
        segment.queued = False
        try:
            with self._io:
                self._store_now(scope, segment)
        except IndexDown:
            self._counters.add("index_errors")
            self._count("dropped", segment.head)

    def _store_now(self, scope: Scope, segment: Segment) -> None:
        head = segment.head
        if segment.durable or not self._keys.current(scope):
            return
        entry = self._entry(head, file_size(segment, scope))
        begun = self._index.begin(entry, tenant_limit=head.limit, store_limit=self._max_bytes)
        self._evict(begun.victims)
        if begun.status != "ok":
            self._settle_status(segment, begun.status)
            return
        try:
            size = self.disk.write(segment, scope)
        except OSError as error:
            _log.warning("kv_write_failed", error=error.strerror, segment=head.obj)
            self._count("disk_errors", head)
            self._index.abort(head.tag, head.obj)
            return
        try:
            status = self._index.commit(head.tag, head.obj)
        except IndexDown:
            self.disk.delete(head.tag, head.obj)
            raise
        if status != "ok":
            self.disk.delete(head.tag, head.obj)
            self._settle_status(segment, status)
            return
        segment.durable = True
        self._count("stored", head)
        self._counters.add("stored_bytes", size, tier="disk", role=head.role)

    def _settle_status(self, segment: Segment, status: str) -> None:
        """`have`: another's file serves. `orphan`: the chain before it is not on disk, so the next save stores that."""
        if status == "have":
            segment.durable = True
            return
        self._count("dropped", segment.head)
        if status == "orphan":
            self._ram.not_durable(segment.head)

    def _entry(self, head: Head, size: int) -> Entry:
        life = head.expires - time.time()
        return Entry(head.tag, head.obj, size, head.first, head.parent, head.ids, life)

    def _remove(self, tag: str, obj: str) -> None:
        self.disk.delete(tag, obj)
        try:
            self._index.gone(tag, obj)
        except IndexDown:
            self._counters.add("index_errors")

    def _evict(self, victims: tuple[Owner, ...]) -> None:
        for tag, obj in victims:
            self.disk.delete(tag, obj)
            held = self._ram.get(tag, obj)
            if held is not None:
                held.durable = False
        self._counters.add("evicted", len(victims), tier="disk")

    def _chores(self) -> None:
        self._keys.keep()
        self._counters.add("evicted", self._ram.expire(), tier="ram")
        if self._embedded is not None and not self._embedded.running:
            self._embedded.start()
        for tag in self._ram.tags() - set(self._keys.live()):
            self._ram.drop_tag(tag)
        try:
            if not self._reconciled or not self._index.up():
                self.reconcile()
                self._reconciled = True
            self._index.mark_up()
            self._evict(self._index.tidy())
            for tag in list(self._to_purge):
                self._index.purge(tag)
                self._to_purge.discard(tag)
        except IndexDown:
            self._counters.add("index_errors")

    def reconcile(self) -> None:
        """Make the index name exactly the whole files of live tenants. Raises IndexDown."""
        tags = self.disk.tags()
        live = self._keys.live()
        for tag in tags:
            if tag not in live:
                self.destroy(tag)
                continue
            objects = self.disk.objects(tag)
            unknown = []
            for at in range(0, len(objects), _BATCH):
                batch = objects[at : at + _BATCH]
                unknown += [obj for obj, known in zip(batch, self._index.known(tag, batch), strict=True) if not known]
            self._adopt(live[tag], unknown)
        self.disk.delete_stale()

    def _adopt(self, scope: Scope, objects: list[str]) -> None:
        found = list(self.disk.heads(scope, objects))
        for obj, head, _ in found:
            if head is None:
                self._counters.add("corrupt", tier="disk")
                _log.warning("kv_lost", why="corrupt", reason="damaged head", tag=scope.tag, segment=obj)
                self.disk.delete(scope.tag, obj)
        whole = [(head, size) for _, head, size in found if head is not None]
        for head, size in sorted(whole, key=lambda pair: pair[0].first):
            status = "late"
            if head.expires > time.time():
                begun = self._index.begin(self._entry(head, size), tenant_limit=head.limit, store_limit=self._max_bytes)
                self._evict(begun.victims)
                status = begun.status
                if status == "ok":
                    status = self._index.commit(head.tag, head.obj)
            if status != "ok" and not self._index.known(head.tag, [head.obj])[0]:
                self.disk.delete(head.tag, head.obj)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, IndexDown):
            self._counters.add("index_errors")
            return
        self._counters.add("failed")
        _log.error("kv_job_failed", error=type(error).__name__, exc_info=error)

    def _count(self, name: str, head: Head) -> None:
        self._counters.add(name, tier="disk", role=head.role)
