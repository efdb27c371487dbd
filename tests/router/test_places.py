"""Limits of deployments, and LiteLLM's policies by kind of error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from router.errors import TimedOut, TransportError, Unavailable
from router.health import Health
from router.retries import kind_of
from router.settings import ConfigError, load_text
from tests.router.gateway import Handler, Seen, Upstream, chunk, deployment, plain, router, upstream

USED = {"prompt_tokens": 50, "completion_tokens": 50, "total_tokens": 100}


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


def twins(up: Upstream, **limits: object) -> list[dict[str, Any]]:
    """Two deployments of one group, the first preferred and limited."""
    return [deployment("m", up, "first", order=1, **limits), deployment("m", up, "second", order=2)]


ENFORCED = {"optional_pre_call_checks": ["enforce_model_rate_limits"]}


@pytest.mark.parametrize(
    ("limits", "settings", "first"),
    [
        ({"rpm": 2}, ENFORCED, 2),
        ({"rpm": 2}, {"routing_strategy": "usage-based-routing-v2"}, 2),
        ({"rpm": 2}, {}, 5),
        ({"tpm": 250}, ENFORCED, 3),
        ({"max_budget": 0.3, "input_cost_per_token": 1e-3, "output_cost_per_token": 1e-3}, {}, 3),
    ],
)
async def test_a_full_deployment_is_passed_over(
    limits: dict[str, object], settings: dict[str, object], first: int, tmp_path: Path, up: Upstream
) -> None:
    """What a deployment may take goes there, what is more goes to the next, and no caller hears of it."""

    async def answer(seen: Seen) -> web.StreamResponse:
        return plain(body={"choices": [], "usage": USED})

    up.answers = {"first": answer, "second": answer}
    async with router(tmp_path, {"model_list": twins(up, **limits), "router_settings": settings}) as door:
        got = [await door.post(model="m", max_tokens=20) for _ in range(5)]
    assert {g.status for g in got} == {200}
    assert (up.count("first"), up.count("second")) == (first, 5 - first)


async def test_a_place_comes_back_when_the_answer_ends(tmp_path: Path, up: Upstream) -> None:
    """`max_parallel_requests` holds for plain answers, streams to their last byte, failures and hang-ups."""
    gate = asyncio.Event()

    async def slow(seen: Seen) -> web.StreamResponse:
        if seen.body.get("stream"):
            return await seen.stream(chunk("a"), 0.3, chunk("b", "stop"))
        await gate.wait()
        return plain(503, {"error": {"message": "down"}}) if seen.body.get("user") == "fail" else plain()

    up.answers["first"] = slow
    config = {
        "model_list": twins(up, max_parallel_requests=1),
        "router_settings": {"allowed_fails": 100, "num_retries": 0},
    }
    async with router(tmp_path, config) as door:

        async def beside(**body: object) -> None:
            """While one call runs on the first, another goes to the second; afterwards the first is free again."""
            before = up.count("second")
            running = asyncio.create_task(door.post(model="m", **body))
            await asyncio.sleep(0.15)
            assert (await door.post(model="m", user="beside")).status == 200
            assert up.count("second") == before + 1
            gate.set()
            if body.get("user") == "gone":
                running.cancel()
                await asyncio.wait([running])
                await asyncio.sleep(0.2)
            else:
                await running
            seen = up.count("first")
            assert (await door.post(model="m")).status == 200
            assert up.count("first") == seen + 1
            gate.clear()

        await beside(user="plain")
        await beside(stream=True)
        await beside(user="fail")
        await beside(user="gone", stream=True)


async def test_when_all_are_full_the_caller_is_told_when_to_come_back(tmp_path: Path, up: Upstream) -> None:
    """429 with Retry-After and a code of its own; the decision says what was tried."""
    only = [deployment("m", up, "first", rpm=1)]
    async with router(tmp_path, {"model_list": only, "router_settings": ENFORCED}) as door:
        assert (await door.post(model="m")).status == 200
        full = await door.post(model="m")
        told = (await door.get(f"/v1/decisions/{full.headers['x-twolane-decision']}")).json
    assert (full.status, full.error["code"], full.error["type"]) == (429, "deployment_limit", "rate_limit_error")
    assert 1 <= int(full.headers["retry-after"]) <= 65
    assert [t["code"] for t in told["tries"]] == ["deployment_limit"]
    assert up.count("first") == 1


async def test_a_relay_takes_a_place_for_each_half(tmp_path: Path, up: Upstream) -> None:
    """The sharer's place is free once the hint is written, the receiver's once the answer has ended."""

    async def answer(seen: Seen) -> web.StreamResponse:
        if seen.body.get("stream"):
            return await seen.stream(chunk("a"), 0.3, chunk("b", "stop"))
        return plain()

    up.answers = {"big": answer, "small": answer}
    config = {
        "model_list": [
            {"model_name": "m", "relay_params": {"sharer": "big", "receiver": "small"}},
            deployment("big", up, max_parallel_requests=1),
            deployment("small", up, max_parallel_requests=1),
        ],
        "router_settings": {"num_retries": 0},
    }
    async with router(tmp_path, config) as door:
        running = asyncio.create_task(door.post(model="m", stream=True))
        await asyncio.sleep(0.2)
        assert (await door.post(model="big")).status == 200
        assert (await door.post(model="small")).error["code"] == "deployment_limit"
        assert (await running).status == 200
        assert (await door.post(model="small")).status == 200


@pytest.mark.parametrize(
    ("policy", "group", "tries"),
    [
        ({}, {}, 2),
        ({"ServiceUnavailableErrorRetries": 0}, {}, 1),
        ({"DefaultRetries": 2}, {}, 3),
        ({"RateLimitErrorRetries": 0}, {}, 2),
        ({"ServiceUnavailableErrorRetries": 3}, {"m": {"ServiceUnavailableErrorRetries": 1}}, 2),
        ({"ServiceUnavailableErrorRetries": 1}, {"other": {"ServiceUnavailableErrorRetries": 3}}, 2),
    ],
)
async def test_retries_follow_the_kind_of_error(
    policy: dict[str, int], group: dict[str, object], tries: int, tmp_path: Path, up: Upstream
) -> None:
    """`model_group_retry_policy` goes before `retry_policy`, and that before the number for all kinds."""

    async def down(seen: Seen) -> web.StreamResponse:
        return plain(503, {"error": {"message": "down"}})

    up.answers["m"] = down
    settings = {"retry_policy": policy, "model_group_retry_policy": group, "num_retries": 0}
    entry = deployment("m", up, num_retries=1)
    async with router(tmp_path, {"model_list": [entry], "router_settings": settings}) as door:
        assert (await door.post(model="m")).status == 503
    assert up.count("m") == tries


async def _late(seen: Seen) -> web.StreamResponse:
    await asyncio.sleep(5)
    return plain()


def _fails(status: int, code: str | None = None) -> Handler:
    async def answer(seen: Seen) -> web.StreamResponse:
        return plain(status, {"error": {"message": "no", "type": "t", "param": None, "code": code}})

    return answer


FAILING: dict[str, list[Handler]] = {
    "AuthenticationError": [_fails(401), _fails(402), _fails(403)],
    "NotFoundError": [_fails(404)],
    "BadRequestError": [_fails(400), _fails(400, "context_length_exceeded")],
    "ContentPolicyViolationError": [_fails(400, "content_filter"), _fails(400, "content_policy_violation")],
    "TimeoutError": [_late, _fails(408), _fails(504)],
    "RateLimitError": [_fails(429)],
    "InternalServerError": [_fails(500), _fails(501)],
    "BadGatewayError": [_fails(502), _fails(529)],
    "ServiceUnavailableError": [_fails(503)],
}
"""By LiteLLM's kind of error: what upstreams do that is one."""
LASTING = {"AuthenticationError", "NotFoundError", "BadRequestError", "ContentPolicyViolationError"}
"""Another try at the same place cannot mend them."""
CASES = [(kind, index) for kind, answers in FAILING.items() for index in range(len(answers))]


@pytest.mark.parametrize(("kind", "index"), CASES)
async def test_every_kind_has_its_own_retries(kind: str, index: int, tmp_path: Path, up: Upstream) -> None:
    """What an upstream does is tried as often as the policy says for its kind of error, and for no other kind."""
    up.answers["m"] = up.answers["others"] = FAILING[kind][index]
    # LiteLLM has no retries of its own for a bad gateway.
    own = {"DefaultRetries" if kind == "BadGatewayError" else f"{kind}Retries": 1}
    rest = {f"{k}Retries": 0 for k in FAILING if k not in (kind, "BadGatewayError")} | own
    other = {f"{k}Retries": 1 for k in FAILING if k not in (kind, "BadGatewayError")} | {f"{k}": 0 for k in own}
    config = {
        "model_list": [deployment("m", up, timeout=0.2), deployment("others", up, timeout=0.2)],
        "router_settings": {"model_group_retry_policy": {"m": rest, "others": other}},
    }
    async with router(tmp_path, config) as door:
        for group in ("m", "others"):
            assert (await door.post(model=group)).status >= 400
    assert (up.count("m"), up.count("others")) == (1 if kind in LASTING else 2, 1)


BLAMED = [(kind, index) for kind, index in CASES if kind not in ("BadRequestError", "ContentPolicyViolationError")]


@pytest.mark.parametrize(("kind", "index"), BLAMED)
async def test_every_kind_has_its_own_allowed_fails(kind: str, index: int, tmp_path: Path, up: Upstream) -> None:
    """A deployment rests after as many failures of a kind as are allowed of it, and of no other."""
    up.answers["strict"] = FAILING[kind][index]
    entries = [deployment("m", up, "strict", order=1, timeout=0.2), deployment("m", up, "spare", order=2)]
    for allowed, tries in (({f"{kind}AllowedFails": 2}, 2), ({f"{k}AllowedFails": 1 for k in FAILING if k != kind}, 3)):
        up.seen.clear()
        config = {
            "model_list": entries,
            "router_settings": {"num_retries": 0, "allowed_fails": 9, "allowed_fails_policy": allowed},
        }
        async with router(tmp_path, config) as door:
            assert [(await door.post(model="m")).status for _ in range(3)] == [200] * 3
        assert up.count("strict") == tries


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimedOut("late"), "TimeoutError"),
        (Unavailable("cut", code="upstream_timeout"), "TimeoutError"),
        (TransportError("no", status=429), "RateLimitError"),
        (Unavailable("cut", code="rate_limit_exceeded"), "RateLimitError"),
        (TransportError("no", status=502, code="upstream_auth"), "AuthenticationError"),
        (TransportError("no", status=502, code="upstream_not_found"), "NotFoundError"),
        (TransportError("no", status=400, code="content_filter"), "ContentPolicyViolationError"),
        (TransportError("no", status=400), "BadRequestError"),
        (Unavailable("no"), "ServiceUnavailableError"),
        (Unavailable("no", status=502), "BadGatewayError"),
        (Unavailable("no", status=500), "InternalServerError"),
    ],
)
def test_kinds_of_error_are_litellms(error: TransportError, kind: str) -> None:
    """Each failure has the name that LiteLLM's policies know it by."""
    assert kind_of(error) == kind


def test_a_kind_with_a_number_of_its_own_is_counted_apart() -> None:
    """`allowed_fails_policy` rests a deployment after so many failures of that kind; others count together."""
    pair = load_text(
        "model_list: [{model_name: m, litellm_params: {model: openai/a, api_key: k}},"
        " {model_name: m, litellm_params: {model: openai/b, api_key: k}}]\n"
        "router_settings: {allowed_fails_policy: {TimeoutErrorAllowedFails: 2}, allowed_fails: 3}"
    )
    policy = pair.routing.allowed_fails_policy
    health = Health(pair.groups, allowed_fails=3, cooldown_time=5, by_kind=policy, clock=lambda: 0.0)
    id = pair.model_list[0].id
    rested = [health.failed(id, error) for error in (Unavailable("x"), TimedOut("x"), Unavailable("x"), TimedOut("x"))]
    assert rested == [False, False, False, True]
    other = pair.model_list[1].id
    assert [health.failed(other, Unavailable("x")) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("retry_policy: {TimeoutRetries: 3}", "retry_policy"),
        ("allowed_fails_policy: {TimeoutErrorAllowedFails: -1}", "allowed_fails_policy"),
        ("default_max_parallel_requests: 0", "default_max_parallel_requests"),
    ],
)
def test_a_wrong_policy_is_named(settings: str, says: str) -> None:
    """A kind of error that nobody knows, or a number that cannot be meant, is an error at its key."""
    with pytest.raises(ConfigError, match=says):
        load_text(f"model_list: []\nrouter_settings: {{{settings}}}\n")


def test_checks_without_effect_are_named() -> None:
    """Of `optional_pre_call_checks` what has no effect is told at start."""
    text = "model_list: []\nrouter_settings: {optional_pre_call_checks: [%s]}\n"
    assert not load_text(text % "enforce_model_rate_limits").findings
    (finding,) = load_text(text % "enforce_model_rate_limits, prompt_caching").findings
    assert "enforce_model_rate_limits" in str(finding)
