"""Remote: files in any fsspec filesystem, below one URL. Torch-free, and fsspec is imported only when one is opened.

Every failure but a missing file is an OSError whose text names the class of error, never a URL or a credential.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

_STAMPS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "created", "updated")


_BOUNDS: dict[str, dict[str, Any]] = {
    "s3": {"config_kwargs": {"connect_timeout": 2, "read_timeout": 5, "retries": {"max_attempts": 0}}},
}
"""Options by protocol that keep one call short of a minute; s3fs retries on top of botocore's own retries.

What a configuration file of fsspec says of the same option wins.
"""


def local_folder(url: str) -> Path | None:
    """The folder that a `file://` URL or a plain path means; None for every other filesystem."""
    if "://" not in url:
        return Path(url).expanduser()
    return Path(url.removeprefix("file://")) if url.startswith("file://") else None


class Remote:
    """Names are relative to the URL's path. Writes are whole: a reader sees the old file, the new one or none."""

    def __init__(self, url: str) -> None:
        from fsspec.config import conf
        from fsspec.core import url_to_fs

        protocol = url.partition("://")[0]
        options = {k: v for k, v in _BOUNDS.get(protocol, {}).items() if k not in conf.get(protocol, {})}
        self._fs: Any
        self._fs, root = self._guarded(lambda: url_to_fs(url, use_listings_cache=False, **options))
        self._root = str(root).rstrip("/")

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """Raises FileNotFoundError."""
        return self._guarded(lambda: bytes(self._fs.cat_file(self._at(name), start=start, end=stop)))

    def size(self, name: str) -> int:
        """Raises FileNotFoundError."""
        return self._guarded(lambda: int(self._fs.info(self._at(name))["size"]))

    def stamp(self, name: str) -> object:
        """Changes when the file does; None where it is missing."""
        try:
            return self._guarded(lambda: _stamp_of(self._fs.info(self._at(name))))
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        self._guarded(lambda: self._fs.pipe_file(self._at(name), data))

    def create(self, name: str, data: bytes) -> bool:
        """Write unless it is there; False when it was. Not atomic where the filesystem has no such call."""
        if self._guarded(lambda: self._fs.exists(self._at(name))):
            return False
        try:
            self._guarded(lambda: self._fs.pipe_file(self._at(name), data, mode="create"))
        except FileExistsError:
            return False
        return True

    def delete(self, name: str) -> None:
        """No error where it is missing."""
        try:
            self._guarded(lambda: self._fs.rm_file(self._at(name)))
        except FileNotFoundError:
            return

    def files(self, folder: str) -> dict[str, tuple[int, object]]:
        """All files below the folder: name -> (bytes, stamp). Empty where there is no such folder."""
        at = self._at(folder)
        try:
            found = self._guarded(lambda: self._fs.find(at, detail=True))
        except FileNotFoundError:
            return {}
        return {
            str(path)[len(self._root) + 1 :]: (int(info["size"]), _stamp_of(info))
            for path, info in found.items()
            if info["type"] == "file"
        }

    def folders(self, folder: str) -> list[str]:
        """Names of the folders directly below."""
        try:
            found = self._guarded(lambda: self._fs.ls(self._at(folder), detail=True))
        except FileNotFoundError:
            return []
        return [str(info["name"]).rstrip("/").rsplit("/", 1)[-1] for info in found if info["type"] == "directory"]

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _guarded(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:  # each filesystem has errors of its own; none may name what it was asked for
            raise OSError(f"shared tier: {type(error).__name__}") from error


def _stamp_of(info: dict[str, Any]) -> object:
    return (info.get("size"), *(str(info[key]) for key in _STAMPS if key in info))
