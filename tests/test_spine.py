"""One request through everything, on both lanes, by policy: real processes, tiny models, the plain openai client."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from twolane import AsyncTwoLane, TwoLane, lane_of

from tests.running import Router, serving
from tests.sdk.conftest import Server, running_server
from tests.tiny import make_model

CONFIG = """
model_list:
  - {{model_name: assistant, cache_params: {{pair: twin}}, model_info: {{id: fused}}}}
  - {{model_name: assistant, local_params: {{model: tiny, order: 1}}, model_info: {{id: alone}}}}
  - {{model_name: assistant, relay_params: {{sharer: solo, receiver: solo, max_hint_tokens: 8, order: 2}},
     model_info: {{id: relay}}}}
  - {{model_name: solo, local_params: {{model: tiny}}, model_info: {{id: solo}}}}
  - {{model_name: mixed, cache_params: {{pair: twin}}, model_info: {{id: mixed-cache}}}}
  - {{model_name: mixed, model_info: {{id: mixed-http}},
     litellm_params: {{model: openai/assistant, api_base: "{upstream}", api_key: sk-upstream}}}}
  - {{model_name: mixed, model_info: {{id: mixed-litellm}},
     litellm_params: {{model: anthropic/claude-x, api_key: sk-none, mock_response: "from litellm", order: 2}}}}
  - {{model_name: brief, cache_params: {{pair: twin, timeout: 3}}, model_info: {{id: brief-cache}}}}
  - {{model_name: brief, model_info: {{id: brief-http}},
     litellm_params: {{model: openai/assistant, api_base: "{upstream}", api_key: sk-upstream}}}}
models: [{{name: tiny, model: {model}}}]
pairs: [{{name: twin, sharer: tiny, receiver: tiny, fuser: identity}}]
workers: [{{name: w, spawn: true, models: [tiny], pairs: [twin], threads: 1, max_running: 2, max_queued: 2}}]
redis: {{url: embedded}}
store: {{dir: kv}}
audit: {{dir: audit}}
state_dir: state
tenants:
  - {{name: lab, key: sk-lab, transports: [cache, text]}}
  - {{name: bank, key: sk-bank, regulated: true, transports: [text]}}
  - {{name: hasty, key: sk-hasty, latency_budget: {{ttft_ms: 0.001}}}}
  - {{name: narrow, key: sk-narrow, models: [solo]}}
general_settings: {{master_key: sk-master}}
"""

HELLO: Any = [{"role": "user", "content": "What is the tide table of the harbour, hour by hour, day by day?"}]
ASK: dict[str, Any] = {"messages": HELLO, "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def upstream() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def router(upstream: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    folder = tmp_path_factory.mktemp("spine")
    model = make_model(folder / "model")
    with serving(folder, CONFIG.format(model=model, upstream=upstream.url)) as running:
        yield running


def client(router: Router, tenant: str = "lab") -> TwoLane:
    return TwoLane(base_url=f"{router.base}/v1", api_key=f"sk-{tenant}", max_retries=0, timeout=60)


def worker(router: Router) -> dict[str, Any] | None:
    found = router.get("/admin/workers", "sk-master")["data"]
    return found[0] if found else None


def until(true: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def idle(router: Router) -> bool:
    state = worker(router)
    return state is not None and (state["running"], state["queued"]) == (0, 0)


def test_the_plain_openai_client_gets_the_same_text_on_both_lanes_streamed_and_not(router: Router) -> None:
    """Four answers from an identity pair and its model: one text; usage and finish reason agree."""
    texts = set()
    with openai.OpenAI(base_url=f"{router.base}/v1", api_key="sk-lab", max_retries=0) as plain:
        for lane in ("cache", "text"):
            hint = {"x-twolane-transport": lane}
            whole = plain.chat.completions.create(model="assistant", extra_headers=hint, **ASK)
            texts.add(whole.choices[0].message.content)
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 8
            stream = plain.chat.completions.create(
                model="assistant", extra_headers=hint, stream=True, stream_options={"include_usage": True}, **ASK
            )
            chunks = list(stream)
            texts.add("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
            assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
            assert chunks[-1].usage == whole.usage or chunks[-1].usage is not None
    assert len(texts) == 1
    assert texts.pop()


@pytest.mark.parametrize(
    ("tenant", "lane", "deployment", "reason"),
    [
        ("lab", "cache", "fused", "cache_preferred"),
        ("bank", "text", "alone", "regulated_text_only"),
        # What fits no budget goes to whatever is predicted to be fastest: which that is, is not for a test to say.
        ("hasty", None, None, "budget_missed"),
    ],
)
def test_policy_chooses_the_lane_and_the_headers_say_why(
    router: Router, tenant: str, lane: str | None, deployment: str | None, reason: str
) -> None:
    """The same call as three tenants: lane, deployment and reason, before and after."""
    with client(router, tenant) as as_tenant:
        before = as_tenant.decide(model="assistant", messages=HELLO)
        answer = as_tenant.chat.completions.create(model="assistant", **ASK)
        got = lane_of(answer)
        assert got.reason == before.reason == reason
        if lane is not None:
            assert (got.transport, got.deployment) == (lane, deployment)
            assert before.chosen == deployment
        after = as_tenant.decision(got.decision)
        assert after.chosen == got.deployment


def test_a_hint_narrows_and_never_widens(router: Router) -> None:
    """`cache` is refused to a regulated tenant, with the rule's code; `text` is granted to everyone."""
    with client(router, "bank") as bank, pytest.raises(openai.PermissionDeniedError) as refused:
        bank.lane(transport="cache").chat.completions.create(model="assistant", **ASK)
    assert refused.value.code == "regulated_text_only"
    with client(router) as lab:
        answer = lab.lane(transport="text").chat.completions.create(model="assistant", **ASK)
        assert lane_of(answer).transport == "text"


def test_a_model_that_is_not_the_tenants_is_unknown_or_forbidden(router: Router) -> None:
    """The tenant's own list counts."""
    with client(router, "narrow") as narrow:
        assert [m.id for m in narrow.models.list()] == ["solo"]
        with pytest.raises(openai.APIStatusError) as refused:
            narrow.chat.completions.create(model="assistant", **ASK)
        assert refused.value.status_code in {403, 404}


@pytest.mark.parametrize("lane", ["cache", "text"])
def test_what_a_worker_can_choose_by_is_served_on_both_lanes(router: Router, lane: Any) -> None:
    """Several choices, log probabilities and biased tokens, whole and streamed, with usage over all choices."""
    asked: dict[str, Any] = {**ASK, "n": 2, "logprobs": True, "top_logprobs": 2, "logit_bias": {"40": 100}}
    with client(router) as lab:
        lab = lab.lane(transport=lane)
        whole = lab.chat.completions.create(model="assistant", **asked)
        chunks = list(lab.chat.completions.create(model="assistant", stream=True, **asked))
    assert [c.index for c in whole.choices] == [0, 1]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16
    for choice in whole.choices:
        told = choice.logprobs
        assert told is not None
        assert told.content is not None
        assert len(told.content) == 8
        assert len({t.token for t in told.content}) == 1
        assert all(len(t.top_logprobs) == 2 and t.top_logprobs[0].logprob == t.logprob for t in told.content)
        pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices and c.choices[0].index == choice.index]
        assert "".join(pieces) == choice.message.content


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "json"),
    ],
)
def test_decide_says_which_deployments_cannot_serve_tools_and_json(router: Router, more: Any, what: str) -> None:
    """The cache lane is refused by name before anything runs, and who can is chosen; where nobody can, it is told."""
    asked = {"messages": HELLO, **more}
    with httpx.Client(base_url=router.base, headers={"authorization": "Bearer sk-lab"}) as http:
        told = http.post("/v1/decide", json={"model": "mixed", **asked}).json()
        refused = http.post("/v1/chat/completions", json={"model": "solo", **asked})
    assert told["ranked"][0] == "mixed-http"
    judged = next(j for j in told["judged"] if j["deployment"] == "mixed-cache")
    assert [v["detail"] for v in judged["verdicts"] if v["code"] == "needs_unsupported"] == [what]
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "needs_unsupported"
    assert what in refused.json()["error"]["message"]


def test_the_relay_answers_with_the_receivers_text(router: Router) -> None:
    """Narrowed to the relay: two calls in the text lane, one answer, usage of both."""
    with client(router) as lab:
        answer = lab.lane(deployment="relay").chat.completions.create(model="assistant", **ASK)
        assert lane_of(answer).deployment == "relay"
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 8


def test_kv_is_reused_and_warm_equals_cold(router: Router) -> None:
    """The second answer reports cached tokens in usage and header, and is the first, token for token; another
    tenant's first is cold."""
    text = "A ledger of items, prices and buyers, with the date of every sale. " * 6
    asked = {**ASK, "messages": [{"role": "user", "content": text}]}
    with client(router) as lab, client(router, "hasty") as hasty:
        lab = lab.lane(transport="cache")
        cold = lab.chat.completions.create(model="assistant", **asked)
        warm = lab.chat.completions.create(model="assistant", **asked)
        other = hasty.lane(deployment="fused").chat.completions.create(model="assistant", **asked)
    told = [a.usage.prompt_tokens_details.cached_tokens for a in (cold, warm, other)]  # type: ignore[union-attr]
    assert told[0] == told[2] == 0
    assert told[1] >= 16
    assert lane_of(warm).kv_reused == told[1]
    assert lane_of(warm).kv_total == warm.usage.prompt_tokens  # type: ignore[union-attr]
    assert len({a.choices[0].message.content for a in (cold, warm, other)}) == 1


def test_external_deployments_stand_in_the_same_group(router: Router) -> None:
    """Plain HTTP and litellm answer beside the cache lane."""
    with client(router) as lab:
        for deployment, text in (("mixed-http", "hello"), ("mixed-litellm", "from litellm")):
            answer = lab.lane(deployment=deployment).chat.completions.create(model="mixed", messages=HELLO)
            assert answer.choices[0].message.content == text
            assert lane_of(answer).transport == "text"
            stream = lab.lane(deployment=deployment).chat.completions.create(model="mixed", messages=HELLO, stream=True)
            assert "".join(c.choices[0].delta.content or "" for c in stream if c.choices) == text


async def test_a_hang_up_frees_the_worker(router: Router) -> None:
    """Callers that leave, before or after the first token, leave nothing running."""
    long = {**ASK, "max_tokens": 1900}
    async with AsyncTwoLane(base_url=f"{router.base}/v1", api_key="sk-lab", max_retries=0) as lab:
        stream = await lab.chat.completions.create(model="assistant", stream=True, **long)
        await anext(aiter(stream))
        await stream.close()
        await asyncio.to_thread(until, lambda: idle(router), 10)
        task = asyncio.create_task(lab.chat.completions.create(model="assistant", **long))
        await asyncio.to_thread(until, lambda: not idle(router), 10)
        task.cancel()
        await asyncio.to_thread(until, lambda: idle(router), 10)


def test_what_a_hanging_worker_has_not_begun_to_answer_goes_to_text_within_the_deadline(router: Router) -> None:
    """A worker that stands still accepts connections and says nothing. Plain and streamed, a request is answered by
    text once the pair's `timeout` of 3 s is over, before the worker counts as dead; going on, it owes nobody anything.
    """
    state = worker(router)
    assert state is not None
    os.kill(state["pid"], signal.SIGSTOP)
    try:
        with client(router) as lab, ThreadPoolExecutor(2) as both:

            def ask(**more: Any) -> tuple[str, Any]:
                answer = lab.chat.completions.create(model="brief", messages=HELLO, **more)
                if not more:
                    return answer.choices[0].message.content or "", lane_of(answer)
                return "".join(c.choices[0].delta.content or "" for c in answer if c.choices), lane_of(answer)

            began = time.monotonic()
            for text, lane in both.map(lambda more: ask(**more), ({}, {"stream": True})):
                assert text == "hello"
                assert lane.transport == "text"
                tried = router.get(f"/v1/decisions/{lane.decision}", "sk-lab")["tries"]
                assert [(t["deployment"], t["code"]) for t in tried] == [("brief-cache", "upstream_timeout")]
            assert time.monotonic() - began < 15  # after 20 s of silence it would have been killed
    finally:
        os.kill(state["pid"], signal.SIGCONT)
    until(lambda: idle(router))
    still = worker(router)
    assert still is not None
    assert still["pid"] == state["pid"]


def test_a_killed_worker_is_replaced_and_meanwhile_text_answers(router: Router) -> None:
    """A running stream ends in an error event, and what the worker had begun without a frame goes to text; while the
    worker is gone a group with an external text deployment is answered by it, and one without is refused with
    Retry-After; then all is as before."""
    with client(router) as lab, ThreadPoolExecutor(1) as aside:
        stream = lab.lane(transport="cache").chat.completions.create(
            model="assistant", stream=True, **{**ASK, "max_tokens": 1900}
        )
        next(iter(stream))
        begun = aside.submit(lambda: lab.lane().chat.completions.create(model="mixed", **{**ASK, "max_tokens": 1900}))
        until(lambda: (worker(router) or {}).get("running") == 2)
        state = worker(router)
        assert state is not None
        os.kill(state["pid"], signal.SIGKILL)
        with pytest.raises(openai.APIError):
            list(stream)
        assert begun.result(30).choices[0].message.content == "hello"
        assert lane_of(begun.result()).transport == "text"
        answer = lab.chat.completions.create(model="mixed", messages=HELLO)
        assert answer.choices[0].message.content == "hello"
        assert lane_of(answer).transport == "text"
        refused = httpx.post(
            f"{router.base}/v1/chat/completions",
            json={"model": "solo", "messages": HELLO},
            headers={"authorization": "Bearer sk-lab"},
        )
        assert refused.status_code == 503
        assert refused.headers["retry-after"]

        def back() -> bool:
            new = worker(router)
            return new is not None and new["pid"] != state["pid"] and not new["loading"]

        until(back)
        assert lane_of(lab.chat.completions.create(model="assistant", **ASK)).transport == "cache"


def test_metrics_and_log_know_lanes_but_no_secrets(router: Router) -> None:
    """Counts by lane and reason, one event per request, no key and no content anywhere."""
    marker = "marker-5150"
    with client(router) as lab:
        lab.chat.completions.create(model="assistant", **{**ASK, "messages": [{"role": "user", "content": marker}]})
    with httpx.Client(base_url=router.base) as http:
        metrics = http.get("/metrics").text
    assert 'transport="cache"' in metrics
    assert 'transport="text"' in metrics
    until(lambda: '"event":"request"' in router.log.read_text().replace(" ", ""), 10)
    for secret in (marker, "sk-lab", "sk-master", "sk-upstream"):
        assert secret not in router.log.read_text()
        assert secret not in metrics
