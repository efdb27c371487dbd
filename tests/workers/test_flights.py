"""Single flight: a prefix that several ask for at once is computed once, inside one worker and across workers."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.workers.test_runtime import Shifted, answer, finish, some_ids
from workers.config import RedisConfig, StoreConfig
from workers.embedded import EmbeddedRedis
from workers.engine import Engine
from workers.flights import LEAST
from workers.jobs import Done, Event, Failed, Request
from workers.loader import Loaded
from workers.prompt import Prompt
from workers.runtime import Alone, Keep, Paired, Prefilled, Runtime, Steps
from workers.sampling import Sampling
from workers.store import KVStore

SHARED = 205
"""Tokens of context: whole blocks and a tail."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@contextlib.contextmanager
def worker_store(folder: Path, server: EmbeddedRedis) -> Iterator[KVStore]:
    """One of several workers of a folder."""
    store = KVStore(StoreConfig(dir=folder), RedisConfig(url=server.url, timeout=1.0))
    try:
        assert store.settle(20)
        yield store
    finally:
        store.close()


def keep_of(store: KVStore) -> Keep:
    return Keep(store.scope("a"), ttl=600, max_bytes=1 << 30)


def pair_of(kind: str, tiny: Loaded, other: Loaded, store: KVStore | None) -> Runtime:
    if kind == "alone":
        return Alone("tiny", tiny, store, 32)
    fuser = Shifted(tiny.shape, needs_own=kind == "fuse")
    return Paired("p", other, tiny, fuser, mode=kind, scope="context", store=store, chunk=32)


def advance(steps: Steps[Prefilled], times: int) -> None:
    """Run some steps of a prefill that does not end within them."""
    with torch.inference_mode():
        for _ in range(times):
            next(steps)


def end(steps: Steps[Prefilled]) -> Prefilled:
    with torch.inference_mode():
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["alone", "handover", "fuse"])
def test_equal_prompts_submitted_together_are_computed_once(kind: str, tiny: Loaded, other: Loaded) -> None:
    """Of six equal prompts that wait together, one computes the shared part; five compute only what follows it."""
    store = KVStore(StoreConfig(dir=None))
    engine = Engine({"m": pair_of(kind, tiny, other, store)}, max_running=8, threads=1)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    prompt = Prompt((*some_ids(SHARED), *some_ids(9, 1)), SHARED)
    sampling = Sampling(temperature=0.0, max_tokens=3, ignore_eos=True)
    for _ in range(6):
        engine.submit(Request("m", prompt, sampling, events.put, keep_of(store)))
    engine.start()
    reused = []
    while len(reused) < 6:
        event = events.get(timeout=30)
        assert not isinstance(event, Failed)
        if isinstance(event, Done):
            reused.append(event.run.reused_tokens)
    engine.close()
    store.close()
    stored = 208 if kind == "alone" else SHARED
    assert sorted(reused) == [0] + [stored] * 5


@pytest.mark.parametrize("kind", ["alone", "handover", "fuse"])
def test_another_workers_computing_is_waited_for(
    kind: str, tiny: Loaded, other: Loaded, server: EmbeddedRedis, tmp_path: Path
) -> None:
    """While one worker reads a prefix a second one computes nothing; when it is stored, the second one finds it."""
    prompt = Prompt((*some_ids(SHARED), *some_ids(9, 1)), SHARED)
    with worker_store(tmp_path, server) as here, worker_store(tmp_path, server) as there:
        first = pair_of(kind, tiny, other, here).prefill(prompt, keep_of(here))
        second = pair_of(kind, tiny, other, there).prefill(prompt, keep_of(there))
        advance(first, 2)
        advance(second, 20)
        assert there.counters.get("waited") == 1
        assert end(first).spent.reused == 0
        assert here.settle(20)
        found = end(second)
        assert found.spent.reused == (208 if kind == "alone" else SHARED)
        assert found.spent.sharer_s == 0.0
        cold = pair_of(kind, tiny, other, None)
        assert answer(pair_of(kind, tiny, other, there), prompt, 6, keep_of(there)) == answer(cold, prompt, 6)


def test_who_waits_goes_on_when_the_other_gives_up(tiny: Loaded, server: EmbeddedRedis, tmp_path: Path) -> None:
    """A prompt that is cancelled while it is read releases its claim: the waiting worker computes."""
    prompt = Prompt(some_ids(SHARED, 2), 0)
    with worker_store(tmp_path, server) as here, worker_store(tmp_path, server) as there:
        first = Alone("tiny", tiny, here, 32).prefill(prompt, keep_of(here))
        second = Alone("tiny", tiny, there, 32).prefill(prompt, keep_of(there))
        advance(first, 2)
        advance(second, 3)
        first.close()
        assert here.settle(20)
        assert end(second).spent.computed_tokens == SHARED


def test_the_wait_is_bounded_by_the_time_that_computing_takes(
    tiny: Loaded, server: EmbeddedRedis, tmp_path: Path
) -> None:
    """Where computing is said to take a moment, a claim that is never released delays by about that."""
    prompt = Prompt(some_ids(SHARED, 3), 0)
    with worker_store(tmp_path, server) as here, worker_store(tmp_path, server) as there:
        there.rates(prefill_tokens_per_s=1e6)
        first = Alone("tiny", tiny, here, 32).prefill(prompt, keep_of(here))
        advance(first, 1)
        assert finish(Alone("tiny", tiny, there, 32), prompt, keep_of(there)).spent.computed_tokens == SHARED
        assert there.counters.get("waited") == 1


def test_a_claim_outlives_nobody(tiny: Loaded, server: EmbeddedRedis, tmp_path: Path) -> None:
    """Claims are released when the prompt is read, short ones are never made, and none remains in Redis."""
    with worker_store(tmp_path, server) as store:
        finish(Alone("tiny", tiny, store, 32), Prompt(some_ids(LEAST - 1, 4), 0), keep_of(store))
        assert store.counters.get("claimed") == 0
        finish(Alone("tiny", tiny, store, 32), Prompt(some_ids(SHARED, 5), 0), keep_of(store))
        assert store.counters.get("claimed") == 1
        assert store.settle(20)
        scope, space = store.scope("a"), Alone("tiny", tiny, store, 32).spaces[0]
        claim = store.claim(scope, space, some_ids(SHARED, 5), start=0)
        assert claim is not None
        assert claim.mine
        store.release(claim)
