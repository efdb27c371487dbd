"""What a worker tells of an answer for the record: gates, change by layer, KV read and written, digests, seed."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers.test_runtime import Shifted, finish, some_ids
from workers.cache import KVCache
from workers.config import RedisConfig, StoreConfig
from workers.embedded import EmbeddedRedis
from workers.engine import Engine
from workers.jobs import Done, Event, Failed, Request
from workers.loader import Loaded
from workers.prompt import Prompt
from workers.protocol import Run
from workers.runtime import Alone, Keep, Paired, Runtime
from workers.sampling import Sampling
from workers.store import KVStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with EmbeddedRedis(tmp_path / "redis") as server:
        opened = KVStore(StoreConfig(dir=tmp_path / "kv"), RedisConfig(url=server.url))
        yield opened
        opened.close()


def run(runtime: Runtime, prompt: Prompt, store: KVStore | None = None, tenant: str = "a") -> Run:
    """The account of one answer of six tokens."""
    engine = Engine({"m": runtime}, threads=1, numerics="here")
    engine.start()
    ended: queue.SimpleQueue[Event] = queue.SimpleQueue()
    keep = None if store is None else Keep(store.scope(tenant), ttl=600, max_bytes=1 << 30)
    sampling = Sampling(temperature=0.0, max_tokens=6, ignore_eos=True)
    engine.submit(Request("m", prompt, sampling, ended.put, keep=keep, tell_tokens=True))
    try:
        while not isinstance(event := ended.get(timeout=30), Done | Failed):
            pass
    finally:
        engine.close()
    assert isinstance(event, Done), event
    return event.run


def fuse(sharer: Loaded, receiver: Loaded, store: KVStore | None = None) -> Paired:
    fuser = Shifted(receiver.shape, needs_own=True)
    return Paired("p", sharer, receiver, fuser, mode="fuse", scope="prompt", store=store, chunk=16)


def test_the_change_is_told_for_every_layer(tiny: Loaded, other: Loaded) -> None:
    """In `fuse` K and V each have a ratio by receiver layer, their mean is the total; in `handover` there is no own."""
    told = run(fuse(other, tiny), Prompt(some_ids(40), 0))
    assert len(told.change_k) == len(told.change_v) == tiny.shape.layers
    assert min(*told.change_k, *told.change_v) > 0
    assert told.change == pytest.approx(sum((*told.change_k, *told.change_v)) / (2 * tiny.shape.layers), abs=1e-3)
    fuser = Shifted(tiny.shape, needs_own=False)
    pair = Paired("p", other, tiny, fuser, mode="handover", scope="prompt", store=None, chunk=16)
    assert run(pair, Prompt(some_ids(40), 0)).change_k == ()


def test_artefacts_read_and_written_are_named_by_role_and_digest(tiny: Loaded, other: Loaded, store: KVStore) -> None:
    """What one request wrote is what the next one read; another tenant's names differ for the same text."""
    prompt = Prompt(some_ids(40), 0)
    first = run(fuse(other, tiny, store), prompt, store)
    assert first.kv_read == ()
    assert [name.split(":")[0] for name in first.kv_written] == ["source", "own", "fused"]
    assert store.settle()
    again = run(fuse(other, tiny, store), prompt, store)
    assert again.kv_read == (first.kv_written[-1],)
    assert again.kv_written == ()
    longer = run(fuse(other, tiny, store), Prompt((*prompt.ids[:-1], *some_ids(24, 5)), 0), store)
    assert {name.split(":")[0] for name in longer.kv_read} == {"source", "own", "fused"}
    theirs = run(fuse(other, tiny, store), prompt, store, tenant="b")
    assert theirs.kv_read == ()
    assert not set(theirs.kv_written) & set(first.kv_written)


def test_a_model_alone_names_prompt_and_answer(tiny: Loaded, store: KVStore) -> None:
    """The answer's KV is written under the same role as the prompt's, and stands in the account."""
    told = run(Alone("m", tiny, store, 16), Prompt(some_ids(40), 0), store)
    assert [name.rpartition(":")[0].split(":")[0] for name in told.kv_written] == ["own"]
    assert [int(name.rpartition(":")[2]) for name in told.kv_written] == [32]


def test_tokens_digests_and_numerics_stand_in_the_account(tiny: Loaded, other: Loaded) -> None:
    """Six token ids were asked for; the digests name the part that changed."""
    prompt = Prompt(some_ids(20), 0)
    told, swapped = run(fuse(other, tiny), prompt), run(fuse(tiny, tiny), prompt)
    assert [len(ids) for ids in told.tokens] == [6]
    assert told.numerics == "here"
    assert told.seed is None
    differ = {part for part in told.digests if told.digests[part] != swapped.digests[part]}
    assert differ == {"sharer"}


class Syncs(TorchDispatchMode):
    """Counts what would wait for a device: tensors read by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_layers_cost_no_synchronisation_each(tiny: Loaded, other: Loaded) -> None:
    """Reading and fusing reads no scalar of a tensor, however many layers there are: figures come over at once."""
    with Syncs() as seen:
        finish(fuse(other, tiny), Prompt(some_ids(40), 0))
    assert seen.count == 0


def test_closed_gates_are_told_by_layer() -> None:
    """One mark by receiver layer, as the official golden's gates stand."""
    from tests.workers.test_runtime import GOLDEN, golden_model
    from workers.fusers.c2c import load_official

    receiver, sharer = golden_model("receiver"), golden_model("sharer")
    official = load_official(
        GOLDEN / "fuser", receiver=receiver.shape, sharer=sharer.shape, dtype=receiver.dtype, device=receiver.device
    )
    told = official.fuser.change()
    assert len(told.gates) == receiver.shape.layers
    share = sum({"B": 2, "K": 1, "V": 1, "-": 0}[mark] for mark in told.gates) / (2 * len(told.gates))
    assert share == told.gates_open


def test_an_aligned_part_weighs_by_its_slots(tiny: Loaded) -> None:
    """The same KV twice over is the same change: weights are normalised."""
    from workers.runtime import Changed, changes

    kv = KVCache([torch.randn(1, 2, 4, 8)], [torch.randn(1, 2, 4, 8)])
    moved = replace(kv, keys=[kv.keys[0] + 1])
    once, twice = (Changed.of([(n, changes(moved, kv))] * k) for n, k in ((4, 1), (2, 2)))
    assert once.keys == pytest.approx(twice.keys)
