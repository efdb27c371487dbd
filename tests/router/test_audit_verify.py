from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from router.audit_chain import Chain, Entry, bound
from router.audit_cli import audit_commands
from router.audit_keys import AuditError, Signer, chain_folder, folder, statement
from router.audit_lines import BATCH, NOTHING, Head, open_line, read_head, seal_line
from router.audit_vault import ContentKey
from router.audit_verify import records, verify

Attack = Callable[[Path, random.Random], None]
TENANTS = ("bank", "lab")


def entry(n: int) -> Entry:
    kind: Any = ("intent", "outcome")[n % 2]
    body = {"chosen": "solo", "amount": 1000 + n}
    return Entry(kind, body, f"dec_{n // 2}", {"request": b"text " * (n % 40)}, "full")


def small_chain(root: Path, tenant: str = "bank") -> Chain:
    return Chain(root, tenant, Signer.load(root), rotate_bytes=4000, checkpoint_every=8)


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


def files(root: Path, tenant: str = "bank") -> list[Path]:
    return sorted((root / tenant).glob("*.jsonl"))


def lines(root: Path, tenant: str = "bank") -> list[tuple[Path, bytes]]:
    return [(path, line) for path in files(root, tenant) for line in path.read_bytes().splitlines(keepends=True)]


def put(root: Path, changed: list[tuple[Path, bytes]], tenant: str = "bank") -> None:
    for path in files(root, tenant):
        path.write_bytes(b"".join(line for where, line in changed if where == path))


def rehashed(changed: list[tuple[Path, dict[str, Any]]]) -> list[tuple[Path, bytes]]:
    """All hashes and numbers made right again, as anybody can without the signing key."""
    prev, out = NOTHING, []
    for seq, (path, body) in enumerate(changed):
        line, hash = seal_line(body | {"seq": seq, "prev": prev})
        out.append((path, line))
        prev = hash
    return out


def bodies(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    return [(path, open_line(line.strip()).body) for path, line in lines(root)]


def flip(root: Path, rng: random.Random) -> None:
    path = rng.choice([*files(root), root / "bank" / "head.json"])
    raw = bytearray(path.read_bytes())
    raw[rng.randrange(len(raw) - 300 * (path.name == "head.json"))] ^= rng.randrange(1, 256)
    path.write_bytes(raw)


def edit(root: Path, rng: random.Random) -> None:
    path, line = rng.choice([pair for pair in lines(root) if b'"amount":1' in pair[1]])
    path.write_bytes(path.read_bytes().replace(line, line.replace(b'"amount":1', b'"amount":9')))


def edit_and_rehash(root: Path, rng: random.Random) -> None:
    changed = bodies(root)
    rng.choice([body for _, body in changed if "amount" in body])["amount"] = 1
    put(root, rehashed(changed))


def edit_and_rehash_one(root: Path, rng: random.Random) -> None:
    changed = lines(root)
    at = rng.choice([n for n, (_, line) in enumerate(changed[:-1]) if b'"amount"' in line])
    path, line = changed[at]
    changed[at] = (path, seal_line(open_line(line.strip()).body | {"amount": 1})[0])
    put(root, changed)


def edit_and_rehash_last(root: Path, rng: random.Random) -> None:
    changed = bodies(root)
    at = max(n for n, (_, body) in enumerate(changed) if "amount" in body)
    changed[at][1]["amount"] = rng.randrange(1000)
    put(root, rehashed(changed))


def tear(root: Path, rng: random.Random) -> None:
    path = rng.choice(files(root)[:-1])
    path.write_bytes(path.read_bytes() + b'{"seq":')


def renumber(root: Path, rng: random.Random) -> None:
    path = files(root)[-1]
    path.rename(path.with_name(f"{rng.randrange(100, 999999):06d}{path.name[6:]}"))


def drop(root: Path, rng: random.Random) -> None:
    changed = lines(root)
    del changed[rng.randrange(len(changed))]
    put(root, changed)


def drop_and_rehash(root: Path, rng: random.Random) -> None:
    changed = bodies(root)
    del changed[rng.randrange(1, len(changed))]
    put(root, rehashed(changed))


def double(root: Path, rng: random.Random) -> None:
    changed = lines(root)
    at = rng.randrange(len(changed))
    put(root, changed[: at + 1] + changed[at:])


def reorder(root: Path, rng: random.Random) -> None:
    changed = lines(root)
    a, b = rng.sample(range(len(changed)), 2)
    changed[a], changed[b] = (changed[a][0], changed[b][1]), (changed[b][0], changed[a][1])
    put(root, changed)


def insert_and_rehash(root: Path, rng: random.Random) -> None:
    changed = bodies(root)
    path, body = rng.choice(changed[1:])
    changed.insert(rng.randrange(1, len(changed)), (path, body | {"id": "dec_forged"}))
    put(root, rehashed(changed))


def cut_lines(root: Path, rng: random.Random) -> None:
    changed = lines(root)
    put(root, changed[: rng.randrange(len(changed))])


def cut_bytes(root: Path, rng: random.Random) -> None:
    path = rng.choice(files(root))
    os.truncate(path, rng.randrange(path.stat().st_size))


def drop_file(root: Path, rng: random.Random) -> None:
    rng.choice(files(root)).unlink()


def drop_head(root: Path, rng: random.Random) -> None:
    (root / "bank" / "head.json").unlink()


def drop_chain(root: Path, rng: random.Random) -> None:
    shutil.rmtree(root / "bank")


def swap_tenants(root: Path, rng: random.Random) -> None:
    (root / "bank").rename(root / "aside")
    (root / "lab").rename(root / "bank")
    (root / "aside").rename(root / "lab")


def swap_files(root: Path, rng: random.Random) -> None:
    at = rng.randrange(len(files(root)))
    shutil.copy(files(root, "lab")[at], files(root)[at])


def swap_heads(root: Path, rng: random.Random) -> None:
    shutil.copy(root / "lab" / "head.json", root / "bank" / "head.json")


def other_tenants_record(root: Path, rng: random.Random) -> None:
    changed, others = lines(root), lines(root, "lab")
    at = rng.randrange(min(len(changed), len(others)))
    changed[at] = (changed[at][0], others[at][1])
    put(root, changed)


def rewrite(root: Path, rng: random.Random) -> Signer:
    """All of history again, with other amounts, under the attacker's own signing key."""
    thief = Signer(Ed25519PrivateKey.generate())
    head = read_head(root / "bank")
    assert head is not None
    changed = bodies(root)
    for _, body in changed:
        body.update({"amount": 1} if "amount" in body else {})
    prev, out = NOTHING, []
    for seq, (path, body) in enumerate(changed):
        if body["kind"] == "checkpoint":
            body |= {"key": thief.id, "sig": thief.sign(statement("bank", head.chain, seq - 1, prev))}
        line, prev = seal_line(body | {"prev": prev})
        out.append((path, line))
    put(root, out)
    sig = thief.sign(statement("bank", head.chain, head.seq, prev))
    (root / "bank" / "head.json").write_bytes(Head(head.chain, head.seq, prev, thief.id, sig).encode())
    return thief


def forge(root: Path, rng: random.Random) -> None:
    rewrite(root, rng)


def forge_checkpoint(root: Path, rng: random.Random) -> None:
    """One checkpoint under another key, and everything after it made to fit."""
    changed = bodies(root)
    rng.choice([body for _, body in changed if body["kind"] == "checkpoint"])["sig"] = "A" * 88
    put(root, rehashed(changed))


ATTACKS: list[Attack] = [
    flip,
    edit,
    edit_and_rehash,
    edit_and_rehash_one,
    edit_and_rehash_last,
    tear,
    renumber,
    drop,
    drop_and_rehash,
    double,
    reorder,
    insert_and_rehash,
    cut_lines,
    cut_bytes,
    drop_file,
    drop_head,
    drop_chain,
    swap_tenants,
    swap_files,
    swap_heads,
    other_tenants_record,
    forge,
    forge_checkpoint,
]


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
    for seed in range(12):
        root = shutil.copytree(honest, tmp_path / str(seed))
        attack(root, random.Random(seed))
        assert not verify(root, "bank").holds, seed


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


def crash(root: Path, head: bytes, before: dict[Path, int], rng: random.Random) -> None:
    """As if power went while the last commit was written: its head is not there, its bytes in part."""
    (root / "bank" / "head.json").write_bytes(head)
    grown = [path for path in files(root) if path.stat().st_size > before.get(path, 0)]
    for path in grown:
        keep = rng.randrange(before.get(path, 0), path.stat().st_size + 1) if path == grown[0] else 0
        os.truncate(path, keep)


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
