"""Money through the HTTP door: what local lanes cost, and a budget that is asked about each deployment that runs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from router import audit_verify
from router.bills import Tariff, tariffs
from router.settings import load_text
from router.transports.cache import KnownFleet
from tests.router.gateway import KEY, PLAIN, Router, Seen, Upstream, chunk, deployment, failure, plain, router, upstream
from tests.router.test_cache import worker

RATE = {"device_hour_usd": 3600.0}
"""A dollar a second: a millisecond of the device is a thousandth of a dollar."""
SPENT = {"prefill_ms": 300.0, "decode_ms": 900.0, "device_ms": 500.0}


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


@pytest.fixture
async def on_worker(tmp_path: Path) -> AsyncIterator[Upstream]:
    async with upstream(unix=tmp_path / "w.sock") as state:
        state.answers |= {"duo": spent, "tiny": spent}
        yield state


async def spent(seen: Seen) -> web.StreamResponse:
    if seen.body.get("stream"):
        return await seen.stream(chunk("a", "stop"), {"choices": [], "usage": PLAIN["usage"], "twolane": SPENT})
    return plain(200, {**PLAIN, "twolane": SPENT})


async def fails(seen: Seen) -> web.StreamResponse:
    return failure(503)


def config(*entries: dict[str, Any], **tenant: Any) -> dict[str, Any]:
    model = {"model": "none/none"}
    return {
        "models": [{"name": "tiny", **model}],
        "pairs": [{"name": "duo", "sharer": model, "receiver": model}],
        "workers": [{"name": "w", "pairs": ["duo"], "models": ["tiny"], "url": "unix:/none", **RATE}],
        "model_list": list(entries),
        "tenants": [{"name": "a", "key": KEY, **tenant}],
        "router_settings": {"num_retries": 0, "allowed_fails": 100},
    }


DUO = {"model_name": "duo", "cache_params": {"pair": "duo"}}
TINY = {"model_name": "tiny", "local_params": {"model": "tiny", "device_hour_usd": 7200.0}}


def priced(name: str, up: Upstream, usd: float, group: str = "m", **params: Any) -> dict[str, Any]:
    """A deployment whose every answer costs so much (PLAIN has two completion tokens), and is expected to."""
    entry = deployment(name, up, input_cost_per_token=0.0, output_cost_per_token=usd / 2, max_tokens=2, **params)
    return {**entry, "model_name": group, "model_info": {"id": name}}


async def happened(door: Router, id: str) -> dict[str, Any]:
    told: dict[str, Any] = (await door.get(f"/v1/decisions/{id}")).json
    return told


async def test_device_time_is_the_price_of_a_pair(tmp_path: Path, up: Upstream, on_worker: Upstream) -> None:
    """An answer of the cache lane costs what its device time does, plain or streamed; so does a single model's."""
    async with router(tmp_path, config(DUO, TINY), KnownFleet([worker(on_worker.base)])) as door:
        plainly = await door.post(model="duo")
        streamed = await door.post(model="duo", stream=True)
        alone = await door.post(model="tiny")
        told = [await happened(door, a.headers["x-twolane-decision"]) for a in (plainly, streamed, alone)]
    assert [t["happened"]["cost"] for t in told] == pytest.approx([0.5, 0.5, 1.0])
    assert float(plainly.headers["x-litellm-response-cost"]) == pytest.approx(0.5)
    assert "x-litellm-response-cost" not in streamed.headers
    records = list(audit_verify.records(tmp_path / "audit", "a"))
    assert [r.body["cost"] for r in records if "result" in r.body] == pytest.approx([0.5, 0.5, 1.0])
    estimate = told[0]["judged"][0]["estimate"]
    assert estimate["cost"] == pytest.approx(estimate["total_p50"] / 1000)


async def test_relay_costs_both_halves(tmp_path: Path, up: Upstream) -> None:
    """A relay costs its hint and its answer, each at its own price."""
    relay = {"model_name": "r", "relay_params": {"sharer": "s", "receiver": "m", "max_hint_tokens": 10}}
    entries = (relay, priced("sharer", up, 0.5, "s"), priced("receiver", up, 0.25, "m"))
    async with router(tmp_path, config(*entries)) as door:
        answer = await door.post(model="r")
        assert float(answer.headers["x-litellm-response-cost"]) == pytest.approx(0.75)
        up.answers["receiver"] = spent
        streamed = await door.post(model="r", stream=True)
        told = await happened(door, streamed.headers["x-twolane-decision"])
    assert told["happened"]["cost"] == pytest.approx(0.75)


async def test_budget_counts_the_device(tmp_path: Path, on_worker: Upstream) -> None:
    """Device time is money of the budget: when it is spent the cache lane is refused too."""
    written = config(DUO, max_budget=0.9)
    async with router(tmp_path, written, KnownFleet([worker(on_worker.base)])) as door:
        codes = [(await door.post(model="duo", max_tokens=1)).status for _ in range(4)]
    assert codes[:2] == [200, 200]
    assert codes[2:] == [429, 429]


async def test_budget_holds_for_fallbacks(tmp_path: Path, up: Upstream) -> None:
    """A dearer deployment is not asked when the budget has no room for it: next in the group or a fallback group."""
    cheap, dear, group = priced("cheap", up, 0.1, order=1), priced("dear", up, 5.0, order=2), priced("x", up, 5.0, "f")
    up.answers["cheap"] = fails
    written = config(cheap, dear, group, max_budget=1.0)
    written["router_settings"]["fallbacks"] = [{"m": ["f"]}]
    async with router(tmp_path, written) as door:
        answer = await door.post(model="m", max_tokens=2)
        told = await happened(door, answer.headers["x-twolane-decision"])
        assert answer.status == 429
        assert answer.error["code"] == "budget_exceeded"
        assert (up.count("dear"), up.count("x")) == (0, 0)
        assert [t["code"] for t in told["tries"]] == ["upstream_unavailable", "budget_exceeded", "budget_exceeded"]
        up.answers.pop("cheap")
        assert (await door.post(model="m", max_tokens=2)).status == 200  # and what was refused was not charged


async def test_cheaper_deployment_answers_when_the_first_is_too_dear(tmp_path: Path, up: Upstream) -> None:
    """The budget is asked about the deployment that runs: one that still fits it answers."""
    dear, cheap = priced("dear", up, 0.6, order=1), priced("cheap", up, 0.1, order=2)
    async with router(tmp_path, config(dear, cheap, max_budget=1.0)) as door:
        ran = [(await door.post(model="m", max_tokens=2)).headers.get("x-twolane-deployment") for _ in range(6)]
    assert ran == ["dear", "cheap", "cheap", "cheap", "cheap", None]


def test_a_relay_of_wildcards_reserves_their_models_prices(tmp_path: Path) -> None:
    """A half that a wildcard answers has the price of the model that the relay names."""
    table = {
        name: {"litellm_provider": "openai", "input_cost_per_token": usd, "output_cost_per_token": usd}
        for name, usd in (("dear", 3.0), ("cheap", 1.0))
    }
    (tmp_path / "prices.json").write_text(json.dumps(table))
    written = {
        "prices": "prices.json",
        "router_settings": {"model_group_alias": {"hinter": "openai/dear"}},
        "model_list": [
            {"model_name": "openai/*", "litellm_params": {"model": "openai/*", "api_key": "k"}},
            {
                "model_name": "r",
                "relay_params": {"sharer": "hinter", "receiver": "openai/cheap", "max_hint_tokens": 10},
            },
        ],
    }
    settings = load_text(yaml.safe_dump(written), folder=tmp_path)
    relayed = tariffs(settings)[settings.model_list[1].id]
    assert relayed.expected(100, 10) == pytest.approx(100 * 4.0 + 10 * 1.0 + 10 * (3.0 + 1.0))


def test_tariffs() -> None:
    """A deployment's own rate wins over its worker's, and a relay charges what the dearest of its halves may."""
    relay = {"model_name": "r", "relay_params": {"sharer": "tiny", "receiver": "paid", "max_hint_tokens": 10}}
    paid = {
        "model_name": "paid",
        "litellm_params": {"model": "openai/x", "input_cost_per_token": 1e-3, "output_cost_per_token": 2e-3},
    }
    settings = load_text(yaml.safe_dump(config(DUO, TINY, relay, paid)))
    duo, tiny, relayed, bought = [tariffs(settings)[d.id] for d in settings.model_list]
    assert (duo.device_usd_s, tiny.device_usd_s) == (1.0, 2.0)
    assert bought == Tariff(bought.price) == Tariff(settings.model_list[3].price)
    assert relayed.expected(100, 10, seconds=3) == pytest.approx(0.1 + 0.02 + 10 * 1e-3 + 3 * 2.0)
