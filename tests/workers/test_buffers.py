from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.buffers import Rows, Sequence
from workers.cache import KVCache
from workers.fusers.base import KVShape
from workers.loader import Loaded

SHAPE = KVShape(layers=2, heads=2, head_size=4)
CPU = torch.device("cpu")


def some_kv(tokens: int) -> KVCache:
    """Random KV of SHAPE."""
    return KVCache([torch.randn(1, 2, tokens, 4) for _ in range(2)], [torch.randn(1, 2, tokens, 4) for _ in range(2)])


def equal(a: KVCache, b: KVCache) -> bool:
    return all(torch.equal(x, y) for x, y in zip((*a.keys, *a.values), (*b.keys, *b.values), strict=True))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "step"]), st.integers(1, 300)), max_size=25))
def test_rows_keep_what_belongs_to_each(moves: list[tuple[str, int]]) -> None:
    """Whatever joins, leaves and grows, every row holds exactly its own KV."""
    rows = Rows(SHAPE, 1, torch.float32, CPU)
    expected: list[KVCache] = []
    for move, size in moves:
        if move == "join" and len(expected) < 6:
            kv = some_kv(size)
            assert rows.join(kv) == len(expected)
            expected.append(kv)
        elif move == "leave" and expected:
            row = size % len(expected)
            rows.leave(row)
            last = expected.pop()
            if row < len(expected):
                expected[row] = last
        elif move == "step" and expected:
            rows.prepare()
            fresh = [some_kv(1) for _ in expected]
            for layer in range(2):
                keys = torch.cat([f.keys[layer] for f in fresh])
                values = torch.cat([f.values[layer] for f in fresh])
                rows.update(keys, values, layer)
            rows.advance()
            expected = [KVCache.concat([e, f]) for e, f in zip(expected, fresh, strict=True)]
        for row, kv in enumerate(expected):
            assert equal(rows.kv(row, 0, len(kv)), kv)


def test_a_sequence_read_in_chunks_equals_one_read_at_once(tiny: Loaded) -> None:
    """Chunk by chunk, KV and logits are those of one forward pass."""
    ids = [random.Random(0).randrange(tiny.vocab) for _ in range(50)]
    with torch.inference_mode():
        whole = tiny.model(torch.tensor([ids]), use_cache=True)
        sequence = Sequence(tiny.shape, len(ids), tiny.dtype, tiny.device)
        for start in range(0, 50, 17):
            chunk = ids[start : start + 17]
            out = tiny.model(torch.tensor([chunk]), cache=sequence, use_cache=True)
            sequence.advance(len(chunk))
    torch.testing.assert_close(out.logits[0, -1], whole.logits[0, -1], rtol=1e-5, atol=1e-5)
    for layer, (keys, values) in enumerate(sequence.kv().tensors()):
        torch.testing.assert_close(keys, whole.cache.layers[layer].keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(values, whole.cache.layers[layer].values, rtol=1e-5, atol=1e-5)
