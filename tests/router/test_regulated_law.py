"""A regulated tenant never reaches the cache lane, whatever happens: the law as a state machine at the HTTP door."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from msgspec.structs import replace

from router.transports.cache import KnownFleet
from tests.router.gateway import Answer, Seen, deployment, failure, plain, router, upstream
from tests.router.test_cache import worker

BANK, LAB, MASTER = "sk-bank-0123456789", "sk-lab-0123456789", "sk-master-0123456789"
REGULATED = {"name": "bank", "key": BANK, "regulated": True}

tenant_files = st.fixed_dictionaries(
    {},
    optional={
        "sticky": st.just("conversation"),
        "rollout": st.fixed_dictionaries({"cache": st.sampled_from((0, "50%", 1))}),
        "transports": st.just(["text"]),
        "latency_budget": st.just({"ttft_ms": 0.001}),
        "pairs": st.just({"allow": ["duo"]}),
        "labels": st.just(
            {"data": {"personal": {"transports": ["text"]}, "public": {"transports": ["cache", "text"]}}}
        ),
        "use_cases": st.just(
            [
                {
                    "id": "x",
                    "owner": "kim",
                    "risk": "low",
                    "approved_by": "lee",
                    "review_by": "2999-01-01",
                    "transports": ["cache", "text"],
                    "keys": [BANK],
                }
            ]
        ),
        "rules": st.just([{"use": "tests.policies.own_rules:Generous"}]),
    },
)
"""Whatever else may be written about a tenant that is regulated, some of it plainly meant for the cache lane."""

configs = st.fixed_dictionaries(
    {
        "fallbacks": st.sampled_from(([], [{"m": ["alone"]}], [{"spare": ["alone", "m"]}], [{"*": ["alone", "m"]}])),
        "default_fallbacks": st.sampled_from(([], ["alone"])),
        "routing_strategy": st.sampled_from(("simple-shuffle", "latency-based-routing", "least-busy")),
    }
)

requests = st.fixed_dictionaries(
    {"model": st.sampled_from(("m", "alone", "spare", "relayed")), "stream": st.booleans()},
    optional={
        "x-twolane-transport": st.sampled_from(("cache", "auto", "text")),
        "x-twolane-deployment": st.sampled_from(("pair", "lonely", "text")),
        "x-twolane-latency-budget-ms": st.just("1"),
        "x-twolane-labels": st.sampled_from(("public", "personal")),
        "x-session-id": st.sampled_from(("one", "two")),
    },
)


class Regulated(RuleBasedStateMachine):
    """One router, a regulated tenant and one that is not, on deployments and workers that come, go and fail."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()
        self.failing: set[str] = set()
        self.loop.run_until_complete(self._open())

    async def _open(self) -> None:
        # The name of a socket must be short.
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="tl")))
        self.up = await self.stack.enter_async_context(upstream())
        self.worker = await self.stack.enter_async_context(upstream(unix=self.folder / "w"))
        for server in (self.up, self.worker):
            server.answers |= dict.fromkeys(("text", "spare", "duo", "half"), self._answer)
        self.fleet = KnownFleet([worker(self.worker.base)])
        (self.folder / "tenants").mkdir()
        self._write({"name": "lab", "key": LAB, "sticky": "conversation"})
        self._write(REGULATED)
        self.door = await self.stack.enter_async_context(router(self.folder, self._config({}), self.fleet))

    def _config(self, routing: dict[str, Any]) -> dict[str, Any]:
        model = {"model": "none/none"}
        pair = {"cache_params": {"pair": "duo"}}
        relay = {"sharer": "spare", "receiver": "half"}
        return {
            "audit": {"dir": str(self.folder / "audit")},
            "state_dir": str(self.folder / "state"),
            "general_settings": {"master_key": MASTER},
            "tenants": "tenants",
            "pairs": [{"name": "duo", "sharer": model, "receiver": model}],
            "model_list": [
                {"model_name": "m", **pair, "model_info": {"id": "pair"}},
                {"model_name": "m", "relay_params": relay, "model_info": {"id": "relay"}},
                {**deployment("m", self.up, "text"), "model_info": {"id": "text"}},
                {"model_name": "alone", **pair, "model_info": {"id": "lonely"}},
                deployment("spare", self.up),
                deployment("half", self.up),
                {"model_name": "relayed", "relay_params": relay},
            ],
            "router_settings": {"num_retries": 0, "disable_cooldowns": True, **routing},
        }

    def _write(self, tenant: dict[str, Any]) -> None:
        (self.folder / "tenants" / f"{tenant['name']}.yaml").write_text(yaml.safe_dump(tenant))

    async def _answer(self, seen: Seen) -> Any:
        model = seen.body["model"]
        if model in self.failing:
            return failure(503)
        if seen.body.get("stream"):
            return await seen.stream({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]})
        return plain()

    def _ask(self, key: str, asked: dict[str, Any]) -> Answer:
        body = {name: value for name, value in asked.items() if name in ("model", "stream")}
        headers = {name: value for name, value in asked.items() if name not in body}
        return self.loop.run_until_complete(self.door.post(key=key, headers=headers, **body))

    @rule(asked=requests)
    def the_bank_asks(self, asked: dict[str, Any]) -> None:
        before = len(self.worker.seen)
        answer = self._ask(BANK, asked)
        assert answer.headers.get("x-twolane-transport") in (None, "", "text"), answer.headers
        assert len(self.worker.seen) == before
        assert answer.status < 500 or self.failing, answer.raw

    @rule(asked=requests)
    def the_lab_asks(self, asked: dict[str, Any]) -> None:
        self._ask(LAB, asked)

    @precondition(lambda self: not self.failing and self.fleet.states and self.fleet.states[0].pairs[0].ready)
    @rule()
    def the_lane_is_there_for_others(self) -> None:
        assert self._ask(LAB, {"model": "alone", "stream": False}).headers.get("x-twolane-transport") == "cache"

    @rule(model=st.sampled_from(("text", "spare", "half", "duo")))
    def fails(self, model: str) -> None:
        self.failing.add(model)

    @rule()
    def heals(self) -> None:
        self.failing.clear()

    @rule(ready=st.booleans(), there=st.booleans())
    def worker_changes(self, ready: bool, there: bool) -> None:
        state = worker(self.worker.base, ready=ready)
        self.fleet.states[:] = [replace(state, epoch=f"{ready}")] if there else []

    @rule(more=tenant_files, base=st.sampled_from((None, "lab")))
    def tenant_is_rewritten(self, more: dict[str, Any], base: str | None) -> None:
        self._write(REGULATED | more | ({"extends": base} if base else {}))
        assert self._reload() == 200

    @rule(broken=st.sampled_from(("regulatd: false", "transports: [cache]", "name: lab", "[")))
    def tenant_is_broken(self, broken: str) -> None:
        file = self.folder / "tenants" / "bank.yaml"
        before = file.read_text()
        file.write_text(f"{before}{broken}\n")
        assert self._reload() == 422
        file.write_text(before)

    @rule(routing=configs)
    def config_is_rewritten(self, routing: dict[str, Any]) -> None:
        (self.folder / "router.yaml").write_text(yaml.safe_dump(self._config(routing)))
        assert self._reload() == 200

    def _reload(self) -> int:
        return self.loop.run_until_complete(self.door.post("/admin/reload", key=MASTER)).status

    def teardown(self) -> None:
        self.loop.run_until_complete(self.stack.aclose())
        self.loop.close()


Regulated.TestCase.settings = settings(
    max_examples=8,
    stateful_step_count=25,
    deadline=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)
test_regulated_never_reaches_the_cache_lane = Regulated.TestCase
