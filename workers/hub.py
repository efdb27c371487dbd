"""The model hub: pair folders are fetched from it and put there, through `huggingface_hub`, which holds the token.

`HF_ENDPOINT`, `HF_HUB_CACHE` and `HF_TOKEN` count as they stand when something is asked, not as they stood at import.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from workers.errors import LoadFailed

_ADDRESS = re.compile(r"(https?://)(?:[^/@\s]*@)?([^\s?#'\"]*)[?#]?[^\s'\"]*")
"""An address's login and query: the latter signs uploads and downloads from a hub's storage."""


def is_name(fuser: str) -> bool:
    """Whether a fuser that is no folder of this machine can be the hub's: `owner/repo`, `owner/repo/sub/folder`."""
    return not fuser.startswith((".", "/", "~")) and fuser.count("/") >= 1


def fetch(name: str) -> Path:
    """What `owner/repo` or `owner/repo/sub/folder` holds, fetched or found in the cache. Raises LoadFailed."""
    with _told(f"fuser {name!r}: cannot be fetched from the hub"):
        folder = _snapshot(name)
    if not folder.is_dir():
        repo, prefix = _parts(name)
        raise LoadFailed(f"fuser {name!r}: the hub's {repo} holds no folder {prefix}")
    return folder


def cached(name: str) -> Path | None:
    """What has been fetched before of the hub's newest commit that this machine knows; asks no hub."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = _snapshot(name, here=True)
    except (HFValidationError, LocalEntryNotFoundError):
        return None
    return folder if folder.is_dir() else None


def _snapshot(name: str, *, here: bool = False) -> Path:
    """`here`: only what has been fetched before."""
    from huggingface_hub import snapshot_download

    repo, prefix = _parts(name)
    root = snapshot_download(
        repo,
        allow_patterns=[f"{prefix}/*" if prefix else "*"],
        endpoint=os.environ.get("HF_ENDPOINT"),
        cache_dir=os.environ.get("HF_HUB_CACHE"),
        local_files_only=here,
    )
    return Path(root) / prefix


def _parts(name: str) -> tuple[str, str]:
    """The repository, and the folder in it; empty where all of it is meant."""
    owner, repo, *inside = name.split("/")
    return f"{owner}/{repo}", "/".join(inside)


def push(place: Path, repo: str, *, private: bool | None = None) -> str:
    """Put `NAME/VERSION`, as `publishing.export` writes it, into a repository as `VERSION`, with the card beside it.
    The repository is made where there is none; versions that it holds stay. Returns the commit's URL. Raises
    LoadFailed.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), library_name="twolane")
    with _told(f"{place}: was not pushed to {repo}"):
        api.create_repo(repo, private=private, exist_ok=True)
        done: Any = api.upload_folder(
            repo_id=repo,
            folder_path=place.parent,
            allow_patterns=["README.md", f"{place.name}/*"],
            commit_message=f"{place.parent.name} {place.name}",
        )
    return str(done.commit_url)


def failures() -> tuple[type[Exception], ...]:
    """What the hub's client raises: its own errors are OSErrors, or ValueErrors where a name cannot be one; what its
    HTTP client and its transfer library raise comes through.
    """
    # That client is httpx in some releases, httpx2 in others.
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    return HTTPError, OSError, RuntimeError, ValueError


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Errors in our words."""
    try:
        yield
    except failures() as error:
        raise LoadFailed(f"{what} ({brief(error)})") from error


def brief(error: Exception) -> str:
    """Kind and first line: the rest is advice for users of the client. Of addresses nothing that lets anybody in."""
    line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return _ADDRESS.sub(r"\1\2", line)[:200]
