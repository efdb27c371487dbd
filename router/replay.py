"""Runs a recorded request again and compares: the same tokens, or the first difference and its cause.

The request goes down the very transport that answered it, with the seed that was used then; nothing of it is stored,
recorded or counted. Counterfactuals show what a pair's sharer changed in this answer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from router.agreement import exact, token_f1
from router.app import App, create_app
from router.call import Call, Reply
from router.deployments import Deployment
from router.errors import RouterError, TransportError
from router.gather import on_worker
from router.recorded import NothingToReplay, Recorded, With, texts_of
from router.settings import Settings
from router.tenant_config import AuditPolicy
from router.tenants import Tenant
from router.transports.cache import KnownFleet, holders
from router.twin import Said, Twin
from router.wire import given
from workers.config import KVPolicy
from workers.errors import SameText
from workers.protocol import Run, WorkerState

_TEXT_ONLY = ("stream", "stream_options")


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two answers part: `position` counts tokens where both are known, else characters."""

    choice: int
    unit: Literal["token", "character"]
    position: int
    recorded: str
    """From there on, some characters; with the token's id where it is known."""
    now: str


@dataclass(frozen=True, slots=True)
class Cause:
    """Why two runs differ. `code` is stable, see docs/audit.md."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True)
class Otherwise:
    """One counterfactual beside the recorded answer."""

    kind: With
    text: str
    exact: bool
    f1: float
    hint: str | None = None
    error: str = ""
    """Why there is none; the rest is then empty."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of one request run again."""

    id: str
    tenant: str
    deployment: str
    transport: str
    identical: bool
    tokens: int
    """Of the recorded answer, 0 where it is known as text only."""
    promised: bool
    """A worker of ours answered: the same digests and numerics give the same tokens."""
    difference: Difference | None = None
    cause: Cause | None = None
    answer: str = ""
    """As recorded, the first choice."""
    otherwise: tuple[Otherwise, ...] = ()


class Replayer:
    """Over the workers given. `close` when done."""

    def __init__(self, settings: Settings, workers: Sequence[WorkerState]) -> None:
        self._fleet = KnownFleet(list(workers))
        self._app: App = create_app(settings, fleet=self._fleet)
        self._dispatcher = self._app.endpoint.dispatcher

    async def close(self) -> None:
        """Give up all connections."""
        await self._app.close()

    async def run(self, recorded: Recorded, kinds: Sequence[With] = (), other: Sequence[Recorded] = ()) -> Replay:
        """Run it again, and as each of `kinds`; `other` are requests whose text a shuffled sharer may read.

        Raises NothingToReplay.
        """
        deployment = self._deployment(recorded)
        before = texts_of(recorded.answer)
        reply = await self._send(recorded, deployment)
        run, tokens = told_by(reply)
        after = texts_of(msgspec.json.decode(reply.body, type=dict[str, Any]))
        difference = first_difference(before, after, recorded.tokens, tokens)
        cause = None if difference is None else why(recorded, run, hint=reply.hint)
        return Replay(
            id=recorded.id,
            tenant=recorded.tenant,
            deployment=deployment.id,
            transport=recorded.transport,
            identical=difference is None,
            tokens=sum(map(len, recorded.tokens)),
            promised=recorded.run is not None,
            difference=difference,
            cause=cause,
            answer=before[0],
            otherwise=tuple([await self._otherwise(recorded, deployment, kind, other) for kind in kinds]),
        )

    def _deployment(self, recorded: Recorded) -> Deployment:
        found = self._dispatcher.deployments.get(recorded.deployment)
        if found is None:
            raise NothingToReplay(
                "unknown_deployment", f"deployment {recorded.deployment!r} is not configured any more"
            )
        return found

    def _tenant(self, name: str) -> Tenant:
        tenant = self._app.parts.tenants.get(name) or Tenant(name)
        return replace(tenant, kv=KVPolicy(reuse="none"), audit=AuditPolicy(content="full"))

    async def _send(self, recorded: Recorded, deployment: Deployment) -> Reply:
        fields = _fields(recorded)
        call = Call(
            id=recorded.id,
            tenant=self._tenant(recorded.tenant),
            path=recorded.path,
            model=deployment.model_name,
            fields=fields,
            stream=False,
            include_usage=False,
            started=time.perf_counter(),
        )
        try:
            reply = await self._dispatcher.transports[deployment.id].send(call)
            await reply.aclose()
        except RouterError as error:
            code = "no_worker" if error.code == "unavailable" or error.status == 503 else "refused"
            raise NothingToReplay(code, f"{deployment.id}: {error.message}") from error
        return reply

    async def _otherwise(
        self, recorded: Recorded, deployment: Deployment, kind: With, other: Sequence[Recorded]
    ) -> Otherwise:
        named = on_worker(deployment)
        if named is None or named[0] != "pair":
            return Otherwise(kind, "", False, 0.0, error="only an answer of a pair has counterfactuals")
        ready = [h for h in holders(self._fleet, *named) if h.state.ready]
        if not ready:
            return Otherwise(kind, "", False, 0.0, error=f"no live worker holds pair {named[1]}")
        twin = Twin(self._app.parts.pools, ready[0].worker.url, named[1])
        try:
            said = await self._ask(twin, recorded, kind, other)
        except (RouterError, NothingToReplay) as error:
            return Otherwise(kind, "", False, 0.0, error=str(error))
        before = texts_of(recorded.answer)[0]
        return Otherwise(kind, said.text, exact(before, said.text), token_f1(before, said.text), said.hint)

    async def _ask(self, twin: Twin, recorded: Recorded, kind: With, other: Sequence[Recorded]) -> Said:
        fields, chat = _fields(recorded), recorded.path == "/chat/completions"
        if kind == "relay":
            if not chat:
                raise NothingToReplay("refused", "a relay answers chats only")
            return await twin.relay(fields)
        if kind != "shuffled":
            return await twin.ask(fields, kind, chat=chat)
        for messages in _other_messages(recorded, other):
            try:
                return await twin.ask(fields, kind, chat=chat, other=messages)
            except TransportError as error:
                # A pair may read only a part of a request, and that may be the same in both.
                if error.code != SameText.code:
                    raise
        raise NothingToReplay("refused", "shuffled needs another recorded request that tells the sharer something else")


def _fields(recorded: Recorded) -> dict[str, msgspec.Raw]:
    """The request as it was, not streamed, with the seed that was drawn for it."""
    fields = {name: value for name, value in recorded.request.items() if name not in _TEXT_ONLY}
    run = recorded.run
    if run is not None and run.seed is not None and not given(fields, "seed"):
        fields["seed"] = msgspec.Raw(msgspec.json.encode(run.seed))
    return fields


def _other_messages(recorded: Recorded, other: Sequence[Recorded]) -> Iterator[list[Any]]:
    own = recorded.request.get("messages")
    for candidate in other:
        messages = candidate.request.get("messages")
        if messages is not None and messages != own:
            yield msgspec.json.decode(messages, type=list[Any])


def told_by(reply: Reply) -> tuple[Run | None, tuple[tuple[int, ...], ...]]:
    """What the worker told, and its tokens; nothing where no worker answered."""
    if reply.run is None:
        return None, ()
    run = msgspec.json.decode(reply.run, type=Run)
    return run, run.tokens


def first_difference(
    before: Sequence[str],
    after: Sequence[str],
    tokens_before: Sequence[tuple[int, ...]],
    tokens_after: Sequence[tuple[int, ...]],
) -> Difference | None:
    """By token where both sides know them, else by character; None where there is none."""
    known = len(tokens_before) == len(before) and len(tokens_after) == len(after)
    for choice in range(max(len(before), len(after))):
        old, new = _at(before, choice, ""), _at(after, choice, "")
        at = _parting(old, new)
        if known:
            ids, now = _at(tokens_before, choice, ()), _at(tokens_after, choice, ())
            if ids != now:
                here = _parting(ids, now)
                return Difference(choice, "token", here, _shown(old, at, ids, here), _shown(new, at, now, here))
        elif old != new:
            return Difference(choice, "character", at, old[at : at + 60], new[at : at + 60])
    return None


def _at(values: Sequence[Any], index: int, missing: Any) -> Any:
    return values[index] if index < len(values) else missing


def _parting(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Index of the first element that differs; the shorter one's length where it is the other's beginning."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _shown(text: str, at: int, ids: tuple[int, ...], here: int) -> str:
    token = str(ids[here]) if here < len(ids) else "end"
    return f"[{token}] {text[at : at + 60]}"


def why(recorded: Recorded, run: Run | None, hint: str | None = None) -> Cause:
    """The cause of a difference, the most telling first."""
    before = recorded.run
    if recorded.guardrails:
        return Cause("guarded", f"{', '.join(recorded.guardrails)} may have changed the answer before it was recorded")
    if recorded.hint is not None and hint != recorded.hint:
        return Cause("hint_differs", "the relay's sharer wrote another hint this time, which the receiver read")
    if before is None or run is None:
        return Cause("not_reproducible", "no worker of ours answered: an upstream promises no second same answer")
    for part in sorted(before.digests.keys() | run.digests.keys()):
        old, new = before.digests.get(part, "none"), run.digests.get(part, "none")
        if old != new:
            return Cause(f"{part}_differs", f"the {part} is another one: recorded {old}, now {new}")
    if before.fingerprint != run.fingerprint:
        detail = f"mode, scope or recipe changed: fingerprint {before.fingerprint}, now {run.fingerprint}"
        return Cause("pair_differs", detail)
    if before.numerics != run.numerics:
        return Cause("numerics_differ", _parts(before.numerics, run.numerics))
    if before.seed is None and run.seed is not None:
        return Cause("no_seed", "the answer was sampled, and the record holds no seed")
    if before.reused_tokens and "kv int8" in before.numerics:
        return Cause("lossy_kv", f"{before.reused_tokens} tokens came from KV stored as int8; now all were computed")
    if before.beside:
        detail = f"{before.beside} other answers were decoded together with it, which may change low bits"
        return Cause("answers_beside", detail)
    return Cause("unexplained", "same digests, numerics and seed: a fault, or the record does not belong to the answer")


def _parts(before: str, now: str) -> str:
    old, new = before.split(", "), now.split(", ")
    gone, come = [p for p in old if p not in new], [p for p in new if p not in old]
    return f"recorded on {', '.join(gone) or 'nothing that is told'}, now on {', '.join(come) or 'nothing more'}"
