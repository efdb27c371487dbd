"""Counters of one store: plain numbers under a lock, read by whoever exports them. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from threading import Lock
from typing import ClassVar

Label = tuple[str, str, str]
"""(name, tier, role); tier is `ram`, `disk`, `shared` or empty, role what the caller named the artefact."""


class Counters:
    """Monotonic counts. Names are those of `NAMES`; an unknown one raises KeyError."""

    NAMES: ClassVar[dict[str, str]] = {
        "hits": "finds that named at least one block",
        "misses": "finds that named none",
        "tokens": "tokens loaded",
        "saved_seconds": "seconds that loading took less than computing would have, by the measured rate",
        "bytes": "bytes loaded",
        "stored": "segments stored",
        "stored_bytes": "bytes stored",
        "refused_slow": "loads refused because computing was predicted to be faster",
        "corrupt": "payloads that were short, damaged or foreign",
        "missing": "payloads that the index named and nobody found",
        "dropped": "segments not stored: full queue, no room within the budget, or no index",
        "evicted": "segments evicted to make room, or expired",
        "disk_errors": "reads, writes or deletes that a disk or the shared tier refused",
        "index_errors": "calls that the index did not answer in time",
        "claimed": "prompts that this worker announced to compute, so that others wait",
        "waited": "prompts that waited for another worker's computing",
        "purged": "segments destroyed by a purge",
        "failed": "background jobs that ended in an unforeseen error",
    }

    def __init__(self) -> None:
        self._counts: defaultdict[Label, float] = defaultdict(int)
        self._lock = Lock()

    def add(self, name: str, count: float = 1, *, tier: str = "", role: str = "") -> None:
        if name not in self.NAMES:
            raise KeyError(name)
        with self._lock:
            self._counts[name, tier, role] += count

    def get(self, name: str, *, tier: str | None = None, role: str | None = None) -> float:
        """Sum over the labels that are not given."""
        return sum(
            count
            for (n, t, r), count in self.snapshot().items()
            if n == name and tier in (None, t) and role in (None, r)
        )

    def snapshot(self) -> dict[Label, float]:
        with self._lock:
            return dict(self._counts)
