"""A fuser swapped under a running router: real processes, a tiny pair, and a text lane that goes on."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.running import Router, serving
from tests.sdk.conftest import running_server
from tests.tiny import make_model
from tests.workers.test_counterfactual import lite_pair
from workers.config import ModelConfig
from workers.loader import Loader

HELLO = [{"role": "user", "content": "What is the tide table of the harbour?"}]


class Asking:
    """A thread that asks without pause, and keeps what was answered: status or lane, reason."""

    def __init__(self, router: Router) -> None:
        self.router = router
        self.seen: list[tuple[str, str]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            self.seen.append(ask(self.router))
            time.sleep(0.05)


def ask(router: Router) -> tuple[str, str]:
    """The lane that answered and the decision's reason, or the error's status."""
    body = {"model": "m", "messages": HELLO, "max_tokens": 2, "temperature": 0}
    status, headers, _ = router.request("POST", "/v1/chat/completions", body, key="sk-a")
    return (headers["x-twolane-transport"], headers["x-twolane-reason"]) if status == 200 else (str(status), "")


def pair_of(router: Router) -> dict[str, Any]:
    found: dict[str, Any] = router.get("/admin/pairs", key="sk-master")["data"][0]
    return found


def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def restart_worker(router: Router) -> None:
    """End the worker process; the router starts it again, and this returns once it has loaded."""
    [worker] = router.get("/admin/workers", key="sk-master")["data"]
    os.kill(worker["pid"], signal.SIGTERM)

    def again() -> bool:
        workers = router.get("/admin/workers", key="sk-master")["data"]
        return any(w["pid"] != worker["pid"] and not w["loading"] for w in workers)

    until(again)


def test_a_fuser_swapped_under_the_router_is_taken_out(tmp_path: Path) -> None:
    """Another fuser under the same name gets no request and nobody sees a 5xx; a person may accept it."""
    folders = [make_model(tmp_path / name, seed=seed) for name, seed in (("sharer", 1), ("receiver", 2))]
    sharer, receiver = (Loader("cpu").load(ModelConfig(name=f.name, model=str(f))) for f in folders)
    fuser = lite_pair(tmp_path / "duo", sharer, receiver)
    other = lite_pair(tmp_path / "other", sharer, receiver, seed=5)
    with running_server() as upstream:
        text = {"model": "openai/x", "api_base": upstream.url, "api_key": "sk-up"}
        config = {
            "models": [{"name": f.name, "model": str(f)} for f in folders],
            "pairs": [{"name": "duo", "sharer": "sharer", "receiver": "receiver", "fuser": str(fuser)}],
            "model_list": [
                {"model_name": "m", "cache_params": {"pair": "duo"}},
                {"model_name": "m", "litellm_params": text},
            ],
            "workers": [{"name": "w", "spawn": True, "pairs": ["duo"], "threads": 1, "device": "cpu"}],
            "tenants": [{"name": "a", "key": "sk-a"}],
            "general_settings": {"master_key": "sk-master"},
            "store": {"dir": None},
        }
        with serving(tmp_path, yaml.safe_dump(config)) as router, Asking(router) as asking:
            until(lambda: ("cache", "cache_preferred") in asking.seen)
            before = pair_of(router)["workers"][0]["state"]["fingerprint"]
            shutil.copytree(other, fuser, dirs_exist_ok=True)
            restart_worker(router)
            until(lambda: asking.seen[-1] == ("text", "pair_demoted"))
            swapped = pair_of(router)
            assert (swapped["standing"]["state"], swapped["standing"]["why"]) == ("demoted", "fingerprint")
            assert swapped["workers"][0]["state"]["fingerprint"] != before
            path = "/admin/pairs/duo/reinstate"
            assert router.request("POST", path, {"reason": "the new one"}, key="sk-master")[0] == 200
            until(lambda: asking.seen[-1][0] == "cache")
        assert {lane for lane, _ in asking.seen} == {"cache", "text"}
