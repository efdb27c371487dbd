"""Recorded requests run again: all the same on the same numerics, and every planted difference named by its cause."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from router import audit_verify, live, recorded
from router.agreement import exact, token_f1
from router.audit_custody import Custody
from router.recorded import NothingToReplay, Recorded, texts_of
from router.replay import Cause, Replay, Replayer, first_difference, why
from router.settings import load_text
from router.transports.cache import KnownFleet
from tests.router.gateway import KEY, Router, plain, router, upstream
from tests.router.test_kv_admin import run as command
from tests.tiny import make_model
from tests.workers.test_counterfactual import lite_pair
from tests.workers.test_server import serving
from workers.config import Fleet, ModelConfig, PairConfig, RedisConfig, StoreConfig, WorkerConfig
from workers.loader import Loaded, Loader
from workers.protocol import Run, WorkerState

TEXTS = (
    "What is the tide table of the harbour?",
    "Report, ledger, item, price, buyer, date of sale.",
    "The capital of France, hour by hour, day by day.",
)


@dataclass(frozen=True)
class Lab:
    """Models, pairs and folders of one test module."""

    folder: Path
    models: dict[str, Path]

    def fleet(self, state: Path, *, duo: str = "duo", tiny: str = "tiny", url: str | None = None) -> Fleet:
        pairs = (
            PairConfig(name="duo", sharer="other", receiver="tiny", fuser=str(self.folder / duo)),
            PairConfig(name="twin", sharer="tiny", receiver="tiny"),
        )
        config = WorkerConfig(name="w", models=("tiny", "other"), pairs=("duo", "twin"), threads=1, url=url)
        return Fleet(
            models=(
                ModelConfig(name="tiny", model=str(self.models[tiny])),
                ModelConfig(name="other", model=str(self.models["other"])),
            ),
            pairs=pairs,
            workers=(config,),
            redis=RedisConfig(url=f"unix://{state}/no-redis.sock"),
            store=StoreConfig(dir=state / "kv"),
        )

    def config(self, folder: Path, base: str, fleet: Fleet) -> dict[str, Any]:
        def one(name: str, **params: Any) -> dict[str, Any]:
            return {"model_name": name, "model_info": {"id": name}, **params}

        dumped = fleet.model_dump(mode="json", exclude=("redis", "store"))
        return {
            **dumped,
            "model_list": [
                one("cache", cache_params={"pair": "duo"}),
                one("same", cache_params={"pair": "twin"}),
                one("alone", local_params={"model": "tiny"}),
                one("helper", local_params={"model": "other"}),
                one("relay", relay_params={"sharer": "helper", "receiver": "alone", "max_hint_tokens": 8}),
                one("outside", litellm_params={"model": "openai/up", "api_base": base, "api_key": "sk-up-0123456789"}),
            ],
            "tenants": [
                {"name": "a", "key": KEY, "audit": {"content": "full"}},
                {"name": "hashed", "key": "sk-hashed-0123456789", "audit": {"content": "hash"}},
            ],
            "audit": {"dir": str(folder / "audit")},
            "state_dir": str(folder / "state"),
            "redis": {"url": f"unix://{folder}/no-redis.sock"},
            "general_settings": {"master_key": "sk-master-0123456789"},
        }


def loaded(folder: Path) -> Loaded:
    return Loader("cpu").load(ModelConfig(name="m", model=str(folder)))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    folder = tmp_path_factory.mktemp("replay")
    models = {
        name: make_model(folder / name, seed=seed, ascii_only=True)
        for seed, name in enumerate(("tiny", "other", "swapped"))
    }
    tiny, other = loaded(models["tiny"]), loaded(models["other"])
    lite_pair(folder / "duo", other, tiny)
    lite_pair(folder / "retrained", other, tiny, seed=1)
    return Lab(folder, models)


@contextlib.asynccontextmanager
async def house(
    lab: Lab, folder: Path, **fleet: str
) -> AsyncIterator[tuple[Router, dict[str, Any], list[WorkerState], Any]]:
    """A worker, an upstream and a router over both, with what is needed to run its records again."""
    socket = folder / "w.sock"
    async with upstream() as up:
        wanted = lab.fleet(folder, url=f"unix:{socket}", **fleet)
        config = lab.config(folder, up.base, wanted)
        async with serving(wanted, socket) as (_, worker):
            states = [worker.state()]
            async with router(folder, config, KnownFleet(states)) as door:
                yield door, config, states, up


def settings_of(config: dict[str, Any], folder: Path) -> Any:
    return load_text(yaml.safe_dump(config), "router.yaml", folder=folder)


async def again(
    config: dict[str, Any], folder: Path, states: list[WorkerState], found: list[Recorded], **asked: Any
) -> list[Replay]:
    replayer = Replayer(settings_of(config, folder), states)
    try:
        return [await replayer.run(one, **asked) for one in found]
    finally:
        await replayer.close()


async def ask(door: Router, model: str, text: str = TEXTS[0], key: str = KEY, **more: Any) -> str:
    """The decision id of one answered request."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 6, "ignore_eos": True, **more}
    got = await door.post(model=model, key=key, **body)
    assert got.status == 200, got.raw
    return got.headers["x-twolane-decision"]


def mixed(number: int) -> dict[str, Any]:
    """Sampling of all sorts: greedy, seeded, unseeded, penalties, stops, streams."""
    draw = random.Random(number)
    asked: dict[str, Any] = {"max_tokens": draw.randrange(1, 6), "stream": draw.random() < 0.4}
    kind = number % 6
    if kind == 0:
        asked["temperature"] = 0
    elif kind == 1:
        asked |= {"temperature": 0.7, "seed": draw.randrange(10**6), "top_p": 0.9}
    elif kind == 2:
        asked |= {"temperature": 1.2}
    elif kind == 3:
        asked |= {"seed": number, "top_k": 20}
    elif kind == 4:
        asked |= {"frequency_penalty": 0.8, "presence_penalty": 0.3}
    else:
        asked |= {"stop": ["e", "st"], "repetition_penalty": 1.3, "min_p": 0.05, "ignore_eos": False}
    return asked


@pytest.mark.timeout(120)
async def test_two_hundred_requests_on_both_lanes_are_the_same_again(lab: Lab, tmp_path: Path) -> None:
    """Pairs, models alone and a relay, warm and cold, streamed and not, sampled in every way: token for token."""
    ids = []
    async with house(lab, tmp_path) as (door, config, states, _):
        for number in range(200):
            model = ("cache", "same", "alone", "relay", "cache")[number % 5]
            text = f"{TEXTS[number % 3]} {'Hour by hour. ' * (number % 9)}"
            asked = mixed(number)
            ids.append(await ask(door, model, text, **asked))
        async with asyncio.timeout(10):
            while (found := lines(tmp_path / "audit", ids)) is None:
                await asyncio.sleep(0.05)
        replays = await again(config, tmp_path, states, found)
    assert [r.id for r in replays if not r.identical] == []
    assert all(r.promised and r.tokens for r in replays)
    assert sum(f.run.reused_tokens > 0 for f in found if f.run) > 40
    assert sum(f.run.seed is not None for f in found if f.run) > 100
    assert {f.transport for f in found} == {"cache", "text"}


def lines(root: Path, ids: list[str]) -> list[Recorded] | None:
    """All of them, in one pass; None while one is not on disk yet."""
    first = next(iter(ids))
    try:
        whole = {one.id: one for one in [recorded.find(root, first), *recorded_all(root)]}
    except NothingToReplay:
        return None
    return [whole[id] for id in ids] if all(id in whole for id in ids) else None


def recorded_all(root: Path) -> list[Recorded]:
    known = {str(r.body["id"]) for r in audit_verify.records(root, "a") if r.body.get("kind") == "outcome"}
    one = recorded.find(root, next(iter(known)))
    found = [one]
    for deployment in ("cache", "same", "alone", "relay", "outside"):
        found += recorded.others(root, replace(one, deployment=deployment, id=""), 1000)
    return found


async def test_what_was_swapped_since_is_named(lab: Lab, tmp_path: Path) -> None:
    """A retrained fuser, another model, a worker that is gone: the cause, where it shows first, or that none runs."""
    async with house(lab, tmp_path) as (door, config, _, _):
        by_model = {m: await ask(door, m, temperature=0, max_tokens=8) for m in ("cache", "alone", "relay")}
    found = {m: recorded.find(tmp_path / "audit", id, "a") for m, id in by_model.items()}
    for change, expected in (
        ({"duo": "retrained"}, {"cache": "fuser_differs"}),
        ({"tiny": "swapped", "duo": "none"}, {"alone": "model_differs"}),
    ):
        other = tmp_path / "-".join(change)
        other.mkdir()
        async with house(lab, other, **change) as (_, _, now, _):
            for model, code in expected.items():
                [result] = await again(config, tmp_path, now, [found[model]])
                assert not result.identical
                assert result.cause is not None
                assert result.cause.code == code
                assert result.difference is not None
                assert result.difference.unit == "token"
    with pytest.raises(NothingToReplay) as nobody:
        await again(config, tmp_path, [], [found["cache"]])
    assert nobody.value.code == "no_worker"


async def test_the_first_difference_is_where_a_planted_one_is(lab: Lab, tmp_path: Path) -> None:
    """A token of the record that is not the one that comes: its place, both sides, and that nothing explains it."""
    async with house(lab, tmp_path) as (door, config, states, _):
        id = await ask(door, "cache", temperature=0, max_tokens=8)
        await door.app.parts.audit.control("look", "test", {}, "a")
        found = recorded.find(tmp_path / "audit", id)
        ids = found.tokens[0]
        planted = replace(found, tokens=((*ids[:3], ids[3] + 1, *ids[4:]),))
        [result] = await again(config, tmp_path, states, [planted])
    assert result.difference is not None
    assert (result.difference.unit, result.difference.position) == ("token", 3)
    assert result.difference.recorded.startswith(f"[{ids[3] + 1}]")
    assert result.difference.now.startswith(f"[{ids[3]}]")
    assert result.cause is not None
    assert result.cause.code == "unexplained"


async def test_an_upstream_is_asked_again_and_promises_nothing(lab: Lab, tmp_path: Path) -> None:
    """The same answer is called identical without a promise; another one is shown, and the cause says why."""
    async with house(lab, tmp_path) as (door, config, states, up):
        id = await ask(door, "outside")
        await door.app.parts.audit.control("look", "test", {}, "a")
        found = recorded.find(tmp_path / "audit", id)
        [same] = await again(config, tmp_path, states, [found])
        assert (same.identical, same.promised) == (True, False)

        async def other(_: Any) -> Any:
            return plain(200, {"id": "y", "choices": [{"index": 0, "message": {"content": "okay then"}}]})

        up.answers["up"] = other
        [differs] = await again(config, tmp_path, states, [found])
    assert differs.cause is not None
    assert differs.cause.code == "not_reproducible"
    assert differs.difference is not None
    assert (differs.difference.unit, differs.difference.position) == ("character", 2)


async def test_what_cannot_be_run_again_says_why(lab: Lab, tmp_path: Path) -> None:
    """No such record, texts kept as digests, texts erased, a refused request, a deployment that is gone."""
    async with house(lab, tmp_path) as (door, config, states, _):
        kept = await ask(door, "alone", temperature=0)
        hashed = await ask(door, "alone", key="sk-hashed-0123456789", temperature=0)
        refused = await door.post(model="alone", messages=[{"role": "user", "content": "x " * 9000}])
        assert refused.status == 400
    root = tmp_path / "audit"
    gone = replace(recorded.find(root, kept), deployment="gone")
    with pytest.raises(NothingToReplay) as unknown:
        await again(config, tmp_path, states, [gone])
    Custody(root, "a").erase("test", "a test")
    codes = [unknown.value.code]
    for id in ("dec_none", hashed, kept, refused.headers["x-twolane-decision"]):
        with pytest.raises(NothingToReplay) as refusal:
            recorded.find(root, id)
        codes.append(refusal.value.code)
    assert codes == ["unknown_deployment", "not_found", "no_content", "erased", "no_answer"]


async def test_the_command_shows_counterfactuals_beside_the_answer(lab: Lab, tmp_path: Path) -> None:
    """Over the running worker: exit status 0, four other answers with their agreement; nothing is stored for them."""
    async with house(lab, tmp_path) as (door, _, _, _):
        id = await ask(door, "cache", temperature=0)
        await ask(door, "cache", TEXTS[1])
        await door.app.parts.audit.control("look", "test", {}, "a")
        before = len(list(audit_verify.records(tmp_path / "audit", "a")))
        asked = ["audit", "replay", id, "--config", str(tmp_path / "router.yaml")]
        ran = await command(*asked, "--with", "receiver,relay,zero,shuffled", "--json")
        assert ran.status == 0, ran.err + ran.out
        result = json.loads(ran.out)
        shown = await command(*asked)
        assert len(list(audit_verify.records(tmp_path / "audit", "a"))) == before
    assert result["identical"] is True
    assert result["tokens"] == 6
    assert [entry["kind"] for entry in result["otherwise"]] == ["receiver", "relay", "zero", "shuffled"]
    assert all(entry["text"] and not entry["error"] for entry in result["otherwise"])
    assert result["otherwise"][1]["hint"]
    assert any(not entry["exact"] for entry in result["otherwise"])
    assert shown.out.startswith(f"{id}: identical (cache, 6 tokens)")


async def test_a_shuffled_sharer_reads_the_newest_text_that_differs_for_it(lab: Lab, tmp_path: Path) -> None:
    """A request that tells the sharer the same is passed over; where all others do, the reason says so."""
    other = {"messages": [{"role": "user", "content": TEXTS[1]}], "user": "first"}
    told = {"messages": [{"role": "user", "content": TEXTS[0]}]}
    # The same in other words of JSON: the sharer reads no name.
    alike = {"messages": [{"role": "user", "content": TEXTS[0], "name": "second"}]}
    async with house(lab, tmp_path) as (door, config, states, _):
        ids = [await ask(door, "cache", temperature=0, **body) for body in (other, told, alike)]
        await door.app.parts.audit.control("look", "test", {}, "a")
        found, second = recorded.find(tmp_path / "audit", ids[1]), recorded.find(tmp_path / "audit", ids[2])
        differing = recorded.others(tmp_path / "audit", found)
        assert [one.id for one in differing] == [ids[2], ids[0]]
        (with_both,) = await again(config, tmp_path, states, [found], kinds=("shuffled",), other=differing)
        (with_alike,) = await again(config, tmp_path, states, [found], kinds=("shuffled",), other=[second])
    assert with_both.otherwise[0].text
    assert not with_both.otherwise[0].error
    assert "something else" in with_alike.otherwise[0].error


async def test_a_worker_is_started_where_none_runs_and_known_to_nobody(lab: Lab, tmp_path: Path) -> None:
    """The command brings its own worker, which ends with it and leaves no KV; a wrong id exits with 1, a wrong
    counterfactual with 2."""
    async with house(lab, tmp_path) as (door, config, _, _):
        id = await ask(door, "same", temperature=0)
    file = tmp_path / "alone.yaml"
    file.write_text(yaml.safe_dump({**config, "workers": [{**config["workers"][0], "url": f"unix:{tmp_path}/none"}]}))
    assert await live.running(settings_of(yaml.safe_load(file.read_text()), tmp_path)) == []
    found = await command("audit", "replay", id, "--config", str(file), TWOLANE_STORE__DIR=str(tmp_path / "own"))
    assert found.status == 0, found.err + found.out
    assert not (tmp_path / "own").exists()
    assert (await command("audit", "replay", "dec_no", "--config", str(file))).status == 1
    assert (await command("audit", "replay", id, "--config", str(file), "--with", "x")).status == 2


OLD = Run(
    fingerprint="f", digests={"sharer": "s", "receiver": "r", "fuser": "u"}, numerics="torch 2, chunk 512", seed=7
)


@pytest.mark.parametrize(
    ("before", "now", "code"),
    [
        ({}, None, "not_reproducible"),
        ({}, {"digests": {"sharer": "x", "receiver": "r", "fuser": "u"}}, "sharer_differs"),
        ({}, {"digests": {"sharer": "s", "receiver": "r", "fuser": "x"}}, "fuser_differs"),
        ({}, {"fingerprint": "x"}, "pair_differs"),
        ({}, {"numerics": "torch 3, chunk 512"}, "numerics_differ"),
        ({"seed": None}, {"seed": 9}, "no_seed"),
        ({"reused_tokens": 9, "numerics": "kv int8"}, {"numerics": "kv int8"}, "lossy_kv"),
        ({"beside": 3}, {}, "answers_beside"),
        ({}, {}, "unexplained"),
    ],
)
def test_the_cause_is_the_most_telling_difference(
    before: dict[str, Any], now: dict[str, Any] | None, code: str
) -> None:
    """One row for each cause, over otherwise equal accounts; the detail names both sides."""
    old = with_(OLD, before)
    found = Recorded("dec_1", "a", "/chat/completions", "d", "cache", {}, {}, run=old)
    cause = why(found, None if now is None else with_(OLD, now))
    assert cause.code == code
    if code == "numerics_differ":
        assert cause.detail == "recorded on torch 2, now on torch 3"


def with_(run: Run, changes: dict[str, Any]) -> Run:
    import msgspec

    return msgspec.structs.replace(run, **changes)


def test_a_guarded_answer_is_not_blamed_on_a_model() -> None:
    """What a guardrail may have rewritten before it was recorded differs for that reason."""
    found = Recorded("dec_1", "a", "/chat/completions", "d", "cache", {}, {}, run=OLD, guardrails=("mask",))
    assert why(found, OLD) == Cause("guarded", "mask may have changed the answer before it was recorded")


def test_a_hint_that_differs_comes_before_everything_else() -> None:
    """What the receiver read was another text: nothing else needs to be looked at."""
    found = Recorded("dec_1", "a", "/chat/completions", "d", "text", {}, {}, run=OLD, hint="one")
    assert why(found, OLD, hint="two").code == "hint_differs"


@pytest.mark.parametrize(
    ("before", "after", "ids", "now", "expected"),
    [
        (["abc"], ["abc"], [(1, 2)], [(1, 2)], None),
        (["abc"], ["abd"], [(1, 2)], [(1, 3)], ("token", 0, 1)),
        (["abc"], ["abc"], [(1, 2)], [(1, 2, 3)], ("token", 0, 2)),
        (["abc"], ["abd"], [], [], ("character", 0, 2)),
        (["abc", "x"], ["abc"], [], [], ("character", 1, 0)),
        (["ab", "cd"], ["ab", "ce"], [(1,), (2, 3)], [(1,), (2, 4)], ("token", 1, 1)),
    ],
)
def test_the_first_difference(before: Any, after: Any, ids: Any, now: Any, expected: Any) -> None:
    """By token where both are known, else by character; a missing choice differs from its beginning."""
    found = first_difference(before, after, ids, now)
    assert (None if found is None else (found.unit, found.choice, found.position)) == expected


@pytest.mark.parametrize(
    ("one", "other", "same", "f1"),
    [
        ("Paris", " Paris\n", True, 1.0),
        ("The capital is Paris.", "paris is the capital", False, 1.0),
        ("Paris", "London", False, 0.0),
        ("a b c d", "a b", False, 2 / 3),
        ("北京", "北海", False, 0.5),
        ("", "", True, 1.0),
        ("", "x", False, 0.0),
        ("!", "?", False, 0.0),
    ],
)
def test_agreement_of_two_texts(one: str, other: str, same: bool, f1: float) -> None:
    """Exact but for blanks; F1 over words, character by character where words have no blanks; symmetric."""
    assert exact(one, other) is same
    assert token_f1(one, other) == pytest.approx(f1)
    assert token_f1(other, one) == pytest.approx(f1)


def test_texts_of_answers() -> None:
    """Chats, completions and responses have texts; embeddings have none and are refused."""
    assert texts_of({"choices": [{"message": {"content": "a"}}, {"text": "b"}]}) == ["a", "b"]
    assert texts_of({"output": [{"content": [{"text": "c"}, {"text": "d"}]}]}) == ["cd"]
    with pytest.raises(NothingToReplay, match="no text"):
        texts_of({"data": []})
