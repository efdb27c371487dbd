"""The forwards of plain models against the models' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.workers.test_families import FAMILIES, made
from workers.buffers import Interrupted, Rows, Sequence, interruptible
from workers.cache import KVCache
from workers.chunk import Chunk
from workers.config import ModelConfig
from workers.loader import Loaded, Loader
from workers.packed import Packer
from workers.plain import PlainDecoder, plain_decoder

PLAIN = {"Llama", "Llama with scaled RoPE", "Mistral", "Qwen2", "Qwen3"}


@pytest.fixture(scope="module")
def model(tiny: Loaded, tiny_folder: Path) -> Loaded:
    """A packed copy of the tiny model."""
    loaded = Loader("cpu").load(ModelConfig(name="tiny", model=str(tiny_folder)))
    Packer().pack(loaded.model)
    return loaded


@pytest.fixture(scope="module")
def decoder(model: Loaded) -> PlainDecoder:
    found = plain_decoder(model)
    assert found is not None
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_whether_a_family_is_plain(family: str, tmp_path: Path) -> None:
    """Those that only differ in biases, norms of heads and RoPE are; others keep their own forward."""
    loaded = Loader("cpu").load(ModelConfig(model=str(made(family, tmp_path))))
    assert plain_decoder(loaded) is None, "not packed"
    Packer().pack(loaded.model)
    assert (plain_decoder(loaded) is not None) == (family in PLAIN)


def test_a_model_that_computes_something_else_than_its_parts_say_is_not_plain(model: Loaded) -> None:
    """A layer that scales what it returns is found out by the numbers."""
    hook = model.model.get_decoder().layers[1].register_forward_hook(lambda _m, _in, out: out * 1.01)
    try:
        assert plain_decoder(model) is None
    finally:
        hook.remove()
    assert plain_decoder(model) is not None


def chunked(model: Loaded, prompts: list[list[int]]) -> list[tuple[Sequence, list[Chunk]]]:
    """Each prompt's stretches, all over the same sequence."""
    found = []
    for stretches in prompts:
        into = Sequence(model.shape, sum(stretches), model.dtype, model.device)
        start, chunks = 0, []
        for size in stretches:
            ids = tuple((7 * (start + i) + 3) % 390 for i in range(size))
            chunks.append(Chunk(model, into, ids, answers=True))
            start += size
        found.append((into, chunks))
    return found


def own(model: Loaded, ids: tuple[int, ...]) -> tuple[torch.Tensor, KVCache]:
    """Logits behind the ids, and KV, by the model's own forward over all of them."""
    with torch.inference_mode():
        out = model.model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    return out.logits[0, -1], KVCache([x.keys for x in out.cache.layers], [x.values for x in out.cache.layers])


def assert_close(mine: KVCache, theirs: KVCache) -> None:
    for a, b in zip((*mine.keys, *mine.values), (*theirs.keys, *theirs.values), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=12)
@given(prompts=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=5))
def test_prompts_read_in_one_forward_are_read_as_each_alone(
    model: Loaded, decoder: PlainDecoder, prompts: list[list[int]]
) -> None:
    """Whatever stretches of whatever prompts stand behind one another: logits and KV are the model's own."""
    asked = chunked(model, prompts)
    with torch.inference_mode():
        for at in range(max(map(len, prompts))):
            decoder.read([chunks[at] for _, chunks in asked if at < len(chunks)])
    for into, chunks in asked:
        logits, kv = own(model, tuple(i for chunk in chunks for i in chunk.ids))
        assert chunks[-1].logits is not None
        torch.testing.assert_close(chunks[-1].logits, logits, rtol=1e-4, atol=1e-4)
        assert all(chunk.done for chunk in chunks)
        assert_close(into.kv(), kv)


@settings(deadline=None, max_examples=12)
@example(lengths=[5] * 9, steps=2)
@example(lengths=[*range(1, 10)], steps=2)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=10), steps=st.integers(1, 3))
def test_answers_of_any_lengths_go_on_as_each_alone(
    model: Loaded, decoder: PlainDecoder, lengths: list[int], steps: int
) -> None:
    """Rows of a batch, however long each is: logits and KV of every step are the model's own."""
    prompts = [tuple((11 * i + length) % 390 for i in range(length)) for length in lengths]
    written = tuple(range(20, 20 + steps))
    rows = Rows(model.shape, 1, model.dtype, model.device)
    for ids in prompts:
        rows.join(own(model, ids)[1])
    with torch.inference_mode():
        for token in written:
            logits = decoder.step(rows, [token] * len(prompts))
            rows.advance()
    for row, ids in enumerate(prompts):
        expected, kv = own(model, (*ids, *written))
        torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)
        assert_close(rows.kv(row, 0, len(ids) + steps), kv)


def test_a_forward_that_gives_way_has_changed_nothing(model: Loaded, decoder: PlainDecoder) -> None:
    """Two prompts given up at the second layer, and read again, are read as undisturbed ones."""
    disturbed, plain = (chunked(model, [[20], [13]]) for _ in range(2))
    stop = iter([False, False, True])
    with torch.inference_mode():
        for into, _ in disturbed:
            into.gives_way = True
        with interruptible(lambda: next(stop)), pytest.raises(Interrupted):
            decoder.read([chunks[0] for _, chunks in disturbed])
        assert not any(chunks[0].done or into.seen for into, chunks in disturbed)
        for asked in (disturbed, plain):
            decoder.read([chunks[0] for _, chunks in asked])
    for (mine, _), (theirs, _) in zip(disturbed, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.kv().keys, theirs.kv().keys, strict=True))
