"""Stops between routers: through Redis, through files, and with Redis frozen, gone or empty."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import yaml
from hypothesis import given
from hypothesis import strategies as st

from router.newest import Newest
from router.stops import Stops
from router.stops_file import BadStops, Stop, Wish, exchange, leave, newest, parse, written
from tests.router.gateway import until
from tests.router.test_admin import House, living
from tests.running import ROOT, Router, serving
from workers.embedded import EmbeddedRedis

BOUND = 3.0
"""Seconds within which a test demands what is promised within one: the machine may be busy."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path / "redis") as running:
        yield running


@contextlib.contextmanager
def frozen(server: EmbeddedRedis) -> Iterator[None]:
    """The server takes connections and answers nothing."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


# -- what one word does to another


targets = st.sampled_from(("cache", "pair:duo"))
words = st.builds(
    Stop,
    target=targets,
    stopped=st.booleans(),
    reason=st.just("r"),
    by=st.just("b"),
    at=st.just(0.0),
    seq=st.integers(1, 6),
)


@given(st.lists(words, max_size=8), st.randoms(use_true_random=False))
def test_the_order_of_arrival_does_not_matter(many: list[Stop], shuffle: Any) -> None:
    """Whatever routers hear, in whatever order and how often, they end with the same word about each target."""
    one, other = list(many), [*many, *many]
    shuffle.shuffle(other)
    heard: dict[str, Stop] = {}
    again: dict[str, Stop] = {}
    for word in one:
        heard = newest(heard, {word.target: word})
    for word in other:
        again = newest(again, {word.target: word})
    assert {t: s.order for t, s in heard.items()} == {t: s.order for t, s in again.items()}


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.lists(st.floats(0, 10), min_size=8, max_size=8))
def test_the_last_press_counts_whatever_the_clock_says(presses: list[bool], clock: list[float]) -> None:
    """A stop or a lifting made by one who knows what was before it is the last word, though clocks run backwards."""
    known: dict[str, Stop] = {}
    for stopped, now in zip(presses, clock, strict=False):
        before = known.get("cache")
        if not stopped and (before is None or not before.stopped):
            continue
        known = newest(known, {"cache": Wish("cache", stopped, "r", "b").after(before, now)})
        assert known["cache"].stopped == stopped


@given(st.lists(words, max_size=4))
def test_the_file_holds_what_was_written(many: list[Stop]) -> None:
    """What routers write into the file they read from it as it was, and take nothing of it for a person's act."""
    stops = newest(*({word.target: word} for word in many))
    assert parse(written(stops.values())) == (stops, [])


def test_an_entry_that_a_person_changed_is_known_by_it(tmp_path: Path) -> None:
    """Any change of a router's entry makes it that person's act; an entry taken away changes nothing."""
    file = tmp_path / "stops.yaml"
    stop = Wish("cache", True, "drift", "kim").after(None, 1000.0)
    assert exchange(file, {"cache": stop}, 1000.0).adopted == ()
    file.write_text(file.read_text().replace("drift", "drift and harm"))
    [adopted] = exchange(file, {"cache": stop}, 1000.0).adopted
    assert (adopted.reason, adopted.seq) == ("drift and harm", stop.seq + 1)
    file.write_text("")
    assert exchange(file, {"cache": adopted}, 1000.0).stops == {"cache": adopted}
    assert "drift and harm" in file.read_text()


def test_a_wish_is_left_beside_what_stands(tmp_path: Path) -> None:
    """`--file` keeps other entries as they are, and refuses to write over a file that cannot be read."""
    file = tmp_path / "state" / "stops.yaml"
    exchange(file, {"pair:duo": Wish("pair:duo", True, "drift", "kim").after(None, 1.0)}, 1.0)
    leave(file, Wish("cache", True, "x: [odd", "lee"))
    leave(file, Wish("tenant:a", True, "second", "lee", drill=True))
    stops, wishes = parse(file.read_text())
    assert set(stops) == {"pair:duo"}
    assert {(w.target, w.reason, w.drill) for w in wishes} == {
        ("cache", "x: [odd", False),
        ("tenant:a", "second", True),
    }
    file.write_text("cache: [")
    with pytest.raises(BadStops):
        leave(file, Wish("cache", True, "x", "lee"))
    assert file.read_text() == "cache: ["


def test_a_file_that_cannot_be_written_is_read_all_the_same(tmp_path: Path) -> None:
    """Where the folder takes no lock the file's wishes hold, each once, and it is said that they are not kept."""
    file = tmp_path / "state" / "stops.yaml"
    leave(file, Wish("cache", True, "by hand", "kim"))
    lock = file.with_name(".stops.yaml.lock")
    lock.unlink()
    lock.mkdir()  # cannot be opened for writing, not even by root
    first = exchange(file, {}, 1000.0)
    assert first.unsaved
    done = frozenset({Wish(s.target, s.stopped, s.reason, s.by, s.drill) for s in first.adopted})
    lifted = Wish("cache", False, "mended", "lee").after(first.stops["cache"], 1001.0)
    assert not exchange(file, {"cache": lifted}, 1001.0, done).stops["cache"].stopped


async def test_a_file_that_cannot_be_written_is_taken_up_once(tmp_path: Path) -> None:
    """What a person wrote there counts once: what is lifted elsewhere stays lifted, whatever else is heard."""
    file = tmp_path / "stops.yaml"
    leave(file, Wish("cache", True, "by hand", "kim"))
    file.with_name(".stops.yaml.lock").unlink()
    file.with_name(".stops.yaml.lock").mkdir()
    told: list[Stop] = []

    async def adopted(stop: Stop) -> None:
        told.append(stop)

    news = Newest(None)
    stops = Stops(file, news, adopted=adopted)
    await stops.look()
    assert stops.in_force() == {"cache"}
    assert (await stops.put(Wish("cache", False, "mended", "lee"))).file
    other = Wish("pair:duo", True, "heard", "lee").after(None, 1.0)
    stops._heard("pair:duo", msgspec.json.encode(other), False)
    for _ in range(3):
        await stops.look()
    assert (stops.in_force(), [s.by for s in told]) == ({"pair:duo"}, ["kim"])


# -- routers that share a Redis


@contextlib.asynccontextmanager
async def two(tmp_path: Path, url: str, **config: object) -> AsyncIterator[tuple[House, House]]:
    """Routers of two hosts: each with files of its own."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    async with living(tmp_path / "one", url, **config) as one, living(tmp_path / "two", url, **config) as two:
        yield one, two


async def on(house: House, lane: str) -> None:
    """Its requests take this lane within the bound."""
    async with asyncio.timeout(BOUND):
        while await house.lane() != lane:
            await asyncio.sleep(0.02)


async def test_a_stop_reaches_the_other_router(tmp_path: Path, server: EmbeddedRedis) -> None:
    """What one router stops or lifts the other stops and lifts too, with reason and person, and keeps in its file."""
    async with two(tmp_path, server.url) as (one, other):
        done = await one.stop("pair:duo", "drift", by="kim")
        assert done.json["reach"]["redis"] is True
        await on(other, "text")
        [entry] = (await other.admin("GET")).json["data"]
        assert (entry["target"], entry["reason"], entry["by"]) == ("pair:duo", "drift", "kim")
        await until(lambda: "kim" in _text(tmp_path / "two" / "state" / "stops.yaml"))
        assert other.records("stop") == []  # recorded once, by the router that was asked
        await other.start("pair:duo")
        await on(one, "cache")


async def test_a_demotion_reaches_the_other_router(tmp_path: Path, server: EmbeddedRedis) -> None:
    """A pair that one router takes out is out on the other, which did not see it fail."""
    async with two(tmp_path, server.url) as (one, other):
        assert (await one.lane(), await other.lane()) == ("cache", "cache")
        for _ in range(8):
            one.door.app.parts.lane.demotion.observe_error("duo", True)
        await on(other, "text")
        assert (await other.door.post(model="m")).headers["x-twolane-reason"] == "pair_demoted"


async def test_with_redis_frozen_it_holds_here_at_once_and_there_when_it_is_back(
    tmp_path: Path, server: EmbeddedRedis
) -> None:
    """A frozen Redis delays no stop on the router that is asked, which says so; the other hears of it afterwards."""
    async with two(tmp_path, server.url) as (one, other):
        with frozen(server):
            began = time.monotonic()
            done = await one.stop()
            assert time.monotonic() - began < BOUND
            assert (done.status, done.json["reach"]["redis"]) == (200, False)
            assert "do not hear of it" in done.json["note"]
            assert (await one.lane(), await other.lane()) == ("text", "cache")
        await on(other, "text")


async def test_with_redis_frozen_the_lane_may_rest_by_itself(tmp_path: Path, server: EmbeddedRedis) -> None:
    """`without_redis: stop` stops the cache lane on every router that cannot hear of stops, and lifts it by itself."""
    async with two(tmp_path, server.url, stops={"without_redis": "stop"}) as (one, other):
        assert (await one.lane(), await other.lane()) == ("cache", "cache")
        with frozen(server):
            await on(one, "text")
            await on(other, "text")
            [entry] = (await other.admin("GET")).json["data"]
            assert (entry["target"], entry["by"]) == ("cache", "router")
        await on(other, "cache")


async def test_an_empty_redis_learns_again(tmp_path: Path, server: EmbeddedRedis) -> None:
    """A Redis that comes back empty is told by the routers what was stopped, and so is a router that comes new."""
    (tmp_path / "three").mkdir()
    async with two(tmp_path, server.url) as (one, _):
        await one.stop()
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        await asyncio.sleep(0.7)
        async with living(tmp_path / "three", server.url) as third:
            assert await third.lane() == "text"


async def test_a_stop_that_nobody_heard_of_is_not_lifted_by_a_lifting_before_it(
    tmp_path: Path, server: EmbeddedRedis
) -> None:
    """Two sides that cannot hear each other: what one stopped meanwhile stays, though the other's clock is ahead."""

    async def adopted(_: Stop) -> None:
        raise AssertionError("nobody wrote the file")

    ahead, behind = Newest(server.url), Newest(server.url)
    one = Stops(tmp_path / "1.yaml", ahead, adopted=adopted, clock=lambda: time.time() + 3600)
    other = Stops(tmp_path / "2.yaml", behind, adopted=adopted)
    with frozen(server):
        await other.put(Wish("cache", True, "harm", "kim"))
        await one.put(Wish("cache", True, "test", "lee"))
        await one.put(Wish("cache", False, "test over", "lee"))
    for _ in range(3):
        await ahead.sync()
        await behind.sync()
    assert one.in_force() == other.in_force() == {"cache"}
    await one.put(Wish("cache", False, "harm looked into", "lee"))
    await behind.sync()
    assert one.in_force() == other.in_force() == frozenset()
    await ahead.close()
    await behind.close()


async def test_what_no_router_wrote_is_left_aside(tmp_path: Path, server: EmbeddedRedis) -> None:
    """Nonsense under the routers' key stops nothing, lifts nothing and breaks nothing."""
    async with two(tmp_path, server.url) as (one, other):
        await one.stop("pair:duo")
        await on(other, "text")
        with redis.Redis.from_url(server.url) as client:
            for field, value in {"stop/cache": "1 {}", "stop/x": "abc", "pair/duo": "9999999999999999 []"}.items():
                client.hset("twolane:{routers}:newest", field, value)
            client.hset("twolane:{routers}:newest", "stop/pair:duo", '8888888888888888 {"target": "cache"}')
        await asyncio.sleep(0.6)
        assert await other.lane() == "text"
        await one.stop("tenant:a")
        async with asyncio.timeout(BOUND):
            while "tenant:a" not in other.door.app.parts.lane.stops.in_force():
                await asyncio.sleep(0.02)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


# -- real processes


CONFIG: dict[str, Any] = {
    "pairs": [{"name": "duo", "sharer": {"model": "none/none"}, "receiver": {"model": "none/none"}}],
    "model_list": [
        {"model_name": "m", "cache_params": {"pair": "duo"}},
        {"model_name": "m", "litellm_params": {"model": "openai/x", "api_base": "http://127.0.0.1:9/v1"}},
    ],
    "general_settings": {"master_key": "sk-master-0123456789"},
    "admins": [{"name": "kim", "key": "sk-kim-0123456789", "role": "operator"}],
}


def _stopped(router: Router) -> bool:
    """Whether a decision is refused by a stop now; nothing is run."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    decision = router.post("/v1/decide", body, key="sk-master-0123456789")
    return any(v["code"] == "stopped" for judged in decision["judged"] for v in judged["verdicts"])


def _twolane(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "router.cli", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_command_stops_two_processes_with_redis_frozen(tmp_path: Path, server: EmbeddedRedis) -> None:
    """`twolane stop` on one router of a host holds on the other within a second though Redis is frozen; `--file` too.

    A router that is killed and started again is still stopped; `twolane start` lifts it on both; all is recorded.
    """
    config = yaml.safe_dump({**CONFIG, "redis": {"url": server.url}})
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(serving(tmp_path, config))
        other = stack.enter_context(serving(tmp_path, config))
        kim = {"TWOLANE_ADMIN_KEY": "sk-kim-0123456789", "TWOLANE_URL": one.base}
        assert (_stopped(one), _stopped(other)) == (False, False)
        with frozen(server):
            done = _twolane("stop", "cache", "--reason", "answers drift", **kim)
            assert (done.returncode, "cache stopped since" in done.stdout) == (0, True), done.stderr
            assert "routers of other hosts do not hear of it" in done.stderr
            assert _stopped(one)
            _within(lambda: _stopped(other))
            assert _twolane("start", "cache", "--reason", "mended", **kim).returncode == 0
            _within(lambda: not _stopped(other))
            file = str(tmp_path / ".twolane" / "stops.yaml")
            assert _twolane("stop", "pair", "duo", "--reason", "by hand", "--by", "lee", "--file", file).returncode == 0
            _within(lambda: _stopped(one) and _stopped(other))
        shown = _twolane("stops", "--json", **kim)
        assert [s["by"] for s in json.loads(shown.stdout)["data"]] == ["lee"]
        other.process.kill()
        other.process.wait()
        again = stack.enter_context(serving(tmp_path, config))
        assert _stopped(again)
        refused = _twolane("stop", "pair", "dou", "--reason", "x", **kim)
        assert (refused.returncode, "there are: duo" in refused.stderr) == (1, True)
        assert _twolane("stops", TWOLANE_URL="http://127.0.0.1:9").returncode == 1
        assert _twolane("stop", "pair", "--reason", "x").returncode == 2
    records = [
        json.loads(line)
        for file_ in (tmp_path / ".twolane" / "audit").rglob("*.jsonl")
        for line in file_.read_bytes().splitlines()
    ]
    told = [(r["what"], r["who"], r["detail"]["by"]) for r in records if r.get("what") in ("stop", "start")]
    assert told == [("stop", "kim", "kim"), ("start", "kim", "kim"), ("stop", "file", "lee")]


def _within(holds: Any) -> None:
    deadline = time.monotonic() + BOUND
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
