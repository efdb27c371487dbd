"""Call and Reply: what passes between edge, dispatcher and transports.

Structs, for one of each is made for every request: as dataclasses they take twice the time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from policies.facts import Decision, Facts, Hint

if TYPE_CHECKING:
    from router.http import AtOnce
    from router.places import Place
    from router.tenants import Tenant
    from router.upload import Upload


Push = Callable[["AtOnce", list[bytes] | None], Awaitable[bytes]]


class Raw(msgspec.Struct):
    """What a request of the pass-through doors is besides its JSON, which is in `Call.fields`."""

    method: str
    target: str
    """Path below `/v1`, as it was written, and the query but for `model`."""
    headers: dict[str, str]
    """Those that pass."""
    upload: Upload | None = None
    """A body that is not JSON."""
    spent: bool = False
    """The last try failed in a way that no other may follow: its body has left, or it may have done what it should."""


class Call(msgspec.Struct):
    """One request after the edge has read it. `fields` are the body's top-level values as they were sent."""

    id: str
    """Decision id: `dec_` and 24 hex digits, also in `x-twolane-decision`."""
    tenant: Tenant
    path: str
    """Without `/v1`: `/chat/completions`, `/completions`, `/embeddings`, `/responses`, or what is passed through."""
    model: str
    fields: dict[str, msgspec.Raw]
    stream: bool
    include_usage: bool
    """The caller asked for the usage event itself."""
    started: float
    """`time.perf_counter()` at the first byte."""
    hint: Hint = "auto"
    budget_ms: float | None = None
    pinned: str | None = None
    session: str | None = None
    told_labels: str | None = None
    """`x-twolane-labels` as it was sent."""
    labels: dict[str, str] = {}
    """By label; filled before the decision where the tenant's policy asks for labels."""
    subject: str | None = None
    """The person it is about, where the tenant's `audit.subject` says to look for one. For the audit alone."""
    decided: list[tuple[Facts, Decision]] = []
    """All that was decided for this request, in order: for the group asked for, its fallback groups, a relay's halves.
    A copy made by `replace` shares it."""
    packed: list[tuple[msgspec.Raw, msgspec.Raw]] = []
    """The same as JSON, as far as it was asked for: see `facts_record.pack_made`. Shared in the same way."""
    guardrails: tuple[str, ...] = ()
    """Names of those that apply."""
    places: list[Place] = []
    """Taken on deployments with limits of their own, to be given back. Shared in the same way."""
    raw: Raw | None = None
    """Of a request that is passed through."""
    trace: str | None = None
    """`traceparent` as it was sent."""
    trace_state: str | None = None
    """`tracestate` as it was sent; of several headers the first, whose entries are the youngest."""
    span: Any = None
    """OpenTelemetry's span of this request, where traces are sent."""
    onward: Mapping[str, str] | None = None
    """Headers that tell whoever is asked which trace this belongs to."""


class Usage(msgspec.Struct):
    """What an answer cost, as far as it was told."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    known: bool = False
    unreadable: bool = False
    """It was told, as no answer can have used it: below zero, beyond measure, no whole numbers. None of it counts."""
    tier: str | None = None
    """Service tier that was asked for, or that the answer says it had."""
    image: tuple[str, str] | None = None
    """Quality and size of the images, empty where nobody told."""
    counted: dict[str, float] | None = None
    """What else was told of it, by the names of `router.prices`: kinds of tokens among the above, images, seconds."""


class _Closed:
    """In place of the frames of a reply that was closed."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        raise StopAsyncIteration


class Reply(msgspec.Struct):
    """An answer whose first frame is certain.

    Plain: `body` holds all of it. Stream: `frames` yields whole SSE events as bytes, ends with `data: [DONE]` or one
    error event, and must be closed by whoever holds the Reply (`aclose`), started or not: closing hangs up upstream.
    `usage` and `run` are filled when the last frame has passed.
    """

    status: int
    content_type: str
    body: bytes = b""
    frames: AsyncIterator[bytes] | None = None
    headers: dict[str, str] = {}
    """Headers for the caller (already filtered: no credentials, no cookies, no hop-by-hop)."""
    usage: Usage = msgspec.field(default_factory=Usage)
    run: msgspec.Raw | None = None
    """`twolane` of a worker's answer (`workers.protocol.Run`), undecoded."""
    first_frame: float | None = None
    """`perf_counter` when the first content frame arrived."""
    error: str | None = None
    """Code of what ended the stream early."""
    cost: Callable[[Reply], float | None] | None = None
    """USD of this very reply once it has ended, None where nobody can tell.

    Stands where not all is by the prices of the deployment that was asked: a relay's halves."""
    hint: str | None = None
    """What a relay's sharer wrote for the receiver; the audit keeps it where the tenant's policy says so."""
    id: msgspec.Raw | None = None
    """Of `/responses`: by which the upstream may be asked for it again, as JSON."""
    hint_left_out: bool = False
    """The receiver had no room for it, and answered alone."""

    @property
    def push(self) -> Push | None:
        """Where the frames can come without waking whoever relays them: `frames.Frames.push`."""
        found: Push | None = getattr(self.frames, "push", None)
        return found

    async def aclose(self) -> None:
        """Release the upstream; safe to call twice. Frames that know this reply are let go: they would be a cycle."""
        close = getattr(self.frames, "aclose", None)
        if close is not None:
            await close()
            self.frames = _Closed()
