"""KVStore when disk, files, Redis or the process itself fail: a miss, a count, and on it goes."""

from __future__ import annotations

import multiprocessing
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from tests.workers.kvlab import PLAIN, files, get, held, opened, put, random_kv, same
from workers import segments
from workers.codec import pack
from workers.embedded import EmbeddedRedis
from workers.keys import Keyring, Scope
from workers.segments import Damaged, Head, Segment
from workers.store import KVStore


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as running:
        yield running


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 0xFF
    path.write_bytes(data)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


DAMAGE = [truncate, flip, empty, lengthen, Path.unlink]


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("forgetful", [False, True])
def test_a_damaged_file_is_a_miss_once(
    server: EmbeddedRedis, tmp_path: Path, damage: Callable[[Path], None], restart: bool, forgetful: bool
) -> None:
    """Damage ends the prefix there, is counted, and is forgotten; the next save stores it anew."""
    kv, tokens = random_kv(600), range(600)
    with opened(tmp_path, server.url, ram_bytes=0) as store:
        put(store, tokens, kv)
        victim = max(files(tmp_path), key=lambda p: _head(store, p).first)
        damage(victim)
        if not restart:
            _check_repaired(store, tmp_path, victim)
    if restart:
        if forgetful:
            with redis.Redis.from_url(server.url) as client:
                client.flushall()
        with opened(tmp_path, server.url, ram_bytes=0) as store:
            _check_repaired(store, tmp_path, victim)


def _head(store: KVStore, path: Path) -> Head:
    return segments.read_head(path, store.scope("a"))


def _check_repaired(store: KVStore, folder: Path, victim: Path) -> None:
    kv, tokens = random_kv(600), range(600)
    first = get(store, tokens)
    assert same(first, kv.slice(0, 512))
    assert store.settle(20)
    assert not victim.exists()
    put(store, tokens, kv)
    assert same(get(store, tokens), kv)
    assert store.counters.get("failed") == 0
    usage = store.index.usage() if store.index else None
    assert usage is not None
    assert (usage.segments, usage.bytes) == (3, sum(p.stat().st_size for p in files(folder)))


def test_a_lost_head_makes_all_of_it_a_miss(server: EmbeddedRedis, tmp_path: Path) -> None:
    """Without its first segment a chain is not found; saving it again makes it whole."""
    kv, tokens = random_kv(600), range(600)
    with opened(tmp_path, server.url, ram_bytes=0) as store:
        put(store, tokens, kv)
        next(p for p in files(tmp_path) if _head(store, p).first == 0).unlink()
        assert get(store, tokens) is None
        assert (store.counters.get("missing"), store.counters.get("corrupt")) == (1, 0)
        assert store.settle(20)
        put(store, tokens, kv)
        assert same(get(store, tokens), kv)


@pytest.fixture
def one(tmp_path: Path) -> tuple[Path, Scope, Segment]:
    """A small segment and its file."""
    scope = Keyring(None).scope("a")
    head = Head(scope.tag, "0" * 32, "s", "own", 0, b"", (bytes(16), bytes(15) + b"1"), 8, time.time() + 99, 2**40)
    return tmp_path / f"{'0' * 32}.safetensors", scope, Segment(head, pack(random_kv(8, layers=1), "exact"))


@pytest.mark.parametrize("encrypt", [False, True])
def test_no_flipped_byte_changes_what_is_read(one: tuple[Path, Scope, Segment], encrypt: bool) -> None:
    """Every single byte of a file, flipped: the read fails, or gives the very same bits (an unread byte of JSON)."""
    path, base, segment = one
    scope = Scope(base.tenant, base.epoch, base.tag, base.chain_key, base.seal_key, encrypt)
    size = segments.write(path, segment, scope)
    whole = path.read_bytes()
    assert size == len(whole) == segments.file_size(segment, scope)
    payload = len(whole) - segment.size
    survived = 0
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :])
        try:
            read = segments.read(path, scope, segment.head.obj)
        except Damaged:
            continue
        survived += 1
        assert at < payload
        assert (read.head, same(read.kv(), segment.kv())) == (segment.head, True)
    assert survived < payload / 2


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 100, -200, -1])
def test_a_short_file_is_damaged(one: tuple[Path, Scope, Segment], cut: int) -> None:
    """Wherever a file ends early, reading it says so, head and all."""
    path, scope, segment = one
    segments.write(path, segment, scope)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(Damaged):
        segments.read(path, scope, segment.head.obj)
    with pytest.raises(Damaged):
        segments.read_head(path, scope)


def test_another_tenants_file_in_its_place_is_a_miss(server: EmbeddedRedis, tmp_path: Path) -> None:
    """Swapping the files of two tenants, or of two texts, serves nobody the other's KV."""
    with opened(tmp_path, server.url, ram_bytes=0) as store:
        put(store, range(8), random_kv(8, 1), tenant="a")
        put(store, range(100, 108), random_kv(8, 2), tenant="a")
        put(store, range(8), random_kv(8, 3), tenant="b")
        tag = store.scope("a").tag
        (first, second), (other,) = ([p for p in files(tmp_path) if (tag in p.parts) == own] for own in (True, False))
        shutil.copy(first, second)
        shutil.copy(other, first)
        assert get(store, range(8)) is None
        assert get(store, range(100, 108)) is None
        assert same(get(store, range(8), tenant="b"), random_kv(8, 3))
        assert store.counters.get("corrupt") == 2


@pytest.mark.usefixtures("capsys")  # the log goes to memory: files are bounded here
def test_a_full_disk_stores_nothing_and_recovers(server: EmbeddedRedis, tmp_path: Path) -> None:
    """Writes that the system cuts short leave no file, no entry and no charge; with room again storing goes on."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path, server.url, ram_bytes=0) as store:
        put(store, range(8), random_kv(8))
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
        try:
            put(store, range(100, 200), random_kv(100))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert get(store, range(100, 200)) is None
        assert store.counters.get("disk_errors") == 1
        assert len([p for p in (tmp_path / "segments").rglob("*") if p.is_file()]) == 1
        assert store.index is not None
        assert store.index.usage().segments == 1
        put(store, range(100, 200), random_kv(100))
        assert same(get(store, range(100, 200)), random_kv(100))
        assert same(get(store, range(8)), random_kv(8))


@pytest.mark.usefixtures("capsys")  # the log goes to memory: files are bounded here
def test_what_a_full_disk_refused_is_offered_again(server: EmbeddedRedis, tmp_path: Path) -> None:
    """KV that only RAM could take goes to disk with the tenant's next save of that text."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path, server.url) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            put(store, range(300), random_kv(300))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not files(tmp_path)
        hit = store.find(store.scope("a"), PLAIN, range(304))
        assert hit is not None
        assert hit.tokens == 300
        store.save(store.scope("a"), PLAIN, range(304), random_kv(304), start=hit.tokens)
        assert store.settle(20)
        assert len(files(tmp_path)) == 3


def _save_for_ever(folder: str, url: str) -> None:
    with opened(Path(folder), url, ram_bytes=0) as store:
        n = 0
        while True:
            put(store, range(n * 1000, n * 1000 + 300), random_kv(300, n), settle=False)
            n += 1


def test_a_killed_writer_leaves_only_whole_entries(server: EmbeddedRedis, tmp_path: Path) -> None:
    """After SIGKILL at some moment, whatever a new process finds is right, and the charge is what lies on disk."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_save_for_ever, args=(os.fspath(tmp_path), server.url))
    process.start()
    assert wait_for(lambda: len(files(tmp_path)) > 6)
    process.kill()
    process.join()
    stale = files(tmp_path)[0].with_name(f".{'f' * 32}.safetensors.1.abc")
    stale.write_bytes(b"half")
    os.utime(stale, (1, 1))
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    with opened(tmp_path, server.url, ram_bytes=0) as store:
        whole = 0
        for n in range(200):
            kv = get(store, range(n * 1000, n * 1000 + 300))
            if kv is not None:
                whole += 1
                assert same(kv, random_kv(300, n).slice(0, len(kv)))
        assert whole >= 3
        assert store.counters.get("corrupt") == 0
        assert store.index is not None
        assert store.index.usage().bytes == sum(p.stat().st_size for p in files(tmp_path))
        assert not stale.exists()


def test_files_of_ended_epochs_are_swept(server: EmbeddedRedis, tmp_path: Path) -> None:
    """What a purge could not remove, because its process died, is removed at the next start."""
    with opened(tmp_path, server.url) as store:
        put(store, range(8), random_kv(8))
        tag = store.scope("a").tag
    Keyring(tmp_path).step("a")
    with redis.Redis.from_url(server.url) as client:
        assert [key for key in client.scan_iter("*") if tag.encode() in key]
    with opened(tmp_path, server.url):
        assert not files(tmp_path)
        with redis.Redis.from_url(server.url) as client:
            assert not [key for key in client.scan_iter("*") if tag.encode() in key]


def test_without_redis_ram_still_serves_and_redis_is_taken_up(tmp_path: Path) -> None:
    """Started before Redis, the store serves from RAM; once Redis is there, saves reach the disk by themselves."""
    server = EmbeddedRedis(tmp_path / "redis")
    with opened(tmp_path / "kv", server.url, timeout=0.5) as store:
        put(store, range(8), random_kv(8))
        assert same(get(store, range(8)), random_kv(8))
        assert get(store, range(100, 108)) is None
        assert not files(tmp_path / "kv")
        assert store.stats()["index_up"] is False
        assert store.counters.get("dropped") > 0
        with server:

            def stored() -> bool:
                put(store, range(8), random_kv(8))
                return bool(files(tmp_path / "kv"))

            assert wait_for(stored)
            assert store.counters.get("failed") == 0


def test_a_frozen_redis_costs_a_bounded_wait(tmp_path: Path) -> None:
    """While Redis is stopped finds end soon, RAM hits are served, nothing fails; afterwards disk hits are back."""
    with EmbeddedRedis(tmp_path / "redis") as server, opened(tmp_path / "kv", server.url, timeout=0.1) as store:
        put(store, range(8), random_kv(8))
        assert wait_for(lambda: len(files(tmp_path / "kv")) == 1)
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            for _ in range(20):
                assert get(store, range(100, 140)) is None
                assert same(get(store, range(8)), random_kv(8))
            assert time.monotonic() - began < 10
            put(store, range(200, 208), random_kv(8))
            assert same(get(store, range(200, 208)), random_kv(8))
        finally:
            os.kill(server.pid, signal.SIGCONT)

        def stored() -> bool:
            put(store, range(300, 308), random_kv(8))
            return len(files(tmp_path / "kv")) >= 2

        assert wait_for(stored)
        assert store.counters.get("failed") == 0


def test_an_emptied_redis_is_filled_from_the_files(tmp_path: Path) -> None:
    """A server that restarted without its memory learns from the running store what lies on disk."""
    server = EmbeddedRedis(tmp_path / "redis")
    with server, opened(tmp_path / "kv", server.url, ram_bytes=0) as store:
        put(store, range(300), random_kv(300))
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        assert wait_for(lambda: not server.running)
        server.start()
        assert wait_for(lambda: held(store, range(300)) == 300)
        assert same(get(store, range(300)), random_kv(300))


def test_the_store_can_bring_its_own_server(tmp_path: Path) -> None:
    """With `embedded` two stores of one folder share a server that the first one starts and takes along."""
    with opened(tmp_path, "embedded") as store:
        put(store, range(8), random_kv(8))
        with opened(tmp_path, "embedded", ram_bytes=0) as other:
            assert same(get(other, range(8)), random_kv(8))
    with opened(tmp_path, "embedded", ram_bytes=0) as later:
        assert same(get(later, range(8)), random_kv(8))


@pytest.mark.usefixtures("capsys")  # the log goes to memory: files are bounded here
def test_a_purge_makes_its_own_room_on_a_full_disk(server: EmbeddedRedis, tmp_path: Path) -> None:
    """Where the new epoch cannot be written, the purge says so, having destroyed the files all the same."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with opened(tmp_path, server.url, ram_bytes=0) as store:
        put(store, range(8), random_kv(8))
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
        try:
            with pytest.raises(OSError, match="too large"):
                store.purge("a")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not files(tmp_path)
        assert get(store, range(8)) is None
        store.purge("a")
        put(store, range(8), random_kv(8))
        assert same(get(store, range(8)), random_kv(8))
