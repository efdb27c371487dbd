"""Families of models with plain KV, through the whole engine: each answers as transformers' own `generate` does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.tiny import tokenizer
from tests.workers.test_official_runtime import ask, tokens_of
from workers.config import ModelConfig
from workers.engine import Engine
from workers.errors import LoadFailed
from workers.loader import Loader
from workers.prompt import Prompt
from workers.runtime import Alone

BASE = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.3,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Llama with scaled RoPE": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "Qwen2": {},
    "Qwen3": {},
    "SmolLM3": {},
    "Mistral": {"sliding_window": None},
    "Gemma": {},
    "Phi3": {},
    "Olmo2": {},
    "Granite": {},
    "Cohere": {},
    "GPTNeoX": {"num_key_value_heads": 4},
}  # fmt: skip
PROMPTS = (tuple(range(5, 12)), tuple(range(30, 73, 2)), (9,))
TOKENS = 10


def made(family: str, place: Path) -> Path:
    """A random model and a tokenizer."""
    kind = family.split()[0]
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**BASE, **FAMILIES[family]})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_answers_in_a_batch_as_generate_does(family: str, tmp_path: Path) -> None:
    """Greedy tokens of three prompts of different lengths, read in chunks and decoded together."""
    loaded = Loader("cpu").load(ModelConfig(model=str(made(family, tmp_path))))
    engine = Engine({"golden": Alone("golden", loaded, None, 16)}, threads=1)
    engine.start()
    running = [ask(engine, Prompt(ids, 0), TOKENS) for ids in PROMPTS]
    answers = [tokens_of(events) for events in running]
    engine.close()
    for ids, answer in zip(PROMPTS, answers, strict=True):
        given = torch.tensor([ids])
        want = loaded.model.generate(
            given, attention_mask=torch.ones_like(given), max_new_tokens=TOKENS, min_new_tokens=TOKENS,
            do_sample=False, eos_token_id=[], pad_token_id=0,
        )  # fmt: skip
        assert answer == want[0, len(ids) :].tolist()


def test_a_model_that_does_not_keep_what_its_config_says_is_refused(tmp_path: Path) -> None:
    """Found by one token at load, and not by the first request: GPT-NeoX has no grouped KV heads."""
    place = made("GPTNeoX", tmp_path)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}))
    with pytest.raises(LoadFailed, match="3 layers with 2 KV heads of 16; the model keeps 3 layers, with 4 of 16"):
        Loader("cpu").load(ModelConfig(model=str(place)))
