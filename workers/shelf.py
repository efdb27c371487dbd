"""Shelf: one tier of files and its index, kept in step by one background thread.

Order of a write: charge in the index (`begin`), write the file whole, `commit`. Whatever breaks in between leaves
no entry: the charge ends by its deadline, the file by `reconcile`, which at start, and whenever Redis has lost its
memory, takes whole files into the index again and removes the rest. Without the index nothing is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from secrets import token_hex
from threading import Lock

import structlog

from workers.background import Background
from workers.counters import Counters
from workers.embedded import EmbeddedRedis
from workers.index import Breaker, Entry, Found, IndexDown, KVIndex, Owner
from workers.keys import Keyring, Scope
from workers.segments import Damaged, Head, Segment, file_size
from workers.tiers import RamTier, Tier

_PAUSE = 2.0
"""Seconds between chores."""
_PATIENCE = 1.0
"""Seconds that a call to Redis in the background may take."""
_READ_PATIENCE = (0.25, 5.0)
"""Seconds that a request waits at least and at most for one file of a shared tier; else twice as long as computing."""
_READERS = 4
_BATCH = 128
_CLOSE = 5.0
_TIDY_EVERY = 3600.0
"""Seconds in which the machines that share a tier compare its files with its index once between them."""

_log = structlog.get_logger(__name__)


class Resting(OSError):
    """A shared place that refused or was late is not asked for a while."""


@dataclass(frozen=True, slots=True)
class Place:
    """What tells one shelf from another. `name` labels counters and rates: `disk` or `shared`."""

    name: str
    url: str
    """Of Redis."""
    index_tag: str
    max_bytes: int
    timeout: float
    """Of a call to Redis on the path of a request, in seconds."""

    @property
    def shared(self) -> bool:
        """Other machines use it: always encrypted, reads may hang, and it is not for one process to tidy."""
        return self.name == "shared"


class Shelf:
    """`offer`, `lost` and `note_use` return at once; `destroy` waits for at most one write.

    `chores` runs before the shelf's own, in its thread. An `embedded` server is started there and stopped at `close`.
    """

    def __init__(
        self,
        place: Place,
        tier: Tier,
        *,
        keys: Keyring,
        ram: RamTier,
        counters: Counters,
        chores: Callable[[], None] | None = None,
        embedded: EmbeddedRedis | None = None,
    ) -> None:
        self.name = place.name
        self._place, self._tier = place, tier
        self._embedded = embedded
        self.index = KVIndex(place.url, place.index_tag, timeout=place.timeout)
        # Off the path of requests a busy server may take longer, and its trouble is not theirs.
        self._index = KVIndex(place.url, place.index_tag, timeout=max(place.timeout, _PATIENCE))
        self._keys, self._ram, self._counters = keys, ram, counters
        self._before = chores
        self._io = Lock()
        self._reads = Breaker()
        self._readers = ThreadPoolExecutor(_READERS, "kv-read") if place.shared else None
        self._me = token_hex(8)
        self._reconciled = False
        self._to_purge: set[str] = set()
        self._thread = Background(f"kv-{place.name}", chores=self._chores, failed=self._failed, pause=_PAUSE)

    def match(self, scope: Scope, ids: list[bytes]) -> list[Found]:
        """What the index knows of a chain; nothing where it is down."""
        try:
            return self.index.match(scope.tag, ids)
        except IndexDown:
            self._counters.add("index_errors")
            return []

    def read(self, scope: Scope, obj: str, computing: float | None = None) -> Segment:
        """`computing`: the seconds that it spares, where they are known.

        Raises FileNotFoundError, Damaged, or OSError where a shared place does not answer in time.
        """
        if self._readers is None:
            return self._read(scope, obj)
        if not self._reads.admit():
            raise Resting("shared tier: resting after errors")
        least, most = _READ_PATIENCE
        reading = self._readers.submit(self._read, scope, obj)
        try:
            segment = reading.result(most if computing is None else min(most, max(least, 2 * computing)))
        except (FileNotFoundError, Damaged):
            self._reads.report(ok=True)
            raise
        except OSError:  # also what `result` raises when the time is up
            reading.cancel()
            self._reads.report(ok=False)
            raise
        self._reads.report(ok=True)
        return segment

    def offer(self, scope: Scope, segment: Segment) -> None:
        """Have the segment written; dropped, and counted, when the queue is full."""
        if self.name in segment.queued or self.name in segment.durable:
            return
        segment.queued.add(self.name)
        sealed = replace(scope, encrypt=True) if self._place.shared else scope
        if not self._thread.offer(lambda: self._store(sealed, segment), segment.size):
            segment.queued.discard(self.name)
            self._count("dropped", segment.head)

    def lost(self, tag: str, obj: str) -> None:
        """Forget a segment whose file is missing or damaged."""
        self._thread.offer(lambda: self._remove(tag, obj))

    def note_use(self, scope: Scope, last: bytes) -> None:
        """Mark a chain that was served without the index as used there."""
        self._thread.offer(lambda: self._index.used(scope.tag, last))

    def release(self, tag: str, block: bytes, owner: str) -> None:
        """Give up a claim once all that was offered so far is written: who waited for it then finds that."""
        self._thread.offer(lambda: self._release(tag, block, owner))

    def destroy(self, tag: str) -> tuple[set[str], int]:
        """Remove all of a tag that is no longer live; returns objects and bytes that lay there."""
        destroyed: tuple[set[str], int] = (set(), 0)
        try:
            with self._io:
                destroyed = self._tier.delete_tag(tag)
            self._index.purge(tag)
        except IndexDown:
            self._counters.add("index_errors")
            self._to_purge.add(tag)
        except OSError as error:
            self._refused("kv_delete_failed", error)
            self._to_purge.add(tag)
        return destroyed

    def settle(self, timeout: float) -> bool:
        """Wait until the queue is empty; False when that took longer."""
        return self._thread.settle(timeout)

    def stats(self) -> dict[str, object]:
        """Figures of the index are None while it is down."""
        shown: dict[str, object] = {"queue_jobs": self._thread.waiting, "queue_bytes": self._thread.bytes}
        size, segments = f"{self.name}_bytes", f"{self.name}_segments"
        try:
            usage = self.index.usage()
        except IndexDown:
            return shown | {"index_up": False, size: None, segments: None}
        return shown | {"index_up": True, size: usage.bytes, segments: usage.segments}

    def close(self) -> None:
        """Write what waits, for some seconds at most."""
        if not self._thread.close(_CLOSE):
            _log.warning("kv_close_left_work", tier=self.name)
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)
        self.index.close()
        self._index.close()
        if self._embedded is not None:
            self._embedded.stop()

    def _read(self, scope: Scope, obj: str) -> Segment:
        segment = self._tier.read(scope, obj)
        segment.durable.add(self.name)
        return segment

    # -- in the background thread -----------------------------------------------------------------------------------

    def _store(self, scope: Scope, segment: Segment) -> None:
        segment.queued.discard(self.name)
        try:
            with self._io:
                self._store_now(scope, segment)
        except IndexDown:
            self._counters.add("index_errors")
            self._count("dropped", segment.head)

    def _store_now(self, scope: Scope, segment: Segment) -> None:
        head = segment.head
        if self.name in segment.durable or not self._keys.current(scope):
            return
        if not self._keys.kept(scope):
            self._count("dropped", head)
            return
        entry = self._entry(head, file_size(segment, scope))
        begun = self._index.begin(entry, tenant_limit=head.limit, store_limit=self._place.max_bytes)
        self._evict(begun.victims)
        if begun.status != "ok":
            self._settle_status(segment, begun.status)
            return
        try:
            size = self._tier.write(segment, scope)
        except OSError as error:
            self._refused("kv_write_failed", error)
            self._index.abort(head.tag, head.obj)
            return
        try:
            status = self._index.commit(head.tag, head.obj)
        except IndexDown:
            self._delete(head.tag, head.obj)
            raise
        if status != "ok":
            self._delete(head.tag, head.obj)
            self._settle_status(segment, status)
            return
        segment.durable.add(self.name)
        self._count("stored", head)
        self._counters.add("stored_bytes", size, tier=self.name, role=head.role)

    def _settle_status(self, segment: Segment, status: str) -> None:
        """`have`: another's file serves. `orphan`: the chain before it is not there, so the next save stores that."""
        if status == "have":
            segment.durable.add(self.name)
            return
        self._count("dropped", segment.head)
        if status == "orphan":
            self._ram.not_durable(segment.head, self.name)

    def _entry(self, head: Head, size: int) -> Entry:
        life = head.expires - time.time()
        return Entry(head.tag, head.obj, size, head.first, head.parent, head.ids, life)

    def _remove(self, tag: str, obj: str) -> None:
        self._delete(tag, obj)
        try:
            self._index.gone(tag, obj)
        except IndexDown:
            self._counters.add("index_errors")

    def _release(self, tag: str, block: bytes, owner: str) -> None:
        try:
            self._index.release(tag, block, owner)
        except IndexDown:
            self._counters.add("index_errors")

    def _evict(self, victims: tuple[Owner, ...]) -> None:
        for tag, obj in victims:
            self._delete(tag, obj)
            held = self._ram.get(tag, obj)
            if held is not None:
                held.durable.discard(self.name)
        self._counters.add("evicted", len(victims), tier=self.name)

    def _delete(self, tag: str, obj: str) -> None:
        try:
            self._tier.delete(tag, obj)
        except OSError as error:
            self._refused("kv_delete_failed", error)

    def _chores(self) -> None:
        if self._before is not None:
            self._before()
        if self._embedded is not None and not self._embedded.running:
            self._embedded.start()
        try:
            if not self._index.up() or (not self._reconciled and self._my_turn()):
                self.reconcile()
            self._reconciled = True
            self._index.mark_up()
            self._evict(self._index.tidy())
            for tag in list(self._to_purge):
                self._tier.delete_tag(tag)
                self._index.purge(tag)
                self._to_purge.discard(tag)
        except IndexDown:
            self._counters.add("index_errors")
        except OSError as error:
            self._refused("kv_chores_failed", error)

    def _my_turn(self) -> bool:
        return not self._place.shared or self._index.claim("tidy", b"", self._me, _TIDY_EVERY)

    def reconcile(self) -> None:
        """Make the index name exactly the whole files of live tenants. Raises IndexDown or OSError."""
        tags = self._tier.tags()
        live = self._keys.live()
        for tag in tags:
            if tag not in live:
                self.destroy(tag)
                continue
            objects = self._tier.objects(tag)
            unknown = []
            for at in range(0, len(objects), _BATCH):
                batch = objects[at : at + _BATCH]
                unknown += [obj for obj, known in zip(batch, self._index.known(tag, batch), strict=True) if not known]
            self._adopt(live[tag], unknown)
        self._tier.delete_stale()

    def _adopt(self, scope: Scope, objects: list[str]) -> None:
        found = list(self._tier.heads(scope, objects))
        for obj, head, _ in found:
            if head is None:
                self._counters.add("corrupt", tier=self.name)
                _log.warning("kv_lost", why="corrupt", reason="damaged head", tag=scope.tag, segment=obj)
                self._delete(scope.tag, obj)
        whole = [(head, size) for _, head, size in found if head is not None]
        for head, size in sorted(whole, key=lambda pair: pair[0].first):
            status = "late"
            if head.expires > time.time():
                entry = self._entry(head, size)
                begun = self._index.begin(entry, tenant_limit=head.limit, store_limit=self._place.max_bytes)
                self._evict(begun.victims)
                status = begun.status
                if status == "ok":
                    status = self._index.commit(head.tag, head.obj)
            if status != "ok" and not self._index.known(head.tag, [head.obj])[0]:
                self._delete(head.tag, head.obj)

    def _failed(self, error: Exception) -> None:
        if isinstance(error, IndexDown):
            self._counters.add("index_errors")
            return
        self._counters.add("failed")
        _log.error("kv_job_failed", error=type(error).__name__, exc_info=error)

    def _refused(self, event: str, error: OSError) -> None:
        self._counters.add("disk_errors", tier=self.name)
        _log.warning(event, tier=self.name, error=error.strerror or str(error))

    def _count(self, name: str, head: Head) -> None:
        self._counters.add(name, tier=self.name, role=head.role)
