"""Two versions of what is written about tenants: read from files, and told apart key by key. Judges nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router import settings as config
from router import source
from router.settings import Settings
from router.source import ConfigError
from router.tenant_config import TenantConfig
from router.tenants import read_tenant, tenant_files

KEYS_BOUND = "use_cases.keys"
"""Names the change of keys that were and are the tenant's, and belong to another use case than before."""


@dataclass(frozen=True, slots=True)
class Version:
    """Tenants as one version has them; `settings` where a whole configuration was read."""

    tenants: dict[str, TenantConfig] = field(default_factory=dict)
    settings: Settings | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One key that differs. Values are as they stand in the file's terms; None is a key left out."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.old)} -> {_shown(self.new)}"


def read_version(path: Path) -> Version:
    """A tenant file, a folder of them, or a configuration. Raises ConfigError."""
    if path.is_dir():
        return Version(_by_name([read_tenant(file) for file in tenant_files(path)], str(path)))
    if not _is_config(path):
        tenant = read_tenant(path)
        return Version({tenant.name: tenant})
    settings = config.load(path)
    written = settings.tenants
    if isinstance(written, Path):
        found = [read_tenant(file, settings.environment_variables) for file in tenant_files(written)]
    else:
        found = list(written or ())
    return Version(_by_name(found, str(path)), settings)


def _is_config(path: Path) -> bool:
    try:
        data = source.read(path.read_text(encoding="utf-8"), str(path)).data
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return "model_list" in data or "tenants" in data


def _by_name(found: list[TenantConfig], where: str) -> dict[str, TenantConfig]:
    tenants: dict[str, TenantConfig] = {}
    for tenant in found:
        if tenant.name in tenants:
            raise ConfigError(f"{where}: the name {tenant.name!r} is used twice")
        tenants[tenant.name] = tenant
    return tenants


def changes(old: TenantConfig, new: TenantConfig) -> list[Change]:
    """What differs, in the order of the keys. API keys are counted, never shown."""
    before, after = (dict(_flat(t.without_keys())) for t in (old, new))
    keys = [*before, *(key for key in after if key not in before)]
    missing = object()  # a key that is there and null is another thing
    found = [Change(k, before.get(k), after.get(k)) for k in keys if before.get(k, missing) != after.get(k, missing)]
    had, has = old.key_digests.keys(), new.key_digests.keys()
    gone, come = had - has, has - had
    if gone or come:
        found.append(Change("keys", f"{len(gone)} removed", f"{len(come)} added"))
    moved = [key for key in had & has if old.key_digests[key] != new.key_digests[key]]
    if moved:
        was, now = (sorted({t.key_digests[key] or "none" for key in moved}) for t in (old, new))
        found.append(Change(KEYS_BOUND, f"{len(moved)} bound to {', '.join(was)}", f"to {', '.join(now)}"))
    return found


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys; lists are values, and so are the values of a label."""
    for key, value in data.items():
        if isinstance(value, Mapping) and value and not prefix.startswith("labels."):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
