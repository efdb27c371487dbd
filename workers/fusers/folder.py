"""The weights of a pair folder, `fuser.safetensors`: read only as `pair.json` names them, written aside and renamed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from workers.errors import LoadFailed
from workers.pairs import FuserInfo, read_pair

WEIGHTS = "fuser.safetensors"


def read_weights(folder: Path, kind: str) -> tuple[FuserInfo, dict[str, Tensor]]:
    """What `pair.json` says of the fuser, and its tensors. Raises LoadFailed: missing, altered, or of another kind."""
    info = read_pair(folder).fuser
    if info.kind != kind:
        raise LoadFailed(f"{folder}: holds a fuser of kind {info.kind!r}, not {kind!r}")
    file = folder / WEIGHTS
    try:
        # Loaded from the bytes that were digested: a mapped file would change under a pair that runs.
        held = file.read_bytes()
        digest = hashlib.sha256(held).hexdigest()
        tensors = load(held)
    except (OSError, SafetensorError) as error:
        raise LoadFailed(f"{file}: cannot be read ({error})") from error
    if digest != info.digest:
        raise LoadFailed(f"{file}: its SHA-256 is {digest[:12]}…, pair.json says {info.digest[:12]}…")
    return info, tensors


def save_weights(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write the tensors as they are; returns the SHA-256 of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".{WEIGHTS}.tmp"
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, aside)
    # safetensors creates the file for its owner alone; a pair is meant to be installed and shared.
    aside.chmod(0o644)
    digest = hashlib.sha256(aside.read_bytes()).hexdigest()
    aside.rename(folder / WEIGHTS)
    return digest
