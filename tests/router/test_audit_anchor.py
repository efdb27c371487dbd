"""Heads handed elsewhere: by file, syslog, HTTP and S3, through real sockets; and what they catch."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from router.audit import Audit
from router.audit_anchor import Anchor, read_anchor
from router.audit_cli import audit_commands
from router.audit_sinks import FileSink, S3Sink, SyslogSink, sign_v4, sink_of
from router.audit_verify import verify
from router.errors import Unrecorded
from router.settings import ConfigError, load_text
from tests.router.audit_writer import call, decision, outcome, tenant
from tests.router.gateway import KEY, Upstream, deployment, router, until, upstream

MOMENT = datetime(2013, 5, 24, tzinfo=UTC)


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as state:
        yield state


@asynccontextmanager
async def logged(root: Path, url: str, requests: int = 3, **options: Any) -> AsyncIterator[Anchor]:
    """A log with an anchor, after some requests of two tenants; closed with it."""
    anchor = Anchor(root, [("there", sink_of(url))], **{"every": 60, **options})
    audit = Audit(root, anchor=anchor)
    await audit.start()
    for name in ("bank", "lab"):
        for n in range(requests):
            await audit.outcome(call(f"dec_{n}", tenant(name)), decision(), outcome())
    yield anchor
    await audit.close()


@contextmanager
def taking(status: int = 200) -> Iterator[tuple[str, list[tuple[str, dict[str, str], bytes]]]]:
    """An HTTP server that keeps what it is sent."""
    got: list[tuple[str, dict[str, str], bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((f"{self.command} {self.path}", {k.lower(): v for k, v in self.headers.items()}, body))
            self.send_response(status)
            self.end_headers()

        do_PUT = do_POST  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", got
        finally:
            server.shutdown()
            thread.join()


def lines_hold(root: Path, kept: Path) -> None:
    """Every chain holds with what was kept, up to its very last record."""
    lines = read_anchor(kept)
    for name in ("bank", "lab", "_router"):
        report = verify(root, name, anchored=lines)
        assert report.faults == []
        assert report.anchored == report.records - 1


async def test_a_file_elsewhere(tmp_path: Path) -> None:
    """The file grows only, holds the last head of every chain when the router ends, and its folder is never made."""
    there = tmp_path / "elsewhere"
    async with logged(tmp_path / "log", str(there / "heads")) as anchor:
        await until(lambda: anchor.away)
        assert not there.exists()
        there.mkdir()
        (there / "heads").write_bytes(b"kept\n")
    assert (there / "heads").read_bytes().startswith(b"kept\n{")
    lines_hold(tmp_path / "log", there / "heads")


@pytest.mark.parametrize("kind", ["udp", "tcp", "unix"])
async def test_syslog(tmp_path: Path, kind: str) -> None:
    """Heads reach a syslog server as RFC 5424 messages, over TCP framed by length, and verify as it wrote them down."""
    root, kept = tmp_path / "log", tmp_path / "messages"
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
    server.settimeout(10)
    server.bind(str(tmp_path / "s") if kind == "unix" else ("127.0.0.1", 0))
    url = f"syslog+unix:{tmp_path / 's'}" if kind == "unix" else f"syslog+{kind}://127.0.0.1:{server.getsockname()[1]}"
    messages: list[bytes] = []

    def listen() -> None:
        with server:
            while not any(b'"tenant":"_router"' in m for m in messages):
                messages.append(server.recv(65536))

    def listen_to_streams() -> None:
        server.listen()
        with server:
            while not any(b'"tenant":"_router"' in m for m in messages):
                with server.accept()[0] as connection, connection.makefile("rb") as stream:
                    while size := b"".join(iter(lambda: stream.read(1).strip(), b"")):
                        messages.append(stream.read(int(size)))

    async with logged(root, url, every=1):
        thread = threading.Thread(target=listen_to_streams if kind == "tcp" else listen)
        thread.start()
        await asyncio.to_thread(thread.join)
    assert messages[0].startswith(b"<109>1 20")
    assert b" twolane-audit " in messages[0]
    kept.write_bytes(b"".join(b"Nov 30 10:00:00 host " + message + b"\n" for message in messages))
    assert all(verify(root, line.tenant, anchored=read_anchor(kept)).holds for line in read_anchor(kept))


async def test_http(tmp_path: Path) -> None:
    """Heads are posted line by line with the configured credential; a status that is not 2xx counts as away."""
    with taking() as (url, got):
        anchor = Anchor(tmp_path / "log", [("http", sink_of(f"{url}/heads?x=1", authorization="Bearer t"))], every=60)
        audit = Audit(tmp_path / "log", anchor=anchor)
        await audit.start()
        await audit.outcome(call("dec_1", tenant()), decision(), outcome())
        await audit.close()
    assert {request for request, _, _ in got} == {"POST /heads?x=1"}
    assert {headers["authorization"] for _, headers, _ in got} == {"Bearer t"}
    kept = tmp_path / "kept"
    kept.write_bytes(b"".join(body for _, _, body in got))
    assert verify(tmp_path / "log", "bank", anchored=read_anchor(kept)).holds
    with taking(500) as (url, _), pytest.raises(OSError, match="status 500"):
        sink_of(url).write([b"{}"])
    with pytest.raises(OSError, match="refused"):
        sink_of(url).write([b"{}"])


def test_s3_objects_are_locked_and_signed(tmp_path: Path) -> None:
    """Each object is put under a name of its own, with its lock, its checksum and a signature that AWS's own code makes
    of the same request."""
    auth = pytest.importorskip("botocore.auth")
    request_of = pytest.importorskip("botocore.awsrequest").AWSRequest
    credentials = pytest.importorskip("botocore.credentials").Credentials
    with taking() as (url, got):
        environment = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_ENDPOINT_URL_S3": url}
        environment |= {"AWS_REGION": "eu-north-1", "AWS_SESSION_TOKEN": "token"}
        S3Sink("worm", "a/b c", environment, 30, now=lambda: MOMENT).write([b"{}", b"{}"])
        with pytest.raises(OSError, match="AWS_ACCESS_KEY_ID"):
            S3Sink("worm", "", {}, 30).write([b"{}"])
    ((line, headers, body),) = got
    assert body == b"{}\n{}\n"
    assert line.startswith("PUT /worm/a/b%20c/20130524T000000.000000Z-")
    assert headers["x-amz-object-lock-mode"] == "COMPLIANCE"
    assert headers["x-amz-object-lock-retain-until-date"] == "2013-06-23T00:00:00Z"
    signed = ("x-amz-checksum-sha256", "x-amz-object-lock-mode", "x-amz-object-lock-retain-until-date")
    theirs = request_of("PUT", url + line.removeprefix("PUT "), {n: headers[n] for n in signed}, body)
    signer = auth.S3SigV4Auth(credentials("AKID", "secret", "token"), "s3", "eu-north-1")
    theirs.headers["X-Amz-Date"], theirs.headers["x-amz-security-token"] = "20130524T000000Z", "token"
    theirs.headers["X-Amz-Content-SHA256"] = hashlib.sha256(body).hexdigest()
    theirs.context["timestamp"] = "20130524T000000Z"
    canonical = signer.canonical_request(theirs)
    expected = signer.signature(signer.string_to_sign(theirs, canonical), theirs)
    assert headers["authorization"].endswith(f"Signature={expected}")


def test_the_signature_of_awss_own_example() -> None:
    """The example of AWS's documentation ("PUT Object") gives the signature that it prints."""
    headers = {"date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"}
    secret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"
    url = "https://examplebucket.s3.amazonaws.com/test%24file.text"
    signed = sign_v4("PUT", url, headers, b"Welcome to Amazon S3.", "AKIAIOSFODNN7EXAMPLE", secret, "us-east-1", MOMENT)
    assert signed["authorization"].endswith("98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd")


async def test_readiness_and_metrics_say_when_the_anchor_is_away(tmp_path: Path, up: Upstream) -> None:
    """Away and back is told by /health/readiness and /metrics; by default answers go on meanwhile, also regulated."""
    there = tmp_path / "mount"
    bank = {"name": "a", "key": KEY, "regulated": True}
    audit = {"dir": str(tmp_path / "audit"), "anchor": {"to": str(there / "heads"), "every": 1}}
    async with router(tmp_path, {"model_list": [deployment("m", up)], "tenants": [bank], "audit": audit}) as door:

        async def told() -> tuple[str, str]:
            metrics = (await door.get("/metrics")).raw.decode().splitlines()
            up_now = next(line for line in metrics if line.startswith("twolane_audit_anchor_up{"))
            return (await door.get("/health/readiness")).json["audit_anchor"], up_now

        assert (await door.post(model="m")).status == 200
        anchor = door.app.parts.audit.anchor
        assert anchor is not None
        await until(lambda: anchor.away)
        assert await told() == ("away", 'twolane_audit_anchor_up{to="file"} 0')
        there.mkdir()
        await until(lambda: not anchor.away)
        assert await told() == ("reached", 'twolane_audit_anchor_up{to="file"} 1')
    assert verify(tmp_path / "audit", "a", anchored=read_anchor(there / "heads")).holds


async def test_required_means_no_answer_without_it(tmp_path: Path) -> None:
    """A required anchor that is away for longer than agreed stops regulated requests, and only those; it resumes."""
    there = tmp_path / "mount"
    there.mkdir()
    async with logged(tmp_path / "log", str(there / "heads"), every=1, required=True, max_lag=0.2) as anchor:
        audit = Audit(tmp_path / "other", anchor=anchor)
        await until(lambda: anchor.lag == 0)
        anchor.check()
        (there / "heads").rename(tmp_path / "aside")
        there.rmdir()
        anchor.wrote(1)
        await until(lambda: anchor.lag > 0.3)
        with pytest.raises(Unrecorded, match="out of reach"):
            await audit.intent(call("dec_1", tenant()), decision())
        await audit.intent(call("dec_1", tenant("lab", regulated=False)), decision())
        there.mkdir()
        anchor.wrote(1000)
        await until(lambda: anchor.lag == 0)
        anchor.check()


@pytest.mark.parametrize("to", ["ftp://x/y", "syslog+udp://", "[]"])
def test_an_anchor_that_cannot_be_meant(to: str) -> None:
    """The configuration is refused with the key that is wrong."""
    with pytest.raises(ConfigError, match="anchor"):
        load_text(f"audit: {{anchor: {{to: {to if to == '[]' else json.dumps(to)}}}}}")


async def test_the_command(tmp_path: Path) -> None:
    """`verify --anchor` says how far the anchor reaches, and misses a chain that was anchored and is not here."""
    log, heads = tmp_path / "log", tmp_path / "heads"
    async with logged(log, str(heads)):
        pass
    run = CliRunner().invoke
    held = run(audit_commands, ["verify", "--dir", str(log), "--anchor", str(heads)])
    assert held.exit_code == 0
    assert held.output.count("0 are younger than the last anchored head") == 3
    heads.write_bytes(heads.read_bytes().replace(b'"tenant":"lab"', b'"tenant":"gone"'))
    missed = run(audit_commands, ["verify", "--dir", str(log), "--anchor", str(heads)])
    assert missed.exit_code == 1
    assert "gone: DOES NOT HOLD" in missed.output
    heads.write_bytes(b"nothing\n")
    empty = run(audit_commands, ["verify", "--dir", str(log), "--anchor", str(heads)])
    assert empty.exit_code == 1
    assert "holds no anchored head" in empty.output


def test_sinks_are_what_their_address_says() -> None:
    """Each address names one kind of place; the folder and port are its own."""
    assert sink_of("/mnt/worm/heads") == sink_of("file:///mnt/worm/heads") == FileSink(Path("/mnt/worm/heads"))
    assert sink_of("syslog+tcp://siem:601") == SyslogSink(True, ("siem", 601))
    assert sink_of("syslog+unix:/dev/log") == SyslogSink(False, "/dev/log")
