"""What crosses between router and worker. Torch-free.

The wire is the OpenAI HTTP interface itself, over a Unix socket or TCP: `model` names a pair or a model of the
worker, the answer is an OpenAI body or SSE stream, so a worker can be tried with curl and the router relays its
bytes like any upstream's. What OpenAI has no field for travels in the headers below and in `twolane` beside `usage`
of the last event (or of the plain body). Tensors never cross.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

TENANT = "x-twolane-tenant"
"""Request: the scope under which KV is stored and found. Absent: nothing is stored or found."""
KV_TTL = "x-twolane-kv-ttl"
"""Request: seconds a stored artefact may live."""
KV_MAX_BYTES = "x-twolane-kv-max-bytes"
"""Request: the tenant's byte budget."""
KV = "x-twolane-kv"
"""Response: `reused/total`, prompt tokens whose KV came from the store, and all prompt tokens."""
KV_ENCRYPT = "x-twolane-kv-encrypt"
"""Request: `1` has the tenant's stored KV encrypted at rest."""
ACCOUNT = "x-twolane-account"
"""Request: whose share of the device it uses. Absent: a common one."""
WEIGHT = "x-twolane-weight"
"""Request: the weight of that account, 1 where it is absent; twice the weight is twice the share."""
DEADLINE_MS = "x-twolane-deadline-ms"
"""Request: after so many milliseconds the answer is worth nothing; the worker gives up."""
RECORD = "x-twolane-record"
"""Request: `1` has the answer's token ids told in `Run.tokens`, for a record that keeps texts."""


Otherwise = Literal["same", "receiver", "sharer", "zero", "shuffled"]


class Counterfactual(msgspec.Struct, frozen=True):
    """Body of `POST /counterfactual`: the answer that would have been given otherwise, never streamed.

    No request of a caller leads there. Nothing of it is stored or found, and with `background` it is refused or given
    up (503 `overloaded`) as soon as anybody else asks.
    """

    request: msgspec.Raw
    """An OpenAI body; `model` is a pair, or with `same` also a model."""
    kind: Otherwise = "same"
    """`same`; one model of the pair alone, of several sharers the first; the pair with sharers that say nothing or
    that read `other`.
    """
    chat: bool = True
    """False: `request` is a body of /completions."""
    other: list[Any] | None = None
    """Messages that the sharer reads in place of the request's."""
    score: str | None = None
    """No answer is made: `Run.score` says how likely this one was."""
    background: bool = False


class Run(msgspec.Struct, frozen=True, omit_defaults=True):
    """`twolane` beside `usage`: what the worker knows of one finished answer. Times in milliseconds."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    """Until the first token was chosen, queueing excluded; covers lookup, sharer, fuse and receiver."""
    sharer_ms: float = 0.0
    fuse_ms: float = 0.0
    decode_ms: float = 0.0
    device_ms: float = 0.0
    """Of the device's time, what went into this answer: its prefill, and its share of each step it was decoded in."""
    reused_tokens: int = 0
    fingerprint: str = ""
    gates_open: float = 1.0
    """Share of receiver layers whose K or V gate is open."""
    change: float = 0.0
    """Mean over layers of ‖fused − own‖ / ‖own‖; 0 where nothing was fused."""
    gates: str = ""
    """By receiver layer: `B` both gates open, `K` or `V` one, `-` none; empty where the fuser has no gates."""
    change_k: tuple[float, ...] = ()
    """By receiver layer: ‖fused − own‖ / ‖own‖ of the keys; empty where nothing was fused beside the receiver's own."""
    change_v: tuple[float, ...] = ()
    kv_read: tuple[str, ...] = ()
    """Stored KV that was used, as `role:digest:tokens`; the digest is keyed by the tenant's secret."""
    kv_written: tuple[str, ...] = ()
    digests: dict[str, str] = {}
    """What the fingerprint is made of: `model`, or `sharer`, `receiver`, `fuser`; and `template`."""
    numerics: str = ""
    """What else decides low bits: library, device, threads, chunk; parts joined by commas."""
    seed: int | None = None
    """Of the random choice of tokens, the caller's or drawn here; None where nothing was random."""
    beside: int = 0
    """Most other answers that were decoded together with this one."""
    tokens: tuple[tuple[int, ...], ...] = ()
    """Token ids by choice, where RECORD asked for them: content, never to be kept in clear."""
    score: float | None = None
    """Mean log probability of a token of the answer that was to be scored."""


class ModelState(msgspec.Struct, frozen=True):
    """One model a worker can run alone."""

    name: str
    fingerprint: str
    context: int
    """Tokens that prompt and answer may hold together."""
    ready: bool = True
    reason: str = ""


class PairState(msgspec.Struct, frozen=True):
    """One pair a worker holds, and what its report says."""

    name: str
    fingerprint: str
    mode: str
    scope: str
    fuser: str
    context: int
    ready: bool = True
    reason: str = ""
    verdict: str = "unproven"
    """verified | adapter-only | dominated | harmful | unproven | numerics_differ | withdrawn"""
    verdict_reason: str = ""
    gain: float | None = None
    """Lower bound of accuracy(cache) − accuracy(receiver)."""
    retention: float | None = None
    """Lower bound of accuracy(cache) / accuracy(receiver that reads everything)."""
    agreement: float | None = None
    """Lower bound of the token F1 between the pair's answers and its text route's."""
    signer: str = ""
    """Public key that signed pair and report; empty where nobody did."""


class Rates(msgspec.Struct, frozen=True):
    """Measured by the worker at start and updated as it runs; the router's cold-start prior."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    load_bytes_per_s: float = 0.0


class KVCount(msgspec.Struct, frozen=True, array_like=True):
    """One count of a worker's store: `name` is one of `workers.counters.Counters.NAMES`."""

    name: str
    tier: str
    role: str
    count: float


class WorkerState(msgspec.Struct, frozen=True):
    """A worker's heartbeat, in Redis and at `GET /state`."""

    name: str
    epoch: str
    """Random per start: tells a restarted worker from the one before."""
    url: str
    pid: int
    models: tuple[ModelState, ...]
    pairs: tuple[PairState, ...]
    rates: dict[str, Rates]
    """By model or pair name."""
    running: int
    queued: int
    max_running: int
    max_queued: int
    free_bytes: int
    at: float
    """Unix seconds."""
    stalled_s: float = 0.0
    """Seconds since the engine last turned while it had work; large means it hangs."""
    loading: bool = False
    """Models or pairs are still being loaded."""
    kv: tuple[KVCount, ...] = ()
    """What the store has counted since the process began."""
