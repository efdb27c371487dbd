"""What workers count of stored KV, on the router's page."""

from __future__ import annotations

import msgspec

from router.telemetry import Metrics
from router.transports.cache import KnownFleet
from router.worker_metrics import watch_workers
from tests.workers.test_client import state
from workers.client import read_state
from workers.counters import Counters
from workers.protocol import KVCount


def test_every_counter_of_every_worker_is_shown() -> None:
    """By worker, tier and artefact, as the heartbeat had it over the wire; a worker that is gone is not shown."""
    kv = (KVCount("hits", "ram", "fused", 3), KVCount("saved_seconds", "disk", "source", 1.5))
    beats = [msgspec.structs.replace(state("w"), kv=kv), state("idle")]
    fleet = KnownFleet([read_state(msgspec.json.encode(beat)) for beat in beats])
    metrics = Metrics([], [])
    watch_workers(metrics, fleet)
    page = metrics.render().decode()
    assert 'twolane_worker_kv_hits_total{worker="w",tier="ram",role="fused"} 3' in page
    assert 'twolane_worker_kv_saved_seconds_total{worker="w",tier="disk",role="source"} 1.5' in page
    assert 'worker="idle"' not in page
    for name in Counters.NAMES:
        assert f"# TYPE twolane_worker_kv_{name}_total counter" in page
