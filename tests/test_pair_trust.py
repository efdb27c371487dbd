"""A tenant that names whose signatures it takes: from the commands to the answer, through a real router and worker."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from router.cli import main
from tests.running import Router, serving
from tests.tiny import make_model
from tests.workers.test_publishing import held, report_for
from workers import pairs, sealing
from workers.config import ModelConfig
from workers.loader import Loader
from workers.pair_file import publish
from workers.pairs import FuserInfo

PAIRS = ("ours", "theirs", "nobodys", "forged")
CONFIG = """
models: [{{name: tiny, model: {model}}}]
pairs: [{pairs}]
model_list: [{groups}]
workers: [{{name: w, spawn: true, pairs: [ours, theirs, nobodys, forged], threads: 1}}]
redis: {{url: embedded}}
store: {{dir: kv}}
audit: {{dir: audit}}
state_dir: state
tenants:
  - {{name: careful, key: sk-careful, pairs: {{trust: ["{key}"]}}}}
  - {{name: easy, key: sk-easy, pairs: {{require_verified: true}}}}
general_settings: {{master_key: sk-master}}
"""
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "The tide table"}], "max_tokens": 4, "temperature": 0}


def pair(*arguments: str | Path) -> str:
    done = CliRunner().invoke(main, ["pair", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def proven(folder: Path, model: Path) -> Path:
    """An identity pair with a report for exactly what runs."""
    loaded = Loader("cpu").load(ModelConfig(model=str(model)))
    info = FuserInfo("identity", "identity", licence="MIT")
    how = {"mode": "handover", "scope": "prompt", "made": "2026-01-31", "licence": "MIT", "data_licence": "MIT"}
    publish(folder, "twin", loaded, loaded, info, **how)  # type: ignore[arg-type]
    pairs.write(folder, "report.json", report_for(held(folder, loaded, loaded).state.fingerprint))
    return folder


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    """Four pairs of one model and one report: signed by us, by a stranger, by nobody, and by us with a change since."""
    place = tmp_path_factory.mktemp("trust")
    model = make_model(place / "model", ascii_only=True)
    made = proven(place / "twin", model)
    ours, theirs = (pair("keygen", place / name).strip() for name in ("ours.key", "theirs.key"))
    assert ours != theirs
    folders = {}
    for name in PAIRS:
        key = {"nobodys": (), "theirs": ("--sign", place / "theirs.key")}.get(name, ("--sign", place / "ours.key"))
        out = place / name
        pair("export", made, out, "--sharer-model", "o/m", "--receiver-model", "o/m", *key)
        [folders[name]] = (out / "twin").glob("*/")
    report = pairs.read_report(folders["forged"])
    assert report is not None
    pairs.write(folders["forged"], "report.json", msgspec.structs.replace(report, n=100_000))
    named = {
        "pairs": [f"{{name: {n}, sharer: tiny, receiver: tiny, fuser: {folders[n]}}}" for n in PAIRS],
        "groups": [f"{{model_name: {n}, cache_params: {{pair: {n}}}}}" for n in PAIRS],
    }
    shutil.rmtree(made)
    config = CONFIG.format(model=model, key=ours, **{part: ", ".join(all_) for part, all_ in named.items()})
    with serving(place, config) as running:
        yield running


@pytest.mark.parametrize(
    ("tenant", "served", "refused"),
    [
        (
            "careful",
            ("ours",),
            {"theirs": "pair_not_trusted", "nobodys": "pair_not_trusted", "forged": "pair_not_trusted"},
        ),
        ("easy", ("ours", "theirs", "nobodys"), {"forged": "pair_unverified"}),
    ],
)
def test_only_pairs_signed_by_whom_a_tenant_trusts_answer(
    router: Router, tenant: str, served: tuple[str, ...], refused: dict[str, str]
) -> None:
    """The same request for every pair, by a tenant with a trust list and by one that asks for proof alone."""
    for name in PAIRS:
        body = {"model": name, **ASK}
        status, headers, answer = router.request("POST", "/v1/chat/completions", body, f"sk-{tenant}")
        if name in served:
            assert (status, headers["x-twolane-transport"]) == (200, "cache"), answer
            assert answer["usage"]["completion_tokens"] > 0
        else:
            assert (status, answer["error"]["code"]) == (403, refused[name]), answer


def test_what_the_worker_holds_says_who_signed(router: Router) -> None:
    """Administrators see verdict and signer of each pair; a signature that does not fit is nobody's."""
    [worker] = router.get("/admin/workers", "sk-master")["data"]
    found = {one["name"]: (one["verdict"], bool(one["signer"])) for one in worker["pairs"]}
    signed, unsigned = ("verified", True), ("verified", False)
    assert found == {"ours": signed, "theirs": signed, "nobodys": unsigned, "forged": ("unproven", False)}


def test_whom_a_tenant_trusts_is_changed_while_the_router_runs(router: Router) -> None:
    """A key is taken from one tenant's list and another put there: from the reload on it is the other's pair that
    answers, and for a tenant without a list nothing changes. What is replaced in a folder counts once its worker
    starts again, and does not change whom it is signed by.
    """

    def answers(tenant: str) -> list[str]:
        asked = {name: router.request("POST", "/v1/chat/completions", {"model": name, **ASK}, tenant) for name in PAIRS}
        return [
            name
            for name, (status, headers, _) in asked.items()
            if (status, headers.get("x-twolane-transport")) == (200, "cache")
        ]

    file = router.log.parent / "config.yaml"
    before = file.read_text()
    keys = {
        name: sealing.read_key(router.log.parent / f"{name}.key").public_key().public_bytes_raw().hex()
        for name in ("ours", "theirs")
    }
    everyone = ["ours", "theirs", "nobodys"]
    assert (answers("sk-careful"), answers("sk-easy")) == (["ours"], everyone)
    report = next((router.log.parent / "theirs" / "twin").glob("*/report.json"))
    report.write_text(report.read_text().replace('"verdict": "verified"', '"verdict": "harmful"'))
    try:
        for trusted, served in ((keys["theirs"], ["theirs"]), ("0" * 64, []), (keys["ours"], ["ours"])):
            file.write_text(before.replace(keys["ours"], trusted))
            status, _, told = router.request("POST", "/admin/reload", {}, "sk-master")
            assert status == 200, told
            assert (answers("sk-careful"), answers("sk-easy")) == (served, everyone)
    finally:
        file.write_text(before)
