"""The store's tiers. RamTier: segments by use, within a byte budget. DiskTier and ObjectTier: where their files lie.

They know segments and tags, and none knows tokens, spaces or the index.
"""

from __future__ import annotations

import io
import shutil
import struct
import time
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol

import structlog

from workers import segments
from workers.keys import Scope
from workers.remote import Remote
from workers.segments import Head, Segment

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks start..stop-1 of one segment; `size` is the bytes of the whole segment."""

    obj: str
    start: int
    stop: int
    size: int
    tier: str = "ram"
    """Which tier named it."""


class RamTier:
    """Safe for several threads. The least recently used segment goes first, tails before what they hang on."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._segments: OrderedDict[tuple[str, str], Segment] = OrderedDict()
        self._blocks: dict[tuple[str, bytes], tuple[str, int]] = {}
        self._by_tag: defaultdict[str, int] = defaultdict(int)
        self._bytes = 0
        self._lock = Lock()

    def put(self, segment: Segment) -> int:
        """Keep it, unless it alone is over a budget. Returns how many others had to go."""
        head = segment.head
        limit = min(head.limit, self._max)
        if segment.size > limit:
            return 0
        with self._lock:
            self._drop(head.tag, head.obj)
            evicted = 0
            while self._by_tag[head.tag] + segment.size > limit:
                oldest = next(key for key in self._segments if key[0] == head.tag)
                evicted += self._drop(*oldest)
            while self._bytes + segment.size > self._max:
                evicted += self._drop(*next(iter(self._segments)))
            self._segments[head.tag, head.obj] = segment
            for position, block in enumerate(head.ids):
                self._blocks.setdefault((head.tag, block), (head.obj, position))
            self._by_tag[head.tag] += segment.size
            self._bytes += segment.size
        return evicted

    def find(self, tag: str, ids: Sequence[bytes]) -> list[Piece]:
        """Pieces that cover the longest prefix of the chain, in order; marks them as used."""
        pieces: list[Piece] = []
        at, now = 0, time.time()
        with self._lock:
            while at < len(ids) and (held := self._blocks.get((tag, ids[at]))) is not None:
                obj, start = held
                segment = self._segments[tag, obj]
                if segment.head.expires <= now:
                    self._drop(tag, obj)
                    continue
                stop = start + 1
                while stop < len(segment.head.ids) and at + stop - start < len(ids):
                    if segment.head.ids[stop] != ids[at + stop - start]:
                        break
                    stop += 1
                pieces.append(Piece(obj, start, stop, segment.size))
                at += stop - start
            for piece in reversed(pieces):
                self._segments.move_to_end((tag, piece.obj))
        return pieces

    def get(self, tag: str, obj: str) -> Segment | None:
        with self._lock:
            return self._segments.get((tag, obj))

    def not_durable(self, head: Head, shelf: str) -> None:
        """A shelf turned out not to hold what stands before this segment: mark the chain, as far as it is here."""
        with self._lock:
            block = head.parent
            while (held := self._blocks.get((head.tag, block))) is not None:
                segment = self._segments[head.tag, held[0]]
                segment.durable.discard(shelf)
                block = segment.head.parent

    def drop(self, tag: str, obj: str) -> None:
        with self._lock:
            self._drop(tag, obj)

    def drop_tag(self, tag: str) -> list[Segment]:
        """Forget all of a tag; returns what was held."""
        with self._lock:
            held = [segment for key, segment in self._segments.items() if key[0] == tag]
            for segment in held:
                self._drop(tag, segment.head.obj)
            return held

    def expire(self) -> int:
        """Forget what is past its life; returns how many."""
        now = time.time()
        with self._lock:
            late = [key for key, segment in self._segments.items() if segment.head.expires <= now]
            return sum(self._drop(*key) for key in late)

    @property
    def bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._segments)

    def _drop(self, tag: str, obj: str) -> int:
        segment = self._segments.pop((tag, obj), None)
        if segment is None:
            return 0
        for block in segment.head.ids:
            if self._blocks.get((tag, block), ("", 0))[0] == obj:
                del self._blocks[tag, block]
        self._by_tag[tag] -= segment.size
        if not self._by_tag[tag]:
            del self._by_tag[tag]
        self._bytes -= segment.size
        return 1


class Tier(Protocol):
    """Where segment files lie. All raise OSError where the place refuses or cannot be reached."""

    def write(self, segment: Segment, scope: Scope) -> int:
        """Returns the file's bytes. Raises OSError, and leaves nothing then that a reader would take for whole."""

    def read(self, scope: Scope, obj: str) -> Segment:
        """Raises FileNotFoundError or Damaged."""

    def heads(self, scope: Scope, objects: Sequence[str]) -> Iterator[tuple[str, Head | None, int]]:
        """(object, verified head or None where the file is damaged, file's bytes); those that vanish are left out."""

    def delete(self, tag: str, obj: str) -> None: ...

    def tags(self) -> list[str]: ...

    def objects(self, tag: str) -> list[str]: ...

    def delete_tag(self, tag: str) -> tuple[set[str], int]:
        """Remove all of a tag; returns the objects and bytes there were."""

    def delete_stale(self) -> int:
        """Remove unfinished files of writers that died; returns how many."""


class DiskTier:
    """`FOLDER/segments/TAG/xx/OBJECT.safetensors`; files whose names begin with a dot are being written."""

    STALE = 600.0
    """Seconds after which an unfinished file belongs to a writer that died."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "segments"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, segment: Segment, scope: Scope) -> int:
        return segments.write(self._path(segment.head.tag, segment.head.obj), segment, scope)

    def read(self, scope: Scope, obj: str) -> Segment:
        return segments.read(self._path(scope.tag, obj), scope, obj)

    def heads(self, scope: Scope, objects: Sequence[str]) -> Iterator[tuple[str, Head | None, int]]:
        for obj in objects:
            path = self._path(scope.tag, obj)
            try:
                size = path.stat().st_size
                yield obj, segments.read_head(path, scope), size
            except FileNotFoundError:
                continue
            except segments.Damaged:
                yield obj, None, 0

    def delete(self, tag: str, obj: str) -> None:
        self._path(tag, obj).unlink(missing_ok=True)

    def tags(self) -> list[str]:
        return [p.name for p in self._folder.glob("*") if p.is_dir()]

    def objects(self, tag: str) -> list[str]:
        return [p.name.removesuffix(segments.SUFFIX) for p in self._files(tag)]

    def delete_tag(self, tag: str) -> tuple[set[str], int]:
        objects: set[str] = set()
        size = 0
        for path in self._files(tag):
            try:
                size += path.stat().st_size
            except FileNotFoundError:
                continue
            objects.add(path.name.removesuffix(segments.SUFFIX))
        try:
            shutil.rmtree(self._folder / tag)
        except FileNotFoundError:
            pass  # never written, or another process was here first
        except OSError as error:
            _log.warning("kv_delete_failed", tag=tag, error=error.strerror)
        return objects, size

    def delete_stale(self) -> int:
        count, before = 0, time.time() - self.STALE
        for path in self._folder.glob(f"*/*/.*{segments.SUFFIX}.*"):
            try:
                if path.stat().st_mtime < before:
                    path.unlink()
                    count += 1
            except FileNotFoundError:
                continue
        return count

    def _path(self, tag: str, obj: str) -> Path:
        return self._folder / tag / obj[:2] / f"{obj}{segments.SUFFIX}"

    def _files(self, tag: str) -> list[Path]:
        return [p for p in (self._folder / tag).glob(f"*/*{segments.SUFFIX}") if not p.name.startswith(".")]


class ObjectTier:
    """The same layout in an object store, or any other filesystem that fsspec opens. A file is put there as a whole."""

    FOLDER = "segments"

    def __init__(self, remote: Remote) -> None:
        self._remote = remote

    def write(self, segment: Segment, scope: Scope) -> int:
        data = segments.pack(segment, scope)
        self._remote.write(self._name(segment.head.tag, segment.head.obj), data)
        return len(data)

    def read(self, scope: Scope, obj: str) -> Segment:
        return segments.read_from(io.BytesIO(self._remote.read(self._name(scope.tag, obj))), scope, obj)

    def heads(self, scope: Scope, objects: Sequence[str]) -> Iterator[tuple[str, Head | None, int]]:
        for obj in objects:
            name = self._name(scope.tag, obj)
            try:
                size = self._remote.size(name)
                yield obj, segments.read_head_from(io.BytesIO(self._header(name, size)), scope, obj, size), size
            except FileNotFoundError:
                continue
            except segments.Damaged:
                yield obj, None, 0

    def delete(self, tag: str, obj: str) -> None:
        self._remote.delete(self._name(tag, obj))

    def tags(self) -> list[str]:
        return self._remote.folders(self.FOLDER)

    def objects(self, tag: str) -> list[str]:
        return [self._object(name) for name in self._remote.files(f"{self.FOLDER}/{tag}")]

    def delete_tag(self, tag: str) -> tuple[set[str], int]:
        found = self._remote.files(f"{self.FOLDER}/{tag}")
        for name in found:
            self._remote.delete(name)
        return {self._object(name) for name in found}, sum(size for size, _ in found.values())

    def delete_stale(self) -> int:
        """Nothing to do: there are no unfinished files."""
        return 0

    def _header(self, name: str, size: int) -> bytes:
        length = self._remote.read(name, 0, 8)
        if len(length) < 8:
            raise segments.Damaged("the header cannot be read: too short")
        return self._remote.read(name, 0, min(size, 8 + struct.unpack("<Q", length)[0]))

    def _name(self, tag: str, obj: str) -> str:
        return f"{self.FOLDER}/{tag}/{obj[:2]}/{obj}{segments.SUFFIX}"

    @staticmethod
    def _object(name: str) -> str:
        return name.rsplit("/", 1)[-1].removesuffix(segments.SUFFIX)
