"""Names that lead to a model group in other ways than being its own: wildcards and aliases, through the door."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from router.settings import ConfigError, load_text
from router.wildcards import MOST, filled, narrowest, parts
from tests.router.gateway import KEY, Seen, Upstream, deployment, failure, router, upstream


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


async def fails(seen: Seen) -> web.StreamResponse:
    return failure(503)


def group(name: str, up: Upstream, model: str) -> dict[str, Any]:
    return {**deployment("m", up, model=model), "model_name": name}


@given(pattern=st.text("ab*", max_size=6), name=st.text("ab", max_size=10))
def test_stars_stand_for_what_a_regular_expression_says(pattern: str, name: str) -> None:
    """A name fits as LiteLLM's patterns fit, and each star stands for the same, the first as long as may be."""
    wanted = re.fullmatch(re.escape(pattern).replace(r"\*", "(.*)"), name)
    found = parts(pattern, name)
    assert found == (None if wanted is None else wanted.groups())
    if found:
        assert filled(pattern, pattern, name) == name


def test_no_name_takes_long() -> None:
    """A name made to be hard is judged at once, where a regular expression's search would not end in a lifetime."""
    assert parts("*a" * 20 + "*b", "a" * (MOST - 1) + "c") is None
    assert parts("*", "a" * (MOST + 1)) is None


@pytest.mark.parametrize(
    ("name", "model", "asked", "sent"),
    [
        ("openai/*", "*", "openai/gpt-x", "gpt-x"),
        ("my-*-mini", "up-*-x", "my-foo-mini", "up-foo-x"),
        ("a/*/b/*", "u/*/v/*", "a/1/b/2/b/3", "u/1/b/2/v/3"),
        ("*lla*", "llama*", "odd-llama-3", "odd-llama-3"),
        ("*", "one", "anything", "one"),
        ("a*", "x*y*", "ab", "xby*"),
    ],
)
async def test_wildcards_serve(name: str, model: str, asked: str, sent: str, tmp_path: Path, up: Upstream) -> None:
    """A name that fits a wildcard is served, and its upstream gets what the stars stood for; it can be looked up, and
    a name that fits nothing is not found."""
    other = group("plain", up, "plain")
    async with router(tmp_path, {"model_list": [group(name, up, model), other]}) as door:
        assert (await door.post(model=asked)).status == 200
        assert up.seen[0].body["model"] == sent
        assert (await door.get(f"/v1/models/{asked}")).json["id"] == asked
        listed = [entry["id"] for entry in (await door.get("/v1/models")).json["data"]]
        assert listed == ["plain"]
        if name != "*":
            assert (await door.post(model="zzz")).status == 404
            assert (await door.get("/v1/models/zzz")).status == 404


def test_the_narrowest_goes_first() -> None:
    """Of several wildcards the one that says most is asked first."""
    assert narrowest(["*", "plain", "a/*", "a/*/b/*"]) == ("a/*/b/*", "a/*", "*")


@pytest.mark.parametrize(
    ("aliases", "asked", "sent"),
    [
        ({"a": "real"}, "a", "real"),
        ({"a": "b", "b": "c", "c": "real"}, "a", "real"),
        ({"a": {"model": "b", "hidden": True}, "b": "real"}, "a", "real"),
        ({"a": "real", "real": "other"}, "a", "real"),
        ({"a": "real", "real": "other"}, "real", "other"),
        ({"a": "openai/foo"}, "a", "foo"),
        ({"a": "b", "b": "openai/foo"}, "a", "foo"),
        ({"real": "real"}, "real", "real"),
    ],
)
async def test_aliases_lead_on(aliases: dict[str, Any], asked: str, sent: str, tmp_path: Path, up: Upstream) -> None:
    """An alias may stand for a group, for a name that fits a wildcard, or another alias; a group on the way holds."""
    models = [group("real", up, "real"), group("other", up, "other"), group("openai/*", up, "*")]
    async with router(tmp_path, {"model_list": models, "router_settings": {"model_group_alias": aliases}}) as door:
        assert (await door.post(model=asked)).status == 200
        assert up.seen[0].body["model"] == sent


def test_aliases_that_circle_stop_the_start() -> None:
    """An alias that leads back to itself is an error that shows the circle."""
    with pytest.raises(ConfigError, match=r"model_group_alias goes round in a circle: a -> b -> a"):
        load_text("router_settings: {model_group_alias: {a: b, b: a}}")


@pytest.mark.parametrize(
    ("asked", "key", "runs"),
    [
        ("gpt-4", "gpt-4", "spare"),
        ("gpt-4", "real", "spare"),
        ("openai/x", "openai/x", "spare"),
        ("openai/x", "openai/*", "spare"),
        ("openai/y", "openai/x", None),
        ("openai/y", "*", "spare"),
    ],
)
async def test_fallbacks_are_found_by_the_name_that_was_asked(
    asked: str, key: str, runs: str | None, tmp_path: Path, up: Upstream
) -> None:
    """Fallbacks may be written for an alias, for a name that fits a wildcard, and for the group behind either."""
    up.answers |= {"real": fails, "x": fails, "y": fails}
    models = [group("real", up, "real"), group("openai/*", up, "*"), group("spare", up, "spare")]
    settings = {"num_retries": 0, "model_group_alias": {"gpt-4": "real"}, "fallbacks": [{key: ["spare"]}]}
    async with router(tmp_path, {"model_list": models, "router_settings": settings}) as door:
        got = await door.post(model=asked)
    assert got.status == (200 if runs else 503)
    assert up.count("spare") == (1 if runs else 0)


async def test_an_aliass_own_fallbacks_go_first(tmp_path: Path, up: Upstream) -> None:
    """What is written for the alias holds before what is written for its group."""
    up.answers["real"] = fails
    models = [group(name, up, name) for name in ("real", "b", "c")]
    settings = {
        "num_retries": 0,
        "model_group_alias": {"gpt-4": "real"},
        "fallbacks": [{"real": ["b"]}, {"gpt-4": ["c"]}],
    }
    async with router(tmp_path, {"model_list": models, "router_settings": settings}) as door:
        assert (await door.post(model="gpt-4")).status == 200
        assert (up.count("b"), up.count("c")) == (0, 1)
        assert (await door.post(model="real")).status == 200
        assert (up.count("b"), up.count("c")) == (1, 1)


async def test_an_aliass_own_retries_go_first(tmp_path: Path, up: Upstream) -> None:
    """A retry policy may be written for an alias too."""
    up.answers["real"] = fails
    policy = {"gpt-4": {"DefaultRetries": 1}, "real": {"DefaultRetries": 0}}
    settings = {"num_retries": 0, "model_group_alias": {"gpt-4": "real"}, "model_group_retry_policy": policy}
    async with router(tmp_path, {"model_list": [group("real", up, "real")], "router_settings": settings}) as door:
        assert (await door.post(model="gpt-4")).status == 503
        assert up.count("real") == 2
        assert (await door.post(model="real")).status == 503
        assert up.count("real") == 3


async def test_a_tenant_may_use_what_its_policy_names(tmp_path: Path, up: Upstream) -> None:
    """A policy that lists an alias, or a name that fits a wildcard, allows that name and no other of the group; both
    are listed and can be looked up."""
    models = [group("real", up, "real"), group("openai/*", up, "*")]
    tenants = [{"name": "a", "key": KEY, "models": ["gpt-4", "openai/x", "gone"]}]
    settings = {"model_group_alias": {"gpt-4": "real"}}
    async with router(tmp_path, {"model_list": models, "router_settings": settings, "tenants": tenants}) as door:
        asked = {name: (await door.post(model=name)).status for name in ("gpt-4", "real", "openai/x", "openai/y")}
        assert asked == {"gpt-4": 200, "real": 403, "openai/x": 200, "openai/y": 403}
        listed = [entry["id"] for entry in (await door.get("/v1/models")).json["data"]]
        assert listed == ["gpt-4", "openai/x"]
        found = {name: (await door.get(f"/v1/models/{name}")).status for name in (*asked, "gone")}
        assert found == {"gpt-4": 200, "real": 404, "openai/x": 200, "openai/y": 404, "gone": 404}
        groups = {entry["model_name"] for entry in (await door.get("/v1/model/info")).json["data"]}
        assert groups == {"real", "openai/*"}
