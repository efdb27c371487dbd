"""The body of a passed-through request, read as its upstream takes it. Knows ASGI and forms, and no upstream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from router.errors import BadRequest, RouterError
from router.form import Form
from router.http import Gone, Message, Receive, too_large

LOOK = 2**20
"""Bytes of a form in which its field `model` is looked for before an upstream is chosen."""


class Upload:
    """A body that is not JSON. `look` at its beginning, then send `pieces`; what was looked at can be sent again."""

    def __init__(self, receive: Receive, *, length: int | None, limit: int, boundary: bytes | None) -> None:
        """`length` as the caller declared it, `boundary` of a form. Raises BadRequest past `limit` bytes."""
        if length is not None and length > limit:
            raise too_large(limit)
        self.said: str | None = None
        """The model group that the caller named, in the form or elsewhere: a form may name no other."""
        self.in_form = False
        self.fields: dict[str, str] = {}
        """Short fields of a form that stand in what was looked at: see `form.TOLD`."""
        self.failure: RouterError | None = None
        """What is wrong with the body, where that showed while it was being sent."""
        self._receive = receive
        self._length = length
        self._limit = limit
        self._boundary = boundary
        self._held: list[bytes] = []
        self._size = 0
        self._ended = False
        self._dropped = False
        self._over = asyncio.Event()
        self._gone = False

    @property
    def empty(self) -> bool:
        """There is no body at all."""
        return self._ended and not self._size

    @property
    def whole(self) -> bool:
        """All of it is at hand: it can be sent again."""
        return self._ended and not self._dropped

    @property
    def most(self) -> int:
        """Bytes that it can have."""
        return self._size if self._ended else self._limit if self._length is None else self._length

    async def look(self) -> None:
        """Read the first piece; of a form as much as it takes to find `model`. Raises BadRequest and Gone."""
        form = None if self._boundary is None else Form(self._boundary, lambda name: name)
        while not self._ended:
            piece = await self._next()
            if self._gone:
                raise Gone
            self._held.append(piece)
            if form is None:
                return
            form.feed(piece)
            self.fields = form.told
            if form.model is not None:
                self.said, self.in_form = form.model, True
                return
            if self._size > LOOK:
                return

    def length(self, model: str) -> int | None:
        """Bytes that `pieces` will give, where that is known."""
        if self._length is None or self._boundary is None:
            return self._length
        if self.in_form and self.said is not None:
            return self._length + len(model.encode()) - len(self.said.encode())
        return self._length if self._ended else None

    async def pieces(self, model: str, moved: Callable[[], None]) -> AsyncIterator[bytes]:
        """The body, with the upstream's name for the model in it. Calls `moved` with each piece."""
        form = None if self._boundary is None else Form(self._boundary, lambda name: self._renamed(name, model))
        try:
            for piece in tuple(self._held):
                moved()
                yield piece if form is None else form.feed(piece)
            while not self._ended:
                self._held.clear()
                self._dropped = True
                piece = await self._next()
                if self._gone:
                    self._over.set()
                    await asyncio.Event().wait()  # until the watch has cancelled what waits for the answer
                moved()
                yield piece if form is None else form.feed(piece)
            if form is not None:
                form.finish()
            moved()
        except RouterError as error:
            self.failure = error
            raise
        finally:
            self._over.set()

    async def after(self) -> Message:
        """What comes when nobody reads the body any more: for whoever watches for a hang-up."""
        if not self._ended:
            await self._over.wait()
        return {"type": "http.disconnect"} if self._gone else await self._receive()

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] != "http.request":
            self._gone = True
            return b""
        piece: bytes = message.get("body", b"")
        self._ended = not message.get("more_body")
        self._size += len(piece)
        if self._size > self._limit:
            raise too_large(self._limit)
        return piece

    def _renamed(self, name: str, model: str) -> str:
        if name != self.said:
            raise BadRequest(
                "The form names another model than the one the request was sent for. Write the field 'model' before "
                "the file, or name the same group by ?model= or x-twolane-model.",
                param="model",
                code="model_too_late",
            )
        return model
