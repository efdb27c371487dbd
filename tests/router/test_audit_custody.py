"""What is kept, for how long, and who may end it: erasure, retention and legal holds on real chains."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from router.audit_chain import Chain, Entry
from router.audit_cli import audit_commands
from router.audit_custody import Custody, UnderHold
from router.audit_keys import AuditError, Signer
from router.audit_lines import read_pruned
from router.audit_vault import Vault, day_of
from router.audit_verify import chain_of, content, records, verify

DAY = 86400.0
ANN = "ann@bank.example"
BOB = "bob@bank.example"


def write(root: Path, at: float, *people: str | None, tenant: str = "bank", keep: Any = "full") -> None:
    """One outcome for each of `people`, of a moment in the past or now."""
    chain = Chain(root, tenant, Signer.load(root), checkpoint_every=4)
    entries = [
        Entry("outcome", {}, f"dec_{int(at)}_{n}", {"answer": b"text"}, keep, who, at) for n, who in enumerate(people)
    ]
    assert chain.append(entries) == [None] * len(people)


def readable(root: Path, tenant: str = "bank") -> list[bool]:
    """Of each outcome in order, whether its text still opens."""
    assert verify(root, tenant).faults == []
    found = []
    for record in records(root, tenant):
        if record.body["kind"] == "outcome":
            try:
                found.append(content(root, tenant, chain_of(root, tenant), record) == {"answer": "text"})
            except AuditError:
                found.append(False)
    return found


def controls(root: Path, tenant: str = "bank") -> list[str]:
    return [r.body["what"] for r in records(root, tenant) if r.body["kind"] == "control"]


def in_the_files(root: Path, text: str) -> bool:
    return any(text.encode() in path.read_bytes() for path in root.rglob("*") if path.is_file())


@contextmanager
def days(root: Path, monkeypatch: pytest.MonkeyPatch, back: int) -> Iterator[None]:
    """The clock some days ago: files and keys are dated by it."""
    real = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: real() - back * DAY)
        yield


def test_one_person_is_erased_and_nobody_else(tmp_path: Path) -> None:
    """One key destroyed: that person's texts are gone for good, the others' open, the chain holds and names who asked,
    and the person's name never stood in any file."""
    now = time.time()
    write(tmp_path, now, ANN, BOB, None, ANN)
    bank = Custody(tmp_path, "bank")
    assert readable(tmp_path) == [True] * 4
    bank.erase("carol", "request 7", ANN)
    assert readable(tmp_path) == [False, True, True, False]
    assert controls(tmp_path)[-2:] == ["erasing", "erased"]
    last = [r.body for r in records(tmp_path, "bank") if r.body.get("what") == "erased"][-1]
    assert (last["who"], last["detail"]["reason"]) == ("carol", "request 7")
    with pytest.raises(AuditError, match="nothing is recorded of this person"):
        bank.erase("carol", "again", ANN)
    write(tmp_path, now, ANN, BOB)
    assert readable(tmp_path) == [False, True, True, False, True, True]
    subjects = [r.body["content"].get("subject") for r in records(tmp_path, "bank") if r.body["kind"] == "outcome"]
    assert subjects[1] == subjects[5]
    assert len({subjects[0], subjects[1], subjects[4]}) == 3
    assert not in_the_files(tmp_path, ANN)
    assert not in_the_files(tmp_path, BOB)


def test_a_router_that_runs_learns_of_an_erasure(tmp_path: Path) -> None:
    """A chain that is open elsewhere seals nothing under a key that was destroyed meanwhile."""
    running = Chain(tmp_path, "bank", Signer.load(tmp_path))
    entry = Entry("outcome", {}, "dec_1", {"answer": b"text"}, "full", ANN)
    running.append([entry])
    Custody(tmp_path, "bank").erase("carol", "request 8", ANN)
    running.append([entry])
    Custody(tmp_path, "bank").erase("carol", "the rest")
    running.append([entry])
    assert readable(tmp_path) == [False, False, True]


def test_a_hold_stops_erasure_and_retention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a hold nothing of the person is lost: not by erasure of the person or the tenant, not by retention, which
    still ends for all others. Released, all of it goes."""
    for back in (9, 8, 5):
        with days(tmp_path, monkeypatch, back):
            write(tmp_path, time.time(), ANN, BOB, None)
    bank = Custody(tmp_path, "bank")
    assert bank.hold("judge", "case 12", ANN) is not None
    for person in (ANN, None):
        with pytest.raises(UnderHold, match=r"set by judge \(case 12\)"):
            bank.erase("carol", "request", person)
    done = bank.retain(7 * DAY)
    assert (done.expired, done.records) == (True, 0)
    assert "case 12" in done.held
    assert readable(tmp_path) == [True, False, False, True, False, False, True, True, True]
    bank.erase("carol", "request", BOB)
    assert readable(tmp_path) == [True, False, False, True, False, False, True, False, True]
    assert bank.release("judge", "case closed", ANN) == 1
    assert bank.holds() == []
    assert bank.retain(7 * DAY).records > 0
    assert readable(tmp_path) == [True, False, True]
    with pytest.raises(AuditError, match="no hold"):
        bank.release("judge", "again", ANN)


def test_a_hold_on_the_tenant_stops_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing expires, and nobody of the tenant can be erased, while another tenant goes its own way."""
    for tenant in ("bank", "lab"):
        with days(tmp_path, monkeypatch, 9):
            write(tmp_path, time.time(), ANN, tenant=tenant)
        write(tmp_path, time.time(), ANN, tenant=tenant)
    bank, lab = Custody(tmp_path, "bank"), Custody(tmp_path, "lab")
    bank.hold("judge", "case 13")
    assert not bank.retain(DAY).expired
    assert lab.retain(DAY).expired
    with pytest.raises(UnderHold):
        bank.erase("carol", "request", ANN)
    lab.erase("carol", "request", ANN)
    assert (readable(tmp_path), readable(tmp_path, "lab")) == ([True, True], [False])


def test_the_end_of_retention_destroys_keys_then_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts older than the retention are gone by their day's key, files that hold nothing younger are removed, a signed
    mark stands for them, the chain goes on and holds; a second sweep finds nothing to do."""
    for back in (400, 40, 31, 29, 1):
        with days(tmp_path, monkeypatch, back):
            write(tmp_path, time.time(), ANN, None)
    before = verify(tmp_path, "bank")
    bank = Custody(tmp_path, "bank")
    done = bank.retain(30 * DAY)
    assert (done.expired, done.held) == (True, "")
    after = verify(tmp_path, "bank", retention=30 * DAY)
    assert after.faults == []
    assert after.records > before.records
    assert after.pruned == day_of(time.time() - 30 * DAY)
    assert readable(tmp_path) == [True] * 4
    assert len(list((tmp_path / "bank").glob("*.jsonl"))) == 3
    assert {"expired", "pruned"} <= set(controls(tmp_path))
    again = bank.retain(30 * DAY)
    assert (again.expired, again.records) == (False, 0)
    assert verify(tmp_path, "bank", retention=90 * DAY).faults != []


def test_a_false_mark_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files removed without the signing key, or more of them than the mark says, are missed."""
    for back in (40, 39, 2, 1):
        with days(tmp_path, monkeypatch, back):
            write(tmp_path, time.time(), None)
    Custody(tmp_path, "bank").retain(30 * DAY)
    mark = tmp_path / "bank" / "pruned.json"
    written = mark.read_bytes()
    found = read_pruned(tmp_path / "bank")
    assert found is not None
    for change in (found.before.encode(), found.hash.encode(), b'"segment":2'):
        mark.write_bytes(written.replace(change, change[:-1] + b"7"))
        assert verify(tmp_path, "bank").faults != []
    mark.unlink()
    assert verify(tmp_path, "bank").faults != []
    mark.write_bytes(written)
    assert verify(tmp_path, "bank").faults == []
    next(iter(sorted((tmp_path / "bank").glob("*.jsonl")))).unlink()
    assert verify(tmp_path, "bank").faults != []


@pytest.mark.parametrize("stage", ["record", "mark", "file"])
def test_a_sweep_that_is_cut_short_is_taken_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """Killed after the record, after the mark or between two files, the log holds and the next sweep ends the work."""
    for back in (40, 39, 38, 1):
        with days(tmp_path, monkeypatch, back):
            write(tmp_path, time.time(), None)

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    real, removed = Path.unlink, []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".jsonl" and removed:
            raise Killed
        removed.append(path)
        real(path, missing_ok=missing_ok)

    with monkeypatch.context() as patch:
        if stage == "record":
            patch.setattr("router.audit_custody.replace_secret", killed)
        elif stage == "mark":
            patch.setattr("router.audit_custody.sync_folder", killed)
            patch.setattr(Path, "unlink", killed)
        else:
            patch.setattr(Path, "unlink", unlink)
        with pytest.raises(Killed):
            Custody(tmp_path, "bank").retain(30 * DAY)
    assert verify(tmp_path, "bank").faults == []
    Custody(tmp_path, "bank").retain(30 * DAY)
    assert verify(tmp_path, "bank").faults == []
    assert readable(tmp_path) == [True]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from([ANN, BOB, None])), min_size=1, max_size=8),
    st.integers(0, 31),
    st.sampled_from([None, ANN, BOB]),
)
@settings(max_examples=25, deadline=None)
def test_days_expire_exactly(
    tmp_path_factory: pytest.TempPathFactory, written: list[tuple[int, str | None]], kept: int, held: str | None
) -> None:
    """Of any texts of any days and persons, just those go whose day is over and whose person is not held."""
    root = tmp_path_factory.mktemp("audit")
    now = time.time()
    first = day_of(now - 40 * DAY)
    vault = Vault.create(root, "bank", first)
    names = {who: None if who is None else vault.subject(who) for who in (ANN, BOB, None)}
    vault.save()
    made = [(day_of(now - back * DAY), names[who]) for back, who in written]
    keys = [vault.content_key(*one).raw for one in made]
    until = day_of(now - kept * DAY)
    covered = {name for who, name in names.items() if who == held and name is not None}
    vault.expire(until, covered)
    later = Vault.load(root, "bank")
    for one, key in zip(made, keys, strict=True):
        if one[0] >= until or one[1] in covered:
            assert later.content_key(*one).raw == key
        else:
            with pytest.raises(AuditError):
                later.content_key(*one)
    assert not later.stale(until, covered)


def test_a_torn_line_of_persons_harms_nobody(tmp_path: Path) -> None:
    """Half a line left by a crash in the file of persons is written over; a file that others can read is refused."""
    write(tmp_path, time.time(), ANN)
    file = tmp_path / "_keys" / "bank.subjects"
    with file.open("ab") as out:
        out.write(b"0123 half a li")
    write(tmp_path, time.time(), BOB, ANN)
    assert readable(tmp_path) == [True] * 3
    os.chmod(tmp_path / "_keys" / "bank.key", 0o640)
    with pytest.raises(AuditError, match="others can read"):
        write(tmp_path, time.time(), BOB)


def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hold, holds, erase and retain from the command line: what they did, and exit 1 with the reason under a hold."""
    log = tmp_path / "log"
    with days(log, monkeypatch, 3):
        write(log, time.time(), ANN, BOB)
    write(log, time.time(), ANN)
    config = tmp_path / "c.yaml"
    config.write_text(f"audit: {{dir: {log}}}\ntenants: [{{name: bank, key: k, audit: {{retention: 2d}}}}]\n")

    def run(*arguments: str, given: str = "") -> Any:
        return CliRunner().invoke(audit_commands, list(arguments), input=given)

    why = ("--by", "carol", "--reason", "case 14")
    where = ("--dir", str(log), "--tenant", "bank")
    assert run("hold", *where, *why, "--subject", "-", given=f"{ANN}\n").exit_code == 0
    assert "by carol: case 14" in run("holds", "--dir", str(log)).output
    refused = run("erase", *where, *why, "--subject", ANN, "--yes")
    assert refused.exit_code == 1
    assert "nothing was erased: bank: a legal hold stands on person" in refused.output
    kept = run("retain", "--config", str(config))
    assert (kept.exit_code, "a legal hold stands" in kept.output) == (0, True)
    assert readable(log) == [True, False, True]
    assert run("hold", *where, *why, "--subject", ANN, "--release").exit_code == 0
    assert run("holds", "--dir", str(log)).output == ""
    assert run("erase", *where, *why, "--subject", ANN, "--yes").exit_code == 0
    assert run("retain", "--config", str(config)).exit_code == 0
    assert readable(log) == [False]
