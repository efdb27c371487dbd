"""A fuser swapped under a running router: a real worker with tiny models, started anew, beside a text lane."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from router.transports.cache import KnownFleet
from tests.router.gateway import Router, deployment, router, until, upstream
from tests.tiny import make_model
from tests.workers.test_counterfactual import lite_pair
from tests.workers.test_server import serving
from workers.client import read_state
from workers.config import Fleet, ModelConfig, PairConfig, RedisConfig, StoreConfig, WorkerConfig
from workers.loader import Loader

MASTER = "sk-master-0123456789"
HELLO = [{"role": "user", "content": "What is the tide table of the harbour?"}]


class Asking:
    """Asks without pause; `seen` holds what was answered: status, lane and reason."""

    def __init__(self, door: Router) -> None:
        self.door = door
        self.seen: list[tuple[int, str, str]] = []

    async def __aenter__(self) -> Asking:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            got = await self.door.post(model="m", messages=HELLO, max_tokens=2, temperature=0)
            told = (got.headers.get(f"x-twolane-{name}", "") for name in ("transport", "reason"))
            self.seen.append((got.status, *told))  # type: ignore[arg-type]

    async def until(self, lane: str, reason: str) -> None:
        """The last answer came down this lane for this reason."""
        async with asyncio.timeout(30):
            while self.seen[-1:] != [(200, lane, reason)]:
                await asyncio.sleep(0.02)


async def test_a_fuser_swapped_under_the_router_is_taken_out(tmp_path: Path) -> None:
    """Another fuser under the same name gets no request and nobody sees a 5xx; a person may accept it.

    A fuser whose bytes are not those that its pair file names is not loaded, and requests take the text lane too.
    """
    models = tuple(
        ModelConfig(name=name, model=str(make_model(tmp_path / name, seed=seed)))
        for name, seed in (("sharer", 1), ("receiver", 2))
    )
    sharer, receiver = (Loader("cpu").load(model) for model in models)
    fuser = lite_pair(tmp_path / "duo", sharer, receiver)
    other = lite_pair(tmp_path / "other", sharer, receiver, seed=5)
    config = Fleet(
        models=models,
        pairs=(PairConfig(name="duo", sharer="sharer", receiver="receiver", fuser=str(fuser)),),
        workers=(WorkerConfig(name="w", pairs=("duo",), device="cpu", max_running=2),),
        redis=RedisConfig(url=f"unix://{tmp_path}/no-redis.sock"),
        store=StoreConfig(dir=None),
    )
    fleet = KnownFleet()
    async with upstream() as up:
        cache: dict[str, Any] = {"model_name": "m", "cache_params": {"pair": "duo"}}
        pairs = [{"name": "duo", "sharer": {"model": "x"}, "receiver": {"model": "y"}}]
        written = {"pairs": pairs, "model_list": [cache, deployment("m", up)]}
        async with router(tmp_path, written, fleet) as door, Asking(door) as asking:
            await asking.until("text", "pair_unavailable")
            async with serving(config, tmp_path / "w.sock") as (worker, _):
                first = read_state((await worker.get("/state")).content)
                fleet.states.append(first)
                await asking.until("cache", "cache_preferred")
                fleet.states.clear()  # what the router's fleet does when a worker ends
            shutil.copytree(other, fuser, dirs_exist_ok=True)
            async with serving(config, tmp_path / "w.sock") as (worker, _):
                second = read_state((await worker.get("/state")).content)
                assert second.pairs[0].fingerprint != first.pairs[0].fingerprint
                fleet.states.append(second)
                await asking.until("text", "pair_demoted")
                headers = {"authorization": f"Bearer {MASTER}"}
                path = "/admin/pairs/duo/reinstate"
                async with door.session.post(path, json={"reason": "the new one"}, headers=headers) as done:
                    assert done.status == 200
                await asking.until("cache", "cache_preferred")
                fleet.states.clear()
            weights = next(fuser.glob("*.safetensors"))
            weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
            async with serving(config, tmp_path / "w.sock") as (worker, _):
                third = read_state((await worker.get("/state")).content)
                assert not third.pairs[0].ready
                fleet.states.append(third)
                asked = len(asking.seen)
                await until(lambda: len(asking.seen) > asked + 2)
                await asking.until("text", "pair_unavailable")
    assert {status for status, *_ in asking.seen} == {200}
