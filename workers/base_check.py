"""Are a pair's models still those that it was made for? Reads files; loads no model."""

from __future__ import annotations

from pathlib import Path

from workers import pairs
from workers.config import ModelConfig
from workers.errors import LoadFailed
from workers.loader import digests, locate
from workers.pairs import Party


def changed(folder: Path, sharers: list[ModelConfig], receiver: ModelConfig) -> list[str]:
    """What of the models differs from `pair.json`, in words; empty where a worker would take the pair. Raises
    LoadFailed.
    """
    file = pairs.read_pair(folder)
    named: list[tuple[str, Party, ModelConfig]] = [
        *(("sharer", party, model) for party, model in zip((file.sharer, *file.others), sharers, strict=False)),
        ("receiver", file.receiver, receiver),
    ]
    return [f"the {role}'s {part}" for role, party, model in named for part in _different(party, model)]


def _different(party: Party, model: ModelConfig) -> list[str]:
    from transformers import AutoTokenizer

    place = locate(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise LoadFailed(f"{model.model}: no readable tokenizer ({error})") from error
    found = digests(place, tokenizer)
    parts = [part for part in ("weights", "tokenizer") if getattr(party, part) != getattr(found, part)]
    layers = "all" if model.layers is None else ",".join(map(str, model.layers))
    return parts + (["layers"] if layers != party.layers else [])
