"""Prices: LiteLLM's table read as data, what the configuration says over it, and what a caller is told."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.call import Usage
from router.price_table import listed, table_path
from router.prices import KINDS, NAMES, SEARCHES, TIERS, Price, written
from router.settings import ConfigError, load_text
from tests.router.gateway import Seen, Upstream, chunk, deployment, plain, router, upstream

TABLE = {
    "sample_spec": {"input_cost_per_token": 0.0, "litellm_provider": "one of many"},
    "gpt-small": {"input_cost_per_token": 1e-6, "output_cost_per_token": 2e-6, "litellm_provider": "openai"},
    "claude-x": {"input_cost_per_token": 3e-6, "output_cost_per_token": 9e-6, "litellm_provider": "anthropic"},
    "groq/llama": {"input_cost_per_token": 4e-6, "output_cost_per_token": 5e-6, "litellm_provider": "groq"},
    "cached": {
        "input_cost_per_token": 1e-6,
        "output_cost_per_token": 2e-6,
        "cache_read_input_token_cost": 1e-7,
        "litellm_provider": "openai",
    },
    "long": {
        "input_cost_per_token": 1e-6,
        "output_cost_per_token": 2e-6,
        "input_cost_per_token_above_32k_tokens": 2e-6,
        "input_cost_per_token_above_256k_tokens": 4e-6,
        "output_cost_per_token_above_256k_tokens": 8e-6,
        "input_cost_per_token_above_256k_tokens_priority": 1.0,
        "litellm_provider": "openai",
    },
}


def config(entry: dict[str, object], table: Path, info: dict[str, object] | None = None) -> str:
    return json.dumps(
        {"prices": str(table), "model_list": [{"model_name": "m", "litellm_params": entry, "model_info": info or {}}]}
    )


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(TABLE))
    return path


@pytest.mark.parametrize(
    ("entry", "info", "price"),
    [
        ({"model": "openai/gpt-small"}, {}, Price(1e-6, 2e-6)),
        ({"model": "gpt-small", "custom_llm_provider": "openai"}, {}, Price(1e-6, 2e-6)),
        ({"model": "gpt-small", "api_base": "http://here/v1"}, {}, Price(1e-6, 2e-6)),
        ({"model": "anthropic/claude-x"}, {}, Price(3e-6, 9e-6)),
        ({"model": "groq/llama"}, {}, Price(4e-6, 5e-6)),
        ({"model": "groq/gpt-small"}, {}, Price()),
        ({"model": "azure/my-name"}, {"base_model": "gpt-small"}, Price(1e-6, 2e-6)),
        ({"model": "openai/nobody"}, {}, Price()),
        ({"model": "openai/gpt-small", "output_cost_per_token": 7e-6}, {}, Price(1e-6, 7e-6)),
        ({"model": "openai/gpt-small"}, {"input_cost_per_token": 0}, Price(0.0, 2e-6)),
        ({"model": "openai/gpt-small", "input_cost_per_token": 1}, {"input_cost_per_token": 2}, Price(1.0, 2e-6)),
        ({"model": "openai/cached"}, {}, Price(1e-6, 2e-6, 1e-7)),
        ({"model": "openai/nobody", "cache_read_input_token_cost": 1e-7}, {}, Price(0.0, 0.0, 1e-7)),
    ],
)
def test_what_is_written_wins_over_the_table(
    entry: dict[str, object], info: dict[str, object], price: Price, table: Path
) -> None:
    """A deployment's price is what its entry says, then what the table says of its base model or name, else nothing."""
    assert load_text(config(entry, table, info)).model_list[0].price == price


def test_longer_prompts_have_the_price_of_their_tier(table: Path) -> None:
    """Each bound of the table bills the whole of a longer prompt; other service tiers' prices are not ours."""
    price = listed(table, [("long", "openai")])[("long", "openai")]
    assert price.of(32_000, 10) == pytest.approx(32_000e-6 + 20e-6)
    assert price.of(32_001, 10) == pytest.approx(32_001 * 2e-6 + 20e-6)
    assert price.of(300_000, 10) == pytest.approx(300_000 * 4e-6 + 80e-6)


@given(
    prompt=st.integers(0, 10**6),
    cached=st.integers(0, 10**6),
    out=st.integers(0, 10**5),
    usd=st.tuples(*[st.floats(0, 1e-3)] * 3),
)
def test_cached_tokens_are_never_billed_twice(
    prompt: int, cached: int, out: int, usd: tuple[float, float, float]
) -> None:
    """A call costs no less than it would with all its prompt cached, and no more than with none, or the other way."""
    into, completion, read = usd
    cached = min(cached, prompt)
    price = Price(into, completion, read)
    ends = sorted([price.of(prompt, out, 0), price.of(prompt, out, prompt)])
    assert ends[0] * (1 - 1e-9) <= price.of(prompt, out, cached) <= ends[1] * (1 + 1e-9) + 1e-15


CHAT = {"input_cost_per_token": 1.0, "output_cost_per_token": 10.0}
WHISPER = {"input_cost_per_second": 0.5, "output_cost_per_second": 0.5}


def used(prompt: int = 0, completion: int = 0, cached: int = 0, **counted: float) -> Usage:
    return Usage(prompt, completion, cached, known=bool(prompt or completion), counted=counted or None)


@pytest.mark.parametrize(
    ("prices", "usage", "usd"),
    [
        (CHAT, used(3, 2, reasoned=1), 23),
        (CHAT | {"output_cost_per_reasoning_token": 100.0}, used(3, 2, reasoned=1), 113),
        (CHAT | {"output_cost_per_reasoning_token": 100.0}, used(3, 2, reasoned=7), 203),
        (CHAT | {"output_cost_per_reasoning_token": 0.0}, used(3, 2, reasoned=1), 13),
        (CHAT | {"input_cost_per_audio_token": 5.0}, used(3, 2, heard=2), 31),
        (CHAT | {"output_cost_per_audio_token": 50.0}, used(3, 2, spoken=2), 103),
        (CHAT | {"output_cost_per_image_token": 40.0}, used(3, 2, drawn=2), 83),
        (CHAT | {"input_cost_per_image_token": 2.0}, used(3, 2, seen=3), 26),
        (CHAT | {"cache_creation_input_token_cost": 1.25}, used(4, 2, stored=4), 25),
        (
            CHAT | {"cache_read_input_token_cost": 0.1, "cache_creation_input_token_cost": 1.25},
            used(9, 1, 4, stored=4),
            16.4,
        ),
        (CHAT | {"cache_read_input_token_cost": 0.1, "input_cost_per_audio_token": 5.0}, used(4, 0, 3, heard=4), 5.3),
        (CHAT | {"cache_creation_input_token_cost": 1.25}, used(4, 0, stored=1, stored_1h=2), 4.75),
        (
            CHAT | {"cache_creation_input_token_cost": 1.25, "cache_creation_input_token_cost_above_1hr": 2.0},
            used(4, 0, stored=1, stored_1h=2),
            6.25,
        ),
        (CHAT | {"cache_read_input_audio_token_cost": 0.5}, used(4, 0, 3, heard_again=2), 3),
        (
            CHAT | {"cache_read_input_token_cost": 0.1, "cache_read_input_image_token_cost": 0.5},
            used(4, 0, 3, seen_again=9),
            2.5,
        ),
        (CHAT | {"input_cost_per_request": 7.0}, used(3, 2), 30),
        ({"input_cost_per_request": 7.0}, used(3, 2), 7),
        (CHAT | {"citation_cost_per_token": 2.0}, used(3, 2, cited=4), 31),
        (CHAT, used(), None),
        (CHAT, used(images=1), None),
        (WHISPER, used(seconds=3.0), 1.5),
        (WHISPER, used(5, 1), None),
        (WHISPER | {"output_cost_per_second": 0.0}, used(seconds=3.0), 1.5),
        (CHAT | WHISPER, used(3, 2, seconds=9.0), 23),
        (CHAT | WHISPER, used(seconds=3.0), 1.5),
        ({"input_cost_per_image": 4.0}, used(images=2), 8),
        ({"input_cost_per_image": 0.0, "output_cost_per_image": 3.0}, used(images=2), 6),
        ({"input_cost_per_character": 0.25}, used(characters=8), 2),
        ({"input_cost_per_character": 0.25}, used(), None),
        ({}, used(), 0),
        ({"input_cost_per_token": 0.0, "output_cost_per_second": 0.0}, used(), 0),
    ],
)
def test_what_is_counted_is_billed(prices: dict[str, float], usage: Usage, usd: float | None, tmp_path: Path) -> None:
    """Kinds of tokens cost what they cost, images and seconds where no tokens do; what was not told is not known."""
    table = tmp_path / "prices.json"
    table.write_text(json.dumps({"m": prices}))
    for price in (
        listed(table, [("m", None)])[("m", None)],
        load_text(config({"model": "openai/m", **prices}, table)).model_list[0].price,
    ):
        bill = price.bill(usage)
        assert bill == (None if usd is None else pytest.approx(usd))


@given(
    kinds=st.dictionaries(st.sampled_from([*KINDS]), st.floats(0, 1)),
    counted=st.dictionaries(st.sampled_from([*KINDS.values()]), st.integers(0, 10**6)),
    prompt=st.integers(0, 10**6),
    cached=st.integers(0, 10**6),
    out=st.integers(0, 10**6),
)
def test_kinds_of_tokens_are_billed_once(
    kinds: dict[str, float], counted: dict[str, float], prompt: int, cached: int, out: int
) -> None:
    """Whatever an upstream says of kinds, a call costs between all tokens at the least price and all at the dearest."""
    price = written({"input_cost_per_token": 0.5, "output_cost_per_token": 0.25, **kinds}, Price())
    bill = price.bill(used(prompt, out, min(cached, prompt), **counted))
    usd = (0.5, 0.25, *kinds.values())
    if bill is not None:
        assert (prompt + out) * min(usd) - 1e-6 <= bill <= (prompt + out) * max(usd) + 1e-6


def test_prices_by_length_are_those_of_the_whole_prompt(tmp_path: Path) -> None:
    """`tiered_pricing` bills all of a prompt at its own step, and beyond the last at that."""
    steps = [{"input_cost_per_token": n, "output_cost_per_token": n, "range": [n * 10 - 10, n * 10]} for n in (1, 2, 3)]
    table = tmp_path / "prices.json"
    table.write_text(json.dumps({"m": {"tiered_pricing": steps}}))
    price = listed(table, [("m", None)])[("m", None)]
    assert [price.bill(used(n, 1)) for n in (1, 10, 11, 20, 21, 99)] == [2, 11, 24, 42, 66, 300]


UNBILLED = {
    "google_maps_grounding_cost_per_query": "no answer in OpenAI's shape tells of them",
    "code_interpreter_cost_per_session": "no answer tells of sessions",
    "input_dbu_cost_per_token": "another currency beside the price in USD",
    "output_dbu_cost_per_token": "another currency beside the price in USD",
    "input_cost_per_token_cache_hit": "another name of cache_read_input_token_cost, which stands beside it",
    "explicit_cache_read_input_token_cost": "usage does not tell it from what the upstream caches by itself",
    "cost_per_second": "of capacity that is rented, not of answers",
    "cache_creation_input_token_cost_above_12hr": "usage does not tell it from the first twelve hours",
    "cache_creation_input_audio_token_cost": "of real-time sessions",
    "input_cost_per_video_per_second": "unknown: nobody tells seconds of video",
    "input_cost_per_audio_per_second": "unknown: nobody tells seconds of sound that a chat was given",
    "input_cost_per_video_per_second_above_8s_interval": "unknown: nobody tells seconds of video",
    "input_cost_per_video_per_second_above_15s_interval": "unknown: nobody tells seconds of video",
    "input_cost_per_video_token": "usage does not tell tokens of video",
    "output_cost_per_video_token": "usage does not tell tokens of video",
    "input_cost_per_query": "unknown: embeddings of video",
}
"""Prices in LiteLLM's table, of models for the doors where text is asked for, that no bill here counts; and why."""
_DOORS = {"chat", "completion", "embedding", "responses"}
_LONGER = re.compile(r"_above_\d+k_tokens")


@pytest.mark.skipif(table_path() is None, reason="litellm is not installed")
def test_every_price_of_the_packages_table_is_billed_or_told_why_not() -> None:
    """A kind of price that LiteLLM adds is found by this test, not by whoever is billed for it."""
    path = table_path()
    assert path is not None
    entries = [e for e in json.loads(path.read_bytes()).values() if e.get("mode") in _DOORS]
    keys = {key for entry in entries for key, usd in entry.items() if usd and ("cost" in key or "pricing" in key)}
    plain = {_LONGER.sub("", key) for key in keys}
    plain = {next((key.removesuffix(end) for end in TIERS.values() if key.endswith(end)), key) for key in plain}
    assert plain - {*NAMES, SEARCHES, "tiered_pricing", "off_peak_pricing"} - UNBILLED.keys() == set()


@pytest.mark.parametrize("content", ["[]", "{", '{"gpt-small": 3}'])
def test_a_file_that_is_no_table_stops_the_start(tmp_path: Path, content: str) -> None:
    """A `prices` file that cannot be meant is an error that names the key, and so is one that is not there."""
    path = tmp_path / "p.json"
    with pytest.raises(ConfigError, match=r"prices: cannot be read"):
        load_text(config({"model": "openai/gpt-small"}, path))
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"prices: p\.json is no price table"):
        load_text(config({"model": "openai/gpt-small"}, path))


@pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="litellm is not installed")
def test_the_packages_own_table_is_read_without_the_package() -> None:
    """With litellm installed its table prices a known model, and litellm itself is not imported."""
    program = (
        "import sys; from router.settings import load_text\n"
        "s = load_text('model_list: [{model_name: m, litellm_params: {model: openai/gpt-4o-mini, api_key: k}}]')\n"
        "assert 'litellm' not in sys.modules; print(s.model_list[0].price.prompt)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert float(said) > 0
    path = table_path()
    assert path is not None
    assert path.stat().st_size > 10**5


async def test_a_caller_is_told_what_an_answer_cost(tmp_path: Path, up: Upstream) -> None:
    """LiteLLM's headers tell cost, time at the upstream and our own; a stream's cost is in its decision."""

    async def slow(seen: Seen) -> object:
        await asyncio.sleep(0.2)
        usage = {"prompt_tokens": 100, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": 60}}
        if seen.body.get("stream"):
            return await seen.stream(chunk("said", "stop"), {"choices": [], "usage": usage})
        return plain(body={"choices": [], "usage": usage})

    up.answers["m"] = slow  # type: ignore[assignment]
    prices = {"input_cost_per_token": 1e-3, "output_cost_per_token": 1e-2, "cache_read_input_token_cost": 1e-4}
    async with router(tmp_path, {"model_list": [deployment("m", up, **prices)]}) as door:
        got = await door.post(model="m")
        streamed = await door.post(model="m", stream=True)
        told = (await door.get(f"/v1/decisions/{streamed.headers['x-twolane-decision']}")).json["happened"]
    assert float(got.headers["x-litellm-response-cost"]) == pytest.approx(40e-3 + 60e-4 + 0.1)
    assert float(got.headers["x-litellm-response-duration-ms"]) >= 200
    assert (
        0 <= float(got.headers["x-litellm-overhead-duration-ms"]) < float(got.headers["x-litellm-response-duration-ms"])
    )
    assert "x-litellm-response-cost" not in streamed.headers
    assert told["cost"] == pytest.approx(0.146)
