from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel
from twolane import AsyncTwoLane, Lane, TwoLane, lane_of

from tests.sdk.conftest import Server

ASK: Any = {"model": "assistant", "messages": [{"role": "user", "content": "hi"}]}
CACHE = Lane("dec_1", "cache", "duo", "cache_preferred", 48, 64)


class City(BaseModel):
    city: str


@pytest.fixture
def client(server: Server) -> Any:
    with TwoLane(base_url=server.url, max_retries=0) as client:
        yield client


def test_plain(client: TwoLane) -> None:
    """A plain answer carries its lane, which is no field of it."""
    answer = client.chat.completions.create(**ASK)
    assert lane_of(answer) == CACHE
    assert answer.choices[0].message.content == "hello"
    assert answer._request_id == "req_1"
    assert "twolane" not in str(answer.model_dump()) + answer.model_dump_json() + repr(answer)


def test_stream(client: TwoLane) -> None:
    """A stream tells its lane before its first chunk and after its last."""
    stream = client.chat.completions.create(**ASK, stream=True)
    assert lane_of(stream) == CACHE
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "hello"
    assert lane_of(stream) == CACHE


def test_stream_helper(client: TwoLane) -> None:
    """openai's own stream helper tells the lane too."""
    with client.chat.completions.stream(**ASK) as stream:
        assert lane_of(stream) == CACHE
        assert stream.get_final_completion().choices[0].message.content == "hello"


def test_parse(client: TwoLane) -> None:
    """An answer that openai parsed into a model keeps its lane."""
    answer = client.chat.completions.parse(**ASK, response_format=City)
    assert answer.choices[0].message.parsed == City(city="Seoul")
    assert lane_of(answer) == CACHE


def test_raw(client: TwoLane) -> None:
    """Raw and streamed raw responses tell their lane."""
    assert lane_of(client.chat.completions.with_raw_response.create(**ASK)).decision == "dec_1"
    with client.chat.completions.with_streaming_response.create(**ASK) as raw:
        assert lane_of(raw).decision == "dec_2"


async def test_async(server: Server) -> None:
    """The async client does all of it: plain, stream, decide, decision."""
    async with AsyncTwoLane(base_url=server.url, transport="cache") as client:
        assert lane_of(await client.chat.completions.create(**ASK)) == CACHE
        stream = await client.lane(transport="text").chat.completions.create(**ASK, stream=True)
        assert lane_of(stream) == Lane("dec_2", "text", "solo", "text_preferred")
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["hel", "lo"]
        assert (await client.decide(**ASK)).chosen == "duo"
        assert (await client.decision("dec_1")).body["outcome"] == {"status": "answered"}


def test_refused(client: TwoLane) -> None:
    """A refusal is openai's error, and tells the decision behind it."""
    with pytest.raises(openai.PermissionDeniedError) as refused:
        client.chat.completions.create(**ASK | {"model": "closed"})
    assert refused.value.code == "regulated_text_only"
    assert lane_of(refused.value).decision == "dec_1"


def test_elsewhere(client: TwoLane) -> None:
    """An answer without our headers has no lane, and that is said."""
    with pytest.raises(LookupError, match="no decision"):
        lane_of(client.chat.completions.create(**ASK | {"model": "elsewhere"}))


@pytest.mark.parametrize(
    ("asked", "header", "value"),
    [
        ({"transport": "cache"}, "x-twolane-transport", "cache"),
        ({"transport": "auto"}, "x-twolane-transport", None),
        ({"latency_budget_ms": 800}, "x-twolane-latency-budget-ms", "800"),
        ({"latency_budget_ms": 12.5}, "x-twolane-latency-budget-ms", "12.5"),
        ({"latency_budget_ms": 1234567}, "x-twolane-latency-budget-ms", "1234567"),
        ({"session": "chat-17"}, "x-session-id", "chat-17"),
        ({"deployment": "solo"}, "x-twolane-deployment", "solo"),
    ],
)
def test_asks(server: Server, asked: dict[str, Any], header: str, value: str | None) -> None:
    """A wish goes up as its header, as a default of the client and through `lane`."""
    with TwoLane(base_url=server.url, **asked) as client:
        client.chat.completions.create(**ASK)
    with TwoLane(base_url=server.url) as client:
        client.lane(**asked).chat.completions.create(**ASK)
        client.chat.completions.create(**ASK)
    assert [headers.get(header) for headers in server.asked] == [value, value, None]


def test_lane_keeps_and_takes_away(server: Server) -> None:
    """What is not named stays, None takes away, and with_options carries the lane on."""
    with TwoLane(base_url=server.url, transport="cache", session="s", default_headers={"x-tag": "t"}) as client:
        client.lane(session=None, deployment="d").with_options(timeout=5).chat.completions.create(**ASK)
    headers = server.asked[-1]
    assert (headers["x-twolane-transport"], headers["x-twolane-deployment"], headers["x-tag"]) == ("cache", "d", "t")
    assert "x-session-id" not in headers


@pytest.mark.parametrize(
    "wish",
    [{"transport": "fast"}, {"latency_budget_ms": 0}, {"latency_budget_ms": -1}, {"latency_budget_ms": float("nan")}]
    + [{"session": bad} for bad in ("", "a\r\nb: c", "é")],
)
def test_wrong_wishes(wish: dict[str, Any]) -> None:
    """What no header can hold is refused before anything is sent."""
    with pytest.raises(ValueError, match=r"transport|latency_budget_ms|printable"):
        TwoLane().lane(**wish)


@pytest.mark.parametrize(
    ("variables", "given", "sent"),
    [
        ({}, None, None),
        ({"TWOLANE_API_KEY": "sk-env"}, None, "Bearer sk-env"),
        ({"TWOLANE_API_KEY": "sk-env"}, "sk-given", "Bearer sk-given"),
    ],
)
def test_keys(
    server: Server, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], given: str | None, sent: str | None
) -> None:
    """The key is the one given, else TWOLANE_API_KEY, else none; openai's own key is never sent."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with TwoLane(base_url=server.url, api_key=given) as client:
        client.chat.completions.create(**ASK)
        client.lane(transport="text").chat.completions.create(**ASK)
    assert [headers.get("authorization") for headers in server.asked] == [sent, sent]


def test_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """The router is on this machine unless told otherwise."""
    assert str(TwoLane().base_url) == "http://127.0.0.1:4000/v1/"
    assert str(TwoLane().with_options(timeout=1).base_url) == "http://127.0.0.1:4000/v1/"
    monkeypatch.setenv("TWOLANE_BASE_URL", "http://router/v1")
    assert str(TwoLane().base_url) == "http://router/v1/"


def test_decide(client: TwoLane, server: Server) -> None:
    """A decision is read with all verdicts, and what we do not know stays in its body."""
    decision = client.lane(transport="cache").decide(**ASK)
    assert (decision.chosen, decision.transport, decision.reason) == ("duo", "cache", "cache_preferred")
    assert [(j.deployment, j.allowed) for j in decision.judged] == [("duo", True), ("far", False)]
    (refused,) = decision.judged[1].verdicts
    assert (refused.rule, refused.code, refused.means) == (
        "region",
        "region_not_allowed",
        "Not in a region it may use.",
    )
    assert decision.body["estimates"] == {"duo": {"ttft_p50": 40.0}}
    assert server.bodies[-1] == ASK
    assert server.asked[-1]["x-twolane-transport"] == "cache"


def test_past_decision(client: TwoLane) -> None:
    """An unknown decision is openai's NotFoundError, and what is no decision is refused."""
    assert client.decision("dec_1").id == "dec_1"
    with pytest.raises(openai.NotFoundError):
        client.decision("../dec_1")
    with pytest.raises(ValueError, match="not a decision"):
        client.decision("list")
