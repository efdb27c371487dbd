"""`twolane pair import`, `export`, `keygen`, `withdraw`, `versions`: folders in and out, and who stands for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from huggingface_hub import close_session

from router.cli import main
from tests import hub
from tests.tiny import make_model
from tests.workers.test_official_runtime import ALIGNED
from workers import pairs, sealing
from workers.config import Fleet, ModelConfig, PairConfig
from workers.errors import LoadFailed
from workers.fusers.c2c import load_official
from workers.hub import brief
from workers.loader import Loaded, Loader
from workers.pair_file import publish
from workers.pairing import HeldPair, hold_pair
from workers.pairs import FuserInfo, Interval, Report

LICENCES = tuple(f"--{part}-licence=MIT" for part in ("sharer", "receiver", "fuser", "data"))
SHARER, RECEIVER = (f"--{role}={ALIGNED / role}" for role in ("sharer", "receiver"))


def pair(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["pair", *map(str, arguments)])


def report_for(fingerprint: str) -> Report:
    some = Interval(0.3, 0.2, 0.4, 200)
    return Report(
        1, fingerprint, "handover", "verified", "good", "2026-01-31", "float32, sdpa", "d" * 64, 200,
        accuracy={"cache": some}, gain=some, retention=Interval(1.0, 0.98, 1.0, 200), latency_ms={"cache": 12.0},
    )  # fmt: skip


def held(folder: Path | str, sharer: Loaded, receiver: Loaded) -> HeldPair:
    parties = {role: ModelConfig(model=loaded.source) for role, loaded in (("sharer", sharer), ("receiver", receiver))}
    config = PairConfig(name="p", fuser=str(folder), **parties)
    return hold_pair(Fleet(models=(), pairs=(config,)), config, Loader("cpu"), None, 64)


@pytest.fixture
def twin(tmp_path: Path, tiny: Loaded) -> Path:
    """An identity pair with a report for exactly what runs, and all licences."""
    folder = tmp_path / "twin"
    info = FuserInfo("identity", "identity", licence="MIT")
    publish(
        folder, "twin", tiny, tiny, info, mode="handover", scope="prompt", made="2026-01-31", licence="MIT",
        data_licence="CC0-1.0",
    )  # fmt: skip
    pairs.write(folder, "report.json", report_for(held(folder, tiny, tiny).state.fingerprint))
    return folder


NAMED = ("--sharer-model", "owner/model", "--receiver-model", "owner/model")


def test_an_official_folder_comes_in(tmp_path: Path) -> None:
    """Pickled weights become safetensors, the recipe stays as it is, and a worker loads the pair by its digests."""
    theirs = tmp_path / "theirs"
    shutil.copytree(ALIGNED / "fuser", theirs)
    for file in sorted((theirs / "final").glob("*.safetensors")):
        from safetensors.torch import load_file

        torch.save(load_file(file), file.with_suffix(".pt"))
        file.unlink()
    result = pair("import", theirs, "--out", tmp_path / "ours", SHARER, RECEIVER, *LICENCES)
    assert result.exit_code == 0, result.stderr
    ours = tmp_path / "ours"
    assert not list(ours.rglob("*.pt"))
    assert json.loads((ours / "config.json").read_text()) == json.loads((theirs / "config.json").read_text())
    file = pairs.read_pair(ours)
    assert file.fuser.digest == load_official(ALIGNED / "fuser", dtype=torch.float32).fuser.digest
    assert (file.sharer.licence, file.data_licence, file.mode) == ("MIT", "MIT", "fuse")
    config = PairConfig(
        name="p",
        sharer=ModelConfig(model=str(ALIGNED / "sharer")),
        receiver=ModelConfig(model=str(ALIGNED / "receiver")),
        fuser=str(ours),
    )
    state = hold_pair(Fleet(models=(), pairs=(config,)), config, Loader("cpu"), None, 64).state
    assert (state.fuser, state.verdict) == ("c2c", "unproven")
    again = pair("import", theirs, "--out", ours, SHARER, RECEIVER)
    assert (again.exit_code, "holds a pair already" in again.stderr) == (1, True)
    empty = tmp_path / "empty"
    empty.mkdir()
    refused = pair("import", empty, "--out", tmp_path / "no", SHARER, RECEIVER)
    assert (refused.exit_code, "no config.json" in refused.stderr) == (1, True)


def test_a_pair_goes_out_signed(tmp_path: Path, twin: Path, tiny: Loaded) -> None:
    """With a card, under its fingerprint; the signature is of the key, and the worker says whose it is."""
    public = pair("keygen", tmp_path / "key").stdout.strip()
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert pair("keygen", tmp_path / "key").exit_code == 1
    result = pair("export", twin, tmp_path / "out", "--sign", tmp_path / "key", *NAMED)
    assert result.exit_code == 0, result.stderr
    report = pairs.read_report(twin)
    assert report is not None
    place = tmp_path / "out" / "twin" / report.fingerprint
    assert f"signed by {public}" in result.stdout
    card = (place / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: twolane\nlicense: mit\nbase_model:\n- owner/model\n")
    assert "CC0-1.0" in card
    assert tiny.source not in card + (place / "pair.json").read_text()
    found = held(place, tiny, tiny).state
    assert (found.verdict, found.signer) == ("verified", public)
    assert held(twin, tiny, tiny).state.signer == ""
    assert pair("export", twin, tmp_path / "out", *NAMED).exit_code == 1


@pytest.mark.parametrize("name", ["pair.json", "report.json", "signature.json"])
def test_a_signature_that_does_not_fit_proves_nothing(tmp_path: Path, twin: Path, tiny: Loaded, name: str) -> None:
    """One byte changed in what is signed, or in the signature, and the pair is unproven and signed by nobody."""
    sealing.make_key(tmp_path / "key")
    key = sealing.read_key(tmp_path / "key")
    sealing.sign(twin, key)
    before = (twin / name).read_text()
    changed = before.replace("2026-01-31", "2026-02-01").replace('"signature": "', '"signature": "A')
    assert changed != before
    (twin / name).write_text(changed)
    with pytest.raises(LoadFailed, match="does not fit"):
        sealing.signer_of(twin)
    state = held(twin, tiny, tiny).state
    assert (state.verdict, state.signer) == ("unproven", "")
    assert "does not fit" in state.verdict_reason


def test_what_may_not_go_out(tmp_path: Path, twin: Path) -> None:
    """Without every licence, with a model that only this machine knows, or once withdrawn."""
    refused = pair("export", twin, tmp_path / "out")
    assert (refused.exit_code, "--sharer-model" in refused.stderr) == (1, True)
    file = pairs.read_pair(twin)
    import msgspec

    pairs.write(twin, "pair.json", msgspec.structs.replace(file, data_licence=None))
    refused = pair("export", twin, tmp_path / "out", *NAMED)
    assert (refused.exit_code, "no licence is known of data" in refused.stderr) == (1, True)
    pairs.write(twin, "pair.json", file)
    assert pair("withdraw", twin, "--reason", "wrong data").exit_code == 0
    refused = pair("export", twin, tmp_path / "out", *NAMED)
    assert (refused.exit_code, "wrong data" in refused.stderr) == (1, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "/tmp/other", "a/b", "a\\b", "a\nb", "a\0b"])
def test_a_name_leads_nowhere_else(tmp_path: Path, twin: Path, name: str) -> None:
    """What is no folder's name is refused by whatever reads the pair, and nothing is written anywhere."""
    _changed(twin, name=name)
    before = sorted(tmp_path.rglob("*"))
    refused = pair("export", twin, tmp_path / "out", *NAMED)
    assert (refused.exit_code, "not the name of a folder" in refused.stderr) == (1, True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_version_leads_nowhere_else(tmp_path: Path, twin: Path) -> None:
    """A report's fingerprint becomes a folder, and may be anything in a pair that somebody else has made."""
    pairs.write(twin, "report.json", report_for("../../elsewhere"))
    refused = pair("export", twin, tmp_path / "out", *NAMED)
    assert (refused.exit_code, "cannot name a folder" in refused.stderr) == (1, True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "both"},
        {"scope": "everything"},
        {"sharer": {"dtype": "int4"}},
        {"receiver": {"layers": "0,x"}},
        {"receiver": {"layers": ""}},
        {"fuser": {"parameters": -5}},
    ],
    ids=str,
)
def test_what_no_pair_can_be_is_refused_by_every_reader(tmp_path: Path, twin: Path, change: dict[str, Any]) -> None:
    """The error names the file and the member; no command ends in a traceback, no unknown scope is taken for one."""
    _changed(twin, **change)
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "Who?", "answer": "Ann"}')
    for command in (("verify", twin, "--data", data), ("export", twin, tmp_path / "out", *NAMED)):
        refused = pair(*command)
        assert (refused.exit_code, "pair.json: " in refused.stderr) == (1, True), refused.output
    assert isinstance(refused.exception, SystemExit)


def test_commands_that_cannot_write_say_so(tmp_path: Path, twin: Path) -> None:
    """A file in the way is an error in one line, and a reason that says nothing is none."""
    (tmp_path / "file").touch()
    for command in (("export", twin, tmp_path / "file" / "out", *NAMED), ("keygen", tmp_path / "file" / "key")):
        refused = pair(*command)
        assert (refused.exit_code, refused.stderr.startswith("twolane: ")) == (1, True), refused.output
    assert pair("withdraw", twin, "--reason", "  ").exit_code == 2
    assert not (twin / "withdrawn.json").exists()


def _changed(folder: Path, **members: Any) -> None:
    """Write other members into pair.json, those of a part one by one."""
    file = folder / "pair.json"
    known = json.loads(file.read_text())
    file.write_text(json.dumps(known | {k: known[k] | v if isinstance(v, dict) else v for k, v in members.items()}))


def test_a_withdrawn_pair_is_refused(twin: Path, tiny: Loaded) -> None:
    """Its report counts no more, and the reason is told; undone, it stands as before."""
    assert held(twin, tiny, tiny).state.verdict == "verified"
    assert pair("withdraw", twin, "--reason", "wrong data", "--by", "Ann").exit_code == 0
    state = held(twin, tiny, tiny).state
    assert (state.verdict, "wrong data" in state.verdict_reason) == ("withdrawn", True)
    assert pair("withdraw", twin, "--reason", "it was right", "--undo").exit_code == 0
    assert held(twin, tiny, tiny).state.verdict == "verified"


def test_versions_stand_side_by_side(tmp_path: Path, twin: Path) -> None:
    """Every version with date, verdict, figures and signer, the newest last."""
    place = tmp_path / "out" / "twin"
    sealing.make_key(tmp_path / "key")
    assert pair("export", twin, tmp_path / "out", "--sign", tmp_path / "key", *NAMED).exit_code == 0
    (twin / "report.json").unlink()
    assert pair("export", twin, tmp_path / "out", *NAMED).exit_code == 0
    lines = pair("versions", place).stdout.splitlines()
    assert "unproven" in lines[0] + lines[2]
    assert "verified" in lines[0] + lines[2]
    assert "retention 1.000 (0.980 to 1.000)  12 ms  signed by" in lines[0] + lines[2]
    rows = [json.loads(line) for line in pair("versions", place, "--json").stdout.splitlines()]
    assert sorted(row["verdict"] for row in rows) == ["unproven", "verified"]
    none = pair("versions", place.parent)
    assert (none.exit_code, "no folder in it" in none.stderr) == (1, True)


def test_a_changed_base_model_is_told_with_what_retraining_takes(tmp_path: Path, other_folder: Path) -> None:
    """`show --check` reads the models' files: all well, then a template changes, which is a doubt, then a weight, and
    the worker refuses and show says why.
    """
    model, data, folder = tmp_path / "model", tmp_path / "items.jsonl", tmp_path / "made"
    make_model(model, seed=4)
    data.write_text('{"context": "Item 1 is tide.", "question": "What is it?", "answer": "tide"}')
    made = pair("train", other_folder, model, "--data", data, "--out", folder, "--steps", "1", "--keep-kv", "0")
    assert made.exit_code == 0, made.stderr
    config = tmp_path / "config.yaml"
    named = f"sharer: {{model: {other_folder}}}, receiver: {{model: {model}}}"
    config.write_text(f"model_list: []\npairs:\n- {{name: made, {named}, fuser: {folder}}}\n")
    fine = pair("show", "made", "--config", config, "--check")
    assert (fine.exit_code, "are those that it was made for" in fine.stdout) == (0, True)
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{# other #}")
    doubted = pair("show", "made", "--config", config, "--check")
    assert (doubted.exit_code, "CHANGED: the receiver's chat template; it is unproven" in doubted.stdout) == (1, True)
    make_model(model, seed=5)
    changed = pair("show", "made", "--config", config, "--check")
    assert changed.exit_code == 1
    assert "CHANGED: the receiver's weights; workers refuse the pair" in changed.stdout
    assert "training it again takes about" in changed.stdout
    assert json.loads(pair("show", "made", "--config", config, "--check", "--json").stdout)["changed"] == [
        "the receiver's weights"
    ]
    said = json.loads((folder / "pair.json").read_text())
    del said["training"]
    (folder / "pair.json").write_text(json.dumps(said))
    assert "not recorded" in pair("show", "made", "--config", config, "--check").stdout
    parties = {role: ModelConfig(model=str(at)) for role, at in (("sharer", other_folder), ("receiver", model))}
    wanted = PairConfig(name="made", fuser=str(folder), **parties)
    with pytest.raises(LoadFailed, match="the receiver's weights are not those"):
        hold_pair(Fleet(models=(), pairs=(wanted,)), wanted, Loader("cpu"), None, 64)


def test_keys_are_kept_from_others(tmp_path: Path) -> None:
    """A key that others can read is refused, and so is what is none."""
    sealing.make_key(tmp_path / "key")
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(LoadFailed, match="others can read"):
        sealing.read_key(tmp_path / "key")
    (tmp_path / "none").write_text("x")
    (tmp_path / "none").chmod(0o600)
    with pytest.raises(LoadFailed, match="no Ed25519 key"):
        sealing.read_key(tmp_path / "none")


@pytest.fixture
def online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub.Hub]:
    """A hub that this process uses."""
    with hub.running() as server:
        for name, value in server.environment(str(tmp_path / "home")).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
        yield server
        close_session()


def test_a_pair_goes_to_a_hub_and_comes_back(
    tmp_path: Path, twin: Path, tiny: Loaded, online: hub.Hub, caplog: pytest.LogCaptureFixture
) -> None:
    """Versions lie side by side in one repository under the newest card; a worker takes one by its id, signed."""
    caplog.set_level("DEBUG")
    public = pair("keygen", tmp_path / "key").stdout.strip()
    push = (*NAMED, "--push", "owner/twin", "--private")
    done = pair("export", twin, tmp_path / "out", "--sign", tmp_path / "key", *push)
    assert done.exit_code == 0, done.output
    repo = online.repos["models/owner/twin"]
    report = pairs.read_report(twin)
    assert report is not None
    assert f"owner/twin/{report.fingerprint}: {online.endpoint}/owner/twin/commit/" in done.stdout
    assert repo.private
    assert b"base_model:\n- owner/model\ntags" in repo.files("main")["README.md"]
    (twin / "report.json").unlink()
    later = pair("export", twin, tmp_path / "out", *push)
    assert later.exit_code == 0, later.output
    folders = {name.split("/")[0] for name in repo.files("main")}
    assert folders == {"README.md", report.fingerprint, "unproven-identity"}
    state = held(f"owner/twin/{report.fingerprint}", tiny, tiny).state
    assert (state.verdict, state.signer) == ("verified", public)
    with pytest.raises(LoadFailed, match="holds no folder none"):
        held("owner/twin/none", tiny, tiny)
    assert hub.TOKEN not in done.output + later.output + caplog.text


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "403 for url: https://store.example/a/b?X-Amz-Signature=5ec7e7&X=1 (x)",
            "403 for url: https://store.example/a/b (x)",
        ),
        ("no way to https://me:5ec7e7@hub.example/api/whoami", "no way to https://hub.example/api/whoami"),
        ("at 'https://hub.example/a#5ec7e7': down\nadvice", "at 'https://hub.example/a': down"),
        ("a name of a question? none", "a name of a question? none"),
    ],
)
def test_errors_of_a_hub_let_nobody_in(said: str, shown: str) -> None:
    """An address keeps its host and path; logins, and the queries that sign transfers, are left out."""
    assert brief(OSError(said)) == f"OSError: {shown}"


def test_a_push_that_failed_is_tried_again(
    tmp_path: Path, twin: Path, online: hub.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong token: the export stands, the refusal is told without the token; the same command then ends it. What has
    changed since is not pushed under the same version.
    """
    sealing.make_key(tmp_path / "key")
    command = ("export", twin, tmp_path / "out", "--sign", tmp_path / "key", *NAMED, "--push", "owner/twin")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong0123456789abc")
    refused = pair(*command)
    assert (refused.exit_code, online.repos) == (1, {})
    assert "was not pushed to owner/twin (" in refused.stderr
    assert "401" in refused.stderr
    assert "hf_wrong" not in refused.output
    monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
    assert pair(*command).exit_code == 0
    assert pair("export", twin, tmp_path / "out", *NAMED, "--push", "owner/twin").exit_code == 1
    bad = pair(*command[:-1], "not a name/at all")
    assert (bad.exit_code, "HFValidationError" in bad.stderr) == (1, True)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    away = pair(*command)
    assert (away.exit_code, "was not pushed" in away.stderr) == (1, True)
