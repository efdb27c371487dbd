"""One streamed answer, event by event: what the caller may see of it, and what it tells about itself.

Bytes in, whole events out; the connection belongs to `openai_http`.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache

import msgspec

from router.call import Reply
from router.errors import TransportError, Unavailable
from router.transports.upstream_errors import in_answer
from router.wire import (
    ABSENT,
    DONE,
    NULL,
    Answer,
    Splitter,
    error_frame,
    finished,
    frame,
    prove,
    read_answer,
    read_response,
    read_tier,
    read_usage,
    told,
    without_run,
    without_usage,
)

_CUT = "The upstream's stream ended before the answer was complete."

_BETWEEN = b"\n\ndata: "
_CHUNK_END = b"\n\n\r\n"
"""Where a chunk ends that ends with an event."""
_SHORT = 16
"""Bytes: a longer event is not `[DONE]`, whatever blanks stand around that."""


class Stream:
    """Fills `reply.usage`, `reply.run` and `reply.error` as events pass. `done` once nothing more may follow."""

    def __init__(
        self, reply: Reply, *, path: str, asked: bool, worker: bool = False, secrets: tuple[str, ...] = ()
    ) -> None:
        self.done = False
        self.began = False
        """An event that is no error has passed: from here on the caller has part of an answer."""
        self.error: TransportError | None = None
        self._reply = reply
        self._path = path
        self._asked = asked
        self._worker = worker
        self._secrets = secrets
        self._splitter = Splitter()
        self._tail: deque[bytes] = deque(maxlen=4)
        """The last events: one of them tells whether the answer is whole."""

    def feed(self, data: bytes) -> bytes:
        """Whole events for the caller, possibly none."""
        passed = self._plain(data) if not self._splitter.rest else 0
        if passed == len(data):
            return data
        try:
            events = self._splitter.feed(data[passed:])
        except ValueError:
            error = Unavailable("An event of the upstream exceeds the limit.", code="upstream_malformed")
            return data[:passed] + self.fail(error)
        return data[:passed] + self._relay(events)

    def _plain(self, data: bytes) -> int:
        """Bytes at the beginning of a read that pass as they came: whole events with nothing for us in them."""
        end = data.rfind(b"\n\n")
        if end < 0 or not data.startswith(b"data: "):
            return 0
        events = data[6:end].split(_BETWEEN)
        bare = _bare(events)
        if not bare:
            return 0
        self.began = True
        self._tail.extend(events[:bare])
        return end + 2 if bare == len(events) else sum(map(len, events[:bare])) + len(_BETWEEN) * bare

    def chunk(self, data: bytes) -> bytes:
        """The event that a read holds, where it is one such event and nothing else, in one chunk of HTTP/1.1."""
        end = len(data) - 4
        openings = _openings(end)
        if self._splitter.rest or data.find(_CHUNK_END) != end or not data.startswith(openings):
            return b""
        frame = data[len(openings[0]) : -2]
        event = frame[6:-2]
        if not _is_bare(event):
            return b""
        self.began = True
        self._tail.append(event)
        return frame

    def finish(self) -> bytes:
        """The upstream ended its stream: `[DONE]` if the answer is whole, else an error event."""
        rest = self._relay(self._splitter.flush())
        if self.done:
            return rest
        if not finished(b"\n".join(self._tail), self._path):
            return rest + self.fail(Unavailable(_CUT))
        self.done = True
        return rest if self._path == "/responses" else rest + DONE

    def fail(self, error: TransportError) -> bytes:
        """End with an error event."""
        self._stop(error)
        return error_frame(error)

    def _stop(self, error: TransportError) -> None:
        self.done = True
        self.error = error
        self._reply.error = error.code or error.type

    def _relay(self, events: list[tuple[bytes, bytes]]) -> bytes:
        out: list[bytes] = []
        for head, data in events:
            if len(data) < _SHORT and data.strip() == b"[DONE]":
                out.append(DONE)
                self.done = True
                break
            kept = self._read(data)
            if kept is not None:
                out.append(frame(head, kept))
            if self.done:
                break
            self.began = self.began or kept is not None
        self._tail.extend([data for _, data in events])
        return b"".join(out)

    def _read(self, data: bytes) -> bytes | None:
        """The data as the caller may see it, None for nothing."""
        answer = read_answer(data)
        if answer is None:
            # One malformed event would end the stream in the caller's parser; the rest of the answer is worth more.
            return None
        if answer.bare:
            return data
        if told(answer.error):
            error = in_answer(answer.error, secrets=self._secrets, path=self._path)
            self._stop(error)
            return error.body()
        if self._worker and told(answer.twolane):
            self._reply.run = answer.twolane
            data = without_run(data)
        if told(answer.usage):
            read_usage(answer.usage, self._reply.usage)
            read_tier(answer.service_tier, self._reply.usage)
            return data if self._asked or self._path == "/responses" else without_usage(data)
        if told(answer.response):
            completed = read_answer(bytes(answer.response))
            if completed is not None:
                read_response(bytes(answer.response), self._reply)
            if completed is not None and told(completed.usage):
                read_usage(completed.usage, self._reply.usage)
                read_tier(completed.service_tier, self._reply.usage)
        return data


def _bare(events: list[bytes]) -> int:
    """How many, up to the first other, are JSON objects in one line that tell of nothing we would read or change."""
    flat = b"".join(events)
    if b"\n" not in flat and b"\r" not in flat:
        try:
            said = list(map(prove, events))
            if said.count(_NOTHING) == len(said) or all(map(_tells_nothing, said)):
                return len(events)
        except (msgspec.DecodeError, RecursionError):
            pass  # one by one
    return next((at for at, event in enumerate(events) if not _is_bare(event)), len(events))


def _is_bare(event: bytes) -> bool:
    if b"\n" in event or b"\r" in event:
        return False
    try:
        said = prove(event)
        return said == _NOTHING or _tells_nothing(said)
    except (msgspec.DecodeError, RecursionError):
        return False


def _tells_nothing(said: Answer) -> bool:
    return (
        said.error is ABSENT
        and said.twolane is ABSENT
        and said.response is ABSENT
        and (said.usage is ABSENT or said.usage == NULL)  # many servers write null into all events but the last
    )


_NOTHING = Answer()


@lru_cache(maxsize=1024)
def _openings(end: int) -> tuple[bytes, ...]:
    """How a read may begin that is one chunk, by where `_CHUNK_END` stands in it: with the chunk's size."""
    for digits in range(1, 8):
        size = b"%x" % (end - digits)
        if len(size) == digits:
            return size + b"\r\n", size.upper() + b"\r\n"
    return ()
