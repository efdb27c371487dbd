"""Policies by digest, in the audit log's folder: what a digest in a record stood for, years later.

A file is named by the SHA-256 of its bytes, so it proves itself; it is written before the first record that names it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from policies.policy import Policy
from router.audit_keys import POLICIES, AuditError, sync_folder


def keep(root: Path, digest: str, written: bytes) -> None:
    """Durable on return; nothing where it is kept already. Raises OSError."""
    path = _path(root, digest)
    if path.exists():
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    aside = path.with_suffix(f".{os.getpid()}")
    with aside.open("wb") as file:
        file.write(written)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    sync_folder(path.parent)


def find(root: Path, digest: str) -> Policy:
    """The policy that a record names. Raises AuditError where it is not kept, was changed, or cannot be read."""
    path = _path(root, digest)
    try:
        written = path.read_bytes()
    except OSError as error:
        raise AuditError(f"the policy {digest[:12]} is not kept ({error.strerror})") from error
    if hashlib.sha256(written).hexdigest() != digest:
        raise AuditError(f"{path}: is not the policy that its name says")
    try:
        data = json.loads(written)
        return Policy.model_validate({name: value for name, value in data.items() if name in Policy.model_fields})
    except ValueError as error:
        raise AuditError(f"{path}: this program cannot read the policy ({type(error).__name__})") from error


def _path(root: Path, digest: str) -> Path:
    if not digest.isalnum():
        raise AuditError(f"{digest!r} is no digest")
    return root / POLICIES / f"{digest}.json"
