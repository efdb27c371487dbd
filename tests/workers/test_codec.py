"""Codecs: the bound on what int8 loses, and that exact and int8 never meet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.kvlab import BLOCK, files, get, put, random_kv, same
from workers.cache import KVCache
from workers.codec import Codec, Packed, pack, unpack
from workers.config import RedisConfig, StoreConfig
from workers.embedded import EmbeddedRedis
from workers.store import KVStore


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@given(
    st.integers(1, 40),
    st.floats(1e-6, 1e4),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**31),
    st.data(),
)
@settings(deadline=None, max_examples=60)
def test_int8_errs_by_half_a_step_at_most(
    tokens: int, size: float, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    """Keys by half of their channel's step, values by half of their token's, over any stretch that is cut out."""
    kv = random_kv(tokens, seed, dtype=torch.float32)
    kv = KVCache([(k * size).to(dtype) for k in kv.keys], [(v * size).to(dtype) for v in kv.values])
    start = data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(start + 1, tokens))
    near = unpack(pack(kv.clone(), "int8"), start, stop)
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
    for wholes, nears, dim in ((kv.keys, near.keys, 2), (kv.values, near.values, 3)):
        for whole, part in zip(wholes, nears, strict=True):
            assert part.dtype == dtype
            step = (whole.float().abs().amax(dim=dim, keepdim=True) / 127).expand(whole.shape)[:, :, start:stop]
            exact = whole[:, :, start:stop].float()
            assert ((part.float() - exact).abs() <= step / 2 * (1 + 1e-4) + exact.abs() * rounding + 1e-12).all()


@pytest.mark.parametrize("codec", ["exact", "int8"])
def test_names_and_tensors_make_the_same_again(codec: Codec) -> None:
    """Through its named tensors, as a file holds them, packed KV comes back bit for bit; empty layers stay empty."""
    full, none = random_kv(12, 9), torch.empty(1, 2, 0, 4)
    packed = pack(KVCache([none, *full.keys[1:]], [none, *full.values[1:]]), codec)
    again = Packed.of_tensors(packed.codec, packed.dtype, packed.tensors())
    assert same(unpack(again, 0, 12), unpack(packed, 0, 12))
    assert again.nbytes == packed.nbytes
    assert unpack(again, 0, 12).keys[0].shape == none.shape


def test_zeros_stay_zeros() -> None:
    """A channel or token without any signal is not divided by nothing."""
    kv = KVCache([torch.zeros(1, 2, 8, 4)], [torch.zeros(1, 2, 8, 4)])
    assert same(unpack(pack(kv.clone(), "int8"), 0, 8), kv)


def test_exact_and_int8_never_meet(server: EmbeddedRedis, tmp_path: Path) -> None:
    """Two stores on one folder that differ in codec find nothing of each other; int8 takes a quarter of the bytes."""
    sizes = {}
    kv, tokens = random_kv(512), range(512)

    def opened(codec: Codec) -> KVStore:
        config = StoreConfig(dir=tmp_path, ram_bytes=0, block_tokens=BLOCK, codec=codec)
        return KVStore(config, RedisConfig(url=server.url, timeout=1.0))

    for codec in ("int8", "exact"):
        store = opened(codec)
        assert store.settle(20)
        assert get(store, tokens) is None
        before = sum(os.path.getsize(f) for f in files(tmp_path))
        put(store, tokens, kv)
        sizes[codec] = sum(os.path.getsize(f) for f in files(tmp_path)) - before
        loaded = get(store, tokens)
        assert loaded is not None
        assert same(loaded, kv) == (codec == "exact")
        torch.testing.assert_close(loaded.keys[0], kv.keys[0], rtol=0, atol=0.03)
        store.close()
    assert sizes["int8"] < sizes["exact"]
    lossy = opened("int8")
    assert lossy.settle(20)
    assert get(lossy, tokens) is not None
    lossy.close()
