"""What the glass box costs: of the time to read a prompt, how much goes into the size of the change of every layer.

`python -m benchmarks.glassbox` fuses a small Llama of random weights with itself, on one thread; rounds alternate.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from workers import greedy
from workers.cache import KVCache
from workers.fusers.base import Change
from workers.loader import Digests, Loaded, kv_shape
from workers.prompt import Prompt
from workers.runtime import Changed, Paired, changes


class Halved:
    """A fuser that costs next to nothing: half its own KV, half the sharer's."""

    kind = "lite"
    digest = "halved"
    needs_own = True
    parameters = 0

    def __init__(self, layers: int) -> None:
        self.source_layers = frozenset(range(layers))

    def project(self, source: KVCache, own: KVCache | None, start: int) -> KVCache:
        assert own is not None
        return KVCache(
            [torch.lerp(o, s, 0.5) for s, o in zip(source.keys, own.keys, strict=True)],
            [torch.lerp(o, s, 0.5) for s, o in zip(source.values, own.values, strict=True)],
        )

    def change(self) -> Change:
        return Change(1.0, 0.0)


class Nameless:
    """Prompts are given as ids."""

    chat_template = None


def model(layers: int, hidden: int) -> Loaded:
    """Random weights in the shape of a small model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 192),
        max_position_embeddings=4096,
    )
    config._attn_implementation = "sdpa"
    made = LlamaForCausalLM(config)
    made.train(mode=False).requires_grad_(False)
    return Loaded(
        name="m", source="m", model=made, tokenizer=Nameless(), shape=kv_shape(config), context=4096, vocab=4096,
        dtype=torch.float32, device=torch.device("cpu"), digests=Digests("w", "t", "c"), eos=frozenset(),
    )  # fmt: skip


def timed(work: Callable[[], object]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    with torch.inference_mode():
        work()
    return (time.perf_counter() - began) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=576)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    loaded = model(asked.layers, asked.hidden)
    fuser = Halved(loaded.shape.layers)
    pair = Paired("p", loaded, loaded, fuser, mode="fuse", scope="prompt", store=None, chunk=512)
    print(f"{asked.layers} layers, hidden size {asked.hidden}, one thread; medians of {asked.rounds} rounds\n")
    print("| prompt tokens | prefill ms | of it the figures, ms | share |")
    print("|---|---|---|---|")
    for tokens in (32, 128, 512):
        ids = tuple(range(1, tokens + 1))
        own = greedy.read(loaded, ids[:-1])
        fused = KVCache([k * 0.5 for k in own.keys], [v * 0.5 for v in own.values])
        prefill, figures = [], []
        for _ in range(asked.rounds + 1):
            prefill.append(timed(lambda ids=ids: list(pair.prefill(Prompt(ids, 0), None))))  # type: ignore[misc]
            figures.append(timed(lambda a=fused, b=own: Changed.of([(1, changes(a, b))])))  # type: ignore[misc]
        whole, part = median(prefill[1:]), median(figures[1:])
        print(f"| {tokens} | {whole:.1f} | {part:.2f} | {part / whole * 100:.1f} % |")


if __name__ == "__main__":
    main()
