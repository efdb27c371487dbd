"""The verifier that the documentation prints for auditors: it knows nothing of us, and finds what ours finds."""

from __future__ import annotations

import ast
import contextlib
import io
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from router.audit_keys import Signer
from router.audit_lines import Anchored
from router.audit_verify import verify
from tests.router.audit_attacks import ATTACKS, DAY, INSIDER, TENANTS, Attack, Insider, grow, plain
from tests.router.gateway import KEY, deployment, router, upstream
from tests.running import ROOT

SOURCE = re.search(r"## Verify without us.*?```python\n(.*?)```", (ROOT / "docs/audit.md").read_text(), re.DOTALL)
assert SOURCE is not None
PROGRAM = SOURCE[1]
CODE = compile(PROGRAM, "verify_audit.py", "exec")


def holds(root: Path, tenant: str, key: str, anchor: Path | None = None) -> bool:
    """What the program says, run in this process; whatever ends it but success is a no."""
    argv, sys.argv = sys.argv, ["verify_audit.py", str(root), tenant, key, *([] if anchor is None else [str(anchor)])]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            exec(CODE, {"__name__": "__main__"})
    except (SystemExit, Exception):
        return False
    finally:
        sys.argv = argv
    return f"{tenant}: holds" in said.getvalue()


def public(root: Path) -> str:
    return Signer.load(root).public.hex()


def kept(path: Path, heads: list[Anchored]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(head) + b"\n" for head in heads))
    return path


def test_it_needs_nothing_of_ours() -> None:
    """At most a hundred lines, and nothing imported but the standard library and cryptography."""
    assert len(PROGRAM.splitlines()) <= 100
    imported: set[str] = set()
    for node in ast.walk(ast.parse(PROGRAM)):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    assert {name.split(".")[0] for name in imported} <= {*sys.stdlib_module_names, "cryptography"}


async def test_a_real_log(tmp_path: Path) -> None:
    """As an auditor runs it, on the log and the anchor that a router left; and on that log with one byte changed."""
    audit = {"dir": str(tmp_path / "audit"), "anchor": {"to": str(tmp_path / "heads"), "every": 1}}
    tenants = [{"name": "a", "key": KEY, "regulated": True}]
    async with upstream() as up:
        config = {"model_list": [deployment("m", up)], "tenants": tenants, "audit": audit}
        async with router(tmp_path, config) as door:
            for _ in range(5):
                assert (await door.post(model="m")).status == 200
    program = tmp_path / "verify_audit.py"
    program.write_text(PROGRAM)

    def run(tenant: str) -> subprocess.CompletedProcess[str]:
        arguments = [str(tmp_path / "audit"), tenant, public(tmp_path / "audit"), str(tmp_path / "heads")]
        command = [sys.executable, "-I", str(program), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    for tenant in ("a", "_router"):
        ended = run(tenant)
        last = verify(tmp_path / "audit", tenant).records - 1
        assert (ended.returncode, ended.stderr) == (0, "")
        assert f"signed up to record {last}, anchored up to {last}" in ended.stdout
    path = next((tmp_path / "audit" / "a").glob("*.jsonl"))
    path.write_bytes(path.read_bytes().replace(b'"status":200', b'"status":500', 1))
    ended = run("a")
    assert (ended.returncode, "was edited" in ended.stderr) == (1, True)


@pytest.mark.parametrize("seed", range(5))
def test_no_false_alarm(tmp_path: Path, seed: int) -> None:
    """A log that lived holds here too, with its anchor and without."""
    heads = grow(tmp_path / "log", random.Random(seed))
    anchor = kept(tmp_path / "heads", heads)
    for tenant in TENANTS:
        assert holds(tmp_path / "log", tenant, public(tmp_path / "log"))
        assert holds(tmp_path / "log", tenant, public(tmp_path / "log"), anchor)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_every_attack_is_found(tmp_path: Path, attack: Attack) -> None:
    """Whatever is done without the signing key is found here too."""
    for seed in range(3):
        rng, root = random.Random(seed), tmp_path / str(seed)
        plain(root, rng)
        key = public(root)
        attack(root, rng)
        assert not holds(root, "bank", key), seed


@pytest.mark.parametrize("attack", INSIDER, ids=lambda attack: attack.__name__)
def test_who_holds_the_signing_key_is_found(tmp_path: Path, attack: Insider) -> None:
    """History rewritten under the signing key differs from the anchor; what a mark removed too early, only a known
    retention shows, which ours knows from the configuration."""
    for seed in range(3):
        rng, root = random.Random(seed), tmp_path / str(seed)
        heads = grow(root, rng)
        key: Any = public(root)
        attack(root, rng, heads)
        found = not holds(root, "bank", key, kept(tmp_path / "heads", heads))
        assert found or attack.__name__ == "remove_as_too_old", seed
        assert not verify(root, "bank", bytes.fromhex(key), anchored=heads, retention=5 * 365 * DAY).holds
