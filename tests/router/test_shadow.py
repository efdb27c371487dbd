"""Shadow text: real pairs compared with their text route, recorded, counted, and demoted where they go wrong."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from router import audit_verify
from router.audit_lines import Record
from router.call import Call
from router.comparison import Comparison
from router.errors import Unavailable
from router.shadow import BASELINE, Sample, _drift, _Seen, _WhenIdle
from router.tenants import Tenant
from router.transports.cache import KnownFleet
from router.transports.openai_http import Pools
from tests.router.gateway import KEY, Router, router
from tests.router.test_replay import TEXTS, Lab, ask
from tests.router.test_replay import lab as lab  # the fixture
from tests.workers.test_server import serving
from workers.protocol import PairState, WorkerState

QUIET = "sk-quiet-0123456789"


@asynccontextmanager
async def shadowed(
    lab: Lab, folder: Path, *, busy: bool = False, share: float = 1.0, **pair: Any
) -> AsyncIterator[tuple[Router, list[WorkerState]]]:
    """A worker and a router whose tenants have every answer of the cache lane compared."""
    fleet = lab.fleet(folder, url=f"unix:{folder}/w.sock")
    config = lab.config(folder, "http://127.0.0.1:9/v1", fleet)
    config["tenants"] = [
        {"name": "a", "key": KEY, "audit": {"content": "full", "shadow_text": share}},
        {"name": "quiet", "key": QUIET, "audit": {"content": "none", "shadow_text": share}},
    ]
    for entry in config["pairs"]:
        entry |= pair
    config["model_list"] += [
        {"model_name": "both", "model_info": {"id": "both-cache"}, "cache_params": {"pair": "duo"}},
        {"model_name": "both", "model_info": {"id": "both-text"}, "local_params": {"model": "tiny"}},
    ]
    async with serving(fleet, folder / "w.sock") as (_, worker):
        state = worker.state()
        if busy:
            import msgspec

            state = msgspec.structs.replace(state, running=1)
        async with router(folder, config, KnownFleet([state])) as door:
            yield door, [state]


def compared(folder: Path, tenant: str = "a") -> list[Record]:
    """Its records; none while there is no chain yet."""
    if not (folder / "audit" / tenant / "head.json").exists():
        return []
    return [r for r in audit_verify.records(folder / "audit", tenant) if r.body.get("what") == "shadow_text"]


async def until_compared(folder: Path, number: int, tenant: str = "a") -> list[Record]:
    await until(lambda: len(compared(folder, tenant)) >= number)
    return compared(folder, tenant)


async def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not true():
            await asyncio.sleep(0.05)


async def figures(door: Router, name: str) -> dict[str, float]:
    """Samples of one metric by their labels."""
    text = (await door.get("/metrics")).raw.decode()
    found = [line.rpartition(" ") for line in text.splitlines() if line.startswith(f"twolane_{name}")]
    return {head.removeprefix(f"twolane_{name}"): float(value) for head, _, value in found}


async def test_an_answer_of_the_cache_lane_is_compared_and_stands_beside_its_record(lab: Lab, tmp_path: Path) -> None:
    """Plain and streamed, greedy and sampled: one record each with the request's id, figures in clear and texts
    sealed; answers of the text lane have none; the chain holds."""
    async with shadowed(lab, tmp_path) as (door, _):
        ids = [
            await ask(door, "same", temperature=0),
            await ask(door, "same", temperature=0, stream=True),
            await ask(door, "same"),
            await ask(door, "cache", TEXTS[1], temperature=0),
        ]
        await ask(door, "alone", temperature=0)
        found = {r.body["id"]: r for r in await until_compared(tmp_path, 4)}
        samples = await figures(door, "agreement_samples_total")
    assert set(found) == set(ids)
    details = [found[id].body["detail"] for id in ids]
    assert [d["greedy"] for d in details] == [True, True, False, True]
    assert all(d["exact"] and d["f1"] == 1.0 and d["route"] == "sharer" for d in details[:3])
    assert all(d["likelihood"] < 0 and d["sureness"] < 0 for d in details)
    assert samples == {'{pair="twin"}': 3.0, '{pair="duo"}': 1.0}
    root, chain = tmp_path / "audit", ""
    for record in audit_verify.records(root, "a"):
        chain = record.body.get("chain", chain)
    texts = [audit_verify.content(root, "a", chain, found[id])["text"] for id in ids]
    assert texts[0] == texts[1] != ""
    assert all(text not in json.dumps(found[id].body) for id, text in zip(ids, texts, strict=True) if len(text) > 3)
    assert audit_verify.verify(root, "a").holds


async def test_texts_are_kept_as_the_tenant_says(lab: Lab, tmp_path: Path) -> None:
    """With content `none` figures alone are recorded, also of a stream."""
    async with shadowed(lab, tmp_path) as (door, _):
        await ask(door, "same", temperature=0, stream=True, key=QUIET)
        [record] = await until_compared(tmp_path, 1, "quiet")
    assert "content" not in record.body
    assert record.body["detail"]["exact"] is True


async def test_a_worker_that_is_never_idle_costs_callers_nothing(lab: Lab, tmp_path: Path) -> None:
    """All callers are answered; samples wait within their bound, and what is more is counted as dropped."""
    async with shadowed(lab, tmp_path, busy=True) as (door, _):
        await asyncio.gather(*(ask(door, "same", temperature=0, max_tokens=1) for _ in range(8)))
        for _ in range(62):
            await ask(door, "same", temperature=0, max_tokens=1)
        waiting = await figures(door, "agreement_waiting")
        dropped = await figures(door, "agreement_dropped_total")
        assert compared(tmp_path) == []
    assert waiting == {"": 64.0}
    assert dropped == {'{cause="queue_full"}': 5.0}  # one is in hand, waiting for an idle moment


@pytest.mark.parametrize("change", ["stop", {"regulated": True}, {"transports": ["text"]}], ids=str)
async def test_what_waits_is_dropped_where_the_pair_must_not_run(lab: Lab, tmp_path: Path, change: Any) -> None:
    """A stop button that was pressed since, or a policy that leaves the tenant no cache lane any more."""
    async with shadowed(lab, tmp_path, busy=True) as (door, _):
        await ask(door, "same", temperature=0)
        path, body = "/admin/reload", {}
        if change == "stop":
            path, body = "/admin/stops", {"target": "pair:twin", "reason": "a test"}
        else:
            file = tmp_path / "router.yaml"
            config = yaml.safe_load(file.read_text())
            config["tenants"][0] |= {**change, "audit": {"content": "full"}}
            file.write_text(yaml.safe_dump(config))
        done = await door.session.post(path, json=body, headers={"authorization": "Bearer sk-master-0123456789"})
        assert done.status == 200, await done.text()
        async with asyncio.timeout(10):
            while await figures(door, "agreement_dropped_total") != {'{cause="barred"}': 1.0}:
                await asyncio.sleep(0.1)


async def test_a_comparison_that_has_begun_asks_nothing_more_after_a_stop() -> None:
    """Each of its questions is asked only where the pair may still run: nobody is there to answer this one."""
    pools = Pools()
    call = Call("dec_1", Tenant("a"), "/chat/completions", "m", {}, False, False, 0.0)
    twin = _WhenIdle(pools, "http://127.0.0.1:9", Sample(call, "twin", b"", 0, math.inf), 0.0, lambda: True)
    with pytest.raises(Unavailable) as refusal:
        await twin.ask({})
    await pools.close()
    assert refusal.value.code == "barred"


async def test_a_share_of_none_compares_nothing(lab: Lab, tmp_path: Path) -> None:
    """The default: nobody is sampled."""
    async with shadowed(lab, tmp_path, share=0.0) as (door, _):
        await ask(door, "same", temperature=0)
        await asyncio.sleep(0.3)
        assert await figures(door, "agreement_samples_total") == {}


async def test_a_pair_that_says_something_else_is_demoted_without_an_error(lab: Lab, tmp_path: Path) -> None:
    """An untrained pair that shares no word with its text route leaves the lane; every caller is answered, by the
    text lane from then on."""
    limits = {"min_agreement": 0.9, "max_harm": None, "max_drift": None, "patience": 20, "rest": "1h"}
    async with shadowed(lab, tmp_path, demotion=limits) as (door, _):
        lanes = []
        async with asyncio.timeout(60):
            while not lanes or lanes[-1] == "cache":
                body = {"messages": [{"role": "user", "content": TEXTS[len(lanes) % 3]}], "max_tokens": 4}
                got = await door.post(model="both", temperature=0, **body)
                assert got.status == 200
                lanes.append(got.headers["x-twolane-transport"])
                while len(await asyncio.to_thread(compared, tmp_path)) < lanes.count("cache"):
                    await asyncio.sleep(0.05)
        demoted = await figures(door, "pair_demoted")
    assert lanes[-1] == "text"
    assert demoted['{pair="duo"}'] == 1.0
    assert compared(tmp_path)


@pytest.mark.parametrize(
    ("f1", "sureness", "suspect"),
    [(0.1, -0.1, True), (0.1, -2.0, False), (0.5, -0.1, False), (0.1, None, False), (0.0, -0.69, True)],
)
def test_harm_is_suspected_where_the_text_route_was_sure_of_something_else(
    f1: float, sureness: float | None, suspect: bool
) -> None:
    """Both: next to nothing in common, and a text route that was sure."""
    assert Comparison("sharer", True, "x", None, False, f1, -1.0, sureness).suspect is suspect


def test_drift_is_measured_from_the_report_or_from_the_pairs_own_beginning() -> None:
    """With a report its promise counts; without, the first comparisons do, and a new fingerprint begins anew."""
    state = PairState("p", "f", "fuse", "prompt", "c2c", 100, agreement=0.8)
    assert _drift(_Seen(), state, 0.5) == pytest.approx(0.3)
    seen, plain = _Seen(), PairState("p", "f", "fuse", "prompt", "c2c", 100)
    assert {_drift(seen, plain, 0.6) for _ in range(BASELINE)} == {None}
    assert _drift(seen, plain, 0.1) == pytest.approx(0.5)
    assert _drift(seen, PairState("p", "new", "fuse", "prompt", "c2c", 100), 0.1) is None
