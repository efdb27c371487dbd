"""The weights of a pair folder, `fuser.safetensors`: read only as `pair.json` names them, written aside and renamed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn

from workers.errors import LoadFailed
from workers.files import content, replacing
from workers.pairs import FuserInfo, read_pair

WEIGHTS = "fuser.safetensors"
_Net = TypeVar("_Net", bound=nn.Module)


def read_weights(folder: Path, kind: str) -> tuple[FuserInfo, dict[str, Tensor]]:
    """What `pair.json` says of the fuser, and its tensors. Raises LoadFailed: missing, altered, or of another kind."""
    info = read_pair(folder).fuser
    if info.kind != kind:
        raise LoadFailed(f"{folder}: holds a fuser of kind {info.kind!r}, not {kind!r}")
    file = folder / WEIGHTS
    try:
        # Loaded from the bytes that were digested: a mapped file would change under a pair that runs.
        held = content(file, None)
        digest = hashlib.sha256(held).hexdigest()
        tensors = load(held)
    except SafetensorError as error:
        raise LoadFailed(f"{file}: cannot be read ({error})") from error
    if digest != info.digest:
        raise LoadFailed(f"{file}: its SHA-256 is {digest[:12]}…, pair.json says {info.digest[:12]}…")
    return info, tensors


def fitted(build: Callable[[], _Net], tensors: Mapping[str, Tensor], folder: Path) -> _Net:
    """The network that `build` makes, with these weights in float32. Raises LoadFailed where they do not fit it.

    A shape may claim any size: it is held against the tensors before anything of that size is made.
    """
    try:
        with torch.device("meta"):
            wanted = {name: tuple(t.shape) for name, t in build().state_dict().items()}
    except (RuntimeError, TypeError, ArithmeticError) as error:
        raise LoadFailed(f"{folder}: the shape in pair.json is none that a network has ({error})") from error
    found = {name: tuple(t.shape) for name, t in tensors.items()}
    if wrong := sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)):
        one = wrong[0]
        raise LoadFailed(
            f"{folder}: its tensors do not fit the shape in pair.json: {one} is {found.get(one)}, not "
            f"{wanted.get(one)}, and so {len(wrong)} in all"
        )
    net = build()
    net.load_state_dict({name: t.float() for name, t in tensors.items()})
    return net


def save_weights(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write the tensors as they are; returns the SHA-256 of the file. Raises LoadFailed."""
    write_tensors(folder / WEIGHTS, tensors)
    return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """As safetensors. Raises LoadFailed."""
    with replacing(file, SafetensorError) as aside:
        save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, aside)
        # safetensors creates the file for its owner alone; a pair is meant to be installed and shared.
        aside.chmod(0o644)
