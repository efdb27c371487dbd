"""Tiny random Llama models with the tokenizer-free `Loaded` around them."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from workers.loader import Digests, Loaded, kv_shape, truncate


class Letters:
    """A tokenizer of one token per letter: ids 1.. are letters, 0 is unused."""

    chat_template = None

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(96 + i) if 1 <= i <= 26 else " " for i in ids)


def tiny(layers: int = 4, *, seed: int = 0, vocab: int = 40, eos: int = 39) -> Loaded:
    """A random model: hidden 64, two KV heads of size 16."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=eos,
    )
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config)
    model.train(mode=False).requires_grad_(False)
    return Loaded(
        name=f"tiny-{layers}",
        source="tiny",
        model=model,
        tokenizer=Letters(),
        shape=kv_shape(config),
        context=256,
        vocab=vocab,
        dtype=torch.float32,
        device=torch.device("cpu"),
        digests=Digests(weights=f"w{seed}", tokenizer="t", template="c"),
        eos=frozenset({eos}),
    )


def tiny_pair(seed: int = 0) -> tuple[Loaded, Loaded]:
    """A sharer of four layers and a receiver made of its first and last."""
    sharer = tiny(4, seed=seed)
    return sharer, truncate(sharer, (0, 3))
