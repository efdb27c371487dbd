"""workers.memory: what would not fit is refused before it is loaded, with the figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from workers import memory
from workers.config import Fleet, ModelConfig, PairConfig, RedisConfig, StoreConfig, WorkerConfig
from workers.engine import Engine
from workers.errors import LoadFailed, PairNotLoaded
from workers.fusers.projector import ProjectorShape
from workers.holdings import Holdings
from workers.loader import DTYPES, kv_shape
from workers.memory import Budget, Needs, Sized

GOLDEN = Path(__file__).parents[1] / "golden" / "e2e" / "same_tokenizer"
GB = 10**9

QWEN3_06B = transformers.Qwen3Config(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
)  # fmt: skip
QWEN25_05B = transformers.Qwen2Config(
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, max_position_embeddings=32768, tie_word_embeddings=True,
)  # fmt: skip


def sized(config: Any, dtype: str) -> Sized:
    """From a config alone."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    weights = sum(p.numel() for p in model.parameters()) * DTYPES[dtype].itemsize
    shape = kv_shape(config)
    name = (config.model_type, dtype)
    return Sized(name, shape, config.max_position_embeddings, weights, 0, memory.kv_bytes(shape, dtype))


def published(dtype: str, **worker: Any) -> Needs:
    """The published small pair, Qwen3-0.6B <- Qwen2.5-0.5B."""
    sharer, receiver = sized(QWEN25_05B, dtype), sized(QWEN3_06B, dtype)
    one = ProjectorShape(sharer.shape.head_size, receiver.shape.head_size, sharer.shape.heads, receiver.shape.heads)
    size = receiver.shape.layers * memory.projector_parameters(one) * DTYPES[dtype].itemsize
    config = WorkerConfig(name="w", **worker)
    return memory.pair_needs([sharer], receiver, {("fuser", "x"): size}, config, cpu=False, own=True)


@pytest.mark.parametrize(
    ("dtype", "worker", "fits"),
    [
        ("bfloat16", {"max_context": 2048}, True),
        ("bfloat16", {"max_context": 4096}, False),
        ("bfloat16", {"max_context": 4096, "max_running": 2}, True),
        ("bfloat16", {}, False),
        ("float32", {"max_context": 512, "max_running": 1}, False),
    ],
)
def test_the_published_small_pair_in_six_gigabytes(dtype: str, worker: dict[str, Any], fits: bool) -> None:
    """In bfloat16 it fits with bounded contexts; with the models' own context, or in float32, it does not."""
    budget, needs = Budget(6 * GB), published(dtype, **worker)
    if fits:
        budget.promise("pair x", needs)
        assert 0 < budget.promised <= 6 * GB
        return
    with pytest.raises(LoadFailed, match=r"of 5\.59 GiB .* weights.* promised already.*max_context"):
        budget.promise("pair x", needs)
    assert budget.promised == 0


def test_the_figures_of_the_published_small_pair() -> None:
    """Weights, fuser and KV per token as published: 0.596 and 0.494 billion parameters, 956 MB, 112 and 12 KiB."""
    needs = published("bfloat16", max_context=1000, max_running=4)
    by_kind: dict[str, int] = {}
    for (kind, *_), size in needs.parts.items():
        by_kind[kind] = by_kind.get(kind, 0) + size
    assert by_kind["weights"] == pytest.approx(2 * (0.596e9 + 0.494e9), rel=0.01)
    assert by_kind["fuser"] == pytest.approx(956e6, rel=0.001)
    assert by_kind["KV of running answers"] == (4 + 1) * 1000 * 112 * 1024
    assert needs.reading == 1000 * (12 + 2 * 112) * 1024


def test_parts_that_pairs_share_count_once() -> None:
    """A second pair of the same models adds its fuser only; one prompt is read at a time."""
    budget, first = Budget(None), published("bfloat16", max_context=1000)
    budget.promise("one", first)
    before = budget.promised
    budget.promise("two", Needs({**first.parts, ("fuser", "y"): 7}, first.reading))
    assert budget.promised == before + 7


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 50), st.integers(0, 20)), max_size=8))
def test_a_budget_never_promises_more_than_it_has(asked: list[tuple[str, int, int]]) -> None:
    """Whatever is asked for, in whatever order, the promises stay within the limit, and a refusal changes nothing."""
    budget = Budget(100)
    for name, size, reading in asked:
        before = budget.promised
        try:
            budget.promise(name, Needs({("weights", name, str(size)): size}, reading))
        except LoadFailed:
            assert budget.promised == before
        assert budget.promised <= 100


def test_estimates_are_what_loading_takes() -> None:
    """Weights, fuser and KV per token of a real checkpoint equal what stands in memory once it is loaded."""
    from workers.fusers.c2c import load_official
    from workers.loader import Loader

    config = ModelConfig(model=str(GOLDEN / "receiver"))
    size, loaded = memory.size_of(config), Loader("cpu").load(config)
    assert size.weights == sum(p.nbytes for p in loaded.model.parameters())
    assert size.shape == loaded.shape
    fuser = load_official(GOLDEN / "fuser", dtype=torch.float32).fuser
    assert list(memory.fuser_part(GOLDEN / "fuser", "c2c", "float32").values()) == [4 * fuser.parameters]
    linear = [m.weight for m in loaded.model.modules() if type(m) is torch.nn.Linear]
    assert size.matrices == sum(w.nbytes for w in linear)


@pytest.mark.parametrize(("limit", "ready"), [(None, True), (100_000_000, True), (1_000_000, False)])
def test_a_worker_refuses_a_pair_that_does_not_fit(limit: int | None, ready: bool, tmp_path: Path) -> None:
    """With too little memory nothing is loaded, and the pair's state says what it would have needed."""
    from tests.tiny import tokenizer

    for name in ("receiver", "sharer"):
        folder = tmp_path / name
        folder.mkdir()
        for file in (GOLDEN / name).iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        tokenizer(150, ascii_only=True).save_pretrained(folder)
    fleet = Fleet(
        models=tuple(ModelConfig(name=n, model=str(tmp_path / n)) for n in ("receiver", "sharer")),
        pairs=(PairConfig(name="p", sharer="sharer", receiver="receiver", fuser=str(GOLDEN / "fuser")),),
        workers=(WorkerConfig(name="w", pairs=("p",), memory=limit),),
        redis=RedisConfig(url=f"unix://{tmp_path}/no-redis.sock"),
        store=StoreConfig(dir=None),
    )
    holdings = Holdings(fleet, fleet.workers[0])
    engine = Engine(holdings.runtimes, threads=1)
    engine.start()
    holdings.load_in_background(engine).join(timeout=60)
    (state,) = holdings.pairs
    assert state.ready is ready, state.reason
    if not ready:
        assert "KV of running answers" in state.reason
        with pytest.raises(PairNotLoaded, match="GiB of memory"):
            holdings.runtime("p")
    engine.close()
    holdings.close()


def test_fusing_the_answer_too_keeps_three_streams_of_it() -> None:
    """Include-response needs the KV of both models for every running answer, beside the fused."""
    sharer, receiver = sized(QWEN25_05B, "bfloat16"), sized(QWEN3_06B, "bfloat16")
    config = WorkerConfig(name="w", max_context=1000, max_running=4)
    plain, more = (
        memory.pair_needs([sharer], receiver, {}, config, cpu=False, own=True, response=response)
        for response in (False, True)
    )
    assert sum(more.parts.values()) - sum(plain.parts.values()) == config.places * 1000 * (
        sharer.token + receiver.token
    )
    assert "KV beside running answers" in more.told()


def test_several_sharers_are_all_counted() -> None:
    """Weights of each, and the KV of each while a prompt is read; the same one twice has its weights once."""
    one, two, receiver = sized(QWEN25_05B, "bfloat16"), sized(QWEN3_06B, "float32"), sized(QWEN3_06B, "bfloat16")
    config = WorkerConfig(name="w", max_context=1000)

    def needs(*sharers: Sized) -> Needs:
        return memory.pair_needs(sharers, receiver, {}, config, cpu=False, own=True)

    assert sum(needs(one, two).parts.values()) - sum(needs(one).parts.values()) == two.weights
    assert needs(one, two).reading - needs(one).reading == 1000 * two.token
    assert needs(one, one).parts == needs(one).parts
