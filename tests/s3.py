"""A real S3 server over HTTP (moto's), and a gate before it that can hold every byte back or refuse connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import botocore.session
import pytest
import s3fs
from moto.server import ThreadedMotoServer

BUCKET = "twolane"


@dataclass(frozen=True)
class S3:
    """`endpoint` is the server's own; tests may put the gate's in its place."""

    endpoint: str

    def use(self, monkeypatch: pytest.MonkeyPatch, endpoint: str | None = None) -> None:
        """Let what opens `s3://` from now on find this server, as its user would: by the environment."""
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint or self.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "access")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()

    def policy(self, effect: str | None) -> None:
        """`Deny` refuses every object call of the bucket; None lifts that."""
        client = botocore.session.get_session().create_client("s3", endpoint_url=self.endpoint)
        if effect is None:
            client.delete_bucket_policy(Bucket=BUCKET)
        else:
            objects = f"arn:aws:s3:::{BUCKET}/*"
            rule = {"Effect": effect, "Principal": "*", "Action": "s3:*", "Resource": objects}
            client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps({"Statement": [rule]}))
        client.close()


@contextlib.contextmanager
def running() -> Iterator[S3]:
    """A server with one empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        made = S3(f"http://{host}:{port}")
        with pytest.MonkeyPatch.context() as patch:
            made.use(patch)
            client = botocore.session.get_session().create_client("s3", endpoint_url=made.endpoint)
            client.create_bucket(Bucket=BUCKET)
            client.close()
        yield made
    finally:
        server.stop()


class Gate:
    """A relay of TCP bytes to one address, in a thread of its own. `open`, `held` (no byte passes) or `shut`."""

    def __init__(self, to: str) -> None:
        host, port = to.removeprefix("http://").split(":")
        self._to = (host, int(port))
        self._loop = asyncio.new_event_loop()
        self._passes = asyncio.Event()
        self._shut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._do(self._start())

    def open(self) -> None:
        self._do(self._set(passes=True, shut=False))

    def hold(self) -> None:
        self._do(self._set(passes=False, shut=False))

    def shut(self) -> None:
        """Connections end, and new ones are closed at once."""
        self._do(self._set(passes=True, shut=True))

    def close(self) -> None:
        self.shut()
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(5)  # type: ignore[arg-type]

    async def _start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._passes.set()

    async def _set(self, *, passes: bool, shut: bool) -> None:
        self._shut = shut
        (self._passes.set if passes else self._passes.clear)()
        if shut:
            for writer in self._writers:
                writer.close()

    async def _stop(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._shut:
            writer.close()
            return
        there, back = await asyncio.open_connection(*self._to)
        self._writers |= {writer, back}
        try:
            await asyncio.gather(self._relay(reader, back), self._relay(there, writer))
        except OSError:  # one side went away; the other one's end follows from that
            self._writers -= {writer, back}
        finally:
            for each in (writer, back):
                self._writers.discard(each)
                each.close()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._passes.wait()
            writer.write(data)
            await writer.drain()
        writer.close()
