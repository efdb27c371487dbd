"""A model hub on this machine: the endpoints that uploading a folder and fetching files use, over HTTP.

Holds no more of the real hub than is asked of it: repositories, commits, refs, files that came with the commit itself,
and one token that may write.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_0123456789abcdefghij"


@dataclass
class Repo:
    """Files by commit, commits by ref."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Add files to what a ref holds."""
        whole = self.files(ref) | files
        digest = hashlib.sha1(repr(sorted(whole.items())).encode(), usedforsecurity=False).hexdigest()
        self.commits[digest] = whole
        self.refs[ref] = digest
        return digest

    def files(self, revision: str) -> dict[str, bytes]:
        """Of a ref or a commit; none where there is no such."""
        return self.commits.get(self.refs.get(revision, revision), {})


@dataclass
class Hub:
    """`requests` are method and path of all that was asked, in order."""

    endpoint: str
    repos: dict[str, Repo] = field(default_factory=dict)
    """By kind and name: `models/owner/repo`."""
    requests: list[str] = field(default_factory=list)

    def environment(self, home: str, token: str = TOKEN) -> dict[str, str]:
        """What makes a process use this hub."""
        return {"HF_ENDPOINT": self.endpoint, "HF_HOME": home, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    """An empty hub."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    @property
    def hub(self) -> Hub:
        found: Hub = self.server.hub  # type: ignore[attr-defined]
        return found

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.hub.requests.append(f"{self.command} {path}")
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[:2] == ["api", "repos"]:
            return self._create(json.loads(body))
        if parts == ["api", "validate-yaml"]:
            return self._json({"errors": [], "warnings": []})
        if parts[0] == "api":
            kind, name, verb = parts[1], "/".join(parts[2:4]), parts[4:]
        else:
            kind = parts.pop(0) if parts[0] == "datasets" else "models"
            name, verb = "/".join(parts[:2]), parts[2:]
        repo = self.hub.repos.get(f"{kind}/{name}")
        if repo is None or (repo.private and not self._known()):
            return self._refuse(404 if self._known() else 401, "RepoNotFound", "Repository Not Found")
        match verb:
            case ["preupload", _]:
                return self._preupload(json.loads(body))
            case ["commit", ref]:
                return self._commit(repo, name, ref, body)
            case ["resolve", revision, *file]:
                return self._file(repo, revision, "/".join(file))
            case ["revision", revision]:
                return self._info(repo, name, revision)
            case []:
                return self._info(repo, name, "main")
            case ["tree", revision, *folder]:
                return self._tree(repo, revision, "/".join(folder))
            case ["paths-info", revision]:
                return self._paths(repo, revision, body)
        return self._refuse(404, "EntryNotFound", f"nothing at {path}")

    def _known(self) -> bool:
        return self.headers.get("authorization") == f"Bearer {TOKEN}"

    def _create(self, asked: dict[str, Any]) -> None:
        if not self._known():
            return self._refuse(401, "", "Invalid username or password.")
        name = f"{asked['organization']}/{asked['name']}"
        key, url = f"{asked.get('type', 'model')}s/{name}", {"url": f"{self.hub.endpoint}/{name}"}
        if key in self.hub.repos:
            return self._json(url | {"error": "You already created this repo"}, 409)
        self.hub.repos[key] = Repo(private=bool(asked.get("private")) or asked.get("visibility") == "private")
        self.hub.repos[key].commit({})
        return self._json(url)

    def _preupload(self, asked: dict[str, Any]) -> None:
        modes = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked["files"]]
        self._json({"files": modes})

    def _commit(self, repo: Repo, name: str, ref: str, body: bytes) -> None:
        if not self._known():
            return self._refuse(403, "", "You don't have the rights to write here")
        lines = [json.loads(line) for line in body.splitlines()]
        files = {
            one["value"]["path"]: base64.b64decode(one["value"]["content"]) for one in lines if one["key"] == "file"
        }
        digest = repo.commit(files, ref)
        url = f"{self.hub.endpoint}/{name}/commit/{digest}"
        return self._json({"success": True, "commitOid": digest, "commitUrl": url, "hookOutput": ""})

    def _info(self, repo: Repo, name: str, revision: str) -> None:
        sha = repo.refs.get(revision, revision)
        if sha not in repo.commits:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        siblings = [{"rfilename": path} for path in repo.commits[sha]]
        return self._json({"id": name, "sha": sha, "siblings": siblings, "tags": [], "private": repo.private})

    def _file(self, repo: Repo, revision: str, path: str) -> None:
        sha = repo.refs.get(revision, revision)
        if sha not in repo.commits:
            return self._refuse(404, "RevisionNotFound", "Invalid rev id")
        found = repo.commits[sha].get(path)
        if found is None:
            return self._refuse(404, "EntryNotFound", f"{path} does not exist")
        etag = hashlib.sha1(found, usedforsecurity=False).hexdigest()
        first, last, status = 0, len(found) - 1, 200
        if asked := self.headers.get("range"):
            low, _, high = asked.removeprefix("bytes=").partition("-")
            first, last, status = int(low), min(int(high or last), last), 206
        headers = {"x-repo-commit": sha, "etag": f'"{etag}"', "accept-ranges": "bytes"}
        if status == 206:
            headers["content-range"] = f"bytes {first}-{last}/{len(found)}"
        return self._send(status, found[first : last + 1], "application/octet-stream", headers)

    def _tree(self, repo: Repo, revision: str, folder: str) -> None:
        prefix = f"{folder}/" if folder else ""
        files = repo.files(revision)
        inside = [path for path in files if path.startswith(prefix)]
        if "recursive=true" not in self.path.lower():
            inside = [path for path in inside if "/" not in path.removeprefix(prefix)]
        self._json([_entry(path, files[path]) for path in inside])

    def _paths(self, repo: Repo, revision: str, body: bytes) -> None:
        files = repo.files(revision)
        asked = json.loads(body)["paths"]
        self._json([_entry(path, files[path]) for path in asked if path in files])

    def _json(self, value: object, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), "application/json", {})

    def _refuse(self, status: int, code: str, message: str) -> None:
        headers = {"x-error-code": code, "x-error-message": message} if code else {"x-error-message": message}
        self._send(status, json.dumps({"error": message}).encode(), "application/json", headers)

    def _send(self, status: int, body: bytes, kind: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"content-type": kind, "content-length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(path: str, content: bytes) -> dict[str, Any]:
    oid = hashlib.sha1(content, usedforsecurity=False).hexdigest()
    return {"type": "file", "path": path, "size": len(content), "oid": oid}
