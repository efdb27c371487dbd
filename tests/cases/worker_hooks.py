"""What the cases ask to be done to workers from outside: `python worker_hooks.py NAME URL`, with the master key in KEY.

A full disk is a limit on the size of files, set on the running process: each write then fails as on a disk without
room, and goes on once the limit is lifted. It needs neither a mount nor a quota.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import urllib.request
from typing import Any

_PATIENCE_S = 50.0


def workers(url: str) -> list[dict[str, Any]]:
    """The live workers as the router lists them."""
    asked = urllib.request.Request(f"{url}/admin/workers", headers={"authorization": f"Bearer {os.environ['KEY']}"})
    with urllib.request.urlopen(asked, timeout=5) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]
    return found


def wait_until_ready(url: str, names: set[str], *, not_pids: frozenset[int] = frozenset()) -> None:
    """All of the names are live in other processes and hold their pairs. Raises TimeoutError."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        ready = {
            worker["name"]
            for worker in workers(url)
            if worker["pid"] not in not_pids
            and not worker["loading"]
            and all(pair["ready"] for pair in worker["pairs"])
        }
        if names <= ready:
            return
        time.sleep(0.1)
    raise TimeoutError(f"workers {sorted(names)} did not come up")


def restart(url: str) -> None:
    """End each worker in an orderly way; another process serves on return."""
    old = workers(url)
    for worker in old:
        os.kill(worker["pid"], signal.SIGTERM)
    pids = frozenset(int(worker["pid"]) for worker in old)
    wait_until_ready(url, {worker["name"] for worker in old}, not_pids=pids)


def kill(url: str) -> None:
    """As the kernel does when memory runs out."""
    for worker in workers(url):
        os.kill(worker["pid"], signal.SIGKILL)


def limit_files(url: str, *, full: bool) -> None:
    """No file may grow, or all may again."""
    for worker in workers(url):
        _, hard = resource.prlimit(worker["pid"], resource.RLIMIT_FSIZE)
        resource.prlimit(worker["pid"], resource.RLIMIT_FSIZE, (0 if full else hard, hard))


def main(name: str, url: str) -> None:
    match name:
        case "restart_workers":
            restart(url)
        case "kill_worker":
            kill(url)
        case "disk_full" | "disk_free":
            limit_files(url, full=name == "disk_full")
        case _:
            raise SystemExit(f"no hook is called {name!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
