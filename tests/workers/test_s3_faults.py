"""The shared tier over a real S3 server that is away, silent, refuses, or holds something else than it should."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import fsspec
import pytest

from tests.s3 import BUCKET, S3, Gate, running
from tests.workers.kvlab import get, put, random_kv, same
from tests.workers.test_shared import everything, machine, shared_files, wait_for
from workers.embedded import EmbeddedRedis
from workers.keys import KEY_VARIABLE, Keyring
from workers.remote import Remote
from workers.store import KVStore
from workers.vault import RemoteVault

BOUND = 1.5
"""Seconds: a find and a load of what would be computed at once, with room for a busy machine."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as made:
        yield made


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with running() as made:
        yield made


@pytest.fixture
def gate(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Whatever opens `s3://` goes through it; the server key is in the environment."""
    made = Gate(s3.endpoint)
    s3.use(monkeypatch, made.endpoint)
    monkeypatch.setenv(KEY_VARIABLE, secrets.token_hex(32))
    yield made
    made.close()


@pytest.fixture
def place(gate: Gate) -> str:
    return f"s3://{BUCKET}/{secrets.token_hex(8)}"


def misses_soon(store: KVStore, seed: int = 0) -> None:
    """Nothing of the shared place is found, and nobody waits long to hear it."""
    store.rates(prefill_tokens_per_s=1000.0)
    for _ in range(8):
        began = time.monotonic()
        assert get(store, range(seed, seed + 40)) is None
        assert time.monotonic() - began < BOUND


@pytest.mark.parametrize("fault", ["away", "silent", "denied"])
def test_a_sick_server_is_a_miss_and_loses_nothing(
    server: EmbeddedRedis, s3: S3, gate: Gate, place: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it refuses, or says nothing, finds miss within their bound, refusals are counted and no entry is forgotten;
    a tenant that was never seen before has RAM at once; then all is served as before. No log names host or secret."""
    with machine(None, server.url, place, ram_bytes=60_000) as store:
        put(store, range(40), random_kv(40))
        assert store.index is not None
        tag = store.scope("a").tag
        before = store.index.usage(tag)
        store._ram.drop_tag(tag)
        {"away": gate.shut, "silent": gate.hold, "denied": lambda: s3.policy("Deny")}[fault]()
        try:
            misses_soon(store)
            began = time.monotonic()
            put(store, range(40), random_kv(40, 7), tenant="new", settle=False)
            assert same(get(store, range(40), tenant="new"), random_kv(40, 7))
            assert time.monotonic() - began < BOUND
            began = time.monotonic()
            for _ in range(20):
                store.scope("new")
            assert time.monotonic() - began < BOUND
            assert store.index.usage(tag) == before
        finally:
            gate.open()
            s3.policy(None)
        assert wait_for(lambda: get(store, range(40)) is not None)
        assert same(get(store, range(40)), random_kv(40))
        assert store.counters.get("disk_errors", tier="shared") >= 1
        assert store.counters.get("missing") == store.counters.get("corrupt") == store.counters.get("failed") == 0

        def shared() -> bool:
            put(store, range(40), random_kv(40, 7), tenant="new")
            return bool([path for path in shared_files(place) if store.scope("new").tag in path])

        assert wait_for(shared)
    logged = capsys.readouterr().out
    assert "hunter2" not in logged
    assert gate.endpoint not in logged


def test_a_server_that_is_away_at_start_is_taken_up(server: EmbeddedRedis, gate: Gate, place: str) -> None:
    """A store opens and serves from RAM without it, and shares once it is there."""
    gate.shut()
    with machine(None, server.url, place) as store:
        began = time.monotonic()
        put(store, range(40), random_kv(40), settle=False)
        assert same(get(store, range(40)), random_kv(40))
        assert time.monotonic() - began < BOUND
        gate.open()

        def shared() -> bool:
            put(store, range(40), random_kv(40))
            return {path.rsplit(".")[-1] for path in everything(place)} == {"key", "safetensors"}

        assert wait_for(shared)
        with machine(None, server.url, place, ram_bytes=0) as other:
            assert same(get(other, range(40)), random_kv(40))


def test_objects_in_each_others_place_serve_nobody(server: EmbeddedRedis, place: str) -> None:
    """Two tenants' objects, swapped, and one text's in another's place: counted misses; each gets its own again."""
    with machine(None, server.url, place, ram_bytes=0) as store:
        put(store, range(40), random_kv(40, 1))
        put(store, range(100, 140), random_kv(40, 2))
        put(store, range(40), random_kv(40, 3), tenant="b")
        tag = store.scope("a").tag
        mine, other = ([p for p in shared_files(place) if (tag in p) == own] for own in (True, False))
        fs, _ = fsspec.core.url_to_fs(place, use_listings_cache=False)
        bodies = [fs.cat_file(path) for path in (*other, *mine)]
        for path, body in zip((*mine, *other), bodies, strict=True):
            fs.pipe_file(path, body)
        assert get(store, range(40)) is None
        assert get(store, range(100, 140)) is None
        assert get(store, range(40), tenant="b") is None
        assert store.counters.get("corrupt") == 3
        assert store.settle(20)
        put(store, range(40), random_kv(40, 1))
        put(store, range(40), random_kv(40, 3), tenant="b")
        assert same(get(store, range(40)), random_kv(40, 1))
        assert same(get(store, range(40), tenant="b"), random_kv(40, 3))


def test_a_record_that_cannot_be_read_ends_no_tenant(s3: S3, gate: Gate, place: str) -> None:
    """When the place lists a tenant and does not give its secret, nobody takes the tenant for one that is gone."""
    ring = Keyring(None, server_key=bytes(32), vault=RemoteVault(Remote(place)))
    scope = ring.scope("a")
    other = Keyring(None, server_key=bytes(32), vault=RemoteVault(Remote(place)))
    s3.policy("Deny")
    try:
        with pytest.raises(OSError, match="shared tier"):
            other.live()
    finally:
        s3.policy(None)
    other.refresh()
    assert list(other.live()) == [scope.tag]
