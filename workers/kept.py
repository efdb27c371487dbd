"""KV that frozen models read for training, kept in a KVStore: read once for all steps, seeds, fusers and processes.

A text is found only as it was read: whole. KV that is put together of pieces, or that a serving engine has read in
chunks, differs in its last bits, and a training must end at the same weights whatever was stored before. So every text
has a space of its own, under a name that no tenant can have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from transformers.cache_utils import DynamicCache

from workers.c2c_run import Prompt, layers_of, read_sharer
from workers.cache import KVCache
from workers.config import RedisConfig, StoreConfig
from workers.errors import LoadFailed
from workers.greedy import expand, read
from workers.loader import Loaded, cache_dir
from workers.pairs import canonical
from workers.store import SEGMENT_TOKENS, KVStore, Space

SCOPE = "pair train"
"""A tenant's name has no space."""
KEEP_BYTES = 2 << 30
"""Unless told otherwise."""
LIFE = 7 * 86400.0
"""Seconds from when a text was read to when its KV goes."""
_RAM = 256 << 20
_PATIENCE = 2.0
"""Seconds that Redis may take: here nobody waits for a first token, and a miss is read again."""
_TOGETHER = (64, 128 << 20)
"""Texts and bytes that may wait to be written."""


class KeptKV:
    """Reads for frozen models, as `workers.greedy.read` and `workers.c2c_run.read_sharer` do, bit for bit.

    `most`: bytes of texts that one run keeps. What is beyond is read every time: dropping the oldest for it would, in
    a run that comes to every text in turn, drop each right before it is needed.
    """

    def __init__(self, store: KVStore | None, most: int) -> None:
        self.computed = self.found = 0
        """Texts read by a model; texts that were there."""
        self._store, self._most, self._room = store, most, most
        self._known: set[bytes] = set()
        self._waiting = [0, 0]

    def read(self, loaded: Loaded, ids: Sequence[int]) -> KVCache:
        """KV of the ids, read alone from position 0."""
        return self._keep(loaded, ids, "", lambda: read(loaded, ids))

    def read_sharer(self, loaded: Loaded, prompt: Prompt) -> DynamicCache:
        """KV of the first sharer's prompt, as far as it is fused; one row."""
        mask = prompt.mask_of(0)
        how = canonical([[s.length for s in prompt.sections], mask.tolist() if mask is not None else None])
        ids = prompt.ids_of(0)[0].tolist()[: prompt.fused_until(0)]
        kv = self._keep(loaded, ids, hashlib.sha256(how).hexdigest(), lambda: _kv(read_sharer(loaded.model, prompt)))
        cache: DynamicCache = expand(kv, 1)
        return cache

    def _keep(self, loaded: Loaded, ids: Sequence[int], how: str, compute: Callable[[], KVCache]) -> KVCache:
        if self._store is None or not ids:
            self.computed += 1
            return compute()
        text = hashlib.sha256(canonical([list(ids), how])).hexdigest()
        space = Space("plain", {**loaded.identity, "device": loaded.device.type, "text": text})
        kv = self._load(self._store, space, loaded, ids)
        if kv is not None:
            self.found += 1
            self._fits(space, kv)
            return kv
        self.computed += 1
        kv = compute()
        if self._fits(space, kv):
            self._save(self._store, space, ids, kv)
        return kv

    def _load(self, store: KVStore, space: Space, loaded: Loaded, ids: Sequence[int]) -> KVCache | None:
        hit = store.find(store.scope(SCOPE), space, ids, tail=True, role="training")
        if hit is None or hit.tokens != len(ids):
            return None
        kv, shape = store.load(hit, loaded.device), loaded.shape
        whole = (1, shape.heads, len(ids), shape.head_size)
        if kv is None or kv.layers != shape.layers:
            return None
        return kv if all(tuple(t.shape) == whole for both in kv.tensors() for t in both) else None

    def _fits(self, space: Space, kv: KVCache) -> bool:
        """Is there room for it in what this run may keep? Each text is counted once."""
        if space.digest in self._known:
            return True
        files = 1 + len(kv) // SEGMENT_TOKENS
        size = kv.nbytes + files * (1024 + 400 * kv.layers)  # and what a file says of itself
        if size > self._room:
            return False
        self._room -= size
        self._known.add(space.digest)
        return True

    def _save(self, store: KVStore, space: Space, ids: Sequence[int], kv: KVCache) -> None:
        scope = store.scope(SCOPE)
        store.save(scope, space, ids, kv, ttl=LIFE, max_bytes=self._most, tail=True, role="training")
        self._waiting = [self._waiting[0] + 1, self._waiting[1] + kv.nbytes]
        if any(now >= most for now, most in zip(self._waiting, _TOGETHER, strict=True)):
            # What a full queue drops would be read again.
            store.settle(60.0)
            self._waiting = [0, 0]


def _kv(cache: DynamicCache) -> KVCache:
    return KVCache([layer.keys for layer in layers_of(cache)], [layer.values for layer in layers_of(cache)])


def own_store() -> StoreConfig:
    """The store that trainings of this user share when no other is named."""
    return StoreConfig(dir=cache_dir() / "training-kv")


@contextmanager
def keeping(most: int, store: StoreConfig | None = None, redis: RedisConfig | None = None) -> Iterator[KeptKV]:
    """Reads that are kept within `most` bytes, 0 for none; in a store of the user's own unless one is named.

    What waits is written before it ends. Raises LoadFailed where the store's folder cannot be used.
    """
    if not most:
        yield KeptKV(None, 0)
        return
    config = store or own_store().model_copy(update={"max_bytes": most})
    config = config.model_copy(update={"codec": "exact", "ram_bytes": min(config.ram_bytes, _RAM)})
    index = redis or RedisConfig()
    try:
        opened = KVStore(config, index.model_copy(update={"timeout": max(index.timeout, _PATIENCE)}))
    except OSError as error:
        raise LoadFailed(f"{config.dir}: KV cannot be kept there ({error.strerror or error})") from error
    try:
        opened.settle(30.0)  # until the index says what lies on the disk
        yield KeptKV(opened, most)
        opened.settle(60.0)
    finally:
        opened.close()
