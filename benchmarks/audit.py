"""What the audit log costs and what it finds.

`python -m benchmarks.audit`: requests of a regulated tenant and of one that keeps nothing, plain and streamed, through
the whole router with an upstream that answers at once (caller and upstream run in the same process), beside the disk's
own sync.
`python -m benchmarks.audit --attacks [500]`: so many random attacks of each kind on random logs, and so many honest
logs: how many were found, how many false alarms. Attacks fall on 50 logs of each kind, honest logs are all different.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from router.audit_verify import verify
from router.telemetry import configure_logging
from tests.router.audit_attacks import ATTACKS, DAY, INSIDER, TENANTS, grow, plain
from tests.router.gateway import Router, Seen, chunk, deployment, router, upstream

YEARS = 5 * 365 * DAY
KEYS = {"open": "sk-open-0123456789", "bank": "sk-bank-0123456789"}


@contextmanager
def folder(where: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="audit-", dir=where) as name:
        yield Path(name)


def percentiles(seconds: list[float]) -> tuple[float, float]:
    """p50 and p90 in milliseconds."""
    cut = statistics.quantiles(seconds, n=10)
    return cut[4] * 1e3, cut[8] * 1e3


def syncs(root: Path, rounds: int) -> list[float]:
    """What one append with fdatasync takes here."""
    fd = os.open(root / "sync", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    taken = []
    try:
        for _ in range(rounds):
            os.write(fd, b"x" * 1500)
            began = time.perf_counter()
            os.fdatasync(fd)
            taken.append(time.perf_counter() - began)
    finally:
        os.close(fd)
    return taken


async def ask(door: Router, tenant: str, stream: bool) -> float:
    """Seconds of one request."""
    began = time.perf_counter()
    answer = await door.post(model="s" if stream else "m", key=KEYS[tenant], stream=stream)
    assert answer.status == 200
    return time.perf_counter() - began


async def one_by_one(door: Router, rounds: int, stream: bool) -> None:
    """Both tenants in turn, so that whatever else the machine does falls on both."""
    taken: dict[str, list[float]] = {tenant: [] for tenant in KEYS}
    for _ in range(rounds):
        for tenant in KEYS:
            taken[tenant].append(await ask(door, tenant, stream))
    (base, base90), (p50, p90) = (percentiles(taken[tenant][rounds // 10 :]) for tenant in KEYS)
    kind = "stream of 8 events" if stream else "plain"
    print(f"{f'{kind}, nothing kept':34} {base:8.2f} {base90:8.2f}")
    print(f"{f'{kind}, regulated':34} {p50:8.2f} {p90:8.2f} {p50 - base:+9.2f}")


async def together(door: Router, rounds: int, parallel: int) -> None:
    """One tenant after the other, `parallel` requests at once: the syncs are shared."""
    for tenant in KEYS:

        async def many(tenant: str = tenant) -> list[float]:
            return [await ask(door, tenant, False) for _ in range(rounds // parallel)]

        began = time.perf_counter()
        taken = [one for some in await asyncio.gather(*(many() for _ in range(parallel))) for one in some]
        rate = len(taken) / (time.perf_counter() - began)
        p50, p90 = percentiles(taken)
        name = f"plain, {parallel} at once, {'regulated' if tenant == 'bank' else 'nothing kept'}"
        print(f"{name:34} {p50:8.2f} {p90:8.2f} {'':9} {rate:7.0f}")


async def streamed(seen: Seen) -> web.StreamResponse:
    return await seen.stream(*(chunk("word ") for _ in range(7)), chunk(finish="stop"))


async def throughput(root: Path, rounds: int) -> None:
    """The table."""
    configure_logging("error")
    tenants = [
        {"name": "open", "key": KEYS["open"], "audit": {"content": "none"}},
        {"name": "bank", "key": KEYS["bank"], "regulated": True},
    ]
    p50, p90 = percentiles(syncs(root, rounds))
    print(f"{'':34} {'p50 ms':>8} {'p90 ms':>8} {'more p50':>9} {'req/s':>7}")
    print(f"{'append + fdatasync on this disk':34} {p50:8.2f} {p90:8.2f}")
    async with upstream() as up:
        up.answers["s"] = streamed
        config = {"model_list": [deployment("m", up), deployment("s", up)], "tenants": tenants}
        async with router(root, config) as door:
            await one_by_one(door, rounds, False)
            await one_by_one(door, rounds, True)
            await together(door, rounds, 32)
    assert verify(root / "audit", "bank").holds


def attacks(root: Path, count: int) -> bool:
    """Tries all kinds, prints a line for each; True where all were found and nothing else was."""
    pool = min(count, 50)
    plains = [root / f"plain{n}" for n in range(pool)]
    for at in plains:
        plain(at, random.Random(at.name))
    lived = {root / f"lived{n}": grow(root / f"lived{n}", random.Random(n)) for n in range(pool)}
    print(f"{'attack':38} {'tried':>6} {'found':>6} {'without anchor':>15}")
    perfect = True
    for attack in ATTACKS:
        found = 0
        for seed in range(count):
            with copy(plains[seed % pool]) as at:
                attack(at, random.Random(f"{attack.__name__} {seed}"))
                found += not verify(at, "bank").holds
        perfect &= found == count
        print(f"{attack.__name__:38} {count:6} {found:6} {found:15}", flush=True)
    for insider in INSIDER:
        found = alone = 0
        for seed in range(count):
            base = list(lived)[seed % pool]
            with copy(base) as at:
                insider(at, random.Random(f"{insider.__name__} {seed}"), lived[base])
                found += not verify(at, "bank", anchored=lived[base], retention=YEARS).holds
                alone += not verify(at, "bank").holds
        perfect &= found == count
        print(f"{f'{insider.__name__} (has the key)':38} {count:6} {found:6} {alone:15}", flush=True)
    alarms = 0
    for seed in range(count):
        at = root / "honest"
        heads = grow(at, random.Random(f"honest {seed}"))
        alarms += any(not verify(at, t, anchored=heads, retention=DAY).holds for t in TENANTS)
        shutil.rmtree(at)
    print(f"{'honest logs, false alarms':38} {count:6} {alarms:6}")
    return perfect and not alarms


@contextmanager
def copy(log: Path) -> Iterator[Path]:
    made = Path(shutil.copytree(log, log.with_name("copy")))
    yield made
    shutil.rmtree(made)


def main() -> None:
    """One of the two."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--attacks", type=int, nargs="?", const=500, help="Attacks of each kind.")
    options.add_argument("--rounds", type=int, default=600, help="Requests of each kind.")
    options.add_argument("--dir", help="Folder on the disk to be measured; default the temporary folder.")
    asked = options.parse_args()
    if asked.attacks:
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with folder(asked.dir or memory) as root:
            raise SystemExit(0 if attacks(root, asked.attacks) else 1)
    with folder(asked.dir) as root:
        asyncio.run(throughput(root, asked.rounds))


if __name__ == "__main__":
    main()
