"""KV kept for training: what was read once is not read again, by whatever run, and is the same to the last bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from router.cli import main
from tests.tiny import make_model
from workers.cache import KVCache
from workers.config import RedisConfig, StoreConfig
from workers.greedy import read
from workers.kept import LIFE, SCOPE, KeptKV, keeping
from workers.loader import Loaded
from workers.pairs import read_pair
from workers.store import KVStore

WORDS = ["Paris", "tide", "harbour", "ledger", "France", "buyer"]
ROWS = [{"context": f"Item {i} is {w}.", "question": "What is it?", "answer": w} for i, w in enumerate(WORDS)]
MOST = 4 << 20


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path / "cache"))


def same(one: KVCache, other: KVCache) -> bool:
    pairs = zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def counts(kept: KeptKV) -> tuple[int, int]:
    return kept.computed, kept.found


def test_what_is_kept_is_what_was_read(tmp_path: Path, tiny: Loaded, other: Loaded) -> None:
    """Bit for bit, for each model its own, in this process and the next; a text that begins like another is read by
    itself, as KV in pieces would differ in its last bits.
    """
    texts = [[5, 6, 7], [5, 6, 7, 8], list(range(5, 300)), [9]]
    for time in (0, 1):
        with keeping(MOST) as kept:
            for loaded in (tiny, other):
                for ids in texts:
                    assert same(kept.read(loaded, ids), read(loaded, ids))
            assert counts(kept) == ((8, 0) if time == 0 else (0, 8))


def test_a_damaged_file_is_read_again(tmp_path: Path, tiny: Loaded) -> None:
    """Cut short or overwritten, KV is a miss: the model reads, and what it reads is kept in its place."""
    with keeping(MOST) as kept:
        kept.read(tiny, [5, 6, 7])
    (file,) = (tmp_path / "cache").rglob("*.safetensors")
    for spoil in (lambda raw: raw[:-9], lambda raw: raw[:-9] + bytes(9)):
        file.write_bytes(spoil(file.read_bytes()))
        with keeping(MOST) as kept:
            assert same(kept.read(tiny, [5, 6, 7]), read(tiny, [5, 6, 7]))
        (file,) = (tmp_path / "cache").rglob("*.safetensors")
        with keeping(MOST) as kept:
            kept.read(tiny, [5, 6, 7])
            assert counts(kept) == (0, 1)


def test_what_does_not_fit_is_read_every_time(tmp_path: Path, tiny: Loaded) -> None:
    """The bound holds on disk; texts that are in stay in while others pass by; none are kept within 0 bytes."""
    size = read(tiny, [5] * 40).nbytes
    texts = [[i] * 40 for i in range(5, 15)]
    with keeping(4 * size) as kept:
        for _ in range(3):
            for ids in texts:
                kept.read(tiny, ids)
        assert 2 * 2 <= kept.found <= 2 * 4
        assert kept.computed + kept.found == 30
    assert sum(f.stat().st_size for f in (tmp_path / "cache").rglob("*.safetensors")) <= 4 * size
    with keeping(0) as kept:
        kept.read(tiny, texts[0])
        kept.read(tiny, texts[0])
        assert counts(kept) == (2, 0)


def test_a_store_that_rounds_is_not_asked_for_what_it_rounded(tmp_path: Path, tiny: Loaded, redis_url: str) -> None:
    """Where workers keep int8, training keeps exact KV beside it."""
    config, redis = StoreConfig(dir=tmp_path / "kv", codec="int8"), RedisConfig(url=redis_url)
    for _ in range(2):
        with keeping(MOST, config, redis) as kept:
            assert same(kept.read(tiny, [5, 6, 7]), read(tiny, [5, 6, 7]))
    assert counts(kept) == (0, 1)


def test_it_goes_by_time_and_by_purge(tmp_path: Path, tiny: Loaded, redis_url: str) -> None:
    """Its scope is one that no tenant can have, and can be destroyed like a tenant's."""
    config, redis = StoreConfig(dir=tmp_path / "kv"), RedisConfig(url=redis_url)
    with keeping(MOST, config, redis) as kept:
        kept.read(tiny, [5, 6, 7])
    store = KVStore(config, redis)
    assert store.settle(20)
    assert store.purge(SCOPE).entries == 1
    store.close()
    assert " " in SCOPE
    assert LIFE == 7 * 24 * 3600


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("items") / "items.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return file


Train = Callable[..., dict[str, Any]]


@pytest.fixture
def train(tmp_path: Path, tiny_folder: Path, other_folder: Path, data: Path) -> Train:
    """`twolane pair train`, each time into a new folder; what it says at the end."""
    common = ("--width", "16", "--rank", "4", "--tokens", "200", "--steps", "8", "--device", "cpu", "--json")
    made = iter(range(100))

    def run(kind: str, *options: str, sharer: Path = tiny_folder) -> dict[str, Any]:
        out = tmp_path / f"{next(made)}"
        arguments = [str(sharer), str(other_folder), "--data", str(data), "--out", str(out), "--fuser", kind]
        result = CliRunner().invoke(main, ["pair", "train", *arguments, *common, *options])
        assert result.exit_code == 0, result.stderr
        told: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return told

    return run


def test_a_second_training_reads_nothing_again(train: Train) -> None:
    """Another seed, another rate, the same once more: every text comes from what the first has kept. Another kind of
    fuser reads only what no other has needed: the receiver's own KV for c2c, whole chats for linear.
    """
    texts, steps = len(ROWS), 8
    first = train("lite")
    assert (first["kv_computed"], first["kv_reused"]) == (texts, 12 + steps - texts)  # 12 to calibrate
    assert train("lite", "--seed", "5", "--rate", "1e-3")["kv_computed"] == 0
    again = train("lite")
    assert (again["kv_computed"], again["digest"]) == (0, first["digest"])
    official = train("c2c", "--scope", "context")
    assert (official["kv_computed"], official["kv_reused"]) == (texts, 2 * steps - texts)  # it calibrates nothing
    assert train("c2c", "--scope", "context", "--seed", "3")["kv_computed"] == 0
    assert train("linear", "--tokens", "999")["kv_computed"] == 2 * texts
    assert train("linear", "--tokens", "999", "--mode", "fuse")["kv_computed"] == 0


def test_of_two_tokenizers_the_sharer_reads_once(tmp_path: Path, train: Train) -> None:
    """Chats that are aligned are kept as the sharer read them, section by section; the fuser is the same."""
    ascii_only = make_model(tmp_path / "ascii", seed=3, ascii_only=True)
    first = train("c2c", sharer=ascii_only)
    assert (first["kv_computed"], first["kv_reused"]) == (len(ROWS), 8 - len(ROWS))
    second = train("c2c", "--keep-kv", "0", sharer=ascii_only)
    assert (second["kv_computed"], second["kv_reused"], second["digest"]) == (8, 0, first["digest"])
    assert train("c2c", "--seed", "4", sharer=ascii_only)["kv_computed"] == 0


def test_the_store_of_a_configuration(tmp_path: Path, train: Train, redis_url: str) -> None:
    """With --config KV lies where the router's workers keep theirs, and not in the user's folder."""
    config = tmp_path / "config.yaml"
    config.write_text(f"redis: {{url: '{redis_url}'}}\nstore: {{dir: {tmp_path / 'kv'}}}\n")
    train("lite", "--config", str(config))
    assert len(list((tmp_path / "kv").rglob("*.safetensors"))) == len(ROWS)
    assert not (tmp_path / "cache").exists()
    assert train("lite", "--config", str(config), "--seed", "2")["kv_computed"] == 0
    assert read_pair(tmp_path / "1").training is not None
