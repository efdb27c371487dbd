from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from router.audit_chain import bound
from router.audit_cli import audit_commands
from router.audit_keys import AuditError, Signer, chain_folder, folder
from router.audit_lines import BATCH, NOTHING, open_line, seal_line
from router.audit_vault import ContentKey
from router.audit_verify import records, verify
from tests.router.audit_attacks import (
    ATTACKS,
    DAY,
    INSIDER,
    TENANTS,
    Attack,
    Insider,
    bodies,
    crash,
    cut_lines,
    drop_file,
    edit,
    edit_and_rehash,
    entry,
    files,
    flip,
    forge,
    grow,
    rewrite,
    small_chain,
    swap_tenants,
)


@pytest.fixture(scope="module", params=["closed", "running"])
def honest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two chains of 62 records in several files, with checkpoints; of a running router, the last record is none."""
    root = tmp_path_factory.mktemp("audit")
    for tenant in TENANTS:
        chain = small_chain(root, tenant)
        for start in range(0, 60, 5):
            chain.append([entry(n) for n in range(start, start + 5)])
        chain.append([entry(60)])
        chain.append([entry(61)])
        if request.param == "closed":
            chain.close()
    assert bodies(root)[-1][1]["kind"] == ("checkpoint" if request.param == "closed" else "outcome")
    return root


@pytest.fixture
def log(honest: Path, tmp_path: Path) -> Path:
    return shutil.copytree(honest, tmp_path / "audit")


def test_honest(honest: Path) -> None:
    """A log that nobody touched holds, and its figures are right."""
    for tenant in TENANTS:
        report = verify(honest, tenant)
        assert report.faults == []
        assert (report.unsigned, report.recovered, report.open_intents) == (0, 0, [])
        assert report.records == 63 + report.checkpoints
        assert report.checkpoints >= 60 // 8
    assert len(files(honest)) > 3


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_every_attack_is_found(honest: Path, tmp_path: Path, attack: Attack) -> None:
    """Whatever is done to records, files, tenants or signatures without the signing key is found, wherever it hits."""
    for seed in range(6):
        root = shutil.copytree(honest, tmp_path / str(seed))
        attack(root, random.Random(seed))
        assert not verify(root, "bank").holds, seed


@pytest.mark.parametrize("seed", range(6))
def test_no_false_alarm(tmp_path: Path, seed: int) -> None:
    """A log that lived (crashes, restarts, erasures, holds, ended retention) holds, alone and against its anchor."""
    heads = grow(tmp_path, random.Random(seed))
    for tenant in TENANTS:
        assert verify(tmp_path, tenant).faults == []
        report = verify(tmp_path, tenant, anchored=heads, retention=DAY)
        assert report.faults == []
        assert report.anchored == max(line.seq for line in heads if line.tenant == tenant)


@pytest.mark.parametrize("attack", INSIDER, ids=lambda attack: attack.__name__)
def test_who_holds_the_signing_key_is_found_by_the_anchor(tmp_path: Path, attack: Insider) -> None:
    """History rewritten and signed by the key itself passes without an anchor, and never with one."""
    passed = 0
    for seed in range(4):
        rng = random.Random(seed)
        root = tmp_path / str(seed)
        heads = grow(root, rng)
        attack(root, rng, heads)
        passed += verify(root, "bank").holds
        assert not verify(root, "bank", anchored=heads, retention=5 * 365 * DAY).holds, seed
    assert passed


def test_a_chain_put_back_is_found_by_the_anchor(tmp_path: Path) -> None:
    """Yesterday's copy of the whole log, keys included, passes alone and not against what was anchored since."""
    grow(tmp_path / "log", random.Random(7))
    shutil.copytree(tmp_path / "log", tmp_path / "copy")
    heads = grow(tmp_path / "log", random.Random(8))
    assert verify(tmp_path / "log", "bank", anchored=heads).faults == []
    assert verify(tmp_path / "copy", "bank").faults == []
    assert not verify(tmp_path / "copy", "bank", anchored=heads).holds


@pytest.mark.parametrize("attack", [flip, cut_lines, drop_file, swap_tenants, edit_and_rehash, forge])
def test_damaged_end_is_not_written_on(log: Path, attack: Attack) -> None:
    """What was harmed cannot be made to hold by writing on."""
    attack(log, random.Random(1))
    before = {path: path.read_bytes() for path in files(log)}
    try:
        small_chain(log).append([entry(0)])
    except AuditError:
        assert {path: path.read_bytes() for path in files(log)} == before
    assert not verify(log, "bank").holds


def test_key_kept_elsewhere(log: Path) -> None:
    """Who replaces the public key as well is found by a key that was kept elsewhere."""
    kept = Signer.load(log).public
    thief = rewrite(log, random.Random(0))
    (log / "_keys" / "_signing.pub").write_text(thief.public.hex())
    assert verify(log, "bank").holds
    assert not verify(log, "bank", kept).holds


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_byte(honest: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """No byte of any record can become another one."""
    raw = {path: path.read_bytes() for path in files(honest)}
    path = data.draw(st.sampled_from(sorted(raw)))
    at = data.draw(st.integers(0, len(raw[path]) - 1))
    changed = bytearray(raw[path])
    changed[at] ^= data.draw(st.integers(1, 255))
    try:
        path.write_bytes(changed)
        assert not verify(honest, "bank").holds
    finally:
        path.write_bytes(raw[path])


@pytest.mark.parametrize("seed", range(25))
def test_crashes_are_no_attack(tmp_path: Path, seed: int) -> None:
    """A machine that stops at any byte of any commit leaves a log that holds, and the next start goes on from it."""
    rng = random.Random(seed)
    chain, promised, crashes = small_chain(tmp_path), 0, 0
    for step in range(12):
        head = (tmp_path / "bank" / "head.json").read_bytes() if step else b""
        before = {path: path.stat().st_size for path in files(tmp_path)} if step else {}
        chain.append([entry(n) for n in range(promised, promised + rng.randrange(1, 9))])
        if step and rng.random() < 0.6:
            crash(tmp_path, head, before, rng)
            chain = small_chain(tmp_path)
            crashes += 1
        else:
            promised = max(int(r.body["id"][4:]) for r in records(tmp_path, "bank") if "id" in r.body)
        report = verify(tmp_path, "bank")
        assert report.faults == []
        assert report.unsigned <= BATCH + 1
    chain.append([entry(999)])
    assert verify(tmp_path, "bank").faults == []
    assert verify(tmp_path, "bank").unsigned == 0
    assert crashes


def test_forged_end_is_named(log: Path) -> None:
    """Records added behind the signed head count as unsigned, are named at the next start, and may not be many."""
    last = list(records(log, "bank"))[-1]
    prev, forged = last.hash, []
    for seq in range(last.seq + 1, last.seq + 3 + BATCH):
        line, prev = seal_line({"seq": seq, "prev": prev, "ts": "", "tenant": "bank", "kind": "intent", "id": str(seq)})
        forged.append(line)
    with files(log)[-1].open("ab") as file:
        file.writelines(forged[:3])
    assert verify(log, "bank").unsigned == 3
    small_chain(log).append([entry(0)])
    recovered = [r.body["detail"] for r in records(log, "bank") if r.body.get("what") == "recovered"]
    assert recovered == [{"unsigned": 3, "torn_bytes": 0}]
    assert verify(log, "bank").recovered == 1
    path = files(log, "lab")[-1]
    lab = list(records(log, "lab"))[-1]
    prev, forged = lab.hash, []
    for seq in range(lab.seq + 1, lab.seq + 3 + BATCH):
        line, prev = seal_line({"seq": seq, "prev": prev, "ts": "", "tenant": "lab", "kind": "intent", "id": str(seq)})
        forged.append(line)
    with path.open("ab") as file:
        file.writelines(forged)
    assert not verify(log, "lab").holds
    with pytest.raises(AuditError, match="more than a crash leaves"):
        small_chain(log, "lab").append([entry(0)])


@given(st.text(min_size=1), st.text(min_size=1))
def test_folder_names(one: str, other: str) -> None:
    """Different tenants have different folders, right below the log, and never ours."""
    try:
        names = folder(one), folder(other)
    except UnicodeEncodeError:
        return
    assert (names[0] == names[1]) == (one == other)
    assert chain_folder(Path("/log"), names[0]).parent == Path("/log")
    assert names[0][0] not in "._"
    assert "/" not in names[0]


@given(st.dictionaries(st.text(st.characters(codec="utf-8")), st.integers() | st.text(st.characters(codec="utf-8"))))
def test_line_is_identity(more: dict[str, Any]) -> None:
    """A sealed line opens to what was sealed, whatever it holds."""
    body = {**more, "seq": 3, "prev": NOTHING}
    line, hash = seal_line({k: v if not isinstance(v, int) else v % 2**63 for k, v in body.items()})
    record = open_line(line.removesuffix(b"\n"))
    assert (record.hash, line.count(b"\n")) == (hash, 1)
    assert set(record.body) == set(body)


def test_sealed_text_belongs_to_its_record(tmp_path: Path) -> None:
    """Sealed text opens under its own tenant, chain, request and name only."""
    key = ContentKey(bytes(32))
    sealed = key.seal(b"text", bound("bank", "c", "dec_1", "answer"))
    assert key.open(sealed, bound("bank", "c", "dec_1", "answer")) == b"text"
    for other in (("lab", "c", "dec_1", "answer"), ("bank", "c", "dec_2", "answer"), ("bank", "c", "dec_1", "request")):
        with pytest.raises(AuditError):
            key.open(sealed, bound(*other))


def test_command(log: Path) -> None:
    """`verify` ends 0 where all holds and 1 where not; `show` prints records and texts; `erase` ends the texts."""
    run = CliRunner().invoke
    held = run(audit_commands, ["verify", "--dir", str(log)])
    assert held.exit_code == 0
    assert held.output.count("holds") == 2
    shown = run(audit_commands, ["show", "--dir", str(log), "bank", "--id", "dec_9", "--content", "--json"])
    told = [json.loads(line) for line in shown.output.splitlines()]
    assert [t["kind"] for t in told] == ["intent", "outcome"]
    assert told[0]["texts"] == {"request": "text " * 18}
    assert "text " * 18 not in run(audit_commands, ["show", "--dir", str(log), "bank"]).output
    erased = run(
        audit_commands, ["erase", "--dir", str(log), "--tenant", "bank", "--by", "ann", "--reason", "asked", "--yes"]
    )
    assert erased.exit_code == 0
    assert verify(log, "bank").faults == []
    assert "was erased" in run(audit_commands, ["show", "--dir", str(log), "bank", "--content"]).output
    edit(log, random.Random(0))
    broken = run(audit_commands, ["verify", "--dir", str(log), "--json", "bank", "lab"])
    assert broken.exit_code == 1
    assert [report["holds"] for report in json.loads(broken.output)] == [False, True]
    (log / "_keys" / "bank.key").unlink()
    assert "no key" in run(audit_commands, ["show", "--dir", str(log), "bank", "--id", "dec_1", "--content"]).output


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["verify"], 2),
        (["verify", "--dir", "LOG", "--key", "xyz"], 2),
        (["verify", "--dir", "LOG", "nobody"], 1),
        (["verify", "--dir", "LOG", "--key", "00" * 32], 1),
        (["show", "--dir", "LOG", "nobody"], 1),
        (["erase", "--dir", "LOG", "--tenant", "nobody", "--by", "ann", "--reason", "r", "--yes"], 1),
        (["erase", "--dir", "LOG", "--tenant", "bank", "--by", "ann", "--yes"], 2),
        (["hold", "--dir", "LOG", "--tenant", "bank", "--by", "ann", "--reason", "r", "--release"], 1),
    ],
)
def test_command_used_badly(log: Path, arguments: list[str], status: int) -> None:
    """Bad usage ends 2, an unknown tenant or another's key 1, and neither with a traceback."""
    ended = CliRunner().invoke(audit_commands, [str(log) if a == "LOG" else a for a in arguments])
    assert ended.exit_code == status
    assert "Traceback" not in ended.output
