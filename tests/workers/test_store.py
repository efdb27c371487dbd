"""KVStore against a real server and a real disk: what comes back is what went in, or nothing."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.kvlab import BLOCK, PLAIN, files, get, keys, opened, put, random_kv, same
from workers.background import Background
from workers.cache import KVCache
from workers.embedded import EmbeddedRedis
from workers.keys import Space
from workers.rates import Rates
from workers.store import KVStore


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def from_disk(server: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVStore]:
    """Keeps nothing in RAM, so that every load is a file's."""
    with opened(tmp_path_factory.mktemp("kv"), server.url, ram_bytes=0) as store:
        yield store


@given(
    st.integers(0, 700),
    st.lists(st.integers(0, 700), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_load_returns_what_was_saved(
    from_disk: KVStore, length: int, cuts: list[int], dtype: torch.dtype, disk: bool, encrypt: bool
) -> None:
    """However a text grows, its whole blocks come back bit for bit, from RAM or disk, plain or encrypted."""
    seed = int.from_bytes(os.urandom(4), "little")
    kv, tokens = random_kv(length, seed, dtype=dtype), [seed, *range(1, length)][:length]
    with opened(None, None) as in_ram:
        store = from_disk if disk else in_ram
        scope = store.scope("a", encrypt=encrypt)
        start = 0
        for stop in sorted(c for c in {*cuts, length} if c <= length):
            store.save(scope, PLAIN, tokens[:stop], kv, start=start)
            start = stop
        assert store.settle(20)
        whole = length - length % BLOCK
        hit = store.find(scope, PLAIN, tokens)
        assert (hit.tokens if hit else 0) == whole
        if hit:
            assert same(store.load(hit), kv.slice(0, whole))


def test_a_partial_hit_ends_where_blocks_end(from_disk: KVStore) -> None:
    """For every length and every limit, find names the whole blocks of it that are stored."""
    kv, tokens = random_kv(22, 7), list(range(1000, 1022))
    put(from_disk, tokens, kv)
    scope = from_disk.scope("a")
    for asked in range(23):
        hit = from_disk.find(scope, PLAIN, tokens[:asked])
        assert (hit.tokens if hit else 0) == min(asked, 20) // BLOCK * BLOCK
        limited = from_disk.find(scope, PLAIN, tokens, limit=asked)
        assert (limited.tokens if limited else 0) == min(asked, 20) // BLOCK * BLOCK
    other = from_disk.find(scope, PLAIN, [*tokens[:10], 1, 2, 3])
    assert other is not None
    assert other.tokens == 8
    assert same(from_disk.load(other), kv.slice(0, 8))


@pytest.mark.parametrize("disk", [False, True])
def test_a_tail_is_found_by_exactly_its_tokens(from_disk: KVStore, disk: bool) -> None:
    """The unfull last block serves who asks for just these tokens with a tail; everyone else gets whole blocks."""
    kv, tokens = random_kv(310, 17), list(range(5000, 5310))
    with opened(None, None) as in_ram:
        store = from_disk if disk else in_ram
        scope = store.scope("a")
        store.save(scope, PLAIN, tokens, kv, tail=True)
        assert store.settle(20)
        expected = [(tokens, True, 310), (tokens, False, 308), (tokens[:309], True, 308), ([*tokens, 1], True, 308),
                    ([*tokens[:309], 1], True, 308), (tokens[:308], True, 308)]  # fmt: skip
        for asked, tail, found in expected:
            hit = store.find(scope, PLAIN, asked, tail=tail)
            assert hit is not None
            assert hit.tokens == found
            assert same(store.load(hit), kv.slice(0, found))
        # What goes on after the tail is stored beside it, and neither hides the other.
        longer = KVCache.concat([kv, random_kv(10, 18)])
        store.save(scope, PLAIN, [*tokens, *range(10)], longer, start=308)
        assert store.settle(20)
        assert same(get(store, [*tokens, *range(10)]), longer)
        hit = store.find(scope, PLAIN, tokens, tail=True)
        assert hit is not None
        assert same(store.load(hit), kv)


class Into:
    """Collects what is put."""

    def __init__(self) -> None:
        self.parts: list[KVCache] = []

    def put(self, kv: KVCache) -> None:
        self.parts.append(kv.clone())


@given(st.integers(0, 600))
@settings(max_examples=20, deadline=None)
def test_loading_into_a_sequence_skips_what_is_there(start: int) -> None:
    """Whatever prefix is there already, what is put completes it."""
    with opened(None, None) as store:
        kv, tokens = random_kv(600), range(600)
        put(store, tokens, kv)
        hit = store.find(store.scope("a"), PLAIN, tokens)
        assert hit is not None
        into = Into()
        assert store.load_into(hit, into, start=start) == 600
        if start < 600:
            assert same(KVCache.concat([kv.slice(0, start), *into.parts]), kv)
        else:
            assert not into.parts


def test_layers_that_nobody_needs_stay_empty(from_disk: KVStore) -> None:
    """KV whose first layer holds no tokens comes back as it was."""
    full, none = random_kv(12, 9), torch.empty(1, 2, 0, 4)
    kv = KVCache([none, *full.keys[1:]], [none, *full.values[1:]])
    tokens = list(range(2000, 2012))
    put(from_disk, tokens, kv)
    assert same(get(from_disk, tokens), kv)


def test_what_is_loaded_is_the_callers_own() -> None:
    """Writing into loaded KV, or into KV after it was saved, changes nothing that is stored."""
    with opened(None, None) as store:
        kv, tokens = random_kv(8), list(range(8))
        kept = kv.clone()
        put(store, tokens, kv)
        kv.keys[0].zero_()
        loaded = get(store, tokens)
        assert same(loaded, kept)
        assert loaded is not None
        loaded.values[0].zero_()
        assert same(get(store, tokens), kept)


def test_another_tenant_finds_nothing(from_disk: KVStore) -> None:
    """The same tokens in the same space are another tenant's miss, and its own hit only after its own save."""
    kv, tokens = random_kv(8, 3), list(range(3000, 3008))
    put(from_disk, tokens, kv)
    assert get(from_disk, tokens, tenant="b") is None
    put(from_disk, tokens, random_kv(8, 4), tenant="b")
    assert same(get(from_disk, tokens), kv)
    assert same(get(from_disk, tokens, tenant="b"), random_kv(8, 4))


def test_another_space_finds_nothing(from_disk: KVStore) -> None:
    """What was computed after fused KV is never found as a model's own."""
    tokens = list(range(4000, 4008))
    put(from_disk, tokens, random_kv(8))
    assert get(from_disk, tokens, space=Space("fused", PLAIN.parts)) is None
    assert get(from_disk, tokens, space=Space("plain", {**PLAIN.parts, "revision": "2"})) is None


def test_plain_files_are_safetensors(server: EmbeddedRedis, tmp_path: Path) -> None:
    """The reference library reads a segment file, tensor by tensor."""
    kv = random_kv(8, 5)
    with opened(tmp_path, server.url) as store:
        put(store, range(8), kv)
        tensors = safetensors.torch.load_file(files(tmp_path)[0])
    assert all(torch.equal(tensors[f"keys.{n}"], kv.keys[n]) for n in range(3))
    assert all(torch.equal(tensors[f"values.{n}"], kv.values[n]) for n in range(3))


@pytest.mark.parametrize("encrypt", [False, True])
def test_encryption_hides_the_tensors(server: EmbeddedRedis, tmp_path: Path, encrypt: bool) -> None:
    """An encrypted file contains no stretch of the tensors, a plain one all of them."""
    kv = random_kv(8, 6)
    with opened(tmp_path, server.url) as store:
        store.save(store.scope("a", encrypt=encrypt), PLAIN, range(8), kv)
        assert store.settle(20)
        data = files(tmp_path)[0].read_bytes()
    needles = [t.numpy().tobytes()[:16] for t in (*kv.keys, *kv.values)]
    assert [needle in data for needle in needles] == [not encrypt] * 6


def _found_elsewhere(folder: str, url: str, length: int) -> bool:
    with opened(Path(folder), url) as store:
        return same(get(store, range(length)), random_kv(length))


@pytest.mark.parametrize("forgetful", [False, True])
def test_another_process_finds_what_was_stored(server: EmbeddedRedis, tmp_path: Path, forgetful: bool) -> None:
    """After a restart the blocks are there, also when Redis has lost its memory meanwhile."""
    with opened(tmp_path, server.url) as store:
        put(store, range(300), random_kv(300))
    if forgetful:
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_found_elsewhere, (os.fspath(tmp_path), server.url, 300))


def test_purge_destroys_all_of_one_tenant(server: EmbeddedRedis, tmp_path: Path) -> None:
    """Afterwards neither find, nor a scan of Redis, nor the folder knows anything of the tenant; others keep theirs."""
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    with opened(tmp_path, server.url) as store, opened(tmp_path, server.url) as elsewhere:
        put(store, range(600), random_kv(600))
        put(store, range(8), random_kv(8), tenant="b")
        old = store.scope("a")
        hit = store.find(old, PLAIN, range(600))
        size = sum(p.stat().st_size for p in files(tmp_path) if old.tag in p.parts)
        assert same(get(elsewhere, range(600)), random_kv(600))
        gone = store.purge("a")
        assert (gone.entries, gone.bytes) == (3, size)
        for each in (store, elsewhere):
            assert get(each, range(600)) is None
            assert each.find(old, PLAIN, range(600)) is None
            assert same(get(each, range(8), tenant="b"), random_kv(8))
        store.save(old, PLAIN, range(8), random_kv(8))
        assert store.settle(20)
        assert not [key for key in keys(server.url) if old.tag.encode() in key]
        assert not [path for path in tmp_path.rglob("*") if old.tag in path.parts]
        assert hit is not None
        assert store.load(hit) is None
        assert store.purge("a").entries == 0


def test_purge_of_a_store_in_ram() -> None:
    """Without disk and index a purge counts and forgets what RAM held."""
    with opened(None, None) as store:
        put(store, range(8), random_kv(8))
        gone = store.purge("a")
        assert (gone.entries, gone.bytes) == (1, random_kv(8).nbytes)
        assert get(store, range(8)) is None


def test_the_end_of_life_holds_in_every_tier(server: EmbeddedRedis, tmp_path: Path) -> None:
    """Past its ttl nothing is found, and the next save stores it anew."""
    with opened(tmp_path, server.url) as store:
        store.save(store.scope("a"), PLAIN, range(8), random_kv(8), ttl=0.5)
        assert store.settle(20)
        assert get(store, range(8)) is not None
        time.sleep(0.6)
        assert get(store, range(8)) is None
        put(store, range(8), random_kv(8))
        assert same(get(store, range(8)), random_kv(8))


def test_ram_keeps_to_its_bytes_and_disk_serves_the_rest(server: EmbeddedRedis, tmp_path: Path) -> None:
    """RAM never holds more than its budget; what it had to let go is loaded from disk."""
    one = random_kv(8).nbytes
    with opened(tmp_path, server.url, ram_bytes=2 * one) as store:
        for n in range(5):
            put(store, range(n * 100, n * 100 + 8), random_kv(8, n))
            assert store.stats()["ram_bytes"] <= 2 * one  # type: ignore[operator]
        for n in range(5):
            assert same(get(store, range(n * 100, n * 100 + 8)), random_kv(8, n))
        assert store.counters.get("bytes", tier="disk") > 0


@pytest.mark.parametrize("indexed", [False, True])
def test_a_tenants_budget_is_kept(server: EmbeddedRedis, tmp_path: Path, indexed: bool) -> None:
    """Neither RAM nor disk ever holds more of a tenant than its max_bytes, and the latest is what stays."""
    limit = 9000
    with opened(tmp_path if indexed else None, server.url if indexed else None) as store:
        for n in range(8):
            store.save(store.scope("a"), PLAIN, range(n * 100, n * 100 + 8), random_kv(8, n), max_bytes=limit)
            assert store.settle(20)
            assert sum(p.stat().st_size for p in files(tmp_path)) <= limit if indexed else True
            assert store.stats()["ram_bytes"] <= limit  # type: ignore[operator]
        assert same(get(store, range(700, 708)), random_kv(8, 7))
        if indexed:
            assert store.stats()["disk_bytes"] == sum(p.stat().st_size for p in files(tmp_path)) > 0
            assert store.counters.get("evicted", tier="disk") > 0


def test_two_writers_of_one_prefix_leave_one_copy(server: EmbeddedRedis, tmp_path: Path) -> None:
    """Two stores that save the same text at once end with one file a segment, charged once."""
    with opened(tmp_path, server.url) as one, opened(tmp_path, server.url) as two:
        threads = [threading.Thread(target=put, args=(s, range(1000), random_kv(1000))) for s in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        usage = one.index.usage() if one.index else None
        assert usage is not None
        assert (usage.segments, usage.bytes) == (4, sum(p.stat().st_size for p in files(tmp_path)))
        assert len(files(tmp_path)) == 4


def test_readers_survive_eviction(server: EmbeddedRedis, tmp_path: Path) -> None:
    """Entries that vanish between find and load are misses; whatever is loaded is right to the bit."""
    stop = threading.Event()
    with (
        opened(tmp_path, server.url, ram_bytes=0, max_bytes=40_000) as writer,
        opened(tmp_path, server.url, ram_bytes=0, max_bytes=40_000) as reader,
    ):
        texts = [range(n * 100, n * 100 + 40) for n in range(10)]

        def churn() -> None:
            n = 0
            while not stop.is_set():
                put(writer, texts[n % 10], random_kv(40, n % 10))
                n += 1

        thread = threading.Thread(target=churn)
        thread.start()
        loaded, deadline = 0, time.monotonic() + 20
        while loaded < 100 and time.monotonic() < deadline:
            for n, text in enumerate(texts):
                kv = get(reader, text)
                if kv is not None:
                    loaded += 1
                    assert same(kv, random_kv(40, n).slice(0, len(kv)))
        stop.set()
        thread.join()
        assert loaded >= 100
        assert writer.counters.get("evicted", tier="disk") > 0
        assert (writer.counters.get("failed"), reader.counters.get("corrupt")) == (0, 0)


def test_a_load_slower_than_computing_is_refused(from_disk: KVStore) -> None:
    """When computing is said to be faster than any disk, the hit is refused and counted; one in sixteen is tried."""
    fast = Space("plain", {"model": "fast"})
    from_disk.save(from_disk.scope("a"), fast, range(8), random_kv(8))
    assert from_disk.settle(20)
    from_disk.rates(prefill_tokens_per_s=1e12, space=fast)
    before = from_disk.counters.get("refused_slow")
    loads = [get(from_disk, range(8), space=fast) for _ in range(32)]
    assert sum(kv is not None for kv in loads) == 2
    assert from_disk.counters.get("refused_slow") == before + 30
    from_disk.rates(prefill_tokens_per_s=1.0, space=fast)
    assert get(from_disk, range(8), space=fast) is not None


def test_only_the_part_that_pays_is_loaded() -> None:
    """Fast leading segments are taken, slow ones behind them computed."""
    rates = Rates()
    rates.computing(1e4, None)
    quick, slow = ("ram", 10**6, 256), ("disk", 10**9, 256)
    assert rates.worth([quick, slow], b"x") == 1
    assert rates.worth([quick, quick], b"x") == 2
    assert rates.worth([slow], b"x") == 0
    rates.loaded("disk", 10**12, 1.0)
    assert rates.worth([quick, slow], b"x") == 2


def test_a_full_queue_drops_and_never_waits() -> None:
    """Jobs beyond the bound are refused at once; those taken run in order; a failing one harms no other."""
    ran: list[int] = []
    failed: list[Exception] = []
    gate = threading.Event()

    def run(n: int) -> None:
        gate.wait(20)
        ran.append(n)
        if n == 1:
            raise ValueError(n)

    queue = Background("q", chores=lambda: None, failed=failed.append, pause=60, max_jobs=3, max_bytes=100)
    assert queue.settle(20)
    assert queue.offer(lambda: run(0))
    deadline = time.monotonic() + 20
    while queue.waiting and time.monotonic() < deadline:
        time.sleep(0.001)
    assert queue.offer(lambda: run(1), 90)
    assert not queue.offer(lambda: run(9), 20)
    assert [queue.offer(lambda n=n: run(n), 1) for n in (2, 3, 9)] == [True, True, False]
    assert not queue.settle(0.01)
    gate.set()
    assert queue.settle(20)
    assert (ran, len(failed)) == ([0, 1, 2, 3], 1)
    assert queue.close(20)
    assert not queue.offer(lambda: run(9))


def test_loads_are_counted_by_artefact_and_tier(server: EmbeddedRedis, tmp_path: Path) -> None:
    """Hits, tokens, bytes and seconds saved say what was loaded from where; damage says where it lay."""
    with opened(tmp_path, server.url, ram_bytes=0) as store:
        store.rates(prefill_tokens_per_s=10.0)
        put(store, range(40), random_kv(40))
        hit = store.find(store.scope("a"), PLAIN, range(40), role="own")
        assert hit is not None
        assert same(store.load(hit), random_kv(40))
        counts = {(name, tier): n for (name, tier, role), n in store.counters.snapshot().items() if role == "own"}
        assert (counts["hits", "disk"], counts["tokens", "disk"]) == (1, 40)
        assert counts["bytes", "disk"] == 40 * 192
        assert 2 < counts["saved_seconds", "disk"] < 4
        files(tmp_path)[0].write_bytes(b"")
        assert store.load(hit) is None
        assert store.counters.get("corrupt", tier="disk", role="own") == 1
