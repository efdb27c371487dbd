from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.audit import Audit
from router.audit_keys import ROUTER, key_path
from router.audit_lines import feed
from router.audit_verify import Report, content, records, tenants, verify
from router.errors import Unrecorded
from tests.router.audit_writer import ANSWER, QUESTION, call, decision, outcome, tenant


@asynccontextmanager
async def opened(folder: Path, **options: Any) -> AsyncIterator[Audit]:
    audit = Audit(folder, **options)
    await audit.start()
    try:
        yield audit
    finally:
        await audit.close()


def kinds(folder: Path, name: str = "bank") -> list[str]:
    return [str(r.body.get("what", r.body["kind"])) for r in records(folder, name)]


def holds(folder: Path, name: str = "bank") -> Report:
    report = verify(folder, name)
    assert report.faults == []
    return report


def all_bytes(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


async def eventually(true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if true():
            return
        await asyncio.sleep(0.01)
    pytest.fail("never came true")


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """A real full disk, as far as one file is concerned: writes beyond `size` fail with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_regulated_records_are_there_on_return(tmp_path: Path) -> None:
    """Intent and outcome of a regulated tenant can be read back the moment their call returns."""
    async with opened(tmp_path) as audit:
        asked = call("dec_1", tenant())
        await audit.intent(asked, decision())
        assert kinds(tmp_path) == ["opened", "intent"]
        assert holds(tmp_path).open_intents == ["dec_1"]
        await audit.outcome(asked, decision(), outcome())
        assert kinds(tmp_path) == ["opened", "intent", "outcome"]
        assert holds(tmp_path).open_intents == []
    assert kinds(tmp_path)[-1] == "checkpoint"
    assert kinds(tmp_path, ROUTER) == ["opened", "started", "stopped", "checkpoint"]


async def test_record_says_all(tmp_path: Path) -> None:
    """A record names policy, every verdict, digests of what ran, the worker's figures, usage and the end."""
    async with opened(tmp_path) as audit:
        asked = call("dec_1", tenant(), hint="text", budget_ms=800.0)
        await audit.intent(asked, decision())
        await audit.outcome(asked, decision(), outcome(tried=("first",), ttft_ms=1.5))
    intent, ended = [r.body for r in records(tmp_path, "bank")][1:3]
    assert intent["policy"] == "d" * 64
    assert intent["decision"]["judged"][1]["verdicts"] == [
        {"rule": "model", "allowed": False, "code": "regulated_text_only", "detail": ""}
    ]
    assert (intent["id"], intent["chosen"], intent["hint"], intent["budget_ms"]) == ("dec_1", "solo", "text", 800.0)
    assert ended["run"] == {"fingerprint": "fp-run"}
    assert ended["fingerprints"] == {"model": "fp-model"}
    assert ended["usage"]["prompt_tokens"] == 12
    assert (ended["result"], ended["tried"], ended["ttft_ms"]) == ("answered", ["first"], 1.5)


async def test_others_get_one_record_later(tmp_path: Path) -> None:
    """A tenant that is not regulated has no intent, and one outcome which nobody waited for."""
    async with opened(tmp_path) as audit:
        asked = call("dec_1", tenant("lab", regulated=False))
        await audit.intent(asked, decision())
        await audit.outcome(asked, decision(), outcome())
    assert kinds(tmp_path, "lab") == ["opened", "outcome", "checkpoint"]
    holds(tmp_path, "lab")
    assert audit.lost == 0


async def test_long_answers_do_not_wait_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that nobody waits for are held to be written together, but not when much content is held with them."""
    monkeypatch.setattr("router.audit._LINGER", 3600.0)
    lab = tenant("lab", regulated=False)
    async with opened(tmp_path) as audit:
        await audit.outcome(call("dec_short", lab), decision(), outcome())
        await asyncio.sleep(0.05)
        assert not (tmp_path / "lab").exists(), "it is held"
        for number in range(40):
            await audit.outcome(call(f"dec_{number}", lab), decision(), outcome("long " * 6000))
        await eventually(lambda: (tmp_path / "lab").exists() and kinds(tmp_path, "lab").count("outcome") >= 18)
    assert kinds(tmp_path, "lab").count("outcome") == 41
    holds(tmp_path, "lab")


async def test_what_is_held_is_counted_beside_a_regulated_tenant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long regulated record that leaves at once is not counted as held, and what stays held is."""
    monkeypatch.setattr("router.audit._LINGER", 3600.0)
    lab, bank = tenant("lab", regulated=False), tenant()
    async with opened(tmp_path) as audit:

        async def regulated(id: str) -> None:
            await audit.intent(call(id, bank), decision())
            await audit.outcome(call(id, bank), decision(), outcome("long " * 200_000))

        await regulated("dec_1")
        await audit.outcome(call("dec_short", lab), decision(), outcome())
        await asyncio.sleep(0.05)
        assert not (tmp_path / "lab").exists(), "it is held"
        for number in range(12):
            await audit.outcome(call(f"dec_a{number}", lab), decision(), outcome("long " * 6000))
        await regulated("dec_2")
        assert not (tmp_path / "lab").exists(), "they are held still"
        for number in range(8):
            await audit.outcome(call(f"dec_b{number}", lab), decision(), outcome("long " * 6000))
        await eventually(lambda: (tmp_path / "lab").exists() and kinds(tmp_path, "lab").count("outcome") >= 17)
    assert kinds(tmp_path, "lab").count("outcome") == 21


@given(st.sampled_from([0, 1, 2046, 2047, 2048, 4094, 4095, 2**17 - 1, 2**17, 2**17 + 1]) | st.integers(0, 2**18))
def test_digested_in_pieces(size: int) -> None:
    """Text is digested to the same, whatever pieces it is fed in."""
    text = os.urandom(size)
    digest = hashlib.sha256(b"before")
    feed(digest, text)
    assert digest.digest() == hashlib.sha256(b"before" + text).digest()


@pytest.mark.parametrize("keep", ["none", "hash", "full"])
async def test_content(tmp_path: Path, keep: str) -> None:
    """No text stands in clear in any file; `hash` tells equal from different, `full` opens with the key."""
    async with opened(tmp_path) as audit:
        lab = tenant("lab", regulated=False, content=keep)
        for id, question in (("dec_1", QUESTION), ("dec_2", QUESTION), ("dec_3", "other")):
            await audit.outcome(call(id, lab, question), decision(), outcome(hint=b"marker-hint"))
    written = all_bytes(tmp_path)
    assert not any(secret in written for secret in (QUESTION.encode(), ANSWER.encode(), b"marker-hint"))
    first, second, third = [r for r in records(tmp_path, "lab") if r.body["kind"] == "outcome"]
    kept = [r.body.get("content", {}) for r in (first, second, third)]
    if keep == "none":
        assert kept == [{}, {}, {}]
    elif keep == "hash":
        assert kept[0]["request"] == kept[1]["request"] != kept[2]["request"]
    else:
        texts = content(tmp_path, "lab", holds(tmp_path, "lab").chain, first)
        assert QUESTION in texts["request"]
        assert (texts["answer"], texts["hint"]) == (ANSWER, "marker-hint")


async def test_regulated_keeps_the_dialogue(tmp_path: Path) -> None:
    """A regulated tenant's dialogue is kept whole whatever `audit.content` says, also when policy refuses."""
    async with opened(tmp_path) as audit:
        bank = tenant(content="none")
        await audit.intent(call("dec_1", bank), decision())
        await audit.outcome(call("dec_1", bank), decision(), outcome())
        await audit.outcome(call("dec_2", bank), decision(), outcome(result="refused", status=403))
    chain = holds(tmp_path).chain
    intent, ended, refused = [content(tmp_path, "bank", chain, r) for r in list(records(tmp_path, "bank"))[1:4]]
    assert QUESTION in intent["request"]
    assert ended == {"answer": ANSWER}
    assert QUESTION in refused["request"]


async def test_erased(tmp_path: Path) -> None:
    """Erasing a tenant's key ends its content for good, while the chain holds and goes on under a new key."""
    from router.audit_custody import Custody
    from router.audit_keys import AuditError

    async with opened(tmp_path) as audit:
        await audit.outcome(call("dec_1", tenant()), decision(), outcome())
        Custody(tmp_path, "bank").erase("ann", "asked to")
        await audit.outcome(call("dec_2", tenant()), decision(), outcome())
    chain = holds(tmp_path).chain
    before, after = [r for r in records(tmp_path, "bank") if r.body["kind"] == "outcome"]
    with pytest.raises(AuditError, match="erased"):
        content(tmp_path, "bank", chain, before)
    assert content(tmp_path, "bank", chain, after)["answer"] == ANSWER
    erased = next(r.body for r in records(tmp_path, "bank") if r.body.get("what") == "erased")
    assert erased["who"] == "ann"


async def test_control(tmp_path: Path) -> None:
    """What was done to the router stands in its chain, what was done to a tenant in the tenant's, with who."""
    async with opened(tmp_path) as audit:
        await audit.control("reload", "ann", {"changed": ["bank"]})
        await audit.control("purge", "bob", {"entries": 3}, tenant="bank")
    assert [(r.body["who"], r.body["detail"]) for r in records(tmp_path, ROUTER) if r.body.get("what") == "reload"] == [
        ("ann", {"changed": ["bank"]})
    ]
    assert kinds(tmp_path)[:2] == ["opened", "purge"]


async def test_disk_full(tmp_path: Path) -> None:
    """A full disk refuses a regulated answer, counts another's record, leaves no torn line, and then it goes on."""
    async with opened(tmp_path) as audit:
        lab = tenant("lab", regulated=False)
        await audit.intent(call("dec_1", tenant()), decision())
        await audit.outcome(call("dec_1", lab), decision(), outcome())
        await eventually(lambda: (tmp_path / "lab").exists() and "outcome" in kinds(tmp_path, "lab"))
        with file_limit(2000):
            for n in range(5):
                with pytest.raises(Unrecorded):
                    await audit.outcome(call("dec_1", tenant()), decision(), outcome("long" * 500))
                await audit.outcome(call(f"dec_{n}", lab), decision(), outcome("long" * 500))
            assert holds(tmp_path).open_intents == ["dec_1"]
            await eventually(lambda: audit.lost == 5)
        await audit.outcome(call("dec_1", tenant()), decision(), outcome())
        await audit.outcome(call("dec_9", lab), decision(), outcome())
        await eventually(lambda: "lost" in kinds(tmp_path, "lab"))
    assert holds(tmp_path).open_intents == []
    lost = next(r.body["detail"] for r in records(tmp_path, "lab") if r.body.get("what") == "lost")
    assert lost == {"records": 5}
    assert "recovered" not in kinds(tmp_path) + kinds(tmp_path, "lab")
    holds(tmp_path, "lab")


def remove_key(folder: Path) -> None:
    key_path(folder, "bank").unlink()


def open_key(folder: Path) -> None:
    key_path(folder, "bank").chmod(0o644)


def remove_head(folder: Path) -> None:
    (folder / "bank" / "head.json").unlink()


def remove_records(folder: Path) -> None:
    next((folder / "bank").glob("*.jsonl")).unlink()


def cut_records(folder: Path) -> None:
    path = next((folder / "bank").glob("*.jsonl"))
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [remove_key, open_key, remove_head, remove_records, cut_records])
@pytest.mark.parametrize("restart", [False, True])
async def test_broken_log_means_no_answer(tmp_path: Path, harm: Any, restart: bool) -> None:
    """A log whose key, head or records are not as we left them takes no record, so a regulated tenant no answer."""
    async with opened(tmp_path) as audit:
        await audit.intent(call("dec_1", tenant()), decision())
        if not restart:
            harm(tmp_path)
            with pytest.raises(Unrecorded):
                await audit.outcome(call("dec_1", tenant()), decision(), outcome())
            return
    harm(tmp_path)
    async with opened(tmp_path) as audit:
        with pytest.raises(Unrecorded):
            await audit.intent(call("dec_2", tenant()), decision())
        await audit.intent(call("dec_3", tenant("other")), decision())
    holds(tmp_path, "other")


async def test_no_folder(tmp_path: Path) -> None:
    """A log that cannot be begun says so at start."""
    (tmp_path / "file").write_text("")
    with pytest.raises(Unrecorded):
        await Audit(tmp_path / "file" / "audit").start()


async def test_not_open(tmp_path: Path) -> None:
    """After the end nothing is taken, and nobody waits for ever."""
    async with opened(tmp_path) as audit:
        pass
    with pytest.raises(Unrecorded):
        await audit.intent(call("dec_1", tenant()), decision())


async def test_one_bad_record_fails_alone(tmp_path: Path) -> None:
    """What cannot be written as JSON fails for its own request, and for none that shares its commit."""
    async with opened(tmp_path) as audit:
        bad = call("dec_bad", tenant(), model="\ud800")
        good = [call(f"dec_{n}", tenant()) for n in range(20)]
        results = await asyncio.gather(
            *(audit.intent(asked, decision()) for asked in (*good, bad, *good)), return_exceptions=True
        )
    assert [type(r) for r in results if r is not None] == [Unrecorded]
    assert holds(tmp_path).records == 1 + 40 + 1


async def test_many_at_once(tmp_path: Path) -> None:
    """Hundreds of requests of several tenants, over many files and checkpoints, all chained and all there."""
    root = tmp_path / "audit"
    async with opened(root, rotate_bytes=50_000, checkpoint_every=50) as audit:
        names = ["a", "b", "../b", "_keys", ".", "é/ü"]
        calls = [call(f"dec_{n}", tenant(name)) for n in range(60) for name in names]
        await asyncio.gather(*(audit.intent(asked, decision()) for asked in calls))
        await asyncio.gather(*(audit.outcome(asked, decision(), outcome()) for asked in calls))
    assert set(tenants(root)) == {*names, ROUTER}
    for name in names:
        report = holds(root, name)
        assert report.records == 1 + 120 + report.checkpoints
        assert report.checkpoints >= 2
    assert len(list((root / "a").glob("*.jsonl"))) > 1
    assert os.listdir(tmp_path) == ["audit"]


async def test_keys_are_private(tmp_path: Path) -> None:
    """Secret keys are the owner's alone, and neither they nor their tenant's texts stand in the records."""
    async with opened(tmp_path) as audit:
        await audit.intent(call("dec_1", tenant("signing")), decision())
    secrets = [p for p in (tmp_path / "_keys").iterdir() if p.suffix == ".key"]
    assert sorted(p.name for p in secrets) == ["_router.key", "_signing.key", "signing.key"]
    assert {p.stat().st_mode & 0o777 for p in secrets} == {0o600}
    logged = b"".join(p.read_bytes() for name in ("signing", ROUTER) for p in (tmp_path / name).iterdir())
    keys = [key for p in secrets for key in p.read_bytes().split() if len(key) == 64]
    assert len(keys) == 5
    assert not any(key in logged for key in keys)


def writer(folder: Path, count: int, ids: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.router.audit_writer", str(folder), "bank", str(count), ids, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def promised(said: str, word: str) -> set[str]:
    """Ids after `word` in whole lines."""
    lines = said.rpartition("\n")[0].splitlines()
    return {line.split()[1] for line in lines if line.startswith(word)}


@pytest.mark.parametrize("after", [1, 40, 150])
async def test_kill(tmp_path: Path, after: int) -> None:
    """kill -9 loses no promised record, leaves the interrupted requests as open intents, and the next start goes on."""
    with writer(tmp_path, 10_000, "dec_") as process:
        assert process.stdout is not None
        said = "".join(process.stdout.readline() for _ in range(after))
        process.send_signal(signal.SIGKILL)
        said += process.stdout.read()
    report = holds(tmp_path)
    begun = {r.body["id"] for r in records(tmp_path, "bank") if r.body["kind"] == "intent"}
    ended = {r.body["id"] for r in records(tmp_path, "bank") if r.body["kind"] == "outcome"}
    assert promised(said, "begun") <= begun
    assert promised(said, "ended") <= ended
    assert set(report.open_intents) == begun - ended
    assert "dec_first" in report.open_intents
    async with opened(tmp_path) as audit:
        await audit.intent(call("dec_next", tenant()), decision())
    assert holds(tmp_path).open_intents[-1] == "dec_next"


def test_several_processes(tmp_path: Path) -> None:
    """Several routers write one chain at once, one is killed among them; it holds at any time and misses nothing."""
    writers = [writer(tmp_path, 40, f"dec_{name}_") for name in "abc"]
    victim = writer(tmp_path, 10_000, "dec_v_")
    assert victim.stdout is not None
    victim.stdout.readline()
    for _ in range(20):
        holds(tmp_path)
    said = [process.communicate(timeout=60)[0] for process in writers]
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=60)
    assert [process.returncode for process in writers] == [0, 0, 0]
    assert [len(promised(text, "ended")) for text in said] == [41, 41, 41]
    ended = {r.body["id"] for r in records(tmp_path, "bank") if r.body["kind"] == "outcome"}
    assert set().union(*(promised(text, "ended") for text in said)) <= ended
    assert all(id.startswith("dec_v_") for id in holds(tmp_path).open_intents)


def test_disk_full_from_the_start(tmp_path: Path) -> None:
    """A process that never has room answers nothing, and what it leaves still holds."""
    with writer(tmp_path, 12, "dec_", "6000") as process:
        said = process.communicate(timeout=60)[0]
    ended = {r.body["id"] for r in records(tmp_path, "bank") if r.body["kind"] == "outcome"}
    assert promised(said, "ended") <= ended
    assert promised(said, "refused")
    holds(tmp_path)


async def test_more_than_a_commit_holds(tmp_path: Path) -> None:
    """Records that nobody waits for are written in the order they came, however many are held at once."""
    async with opened(tmp_path) as audit:
        for n in range(600):
            await audit.outcome(call(f"dec_{n}", tenant("lab", regulated=False)), decision(), outcome())
    ids = [r.body["id"] for r in records(tmp_path, "lab") if r.body["kind"] == "outcome"]
    assert ids == [f"dec_{n}" for n in range(600)]
    assert audit.lost == 0
    holds(tmp_path, "lab")
