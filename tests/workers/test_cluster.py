"""A real Redis Cluster under index, store and registry: slots that move, nodes that end or hang. Never a wrong byte."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster, running, wait_for
from tests.workers.kvlab import files, get, held, keys, opened, put, random_kv, same
from tests.workers.test_client import state
from workers.client import NAMES, Registry
from workers.config import RedisConfig
from workers.index import Breaker, IndexDown, KVIndex
from workers.redis_servers import slot_of
from workers.store import KVStore


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture
def cluster(nodes: Cluster) -> Cluster:
    """Well, and empty."""
    nodes.wait_until_well()
    nodes.flush()
    return nodes


def root(store: KVStore) -> str:
    """What the keys of the store's index begin with."""
    assert store.index is not None
    return store.index._root


def exact(store: KVStore, folder: Path) -> bool:
    """Is what the index charges what lies on disk?"""
    assert store.index is not None
    usage = store.index.usage()
    return (usage.segments, usage.bytes) == (len(files(folder)), sum(p.stat().st_size for p in files(folder)))


def test_all_keys_of_a_store_lie_on_one_node(cluster: Cluster, tmp_path: Path) -> None:
    """Whatever a store of two tenants writes is in one slot; what was stored is found."""
    with opened(tmp_path, cluster.url, ram_bytes=0) as store:
        put(store, range(600), random_kv(600))
        put(store, range(40), random_kv(40, 2), tenant="b")
        assert {slot_of(key) for key in cluster.all_keys()} == {slot_of(root(store))}
        assert same(get(store, range(600)), random_kv(600))
        assert same(get(store, range(40), tenant="b"), random_kv(40, 2))
        assert store.purge("a").entries == 3
        assert not [key for key in keys(cluster.url) if key.count(b":b:") and b"b" * 32 in key]
        assert exact(store, tmp_path)


def test_a_named_node_that_is_away_does_not_matter(cluster: Cluster) -> None:
    """Of several nodes in the URL one that answers is enough; which it is is found out by itself."""
    url = f"redis+cluster://127.0.0.1:1,{cluster.nodes[0].name},127.0.0.1:2"
    index = KVIndex(url, "s", timeout=0.5, breaker=Breaker(errors=100))
    answers = []
    for _ in range(6):
        try:
            answers.append(index.usage().bytes)
        except IndexDown:
            answers.append(-1)
    assert answers[-1] == 0
    assert answers.count(-1) <= 2
    index.close()


def test_a_slot_that_moves_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """While the index's slot moves finds miss and saves are dropped, and nothing is written to either side; afterwards
    all of it is found on the new node, and the charge is exact."""
    with opened(tmp_path, cluster.url, ram_bytes=0) as store:
        put(store, range(600), random_kv(600))
        put(store, range(1000, 1040), random_kv(40, 1))
        slot = root(store)
        here, there = cluster.begin_move(slot)
        before = set(cluster.all_keys())
        for part in (0, 3, 10_000):
            cluster.move_keys(slot, here, there, part)
            assert get(store, range(600)) is None
            put(store, range(2000, 2040), random_kv(40, 2))
            assert set(cluster.all_keys()) == before
        cluster.end_move(slot, there)
        assert cluster.owner(slot) is there
        wait_for(lambda: held(store, range(600)) == 600)
        assert same(get(store, range(600)), random_kv(600))
        assert same(get(store, range(1000, 1040)), random_kv(40, 1))

        def stored() -> bool:
            put(store, range(2000, 2040), random_kv(40, 2))
            return same(get(store, range(2000, 2040)), random_kv(40, 2)) if get(store, range(2000, 2040)) else False

        wait_for(stored)
        assert exact(store, tmp_path)
        assert store.counters.get("failed") == store.counters.get("corrupt") == store.counters.get("missing") == 0


def test_a_slot_that_has_moved_costs_no_failure(cluster: Cluster) -> None:
    """A client that knew the old owner follows the redirection at once, functions and all."""
    index = KVIndex(cluster.url, "moved", timeout=1.0)
    assert index.match("a" * 32, [bytes(16)]) == []
    here, there = cluster.begin_move(index._root)
    cluster.move_keys(index._root, here, there)
    cluster.end_move(index._root, there)
    assert index.match("a" * 32, [bytes(16)]) == []
    assert index.claim("a" * 32, bytes(16), "me", 9.0)
    assert [key for key in there.client.scan_iter("*") if b"moved" in key]
    index.close()


@pytest.mark.parametrize("fault", ["killed", "frozen"])
def test_the_node_of_the_index_is_lost(cluster: Cluster, tmp_path: Path, fault: str) -> None:
    """Finds end within their bound and what RAM holds is right; when the node is back, empty where it was killed, the
    store fills it from its files and goes on."""
    with opened(tmp_path, cluster.url, ram_bytes=40_000, timeout=0.2) as store:
        put(store, range(600), random_kv(600))
        put(store, range(1000, 1040), random_kv(40, 1))
        node = cluster.owner(root(store))

        def lost() -> None:
            for _ in range(20):
                began = time.monotonic()
                assert get(store, range(5000, 5040)) is None
                assert time.monotonic() - began < 1.5
                assert same(get(store, range(1000, 1040)), random_kv(40, 1))
            put(store, range(2000, 2040), random_kv(40, 2))
            assert same(get(store, range(2000, 2040)), random_kv(40, 2))

        if fault == "killed":
            node.kill()
            lost()
            node.start()
        else:
            with cluster.freeze(node):
                lost()
        cluster.wait_until_well()
        wait_for(lambda: held(store, range(600)) == 600)
        assert same(get(store, range(600)), random_kv(600))

        def stored() -> bool:
            put(store, range(2000, 2040), random_kv(40, 2))
            return exact(store, tmp_path) and len(files(tmp_path)) == 5

        wait_for(stored)
        assert store.counters.get("failed") == store.counters.get("corrupt") == 0


async def test_heartbeats_go_on_while_their_slot_moves(cluster: Cluster) -> None:
    """Key by key, before, amid and after the move, what is published is found, and withdrawn is gone."""
    one, two = Registry(RedisConfig(url=cluster.url)), Registry(RedisConfig(url=cluster.url))
    assert await one.publish(state("a"))
    here, there = cluster.begin_move(NAMES)
    for step in (0, 1, 10_000):
        cluster.move_keys(NAMES, here, there, step)
        assert await one.publish(state("a"))
        assert await two.publish(state("b"))
        assert [s.name for s in await one.discover() or []] == ["a", "b"]
    cluster.move_keys(NAMES, here, there)
    cluster.end_move(NAMES, there)
    assert await one.publish(state("c"))
    assert [s.name for s in await two.discover() or []] == ["a", "b", "c"]
    assert await two.withdraw(state("a"))
    assert [s.name for s in await two.discover() or []] == ["b", "c"]
    for each in (one, two):
        await each.close()


async def test_heartbeats_come_back_with_their_node(cluster: Cluster) -> None:
    """While the node that holds them is gone publishing says so within the bound; then the same object goes on."""
    registry = Registry(RedisConfig(url=cluster.url), bound=0.5)
    assert await registry.publish(state())
    node = cluster.owner(NAMES)
    node.kill()
    began = time.monotonic()
    for _ in range(4):
        assert not await registry.publish(state())
        assert await registry.discover() is None
    assert time.monotonic() - began < 5
    node.start()
    async with asyncio.timeout(20):
        while not await registry.publish(state()):
            await asyncio.sleep(0.05)
    assert [s.name for s in await registry.discover() or []] == ["w"]
    await registry.close()
