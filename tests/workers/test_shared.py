"""The shared tier: what one machine stored another one finds; a purge holds for both; whatever is sick is a miss."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.s3 import BUCKET, S3, running
from tests.workers.kvlab import BLOCK, files, get, put, random_kv, same
from workers.config import RedisConfig, StoreConfig
from workers.embedded import EmbeddedRedis
from workers.keys import KEY_VARIABLE, given_key
from workers.remote import Remote, local_folder
from workers.store import KVStore
from workers.vault import RemoteVault

KEY = "ab" * 32


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with running() as server:
        yield server


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty shared place, and the server key in the environment."""
    monkeypatch.setenv(KEY_VARIABLE, secrets.token_hex(32))
    if request.param == "s3":
        request.getfixturevalue("s3").use(monkeypatch)
        return f"s3://{BUCKET}/{secrets.token_hex(8)}/kv"
    return f"file://{tmp_path / 'shared'}"


@contextlib.contextmanager
def machine(
    folder: Path | None, url: str, place: str, *, ram_bytes: int = 2**28, shared_bytes: int = 2**30
) -> Iterator[KVStore]:
    """A machine's store."""
    config = StoreConfig(dir=folder, ram_bytes=ram_bytes, block_tokens=BLOCK, shared=place, shared_bytes=shared_bytes)
    store = KVStore(config, RedisConfig(url=url, timeout=1.0))
    try:
        assert store.settle(20)
        yield store
    finally:
        store.close()


def everything(place: str) -> dict[str, bytes]:
    """All files of the shared place."""
    fs, root = fsspec.core.url_to_fs(place, use_listings_cache=False)
    return {path: fs.cat_file(path) for path in fs.find(root)} if fs.exists(root) else {}


def shared_files(place: str) -> list[str]:
    return [path for path in everything(place) if path.endswith(".safetensors")]


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


def test_another_machine_finds_what_was_stored(server: EmbeddedRedis, place: str, tmp_path: Path) -> None:
    """From the shared tier first, bit for bit; then from its own disk; also when the first machine is gone."""
    kv = random_kv(600)
    with machine(tmp_path / "one", server.url, place) as one:
        put(one, range(600), kv)
    assert len(shared_files(place)) == 3
    with machine(tmp_path / "two", server.url, place, ram_bytes=0) as two:
        assert same(get(two, range(600)), kv)
        assert two.counters.get("bytes", tier="shared") > 0
        assert two.settle(20)
        assert len(files(tmp_path / "two")) == 3
        before = two.counters.get("bytes", tier="shared")
        assert same(get(two, range(600)), kv)
        assert two.counters.get("bytes", tier="shared") == before
        assert get(two, range(600), tenant="b") is None


def test_a_machine_without_a_disk_shares_too(server: EmbeddedRedis, place: str) -> None:
    """With no folder the tiers are RAM and the shared place."""
    with machine(None, server.url, place) as one, machine(None, server.url, place, ram_bytes=0) as two:
        put(one, range(40), random_kv(40))
        assert same(get(two, range(40)), random_kv(40))


def test_what_is_shared_is_always_encrypted(server: EmbeddedRedis, place: str, tmp_path: Path) -> None:
    """No stretch of the tensors and no server key lie in the shared place, though the tenant did not ask for it."""
    kv = random_kv(40)
    with machine(tmp_path / "one", server.url, place) as one:
        put(one, range(40), kv)
        data = b"".join(everything(place).values())
    key = given_key(None)
    assert key is not None
    assert key.hex().encode() not in data
    assert not [t for t in (*kv.keys, *kv.values) if t.numpy().tobytes()[:16] in data]


def test_a_purge_holds_for_all_machines(server: EmbeddedRedis, place: str, tmp_path: Path) -> None:
    """After a purge here nothing of the tenant is left in the shared place, nor on the other machine within seconds."""
    with (
        machine(tmp_path / "one", server.url, place) as one,
        machine(tmp_path / "two", server.url, place) as two,
    ):
        put(one, range(600), random_kv(600))
        put(one, range(40), random_kv(40, 2), tenant="b")
        assert same(get(two, range(600)), random_kv(600))
        assert same(get(two, range(40), tenant="b"), random_kv(40, 2))
        assert two.settle(20)
        old = one.scope("a").tag
        assert one.purge("a").entries == 3
        assert get(one, range(600)) is None
        assert not [path for path in shared_files(place) if old in path]
        assert wait_for(lambda: two.scope("a").tag == one.scope("a").tag)
        assert get(two, range(600)) is None
        assert wait_for(lambda: not [path for path in files(tmp_path / "two") if old in path.parts])
        assert same(get(two, range(40), tenant="b"), random_kv(40, 2))
        put(two, range(600), random_kv(600, 5))
        assert same(get(one, range(600)), random_kv(600, 5))


def test_another_server_key_finds_nothing(
    server: EmbeddedRedis, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with another key sees other names, and reads nothing of the first one's files."""
    with machine(tmp_path / "one", server.url, place) as one:
        put(one, range(40), random_kv(40))
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    with machine(tmp_path / "two", server.url, place) as two:
        assert get(two, range(40)) is None
        put(two, range(40), random_kv(40, 3))
        assert same(get(two, range(40)), random_kv(40, 3))


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_a_damaged_shared_file_is_a_miss_once(server: EmbeddedRedis, place: str, tmp_path: Path, damage: str) -> None:
    """It is counted and forgotten, and the next save puts it there anew."""
    with machine(tmp_path / "one", server.url, place) as one:
        put(one, range(40), random_kv(40))
    fs, _ = fsspec.core.url_to_fs(place, use_listings_cache=False)
    (name,) = shared_files(place)
    data = bytearray(fs.cat_file(name))
    data[-5] ^= 0xFF
    if damage == "delete":
        fs.rm_file(name)
    else:
        fs.pipe_file(name, bytes(data if damage == "flip" else data[:-9]))
    with machine(None, server.url, place, ram_bytes=0) as two:
        assert get(two, range(40)) is None
        assert two.counters.get("missing" if damage == "delete" else "corrupt") == 1
        assert two.settle(20)
        put(two, range(40), random_kv(40))
        assert same(get(two, range(40)), random_kv(40))


def test_the_shared_budget_is_kept(server: EmbeddedRedis, place: str, tmp_path: Path) -> None:
    """The place never holds more than shared_bytes, whoever writes; the latest stays."""
    limit = 40_000
    with (
        machine(tmp_path / "one", server.url, place, shared_bytes=limit) as one,
        machine(tmp_path / "two", server.url, place, shared_bytes=limit) as two,
    ):
        for n in range(10):
            put((one, two)[n % 2], range(n * 100, n * 100 + 40), random_kv(40, n))
            assert sum(len(data) for path, data in everything(place).items() if path.endswith("rs")) <= limit
        assert same(get(one, range(900, 940)), random_kv(40, 9))
        assert one.counters.get("evicted", tier="shared") + two.counters.get("evicted", tier="shared") > 0


def test_an_emptied_redis_is_filled_from_the_shared_place(place: str, tmp_path: Path) -> None:
    """A machine with another, empty Redis learns at its start what lies in the shared place, and serves it."""
    kv = random_kv(600)
    with EmbeddedRedis(tmp_path / "r1") as first, machine(tmp_path / "one", first.url, place) as one:
        put(one, range(600), kv)
    with EmbeddedRedis(tmp_path / "r2") as second, machine(None, second.url, place, ram_bytes=0) as two:
        assert same(get(two, range(600)), kv)


def test_a_shared_place_that_is_gone_costs_nothing_but_its_hits(
    server: EmbeddedRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that is no folder any more: known tenants go on with what is here, and what is not stored is counted."""
    monkeypatch.setenv(KEY_VARIABLE, secrets.token_hex(32))
    (tmp_path / "shared").mkdir()
    place = f"file://{tmp_path / 'shared'}"
    with machine(tmp_path / "one", server.url, place) as one:
        put(one, range(40), random_kv(40))
        (tmp_path / "shared").rename(tmp_path / "away")
        (tmp_path / "shared").write_text("not a folder")
        assert same(get(one, range(40)), random_kv(40))
        put(one, range(100, 140), random_kv(40, 1))
        assert same(get(one, range(100, 140)), random_kv(40, 1))
        lost = one.counters.get("disk_errors", tier="shared") + one.counters.get("dropped", tier="shared")
        assert lost > 0
        (tmp_path / "shared").unlink()
        (tmp_path / "away").rename(tmp_path / "shared")


class Flaky(MemoryFileSystem):  # type: ignore[misc]
    """A place whose every call fails while `broken`, as one behind a network does."""

    protocol = "flaky"
    broken = False

    def open(self, *args: Any, **kwargs: Any) -> Any:
        if Flaky.broken:
            raise ConnectionResetError("flaky://user:secret@host")
        return super().open(*args, **kwargs)

    def cat_file(self, *args: Any, **kwargs: Any) -> Any:
        if Flaky.broken:
            raise ConnectionResetError("flaky://user:secret@host")
        return super().cat_file(*args, **kwargs)


def test_a_place_that_fails_for_a_while_loses_nothing(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it fails finds miss, saves are dropped and counted, no entry is forgotten and no secret is logged; then it
    serves as before."""
    monkeypatch.setenv(KEY_VARIABLE, secrets.token_hex(32))
    monkeypatch.setattr(Flaky, "broken", False)
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    place = f"flaky://{secrets.token_hex(8)}"
    with machine(None, server.url, place, ram_bytes=0) as store:
        put(store, range(40), random_kv(40))
        monkeypatch.setattr(Flaky, "broken", True)
        for _ in range(5):
            assert get(store, range(40)) is None
        put(store, range(100, 140), random_kv(40, 1))
        assert store.counters.get("disk_errors", tier="shared") >= 4
        assert store.counters.get("missing") + store.counters.get("corrupt") == 0
        monkeypatch.setattr(Flaky, "broken", False)
        assert wait_for(lambda: get(store, range(40)) is not None)
        assert same(get(store, range(40)), random_kv(40))
        put(store, range(100, 140), random_kv(40, 1))
        assert same(get(store, range(100, 140)), random_kv(40, 1))
        assert store.counters.get("failed") == 0
    assert "secret@" not in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "xyz", "ab" * 31, "ab" * 33])
def test_a_key_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    """A key file must hold 64 hex digits; the error does not repeat what it holds."""
    file = tmp_path / "server-key"
    file.write_text(text)
    with pytest.raises(ValueError, match="64 hex digits") as caught:
        given_key(file)
    assert not text or text not in str(caught.value)
    file.write_text(KEY + "\n")
    assert given_key(file) == bytes.fromhex(KEY)


def test_two_vaults_agree_on_one_secret() -> None:
    """Whoever makes a record first, both read it; a replaced one is seen after a refresh."""
    place = f"memory://{secrets.token_hex(8)}"
    one, two = RemoteVault(Remote(place)), RemoteVault(Remote(place))
    made = one.read_or_create("t", lambda: {"n": 1})
    assert made == two.read_or_create("t", lambda: {"n": 2}) == {"n": 1}
    before = two.stamp("t")
    one.replace("t", {"n": 333})
    two.refresh()
    assert two.stamp("t") != before
    assert two.read_or_create("t", lambda: {"n": 2}) == {"n": 333}
    assert two.names() == ["t"]
    Remote(place).write("tenants/t.key", b"damaged")
    assert two.read_or_create("t", lambda: {"n": 4}) == {"n": 4} == one.read_or_create("t", lambda: {"n": 5})


def test_errors_of_a_filesystem_name_their_class_only() -> None:
    """Whatever a filesystem raises becomes an OSError without URL, path or credential."""
    with pytest.raises(OSError, match="shared tier: ") as caught:
        Remote("nosuchscheme://user:secret@host/bucket")
    assert "secret" not in str(caught.value)
    assert local_folder("file:///a/b") == Path("/a/b")
    assert local_folder("s3://bucket/kv") is None
