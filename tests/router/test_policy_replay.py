"""Past decisions made again from their records, over a run of the real router."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from msgspec.structs import fields, replace

from policies.decide import decide
from policies.facts import Facts
from policies.policy import Policy
from router.audit import Audit, Outcome
from router.audit_verify import records, verify
from router.call import Call
from router.cli import main
from router.facts_record import NotReplayable, pack, pack_all, unpack_all
from router.policy_replay import _difference
from router.tenant_config import TenantConfig
from router.tenants import Tenant
from tests.policies import strategies
from tests.router.gateway import Router, Upstream, deployment, failure, router, upstream


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


def replayed(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["policy", "replay", "--dir", str(folder / "audit"), *options])


def config(up: Upstream, budget_ms: int) -> dict[str, Any]:
    """Two deployments with a fallback group, a relay and a pair that nobody holds, under four policies."""
    prior = {"model_info": {"latency": {"ttft_ms": 40, "tokens_per_s": 50}, "region": "kr"}}
    return {
        "model_list": [
            {**deployment("m", up, weight=3), **prior},
            deployment("m", up, "m2"),
            {"model_name": "m", "cache_params": {"pair": "duo"}},
            deployment("spare", up),
            deployment("bad", up, "broken"),
            {"model_name": "hint", "relay_params": {"sharer": "m", "receiver": "spare", "max_hint_tokens": 8}},
        ],
        "pairs": [{"name": "duo", "sharer": {"model": "x"}, "receiver": {"model": "x"}}],
        "router_settings": {"num_retries": 0, "fallbacks": [{"bad": ["spare"]}], "routing_strategy": "least-busy"},
        "tenants": [
            {"name": "free", "key": "k-free"},
            {"name": "bank", "key": "k-bank", "regulated": True},
            {"name": "near", "key": "k-near", "regions": ["kr"], "sticky": "conversation"},
            {"name": "fast", "key": "k-fast", "latency_budget": {"total_ms": budget_ms}, "rollout": {"cache": 0.5}},
        ],
    }


def asks(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Mixed requests: lanes asked for, budgets, deployments pinned, sessions, tools, models that are not there."""
    models = itertools.cycle(["m", "m", "hint", "bad", "m", "spare", "nobody"])
    keys = itertools.cycle(["k-free", "k-bank", "k-near", "k-fast", "k-free"])
    extras: list[dict[str, str]] = [
        {},
        {"x-twolane-transport": "text"},
        {"x-twolane-transport": "cache"},
        {"x-twolane-latency-budget-ms": "200"},
        {"x-session-id": "s1"},
        {"x-twolane-deployment": "elsewhere"},
    ]
    for i, model, key, headers in zip(range(count), models, keys, itertools.cycle(extras), strict=False):
        body: dict[str, Any] = {"model": model, "headers": headers, "user": f"u{i}"}
        yield key, body | ({"tools": [{"type": "function", "function": {"name": "f"}}]} if i % 4 == 0 else {})


async def ask_all(door: Router, count: int) -> None:
    gate = asyncio.Semaphore(16)

    async def one(key: str, body: dict[str, Any]) -> None:
        async with gate:
            await door.post(key=key, **body)

    await asyncio.gather(*(one(key, body) for key, body in asks(count)))


async def test_hundreds_of_mixed_requests_are_decided_as_recorded(tmp_path: Path, up: Upstream) -> None:
    """Five hundred requests of four tenants, before and after a change of policy: replayed, each decision is the same
    to the last verdict; the log holds, and two policies of the changed tenant are kept."""

    async def breaks(seen: object) -> Any:
        return failure(503)

    up.answers["broken"] = breaks
    for budget in (50, 5000):
        async with router(tmp_path, config(up, budget)) as door:
            await ask_all(door, 250)
    told = replayed(tmp_path, "--json")
    assert told.exit_code == 0, told.output[-2000:]
    lines = [json.loads(line) for line in told.output.splitlines()]
    counts = lines.pop()
    assert counts["differs"] == counts["unknown"] == 0
    assert counts["same"] > 400
    assert any(line["decisions"] > 1 for line in lines), "fallback groups and relays were decided too"
    assert verify(tmp_path / "audit", "fast").faults == []
    digests = {r.body["policy"] for r in records(tmp_path / "audit", "fast") if "policy" in r.body}
    assert len(digests) == 2
    assert all((tmp_path / "audit" / "_policies" / f"{d}.json").exists() for d in digests)
    assert not any(b"k-fast" in p.read_bytes() for p in (tmp_path / "audit" / "_policies").iterdir())
    one = lines[7]["id"]
    assert one in replayed(tmp_path, "--id", one).output
    assert replayed(tmp_path, "--id", "dec_nobody").exit_code == 1


@given(strategies.policies, strategies.facts())
def test_an_earlier_record_is_read_as_what_it_says(policy: Policy, facts: Facts) -> None:
    """Records once held the verdict of every rule, without its name: the same decision, and one changed is named."""
    decision = decide(policy, facts)
    was = msgspec.json.decode(msgspec.json.encode({f.name: getattr(decision, f.name) for f in fields(decision)}))
    assert _difference(was, policy, facts) == ""
    for judged in was["judged"]:
        judged["verdicts"][0] = {"allowed": False, "code": "stopped", "detail": "cache"}
        assert "verdicts" in _difference(was, policy, facts)


async def test_a_policy_that_is_gone_or_changed_is_named(tmp_path: Path, up: Upstream) -> None:
    """Without the policy of the time, or with another in its place, the replay fails and says so."""
    async with router(tmp_path, {"model_list": [deployment("m", up)]}) as door:
        assert (await door.post(model="m")).status == 200
    (file,) = (tmp_path / "audit" / "_policies").iterdir()
    written = file.read_bytes()
    file.write_bytes(written.replace(b'"regulated": false', b'"regulated": true'))
    told = replayed(tmp_path)
    assert told.exit_code == 1
    assert "is not the policy that its name says" in told.output
    file.unlink()
    assert "is not kept" in replayed(tmp_path).output


async def test_a_decision_that_policy_would_not_make_is_named(tmp_path: Path) -> None:
    """A recorded decision that does not follow from its facts and policy is found, with what differs."""
    tenant = Tenant.of(TenantConfig(name="a"))
    call = Call("dec_1", tenant, "/chat/completions", "m", {}, stream=False, include_usage=False, started=0.0)
    facts = Facts("m", (), prompt_tokens=1, output_tokens=1)
    wrong = replace(decide(tenant.policy, facts), reason="sticky")
    call.decided.append((facts, wrong))
    audit = Audit(tmp_path / "audit")
    await audit.start()
    await audit.outcome(call, wrong, Outcome("refused", 503))
    await audit.close()
    told = replayed(tmp_path)
    assert told.exit_code == 1
    assert "a 1 dec_1: DIFFERS: reason was 'sticky' and is 'no_deployments'" in told.output


@given(strategies.facts())
def test_facts_survive_the_record(facts: Facts) -> None:
    """What is read back from JSON are the facts that were packed."""
    assert unpack_all(json.loads(msgspec.json.encode(pack_all([(pack(facts), msgspec.Raw(b"{}"))])))) == [facts]


@pytest.mark.parametrize("record", [None, {}, {"v": 1}, {"v": 2, "of": []}, {"v": 1, "of": [{"model": 3}]}])
def test_facts_that_cannot_be_read_are_refused(record: object) -> None:
    """A record without facts, of another version or of another shape is never guessed at."""
    with pytest.raises(NotReplayable):
        unpack_all(record)
