"""Whatever changes something leaves a record of who did it: all routes, all commands, and what happens by itself.

The lists are taken from the application and from the command line: what is added there and not sorted here fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from click.testing import CliRunner
from msgspec.structs import replace
from starlette.routing import Route

from router.audit_keys import KEYS, SIGNING
from router.cli import main
from tests.router.gateway import KEY, until
from tests.router.test_admin import living
from workers import pairs

READS = {
    "audit evidence",
    "audit export",
    "audit holds",
    "audit replay",
    "audit show",
    "audit verify",
    "check",
    "decide",
    "kv stats",
    "pair check",
    "pair conform",
    "pair list",
    "pair show",
    "pair versions",
    "policy diff",
    "policy replay",
    "policy show",
    "schema",
    "stops",
}
"""Commands that change nothing."""
WRITES_FILES = {"pair import", "pair keygen", "pair train", "pair verify"}
"""Commands that write a pair's folder: it counts once a worker holds it, and then the router records what it says."""
PROCESSES = {"serve", "worker"}
"""Commands that run until they are ended; a router records its start and its end by itself."""
WHERE_THERE_IS_SOMETHING = {"audit retain"}
"""Recorded where something has come to its end: tests/router/test_audit_custody.py."""

COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "stop": ("stop", ("cache", "--reason", "x")),
    "start": ("start", ("tenant", "a", "--reason", "x")),
    "pair reinstate": ("pair_reinstated", ("duo", "--reason", "x")),
    "pair export": ("pair_exported", ("{pair}", "{out}", "--by", "kim")),
    "pair withdraw": ("pair_withdrawn", ("{pair}", "--by", "kim", "--reason", "x")),
    "kv purge": ("kv_purge", ("a",)),
    "audit hold": ("hold", ("--tenant", "a", "--by", "kim", "--reason", "x")),
    "audit erase": ("erased", ("--tenant", "b", "--by", "kim", "--reason", "x", "--yes")),
}
"""Commands that change something: the record they leave, and how they are called here."""

ROUTES: dict[tuple[str, str], tuple[str, dict[str, str]]] = {
    ("POST", "/admin/reload"): ("reload", {}),
    ("POST", "/admin/stops"): ("stop", {"target": "cache", "reason": "x"}),
    ("DELETE", "/admin/stops"): ("start", {"target": "tenant:a", "reason": "x"}),
    ("POST", "/admin/pairs/{pair}/reinstate"): ("pair_reinstated", {"reason": "x"}),
    ("DELETE", "/admin/tenants/{tenant}/kv"): ("kv_purge", {}),
}
"""Routes that change something: the record they leave, and what is sent here."""
ASKS = {"/decide", "/v1/decide"}
"""Routes with a body that change nothing."""

ADMINS = [
    {"name": "kim", "key": "sk-kim-0123456789", "role": "operator"},
    {"name": "pat", "key": "sk-pat-0123456789", "role": "publisher"},
]


def commands(group: click.Command, path: tuple[str, ...] = ()) -> Iterator[str]:
    if not isinstance(group, click.Group):
        yield " ".join(path)
        return
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield from commands(command, (*path, name))


def test_every_command_is_sorted() -> None:
    """Each command either changes nothing or is known to leave a record: a new one must be sorted above."""
    sorted_ = {*READS, *WRITES_FILES, *PROCESSES, *WHERE_THERE_IS_SOMETHING, *COMMANDS}
    assert set(commands(main)) == sorted_


async def test_every_route_is_sorted(tmp_path: Path) -> None:
    """Each route that takes more than GET either changes nothing or is known to leave a record."""
    async with living(tmp_path) as house:
        routes = [route for route in house.door.app._rest.routes if isinstance(route, Route)]
    changing = {(m, r.path) for r in routes for m in (r.methods or set()) - {"GET", "HEAD"} if r.path not in ASKS}
    assert changing == set(ROUTES)


@pytest.mark.parametrize("route", list(ROUTES), ids=lambda route: " ".join(route))
async def test_a_route_leaves_a_record(tmp_path: Path, route: tuple[str, str]) -> None:
    """Who called it stands in the record by the name of the administrator."""
    what, body = ROUTES[route]
    async with living(tmp_path, admins=ADMINS) as house:
        await house.stop("tenant:a", "to be lifted")
        name = "pat" if what == "pair_reinstated" else "kim"
        path = route[1].replace("{pair}", "duo").replace("{tenant}", "a")
        answer = await house.admin(route[0], path, f"sk-{name}-0123456789", **body)
        # The worker of this house keeps no KV: its purge is not complete, and is recorded all the same.
        assert answer.status in ((503,) if what == "kv_purge" else (200,)), answer.raw
        assert name in [record["who"] for record in house.records(what)]


@pytest.mark.parametrize("command", list(COMMANDS))
async def test_a_command_leaves_a_record(tmp_path: Path, command: str) -> None:
    """Who called it stands in the record: by their key, or by the name that they must give."""
    what, arguments = COMMANDS[command]
    async with living(tmp_path, admins=ADMINS) as house:
        await house.stop("tenant:a", "to be lifted")
        for key in (KEY, "sk-tenant-b-0123456789"):
            await house.door.post(model="m", key=key)
        await until(lambda: all((tmp_path / "audit" / t).is_dir() for t in "ab"))
        who = "pat" if command == "pair reinstate" else "kim"
        environment = {
            "TWOLANE_URL": f"http://127.0.0.1:{house.door.port}",
            "TWOLANE_ADMIN_KEY": f"sk-{who}-0123456789",
            "TWOLANE_AUDIT_DIR": str(tmp_path / "audit"),
        }
        places = {"{pair}": str(pair_folder(tmp_path / "pair")), "{out}": str(tmp_path / "out")}
        called = [*command.split(), *(places.get(argument, argument) for argument in arguments)]
        done = await asyncio.to_thread(CliRunner().invoke, main, called, env=environment)
        assert done.exit_code in ((1,) if command == "kv purge" else (0,)), done.output
        assert who in [record["who"] for record in house.records(what)]


def pair_folder(folder: Path) -> Path:
    """A pair that may be exported."""
    folder.mkdir()
    party = pairs.Party("owner/model", "w" * 64, "t" * 64, "c" * 64, licence="MIT")
    fuser = pairs.FuserInfo("identity", "identity", licence="MIT")
    pairs.write(
        folder,
        "pair.json",
        pairs.PairFile(1, "twin", "handover", "prompt", party, party, fuser, made="2026-01-31", data_licence="MIT"),
    )
    return folder


async def test_publishing_is_recorded_where_a_log_is_named(tmp_path: Path) -> None:
    """Each step with the pair, its version and who did it, in a chain that still holds, with no router running; without
    a name nothing is done; what cannot be recorded is done, and the exit status says that it is not recorded.
    """
    folder, log = pair_folder(tmp_path / "pair"), tmp_path / "audit"
    log.mkdir()
    withdraw = ["pair", "withdraw", str(folder), "--reason", "wrong data"]
    nameless = CliRunner().invoke(main, [*withdraw, "--audit", str(log)])
    assert (nameless.exit_code, "--by is needed" in nameless.stderr) == (2, True)
    assert not (folder / "withdrawn.json").exists()
    export = ["pair", "export", str(folder), str(tmp_path / "out")]
    for command in (export, withdraw, [*withdraw, "--undo"]):
        done = CliRunner().invoke(main, [*command, "--by", "kim", "--audit", str(log)])
        assert done.exit_code == 0, done.output
    [file] = log.rglob("*.jsonl")
    records = [json.loads(line) for line in file.read_bytes().splitlines()]
    steps = [record for record in records if record.get("what", "").startswith("pair_")]
    said = [(step["what"], step["who"], step["detail"]["pair"]) for step in steps]
    assert said == [(what, "kim", "twin") for what in ("pair_exported", "pair_withdrawn", "pair_stands_again")]
    assert steps[0]["detail"]["version"] == "unproven-identity"
    assert CliRunner().invoke(main, ["audit", "verify", "--dir", str(log)]).exit_code == 0
    silent = CliRunner().invoke(main, withdraw)
    assert (silent.exit_code, "not recorded: --audit" in silent.stderr) == (0, True)
    (log / KEYS / f"{SIGNING}.key").write_text("x")
    lost = CliRunner().invoke(main, [*withdraw, "--by", "kim", "--audit", str(log)])
    assert (lost.exit_code, "it is done, and not recorded" in lost.stderr) == (1, True)
    assert (folder / "withdrawn.json").exists()


@pytest.mark.parametrize("who", ["file", "signal"])
async def test_what_happens_by_itself_leaves_a_record(tmp_path: Path, who: str) -> None:
    """A reload by a changed file or by SIGHUP is recorded as such, with both digests; a refused one too."""
    folder = tmp_path / "tenants"
    folder.mkdir()
    file = folder / "a.yaml"
    file.write_text(yaml.safe_dump({"name": "a", "keys": [KEY]}))
    async with living(tmp_path, tenants=str(folder)) as house:
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL  # else it would end this process
        _change(file, {"name": "a", "keys": [KEY], "models": ["m"]}, who)
        await until(lambda: bool(house.records("reload")))
        [record] = house.records("reload")
        old, new = record["detail"]["digests"]["a"]
        assert (record["who"], old != new) == (who, True)
        _change(file, {"name": "a", "modles": []}, who)
        await until(lambda: bool(house.records("reload_refused")))
        assert house.records("reload_refused")[0]["who"] == who


async def test_what_a_pairs_report_says_leaves_a_record(tmp_path: Path) -> None:
    """When a router first sees a pair, and when its report says something else than before."""
    async with living(tmp_path) as house:
        await until(lambda: len(house.records("pair_report")) == 1)
        [state] = house.fleet.states
        pairs = tuple(replace(pair, verdict="harmful") for pair in state.pairs)
        house.fleet.states[:] = [replace(state, pairs=pairs)]
        await until(lambda: len(house.records("pair_report")) == 2)
    first, second = house.records("pair_report")
    assert [r["detail"]["pair"] for r in (first, second)] == ["duo", "duo"]
    assert (first["detail"]["verdict"] != "harmful", second["detail"]["verdict"]) == (True, "harmful")
    assert {"fingerprint", "signer", "gain", "retention"} <= first["detail"].keys()


def _change(file: Path, written: dict[str, Any], who: str) -> None:
    file.write_text(yaml.safe_dump(written))
    if who == "signal":  # at once, before the file is looked at
        os.kill(os.getpid(), signal.SIGHUP)
