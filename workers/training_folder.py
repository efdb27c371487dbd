"""`training/` in a pair's folder while it is trained: what was asked for, and a checkpoint. Torch-free.

What was asked for is one tree of JSON values; another tree is another training, which does not go on from this one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from workers import pairs
from workers.errors import LoadFailed
from workers.files import replacing
from workers.pairs import PairFile


def ended(folder: Path, asked: dict[str, Any], *, resume: bool) -> PairFile | None:
    """The pair, where this very training has ended already. Raises LoadFailed where another pair is there."""
    if not (folder / "pair.json").exists():
        return None
    file = pairs.read_pair(folder)
    made = file.training
    parties = all(
        getattr(party, part) == asked[role][part]
        for role, party in (("sharer", file.sharer), ("receiver", file.receiver))
        for part in ("weights", "tokenizer", "dtype", "layers")
    )
    if resume and made is not None and parties and (made.options, made.data) == (asked["options"], asked["data"]):
        return file
    raise LoadFailed(f"{folder}: holds a pair already; name a folder of its own, or remove it")


def enter(folder: Path, asked: dict[str, Any], *, resume: bool) -> None:
    """Begin, or go on with the same. Raises LoadFailed."""
    file = folder / "training" / "asked.json"
    if file.exists():
        if not resume:
            raise LoadFailed(f"{folder}: holds a training that has not ended; go on with --resume, or remove it")
        before = msgspec.json.decode(file.read_bytes())
        if before != asked:
            different = sorted(_flat(before).items() ^ _flat(asked).items())
            named = ", ".join(sorted({key for key, _ in different}))
            raise LoadFailed(f"{folder}: its training was begun with other {named}, so it cannot go on")
        return
    with replacing(file) as aside:
        aside.write_bytes(msgspec.json.encode(asked))


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other process trains there meanwhile. Raises LoadFailed where one does."""
    handle = os.open(folder / "training", os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LoadFailed(f"{folder}: another process is training there") from None
        yield
    finally:
        os.close(handle)


def forget(folder: Path) -> None:
    """A training that could not begin leaves nothing to go on with."""
    if not (folder / "training" / "checkpoint.pt").exists():
        shutil.rmtree(folder / "training")
        if not any(folder.iterdir()):
            folder.rmdir()


def sweep(folder: Path) -> None:
    """The training has ended."""
    if (folder / "training").exists():
        shutil.rmtree(folder / "training")


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": repr(value)}
    return found
