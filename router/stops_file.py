"""The stops file: what is stopped, as routers write it and as people may.

    cache:
      stopped: true
      reason: answers drift since noon
      by: kim

A target is `cache`, `pair:NAME` or `tenant:NAME`. `at`, `seq` and `mark` are the routers' own: `mark` is a digest of
the entry, so an entry that a person wrote or changed is known by it, and is taken as that person's act. An entry that
is taken away changes nothing: to lift a stop, say `stopped: false`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import yaml

from router.state_files import locked, replace

_HEAD = """\
# Which parts of the cache lane are stopped. Routers read this file four times a second, and write it.
# To stop:  TARGET: {stopped: true, reason: why, by: your name}     TARGET: cache, pair:NAME or tenant:NAME
# To lift:  change an entry to `stopped: false` and its reason. `at`, `seq` and `mark` are the routers': leave them.
"""
_TARGET = re.compile(r"cache|(?:pair|tenant):[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LONGEST = 500
"""Characters of a reason or a name."""


class BadStops(Exception):
    """The file cannot be meant; the message says where and why."""


class Stop(msgspec.Struct, frozen=True):
    """The last word about a target: it is stopped, or not any more. Of two the one with the higher `order` counts."""

    target: str
    stopped: bool
    reason: str
    by: str
    at: float
    """Unix seconds."""
    seq: int
    """Of a stop: microseconds, about, above all that was known of the target. Of a lifting: the stop that it lifts."""
    drill: bool = False
    """It was an exercise."""

    @property
    def order(self) -> int:
        """A lifting comes right after the stop that it names, and before any later one."""
        return 2 * self.seq + (not self.stopped)


@dataclass(frozen=True, slots=True)
class Wish:
    """What a person asks of a target."""

    target: str
    stopped: bool
    reason: str
    by: str
    drill: bool = False

    def after(self, known: Stop | None, now: float) -> Stop:
        """The wish as the last word after what is known."""
        before = 0 if known is None else known.seq
        seq = max(int(now * 1e6), before + 1) if self.stopped else before
        return Stop(self.target, self.stopped, self.reason, self.by, now, seq, self.drill)


def read_target(text: str) -> str:
    """Raises BadStops."""
    if not _TARGET.fullmatch(text):
        raise BadStops(f"{text[:80]!r}: expected cache, pair:NAME or tenant:NAME")
    return text


def read_words(value: object, what: str) -> str:
    """A reason or a name: one line, not empty. Raises BadStops."""
    if not isinstance(value, str) or not value.strip():
        raise BadStops(f"{what}: expected text")
    text = " ".join(value.split())
    if len(text) > _LONGEST or not text.isprintable():
        raise BadStops(f"{what}: expected at most {_LONGEST} printable characters")
    return text


def parse(text: str) -> tuple[dict[str, Stop], list[Wish]]:
    """What routers wrote, and what people did. Raises BadStops."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise BadStops(f"line {mark.line + 1}: cannot be read as YAML" if mark else "cannot be read as YAML") from None
    if found is None:
        return {}, []
    if not isinstance(found, dict):
        raise BadStops("expected a mapping of targets")
    stops: dict[str, Stop] = {}
    wishes: list[Wish] = []
    for target, entry in found.items():
        read = _entry(read_target(str(target)), entry)
        if isinstance(read, Stop):
            stops[read.target] = read
        else:
            wishes.append(read)
    return stops, wishes


def _entry(target: str, entry: object) -> Stop | Wish:
    if not isinstance(entry, dict):
        raise BadStops(f"{target}: expected a mapping with stopped and reason")
    unknown = set(entry) - {"stopped", "reason", "by", "drill", "at", "seq", "mark"}
    if unknown:
        raise BadStops(f"{target}: unknown key {sorted(map(str, unknown))[0]!r}")
    for key in ("stopped", "drill"):
        if not isinstance(entry.get(key, False), bool):
            raise BadStops(f"{target}.{key}: expected true or false")
    if "stopped" not in entry:
        raise BadStops(f"{target}: expected stopped: true or false")
    reason = read_words(entry.get("reason"), f"{target}.reason")
    by = read_words(entry.get("by", "file"), f"{target}.by")
    wish = Wish(target, entry["stopped"], reason, by, entry.get("drill", False))
    at, seq = entry.get("at"), entry.get("seq")
    if isinstance(at, datetime) and isinstance(seq, int) and 0 <= seq < 2**52:
        moment = at if at.tzinfo else at.replace(tzinfo=UTC)
        stop = Stop(target, wish.stopped, reason, by, moment.timestamp(), seq, wish.drill)
        if entry.get("mark") == _mark(stop):
            return stop
    return wish


def written(stops: Iterable[Stop]) -> str:
    """The file's text."""
    entries = {
        stop.target: {
            "stopped": stop.stopped,
            "reason": stop.reason,
            "by": stop.by,
            **({"drill": True} if stop.drill else {}),
            "at": datetime.fromtimestamp(stop.at, UTC),
            "seq": stop.seq,
            "mark": _mark(stop),
        }
        for stop in sorted(stops, key=lambda s: s.target)
    }
    text: str = yaml.safe_dump(entries, sort_keys=False, allow_unicode=True, width=110) if entries else ""
    return _HEAD + text


def _mark(stop: Stop) -> str:
    parts: list[Any] = [stop.target, stop.stopped, stop.reason, stop.by, stop.drill, stop.seq]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:12]


def newest(*many: Mapping[str, Stop]) -> dict[str, Stop]:
    """The last word about each target."""
    merged: dict[str, Stop] = {}
    for stops in many:
        for target, stop in stops.items():
            if target not in merged or stop.order > merged[target].order:
                merged[target] = stop
    return merged


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the file and a router had to tell each other."""

    stops: dict[str, Stop]
    adopted: tuple[Stop, ...] = ()
    """Acts of people that stood in the file, put in order here."""
    unsaved: str = ""
    """Why the file does not hold all of it; empty where it does."""


def exchange(path: Path, known: Mapping[str, Stop], now: float, done: frozenset[Wish] = frozenset()) -> Exchange:
    """Take in what the file says, and have it say what is known. Blocks on the disk. Raises BadStops.

    Where the file cannot be written it is read all the same; `done` are wishes that it still holds and that were met.
    """
    try:
        with locked(path):
            old, found = _read(path, known, now, done)
            if old is None or found.stops != old or found.adopted:
                replace(path, written(found.stops.values()))
    except OSError as error:
        old, found = _read(path, known, now, done)
        if old != found.stops or found.adopted:
            return Exchange(found.stops, found.adopted, f"{path}: {error.strerror or error}")
    return found


def leave(path: Path, wish: Wish) -> None:
    """Write a wish into the file as a person would; routers that read it take it up. Raises BadStops and OSError."""
    with locked(path):
        try:
            stops, wishes = parse(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            stops, wishes = {}, []
        except UnicodeDecodeError:
            raise BadStops("is not UTF-8 text") from None
        left = {**{w.target: w for w in wishes}, wish.target: wish}
        entries = {
            w.target: {"stopped": w.stopped, "reason": w.reason, "by": w.by, **({"drill": True} if w.drill else {})}
            for w in left.values()
        }
        kept = written(stop for target, stop in stops.items() if target not in left)
        replace(path, kept + yaml.safe_dump(entries, sort_keys=False, allow_unicode=True, width=110))


def _read(
    path: Path, known: Mapping[str, Stop], now: float, done: frozenset[Wish]
) -> tuple[dict[str, Stop] | None, Exchange]:
    """What the routers' entries were, None where there is no file; and all that holds with what people did."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None if known else {}, Exchange(newest(known))
    except (UnicodeDecodeError, OSError) as error:
        raise BadStops(f"cannot be read ({type(error).__name__})") from None
    old, wishes = parse(text)
    before = newest(old, known)
    adopted = {
        wish.target: wish.after(before.get(wish.target), now)
        for wish in wishes
        if wish not in done and (wish.stopped or (wish.target in before and before[wish.target].stopped))
    }
    return old, Exchange(newest(before, adopted), tuple(adopted.values()))
