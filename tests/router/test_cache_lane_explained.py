"""docs/cache-lane-explained.md: its commands run as they stand there, and what it names exists."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path
from typing import get_args

import msgspec

from router.recorded import With
from router.transports.cache import KnownFleet
from tests.router.gateway import KEY, router
from tests.router.test_replay import Lab, ask
from tests.router.test_replay import lab as lab  # the fixture
from tests.router.test_shadow import until_compared
from tests.running import ROOT
from tests.workers.test_server import serving
from workers.protocol import Run

DOC = (ROOT / "docs" / "cache-lane-explained.md").read_text()


def commands() -> list[str]:
    """One a line."""
    return [line for block in re.findall(r"```sh\n(.*?)```", DOC, re.DOTALL) for line in block.splitlines() if line]


async def shell(line: str, **environment: str) -> tuple[int, str]:
    """In bash, with this checkout's `twolane`."""
    twolane = f'twolane() {{ "{sys.executable}" -m router.cli "$@"; }}\n'
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        twolane + line,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


async def test_its_commands_run_and_what_it_names_is_told(lab: Lab, tmp_path: Path) -> None:
    """Show, verify, replay and counterfactuals of a recorded request; each member and metric of its tables is one."""
    fleet = lab.fleet(tmp_path, url=f"unix:{tmp_path}/w.sock")
    config = lab.config(tmp_path, "http://127.0.0.1:9/v1", fleet)
    config["tenants"] = [{"name": "lab", "key": KEY, "audit": {"content": "full", "shadow_text": 1.0}}]
    async with (
        serving(fleet, tmp_path / "w.sock") as (_, worker),
        router(tmp_path, config, KnownFleet([worker.state()])) as door,
    ):
        id = await ask(door, "cache", temperature=0)
        await ask(door, "cache", "Report, ledger, item.", temperature=0)
        await until_compared(tmp_path, 1, "lab")
        metrics = (await door.get("/metrics")).raw.decode()
        told = {line: await shell(line, CONFIG=str(tmp_path / "router.yaml"), ID=id) for line in commands()}
    assert len(told) == 4
    assert all(status == 0 for status, _ in told.values()), told
    shown = " ".join(out for _, out in told.values())
    kinds = get_args(With)
    for kind in kinds:
        assert f"| `{kind}` |" in DOC
        assert f"{kind} (" in shown
    first_cells = re.findall(r"^\| (`[^|]*) \|", DOC, re.MULTILINE)
    members = {name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)}
    known = {field.name for field in msgspec.structs.fields(Run)} | set(kinds)
    known |= set(re.findall(r"^# HELP (\w+)", metrics, re.MULTILINE)) | {"fuse", "handover", "identity"}
    assert members - known == set()
