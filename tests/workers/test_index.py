"""The KV index against a real server and a real cluster: matching, budgets, eviction, lives, purge, a sick Redis."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cluster import Cluster, running
from tests.workers.kvlab import empty, keys, lives
from workers.embedded import EmbeddedRedis
from workers.index import Breaker, Entry, IndexDown, KVIndex, Usage

A, B = "a" * 32, "b" * 32
BIG = 2**40


@pytest.fixture(scope="module", params=["server", "cluster"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedRedis | Cluster]:
    folder = tmp_path_factory.mktemp("redis")
    with EmbeddedRedis(folder) if request.param == "server" else running(folder) as made:
        yield made


@pytest.fixture
def index(server: EmbeddedRedis | Cluster) -> Iterator[KVIndex]:
    empty(server.url)
    made = KVIndex(server.url, "s", timeout=2.0)
    yield made
    made.close()


def ids(count: int) -> list[bytes]:
    return [os.urandom(16) for _ in range(count)]


def entry(chain: list[bytes], start: int, stop: int, *, tag: str = A, size: int = 100, life: float = 100.0) -> Entry:
    parent = chain[start - 1] if start else b""
    return Entry(tag, os.urandom(16).hex(), size, start, parent, tuple(chain[start:stop]), life)


def add(index: KVIndex, made: Entry, *, tenant_limit: int = BIG, store_limit: int = BIG) -> str:
    begun = index.begin(made, tenant_limit=tenant_limit, store_limit=store_limit)
    return index.commit(made.tag, made.obj) if begun.status == "ok" else begun.status


def blocks(index: KVIndex, tag: str, chain: list[bytes]) -> int:
    return sum(found.used for found in index.match(tag, chain))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8), st.integers(0, 45))
@settings(max_examples=40, deadline=None)
def test_match_is_the_longest_prefix(server: EmbeddedRedis | Cluster, lengths: list[int], asked: int) -> None:
    """However a chain was cut into segments, a match covers min(asked, stored) blocks with whole leading pieces."""
    index = KVIndex(server.url, os.urandom(4).hex(), timeout=2.0)
    chain, at = ids(45), 0
    for length in lengths:
        assert add(index, entry(chain, at, at + length)) == "ok"
        at += length
    found = index.match(A, chain[:asked])
    assert sum(f.used for f in found) == min(asked, at)
    assert all(f.used == f.blocks for f in found[:-1])
    index.close()


def test_nothing_is_found_before_its_commit(index: KVIndex) -> None:
    """Between begin and commit the bytes are charged and the blocks invisible; an abort refunds."""
    chain = ids(4)
    made = entry(chain, 0, 4)
    assert index.begin(made, tenant_limit=BIG, store_limit=BIG).status == "ok"
    assert (blocks(index, A, chain), index.usage(A)) == (0, Usage(100, 1))
    assert index.abort(A, made.obj) == 100
    assert (index.commit(A, made.obj), index.usage(A), index.usage()) == ("lost", Usage(0, 0), Usage(0, 0))


def test_the_second_writer_of_a_prefix_is_told(index: KVIndex) -> None:
    """Of two that began before either committed, the second commit says `have` and is refunded."""
    chain = ids(4)
    one, two = entry(chain, 0, 4), entry(chain, 0, 4)
    assert {index.begin(e, tenant_limit=BIG, store_limit=BIG).status for e in (one, two)} == {"ok"}
    assert (index.commit(A, one.obj), index.commit(A, two.obj)) == ("ok", "have")
    assert index.usage(A) == Usage(100, 1)
    assert add(index, entry(chain, 0, 4)) == "have"


def test_a_segment_without_its_prefix_is_refused(index: KVIndex) -> None:
    """What no match could reach is not stored; also when the prefix goes between begin and commit."""
    chain = ids(8)
    assert add(index, entry(chain, 4, 8)) == "orphan"
    head, tail = entry(chain, 0, 4), entry(chain, 4, 8)
    add(index, head)
    assert index.begin(tail, tenant_limit=BIG, store_limit=BIG).status == "ok"
    index.gone(A, head.obj)
    assert index.commit(A, tail.obj) == "orphan"
    assert index.usage() == Usage(0, 0)


def test_a_hole_ends_the_match(index: KVIndex) -> None:
    """When a segment in the middle is lost, the match ends before it, and the tail is not named."""
    chain = ids(12)
    made = [entry(chain, at, at + 4) for at in (0, 4, 8)]
    assert [add(index, e) for e in made] == ["ok"] * 3
    index.gone(A, made[1].obj)
    assert [f.obj for f in index.match(A, chain)] == [made[0].obj]


def test_tails_go_before_heads(index: KVIndex) -> None:
    """Room is made from the end of the least recently used chain, so that what is left is a prefix."""
    old, new = ids(12), ids(12)
    for chain in (old, new):
        for at in (0, 4, 8):
            add(index, entry(chain, at, at + 4))
    assert blocks(index, A, old) == 12  # used last: the other one has to give
    assert add(index, entry(ids(4), 0, 4), tenant_limit=600) == "ok"
    assert (blocks(index, A, old), blocks(index, A, new)) == (12, 8)
    assert add(index, entry(ids(4), 0, 4, size=200), tenant_limit=600) == "ok"
    assert blocks(index, A, new) == 8
    assert index.usage(A).bytes <= 600


def test_a_chain_never_evicts_its_own_prefix(index: KVIndex) -> None:
    """A segment that would fit only without what it hangs on is refused."""
    chain = ids(8)
    add(index, entry(chain, 0, 4))
    assert add(index, entry(chain, 4, 8), tenant_limit=150) == "full"
    assert blocks(index, A, chain) == 4


def test_the_store_budget_takes_from_any_tenant(index: KVIndex) -> None:
    """The whole store's least recently used tail goes, whoever's it is; a tenant's budget takes from that tenant."""
    first, second = ids(4), ids(4)
    add(index, entry(first, 0, 4, tag=A))
    add(index, entry(second, 0, 4, tag=B))
    made = entry(ids(4), 0, 4, tag=B)
    begun = index.begin(made, tenant_limit=BIG, store_limit=250)
    assert [tag for tag, _ in begun.victims] == [A]
    assert (blocks(index, A, first), blocks(index, B, second)) == (0, 4)
    assert index.usage(A) == Usage(0, 0)


def test_what_is_past_its_life_is_not_found_and_is_tidied(index: KVIndex) -> None:
    """The end of a life holds for finds at once; tidy frees the bytes and names the files."""
    chain = ids(4)
    made = entry(chain, 0, 4, life=0.05)
    assert add(index, made) == "ok"
    time.sleep(0.1)
    assert blocks(index, A, chain) == 0
    assert index.tidy() == ((A, made.obj),)
    assert index.usage() == Usage(0, 0)


def test_a_writer_that_died_is_refunded(index: KVIndex) -> None:
    """A begin whose commit never came ends by its deadline."""
    made = entry(ids(4), 0, 4)
    index.begin(made, tenant_limit=BIG, store_limit=BIG, deadline=0.05)
    time.sleep(0.1)
    assert index.tidy() == ((A, made.obj),)
    assert (index.usage(A), index.commit(A, made.obj)) == (Usage(0, 0), "lost")


def test_every_key_has_an_expiry(index: KVIndex, server: EmbeddedRedis | Cluster) -> None:
    """Nothing that is written stays for ever, and all of it outlives the evictor's own time."""
    chain = ids(8)
    add(index, entry(chain, 0, 4))
    index.begin(entry(chain, 4, 8), tenant_limit=BIG, store_limit=BIG)
    index.mark_up()
    index.claim(A, chain[0], "me", 100.0)
    left = lives(server.url)
    assert len(left) > 8
    assert all(life > 99_000 for life in left.values())


def test_purge_leaves_nothing_of_the_tag(index: KVIndex, server: EmbeddedRedis | Cluster) -> None:
    """After a purge, also of what was being written, a scan finds no key of it, and others keep theirs."""
    chain, other = ids(40), ids(4)
    for at in range(0, 36, 4):
        add(index, entry(chain, at, at + 4))
    index.begin(entry(chain, 36, 40), tenant_limit=BIG, store_limit=BIG)
    add(index, entry(other, 0, 4, tag=B))
    assert index.purge(A, slice_=2) == Usage(900, 9)
    assert not [key for key in keys(server.url) if A.encode() in key]
    assert (index.usage(), blocks(index, B, other)) == (Usage(100, 1), 4)


def test_budgets_hold_under_concurrency(index: KVIndex, server: EmbeddedRedis | Cluster) -> None:
    """Whatever eight writers begin, commit, abort and forget at once, no reading is ever above a budget, and in the
    end the charge is exactly what is there."""
    over: list[Usage] = []
    done = threading.Event()
    kept: list[dict[str, int]] = [{} for _ in range(8)]

    def write(seat: int) -> None:
        mine = KVIndex(server.url, "s", timeout=5.0)
        dice = random.Random(seat)
        tag = (A, B)[seat % 2]
        for _ in range(60):
            made = entry(ids(3), 0, 3, tag=tag, size=dice.randint(1, 400))
            if mine.begin(made, tenant_limit=2000, store_limit=3000).status != "ok":
                continue
            if dice.random() < 0.2:
                mine.abort(tag, made.obj)
            elif mine.commit(tag, made.obj) == "ok":
                kept[seat][made.obj] = made.size
                if dice.random() < 0.2:
                    mine.gone(tag, made.obj)
        mine.close()

    def watch() -> None:
        mine = KVIndex(server.url, "s", timeout=5.0)
        while not done.is_set():
            readings = [(mine.usage(A), 2000), (mine.usage(B), 2000), (mine.usage(), 3000)]
            over.extend(usage for usage, limit in readings if not 0 <= usage.bytes <= limit)
        mine.close()

    watcher = threading.Thread(target=watch)
    writers = [threading.Thread(target=write, args=(seat,)) for seat in range(8)]
    watcher.start()
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    watcher.join()
    assert not over
    left = {A: 0, B: 0}
    for seat, sizes in enumerate(kept):
        tag = (A, B)[seat % 2]
        there = index.known(tag, list(sizes))
        left[tag] += sum(size for size, known in zip(sizes.values(), there, strict=True) if known)
    assert (index.usage(A).bytes, index.usage(B).bytes) == (left[A], left[B])
    assert index.usage().bytes == left[A] + left[B] > 0


def test_a_claim_has_one_owner(index: KVIndex) -> None:
    """A second claim fails while the first lives; only its owner can give it up."""
    block = ids(1)[0]
    assert index.claim(A, block, "one", 100)
    assert not index.claim(A, block, "two", 100)
    assert not index.release(A, block, "two")
    assert index.release(A, block, "one")
    assert index.claim(A, block, "two", 0.02)
    time.sleep(0.05)
    assert index.claim(A, block, "one", 1)


def test_absent_redis_is_an_error_and_then_costs_nothing(tmp_path: Path) -> None:
    """Without a server every call raises IndexDown; after three the breaker answers without asking."""
    index = KVIndex(f"unix://{tmp_path}/none.sock", "s", breaker=Breaker(errors=3, rest=60))
    reasons = []
    for _ in range(5):
        with pytest.raises(IndexDown) as caught:
            index.match(A, ids(1))
        reasons.append(str(caught.value))
    assert reasons == ["ConnectionError"] * 3 + ["breaker open"] * 2


def test_a_frozen_redis_is_bounded_and_taken_up_again(tmp_path: Path) -> None:
    """While the server is stopped a call ends by its timeout; when it goes on, replies belong to their questions."""
    with EmbeddedRedis(tmp_path) as server:
        index = KVIndex(server.url, "s", timeout=0.2, breaker=Breaker(errors=3, rest=0.1))
        long, short = ids(8), ids(3)
        add(index, entry(long, 0, 8))
        add(index, entry(short, 0, 3))
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            for _ in range(6):
                with pytest.raises(IndexDown):
                    index.match(A, long)
            assert time.monotonic() - began < 5
        finally:
            os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + 20
        while index.breaker.open and time.monotonic() < deadline:
            time.sleep(0.05)
            try:
                index.match(A, short)
            except IndexDown:
                continue
        for _ in range(20):
            assert (blocks(index, A, short), blocks(index, A, long), blocks(index, A, ids(2))) == (3, 8, 0)
        index.close()


def test_functions_are_loaded_again_after_a_restart(tmp_path: Path) -> None:
    """A server that lost its memory, functions and all, is used again without a new index."""
    server = EmbeddedRedis(tmp_path)
    server.start()
    index = KVIndex(server.url, "s", timeout=1.0, breaker=Breaker(errors=100))
    chain = ids(4)
    add(index, entry(chain, 0, 4))
    index.mark_up()
    assert index.up()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while server.running and time.monotonic() < deadline:
        time.sleep(0.02)
    server.start()
    try:
        assert not index.up()
        assert blocks(index, A, chain) == 0
        assert add(index, entry(chain, 0, 4)) == "ok"
    finally:
        index.close()
        server.stop()
