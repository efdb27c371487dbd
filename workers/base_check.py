"""Are a pair's models still those that it was made for? Reads files; loads no model."""

from __future__ import annotations

from pathlib import Path

from workers import pairs
from workers.config import ModelConfig
from workers.errors import LoadFailed
from workers.loader import digests, locate
from workers.pairs import Change, Party

_GRADED = "chat template"


def changed(folder: Path, sharers: list[ModelConfig], receiver: ModelConfig) -> list[Change]:
    """Empty where a worker would take the pair as it was proven. Raises LoadFailed."""
    file = pairs.read_pair(folder)
    if (count := 1 + len(file.others)) > len(sharers):
        return [Change(f"the number of sharers ({count} in pair.json, {len(sharers)} here)", refused=True)]
    named: list[tuple[str, Party, ModelConfig]] = [
        *(("sharer", party, model) for party, model in zip((file.sharer, *file.others), sharers, strict=False)),
        ("receiver", file.receiver, receiver),
    ]
    return [
        Change(f"the {role}'s {part}", refused=part != _GRADED)
        for role, party, model in named
        for part in _different(party, model)
    ]


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
    parts += ["layers"] if layers != party.layers else []
    return parts + ([_GRADED] if party.template != found.template else [])
