"""A second reader of pair folders, as docs/pair-format.md describes them: plain Python, without a library, and without
anything of ours. Slow, and meant to be read: tensors are lists of lists, a row is one token's K or V of one layer.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Row = list[float]
Nested = Any
"""Lists of lists of numbers, as deep as a tensor has indices."""
Rows = list[list[list[Row]]]
"""[layer][K, V][token]."""

_FORMATS = {"F32": ("f", 4), "BF16": ("H", 2), "I64": ("q", 8)}


class Refused(ValueError):
    """The folder is none that the page describes."""


def read_json(file: Path) -> dict[str, Any]:
    """One object of format 1, in which no member stands twice. Raises Refused."""

    def once(members: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({name for name, _ in members}) < len(members):
            raise Refused(f"{file.name}: a member stands twice")
        return dict(members)

    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=once)
    if found.get("format") != 1:
        raise Refused(f"{file.name}: format {found.get('format')}")
    return found


def read_tensors(file: Path) -> tuple[dict[str, Nested], dict[str, tuple[int, ...]]]:
    """Of a safetensors file, by name: tensors, and their shapes."""
    held = file.read_bytes()
    (length,) = struct.unpack_from("<Q", held)
    header = json.loads(held[8 : 8 + length])
    header.pop("__metadata__", None)
    data = held[8 + length :]
    return {name: _tensor(said, data) for name, said in header.items()}, {
        name: tuple(said["shape"]) for name, said in header.items()
    }


def _tensor(said: dict[str, Any], data: bytes) -> Nested:
    code, size = _FORMATS[said["dtype"]]
    first, last = said["data_offsets"]
    numbers: list[Any] = list(struct.unpack(f"<{(last - first) // size}{code}", data[first:last]))
    if said["dtype"] == "BF16":  # the upper half of a float32
        numbers = [struct.unpack("<f", struct.pack("<I", number << 16))[0] for number in numbers]
    return _nested(iter(numbers), said["shape"])


def _nested(numbers: Iterator[Any], shape: Sequence[int]) -> Nested:
    return [_nested(numbers, shape[1:]) for _ in range(shape[0])] if shape else next(numbers)


class Pair:
    """What a folder of a `lite` or `linear` fuser holds."""

    def __init__(self, folder: Path) -> None:
        """Raises Refused."""
        said = read_json(folder / "pair.json")
        fuser = said["fuser"]
        self.mode, self.kind, self.shape = said["mode"], fuser["kind"], fuser["shape"]
        self.sharer, self.receiver = self.shape["sharer"], self.shape["receiver"]
        if self.mode not in ("fuse", "handover") or said["scope"] not in ("prompt", "context"):
            raise Refused(f"mode {self.mode!r} over {said['scope']!r}")
        weights = folder / "fuser.safetensors"
        if hashlib.sha256(weights.read_bytes()).hexdigest() != fuser["digest"]:
            raise Refused("fuser.safetensors is another than pair.json names")
        self.tensors, found = read_tensors(weights)
        if found != (wanted := self._sizes()):
            raise Refused(f"tensors of {found}, where the shape says {wanted}")

    def project(self, given: dict[str, Nested]) -> tuple[Nested, Nested]:
        """`given` as in a vector: what sharer and receiver cache. Returns the receiver's K and V, each
        [layer][head][token][number].
        """
        start = given["start"]
        at = list(range(start, start + len(given["source.k"][0][0])))
        if self.network == "mix":
            return self._mix(given, at)
        theirs = rows_of(given["source.k"], given["source.v"], at, self.sharer["rope_theta"])
        made = self._lite(theirs) if self.network == "lite" else self._linear(theirs, at)
        keys, values = cached(made, at, self.receiver)
        if self.mode == "fuse":
            keys, values = self._blended(given["own.k"], keys), self._blended(given["own.v"], values)
        return keys, values

    @property
    def network(self) -> str:
        """Which of the page's networks it is."""
        return str(self.shape.get("network", "lite")) if self.kind == "lite" else str(self.kind)

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        """As the page's tables say."""
        shape, many, layers = self.shape, self.sharer["layers"], self.receiver["layers"]
        w, v = (side["heads"] * side["head_size"] for side in (self.sharer, self.receiver))
        if self.network == "linear":
            inputs = len(shape["layers"][0]) * w
            return {"weight": (layers, 2, inputs, v), "bias": (layers, 2, v), "first": (layers, 2, v)}
        r = shape["rank"]
        if self.network == "lite":
            found = {"mean": (many, 2, w), "deviation": (many, 2, w), "direct": (layers, 2, w, w)}
            return found | {"bias": (layers, 2, w), "down": (layers * r, many * 2 * w), "up": (layers, r, 2 * w)}
        found = dict.fromkeys(("theirs_mean", "theirs_deviation"), (many, 2, w))
        found |= dict.fromkeys(("ours_mean", "ours_deviation", "scale"), (layers, 2, v))
        wide, gates = shape["hidden"], 2 * self.receiver["heads"]
        for layer, reads in enumerate(shape["reads"]):
            inputs = len(reads) * 2 * w + (2 * v if self._reads_own else 0)
            parts: dict[str, tuple[int, ...]] = {"down.weight": (r, inputs), "down.bias": (r,)}
            parts |= {"up.weight": (2 * v, r), "up.bias": (2 * v,), "gate.weight": (gates, r), "gate.bias": (gates,)}
            parts |= {"widen.weight": (2 * wide, r), "narrow.weight": (r, wide)} if wide else {}
            found |= {f"layers.{layer}.{name}": size for name, size in parts.items()}
        return found

    def _lite(self, x: Rows) -> Rows:
        t = self.tensors
        u = standard(x, t["mean"], t["deviation"])
        made = []
        for layer, c in enumerate(self.shape["copied"]):
            parts = [self._part(layer, beside(u, range(len(u)), token)) for token in range(len(x[0][0]))]
            kinds = []
            for kind in range(2):
                scale, out = t["deviation"][c][kind], []
                for old, even, part in zip(x[c][kind], u[c][kind], parts, strict=True):
                    moved = plus(times(even, t["direct"][layer][kind]), t["bias"][layer][kind])
                    change = plus(moved, part[kind])
                    out.append([a + s * b for a, s, b in zip(old, scale, change, strict=True)])
                kinds.append(out)
            made.append(kinds)
        return made

    def _part(self, layer: int, row: Row) -> tuple[Row, Row]:
        """For K and for V, from all that the sharer has of one token."""
        rank, t, half = self.shape["rank"], self.tensors, len(self.tensors["bias"][layer][0])
        if not rank:
            return [0.0] * half, [0.0] * half
        both = times(dense(t["down"][layer * rank : (layer + 1) * rank], None, row), t["up"][layer])
        return both[:half], both[half:]

    def _linear(self, x: Rows, at: Sequence[int]) -> Rows:
        t = self.tensors
        made = []
        for layer, reads in enumerate(self.shape["layers"]):
            kinds = []
            for kind in range(2):
                inputs = [[n for i in reads for n in x[i][kind][token]] for token in range(len(at))]
                out = [plus(times(row, t["weight"][layer][kind]), t["bias"][layer][kind]) for row in inputs]
                kinds.append(
                    [plus(row, t["first"][layer][kind]) if p == 0 else row for row, p in zip(out, at, strict=True)]
                )
            made.append(kinds)
        return made

    def _blended(self, own: Nested, made: Nested) -> Nested:
        """In [layer][head][token][number], whether keys are turned or not: turning is linear."""
        open_ = [cosine >= self.shape["least"] for cosine in self.shape["cosine"]]
        by = self.shape["blend"]
        return [
            mixed(mine, theirs, lambda a, b: a + by * (b - a)) if opened else mine
            for mine, theirs, opened in zip(own, made, open_, strict=True)
        ]

    @property
    def _reads_own(self) -> bool:
        return bool(self.shape["own"]) and not self.shape.get("add_only", False)

    def _mix(self, given: dict[str, Nested], at: Sequence[int]) -> tuple[Nested, Nested]:
        shape, t = self.shape, self.tensors
        turns = None not in (self.sharer["rope_theta"], self.receiver["rope_theta"])
        thetas = [side["rope_theta"] if turns else None for side in (self.sharer, self.receiver)]
        x = rows_of(given["source.k"], given["source.v"], given.get("heard_at", at), thetas[0])
        u = standard(x, t["theirs_mean"], t["theirs_deviation"])
        tokens = range(len(at))
        if shape["own"]:
            base = rows_of(given["own.k"], given["own.v"], at, thetas[1])
            o = standard(base, t["ours_mean"], t["ours_deviation"])
        else:
            base = [[[mean for _ in tokens] for mean in kinds] for kinds in t["ours_mean"]]
        made = []
        for layer, reads in enumerate(shape["reads"]):
            kinds: list[list[Row]] = [[], []]
            for token in tokens:
                inputs = beside(u, reads, token) + (beside(o, [layer], token) if self._reads_own else [])
                y = self._written(layer, inputs)
                for kind in range(2):
                    scale = t["scale"][layer][kind]
                    change = [s * n for s, n in zip(scale, y[kind * len(scale) :], strict=False)]
                    kinds[kind].append(plus(base[layer][kind][token], change))
            made.append(kinds)
        keys, values = cached(made, at, {**self.receiver, "rope_theta": thetas[1]})
        if last := shape["last"]:
            keys, values = (
                [
                    [[*own[:-last], *new[-last:]] for own, new in zip(*both, strict=True)]
                    for both in zip(mine, out, strict=True)
                ]
                for mine, out in ((given["own.k"], keys), (given["own.v"], values))
            )
        return keys, values

    def _written(self, layer: int, inputs: Row) -> Row:
        """`y` of one token, K then V, gates applied."""

        def weights(name: str) -> Nested:
            return self.tensors.get(f"layers.{layer}.{name}")

        code = dense(weights("down.weight"), weights("down.bias"), inputs)
        if self.shape["hidden"]:
            even = math.sqrt(sum(n * n for n in code) / len(code) + 2**-23)
            wide = dense(weights("widen.weight"), None, [n / even for n in code])
            half = len(wide) // 2
            block = [a * sigmoid(a) * b for a, b in zip(wide[:half], wide[half:], strict=True)]
            code = plus(code, dense(weights("narrow.weight"), None, block))
        gates = [2 * sigmoid(n) for n in dense(weights("gate.weight"), weights("gate.bias"), code)]
        y = dense(weights("up.weight"), weights("up.bias"), code)
        return [n * gates[i // self.receiver["head_size"]] for i, n in enumerate(y)]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def plus(a: Row, b: Row) -> Row:
    return [x + y for x, y in zip(a, b, strict=True)]


def times(row: Row, matrix: list[Row]) -> Row:
    """The row left of the matrix."""
    return [sum(a * b for a, b in zip(row, column, strict=True)) for column in zip(*matrix, strict=True)]


def dense(weight: list[Row], bias: Row | None, z: Row) -> Row:
    """`weight · z + bias`."""
    out = [sum(a * b for a, b in zip(line, z, strict=True)) for line in weight]
    return plus(out, bias) if bias is not None else out


def mixed(a: Nested, b: Nested, by: Any) -> Nested:
    """Number by number."""
    return [mixed(x, y, by) for x, y in zip(a, b, strict=True)] if isinstance(a, list) else by(a, b)


def turned(head: Row, position: int, theta: float, sign: int) -> Row:
    """One head of one key."""
    half = len(head) // 2
    first, second = [], []
    for i in range(half):
        angle = sign * position * theta ** (-2 * i / len(head))
        cos, sin = math.cos(angle), math.sin(angle)
        first.append(head[i] * cos - head[i + half] * sin)
        second.append(head[i + half] * cos + head[i] * sin)
    return first + second


def rows_of(keys: Nested, values: Nested, at: Sequence[int], theta: float | None) -> Rows:
    """Cached KV [layer][head][token] as rows, keys without rotation."""

    def row(heads: Nested, token: int, turn_by: float | None) -> Row:
        parts = [head[token] if turn_by is None else turned(head[token], at[token], turn_by, -1) for head in heads]
        return [number for part in parts for number in part]

    return [
        [[row(k, token, theta) for token in range(len(at))], [row(v, token, None) for token in range(len(at))]]
        for k, v in zip(keys, values, strict=True)
    ]


def cached(rows: Rows, at: Sequence[int], side: dict[str, Any]) -> tuple[Nested, Nested]:
    """Rows as the receiver caches them: [layer][head][token], keys turned."""
    size, theta = side["head_size"], side["rope_theta"]

    def heads(kind: int, turn_by: float | None) -> Nested:
        return [
            [
                [
                    part if turn_by is None else turned(part, position, turn_by, 1)
                    for row, position in zip(layer[kind], at, strict=True)
                    for part in [row[head * size : (head + 1) * size]]
                ]
                for head in range(side["heads"])
            ]
            for layer in rows
        ]

    return heads(0, theta), heads(1, None)


def standard(x: Rows, mean: Nested, deviation: Nested) -> Rows:
    """`clamp((x - mean) / deviation, -6, 6)`."""
    return [
        [
            [
                [max(-6.0, min(6.0, (n - m) / d)) for n, m, d in zip(row, of_mean, of_deviation, strict=True)]
                for row in kind
            ]
            for kind, of_mean, of_deviation in zip(*layer, strict=True)
        ]
        for layer in zip(x, mean, deviation, strict=True)
    ]


def beside(rows: Rows, layers: Sequence[int], token: int) -> Row:
    """One token's rows side by side: layer by layer, K then V."""
    return [number for layer in layers for kind in rows[layer] for number in kind[token]]
