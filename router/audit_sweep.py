"""The end of retention, looked for every hour by a running router."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from router.audit_custody import Custody, Retained
from router.audit_keys import AuditError
from router.audit_verify import tenants as chains
from router.tenants import TenantSource

log = structlog.get_logger(__name__)

EVERY = 3600.0


async def sweep_for_ever(root: Path, tenants: TenantSource, every: float = EVERY) -> None:
    """Sweep at once and then every so many seconds, until cancelled."""
    while True:
        await asyncio.to_thread(sweep, root, tenants)
        await asyncio.sleep(every)


def sweep(root: Path, tenants: TenantSource) -> dict[str, Retained]:
    """Destroy what has outlived its tenant's retention. What fails for one tenant is logged, and tried again later."""
    done: dict[str, Retained] = {}
    known = set(chains(root))
    for name in tenants.names:
        tenant = tenants.get(name)
        if tenant is None or tenant.audit.retention is None or name not in known:
            continue
        try:
            done[name] = Custody(root, name).retain(tenant.audit.retention)
        except (AuditError, OSError) as error:
            log.error("audit_retention_failed", tenant=name, error=str(error))
    return done
