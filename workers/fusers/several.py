"""Several sharers on one receiver, as the official method joins them. Knows tensors; knows no models.

`sequential`: each sharer's fuser reads what the one before has made of the receiver's KV, and overwrites it.
`parallel`: all read the receiver's own KV, and their changes are added up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from workers.cache import KVCache
from workers.errors import KVMismatch
from workers.fusers.base import Change
from workers.fusers.c2c import KV, C2CFuser, Fusion


def join_layer(fusers: Sequence[C2CFuser], source: Callable[[int, int], KV], layer: int, own: KV, fusion: Fusion) -> KV:
    """K, V of one receiver layer; `own` itself where all gates are closed. `source(q, i)` is layer i of sharer q.

    Differentiable. Where weights are narrower than float32 the result may be float32, to be rounded once.
    """
    result = own
    changes: list[KV] = []
    for q, fuser in enumerate(fusers):
        read = fuser.reads(layer)
        if read is None:
            continue
        key, value = fuser.fuse_layer(layer, source(q, read), result)
        if fusion == "parallel":
            changes.append((key - own[0], value - own[1]))
        else:
            result = key.to(own[0].dtype), value.to(own[1].dtype)
    if changes:
        keys, values = zip(*changes, strict=True)
        result = own[0] + torch.stack(keys).sum(0), own[1] + torch.stack(values).sum(0)
    return result


class JointFuser:
    """One fuser for each sharer, in order. What `fusion` says is part of the pair's recipe, not of the digest."""

    kind: str = "c2c"
    needs_own: bool = True

    def __init__(self, fusers: Sequence[C2CFuser], fusion: Fusion) -> None:
        self.fusers, self.fusion = tuple(fusers), fusion
        self.parameters = sum(f.parameters for f in fusers)
        self.digest = hashlib.sha256("\n".join(f.digest for f in fusers).encode()).hexdigest()

    def project(self, sources: Sequence[KVCache], own: KVCache | None, start: int) -> KVCache:
        """The receiver's slots after fusing, rounded once to its dtype; `sources` has one for each sharer."""
        if own is None or len(sources) != len(self.fusers):
            raise KVMismatch(f"{len(self.fusers)} fusers change the receiver's own KV, each with its sharer's")
        if any(own.layers != len(f.links) for f in self.fusers):
            raise KVMismatch(f"the receiver's KV has {own.layers} layers, the fusers have {len(self.fusers[0].links)}")

        def source(q: int, layer: int) -> KV:
            return sources[q].keys[layer], sources[q].values[layer]

        joined = [join_layer(self.fusers, source, i, kv, self.fusion) for i, kv in enumerate(own.tensors())]
        return KVCache(
            [key.to(k.dtype) for (key, _), k in zip(joined, own.keys, strict=True)],
            [value.to(v.dtype) for (_, value), v in zip(joined, own.values, strict=True)],
        )

    def change(self) -> Change:
        """Share of all gates that are open; by layer, whether any fuser's is."""
        each = [f.change() for f in self.fusers]
        marks = "".join(_either(column) for column in zip(*(c.gates for c in each), strict=True))
        return Change(sum(c.gates_open for c in each) / len(each), 0.0, marks)


def _either(marks: tuple[str, ...]) -> str:
    open_kinds = {kind for mark in marks for kind in ("KV" if mark == "B" else mark) if kind != "-"}
    return "B" if len(open_kinds) == 2 else next(iter(open_kinds), "-")
