"""KV that a frozen model has read for a training run: computed once, kept on disk within a bound, read again.

Every file is one text's KV in safetensors, named by the model and the ids; a torn or foreign one is computed again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from workers.cache import KVCache
from workers.greedy import read
from workers.loader import Loaded
from workers.pairs import canonical


class KeptKV:
    """Reads for one model. `folder` is this run's own, and may be removed when it ends."""

    def __init__(self, folder: Path, most: int) -> None:
        """`most`: bytes on disk; beyond, KV is computed every time."""
        self.folder = folder
        self.computed = self.found = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._room = most - sum(f.stat().st_size for f in folder.glob("*.safetensors"))

    def read(self, loaded: Loaded, ids: Sequence[int]) -> KVCache:
        """As `workers.greedy.read`, bit for bit."""
        file = self.folder / f"{_name(loaded, ids)}.safetensors"
        kept = self._load(file, loaded, len(ids))
        if kept is not None:
            self.found += 1
            return kept
        self.computed += 1
        kv = read(loaded, ids)
        if kv.nbytes <= self._room:
            self._room -= kv.nbytes
            _save(file, kv)
        return kv

    def _load(self, file: Path, loaded: Loaded, tokens: int) -> KVCache | None:
        if not file.exists():
            return None
        shape = loaded.shape
        try:
            tensors = load_file(file, device=str(loaded.device))
            kv = KVCache(*([tensors[f"{kind}{i}"] for i in range(shape.layers)] for kind in "kv"))
        except (OSError, SafetensorError, KeyError):
            return None
        size = (1, shape.heads, tokens, shape.head_size)
        return kv if all(tuple(t.shape) == size for both in kv.tensors() for t in both) else None


def _name(loaded: Loaded, ids: Sequence[int]) -> str:
    return hashlib.sha256(canonical([loaded.identity, str(loaded.device), list(ids)])).hexdigest()[:32]


def _save(file: Path, kv: KVCache) -> None:
    """Written aside and renamed, so that a run that is killed leaves whole files only."""
    tensors: dict[str, torch.Tensor] = {}
    for i, (key, value) in enumerate(kv.tensors()):
        tensors |= {f"k{i}": key.cpu().contiguous(), f"v{i}": value.cpu().contiguous()}
    handle, aside = tempfile.mkstemp(prefix=".kv-", dir=file.parent)
    os.close(handle)
    save_file(tensors, aside)
    Path(aside).rename(file)
