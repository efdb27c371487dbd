"""Limits that processes share through a real Redis Cluster: tenants on all nodes, slots that move, a node that ends."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from router.limit_redis import FAILURES
from router.limits import Limits
from tests.cluster import Cluster, Node, running
from tests.router.test_limits import Tenant, outcomes, refused, until


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


@pytest.fixture
async def doors(cluster: Cluster) -> AsyncIterator[tuple[Limits, Limits]]:
    """Two processes' limits."""
    made = (Limits(cluster.url, timeout=0.3), Limits(cluster.url, timeout=0.3))
    for limits in made:
        await limits.start()
        await until(lambda limits=limits: limits.shared is True)
    yield made
    for limits in made:
        await limits.close()


def key(tenant: Tenant) -> str:
    return f"twolane:limits:{{{tenant.name}}}"


def tenants(cluster: Cluster, **limits: float) -> dict[Node, Tenant]:
    """One on each node."""
    found: dict[Node, Tenant] = {}
    for n in range(100):
        tenant = Tenant(name=f"t{n}", **limits)  # type: ignore[arg-type]
        found.setdefault(cluster.owner(key(tenant)), tenant)
    assert len(found) == len(cluster.nodes)
    return found


async def test_tenants_lie_on_all_nodes(cluster: Cluster, doors: tuple[Limits, Limits]) -> None:
    """Whichever node counts a tenant, both processes together let through exactly what it may."""
    one, two = doors
    for node, tenant in tenants(cluster, rpm_limit=6).items():
        let, kept = await outcomes([(one, two)[n % 2].admit(tenant, 1) for n in range(20)])
        assert (len(let), len(kept)) == (6, 14)
        assert node.client.exists(key(tenant))


async def test_a_slot_that_moves(cluster: Cluster, doors: tuple[Limits, Limits]) -> None:
    """While a tenant's slot moves each process counts it alone, nobody fails or waits for the breaker, and other
    tenants are counted together; afterwards the new node goes on with what the old one had."""
    one, two = doors
    moving, staying = list(tenants(cluster, rpm_limit=10).values())[:2]
    for _ in range(4):
        await one.admit(moving, 1)
    here, there = cluster.begin_move(key(moving))
    await one.admit(moving, 1)
    cluster.move_keys(key(moving), here, there)
    for _ in range(2):
        await one.admit(moving, 1)
    let, _ = await outcomes([(one, two)[n % 2].admit(staying, 1) for n in range(14)])
    assert len(let) == 10
    cluster.end_move(key(moving), there)
    let, _ = await outcomes([two.admit(moving, 1) for _ in range(14)])
    assert len(let) == 6
    await refused(one, moving)
    assert one.shared is two.shared is True


async def test_a_node_that_ends(cluster: Cluster, doors: tuple[Limits, Limits]) -> None:
    """While it is gone requests wait for few short bounds, then for nothing, and each process enforces the limits
    alone; when it is back they are shared again, with the money that was spent meanwhile."""
    one, two = doors
    node, tenant = next(iter(tenants(cluster, max_budget=1.0, budget_duration=864000.0).items()))
    await one.admit(tenant, 1, 0.1)
    node.kill()
    began = time.monotonic()
    for _ in range(FAILURES + 20):
        await one.settle(await one.admit(tenant, 1), 1, cost=0.03)
    assert time.monotonic() - began < 3
    assert one.shared is False
    await refused(one, tenant, cost=0.5)
    node.start()
    cluster.wait_until_well()
    await until(lambda: one.shared is True and not one._owed)
    for _ in range(2):  # the first one finds its connection gone
        await two.admit(replace(tenant, max_budget=9.0), 1)
    assert (await refused(two, tenant, cost=0.5)).code == "insufficient_quota"
