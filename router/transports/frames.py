"""The frames of a streamed answer, from an upstream's reads to the caller: asked for one by one, or pushed."""

from __future__ import annotations

import asyncio
import time

from router.http import AtOnce
from router.transports.http1 import Answer, Malformed
from router.transports.stream import Stream
from router.transports.upstream_errors import translate

_LINGERS_S = 0.05
"""Seconds that an upstream has to end a stream whose last event has come."""


class Frames:
    """The rest of a stream, from the upstream's reads to the caller's frames. Ends itself; `aclose` hangs up."""

    def __init__(self, answer: Answer, stream: Stream, first: bytes, timeout: float) -> None:
        self._answer = answer
        self._stream = stream
        self._first = first
        self._timeout = timeout
        self._ended = False

    def __aiter__(self) -> Frames:
        return self

    async def __anext__(self) -> bytes:
        if self._first:
            frame, self._first = self._first, b""
            return frame
        # Waiting begins when the caller asks: a slow reader is not a silent upstream, and comments are no answer.
        until = time.monotonic() + self._timeout
        while not self._stream.done:
            if frame := await self._next(until):
                return frame
        if not self._ended:
            await self._end()
        raise StopAsyncIteration

    async def push(self, caller: AtOnce, said: list[bytes] | None) -> bytes:
        """The same, with nobody woken for a frame: the caller is told each as it comes, and the last is given back.

        What the caller was told is noted in `said`.
        """
        frame, self._first = self._first, b""
        if frame and not self._stream.done:
            if said is not None:
                said.append(frame)
            if not caller.push(frame):
                await caller.room()
        while not self._stream.done:
            frame = await self._pass(caller, said)
            if not self._stream.done:
                await caller.room()
        if not self._ended:
            await self._end()
        return frame

    async def _pass(self, caller: AtOnce, said: list[bytes] | None) -> bytes:
        """Let frames pass until there is no room, or to the last, which is given back."""
        answer, passing = self._answer, _Passing(self._answer, self._stream, caller, said, self._timeout)
        try:
            while not passing.stopped:
                if data := answer.now():
                    passing.feed(data)
                elif answer.whole:
                    return self._stream.finish()
                else:
                    await passing.wait()
        except (OSError, Malformed) as error:
            return self._stream.fail(translate(error))
        if passing.fault is not None:
            raise passing.fault
        return passing.last

    async def _next(self, until: float) -> bytes:
        answer = self._answer
        try:
            data = answer.now()
            if not data and not answer.whole:
                # A timeout of asyncio's costs five times as much, for each event of a slow stream.
                wait = until - time.monotonic()
                timer = asyncio.get_running_loop().call_later(wait, answer.fail, TimeoutError())
                try:
                    data = await answer.some()
                finally:
                    timer.cancel()
        except (OSError, Malformed) as error:
            return self._stream.fail(translate(error))
        return self._stream.feed(data) if data else self._stream.finish()

    async def _end(self) -> None:
        """Read what follows `[DONE]`, so that the connection can be used again; a stream that lingers is closed."""
        self._ended = True
        answer = self._answer
        if self._stream.error is None and not answer.whole:
            timer = asyncio.get_running_loop().call_later(_LINGERS_S, answer.close)
            try:
                while await answer.some():
                    pass
            except (OSError, Malformed):  # it lingered, or broke after all was said
                pass
            finally:
                timer.cancel()
        answer.close()

    async def aclose(self) -> None:
        """Hang up unless the stream has ended."""
        if not self._ended:
            self._ended = True
            self._answer.close()


class _Passing:
    """Frames on their way from a connection's reads to the caller, while the task that relays them sleeps."""

    __slots__ = (
        "_answer",
        "_caller",
        "_heard",
        "_loop",
        "_said",
        "_stream",
        "_timeout",
        "_timer",
        "fault",
        "last",
        "stopped",
    )

    def __init__(
        self, answer: Answer, stream: Stream, caller: AtOnce, said: list[bytes] | None, timeout: float
    ) -> None:
        self.stopped = False
        self.last = b""
        self.fault: Exception | None = None
        self._answer = answer
        self._stream = stream
        self._caller = caller
        self._said = said
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._heard = time.monotonic()

    def feed(self, data: bytes) -> bool:
        """Whether more may come."""
        try:
            frame = self._stream.feed(data)
            if self._stream.done:
                self.last = frame
                self.stopped = True
            elif frame:  # a comment is no answer
                self._heard = time.monotonic()
                if self._said is not None:
                    self._said.append(frame)
                self.stopped = not self._caller.push(frame)
        except Exception as error:  # the connection that calls has nothing to do with it: told to who waits
            self.fault = error
            self.stopped = True
        return not self.stopped

    def through(self, data: bytes) -> bool:
        """Pass a read on as it came, framing and all, where it is a chunk of one plain event.

        Where a model is slower than the wire, nearly every read is: so this is all that an event costs.
        """
        try:
            frame = self._stream.chunk(data)
            if not frame:
                return False
            self._heard = time.monotonic()
            if self._said is not None:
                self._said.append(frame)
            if not self._caller.push_chunks(data):
                self.stopped = True
                self._answer.stop()
        except Exception as error:  # as in `feed`
            self.fault = error
            self.stopped = True
            self._answer.stop()
        return True

    async def wait(self) -> None:
        """Until it is stopped or the answer ends; one that is silent for too long is ended."""
        self._timer = self._loop.call_later(self._timeout, self._silent)
        try:
            await self._answer.pour(self.feed, self.through)
        finally:
            self._timer.cancel()

    def _silent(self) -> None:
        left = self._heard + self._timeout - time.monotonic()
        if left <= 0:
            self._answer.fail(TimeoutError())
        else:
            self._timer = self._loop.call_later(left, self._silent)
