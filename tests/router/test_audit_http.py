"""The audit log through the public door: what a caller gets, and what then stands on record."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router.audit_verify import records, verify
from tests.router.gateway import Upstream, deployment, failure, router, upstream


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


def outcomes(folder: Path, tenant: str = "a") -> list[dict[str, Any]]:
    assert verify(folder / "audit", tenant).faults == []
    return [r.body for r in records(folder / "audit", tenant) if r.body["kind"] == "outcome"]


async def test_every_decision_of_a_request_is_recorded(tmp_path: Path, up: Upstream) -> None:
    """After a group's fallback and in a relay, the record holds the first decision and all that came after it."""

    async def fails(seen: object) -> Any:
        return failure(503)

    up.answers["m"] = fails
    relay = {"model_name": "duo", "relay_params": {"sharer": "other", "receiver": "spare", "max_hint_tokens": 8}}
    names = ("m", "spare", "other")
    config = {
        "model_list": [*(deployment(name, up) for name in names), relay],
        "router_settings": {"num_retries": 0, "fallbacks": [{"m": ["spare"]}]},
    }
    async with router(tmp_path, config) as door:
        for model in ("m", "duo", "spare"):
            assert (await door.post(model=model)).status == 200
    told = [(o["decision"]["model"], [d["model"] for d in o.get("later", [])]) for o in outcomes(tmp_path)]
    assert told == [("m", ["spare"]), ("duo", ["other", "spare"]), ("spare", [])]
