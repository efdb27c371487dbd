"""What a running router does for its audit log: opens it with its anchor and metrics, and ends retention every hour."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from router.audit import Audit
from router.audit_keys import AuditError
from router.settings import AuditConfig
from router.telemetry import Metrics
from router.tenants import TenantSource

if TYPE_CHECKING:
    from router.audit_anchor import Anchor
    from router.audit_custody import Retained

log = structlog.get_logger(__name__)

EVERY = 3600.0


def open_audit(written: AuditConfig, metrics: Metrics) -> Audit:
    """The audit log with its anchor and its metrics, not begun."""
    audit = Audit(written.dir, anchor=_anchor(written))
    lost = "Records of tenants that are not regulated, which could not be written."
    metrics.watch("audit_lost_records_total", lost, lambda: [({}, audit.lost)], "counter")
    if (anchor := audit.anchor) is not None:
        up = "The last attempt to anchor the audit log's heads there succeeded."
        metrics.watch("audit_anchor_up", up, lambda: [({"to": n}, int(u)) for n, u in anchor.up.items()])
        lag = "Seconds that the oldest audit record has waited to be anchored everywhere."
        metrics.watch("audit_anchor_lag_seconds", lag, lambda: [({}, anchor.lag)])
    return audit


def _anchor(written: AuditConfig) -> Anchor | None:
    """What anchors is imported where it is asked for: most routers start sooner without."""
    if written.anchor is None:
        return None
    from router.audit_anchor import anchor_of

    return anchor_of(written)


async def sweep_for_ever(root: Path, tenants: TenantSource, every: float = EVERY) -> None:
    """Sweep at once and then every so many seconds, until cancelled."""
    while True:
        await asyncio.to_thread(sweep, root, tenants)
        await asyncio.sleep(every)


def sweep(root: Path, tenants: TenantSource) -> dict[str, Retained]:
    """Destroy what has outlived its tenant's retention. What fails for one tenant is logged, and tried again later."""
    done: dict[str, Retained] = {}
    ending = [
        (t.name, t.audit.retention) for t in map(tenants.get, tenants.names) if t and t.audit.retention is not None
    ]
    if not ending:
        return done
    from router.audit_custody import Custody
    from router.audit_verify import tenants as chains

    known = set(chains(root))
    for name, retention in ending:
        if name not in known:
            continue
        try:
            done[name] = Custody(root, name).retain(retention)
        except (AuditError, OSError) as error:
            log.error("audit_retention_failed", tenant=name, error=str(error))
    return done
