"""Backups: whether each group that a regulated tenant may use still answers when one of its deployments does not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from router import source
from router.deployments import Deployment
from router.fallbacks import others
from router.settings import Settings
from router.source import Path_, Source
from router.tenant_config import TenantConfig
from router.tenants import read_tenant, tenant_files, written_tenant


def unbacked(settings: Settings, file: Path) -> list[str]:
    """One sentence with file, line and key for each group that leaves a regulated tenant without a backup.

    `file` is the configuration that `settings` was read from. Raises ConfigError for a tenant that cannot be read.
    """
    found: list[str] = []
    for tenant, written, at in _regulated(settings, file):
        key = "models" if tenant.models is not None else "regulated"
        found += [str(written.error((*at, key), problem)) for problem in _problems(settings, tenant)]
    return found


def _regulated(settings: Settings, file: Path) -> Iterator[tuple[TenantConfig, Source, Path_]]:
    """Each with the source that it is written in, which is read again for these alone."""
    if isinstance(settings.tenants, Path):
        for place in tenant_files(settings.tenants):
            variables = settings.environment_variables
            tenant = read_tenant(place, variables)
            if tenant.regulated:
                yield tenant, written_tenant(place, variables), ()
    elif any(tenant.regulated for tenant in settings.tenants or ()):
        written = source.read(file.read_text(encoding="utf-8"), str(file))
        for index, tenant in enumerate(settings.tenants or ()):
            if tenant.regulated:
                yield tenant, written, ("tenants", index)


def _problems(settings: Settings, tenant: TenantConfig) -> Iterator[str]:
    for group in settings.groups:
        if not tenant.policy.terms.allows_model(group):
            continue
        own = _usable(settings, tenant, group)
        spare = any(_usable(settings, tenant, name) for name in _spares(settings, tenant, group))
        if len(own) > 1 or (own and spare):
            continue
        has = "one text deployment" if own else "no text deployment"
        yield (
            f"regulated tenant {tenant.name!r} needs a backup for group {group!r}, which has {has} that it may use"
            f"{'' if spare else ' and no fallback group'}: add a deployment, or a group in router_settings.fallbacks"
        )


def _spares(settings: Settings, tenant: TenantConfig, group: str) -> list[str]:
    """Fallback groups of a group that the tenant may use."""
    named = {settings.group(name) for name in others(settings.routing, group)}
    return [name for name in named - {None, group} if name and tenant.policy.terms.allows_model(name)]


def _usable(settings: Settings, tenant: TenantConfig, group: str) -> list[Deployment]:
    """Text-lane deployments of a group that stand where the tenant's policy allows."""
    regions = tenant.policy.terms.regions
    return [
        d
        for d in settings.groups[group]
        if d.transport == "text" and (regions is None or d.model_info.region in regions)
    ]
