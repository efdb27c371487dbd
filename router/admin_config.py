"""AdminConfig: what a person writes about one administrator."""

from __future__ import annotations

from typing import Literal

from router.tenant_config import KeyDigest, digest_key
from shapes import Field
from workers.config import Config

Role = Literal["operator", "auditor", "publisher"]

_RESERVED = ("master", "local", "router", "file", "signal")
"""Names that stand in records for something else than a named person."""


class AdminConfig(Config):
    """One entry of `admins`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")
    key: KeyDigest = Field(repr=False)
    role: Role


def check_names(admins: tuple[AdminConfig, ...], master_key: str | None) -> tuple[int, str, str] | None:
    """The first entry that cannot be meant: its index, the key at fault, and what is wrong; None where all can."""
    seen: dict[str, str] = {} if master_key is None else {str(digest_key(master_key)): "the master key"}
    names: set[str] = set()
    for index, admin in enumerate(admins):
        if admin.name in names:
            return index, "name", f"{admin.name!r} is used twice"
        if admin.name in _RESERVED:
            return index, "name", f"{admin.name!r} is reserved: records use it for the router's own acts"
        if admin.key in seen:
            return index, "key", f"the same key as {seen[admin.key]}"
        names.add(admin.name)
        seen[admin.key] = admin.name
    return None
