"""Advice: what a configuration may say, but should not. For `twolane check`, and in part for the start."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from router import source
from router.settings import Settings
from router.source import Path_, Source, dotted
from router.tenants import tenant_files

_SECRET = re.compile(r"(^|_)(api_key|key|keys|master_key|password|secret|secret_access_key|token)$")
_SHELL = re.compile(r"\$\{\w+\}")

Note = tuple[str, str]
"""(key, sentence)."""


def advise(settings: Settings, file: Path) -> list[Note]:
    """Secrets written out, `${VAR}` that nobody replaces, and fallbacks that lead nowhere; tenant files included."""
    found = list(_written(source.read(file.read_text(encoding="utf-8"), str(file))))
    if isinstance(settings.tenants, Path):
        for tenant in tenant_files(settings.tenants):
            found += _written(source.read(tenant.read_text(encoding="utf-8"), tenant.name), f"{tenant.name}: ")
    return found + list(nowhere(settings))


def _written(file: Source, before: str = "") -> Iterator[Note]:
    for path, text in source.strings(file.data):
        key = dotted(path)
        if text.startswith(("os.environ/", "sha256:")):
            continue
        if _SHELL.search(text):
            yield (
                key,
                f"{before}line {file.line(path)}: {key} holds ${{...}}, which is not replaced; use os.environ/NAME",
            )
        elif _SECRET.search(_name(path)):
            yield key, f"{before}line {file.line(path)}: {key} is written out; use os.environ/NAME{_or_digest(path)}"


def _name(path: Path_) -> str:
    return next((step for step in reversed(path) if isinstance(step, str)), "")


def _or_digest(path: Path_) -> str:
    return " or sha256:HEX" if _name(path) in ("key", "keys") else ""


def nowhere(settings: Settings) -> Iterator[Note]:
    """Names in `router_settings` and its like that no model group has."""
    routing = settings.routing
    named: list[tuple[str, str]] = [("default_fallbacks", g) for g in routing.default_fallbacks]
    for name in ("fallbacks", "context_window_fallbacks", "content_policy_fallbacks"):
        for group, others in getattr(routing, name).items():
            named += [(name, g) for g in (*others, *(() if group == "*" else (group,)))]
    named += [("model_group_alias", target) for target in routing.aliases.values()]
    named += [("model_group_retry_policy", group) for group in routing.group_retry_policy]
    for key, group in named:
        if settings.group(group) is None:
            yield key, f"{key} names {group!r}, which is not a model group of model_list"
