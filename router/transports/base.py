"""The transport seam: one call in, one reply out."""

from __future__ import annotations

from typing import Protocol

from router.call import Call, Reply


class Transport(Protocol):
    """One way to run a deployment. Owns its connections; `close` ends them."""

    async def send(self, call: Call) -> Reply:
        """Return once the first frame is certain; raise TransportError if there will be none.

        Cancelling `send`, or closing the reply, hangs up upstream.
        """

    async def close(self) -> None:
        """Give up all connections."""
