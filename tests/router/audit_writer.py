"""Calls, decisions and tenants for the audit tests; run as a program, a process that writes until it is ended.

`python -m tests.router.audit_writer FOLDER TENANT COUNT NAME [FSIZE]` prints `begun ID` after each intent, `ended ID`
after each outcome, and `refused ID` where there is no record. FSIZE limits the size of each file it writes.
The request `NAMEfirst` stays open as long as the others run.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import msgspec

from policies.facts import Decision, Judged, Verdict
from policies.policy import Policy
from router.audit import Audit, Outcome
from router.call import Call, Usage
from router.errors import Unrecorded
from router.tenants import AuditPolicy, Tenant

QUESTION = "marker-question-4711"
ANSWER = "marker-answer-0815"


def tenant(name: str = "bank", *, regulated: bool = True, content: Any = "full") -> Tenant:
    return Tenant(name, policy=Policy(regulated=regulated), audit=AuditPolicy(content=content), digest="d" * 64)


def call(id: str, tenant: Tenant, question: str = QUESTION, **changes: Any) -> Call:
    messages = msgspec.json.encode([{"role": "user", "content": question}])
    fields = {"model": msgspec.Raw(b'"assistant"'), "messages": msgspec.Raw(messages)}
    asked: dict[str, Any] = {"path": "/chat/completions", "model": "assistant", "stream": True, "include_usage": False}
    return Call(id=id, tenant=tenant, fields=fields, started=0.0, **asked | changes)


def decision() -> Decision:
    judged = (
        Judged("solo", "text", (Verdict(True, "ok"),)),
        Judged("duo", "cache", (Verdict(False, "regulated_text_only"),)),
    )
    return Decision("assistant", ("solo",), "only_survivor", judged)


def outcome(answer: str = ANSWER, **changes: Any) -> Outcome:
    known: dict[str, Any] = {
        "result": "answered",
        "status": 200,
        "deployment": "solo",
        "transport": "text",
        "usage": Usage(12, 3, 0, True),
        "run": msgspec.Raw(b'{\n "fingerprint": "fp-run"\n}'),
        "fingerprints": {"model": "fp-model"},
        "answer": answer.encode(),
    }
    return Outcome(**known | changes)


async def write(folder: Path, name: str, count: int, ids: str) -> None:
    audit = Audit(folder, rotate_bytes=20_000, checkpoint_every=16)
    await audit.start()

    async def one(id: str, work: Awaitable[object]) -> None:
        asked = call(id, tenant(name))
        try:
            await audit.intent(asked, decision())
            print("begun", id, flush=True)
            await work
            await audit.outcome(asked, decision(), outcome())
            print("ended", id, flush=True)
        except Unrecorded:
            print("refused", id, flush=True)

    others = asyncio.Event()
    first = asyncio.create_task(one(f"{ids}first", others.wait()))
    for start in range(0, count, 4):
        await asyncio.gather(*(one(f"{ids}{n}", asyncio.sleep(0.001)) for n in range(start, min(start + 4, count))))
    others.set()
    await first
    await audit.close()


if __name__ == "__main__":
    if len(sys.argv) > 5:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[5]), resource.RLIM_INFINITY))
    asyncio.run(write(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]))
