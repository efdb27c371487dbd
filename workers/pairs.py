"""Pair folders: `pair.json` (who), `fuser.safetensors` (the network), `report.json` (the proof). Torch-free.

The fingerprint covers what changes the answer: weights, tokenizers, dtypes, layers, fuser, mode and scope. It does not
cover the report (proving a pair again keeps its KV) nor the chat template (graded: see `PairFolder.check`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from workers.errors import LoadFailed
from workers.files import content, replacing

FORMAT = 1
_MODES = ("fuse", "handover")
_SCOPES = ("prompt", "context")
_DTYPES = ("float32", "bfloat16")
_LAYERS = re.compile(r"all|[0-9]{1,5}(,[0-9]{1,5})*")


class Party(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sharer or receiver, by digest."""

    model: str
    weights: str
    """SHA-256 over config and weight files."""
    tokenizer: str
    template: str
    dtype: str = "float32"
    layers: str = "all"
    """`all`, or the decoder layers kept, comma separated."""
    revision: str | None = None
    licence: str | None = None


class FuserInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Kind, digest of `fuser.safetensors`, and the shape its constructor takes."""

    kind: str
    digest: str
    shape: dict[str, Any] = {}
    parameters: int = 0
    licence: str | None = None


class Training(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the fuser was made: what making it again would take."""

    data: str
    """SHA-256 of the items it was learnt from."""
    steps: int
    tokens: int
    seconds: float
    """Of all processes that a resumed run took, but for what was lost behind a checkpoint."""
    device: str
    options: dict[str, Any] = {}


class PairFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """`pair.json`."""

    format: int
    name: str
    mode: str
    """fuse | handover"""
    scope: str
    """prompt | context"""
    sharer: Party
    receiver: Party
    fuser: FuserInfo
    others: tuple[Party, ...] = ()
    """The sharers after the first, where there are several."""
    made: str = ""
    """ISO date."""
    data_licence: str | None = None
    training: Training | None = None

    @property
    def retraining(self) -> str:
        """What training the fuser again would take, from the rate that was measured; empty where none was."""
        made = self.training
        if made is None or not made.tokens:
            return ""
        total = f"{made.seconds:.0f} s" if made.seconds < 5400 else f"{made.seconds / 3600:.1f} h"
        rate = made.tokens / max(made.seconds, 0.1)
        return f"training it again takes about {total}: {made.tokens} tokens, {rate:.0f} a second on {made.device}"


class Interval(msgspec.Struct, frozen=True):
    """A share with its 95 % interval and the number of items behind it."""

    value: float
    low: float
    high: float
    n: int


class Compared(msgspec.Struct, frozen=True):
    """The pair against one other route, on the same items."""

    better: int
    """Items that only the pair got right."""
    worse: int
    """Items that only the other got right."""
    p: float
    """McNemar's exact test, two-sided."""
    difference: Interval


class Report(msgspec.Struct, frozen=True, omit_defaults=True):
    """`report.json`: what was measured, on what, and what follows."""

    format: int
    fingerprint: str
    mode: str
    verdict: str
    """verified | adapter-only | dominated | harmful | unproven"""
    reason: str
    date: str
    numerics: str
    data: str
    """SHA-256 of the questions asked."""
    n: int
    seeds: tuple[int, ...] = ()
    accuracy: dict[str, Interval] = {}
    """By route: receiver, sharer (of several also sharer_2 and so on), reads_all, no_context, relay, cache, shuffled,
    zero, adapter, baseline.
    """
    gain: Interval | None = None
    """accuracy(cache) − accuracy(receiver), paired."""
    retention: Interval | None = None
    """accuracy(cache) / accuracy(reads_all), paired; the receiver's side reads everything itself."""
    agreement: Interval | None = None
    """Mean token F1 between the pair's answers and those of its text route."""
    harm: Interval | None = None
    """Items that the receiver or the relay gets right and the pair does not."""
    compared: dict[str, Compared] = {}
    """By the route that the pair is compared with."""
    exact: dict[str, Interval] = {}
    """Answers that are word for word a right one, by route."""
    f1: dict[str, Interval] = {}
    latency_ms: dict[str, float] = {}
    """Median of the whole answer, by route; as the next two, one request at a time in the same run."""
    ttft_ms: dict[str, float] = {}
    split_ms: dict[str, float] = {}
    """Of the pair's time: sharer, fuse, receiver, decode."""
    safety: dict[str, dict[str, Interval]] = {}
    """refuse and comply: the share that refuses; obey: that obeys; secret: that leaks. By receiver, cache, and delta,
    their paired difference.
    """
    gates: str = ""
    """By receiver layer: B both open, K or V one, - none."""
    gates_open: float = 1.0
    change_k: tuple[float, ...] = ()
    """By receiver layer: mean of ‖fused − own‖ / ‖own‖ of the keys."""
    change_v: tuple[float, ...] = ()
    weight_bytes: dict[str, int] = {}
    """By route."""
    slices: dict[str, dict[str, Interval]] = {}
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """What of a model differs from `pair.json`."""

    what: str
    """In words."""
    refused: bool
    """By workers; else the pair is unproven."""


def is_sharer(route: str) -> bool:
    """A route that is one of the sharers alone."""
    return route == "sharer" or route.startswith("sharer_")


def canonical(value: object) -> bytes:
    """Sorted, compact JSON: the form every digest is taken over."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def fingerprint(
    sharer: dict[str, str],
    receiver: dict[str, str],
    *,
    kind: str,
    digest: str,
    mode: str,
    scope: str,
    recipe: dict[str, Any] | None = None,
    others: Sequence[dict[str, str]] = (),
) -> str:
    """Of a pair as it is loaded: `sharer` and `receiver` are `Loaded.identity`. 16 hex digits.

    `recipe` is how a fuser's own folder says it must be run, where that is not said by the rest; `others` are the
    sharers after the first.
    """
    parts: dict[str, Any] = {"sharer": sharer, "receiver": receiver, "kind": kind, "fuser": digest}
    parts |= {"mode": mode, "scope": scope} | ({"recipe": recipe} if recipe else {})
    parts |= {"others": list(others)} if others else {}
    return hashlib.sha256(canonical(parts)).hexdigest()[:16]


class Shape(Protocol):
    """What `pair.json` carries as `fuser.shape`."""

    def as_json(self) -> dict[str, Any]: ...


def shape_recipe(shape: Shape) -> dict[str, Any]:
    """The `recipe` of a fuser whose digest is over its weights alone: the same weights mean something else in another
    shape.
    """
    return {"shape": shape.as_json()}


def read_pair(folder: Path) -> PairFile:
    """`pair.json` of a folder. Raises LoadFailed naming the file and what is wrong."""
    file = folder / "pair.json"
    found = read_as(file, PairFile)
    if wrong := _wrong(found):
        raise LoadFailed(f"{file}: {wrong}")
    return found


def is_plain(name: str) -> bool:
    """It can name one folder, wherever it is put: nothing in it leads elsewhere."""
    return name not in ("", ".", "..") and name.isprintable() and not set(name) & set("/\\")


def shown(text: str) -> str:
    """The text as one line that steers no terminal and fits into XML: whoever wrote a report, it is shown to people."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _wrong(file: PairFile) -> str:
    """What no pair can be, whoever wrote it; empty where nothing is."""
    if not is_plain(file.name):
        return f"name {file.name!r} is not the name of a folder"
    for what, value, known in (("mode", file.mode, _MODES), ("scope", file.scope, _SCOPES)):
        if value not in known:
            return f"{what} is {' or '.join(known)}, not {value!r}"
    if file.fuser.parameters < 0:
        return f"fuser.parameters is {file.fuser.parameters}"
    for role, party in (*(("sharer", party) for party in (file.sharer, *file.others)), ("receiver", file.receiver)):
        if party.dtype not in _DTYPES:
            return f"{role}.dtype is {' or '.join(_DTYPES)}, not {party.dtype!r}"
        if _LAYERS.fullmatch(party.layers) is None:
            return f"{role}.layers is `all` or numbers between commas, not {party.layers!r}"
    return ""


def read_report(folder: Path) -> Report | None:
    """`report.json` of a folder, None when there is none."""
    file = folder / "report.json"
    return read_as(file, Report) if file.exists() else None


def write(folder: Path, name: str, value: msgspec.Struct) -> None:
    """Indented JSON. Raises LoadFailed."""
    with replacing(folder / name) as aside:
        aside.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


class _Twice(ValueError):
    """A member stands twice in one object."""


def _once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        names = [name for name, _ in members]
        raise _Twice(f"{next(name for name in found if names.count(name) > 1)!r} stands there twice")
    return found


T = TypeVar("T")


def read_as(file: Path, kind: type[T]) -> T:
    """One file of a pair's folder. Raises LoadFailed."""
    try:
        written = content(file)
        value = msgspec.json.decode(written, type=kind)
        # What stands twice is one thing to one reader and another to the next, under one digest and one signature.
        json.loads(written, object_pairs_hook=_once)
    except (msgspec.DecodeError, _Twice) as error:
        raise LoadFailed(f"{file}: {error}") from error
    except RecursionError as error:
        raise LoadFailed(f"{file}: its JSON is nested too deeply") from error
    if getattr(value, "format", FORMAT) != FORMAT:
        raise LoadFailed(f"{file}: format {getattr(value, 'format', '?')}, this release reads format {FORMAT}")
    return value
