"""Writes the small vectors of docs/pair-format.md: `python -m scripts.make_pair_vectors`. The same each time.

Each folder of tests/vectors is a pair of kind `lite` or `linear` with `vector.safetensors`: the sharer's KV of three
tokens (`source.k`, `source.v`: layers, heads, tokens, size), where they stand (`start`), and in the sharer's text where
that is elsewhere (`heard_at`), the receiver's own where the mode is `fuse`, and what a reader must make of it
(`expected.k`, `expected.v`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from workers.cache import KVCache
from workers.fusers.base import KVShape
from workers.fusers.linear import LinearFuser, LinearShape
from workers.fusers.lite import LiteFuser, LiteShape, fresh
from workers.fusers.mix import MixFuser
from workers.fusers.mix import fresh as fresh_mix
from workers.fusers.mix_net import MixShape
from workers.pairs import FORMAT, FuserInfo, PairFile, Party, write

SHARER, RECEIVER = KVShape(3, 2, 4, 10_000.0), KVShape(2, 2, 4, 500.0)
UNLIKE = KVShape(2, 1, 6, 500.0)
"""A receiver whose KV has another size than the sharer's."""
PARTY = Party("owner/model", "0" * 64, "1" * 64, "2" * 64)


def kv(shape: KVShape, seed: int) -> KVCache:
    """Three tokens."""
    random = torch.Generator().manual_seed(seed)
    size = (shape.layers, 1, shape.heads, 3, shape.head_size)
    return KVCache(*(list(torch.randn(size, generator=random).unbind(0)) for _ in range(2)))


def lite(folder: Path) -> LiteFuser:
    """Every weight random."""
    fuser = fresh(LiteShape(SHARER, RECEIVER, (0, 2), 2), torch.float32, 0)
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in fuser.net.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=random) / 4)
        fuser.net.deviation.abs_().add_(0.5)
    return fuser.save(folder)


def mixed(folder: Path, mode: str) -> MixFuser:
    """Every weight random, between models of other sizes; in `fuse` with a block, and only the last two slots, in
    `mix-add-fuse` without reading the receiver's own KV.
    """
    fuse = mode == "fuse"
    shape = MixShape(
        SHARER,
        UNLIKE,
        own=fuse,
        reads=((0, 1, 2), (1, 2)),
        rank=3,
        hidden=4 if fuse else 0,
        last=2 if fuse else 0,
        add_only="add" in folder.name,
    )
    fuser = fresh_mix(shape, torch.float32, 0)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in fuser.net.state_dict().items():
            tensor.copy_(torch.randn(tensor.shape, generator=random) / 4)
            if name.endswith("deviation") or name == "scale":
                tensor.abs_().add_(0.5)
    return fuser.save(folder)


def linear(folder: Path, mode: str) -> LinearFuser:
    """Every map random; one layer closed in `fuse`."""
    shape = LinearShape(SHARER, RECEIVER, ((0, 1), (1, 2)), (0.9, 0.4), 0.5, 0.25)
    random = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(size, generator=random) / 4 for name, size in shape.sizes.items()}
    return LinearFuser(shape, tensors, mode=mode).save(folder)


def made_of(folder: Path, mode: str) -> LiteFuser | MixFuser | LinearFuser:
    """The network that the folder's name begins with."""
    match folder.name.split("-")[0]:
        case "lite":
            return lite(folder)
        case "mix":
            return mixed(folder, mode)
        case _:
            return linear(folder, mode)


def main() -> None:
    """Write the folders."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("tests/vectors"))
    out = parser.parse_args().out
    starts = {"lite": 5, "mix": 1, "mix-fuse": 4, "mix-add-fuse": 4, "linear": 0, "linear-fuse": 2}
    for name, start in starts.items():
        mode = "fuse" if name.endswith("fuse") else "handover"
        fuser = made_of(out / name, mode)
        info = FuserInfo(fuser.kind, fuser.digest, fuser.shape.as_json(), fuser.parameters)
        write(out / name, "pair.json", PairFile(FORMAT, name, mode, "context", PARTY, PARTY, info))
        source, own = kv(SHARER, 3), kv(fuser.shape.receiver, 4) if mode == "fuse" else None
        heard_at = torch.tensor([2, 2, 7]) if name.startswith("mix-") else None
        if isinstance(fuser, MixFuser):
            made = fuser.project(source, own, start, heard_at)
        else:
            made = fuser.project(source, own, start)
        parts = {"source": source, "expected": made} | ({"own": own} if own is not None else {})
        tensors = {f"{part}.k": torch.cat(cache.keys) for part, cache in parts.items()}
        tensors |= {f"{part}.v": torch.cat(cache.values) for part, cache in parts.items()}
        tensors |= {"heard_at": heard_at} if heard_at is not None else {}
        save_file(tensors | {"start": torch.tensor(start)}, out / name / "vector.safetensors")


if __name__ == "__main__":
    main()
