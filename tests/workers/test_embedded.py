"""The embedded server: private, alone in its folder, and gone when its parent is."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from workers.embedded import EmbeddedRedis


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def test_it_answers_on_a_private_socket(tmp_path: Path) -> None:
    """Folder and socket are the owner's alone, there is no TCP port, and stop leaves no socket."""
    folder = tmp_path / "redis"
    with EmbeddedRedis(folder) as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
        assert client.config_get("port")["port"] == "0"
        assert client.config_get("save")["save"] == ""
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE((folder / "redis.sock").stat().st_mode) == 0o700
    assert not server.running
    assert not (folder / "redis.sock").exists()


def test_a_second_start_attaches(tmp_path: Path) -> None:
    """Two objects on one folder share one server; the one that did not start it does not stop it."""
    with EmbeddedRedis(tmp_path) as first:
        with EmbeddedRedis(tmp_path) as second:
            assert (second.url, second.pid) == (first.url, None)
        assert first.running


def test_start_revives_a_dead_server(tmp_path: Path) -> None:
    """After a kill, start brings it back under the same URL."""
    with EmbeddedRedis(tmp_path) as server:
        url, pid = server.url, server.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert wait_for(lambda: not server.running)
        server.start()
        assert server.running
        assert server.url == url
        assert server.pid != pid


def test_a_folder_too_deep_for_a_socket_works(tmp_path: Path) -> None:
    """A path beyond the kernel's limit for sockets still gives a server that others find."""
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    with EmbeddedRedis(deep) as server:
        assert server.running
        assert EmbeddedRedis(deep).url == server.url
    assert not Path(server.url.removeprefix("unix://")).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    """A killed parent leaves no server behind, and the folder can be started again."""
    code = (
        "import sys, time; from workers.embedded import EmbeddedRedis\n"
        f"s = EmbeddedRedis({os.fspath(tmp_path)!r}); s.start(); print(s.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    server = EmbeddedRedis(tmp_path)
    assert server.running
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_for(lambda: not Path(f"/proc/{pid}").exists() or not server.running)
    with server:
        assert server.running
        assert server.pid not in (None, pid)


def test_the_routers_side_loads_no_torch() -> None:
    """Index, keys and embedded server can be imported by a process that never pays for torch."""
    code = "import sys, workers.index, workers.keys, workers.embedded, workers.counters; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
