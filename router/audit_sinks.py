"""Where signed heads may be anchored: each sink takes lines, and raises OSError when they may not be there.

A file (append only, synced), syslog (RFC 5424), an HTTP address, an S3 bucket with object lock. Knows no chains.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import os
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, urlsplit

_PATIENCE = 10.0
_FACILITY_AUDIT_NOTICE = 13 * 8 + 5


class Sink(Protocol):
    """Somewhere else."""

    def write(self, lines: Sequence[bytes]) -> None:
        """Blocks until the lines (without newlines) are there, as far as the sink can tell. Raises OSError."""


def sink_of(url: str, *, authorization: str | None = None, lock_days: int = 0) -> Sink:
    """The sink of one `audit.anchor.to`. Raises ValueError for what cannot be meant."""
    split = urlsplit(url)
    match split.scheme:
        case "" | "file":
            return FileSink(Path(split.path))
        case "syslog+udp" | "syslog+tcp":
            if not split.hostname:
                raise ValueError(f"{url}: names no host")
            return SyslogSink(split.scheme == "syslog+tcp", (split.hostname, split.port or 514))
        case "syslog+unix":
            return SyslogSink(False, split.path)
        case "http" | "https":
            return HTTPSink(url, authorization)
        case "s3":
            return S3Sink(split.netloc, split.path.strip("/"), os.environ, lock_days)
        case _:
            known = "file, syslog+udp, syslog+tcp, syslog+unix, http, https, s3"
            raise ValueError(f"{split.scheme}: is none of {known}")


@dataclass(frozen=True, slots=True)
class FileSink:
    """A file on another disk, mount or machine, best one that only grows (`chattr +a`, WORM storage)."""

    path: Path

    def write(self, lines: Sequence[bytes]) -> None:
        # The folder is not made: where a mount is missing, the lines must not end up on the very disk they guard.
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)
        try:
            rest = memoryview(b"".join(line + b"\n" for line in lines))
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.fsync(fd)
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class SyslogSink:
    """RFC 5424, one message a line; over TCP framed by length (RFC 6587). It confirms nothing: sent is all we know."""

    stream: bool
    address: tuple[str, int] | str
    """Host and port, or the path of a Unix datagram socket."""

    def write(self, lines: Sequence[bytes]) -> None:
        moment = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        head = f"<{_FACILITY_AUDIT_NOTICE}>1 {moment} {_host()} twolane-audit {os.getpid()} head - "
        messages = [head.encode() + line for line in lines]
        if self.stream:
            assert isinstance(self.address, tuple)  # noqa: S101  (sink_of gives streams a host)
            with socket.create_connection(self.address, timeout=_PATIENCE) as connection:
                connection.sendall(b"".join(b"%d %s" % (len(message), message) for message in messages))
            return
        family = socket.AF_UNIX if isinstance(self.address, str) else _family(self.address)
        with socket.socket(family, socket.SOCK_DGRAM) as sender:
            sender.settimeout(_PATIENCE)
            sender.connect(self.address)
            for message in messages:
                sender.send(message)


@dataclass(frozen=True, slots=True)
class HTTPSink:
    """POST of one line per head (`application/x-ndjson`); any 2xx says that they are kept."""

    url: str
    authorization: str | None = None
    """Value of the header of that name."""

    def write(self, lines: Sequence[bytes]) -> None:
        headers = {"content-type": "application/x-ndjson"}
        if self.authorization is not None:
            headers["authorization"] = self.authorization
        _send("POST", self.url, headers, b"".join(line + b"\n" for line in lines))


@dataclass(frozen=True, slots=True)
class S3Sink:
    """One object for each writing, locked (`COMPLIANCE`) for `lock_days` where that is not 0.

    Credentials, region and endpoint come from the usual AWS_* variables.
    """

    bucket: str
    prefix: str
    environment: Mapping[str, str]
    lock_days: int
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    def write(self, lines: Sequence[bytes]) -> None:
        body = b"".join(line + b"\n" for line in lines)
        moment = self.now()
        name = f"{moment:%Y%m%dT%H%M%S.%fZ}-{secrets.token_hex(4)}.jsonl"
        path = "/" + quote("/".join(part for part in (self.prefix, name) if part), safe="/-_.~")
        headers = {"x-amz-checksum-sha256": base64.b64encode(hashlib.sha256(body).digest()).decode()}
        if self.lock_days:
            until = moment + timedelta(days=self.lock_days)
            headers["x-amz-object-lock-mode"] = "COMPLIANCE"
            headers["x-amz-object-lock-retain-until-date"] = f"{until:%Y-%m-%dT%H:%M:%SZ}"
        url = self._base() + path
        _send("PUT", url, self._signed(url, headers, body, moment), body)

    def _base(self) -> str:
        own = self.environment.get("AWS_ENDPOINT_URL_S3") or self.environment.get("AWS_ENDPOINT_URL")
        if own:
            return f"{own.rstrip('/')}/{self.bucket}"
        return f"https://{self.bucket}.s3.{self._region}.amazonaws.com"

    @property
    def _region(self) -> str:
        return self.environment.get("AWS_REGION") or self.environment.get("AWS_DEFAULT_REGION") or "us-east-1"

    def _signed(self, url: str, headers: Mapping[str, str], body: bytes, moment: datetime) -> dict[str, str]:
        key, secret = (self.environment.get(f"AWS_{name}", "") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"))
        if not key or not secret:
            raise OSError("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set")
        token = self.environment.get("AWS_SESSION_TOKEN")
        more = {} if token is None else {"x-amz-security-token": token}
        return sign_v4("PUT", url, {**headers, **more}, body, key, secret, self._region, moment)


def sign_v4(
    method: str, url: str, headers: Mapping[str, str], body: bytes, key: str, secret: str, region: str, moment: datetime
) -> dict[str, str]:
    """The headers with AWS's Signature Version 4 for S3; `url` is encoded already, and has no query."""
    split = urlsplit(url)
    stamp = f"{moment:%Y%m%dT%H%M%SZ}"
    digest = hashlib.sha256(body).hexdigest()
    signed = {**headers, "host": split.netloc, "x-amz-content-sha256": digest, "x-amz-date": stamp}
    signed = {name.lower(): value.strip() for name, value in sorted(signed.items())}
    names = ";".join(signed)
    lines = "".join(f"{name}:{value}\n" for name, value in signed.items())
    request = f"{method}\n{split.path or '/'}\n\n{lines}\n{names}\n{digest}"
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    said = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    signer = f"AWS4{secret}".encode()
    for part in (stamp[:8], region, "s3", "aws4_request"):
        signer = hmac.digest(signer, part.encode(), "sha256")
    signature = hmac.digest(signer, said.encode(), "sha256").hex()
    authorization = f"AWS4-HMAC-SHA256 Credential={key}/{scope},SignedHeaders={names},Signature={signature}"
    return {**signed, "authorization": authorization}


def _send(method: str, url: str, headers: Mapping[str, str], body: bytes) -> None:
    """One exchange; redirects are not followed. Raises OSError unless the answer is 2xx."""
    split = urlsplit(url)
    kind = http.client.HTTPSConnection if split.scheme == "https" else http.client.HTTPConnection
    connection = kind(split.hostname or "", split.port, timeout=_PATIENCE)
    try:
        target = f"{split.path or '/'}?{split.query}" if split.query else split.path or "/"
        connection.request(method, target, body, dict(headers))
        status = connection.getresponse().status
    except http.client.HTTPException as error:
        raise OSError(f"{split.hostname}: no answer that can be read ({type(error).__name__})") from error
    finally:
        connection.close()
    if not 200 <= status < 300:
        raise OSError(f"{split.hostname}: status {status}")


def _family(address: tuple[str, int]) -> socket.AddressFamily:
    return socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0][0]


def _host() -> str:
    name = "".join(c for c in socket.gethostname() if "!" <= c <= "~")
    return name[:255] or "-"
