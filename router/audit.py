"""The audit log: one chained record per event, durable before a regulated tenant's answer leaves.

A thread takes what is waiting, writes it chain by chain and syncs once (group commit); records that nobody waits for
are held for a moment, so that it wakes up once for many of them. For a regulated tenant
`intent` and `outcome` return when their record is on disk, and raise Unrecorded when it cannot be; for others
`outcome` returns at once, and what could not be written is counted and named in the chain by a later `lost` record.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import structlog
from msgspec import UNSET, UnsetType

from policies.facts import Decision
from router import policy_files
from router.audit_chain import Body, Chain, Content, Entry, control
from router.audit_keys import ROUTER, AuditError, Signer
from router.audit_lines import BATCH
from router.call import Call, Usage
from router.errors import Unrecorded
from router.facts_record import DecisionRecord, pack_all, pack_decision, pack_made

if TYPE_CHECKING:
    from router.audit_anchor import Anchor
    from router.tenants import Tenant

log = structlog.get_logger(__name__)

_LINGER = 0.08
"""Seconds that records nobody waits for are held, to be handed to the thread together."""
_MOST_HELD = 2**19
"""Bytes of content that are held for that; long answers go sooner, or they would be most of the router's memory."""
_MAX_WAITING = 64 * 2**20
"""Bytes of content that may wait for the disk; beyond, a record is refused or lost."""


class Outcome(msgspec.Struct, frozen=True):
    """How a call ended. Texts are content: kept as the tenant says, never in clear."""

    result: Literal["answered", "refused", "failed", "cancelled"]
    status: int
    """HTTP status for the caller; of a stream, the one it began with."""
    deployment: str | None = None
    """The one that answered; None where none did."""
    transport: str | None = None
    error: str | None = None
    """Code, never a message."""
    usage: Usage = msgspec.field(default_factory=Usage)
    run: msgspec.Raw | None = None
    fingerprints: dict[str, str] = {}
    """Digests of what ran: pair, models, tokenizers."""
    tried: tuple[str, ...] = ()
    """Deployments that failed before, in order."""
    cost: float | None = None
    """USD."""
    ttft_ms: float | None = None
    total_ms: float | None = None
    answer: bytes | None = None
    hint: bytes | None = None
    """What a relay's sharer wrote."""
    tokens: bytes | None = None
    """Ids of the answer's tokens by choice, JSON."""
    hint_left_out: bool = False
    """The receiver had no room for the hint, and answered alone."""


class _Job(msgspec.Struct, eq=False):
    tenant: str
    entry: Entry
    done: asyncio.Future[None] | None
    weight: int
    """Bytes, about."""
    records: int = 1
    """Records missing from the chain if this one is not written."""
    asker: Tenant | None = None
    """Whose policy the record names by its digest."""


class Audit:
    """The log below one folder. `start` before use, `close` at the end; several processes may share the folder."""

    def __init__(
        self,
        root: Path,
        *,
        rotate_bytes: int = 64 * 2**20,
        checkpoint_every: int = 1024,
        patience: float = 10.0,
        anchor: Anchor | None = None,
    ) -> None:
        """`anchor` is opened and closed with the log."""
        self.root = root
        self.anchor = anchor
        self.lost = 0
        """Records of tenants that are not regulated, which could not be written. For the metrics."""
        self.before: Callable[[], None] | None = None
        """Called before anything but a request is recorded: notes requests that have just ended, to stand before it."""
        self._options = {"rotate_bytes": rotate_bytes, "checkpoint_every": checkpoint_every}
        self._patience = patience
        self._jobs: queue.SimpleQueue[list[_Job] | None] = queue.SimpleQueue()
        self._held: list[_Job] = []
        self._held_weight = 0
        self._waiting = 0
        self._missing: Counter[str] = Counter()
        """Lost records that their chain does not name yet, by tenant."""
        self._begun: set[str] = set()
        """Ids whose intent, and so whose request, is on record, and whose outcome is to come."""
        self._chains: dict[str, Chain] = {}
        self._kept: set[str] = set()
        """Digests of policies that lie in the folder. The thread's."""
        self._thread: threading.Thread | None = None

    async def start(self, about: dict[str, Any] | None = None) -> None:
        """Create folder and keys where there are none, and record the start, with what is in force (`about`).

        Raises Unrecorded where that fails.
        """
        try:
            self._signer = await asyncio.to_thread(self._prepare)
        except (OSError, AuditError) as error:
            raise _unrecorded(error) from error
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
        self._thread.start()
        try:
            await self.control("started", "router", {"key": self._signer.id, **(about or {})})
        except Unrecorded:
            await self.close()
            raise
        if self.anchor is not None:
            self.anchor.start()

    async def close(self) -> None:
        """Write what waits, and a checkpoint over each chain."""
        thread = self._thread
        if thread is not None:
            self._put(control("stopped", "router", {}), ROUTER, None)
            self._hand_over()
            self._thread = None
            self._jobs.put(None)
            await asyncio.to_thread(thread.join)
            if self.anchor is not None:
                await asyncio.to_thread(self.anchor.close)

    def regulated(self, tenant: Tenant) -> bool:
        """No record, no answer; and the whole dialogue is kept."""
        return tenant.policy.regulated

    async def intent(self, call: Call, decision: Decision) -> None:
        """Before a model is called. Durable on return for a regulated tenant; nothing for others."""
        if self.regulated(call.tenant):
            self._check_anchor()
            body = _ripe(_Intent(*_packed(call, decision)))
            entry = Entry("intent", body, call.id, {"request": _request(call)}, "full", call.subject)
            await self._durable(entry, call.tenant.name, call.tenant)
            self._begun.add(call.id)

    def _check_anchor(self) -> None:
        try:
            if self.anchor is not None:
                self.anchor.check()
        except AuditError as error:
            raise Unrecorded(f"{error}, and a regulated answer needs it, so there is none") from error

    async def outcome(self, call: Call, decision: Decision | None, outcome: Outcome) -> None:
        """Before the answer (of a stream: its last frame) leaves. Durable on return for a regulated tenant.

        Call it once for each intent, however the call ended; a call that never had one is recorded whole here.
        """
        entry = self._ended(call, decision, outcome, time.time())
        if call.tenant.policy.regulated:
            await self._durable(entry, call.tenant.name, call.tenant)
        else:
            self._put(entry, call.tenant.name, None, asker=call.tenant)

    def note(self, ended: Iterable[tuple[Call, Decision | None, Outcome, float]]) -> None:
        """As `outcome`, of calls that nobody waits for: each with its end in Unix seconds."""
        for call, entry in [(one[0], self._ended(*one)) for one in ended]:
            self._put(entry, call.tenant.name, None, asker=call.tenant)

    def _ended(self, call: Call, decision: Decision | None, outcome: Outcome, at: float) -> Entry:
        begun = call.id in self._begun
        self._begun.discard(call.id)
        keep: Content = "full" if call.tenant.policy.regulated else call.tenant.audit.content
        texts: dict[str, bytes] = {}
        if keep != "none":
            if outcome.answer is not None:
                texts["answer"] = outcome.answer
            if outcome.hint is not None:
                texts["hint"] = outcome.hint
            if outcome.tokens is not None:
                texts["tokens"] = outcome.tokens
            if not begun:
                texts["request"] = _request(call)
        return Entry("outcome", _ripe(_outcome(call, decision, outcome)), call.id, texts, keep, call.subject, at)

    async def chunk(self, call: Call, number: int, piece: bytes, hint: str | None = None) -> None:
        """A piece of a streamed answer, before it is relayed; `hint` is a relay's, with the first. Durable on return.

        One piece is what was read from the upstream at once: while a commit lasts the next one gathers there.
        """
        texts = {"chunk": piece} if hint is None else {"hint": hint.encode(), "chunk": piece}
        keep: Content = "full" if self.regulated(call.tenant) else call.tenant.audit.content
        await self._durable(Entry("chunk", {"n": number}, call.id, texts, keep, call.subject), call.tenant.name)

    def beside(self, call: Call, what: str, detail: dict[str, Any], texts: dict[str, bytes]) -> None:
        """Something found out afterwards about a recorded request, in its tenant's chain. Nobody waits for it."""
        if self.before is not None:
            self.before()
        keep: Content = "full" if self.regulated(call.tenant) else call.tenant.audit.content
        body = {"what": what, "who": "router", "detail": detail}
        entry = Entry("control", body, call.id, texts if keep != "none" else {}, keep, call.subject)
        self._put(entry, call.tenant.name, None, asker=call.tenant)

    async def control(self, what: str, who: str, detail: dict[str, Any], tenant: str | None = None) -> None:
        """Something done to the router, or to one tenant's part of it. Durable on return; raises Unrecorded."""
        if self.before is not None:
            self.before()
        await self._durable(control(what, who, detail), tenant or ROUTER)

    async def _durable(self, entry: Entry, tenant: str, asker: Tenant | None = None) -> None:
        done = self._loop.create_future()
        self._put(entry, tenant, done, asker=asker)
        try:
            async with asyncio.timeout(self._patience):
                await done
        except TimeoutError as error:
            raise _unrecorded(error) from error

    def _put(
        self,
        entry: Entry,
        tenant: str,
        done: asyncio.Future[None] | None,
        records: int = 1,
        asker: Tenant | None = None,
    ) -> None:
        job = _Job(tenant, entry, done, 1024 + sum(map(len, entry.content.values())), records, asker)
        self._waiting += job.weight
        if self._thread is None:
            self._finish([(job, AuditError("the log is not open"))])
        elif self._waiting > _MAX_WAITING:
            self._finish([(job, AuditError("too much waits for the disk"))])
        else:
            self._held.append(job)
            self._held_weight += job.weight
            if done is not None:
                self._hand_over(tenant)
            elif len(self._held) >= BATCH or self._held_weight > _MOST_HELD:
                self._hand_over()
            elif len(self._held) == 1:
                self._loop.call_later(_LINGER, self._hand_over)

    def _hand_over(self, tenant: str | None = None) -> None:
        """What is held; of one tenant where somebody waits for that: other chains' syncs would keep them waiting."""
        if tenant is None:
            held, self._held, self._held_weight = self._held, [], 0
        else:
            held = [job for job in self._held if job.tenant == tenant]
            self._held = [job for job in self._held if job.tenant != tenant]
            self._held_weight -= sum(job.weight for job in held)
        if held and self._thread is not None and self._thread.is_alive():
            self._jobs.put(held)
        else:
            self._finish([(job, AuditError("the log is not open")) for job in held])

    def _finish(self, results: Sequence[tuple[_Job, Exception | None]]) -> None:
        """On the loop: tell who waits, and count what nobody waits for until the chain names it."""
        for job, error in results:
            self._waiting -= job.weight
            if job.done is None and error is not None:
                self.lost += job.records if job.entry.kind == "outcome" else 0
                self._missing[job.tenant] += job.records
            elif job.done is not None and not job.done.done():
                job.done.set_result(None) if error is None else job.done.set_exception(_unrecorded(error))
        if not self._missing:
            return
        for tenant in {job.tenant for job, error in results if error is None and self._missing[job.tenant]}:
            records = self._missing.pop(tenant)
            self._put(control("lost", "router", {"records": records}), tenant, None, records)

    def _prepare(self) -> Signer:
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Signer.load(self.root)

    def _run(self) -> None:
        """The thread: batches until the end, then checkpoints."""
        more = True
        while more:
            waiting, more = self._gather()
            for tenant in dict.fromkeys(job.tenant for job in waiting):
                jobs = [job for job in waiting if job.tenant == tenant]
                for start in range(0, len(jobs), BATCH):
                    results = self._write(tenant, jobs[start : start + BATCH])
                    # A loop that closes while records are still being written has nobody left to tell.
                    with contextlib.suppress(RuntimeError):
                        self._loop.call_soon_threadsafe(self._finish, results)
        for chain in self._chains.values():
            try:
                chain.close()
            except (OSError, AuditError) as error:
                log.error("audit_checkpoint_failed", tenant=chain.tenant, error=str(error))

    def _gather(self) -> tuple[list[_Job], bool]:
        """What has been handed over, at least one job's worth; False after the last."""
        waiting: list[_Job] = []
        held = self._jobs.get()
        while held is not None:
            waiting += held
            if len(waiting) >= BATCH:
                return waiting, True
            try:
                held = self._jobs.get_nowait()
            except queue.Empty:
                return waiting, True
        return waiting, False

    def _write(self, tenant: str, jobs: list[_Job]) -> list[tuple[_Job, Exception | None]]:
        """One commit to one chain. What fails, fails for these jobs alone."""
        try:
            self._keep_policies(jobs)
            if tenant not in self._chains:
                self._chains[tenant] = Chain(self.root, tenant, self._signer, **self._options)
            errors = self._chains[tenant].append([job.entry for job in jobs])
        except Exception as error:  # whatever it is, those who wait must be told
            errors = [error] * len(jobs)
        failed = [error for error in errors if error is not None]
        if self.anchor is not None and len(failed) < len(jobs):
            self.anchor.wrote(len(jobs) - len(failed))
        if failed:
            log.error("audit_write_failed", tenant=tenant, records=len(failed), error=str(failed[0]))
        return list(zip(jobs, errors, strict=True))

    def _keep_policies(self, jobs: list[_Job]) -> None:
        for job in jobs:
            asker = job.asker
            if asker is not None and asker.record and asker.digest not in self._kept:
                policy_files.keep(self.root, asker.digest, asker.record)
                self._kept.add(asker.digest)


def _ripe(body: _Intent) -> Body:
    """As JSON: the thread that writes has so little left to do that a batch of it fits between two turns of the
    interpreter's lock. One that cannot be made JSON is left as it is, for the chain to say so."""
    try:
        return msgspec.Raw(msgspec.json.encode(body))
    except (TypeError, ValueError, msgspec.MsgspecError):
        return body


def _unrecorded(error: Exception) -> Unrecorded:
    """The caller learns that there is no record; the cause stays in our log."""
    failure = Unrecorded("the audit record of this request could not be written, so there is no answer")
    failure.__cause__ = error
    return failure


def _request(call: Call) -> bytes:
    return msgspec.json.encode(call.fields)


class _Intent(msgspec.Struct, gc=False):
    """A record's members in the order in which they are written, but for those that every record has."""

    path: str
    model: str
    stream: bool
    hint: str
    budget_ms: float | None
    pinned: str | None
    policy: str
    method: str | UnsetType
    chosen: str | UnsetType | None
    decision: msgspec.Raw | DecisionRecord | UnsetType
    guardrails: tuple[str, ...] | UnsetType
    later: list[msgspec.Raw] | UnsetType
    facts: msgspec.Raw | UnsetType


class _Outcome(_Intent, gc=False):
    """With how the call ended. What `Outcome` has, but for the texts."""

    result: str
    status: int
    deployment: str | None
    transport: str | None
    error: str | None
    tried: tuple[str, ...]
    usage: Usage
    cost: float | None
    run: Any
    fingerprints: dict[str, str]
    ttft_ms: float | None
    total_ms: float | None
    hint_left_out: bool | UnsetType


def _outcome(call: Call, decision: Decision | None, outcome: Outcome) -> _Outcome:
    ended = (
        outcome.result,
        outcome.status,
        outcome.deployment,
        outcome.transport,
        outcome.error,
        outcome.tried,
        outcome.usage,
        outcome.cost,
        None if outcome.run is None else msgspec.json.decode(outcome.run),
        outcome.fingerprints,
        outcome.ttft_ms,
        outcome.total_ms,
        outcome.hint_left_out or UNSET,
    )
    return _Outcome(*(_packed(call, decision) + ended))


def _packed(call: Call, first: Decision | None) -> tuple[Any, ...]:
    """The members of `_Intent`: every decision, and what each was made from."""
    tenant, decided = call.tenant, call.decided
    rules = tenant.policy.plan.names
    packed = pack_made(decided, call.packed, rules)
    decision: msgspec.Raw | DecisionRecord | UnsetType = UNSET
    if first is not None:
        decision = packed[0][1] if packed and first is decided[0][1] else pack_decision(first, rules)
    return (
        call.path,
        call.model,
        call.stream,
        call.hint,
        call.budget_ms,
        call.pinned,
        tenant.digest,
        UNSET if call.raw is None else call.raw.method,
        UNSET if first is None else first.chosen,
        decision,
        call.guardrails or UNSET,
        [record for _, record in packed[1:]] if len(packed) > 1 else UNSET,
        pack_all(packed) if packed else UNSET,
    )
