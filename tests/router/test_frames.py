"""What a caller is told of a stream, whatever its upstream's chunks and reads: the same as if all had come in one."""

from __future__ import annotations

import asyncio

import httptools
from hypothesis import example, given
from hypothesis import strategies as st

from router.call import Reply
from router.transports.frames import Frames
from router.transports.http1 import Connection
from router.transports.stream import Stream
from tests.router.test_stream import LAST, ODD, WORD, fed

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
SIZES = [b"%x", b"%X", b"%04x", b"%x;a=b"]
"""How servers write a chunk's size."""
DONE = b"data: [DONE]\n\n"


class Wire(asyncio.Transport):
    """Takes what the router says to its upstream."""

    aborted = False

    def write(self, data: object) -> None:
        """The request is of no interest here."""

    def abort(self) -> None:
        self.aborted = True

    close = abort

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        """The test goes on all the same: what comes then must wait inside."""

    resume_reading = pause_reading


class Told:
    """A caller who notes what it is told, and has no room after every so many pieces."""

    def __init__(self, every: int) -> None:
        self.wire = HEAD
        self.body = b""
        self.passed = 0
        self._every = every
        self._pieces = 0

    def push(self, body: bytes) -> bool:
        return self._tell(b"%x\r\n%b\r\n" % (len(body), body) if body else b"")

    def push_chunks(self, chunks: bytes) -> bool:
        self.passed += 1
        return self._tell(chunks)

    async def room(self) -> None:
        await asyncio.sleep(0)

    def on_body(self, body: bytes) -> None:
        self.body += body

    def _tell(self, chunks: bytes) -> bool:
        self.wire += chunks
        self._pieces += 1
        return self._pieces % self._every != 0


async def relayed(reads: list[bytes], every: int) -> tuple[Told, bytes, Reply]:
    """The caller, all that was said with the last frame, and the reply, of an answer that comes in these reads."""
    connection, told = Connection(lambda c: None, lambda c: None), Told(every)
    connection.connection_made(Wire())
    reply, answer, said = Reply(200, "text/event-stream"), connection.post(b""), list[bytes]()
    frames = Frames(answer, Stream(reply, path="/chat/completions", asked=False), b"", 5.0)
    task = asyncio.create_task(frames.push(told, said))
    for read in reads:
        await asyncio.sleep(0)
        connection.data_received(read)
    connection.connection_lost(None)
    last = await asyncio.wait_for(task, 5)
    httptools.HttpResponseParser(told).feed_data(told.wire)
    assert told.body == b"".join(said)  # what the caller's parser reads, and what is noted for the records
    return told, told.body + last, reply


@given(
    st.lists(st.tuples(st.lists(st.sampled_from([WORD, *ODD]), min_size=1, max_size=3), st.sampled_from(SIZES))),
    st.lists(st.floats(0, 1), max_size=6),
    st.booleans(),
    st.integers(1, 5),
)
@example([([WORD], size) for size in SIZES] + [([LAST], b"%x"), ([DONE], b"%x")], [], True, 2)
def test_chunks_and_reads_do_not_matter(
    chunks: list[tuple[list[bytes], bytes]], cuts: list[float], by_chunk: bool, every: int
) -> None:
    """The caller's parser reads the same events however they were framed and cut, and whatever room there was."""
    bodies = [b"".join(events) for events, _ in chunks]
    framed = [b"%b\r\n%b\r\n" % (size % len(body), body) for body, (_, size) in zip(bodies, chunks, strict=True)]
    framed.append(b"0\r\n\r\n")
    whole = b"".join(framed)
    at = sorted(round(cut * len(whole)) for cut in cuts)
    reads = framed if by_chunk else [whole[a:b] for a, b in zip([0, *at], [*at, len(whole)], strict=True)]
    _, got, reply = asyncio.run(relayed([HEAD, *(read for read in reads if read)], every))
    wanted, known, _ = fed([b"".join(bodies)], asked=False, worker=False)
    assert got == wanted
    assert (str(reply.usage), reply.error) == (str(known.usage), known.error)


async def test_a_plain_event_passes_as_it_came() -> None:
    """A read that is one chunk of one event reaches the caller framing and all, but for the first, which is parsed."""
    events = [WORD, WORD.replace(b"}\n\n", b',"usage":null}\n\n'), WORD, LAST]
    reads = [b"%X\r\n%b\r\n" % (len(event), event) for event in events]
    told, got, _ = await relayed([HEAD, *reads, b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"], 100)
    assert (told.passed, got) == (3, b"".join(events) + DONE)
    assert told.wire.endswith(b"".join(reads[1:]))
