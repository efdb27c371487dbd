"""What workers count of their stored KV, on the router's own /metrics: by worker, tier and artefact.

Numbers come with the heartbeats that the fleet holds anyway. A worker that is gone takes its series along, one that was
started anew begins at zero, as Prometheus expects of counters.
"""

from __future__ import annotations

from collections.abc import Iterator

from router.telemetry import Metrics, Sample
from router.transports.cache import Fleet
from workers.counters import Counters


def watch_workers(metrics: Metrics, fleet: Fleet) -> None:
    """Show `twolane_worker_kv_NAME_total` for every counter of a store."""

    def watch(name: str, help: str) -> None:
        def read() -> Iterator[Sample]:
            for worker in fleet.workers():
                for count in worker.kv:
                    if count.name == name:
                        yield {"worker": worker.name, "tier": count.tier, "role": count.role}, count.count

        metrics.watch(f"worker_kv_{name}_total", f"{help[0].upper()}{help[1:]}.", read, "counter")

    for name, help in Counters.NAMES.items():
        watch(name, help)
