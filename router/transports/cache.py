"""Deployments that a worker runs: a pair (cache lane) or one of its models alone (text lane).

The worker speaks OpenAI's interface (`workers.protocol`); which worker is called is looked up for each call, because
workers come, go and fill up.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from router.call import Call, Reply
from router.demotion import Demotion
from router.errors import Refused, TransportError, Unavailable
from router.transports.openai_http import Pools, Target, exchange
from workers.protocol import (
    ACCOUNT,
    DEADLINE_MS,
    KV_ENCRYPT,
    KV_MAX_BYTES,
    KV_TTL,
    RECORD,
    TENANT,
    WEIGHT,
    ModelState,
    PairState,
    WorkerState,
)

Role = Literal["pair", "model"]
_BEYOND_S = 1.0
"""How long after the router a worker gives up on an answer: the router ends it first where it can reach the worker."""


class Fleet(Protocol):
    """The workers as they stand now."""

    def workers(self) -> Sequence[WorkerState]:
        """Those whose heartbeat is fresh; costs no I/O."""

    @property
    def settled(self) -> bool:
        """Every worker that is spawned here has once loaded all it should."""

    async def start(self) -> None:
        """Begin to look for workers; returns at once."""

    async def close(self) -> None:
        """End what was started."""


@dataclass(frozen=True, slots=True)
class KnownFleet:
    """Workers named beforehand: for a router without any, and for tests."""

    states: list[WorkerState] = field(default_factory=list)

    def workers(self) -> Sequence[WorkerState]:
        return self.states

    @property
    def settled(self) -> bool:
        return True

    async def start(self) -> None:
        """Nothing to look for."""

    async def close(self) -> None:
        """Nothing to end."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker and what it says of the pair or model in question."""

    worker: WorkerState
    state: PairState | ModelState


def holders(fleet: Fleet, role: Role, name: str) -> list[Holder]:
    """Live workers that hold it, the ready and least busy first."""
    found = [
        Holder(worker, state)
        for worker in fleet.workers()
        for state in (worker.pairs if role == "pair" else worker.models)
        if state.name == name
    ]
    if len(found) > 1:
        random.shuffle(found)
        found.sort(key=lambda h: (not h.state.ready, (h.worker.running + h.worker.queued) / h.worker.max_running))
    return found


def held(fleet: Fleet, role: Role, name: str, demotion: Demotion) -> list[Holder]:
    """The same; of a pair those with the fingerprint that is accepted.

    Where none of them is ready and another is, the pair was swapped: `demotion` hears of it, and may no longer want it.
    """
    found = holders(fleet, role, name)
    if role == "model" or not found:
        return found
    wanted = demotion.standing(name).fingerprint
    own = [holder for holder in found if holder.state.fingerprint == wanted]
    if any(holder.state.ready for holder in own):
        return own
    ready = next((holder.state for holder in found if holder.state.ready), None)
    if ready is None or not isinstance(ready, PairState):
        return own or found
    demotion.observe_fingerprint(name, ready.fingerprint, ready.verdict)
    return [holder for holder in found if holder.state.fingerprint == ready.fingerprint]


class OnWorker:
    """One pair or model, wherever a live worker holds it."""

    def __init__(
        self, role: Role, name: str, fleet: Fleet, pools: Pools, demotion: Demotion, *, timeout: float
    ) -> None:
        self._role: Role = role
        self._name = name
        self._fleet = fleet
        self._pools = pools
        self._demotion = demotion
        self._timeout = timeout
        self._gives_up = str(round((timeout + _BEYOND_S) * 1000))

    async def send(self, call: Call) -> Reply:
        ready = [h for h in held(self._fleet, self._role, self._name, self._demotion) if h.state.ready]
        if not ready:
            raise Unavailable(f"No live worker holds {self._role} {self._name!r}.", headers={"retry-after": "5"})
        url = ready[0].worker.url
        base = url if url.startswith("unix:") else url.rstrip("/").removesuffix("/v1") + "/v1"
        target = Target(base=base, model=self._name, timeout=self._timeout, worker=True)
        try:
            return await exchange(self._pools, target, call, scope(call, self._gives_up))
        except Refused as error:
            # The caller's mistake here may be none elsewhere: another deployment has a longer context.
            raise TransportError(
                error.message, status=error.status, type=error.type, param=error.param, code=error.code
            ) from error
        except TransportError as error:
            if error.code == "upstream_not_found":
                raise Unavailable(f"The worker no longer holds {self._role} {self._name!r}.") from error
            raise

    async def close(self) -> None:
        """Nothing of its own: whoever made the pools closes them."""


def scope(call: Call, gives_up: str) -> dict[str, str]:
    """Headers that say on whose account it runs, whose KV may be read and written, and after how many milliseconds
    nobody waits any more for a plain answer. A stream may go on for as long as it brings something.
    """
    headers = {ACCOUNT: call.tenant.name, WEIGHT: str(call.tenant.weight)}
    if call.tenant.audit.content == "full":
        headers[RECORD] = "1"
    kv = call.tenant.kv
    if kv.reuse != "none":
        headers[TENANT] = call.tenant.name
        headers[KV_TTL] = str(int(kv.ttl))
        headers[KV_MAX_BYTES] = str(kv.max_bytes)
        if kv.encrypt:
            headers[KV_ENCRYPT] = "1"
    if not call.stream:
        headers[DEADLINE_MS] = gives_up
    return headers
