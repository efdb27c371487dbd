"""Tiny models made on the spot: random weights, a tokenizer trained on a few sentences, a chat template."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SENTENCES = [
    "The tide table of the harbour, hour by hour, day by day.",
    "What is the capital of France? The capital of France is Paris.",
    "Report, ledger, item, price, buyer, date of sale: 0123456789.",
    "žluťoučký kůň, 北京, łódź and 👩 are words in other scripts.",
]


ASCII = [*map(chr, range(33, 127)), "Ġ", "Ċ"]
"""Printable characters, space and newline, as byte-level BPE writes them."""


def tokenizer(vocab: int = 400, *, ascii_only: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that every text has ids and split characters occur.

    `ascii_only`: no token is part of a character, so that even a random answer is whole text.
    """
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=ASCII if ascii_only else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([s for s in SENTENCES if s.isascii() or not ascii_only], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(
    folder: Path,
    *,
    seed: int = 0,
    layers: int = 3,
    hidden: int = 48,
    kv_heads: int = 2,
    context: int = 2048,
    ascii_only: bool = False,
) -> Path:
    """A random Llama with four heads, in the Hugging Face layout."""
    torch.manual_seed(seed)
    tok = tokenizer(ascii_only=ascii_only)
    config = LlamaConfig(
        vocab_size=len(tok),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        tie_word_embeddings=True,
    )
    folder.mkdir(parents=True, exist_ok=True)
    LlamaForCausalLM(config).save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder
