"""What may be done to a log: honest logs of every kind, and attacks on them, each drawn by a seed.

An attack of ATTACKS needs no secret; one of INSIDER has the signing key and signs whatever it leaves behind. The tests
run a few of each, `python -m benchmarks.audit --attacks` hundreds.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from router.audit_anchor import anchored
from router.audit_chain import Chain, Entry
from router.audit_custody import Custody
from router.audit_keys import Signer, pruned_statement, statement
from router.audit_lines import NOTHING, PRUNED, Anchored, Head, open_line, read_head, read_lines, seal_line
from router.audit_vault import day_of
from router.ed25519 import private_key

Attack = Callable[[Path, random.Random], None]
TENANTS = ("bank", "lab")
DAY = 86400.0


def entry(n: int) -> Entry:
    kind: Any = ("intent", "outcome")[n % 2]
    body = {"chosen": "solo", "amount": 1000 + n}
    return Entry(kind, body, f"dec_{n // 2}", {"request": b"text " * (n % 40)}, "full")


def small_chain(root: Path, tenant: str = "bank") -> Chain:
    return Chain(root, tenant, Signer.load(root), rotate_bytes=4000, checkpoint_every=8)


def files(root: Path, tenant: str = "bank") -> list[Path]:
    return sorted((root / tenant).glob("*.jsonl"))


def lines(root: Path, tenant: str = "bank") -> list[tuple[Path, bytes]]:
    return [(path, line) for path in files(root, tenant) for line in path.read_bytes().splitlines(keepends=True)]


def put(root: Path, changed: list[tuple[Path, bytes]], tenant: str = "bank") -> None:
    """The lines in place of those that were; torn bytes stay at the end of their file."""
    for path in files(root, tenant):
        torn = path.read_bytes().rpartition(b"\n")[2]
        path.write_bytes(b"".join(line for where, line in changed if where == path) + torn)


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
    thief = Signer(private_key(secrets.token_bytes(32)))
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


def plain(root: Path, rng: random.Random) -> None:
    """Two chains of some dozens of records in several files, with checkpoints."""
    size = rng.randrange(20, 60)
    for tenant in TENANTS:
        chain = small_chain(root, tenant)
        for start in range(0, size, 10):
            chain.append([entry(n) for n in range(start, start + 10)])
        if rng.random() < 0.5:
            chain.close()


def grow(root: Path, rng: random.Random, commits: int = 12) -> list[Anchored]:
    """An honest log of two tenants as life makes it, and the heads that were anchored on the way.

    Routers start and stop, share a chain, crash at any byte of a commit; persons and tenants are erased, put on hold,
    released; days pass, and retention ends.
    """
    heads: list[Anchored] = []
    back = rng.choice((0, 0, 3))
    for step in range(commits):
        for tenant in TENANTS:
            at = time.time() - (back * DAY if step < commits // 2 else 0)
            chain = Chain(root, tenant, Signer.load(root), rotate_bytes=rng.choice((2000, 9000)), checkpoint_every=8)
            chain.append([_lived(step * 10 + n, rng, at) for n in range(rng.randrange(1, 6))])
            before = {path: path.stat().st_size for path in files(root, tenant)}
            head = (root / tenant / "head.json").read_bytes()
            if rng.random() < 0.2:
                chain.append([_lived(step * 10 + n, rng, at) for n in range(6, 9)])
                crash(root, head, before, rng, tenant)
            elif rng.random() < 0.3:
                chain.close()
            if rng.random() < 0.15:
                _keep_house(Custody(root, tenant), rng)
            if rng.random() < 0.4 or step == commits - 2:
                found = read_head(root / tenant)
                assert found is not None
                heads.append(anchored(tenant, found, datetime.now(UTC).isoformat()))
    for tenant in TENANTS:
        Chain(root, tenant, Signer.load(root)).append([_lived(999, rng, time.time())])
    return heads


def _lived(n: int, rng: random.Random, at: float) -> Entry:
    made = entry(n)
    return Entry(made.kind, made.body, made.id, made.content, made.keep, rng.choice((None, "ann", "bob")), at)


def _keep_house(custody: Custody, rng: random.Random) -> None:
    person = rng.choice((None, "ann"))
    held = custody.holds()
    match rng.randrange(3):
        case 0 if not held:
            custody.hold("judge", "case", person)
        case 1 if held:
            custody.release("judge", "closed", "ann" if held[0].subject else None)
        case 2 if not held:
            custody.retain(DAY)


def crash(root: Path, head: bytes, before: dict[Path, int], rng: random.Random, tenant: str = "bank") -> None:
    """As if power went while the last commit was written: its head is not there, its bytes in part."""
    (root / tenant / "head.json").write_bytes(head)
    grown = [path for path in files(root, tenant) if path.stat().st_size > before.get(path, 0)]
    for path in grown:
        keep = rng.randrange(before.get(path, 0), path.stat().st_size + 1) if path == grown[0] else 0
        os.truncate(path, keep)


def resign(root: Path, changed: list[tuple[Path, dict[str, Any]]], signer: Signer, chain: str) -> None:
    """History as given, with all numbers, hashes, checkpoints, marks and the head made right by the signing key."""
    prev, out = NOTHING, []
    mark = json.loads(raw) if (raw := _read(root / "bank" / PRUNED)) else None
    start = 0 if mark is None else mark["seq"] + 1
    prev = NOTHING if mark is None else mark["hash"]
    for seq, (path, body) in enumerate(changed, start=start):
        body |= {"seq": seq, "prev": prev}
        if seq == 0:
            body["chain"] = chain
        if body["kind"] == "checkpoint":
            body |= {"key": signer.id, "sig": signer.sign(statement("bank", chain, seq - 1, prev))}
        line, prev = seal_line(body)
        out.append((path, line))
    put(root, out)
    if mark is not None:
        said = pruned_statement("bank", chain, mark["seq"], mark["hash"], mark["segment"], mark["before"])
        (root / "bank" / PRUNED).write_text(
            json.dumps(mark | {"chain": chain, "key": signer.id, "sig": signer.sign(said)})
        )
    last = start + len(changed) - 1
    head = Head(chain, last, prev, signer.id, signer.sign(statement("bank", chain, last, prev)))
    (root / "bank" / "head.json").write_bytes(head.encode())


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _mine(root: Path) -> tuple[list[tuple[Path, dict[str, Any]]], Signer, str]:
    head = read_head(root / "bank")
    assert head is not None
    whole = [(path, open_line(line).body) for path in _live(root) for line, entire in read_lines(path) if entire]
    return whole, Signer.load(root), head.chain


def _live(root: Path) -> list[Path]:
    raw = _read(root / "bank" / PRUNED)
    gone = json.loads(raw)["segment"] if raw else 0
    return [path for path in files(root) if int(path.name[:6]) > gone]


def _covered(root: Path, changed: list[Any], heads: list[Anchored]) -> int:
    """How many of the records the last anchored head covers."""
    first = changed[0][1]["seq"]
    return max(line.seq for line in heads if line.tenant == "bank") - int(first) + 1


def _told(what: str, detail: dict[str, Any]) -> dict[str, Any]:
    return {"ts": "", "tenant": "bank", "kind": "control", "what": what, "who": "router", "detail": detail}


Insider = Callable[[Path, random.Random, list[Anchored]], None]


def rewrite_one(root: Path, rng: random.Random, heads: list[Anchored]) -> None:
    changed, signer, chain = _mine(root)
    changed[rng.randrange(_covered(root, changed, heads))][1]["amount"] = "7"
    resign(root, changed, signer, chain)


def rewrite_without_one(root: Path, rng: random.Random, heads: list[Anchored]) -> None:
    changed, signer, chain = _mine(root)
    del changed[rng.randrange(1, _covered(root, changed, heads))]
    resign(root, changed, signer, chain)


def rewrite_with_one_more(root: Path, rng: random.Random, heads: list[Anchored]) -> None:
    changed, signer, chain = _mine(root)
    at = rng.randrange(1, _covered(root, changed, heads))
    changed.insert(at, (changed[at][0], _told("reload", {})))
    resign(root, changed, signer, chain)


def rewrite_reordered(root: Path, rng: random.Random, heads: list[Anchored]) -> None:
    changed, signer, chain = _mine(root)
    at = rng.randrange(1, _covered(root, changed, heads) - 1)
    changed[at], changed[at + 1] = (changed[at][0], changed[at + 1][1]), (changed[at + 1][0], changed[at][1])
    resign(root, changed, signer, chain)


def rewrite_cut(root: Path, rng: random.Random, heads: list[Anchored]) -> None:
    changed, signer, chain = _mine(root)
    resign(root, changed[: rng.randrange(1, _covered(root, changed, heads))], signer, chain)


def rewrite_as_new_chain(root: Path, rng: random.Random, heads: list[Anchored]) -> None:
    changed, signer, _ = _mine(root)
    resign(root, changed, signer, f"{rng.getrandbits(128):032x}")


def rewrite_under_new_key(root: Path, rng: random.Random, heads: list[Anchored]) -> None:
    changed, _, chain = _mine(root)
    secret = secrets.token_bytes(32)
    thief = Signer(private_key(secret))
    changed[rng.randrange(len(changed))][1]["amount"] = "7"
    resign(root, changed, thief, chain)
    (root / "_keys" / "_signing.pub").write_text(thief.public.hex())
    (root / "_keys" / "_signing.key").write_text(secret.hex())


def rewrite_as_other_tenant(root: Path, rng: random.Random, heads: list[Anchored]) -> None:
    """The other tenant's history, put in place of this one's."""
    _, signer, chain = _mine(root)
    for path in (root / "bank").iterdir():
        path.unlink()
    for path in files(root, "lab"):
        shutil.copy(path, root / "bank" / path.name)
    stolen = [(path, open_line(line).body) for path in files(root) for line, entire in read_lines(path) if entire]
    for _, body in stolen:
        body["tenant"] = "bank"
    resign(root, stolen, signer, chain)


def remove_as_too_old(root: Path, rng: random.Random, heads: list[Anchored]) -> None:
    """Files that are not old at all give way to a mark that says they were."""
    changed, signer, chain = _mine(root)
    names = _live(root)
    last = names[rng.randrange(len(names) - 1)]
    kept = [pair for pair in changed if pair[0] > last]
    gone = [pair for pair in changed if pair[0] <= last]
    if not gone or not kept:
        return rewrite_one(root, rng, heads)
    seq, hash = gone[-1][1]["seq"], kept[0][1]["prev"]
    before, segment = day_of(time.time() + rng.choice((0, DAY))), int(last.name[:6])
    said = pruned_statement("bank", chain, seq, hash, segment, before)
    mark = {"chain": chain, "seq": seq, "hash": hash, "segment": segment, "before": before}
    (root / "bank" / PRUNED).write_text(json.dumps(mark | {"key": signer.id, "sig": signer.sign(said)}))
    for path in names:
        if path <= last:
            path.unlink()
    detail = {"seq": seq, "hash": hash, "segment": segment, "before": before, "records": len(gone)}
    resign(root, [*kept, (kept[-1][0], _told("pruned", detail))], signer, chain)
    return None


INSIDER: list[Insider] = [
    rewrite_one,
    rewrite_without_one,
    rewrite_with_one_more,
    rewrite_reordered,
    rewrite_cut,
    rewrite_as_new_chain,
    rewrite_under_new_key,
    rewrite_as_other_tenant,
    remove_as_too_old,
]
