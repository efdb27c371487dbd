"""Money is reserved before it is spent, for all that a price may count: requests sent together keep to a budget."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from router.call import Usage
from router.form import Form
from router.price_table import listed
from router.prices import FREE, KINDS, Asked, Picture, Price, written
from router.settings import load_text
from tests.router.gateway import KEY, Router, Seen, chunk, deployment, failure, plain, upstream
from tests.router.test_passthrough import Up, ask, door, entry, serving

TOGETHER = 8
SEARCH = {"search_context_cost_per_query": {"search_context_size_medium": 1.0}}
IMAGES = {"output_cost_per_image": 0.5}
DRAWN = {"input_cost_per_token": 1e-6, "output_cost_per_image_token": 0.5 / 6240}


@pytest.fixture
async def up() -> AsyncIterator[Up]:
    async with serving() as state:
        yield state


def form(**fields: str) -> aiohttp.FormData:
    data = aiohttp.FormData()
    for name, value in fields.items():
        data.add_field(name, value)
    data.add_field("file", b"x" * 4000, filename="a.mp3")
    return data


async def count_ran(to: Router, up: Up, path: str, **options: Any) -> int:
    """How many of several requests sent together reached the upstream; the others are refused for the budget."""
    release = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return web.json_response({"data": [{}], "usage": {"input_tokens": 1, "output_tokens": 1}})

    up.answer = slow
    asked = [asyncio.create_task(ask(to, "POST", f"/v1/{path}", **options)) for _ in range(TOGETHER)]
    async with asyncio.timeout(5):
        while len(up.got) + sum(task.done() for task in asked) < TOGETHER:
            await asyncio.sleep(0.01)
    release.set()
    statuses = [status for status, _, _ in await asyncio.gather(*asked)]
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) == len(up.got)
    return len(up.got)


@pytest.mark.parametrize(
    ("path", "prices", "options", "budget", "ran"),
    [
        ("images/generations", IMAGES, {"json": {"prompt": "a", "n": 2}}, 3.0, 3),
        ("images/generations", IMAGES, {"json": {"prompt": "a"}}, 3.0, 6),
        ("images/generations", {"output_cost_per_pixel": 1e-6}, {"json": {"size": "1000x1000"}}, 3.0, 3),
        ("images/generations", DRAWN, {"json": {"prompt": "a", "n": 2}}, 3.1, 3),
        ("images/edits", IMAGES, {"form": {"n": "2", "prompt": "a"}}, 3.0, 3),
        ("images/edits", IMAGES, {"form": {"prompt": "a"}}, 3.0, 6),
        ("images/edits", IMAGES, {"form": {"n": "2", "prompt": "a", "N": "9"}}, 30.0, 6),
        ("audio/speech", {"input_cost_per_character": 0.25}, {"json": {"input": "hör!"}}, 3.0, 3),
        ("audio/speech", {"output_cost_per_second": 2.5}, {"json": {"input": "hör!"}}, 3.0, 3),
        ("audio/transcriptions", {"input_cost_per_second": 1.0}, {"form": {"language": "ko"}}, 4.0, 3),
        ("audio/transcriptions", {"input_cost_per_second": 0.1}, {"form": {"seconds": "10"}}, 3.0, 3),
        ("responses", SEARCH, {"json": {"input": "a", "tools": [{"type": "web_search"}]}}, 3.1, 3),
        ("responses", SEARCH, {"json": {"input": "a", "tools": [{"type": "function", "name": "f"}]}}, 3.1, TOGETHER),
        ("chat/completions", SEARCH, {"json": {"messages": [], "web_search_options": {}}}, 3.1, 3),
        ("embeddings", {"input_cost_per_request": 1.0}, {"json": {"input": "a"}}, 3.0, 3),
        ("messages", {"output_cost_per_token": 0.1}, {"json": {"max_tokens": 10}}, 3.0, 3),
        ("messages", {"input_cost_per_token": 0.1}, {"json": {"max_tokens": 1, "system": "x" * 40}}, 3.5, 3),
    ],
)
@pytest.mark.parametrize("whose", ["tenant", "deployment"])
async def test_requests_sent_together_keep_to_the_budget(
    whose: str,
    path: str,
    prices: dict[str, Any],
    options: dict[str, Any],
    budget: float,
    ran: int,
    tmp_path: Path,
    up: Up,
) -> None:
    """Images, pixels, seconds and characters that a request asks for are reserved before it runs: of a tenant's money
    and of a deployment's own."""
    limit = {"max_budget": budget}
    tenants = [{"name": "a", "key": KEY, **(limit if whose == "tenant" else {})}]
    one = entry("m", up.base, **prices, **(limit if whose == "deployment" else {}))
    async with door(tmp_path, one, tenants=tenants, router_settings={"num_retries": 0}) as to:
        sent: dict[str, Any] = {}
        if "json" in options:
            sent = {"json": {"model": "m", **options["json"]}}
        else:
            body = form(model="m", **options["form"])()
            sent = {"data": await written_out(body), "headers": {"content-type": body.headers["content-type"]}}
        assert await count_ran(to, up, path, **sent) == ran


async def written_out(body: Any) -> bytes:
    """The bytes of a form, to be sent several times."""
    parts: list[bytes] = []

    class Into:
        async def write(self, data: bytes) -> None:
            parts.append(bytes(data))

    await body.write(Into())
    return b"".join(parts)


async def test_several_answers_are_reserved(tmp_path: Path) -> None:
    """`n` answers, `best_of` and several prompts cost, and count towards tokens, as often as they are written."""
    bodies: list[tuple[str, dict[str, Any], int]] = [
        ("chat/completions", {"max_tokens": 10}, 10),
        ("chat/completions", {"n": 4, "max_tokens": 10}, 40),
        ("completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 10}, 40),
        ("completions", {"prompt": [1, 2, 3], "max_tokens": 10}, 10),
        ("completions", {"prompt": [[1], [2]], "best_of": 3, "max_tokens": 10}, 60),
    ]
    async with upstream() as up:
        held, go = asyncio.Semaphore(0), asyncio.Event()

        async def slow(seen: Seen) -> web.StreamResponse:
            held.release()
            await go.wait()
            return plain()

        up.answers["m"] = slow
        one = deployment("m", up, input_cost_per_token=0.0, output_cost_per_token=1.0)
        tenants = [{"name": "a", "key": KEY, "max_budget": 1000.0, "tpm_limit": 10**6}]
        async with door(tmp_path, one, tenants=tenants) as to:
            for path, body, tokens in bodies:
                go.clear()
                window = to.app.parts.limits._windows.get("a")
                before = (window.spent, sum(c.tokens for c in window.buckets.values())) if window else (0.0, 0)
                asked = asyncio.create_task(to.post(f"/v1/{path}", model="m", **body))
                await held.acquire()
                window = to.app.parts.limits._windows["a"]
                counted = sum(c.tokens for c in window.buckets.values())
                assert window.spent - before[0] == pytest.approx(tokens), body
                assert 0 < counted - before[1] - tokens < 20, body
                go.set()
                await asked


async def test_service_tiers_are_billed_and_count_towards_a_deployments_own_budget(tmp_path: Path) -> None:
    """What a request cost through its service tier is what a deployment's own budget is charged, not its list price."""
    async with upstream() as up:
        table, prices = tmp_path / "prices.json", {"output_cost_per_token": 0.1, "output_cost_per_token_priority": 0.2}
        table.write_text(json.dumps({"m": {**prices, "litellm_provider": "openai"}}))
        usage = {"prompt_tokens": 1, "completion_tokens": 10}

        async def says(seen: Seen) -> web.StreamResponse:
            tier = {"service_tier": seen.body["service_tier"]} if "service_tier" in seen.body else {}
            if seen.body.get("stream"):
                return await seen.stream(chunk("a", "stop"), {"choices": [], "usage": usage, **tier})
            return plain(200, {"choices": [], "usage": usage, **tier})

        up.answers["m"] = says
        config = {"prices": str(table)}
        async with door(tmp_path, deployment("m", up, max_budget=5.5), **config) as to:
            usd = []
            for body in ({}, {"service_tier": "priority"}, {"service_tier": "priority", "stream": True}):
                got = await to.post(model="m", max_tokens=10, **body)
                told = (await to.get(f"/v1/decisions/{got.headers['x-twolane-decision']}")).json["happened"]
                usd.append(told["cost"])
            assert usd == pytest.approx([1.0, 2.0, 2.0])
            refused = await to.post(model="m", max_tokens=10)
            assert refused.error["code"] == "deployment_limit"


TABLE: dict[str, Any] = {
    "gpt-image-1": {
        "input_cost_per_token": 5e-6,
        "input_cost_per_image_token": 1e-5,
        "output_cost_per_image_token": 4e-5,
        "litellm_provider": "openai",
    },
    "low/1024-x-1024/gpt-image-1": {"input_cost_per_image": 0.011, "litellm_provider": "openai"},
    "high/1024-x-1024/gpt-image-1": {
        "input_cost_per_image": 0.167,
        "input_cost_per_pixel": 1.0,
        "litellm_provider": "openai",
    },
    "high/1024-x-1536/gpt-image-1": {"input_cost_per_image": 0.25, "litellm_provider": "openai"},
    "1024-x-1024/dall-e-3": {"output_cost_per_image": 0.04, "litellm_provider": "openai"},
    "hd/1024-x-1792/dall-e-3": {"output_cost_per_image": 0.12, "litellm_provider": "openai"},
    "azure/hd/1024-x-1024/dall-e-3": {"input_cost_per_pixel": 1e-7, "litellm_provider": "azure"},
    "azure/1024-x-1024/dall-e-3": {"input_cost_per_pixel": 1e-8, "litellm_provider": "azure"},
    "low/1024-x-1024/grok-image": {"input_cost_per_image": 0.04, "litellm_provider": "xai"},
    "xai/grok-image": {"input_cost_per_image": 0.06, "litellm_provider": "xai"},
    "max-x-max/50-steps/odd": {"output_cost_per_image": 9.0, "litellm_provider": "openai"},
    "openai/sora": {"output_cost_per_video_per_second": 0.1, "litellm_provider": "openai"},
    "fal_ai/low/1024-x-1024/openai/gpt-image-1": {"output_cost_per_image": 7.0, "litellm_provider": "fal_ai"},
}


def priced(model: str, folder: Path, info: dict[str, Any] | None = None, **params: Any) -> Price:
    path = folder / "prices.json"
    path.write_text(json.dumps(TABLE))
    one = {"model_name": "m", "litellm_params": {"model": model, **params}, "model_info": info or {}}
    return load_text(json.dumps({"prices": str(path), "model_list": [one]})).model_list[0].price


@pytest.mark.parametrize(
    ("model", "quality", "size", "usd", "reserved"),
    [
        ("openai/gpt-image-1", "high", "1024x1024", 0.167, 0.167),
        ("gpt-image-1", "low", "1024x1024", 0.011, 0.011),
        ("openai/gpt-image-1", "high", "1024x1536", 0.25, 0.25),
        ("openai/gpt-image-1", "high", "", 0.167, 0.25),
        ("openai/gpt-image-1", "", "1024x1024", None, 0.167),
        ("openai/gpt-image-1", "high", "512x512", None, 0.25),
        ("openai/gpt-image-1", "huge", "1024x1024", None, 0.25),
        ("openai/dall-e-3", "", "", 0.04, 0.12),
        ("openai/dall-e-3", "standard", "1024x1024", 0.04, 0.12),
        ("openai/dall-e-3", "hd", "1024x1792", 0.12, 0.12),
        ("xai/grok-image", "low", "1024x1024", 0.04, 0.04),
        ("xai/grok-image", "", "2048x2048", 0.06, 0.06),
        ("openai/odd", "", "", 0.0, 0.0),
    ],
)
def test_images_are_looked_up_by_quality_and_size(
    model: str, quality: str, size: str, usd: float | None, reserved: float, tmp_path: Path
) -> None:
    """The table's names of quality and size price an image where no tokens were told; what it does not say is not
    known, and then the dearest that may be meant is reserved."""
    price = priced(model, tmp_path)
    bill = price.bill(Usage(counted={"images": 2.0}, image=(quality, size)))
    assert bill == (None if usd is None else pytest.approx(2 * usd))
    asked = Asked(counted={"images": 2.0}, quality=quality, size=size)
    assert price.reserve(asked) == pytest.approx(2 * reserved)


def test_what_the_table_cannot_tell_is_unknown_and_what_is_written_wins(tmp_path: Path) -> None:
    """A model priced by what nobody counts here is not free; another provider's sizes are not ours; a price by image
    that is written stands for all sizes."""
    assert priced("openai/sora", tmp_path).bill(Usage(5, 5, known=True)) is None
    assert priced("openai/nobody", tmp_path).bill(Usage(5, 5, known=True)) == 0.0
    azure = priced("openai/mine", tmp_path, {"base_model": "azure/dall-e-3"})
    assert azure.pictures == (Picture("hd", "1024x1024", 2**20 * 1e-7), Picture("", "1024x1024", 2**20 * 1e-8))
    flat = priced("openai/dall-e-3", tmp_path, output_cost_per_image=0.01)
    assert flat.bill(Usage(counted={"images": 3.0}, image=("hd", "1024x1792"))) == pytest.approx(0.03)


async def test_image_tokens_are_an_images(tmp_path: Path, up: Up) -> None:
    """Tokens of an answer with images cost what an image's do, though the answer does not name their kind; one that
    tells none costs what its quality and size do, as the answer says them."""
    answers: list[dict[str, Any]] = [
        {"data": [{}], "usage": {"input_tokens": 10, "output_tokens": 100}},
        {"data": [{}], "quality": "high", "size": "1024x1536"},
    ]

    async def says(request: web.Request) -> web.StreamResponse:
        return web.json_response(answers[len(up.got) - 1])

    up.answer = says
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(TABLE))
    one = entry("m", up.base)
    one["litellm_params"]["model"] = "openai/gpt-image-1"
    async with door(tmp_path, one, prices=str(path)) as to:
        usd = []
        for _ in answers:
            got = await to.post("/v1/images/generations", model="m", prompt="a", quality="auto")
            usd.append(float(got.headers["x-litellm-response-cost"]))
    assert usd == pytest.approx([10 * 5e-6 + 100 * 4e-5, 0.25])


def test_tiers_of_the_table(tmp_path: Path) -> None:
    """A service tier's prices hold for what was asked or answered in it, longer prompts included; one without prices
    of its own costs what all do."""
    path = tmp_path / "prices.json"
    entry = {"input_cost_per_token": 1.0, "input_cost_per_token_flex": 0.5, "input_cost_per_token_priority": 2.0}
    entry |= {"input_cost_per_token_above_1k_tokens": 3.0, "input_cost_per_token_above_1k_tokens_priority": 6.0}
    path.write_text(json.dumps({"m": entry}))
    price = listed(path, [("m", None)])[("m", None)]
    for tier, short, long in ((None, 1, 3), ("flex", 0.5, 3), ("priority", 2, 6), ("default", 1, 3), ("scale", 1, 3)):
        assert price.bill(Usage(1000, known=True, tier=tier)) == pytest.approx(1000 * short), tier
        assert price.bill(Usage(2000, known=True, tier=tier)) == pytest.approx(2000 * long), tier
        assert price.reserve(Asked(prompt_tokens=2000, tier=tier or "")) == pytest.approx(2000 * long)


@given(
    prices=st.dictionaries(st.sampled_from(["input_cost_per_token", "output_cost_per_token", *KINDS]), st.floats(0, 1)),
    counted=st.dictionaries(st.sampled_from([*KINDS.values()]), st.integers(0, 100)),
    prompt=st.integers(0, 1000),
    out=st.integers(0, 1000),
)
def test_no_bill_is_above_what_was_reserved(
    prices: dict[str, float], counted: dict[str, int], prompt: int, out: int
) -> None:
    """An answer within what its request allows, of whatever kinds of tokens, costs no more than was reserved for it."""
    price = written(prices, FREE)
    counts: dict[str, float] = dict(counted)
    bill = price.bill(Usage(prompt, out, known=True, counted=counts))
    reserved = price.reserve(Asked(prompt, out, frozenset(KINDS.values())))
    assert bill is not None
    assert bill <= reserved * (1 + 1e-9) + 1e-9


@given(
    fields=st.lists(
        st.tuples(st.sampled_from(["n", "size", "N", "other", "quality"]), st.text(max_size=90)), max_size=5
    ),
    cuts=st.lists(st.integers(1, 40), max_size=40),
)
def test_a_forms_short_fields_are_read_on_their_way(fields: list[tuple[str, str]], cuts: list[int]) -> None:
    """However a form is cut, it passes unchanged, and of a short field that stands in it once the value is known."""
    parts = [
        f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n'.encode()
        + value.encode(errors="replace").replace(b"\n--b", b"")
        + b"\r\n"
        for name, value in fields
    ]
    body = b"".join(parts) + b"--b--\r\n"
    form = Form(b"b", lambda name: name)
    out, at = b"", 0
    for cut in [*cuts, len(body)]:
        out += form.feed(body[at : at + cut])
        at += cut
    form.finish()
    assert out == body
    for name in ("n", "size", "quality"):
        said = [value.encode(errors="replace").decode() for at, value in fields if at.lower() == name]
        if len(said) == 1 and len(said[0].encode()) < 60 and "\n--b" not in said[0]:
            assert form.told[name] == said[0]
        if len(said) != 1:
            assert form.told.get(name, "") in ("", *said)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"max_tokens": -(10**9)}, 256),
        ({"max_tokens": -1}, 256),
        ({"max_tokens": 10, "n": -(10**9)}, 10),
        ({"max_tokens": 10, "max_completion_tokens": 1}, 10),
        ({"max_tokens": -1, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 0}, 0),
    ],
)
async def test_odd_bounds_give_nothing_back(body: dict[str, Any], tokens: int, tmp_path: Path) -> None:
    """A bound below zero reserves like none, of several the largest is reserved, and nothing makes room for others."""
    async with upstream() as up:
        came, go = asyncio.Event(), asyncio.Event()

        async def slow(seen: Seen) -> web.StreamResponse:
            came.set()
            await go.wait()
            return plain()

        up.answers["m"] = slow
        one = deployment("m", up, input_cost_per_token=0.0, output_cost_per_token=1.0)
        tenants = [{"name": "a", "key": KEY, "max_budget": 1000.0, "tpm_limit": 10**6}]
        async with door(tmp_path, one, tenants=tenants) as to:
            asked = asyncio.create_task(to.post(model="m", **body))
            await came.wait()
            window = to.app.parts.limits._windows["a"]
            assert window.spent == tokens
            assert all(counts.tokens >= 0 for counts in window.buckets.values())
            go.set()
            await asked


@pytest.mark.parametrize("body", [{"max_tokens": 10**30}, {"max_tokens": 10**30, "n": 10**30}])
async def test_bounds_beyond_measure(body: dict[str, Any], tmp_path: Path) -> None:
    """What no budget has room for is refused by it, and what has no budget runs."""
    async with upstream() as up:
        one = deployment("m", up, input_cost_per_token=0.0, output_cost_per_token=1.0)
        tenants = [{"name": "a", "key": KEY, "max_budget": 1000.0}, {"name": "b", "key": "sk-b", "rpm_limit": 5}]
        async with door(tmp_path, one, tenants=tenants) as to:
            assert (await to.post(model="m", **body)).error["code"] == "insufficient_quota"
            assert (await to.post(model="m", key="sk-b", **body)).status == 200


async def test_wildcards_are_priced_by_the_model_that_is_asked_for(tmp_path: Path) -> None:
    """A name that fits a wildcard costs what the table says of it, reserved and billed, through an alias too; one that
    the table does not have costs nothing, and what is written holds for all."""
    table = tmp_path / "prices.json"
    provider = {"litellm_provider": "openai"}
    table.write_text(
        json.dumps(
            {"dear": {"output_cost_per_token": 0.5, **provider}, "cheap": {"output_cost_per_token": 0.1, **provider}}
        )
    )
    async with upstream() as up:
        wild = {**deployment("w", up, model="*"), "model_name": "w/*"}
        flat = {**deployment("f", up, model="*", output_cost_per_token=0.25), "model_name": "f/*"}
        settings = {"model_group_alias": {"best": "w/dear"}}
        tenants = [{"name": "a", "key": KEY, "max_budget": 6.0}]
        config = {"prices": str(table), "router_settings": settings, "tenants": tenants}
        async with door(tmp_path, wild, flat, **config) as to:
            usd = []
            for name in ("w/dear", "w/cheap", "w/other", "best", "f/dear"):
                got = await to.post(model=name, max_tokens=2)
                usd.append(float(got.headers["x-litellm-response-cost"]))
                told = (await to.get(f"/v1/decisions/{got.headers['x-twolane-decision']}")).json
                assert told["happened"]["cost"] == (pytest.approx(usd[-1]) if usd[-1] else None)
            assert usd == pytest.approx([1.0, 0.2, 0.0, 1.0, 0.5])
            asked = up.count("dear")
            assert (await to.post(model="w/dear", max_tokens=100)).status == 200, "such answers usually have two tokens"
            refused = [(await to.post(model=name, max_tokens=100, n=9)).status for name in ("w/dear", "best")]
            assert refused == [429, 429]
            assert (await to.post(model="w/other", max_tokens=100, n=9)).status == 200
            assert up.count("dear") == asked + 1


async def test_a_fallback_to_a_wildcards_name_is_reserved_and_billed(tmp_path: Path) -> None:
    """A fallback group that is a wildcard's name costs what that model does: where the budget has no room it is not
    asked, and where it has, it is billed."""
    table = tmp_path / "prices.json"
    table.write_text(json.dumps({"dear": {"output_cost_per_token": 0.5, "litellm_provider": "openai"}}))

    async def fails(seen: Seen) -> web.StreamResponse:
        return failure(503)

    async with upstream() as up:
        up.answers["m"] = fails
        wild = {**deployment("w", up, model="*"), "model_name": "w/*"}
        config = {
            "prices": str(table),
            "router_settings": {"num_retries": 0, "fallbacks": [{"m": ["w/dear"]}]},
            "tenants": [{"name": "a", "key": KEY, "max_budget": 2.0}],
        }
        async with door(tmp_path, deployment("m", up), wild, **config) as to:
            got = await to.post(model="m", max_tokens=3)
            assert float(got.headers["x-litellm-response-cost"]) == pytest.approx(1.0)
            refused = await to.post(model="m", max_tokens=10, n=5)
            assert refused.error["code"] == "budget_exceeded"
            assert up.count("dear") == 1
