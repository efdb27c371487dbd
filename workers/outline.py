"""What a model is, from its config and tokenizer alone: no weights are read. Knows transformers' files; knows no pair.

A source is what `workers.loader` takes. Parameters are counted on the meta device, where a model has shapes and no
memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workers.config import ModelConfig
from workers.errors import LoadFailed
from workers.fusers.base import KVShape
from workers.loader import (
    describe,
    digest_of,
    kv_shape,
    mend_tokenizer,
    read_config,
    read_tokenizer,
    refuse_unsupported,
    require_kv,
    tokenizer_digest,
)

_NOISE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer, as far as a pair depends on it."""

    tokens: Mapping[str, int]
    digest: str
    template: bool
    """It has a chat template."""
    pads: bool
    """It has a pad or an eos token, so that chats can be aligned."""


@dataclass(frozen=True, slots=True)
class Outline:
    """One model. Where `refusal` is not empty it keeps no KV that could be shared, and has no shape."""

    source: str
    kind: str
    """transformers' model_type."""
    refusal: str
    shape: KVShape | None
    rope: str
    """In words."""
    context: int
    rows: int
    """Of its embedding."""
    parameters: int
    body: int
    """Parameters without embeddings."""
    head: int
    """Numbers of the output embedding."""
    config: str
    """Digest of its config: equal for models that differ in weights only."""
    vocabulary: Vocabulary


def outline(config: ModelConfig) -> Outline:
    """Raises LoadFailed where config or tokenizer cannot be found or read."""
    place = describe(config)
    hf, tokenizer = _read(config.model, place)
    text = hf.get_text_config()
    refusal = _refusal(hf, text, config.model)
    parameters, body, head = 0, 0, 0
    if not refusal:
        model = _model(hf, config.model)
        parameters, body, head = _parameters(model)
        refusal = _keeps_none(model, kv_shape(text), config.model)
    return Outline(
        source=config.model,
        kind=str(hf.model_type),
        refusal=refusal,
        shape=None if refusal else kv_shape(text),
        rope=_rope(text),
        context=int(getattr(text, "max_position_embeddings", None) or 0),
        rows=int(text.vocab_size),
        parameters=parameters,
        body=body,
        head=head,
        config=digest_of({k: v for k, v in json.loads(hf.to_json_string(use_diff=False)).items() if k not in _NOISE}),
        vocabulary=Vocabulary(
            tokens=tokenizer.get_vocab(),
            digest=tokenizer_digest(tokenizer),
            template=bool(tokenizer.chat_template),
            pads=tokenizer.pad_token_id is not None or tokenizer.eos_token_id is not None,
        ),
    )


def _read(source: str, place: Path) -> tuple[Any, Any]:
    file = place if place.is_file() else None
    where: dict[str, Any] = {"gguf_file": file.name} if file else {}
    folder = file.parent if file else place
    config, tokenizer = read_config(folder, source, **where), read_tokenizer(folder, source, **where)
    if file:
        mend_tokenizer(tokenizer, file)
    return config, tokenizer


def _refusal(config: Any, text: Any, source: str) -> str:
    try:
        refuse_unsupported(config, source)
    except LoadFailed as error:
        return str(error)
    if not getattr(text, "num_attention_heads", None):
        return f"{source}: it has no attention heads, so it keeps no KV"
    return ""


def _rope(text: Any) -> str:
    found = getattr(text, "rope_parameters", None) or {}
    if "rope_theta" not in found:
        return "no rotary positions"
    kind, part = found.get("rope_type", "default"), found.get("partial_rotary_factor", 1.0)
    named = "plain" if kind == "default" else kind
    return f"{named if part == 1.0 else f'partial ({part:g})'} RoPE, theta {found['rope_theta']:g}"


def _model(config: Any, source: str) -> Any:
    """On the meta device. Raises LoadFailed."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            return auto.from_config(config)
    except Exception as error:  # each model class has its own ways to break on a config
        raise LoadFailed(f"{source}: no decoder model is known for its config ({type(error).__name__})") from error


def _parameters(model: Any) -> tuple[int, int, int]:
    """All, those without embeddings, and those that make logits."""
    total = sum(p.numel() for p in model.parameters())
    read, made = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return total, total - read.numel() - (0 if made is read else made.numel()), made.numel()


def _keeps_none(model: Any, shape: KVShape, source: str) -> str:
    """Why a token leaves no K and V as the config promises them; empty where it does."""
    try:
        require_kv(model, shape, source)
    except LoadFailed as error:
        return str(error)
    except Exception:
        # Not every model can be run without its weights: whether this one keeps KV is seen when it is loaded.
        return ""
    return ""
