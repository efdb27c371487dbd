"""`GET /v1/decisions/{id}`: what was decided, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policies.rules import RULES
from tests.router.gateway import Upstream, deployment, failure, router, upstream


def config(up: Upstream) -> dict[str, Any]:
    prior = {"model_info": {"latency": {"ttft_ms": 40, "tokens_per_s": 50}}}
    return {
        "model_list": [
            {**deployment("m", up, "broken-a"), **prior},
            {**deployment("m", up, "broken-b"), **prior},
            {"model_name": "m", "cache_params": {"pair": "duo"}},
            {**deployment("spare", up, "works"), **prior},
        ],
        "pairs": [{"name": "duo", "sharer": {"model": "x"}, "receiver": {"model": "x"}}],
        "router_settings": {"num_retries": 0, "fallbacks": [{"m": ["spare"]}]},
    }


async def fails(seen: object) -> Any:
    return failure(503)


async def test_a_past_decision_shows_its_fallbacks(tmp_path: Path) -> None:
    """All deployments of both groups stand there with every verdict and the estimate, what was tried and what
    answered, also where the group asked for failed as a whole."""
    async with upstream() as up, router(tmp_path, config(up)) as door:
        up.answers |= {"broken-a": fails, "broken-b": fails}
        answer = await door.post(model="m")
        assert answer.status == 200
        told = (await door.get(f"/v1/decisions/{answer.headers['x-twolane-decision']}")).json
    assert told["model"] == "m"
    assert [j["transport"] for j in told["judged"]] == ["text", "text", "cache"]
    assert all(len(j["verdicts"]) == len(RULES) for j in told["judged"])
    assert [j["estimate"] is not None for j in told["judged"]] == [True, True, False]
    assert [v["rule"] for v in told["judged"][0]["verdicts"]] == [rule.name for rule in RULES]
    refused = [(v["rule"], v["code"], v["means"]) for v in told["judged"][2]["verdicts"] if not v["allowed"]]
    assert refused == [
        ("pair_available", "pair_unavailable", "No live worker holds this pair."),
        ("available", "deployment_unavailable", "The deployment cannot be reached."),
    ]
    assert sorted(t["deployment"] for t in told["tries"]) == sorted(told["ranked"])
    (later,) = told["later"]
    assert (later["model"], later["reason"]) == ("spare", "only_survivor")
    assert later["judged"][0]["estimate"]["ttft_p50"] > 0
    happened = told["happened"]
    assert (happened["deployment"], happened["outcome"], happened["fallbacks"]) == (later["deployment"], "ok", 1)
    assert told["spare"] == "spare"


async def test_a_refusal_shows_every_verdict(tmp_path: Path) -> None:
    """What policy refused can be read afterwards too, by its own tenant alone."""
    async with upstream() as up, router(tmp_path, config(up)) as door:
        answer = await door.post(model="m", headers={"x-twolane-transport": "cache"})
        path = f"/v1/decisions/{answer.headers['x-twolane-decision']}"
        told = (await door.get(path)).json
        assert (await door.get(path, key="sk-master-0123456789")).status == 404
    assert answer.status >= 400
    assert told["deployment"] is None
    assert [j["allowed"] for j in told["judged"]] == [False, False, False]
    assert told["happened"]["status"] == answer.status
    assert "later" not in told or told["later"][0]["deployment"] is None
