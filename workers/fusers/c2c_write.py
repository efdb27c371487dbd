"""A new fuser of the official network, and its folder in the official layout. Knows tensors and files only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from workers.files import replacing
from workers.fusers.base import KVShape
from workers.fusers.c2c import C2CFuser, Link, Official
from workers.fusers.folder import write_tensors
from workers.fusers.projector import C2CProjector, ProjectorShape, last_aligned


@dataclass(frozen=True, slots=True)
class Size:
    """Of every projector; the defaults are the published ones."""

    hidden: int = 1024
    inner: int = 1024
    layers: int = 3


def fresh(
    sharer: KVShape,
    receiver: KVShape,
    size: Size,
    *,
    steps: int,
    seed: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> C2CFuser:
    """Untrained, layers mapped last to last, its gates' temperature falling over `steps`."""
    shape = ProjectorShape(
        source_dim=sharer.head_size,
        target_dim=receiver.head_size,
        source_num_heads=sharer.heads,
        target_num_heads=receiver.heads,
        hidden_dim=size.hidden,
        intermediate_dim=size.inner,
        num_layers=size.layers,
        anneal_steps=steps,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = {i: C2CProjector(shape) for i in range(receiver.layers)}
    for projector in made.values():
        projector.to(device, dtype)
        # The temperature is no weight: it is never narrower than float32.
        projector.gate_temperature = projector.gate_temperature.float()
    links = [Link(source, i) for i, source in enumerate(last_aligned(receiver.layers, sharer.layers))]
    return C2CFuser(made, links)


def save_official(folder: Path, official: Official, training: dict[str, Any]) -> None:
    """`config.json` and `final/`, weights as safetensors. `training` is kept in `config.json`, and read by nobody.
    Raises LoadFailed.
    """
    final, fuser = folder / "final", official.fuser
    first = next(iter(fuser.projectors.values())).shape
    model = {
        "base_model": official.receiver,
        "teacher_model": official.sharer,
        "is_do_alignment": official.aligned,
        "alignment_strategy": official.strategy,
        "include_response": official.include_response,
        "multi_source_fusion_mode": official.fusion,
        "projector": {"type": "C2CProjector", "params": _arguments(first)},
        "mapping": "last_aligned",
    }
    for index, projector in fuser.projectors.items():
        write_tensors(final / f"projector_{index}.safetensors", projector.state_dict())
        named = {"class": "C2CProjector", "init_args": asdict(projector.shape)}
        _write(final / f"projector_{index}.json", json.dumps(named, indent=1))
    links = {str(t): [[link.source, link.projector]] for t, link in enumerate(fuser.links) if link}
    _write(final / "projector_config.json", json.dumps({"0": {"1": links}}))
    _write(folder / "config.json", json.dumps({"model": model, "training": training}, indent=1))


def _write(file: Path, text: str) -> None:
    with replacing(file) as aside:
        aside.write_text(text + "\n")


def _arguments(shape: ProjectorShape) -> dict[str, Any]:
    """As the recipe of a published checkpoint names them: without the models' shapes."""
    return {k: v for k, v in asdict(shape).items() if not k.startswith(("source_", "target_"))}
