"""Stop buttons, named administrators and demoted pairs through the HTTP door."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from router.admins import RIGHTS, ROLES
from router.transports.cache import KnownFleet
from tests.router.gateway import KEY, Answer, Router, Seen, Upstream, chunk, failure, router, until, upstream
from tests.router.test_cache import config as lanes
from tests.router.test_cache import worker as state_of
from workers.config import DemotionLimits

MASTER = "sk-master-0123456789"
KEYS = {role: f"sk-admin-{role}-0123456789" for role in ROLES}
ADMINS = [{"name": f"the-{role}", "key": key, "role": role} for role, key in KEYS.items()]


@dataclass
class House:
    """A router with both lanes in the group `m`, and a worker made of a function that holds the pair `duo`."""

    door: Router
    fleet: KnownFleet
    folder: Path
    text: Upstream
    worker: Upstream

    async def lane(self, key: str = KEY) -> str:
        """The lane that answers now."""
        answer = await self.door.post(model="m", key=key)
        assert answer.status == 200, answer.raw
        return answer.headers["x-twolane-transport"]

    async def admin(self, method: str, path: str = "/admin/stops", key: str = MASTER, **body: object) -> Answer:
        headers = {"authorization": f"Bearer {key}"}
        async with self.door.session.request(method, path, headers=headers, json=body or None) as got:
            return Answer(got.status, dict(got.headers), await got.read())

    async def stop(self, target: str = "cache", reason: str = "drift", **more: object) -> Answer:
        return await self.admin("POST", target=target, reason=reason, **more)

    async def start(self, target: str = "cache", reason: str = "mended", **more: object) -> Answer:
        return await self.admin("DELETE", target=target, reason=reason, **more)

    def records(self, *what: str) -> list[dict[str, Any]]:
        """Control records of these kinds, with their chain's tenant."""
        files = (self.folder / "audit").rglob("*.jsonl")
        lines = [json.loads(line) for file in files for line in file.read_bytes().splitlines()]
        return [record for record in lines if record.get("what") in what]

    def hold(self, fingerprint: str, **state: object) -> None:
        """What the worker says of its pair from now on."""
        old = self.fleet.states[0]
        changed = msgspec.structs.replace(old.pairs[0], fingerprint=fingerprint, **state)
        self.fleet.states[0] = msgspec.structs.replace(old, pairs=(changed,))


@contextlib.asynccontextmanager
async def living(folder: Path, redis_url: str | None = None, **config: object) -> AsyncIterator[House]:
    async with upstream() as up, upstream(unix=folder / "w.sock") as on_worker:
        fleet = KnownFleet([state_of(on_worker.base)])
        tenants = [{"name": "a", "key": KEY}, {"name": "b", "key": "sk-tenant-b-0123456789"}]
        written = {**lanes(up), "admins": ADMINS, "tenants": tenants, **config}
        async with router(folder, written, fleet, redis_url) as door:
            yield House(door, fleet, folder, up, on_worker)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with living(tmp_path) as found:
        yield found


# -- the stop button


@pytest.mark.parametrize(
    ("target", "a", "b"), [("cache", "text", "text"), ("pair:duo", "text", "text"), ("tenant:a", "text", "cache")]
)
async def test_a_stop_holds_at_once(house: House, target: str, a: str, b: str) -> None:
    """The next request takes the text lane where the stop says so, and the cache lane again once it is lifted."""
    other = "sk-tenant-b-0123456789"
    assert (await house.lane(), await house.lane(other)) == ("cache", "cache")
    done = await house.stop(target)
    assert (done.status, done.json["recorded"]) == (200, True)
    assert [s["target"] for s in done.json["data"]] == [target]
    assert (await house.lane(), await house.lane(other)) == (a, b)
    assert (await house.start(target)).json["data"] == []
    assert (await house.lane(), await house.lane(other)) == ("cache", "cache")


async def test_person_and_reason_are_recorded(house: House) -> None:
    """Stop, drill and start stand in the chain with who pressed, on whose behalf, and why; a tenant's in its own."""
    await house.admin("POST", key=KEYS["operator"], target="cache", reason="answers\n drift", by="Kim Minji")
    await house.start(reason="it was the sensor")
    await house.stop("tenant:a", drill=True)
    await house.start("tenant:a")
    told = [(r["tenant"], r["what"], r["who"], r["detail"]) for r in house.records("stop", "start", "drill")]
    kim = {"target": "cache", "reason": "answers drift", "by": "Kim Minji", "drill": False}
    assert ("_router", "stop", "the-operator", kim) in told
    mended = {"target": "cache", "reason": "it was the sensor", "by": "master", "drill": False}
    assert ("_router", "start", "master", mended) in told
    assert [(w, d["drill"]) for tenant, w, _, d in told if tenant == "a"] == [("drill", True), ("start", True)]


@pytest.mark.parametrize(
    ("method", "body", "status", "code"),
    [
        ("POST", {"target": "cache"}, 400, "bad_stop"),
        ("POST", {"target": "cache", "reason": "  "}, 400, "bad_stop"),
        ("POST", {"target": "cache", "reason": "x" * 501}, 400, "bad_stop"),
        ("POST", {"target": "everything", "reason": "x"}, 400, "bad_stop"),
        ("POST", {"target": "cache", "reason": "x", "force": True}, 400, "bad_stop"),
        ("POST", {"target": "pair:dou", "reason": "x"}, 404, "unknown_pair"),
        ("POST", {"target": "tenant:c", "reason": "x"}, 404, "unknown_tenant"),
        ("DELETE", {"target": "cache", "reason": "x"}, 404, "not_stopped"),
    ],
)
async def test_what_cannot_be_meant_stops_nothing(
    house: House, method: str, body: dict[str, object], status: int, code: str
) -> None:
    """A stop without a reason, or of something that is not there, is refused in words; a misspelt name above all."""
    answer = await house.admin(method, **body)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert await house.lane() == "cache"
    assert house.records("stop", "start") == []


async def test_running_answers_go_on_and_are_listed(house: House) -> None:
    """A stream that runs when the stop comes ends whole; it is named in the answer, and gone from it afterwards."""
    free = asyncio.Event()

    async def slow(seen: Seen) -> Any:
        response = await seen.stream(chunk("a"), done=False)
        await free.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    house.worker.answers["duo"] = slow
    running = asyncio.create_task(house.door.post(model="m", stream=True))
    await until(lambda: house.worker.count("duo") == 1)
    [listed] = (await house.stop()).json["running"]
    assert (listed["tenant"], listed["pair"]) == ("a", "duo")
    assert await house.lane() == "text"
    free.set()
    answer = await running
    assert (answer.text, answer.events[-1], answer.headers["x-twolane-decision"]) == ("a", "[DONE]", listed["id"])
    assert (await house.admin("GET")).json["running"] == []


async def test_a_request_on_its_way_is_held_back_too(tmp_path: Path) -> None:
    """A request that was decided before the stop, and would reach the worker after it, does not."""
    order = {"transports": ["text", "cache"]}
    tenants = [{"name": "a", "key": KEY, **order}]
    async with living(tmp_path, tenants=tenants) as house:
        asked, free = asyncio.Event(), asyncio.Event()

        async def fails_late(seen: Seen) -> Any:
            asked.set()
            await free.wait()
            return failure(500)

        house.text.answers["text"] = fails_late
        answer = asyncio.create_task(house.door.post(model="m"))
        await asked.wait()
        await house.stop()
        free.set()
        assert (await answer).status >= 500
        assert house.worker.count("duo") == 0
        await house.start()
        assert await house.lane() == "cache"


async def test_only_a_cache_lane_says_why_it_does_not_answer(house: House) -> None:
    """A group without a text lane is unavailable while it is stopped, by the reason's code."""
    await house.stop()
    answer = await house.door.post(model="alone")
    assert (answer.status, answer.error["code"]) == (503, "stopped")


async def test_a_stop_outlives_the_router(tmp_path: Path) -> None:
    """A router that is started anew knows what was stopped; and once lifted, that it was."""
    async with living(tmp_path) as house:
        await house.stop("pair:duo", "drift")
    async with living(tmp_path) as house:
        [entry] = (await house.admin("GET")).json["data"]
        assert (entry["target"], entry["reason"], entry["by"]) == ("pair:duo", "drift", "master")
        assert await house.lane() == "text"
        await house.start("pair:duo")
    async with living(tmp_path) as house:
        assert await house.lane() == "cache"


async def test_the_file_stops_and_starts(house: House) -> None:
    """A person may write the file: within a moment it holds, is recorded as the file's act, and can be lifted there."""
    file = house.folder / "state" / "stops.yaml"
    file.write_text(yaml.safe_dump({"pair:duo": {"stopped": True, "reason": "by hand", "by": "kim"}}))
    await until(lambda: bool(house.records("stop")))
    assert await house.lane() == "text"
    [record] = house.records("stop")
    assert (record["who"], record["detail"]["by"], record["detail"]["reason"]) == ("file", "kim", "by hand")
    written = yaml.safe_load(file.read_text())
    written["pair:duo"].update(stopped=False, reason="mended", by="lee")
    file.write_text(yaml.safe_dump(written))
    await until(lambda: bool(house.records("start")))
    assert await house.lane() == "cache"
    assert house.records("start")[0]["detail"]["by"] == "lee"


@pytest.mark.parametrize(
    "text", ["cache: [", "cache: stopped", "pair: {stopped: true, reason: x}", "cache: {stopped: true}", "- a", "\x00"]
)
async def test_a_file_that_cannot_be_meant_stops_the_lane(house: House, text: str) -> None:
    """Nobody knows what a broken file would say: the cache lane rests, says why, and goes on when it is mended."""
    file = house.folder / "state" / "stops.yaml"
    file.write_text(text)
    stops = house.door.app.parts.lane.stops
    await until(lambda: stops.in_force() == {"cache"})
    assert await house.lane() == "text"
    [entry] = (await house.admin("GET")).json["data"]
    assert (entry["by"], "stops.yaml" in entry["reason"]) == ("router", True)
    done = await house.stop("pair:duo")
    assert (done.status, done.json["reach"]["file"]) == (503, False)
    assert file.read_text() == text
    file.write_text("")
    await until(lambda: stops.in_force() == {"pair:duo"})
    assert "pair:duo" in file.read_text()


async def test_deleting_the_file_lifts_nothing(house: House) -> None:
    """What was stopped stays so when the file goes away; it is written again with the next change."""
    await house.stop("pair:duo")
    file = house.folder / "state" / "stops.yaml"
    file.unlink()
    await asyncio.sleep(0.6)
    assert await house.lane() == "text"
    await house.stop("tenant:b")
    assert {"pair:duo", "tenant:b"} <= set(yaml.safe_load(file.read_text()))


async def test_a_reload_that_is_not_recorded_says_so(house: House) -> None:
    """The files are in force, for they may be what mends; the answer is an error that says what is missing."""
    await house.door.app.parts.audit.close()
    done = await house.admin("POST", "/admin/reload", KEYS["operator"])
    assert (done.status, done.json["reloaded"], done.json["recorded"]) == (503, True, False)
    assert done.error["code"] == "audit_unavailable"
    await house.door.app.parts.audit.start()
    done = await house.admin("POST", "/admin/reload", KEYS["operator"])
    assert (done.status, done.json["recorded"]) == (200, True)


async def test_a_stop_holds_though_it_cannot_be_kept(house: House) -> None:
    """Where neither file nor record can be written a stop holds all the same, and the answer says what is missing."""
    file = house.folder / "state" / "stops.yaml"
    file.mkdir(parents=True)  # nothing can be written there, not even by root
    await house.door.app.parts.audit.close()
    done = await house.stop()
    assert (done.status, done.json["recorded"], done.json["reach"]["file"]) == (503, False, False)
    assert await house.lane() == "text"
    refused = await house.start()
    assert (refused.status, refused.error["code"]) == (503, "audit_unavailable")
    assert await house.lane() == "text"
    file.rmdir()
    await house.door.app.parts.audit.start()


async def test_the_dashboard_presses_these_buttons(house: House) -> None:
    """The page needs no key and no network, runs no foreign script, and asks only for what is served here."""
    page, script = await house.door.get("/", key=None), await house.door.get("/dashboard/page.js", key=None)
    style = await house.door.get("/dashboard/page.css", key=None)
    assert (page.status, script.status, style.status) == (200, 200, 200)
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert b"://" not in page.raw + script.raw + style.raw
    assert b"innerHTML" not in script.raw
    asked = {m.group(1) for m in re.finditer(r'"(/admin/[a-z]+)', script.raw.decode())}
    assert asked == {"/admin/stops", "/admin/pairs"}
    ids = set(re.findall(r'\bid="([a-z]+)"', page.raw.decode()))
    assert set(re.findall(r'\bat\("([a-z]+)"\)', script.raw.decode())) <= ids
    shown = (await house.admin("GET", "/admin/pairs")).json
    assert shown["tenants"] == ["a", "b", "default"]


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        (None, None, 200),
        ("http://127.0.0.1:{port}", None, 200),
        ("http://localhost:{port}", "localhost:{port}", 200),
        ("https://evil.example", None, 403),
        ("null", None, 403),
        ("http://127.0.0.1:9", None, 403),
        ("http://evil.example:{port}", "evil.example:{port}", 403),
        ("http://[::1", None, 403),
    ],
)
async def test_without_keys_no_other_sites_page_presses_them(
    tmp_path: Path, origin: str | None, host: str | None, status: int
) -> None:
    """Where this machine may administer, a browser's request for a foreign page may not, nor for one whose name was
    made to lead here; with keys it is the key that counts."""
    told = {name: value for name, value in (("origin", origin), ("host", host)) if value is not None}
    body = json.dumps({"target": "cache", "reason": "x"})
    async with living(tmp_path, general_settings={}, admins=[], tenants=None) as open_house:
        port = open_house.door.port
        headers = {name: value.format(port=port) for name, value in told.items()} | {"content-type": "text/plain"}
        async with open_house.door.session.post("/admin/stops", data=body, headers=headers) as done:
            assert done.status == status, await done.text()
        assert len(open_house.records("stop")) == (status == 200)


# -- named administrators


@pytest.mark.parametrize("role", [*ROLES, "master"])
async def test_each_role_may_what_its_table_says(house: House, role: str) -> None:
    """Every administrative route is open to the roles that have its right, and to no other; nothing is done unasked."""
    key = KEYS.get(role, MASTER)
    for (method, path), right in RIGHTS.items():
        place = path.replace("{tenant}", "a").replace("{pair}", "none")
        answer = await house.admin(method, place, key)
        allowed = role == "master" or right in ROLES[role]  # type: ignore[index]
        assert (answer.status == 403) != allowed, (method, path, answer.raw)
        if not allowed:
            assert answer.error["code"] == "role_not_allowed"
    assert (house.records("reload") == []) == (role == "auditor")


async def test_an_administrators_key_is_no_tenants(house: House) -> None:
    """It calls no model, a tenant's key administers nothing, and an unknown one is told nothing."""
    assert (await house.door.post(model="m", key=KEYS["operator"])).status == 401
    assert (await house.admin("GET", key=KEY)).error["code"] == "admin_only"
    assert (await house.admin("GET", key="sk-wrong")).status == 401


async def test_administrators_come_and_go_with_a_reload(house: House) -> None:
    """A reload puts other administrators in force, and is recorded by name with the digests before and after."""
    file = house.folder / "router.yaml"
    written = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**written, "admins": [{**ADMINS[0], "name": "new"}]}))
    assert (await house.admin("POST", "/admin/reload", KEYS["publisher"])).status == 200
    assert (await house.admin("GET", key=KEYS["publisher"])).status == 401
    await house.admin("POST", "/admin/reload", KEYS["operator"])
    first, second = house.records("reload")
    assert (first["who"], second["who"]) == ("the-publisher", "new")
    assert first["detail"]["config"][0] != first["detail"]["config"][1]
    assert second["detail"]["config"] == [first["detail"]["config"][1]] * 2


# -- demoted pairs


async def test_a_pair_that_fails_goes_out_and_back(tmp_path: Path) -> None:
    """Failures demote it: requests take the text lane and none sees a 5xx; after its rest a share proves it again."""
    demotion = {"rest": 0.3, "probation": {"share": 1.0, "samples": 3}}
    async with living(tmp_path, router_settings={"num_retries": 0, "disable_cooldowns": True}) as house:
        pair = house.door.app.parts.lane.demotion
        pair.configure({"duo": _limits(demotion)})

        async def fails(seen: Seen) -> Any:
            return failure(500)

        house.worker.answers["duo"] = fails
        for _ in range(8):
            assert await house.lane() == "text"
        answer = await house.door.post(model="m")
        assert (answer.status, answer.headers["x-twolane-reason"]) == (200, "pair_demoted")
        assert house.worker.count("duo") == 8
        metrics = (await house.door.get("/metrics")).raw.decode()
        assert 'twolane_pair_demoted{pair="duo"} 1' in metrics
        del house.worker.answers["duo"]
        await asyncio.sleep(0.35)
        assert [await house.lane() for _ in range(3)] == ["cache"] * 3
        await until(lambda: bool(house.records("pair_reinstated")))
        told = [r["what"] for r in house.records("pair_demoted", "pair_probation", "pair_reinstated")]
        assert told == ["pair_demoted", "pair_probation", "pair_reinstated"]


async def test_on_probation_most_requests_take_text(tmp_path: Path) -> None:
    """On probation the share that policy lets through is about the configured one; others say why."""
    async with living(tmp_path) as house:
        demotion = house.door.app.parts.lane.demotion
        demotion.configure({"duo": _limits({"rest": 0.0, "probation": {"share": 0.3, "samples": 1000}})})
        for _ in range(8):
            demotion.observe_error("duo", True)
        answers = [await house.door.post(model="m") for _ in range(120)]
        lanes_taken = [a.headers["x-twolane-transport"] for a in answers]
        assert 15 < lanes_taken.count("cache") < 60
        assert {a.headers["x-twolane-reason"] for a in answers if a.headers["x-twolane-transport"] == "text"} == {
            "pair_probation"
        }


async def test_a_swapped_pair_is_taken_out(house: House) -> None:
    """Another fingerprint under the same name gets no request; a person may accept it, and both are recorded."""
    assert await house.lane() == "cache"
    house.hold("e" * 8)
    assert await house.lane() == "text"
    [shown] = (await house.admin("GET", "/admin/pairs")).json["data"]
    assert (shown["standing"]["state"], shown["standing"]["why"]) == ("demoted", "fingerprint")
    path = "/admin/pairs/duo/reinstate"
    assert (await house.admin("POST", path, KEYS["operator"], reason="new version")).status == 403
    assert (await house.admin("POST", path, KEYS["publisher"], reason="new version")).status == 200
    assert await house.lane() == "cache"
    await until(lambda: bool(house.records("pair_demoted")))
    [swap] = house.records("pair_demoted")
    assert (swap["detail"]["before"], swap["detail"]["now"]) == ("f" * 8, "e" * 8)
    [accepted] = house.records("pair_reinstated")
    assert (accepted["who"], accepted["detail"]["reason"]) == ("the-publisher", "new version")


async def test_a_swap_is_seen_without_traffic(house: House) -> None:
    """A pair that is swapped while nobody asks is out all the same."""
    assert await house.lane() == "cache"
    house.hold("e" * 8)
    await until(lambda: bool(house.records("pair_demoted")))


async def test_of_two_workers_only_the_accepted_pair_is_called(house: House) -> None:
    """While a worker holds the accepted pair, another's that differs is neither called nor a reason to demote."""
    assert await house.lane() == "cache"
    other = house.fleet.states[0]
    odd = msgspec.structs.replace(other.pairs[0], fingerprint="e" * 8)
    house.fleet.states.insert(0, msgspec.structs.replace(other, name="odd", url="unix:/nowhere.sock", pairs=(odd,)))
    assert {await house.lane() for _ in range(12)} == {"cache"}
    assert house.records("pair_demoted") == []


async def test_a_demotion_outlives_the_router(tmp_path: Path) -> None:
    """A router that is started anew knows which pairs were taken out, and which fingerprint was accepted."""
    async with living(tmp_path) as house:
        await house.lane()
        house.hold("e" * 8)
        assert await house.lane() == "text"
    async with living(tmp_path) as house:
        house.hold("e" * 8)
        assert await house.lane() == "text"
        await house.admin("POST", "/admin/pairs/duo/reinstate", reason="fine")
    async with living(tmp_path) as house:
        assert await house.lane() == "text"  # the old one again: that is a swap too


def _limits(written: dict[str, object]) -> Any:
    return DemotionLimits.model_validate(written)
