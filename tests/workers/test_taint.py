"""The taint law, under any history: what a pair has done never changes what a model answers alone.

A machine of random steps runs plain, identity, handover and fuse lanes over one store, turn by turn, with budgets of a
few segments, purges, restarts and crashes, and compares every answer with a run that has no store at all.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tests.workers.kvlab import empty, keys
from tests.workers.test_runtime import Shifted, finish, some_ids
from workers.batch import Batch
from workers.config import RedisConfig, StoreConfig
from workers.embedded import EmbeddedRedis
from workers.keys import Space, chain
from workers.loader import Loaded
from workers.prompt import Prompt
from workers.runtime import Alone, Keep, Paired, Runtime
from workers.store import KVStore

BLOCK = 8
MADE = 9
"""Tokens of an answer."""
TENANTS = ("a", "b")
LANES = ("plain", "identity", "handover", "fuse")


class Lab:
    """The models, and what each lane answers to a prompt when nothing is stored."""

    def __init__(self, tiny: Loaded, other: Loaded, url: str) -> None:
        self.tiny, self.other, self.url = tiny, other, url
        self.cold = cache(self._cold)

    def lane(self, name: str, store: KVStore | None) -> Runtime:
        if name == "plain":
            return Alone("tiny", self.tiny, store, 16)
        if name == "identity":
            return Alone("twin", self.tiny, store, 16, fingerprint="twin", role="source")
        fuser = Shifted(self.tiny.shape, needs_own=name == "fuse")
        scope = "prompt" if name == "fuse" else "context"
        return Paired(name, self.other, self.tiny, fuser, mode=name, scope=scope, store=store, chunk=16)

    def _cold(self, lane: str, ids: tuple[int, ...], context: int) -> list[int]:
        return turn(self.lane(lane, None), Prompt(ids, context), None)


class History(RuleBasedStateMachine):
    """Any mix of lanes over growing conversations."""

    lab: ClassVar[Lab]
    turns = Bundle("turns")

    @initialize(target=turns, shared=st.integers(9, 40))
    def begin(self, shared: int) -> tuple[int, ...]:
        self.folder = Path(tempfile.mkdtemp(prefix="taint-"))
        self.budget = 3
        self.tainted: dict[str, set[tuple[int, ...]]] = {tenant: set() for tenant in TENANTS}
        self.plain: dict[str, set[tuple[int, ...]]] = {tenant: set() for tenant in TENANTS}
        self.left: list[KVStore] = []
        self.open()
        empty(self.lab.url)
        return some_ids(shared)

    def open(self) -> None:
        """A few segments fit into RAM, a few more on disk."""
        one = 16 * 3 * 2 * 2 * 12 * 4
        config = StoreConfig(
            dir=self.folder, ram_bytes=one * self.budget, max_bytes=one * 3 * self.budget, block_tokens=BLOCK
        )
        self.store = KVStore(config, RedisConfig(url=self.lab.url, timeout=2.0))

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for store in (*self.left, self.store):
                store.close()
            shutil.rmtree(self.folder)

    @rule(
        target=turns, text=turns, lane=st.sampled_from(LANES), tenant=st.sampled_from(TENANTS), seed=st.integers(0, 3)
    )
    def ask(self, text: tuple[int, ...], lane: str, tenant: str, seed: int) -> tuple[int, ...]:
        """One turn: a question about what stands so far. The answer is a cold run's; it becomes part of the text."""
        ids = (*text, *some_ids(5, seed))
        keep = Keep(self.store.scope(tenant), ttl=600, max_bytes=1 << 30)
        made = turn(self.lab.lane(lane, self.store), Prompt(ids, len(text)), keep)
        assert made == self.lab.cold(lane, ids, len(text))
        whole = (*ids, *made)
        if lane in ("plain", "identity"):
            self.plain[tenant].add(whole)
        else:
            self.tainted[tenant].add(whole)
        return whole if len(whole) < 120 else whole[:20]

    @rule(text=turns, tenant=st.sampled_from(TENANTS))
    def nothing_plain_lies_under_a_fused_parent(self, text: tuple[int, ...], tenant: str) -> None:
        """In the plain spaces a text is known as far as its tokens were read alone, whoever answered it."""
        for model in (self.lab.tiny, self.lab.other):
            space = Alone("x", model, None, 16).spaces[0]
            hit = self.store.find(self.store.scope(tenant), space, text)
            known = hit.tokens if hit else 0
            if model is self.lab.tiny:
                assert known <= max((_common(text, seen) for seen in self._read_alone(tenant)), default=0)
            else:
                assert known <= max((_common(text, seen) for seen in self.tainted[tenant]), default=0)

    def _read_alone(self, tenant: str) -> Iterator[tuple[int, ...]]:
        """Texts that the receiver read by itself; `fuse` has it read the prompt, but never an answer to it."""
        yield from self.plain[tenant]
        for text in self.tainted[tenant]:
            yield text[:-MADE]

    @rule(tenant=st.sampled_from(TENANTS))
    def purge(self, tenant: str) -> None:
        self.store.purge(tenant)
        self.plain[tenant].clear()
        self.tainted[tenant].clear()
        scope = self.store.scope(tenant)
        assert not self._keys(scope.tag)

    @rule()
    def reopen(self) -> None:
        assert self.store.settle(20)
        self.store.close()
        self.open()

    @rule(budget=st.integers(1, 6))
    def crash(self, budget: int) -> None:
        """A new store takes over the folder while the old one's last writes may still come."""
        self.left.append(self.store)
        self.budget = budget
        self.open()

    @invariant()
    def every_stored_id_is_some_texts(self) -> None:
        """No block in Redis has an id that no allowed reading gives: nothing was stored under another name."""
        if not hasattr(self, "store"):
            return
        for tenant in TENANTS:
            scope = self.store.scope(tenant)
            held = self._keys(scope.tag)
            if held:
                assert held <= self._allowed(tenant)

    def _keys(self, tag: str) -> set[bytes]:
        mark = f":{tag}:b:".encode()
        return {key.split(mark, 1)[1] for key in keys(self.lab.url) if mark in key}

    def _allowed(self, tenant: str) -> set[bytes]:
        """Ids of all that may be stored: plain texts with their answers, tainted prompts only as what was read alone
        (`plain` of either model) or projected (`fused` of that pair)."""
        scope = self.store.scope(tenant)
        tiny, other = (Alone("x", model, None, 16).spaces[0] for model in (self.lab.tiny, self.lab.other))
        fused = [self.lab.lane(lane, None).spaces[2] for lane in ("handover", "fuse")]
        allowed: set[bytes] = set()

        def add(space: Space, ids: tuple[int, ...]) -> None:
            allowed.update(chain(scope, space, ids, BLOCK))
            for stop in range(1, len(ids) + 1):
                allowed.update(chain(scope, space, ids[:stop], BLOCK, tail=True)[-1:])

        for text in self.plain[tenant]:
            add(tiny, text)
        for text in self.tainted[tenant]:
            for space in (tiny, other, *fused):
                add(space, text[:-MADE])
        return allowed


def turn(runtime: Runtime, prompt: Prompt, keep: Keep | None) -> list[int]:
    """Prefill, greedy answer, and what the engine does when an answer ends: offer its KV for the next turn."""
    with torch.inference_mode():
        read = finish(runtime, prompt, keep)
        batch = Batch(runtime.decoder)
        batch.rows.join(read.kv)
        choice = SimpleNamespace(tokens=[int(read.logits.argmax())])
        batch.choices.append(choice)  # type: ignore[arg-type]
        while len(choice.tokens) < MADE:
            choice.tokens.append(int(batch.step()[0].argmax()))
        if keep is not None:
            ids = (*prompt.ids, *choice.tokens[:-1])
            runtime.keep_answer(ids, batch.rows.kv(0, 0, len(ids)), keep)
    return choice.tokens  # type: ignore[no-any-return]


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@pytest.fixture(scope="module")
def lab(tiny: Loaded, other: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield Lab(tiny, other, server.url)


def test_no_history_taints_the_plain_lane(lab: Lab) -> None:
    """Whatever was asked, evicted, purged, restarted or lost: answers equal cold ones, and no tainted block is named
    as plain."""
    machine = type("AnyHistory", (History,), {"lab": lab})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
