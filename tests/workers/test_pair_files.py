"""A pair's files on a disk that is full, and files that are none: what is said, what is left, what goes out."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from router.cli import main
from tests.workers.test_publishing import ALIGNED, LICENCES, NAMED, RECEIVER, SHARER, pair, report_for, twin
from workers import fit_linear, pairs, sealing
from workers.config import ModelConfig
from workers.errors import LoadFailed
from workers.files import content, replacing
from workers.fusers.c2c import load_official
from workers.fusers.folder import save_weights
from workers.items import read_items
from workers.loader import Loaded, Loader
from workers.plan import Plan
from workers.publishing import import_official
from workers.train import Progress
from workers.train_pair import Licences, train_pair

__all__ = ["twin"]
WORDS = ["Paris", "tide", "harbour", "ledger"]
ROWS = [{"context": f"Item {i} is {w}.", "question": "What is it?", "answer": w} for i, w in enumerate(WORDS)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "items.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return file


@pytest.fixture
def models(tiny_folder: Path, other_folder: Path) -> tuple[Path, Path]:
    return tiny_folder, other_folder


def train(models: tuple[Path, Path], data: Path, out: Path, *options: str) -> list[str | Path]:
    small = ("--rank", "4", "--width", "16", "--tokens", "60", "--device", "cpu", "--keep-kv", "0")
    return ["train", *models, "--data", data, "--out", out, *small, *LICENCES, *options]


def cramped(most: int, arguments: list[str | Path]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command in a process where no file can grow beyond so many bytes."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        done = CliRunner().invoke(main, ["pair", *map(str, arguments)])
        os.write(write, pickle.dumps((done.exit_code, done.stdout, done.stderr, repr(done.exception))))
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as told:
        status, stdout, stderr, error = pickle.loads(told.read())
    os.waitpid(child, 0)
    assert error in ("None", "SystemExit(1)"), error
    return status, stdout, stderr


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir()} if folder.exists() else set()


@pytest.mark.parametrize("kind", ["lite", "c2c", "linear"])
def test_a_training_on_a_full_disk_says_so_and_leaves_no_half(
    tmp_path: Path, models: tuple[Path, Path], data: Path, kind: str
) -> None:
    """Wherever the room ends, the file is named with the reason, no pair is claimed, and the same command, once there
    is room, makes what it would have made.
    """
    out, options = tmp_path / "pair", ("--fuser", kind, "--steps", "4", "--checkpoint-every", "2")
    for most in (100, 3000):
        status, _, stderr = cramped(most, train(models, data, out, *options))
        assert (status, str(out) in stderr) == (1, True), stderr
        assert re.search(r"cannot be written \(.*File too large", stderr)
        assert not {name for name in files(out) if name.endswith((".tmp", "pair.json", ".pt"))}
    done = CliRunner().invoke(main, ["pair", *map(str, train(models, data, out, *options))])
    assert done.exit_code == 0, done.stderr
    whole = CliRunner().invoke(main, ["pair", *map(str, train(models, data, tmp_path / "whole", *options))])
    assert whole.exit_code == 0
    assert pairs.read_pair(out).fuser == pairs.read_pair(tmp_path / "whole").fuser
    assert files(out) == files(tmp_path / "whole")


def test_a_checkpoint_that_was_written_stays_when_the_next_one_cannot_be(
    tmp_path: Path, models: tuple[Path, Path], data: Path
) -> None:
    """A disk that fills up while a training runs costs the steps since the last checkpoint, and nothing else."""
    plan = Plan("lite", "handover", "context", steps=4, rank=4)
    sharer, receiver = (Loader("cpu").load(ModelConfig(model=str(model))) for model in models)
    items, out = read_items(data), tmp_path / "pair"
    whole = train_pair(tmp_path / "whole", "pair", sharer, receiver, items, plan, every=1)
    kept = out / "training" / "checkpoint.pt"

    def fills_up(progress: Progress | fit_linear.Progress) -> None:
        if isinstance(progress, Progress) and progress.step == 3:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    child = os.fork()
    if not child:
        try:
            train_pair(out, "pair", sharer, receiver, items, plan, every=1, tell=fills_up)
        except LoadFailed as error:
            os._exit(7 if f"{kept}: cannot be written (File too large)" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert files(out) == {"training/asked.json", "training/checkpoint.pt"}
    done = train_pair(out, "pair", sharer, receiver, items, plan, every=1, resume=True)
    assert whole is not None
    assert done is not None
    assert (done.resumed_at, done.pair.fuser) == (2, whole.pair.fuser)


def test_one_training_at_a_time(tmp_path: Path, models: tuple[Path, Path], data: Path) -> None:
    """A folder that a living process trains in is refused to another, which touches nothing; a dead one holds none."""
    plan = Plan("lite", "handover", "context", steps=3, rank=4)
    sharer, receiver = (Loader("cpu").load(ModelConfig(model=str(model))) for model in models)
    out, refused = tmp_path / "pair", []

    def another(progress: Progress | fit_linear.Progress) -> None:
        before = files(out)
        refused.append(CliRunner().invoke(main, ["pair", *map(str, train(models, data, out, *options))]).stderr)
        assert files(out) == before
        raise KeyboardInterrupt

    options = ("--resume", "--steps", "3", "--rank", "4")
    with pytest.raises(KeyboardInterrupt):
        train_pair(out, "pair", sharer, receiver, read_items(data), replace(plan, width=16, tokens=60), tell=another)
    assert "another process is training there" in refused[0]
    assert CliRunner().invoke(main, ["pair", *map(str, train(models, data, out, *options))]).exit_code == 0


def test_a_report_that_cannot_be_written_is_told_all_the_same(twin: Path, data: Path) -> None:
    """What took an hour to find out stands on the screen, the report that was there stays whole, and once there is room
    the same command asks nothing again.
    """
    before = {name: (twin / name).read_bytes() for name in files(twin)}
    (twin / ".report.json.tmp" / "in the way").mkdir(parents=True)
    asked = ("verify", twin, "--data", data, "--max-tokens", "2", "--no-relay")
    done = pair(*asked)
    assert (done.exit_code, done.stdout.startswith("unproven: 4 questions")) == (1, True), done.stderr
    assert f"{twin / 'report.json'}: cannot be written" in done.stderr
    assert {name: (twin / name).read_bytes() for name in before} == before
    shutil.rmtree(twin / ".report.json.tmp")
    assert "4 items were asked before" in pair(*asked).stderr
    assert files(twin) == {"pair.json", "report.json", "report.svg", "report.txt"}


def test_publishing_on_a_full_disk_leaves_nothing(tmp_path: Path, twin: Path) -> None:
    """A version that cannot be written whole is not there at all, nor is a pair that cannot come in; and a pair that
    cannot be withdrawn is said to stand.
    """
    _with_fuser(twin)
    status, _, stderr = cramped(4000, ["export", twin, tmp_path / "out", *NAMED])
    assert (status, "cannot be written (File too large)" in stderr) == (1, True), stderr
    assert files(tmp_path / "out") == set()
    status, _, stderr = cramped(900, ["import", ALIGNED / "fuser", "--out", tmp_path / "in", SHARER, RECEIVER])
    assert (status, "cannot be written (" in stderr) == (1, True), stderr
    assert files(tmp_path / "in") <= {"config.json"}
    done = pair("import", ALIGNED / "fuser", "--out", tmp_path / "in", SHARER, RECEIVER)
    assert done.exit_code == 0, done.stderr
    status, _, stderr = cramped(10, ["withdraw", twin, "--reason", "trained on the wrong data"])
    assert (status, "withdrawn.json: cannot be written (File too large)" in stderr) == (1, True), stderr
    assert sealing.withdrawn(twin) is None


def _with_fuser(folder: Path) -> None:
    """A fuser of some size, as `pair.json` names it."""
    digest = save_weights(folder, {"weight": torch.zeros(4096)})
    file = pairs.read_pair(folder)
    fuser = msgspec.structs.replace(file.fuser, kind="lite", digest=digest)
    pairs.write(folder, "pair.json", msgspec.structs.replace(file, fuser=fuser))


@pytest.mark.parametrize("how", ["missing", "nowhere", "itself", "folder", "pipe", "endless", "altered"])
def test_weights_that_are_not_those_of_the_pair_do_not_go_out(tmp_path: Path, twin: Path, how: str) -> None:
    """A missing or altered file, a link that leads nowhere or round in a circle, a folder, and what never ends."""
    _with_fuser(twin)
    file = twin / "fuser.safetensors"
    held = file.read_bytes()
    file.unlink()
    match how:
        case "nowhere":
            file.symlink_to(tmp_path / "nothing")
        case "itself":
            file.symlink_to(file)
        case "folder":
            file.mkdir()
        case "pipe":
            os.mkfifo(file)
        case "endless":
            file.symlink_to("/dev/zero")
        case "altered":
            file.write_bytes(held[:-1] + b"x")
    done = pair("export", twin, tmp_path / "out", *NAMED)
    assert (done.exit_code, str(file) in done.stderr) == (1, True), done.stderr
    assert files(tmp_path / "out") == set()


def test_a_pair_in_a_hubs_cache_goes_out_whole(tmp_path: Path, twin: Path) -> None:
    """There every file is a link to a blob: what goes out are files, and a new report leaves the blob as it was."""
    _with_fuser(twin)
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, name in enumerate(sorted(files(twin))):
        (twin / name).rename(blobs / str(number))
        (twin / name).symlink_to(f"../blobs/{number}")
    before = {file.name: file.read_bytes() for file in blobs.iterdir()}
    done = pair("export", twin, tmp_path / "out", *NAMED)
    assert done.exit_code == 0, done.stderr
    (place,) = (tmp_path / "out" / "twin").glob("*/")
    assert files(place) == {"README.md", "fuser.safetensors", "pair.json", "report.json", "report.svg", "report.txt"}
    assert not any(file.is_symlink() for file in place.iterdir())
    pairs.write(twin, "report.json", report_for("another"))
    assert {file.name: file.read_bytes() for file in blobs.iterdir()} == before


def test_only_what_the_format_names_goes_out(tmp_path: Path, tiny: Loaded) -> None:
    """Of an official folder no pickles, no links to elsewhere, no hidden files and no word of the machine that it was
    trained on; and what people read is written anew, whatever stood there.
    """
    folder = tmp_path / "mine"
    assert pair("import", ALIGNED / "fuser", "--out", folder, SHARER, RECEIVER, *LICENCES).exit_code == 0
    (tmp_path / "secret").write_text("hunter2")
    final = folder / "final"
    for name in (".env", "projector_0.json.bak", "notes.txt", "projector_0.pt"):
        (final / name).write_text("hunter2")
    (final / "passwd").symlink_to(tmp_path / "secret")
    (final / "self").symlink_to(".")
    pairs.write(folder, "report.json", report_for("f" * 16))
    (folder / "report.txt").symlink_to(tmp_path / "secret")
    (folder / "report.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
    recipe = json.loads((folder / "config.json").read_text())
    recipe["training"] = {"output_dir": "/home/hunter2"}
    recipe["model"] |= {"base_model": "/home/hunter2/small", "teacher_model": "/home/hunter2/big"}
    (folder / "config.json").write_text(json.dumps(recipe))
    done = pair("export", folder, tmp_path / "out", "--sharer-model", "owner/big", "--receiver-model", "owner/small")
    assert done.exit_code == 0, done.stderr
    place = tmp_path / "out" / "mine" / ("f" * 16)
    assert all(b"hunter2" not in (place / name).read_bytes() for name in files(place))
    assert all(name.endswith((".json", ".safetensors")) for name in files(place / "final"))
    assert "script" not in (place / "report.svg").read_text()
    written = load_official(place)
    assert (written.receiver, written.sharer) == ("owner/small", "owner/big")
    digest = load_official(place, dtype=torch.float32).fuser.digest
    assert digest == pairs.read_pair(place).fuser.digest


def test_an_official_folder_of_no_plain_files_does_not_come_in(tmp_path: Path) -> None:
    """Whichever of its files waits for a writer, never ends, is a folder or nests without end: it is named, and nothing
    is written.
    """
    theirs = tmp_path / "theirs"
    shutil.copytree(ALIGNED / "fuser", theirs)
    for file in (theirs / "final").glob("*.safetensors"):
        torch.save(load_file(file), file.with_suffix(".pt"))
        file.unlink()
    models = [Loader("cpu").load(ModelConfig(model=str(ALIGNED / role))) for role in ("sharer", "receiver")]
    for name in ("config.json", "final/projector_config.json", "final/projector_0.json", "final/projector_0.pt"):
        file, kept = theirs / name, tmp_path / "kept"
        file.rename(kept)
        for make in (
            os.mkfifo,
            lambda at: at.symlink_to("/dev/zero"),
            Path.mkdir,
            lambda at: at.write_text("[" * 99_999),
        ):
            make(file)
            with pytest.raises(LoadFailed, match=re.escape(file.name)):
                import_official(theirs, tmp_path / "ours", "ours", *models, Licences())
            assert files(tmp_path / "ours") == set()
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        kept.rename(file)
    assert import_official(theirs, tmp_path / "ours", "ours", *models, Licences()).name == "ours"


def test_what_says_what_a_pair_is_is_a_plain_file_of_some_size(tmp_path: Path, twin: Path) -> None:
    """Pipes, devices and files that would fill the memory are refused by name by whatever reads a pair; and where a
    withdrawal led nowhere the pair does not stand.
    """
    report = twin / "report.json"
    report.unlink()
    for make in (lambda: os.mkfifo(report), lambda: report.symlink_to("/dev/zero"), lambda: _sparse(report, 1 << 40)):
        make()
        with pytest.raises(LoadFailed, match=re.escape(str(report))):
            pairs.read_report(twin)
        done = pair("versions", tmp_path)
        assert (done.exit_code, str(report) in done.stderr) == (1, True), done.stderr
        report.unlink()
    (twin / "withdrawn.json").symlink_to(tmp_path / "gone")
    with pytest.raises(LoadFailed, match="withdrawn"):
        sealing.withdrawn(twin)


def _sparse(file: Path, size: int) -> None:
    with file.open("wb") as made:
        made.truncate(size)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """An error or a stop while it is written leaves what was there, and nothing beside it."""
    file = tmp_path / "deep" / "file"
    with replacing(file) as aside:
        aside.write_text("first")
    for error in (KeyboardInterrupt, OSError, ValueError):
        with pytest.raises((error, LoadFailed)):
            _stopped(file, error)
    (file.parent / ".file.tmp").symlink_to(tmp_path / "elsewhere")
    with replacing(file) as aside:
        aside.write_text("second")
    assert (content(file), files(tmp_path)) == (b"second", {"deep/file"})


def _stopped(file: Path, error: type[BaseException]) -> None:
    with replacing(file) as aside:
        aside.write_text("half")
        raise error
