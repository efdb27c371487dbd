"""Pairs from elsewhere into our folders, and our folders for others. Knows files and the official layout."""

from __future__ import annotations

import datetime
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from workers import pairs, sealing
from workers.errors import LoadFailed
from workers.files import replacing
from workers.fusers.c2c import load_official, recipe_of
from workers.fusers.folder import WEIGHTS, read_weights, write_tensors
from workers.fusers.several import JointFuser
from workers.loader import DTYPES, Loaded
from workers.pair_file import publish
from workers.pairs import FuserInfo, PairFile, Party, Report
from workers.pictures import can_png
from workers.report_text import for_people, told
from workers.train_pair import Licences

_LINKS = "projector_config.json"
_PROJECTOR = re.compile(r"projector_[0-9]+\.(json|safetensors)")


def import_official(
    folder: Path, out: Path, name: str, sharer: Loaded, receiver: Loaded, licences: Licences
) -> PairFile:
    """A checkpoint folder of the official project -> a pair folder. Weights are stored as safetensors, in the dtype
    they came in. Raises LoadFailed: nothing that the official loader would take, or models that it does not fit.
    """
    if not pairs.is_plain(name):
        raise LoadFailed(f"a pair cannot be called {name!r}: its name is that of a folder")
    if (out / "pair.json").exists():
        raise LoadFailed(f"{out}: holds a pair already; name a folder of its own, or remove it")
    if (out / "final").exists():
        raise LoadFailed(f"{out / 'final'}: is there already; name a folder of its own, or remove it")
    official = load_official(folder, receiver=receiver.shape, sharer=sharer.shape)
    weights = _weights(folder)
    try:
        _copy(recipe_of(folder)[0], out / "config.json")
        if (weights / _LINKS).exists():
            _copy(weights / _LINKS, out / "final" / _LINKS)
        for index, projector in official.fuser.projectors.items():
            _copy(weights / f"projector_{index}.json", out / "final" / f"projector_{index}.json")
            write_tensors(out / "final" / f"projector_{index}.safetensors", projector.state_dict())
        # Named by what will run: the weights in the receiver's dtype.
        run = load_official(out, receiver=receiver.shape, sharer=sharer.shape, dtype=receiver.dtype).fuser
        return publish(
            out,
            name,
            sharer,
            receiver,
            FuserInfo("c2c", run.digest, {}, run.parameters, licences.fuser),
            mode="fuse",
            scope="prompt",
            made=datetime.datetime.now(datetime.UTC).date().isoformat(),
            licence=(licences.sharer, licences.receiver),
            data_licence=licences.data,
        )
    except BaseException:
        shutil.rmtree(out / "final", ignore_errors=True)
        raise


def export(
    folder: Path,
    out: Path,
    *,
    key: Ed25519PrivateKey | None = None,
    models: Mapping[str, str] | None = None,
    again: bool = False,
) -> Path:
    """Copy a pair into `out/NAME/VERSION` with a model card, signed where there is a key. `models` are names for
    sharer and receiver that others know. With `again`, what an earlier call has written is taken where it is the same.
    Only what the format names goes out, and what people read is written anew from the report. Raises LoadFailed: a
    licence that nobody has said, a model that only this machine knows, weights that are not those of the pair, a pair
    that was withdrawn.
    """
    file, report = pairs.read_pair(folder), pairs.read_report(folder)
    if (taken := sealing.withdrawn(folder)) is not None:
        raise LoadFailed(f"{folder}: was withdrawn on {taken.date}: {taken.reason}")
    file = _named(file, models or {})
    _require_licences(folder, file)
    version = report.fingerprint if report is not None else f"unproven-{file.fuser.digest[:12]}"
    if not pairs.is_plain(version):
        raise LoadFailed(f"{folder}: {version!r}, its report's fingerprint, cannot name a folder")
    place = out / file.name / version
    if place.exists():
        if again and _same(folder, file, place, key):
            return place
        raise LoadFailed(f"{place}: is there already")
    aside = place.with_name(f".{version}.tmp")
    if aside.exists():
        shutil.rmtree(aside)
    try:
        aside.mkdir(parents=True)
        _copy_fuser(folder, aside, file, report)
        if report is not None:
            _copy(folder / "report.json", aside / "report.json")
            for_people(aside, report, as_png=(folder / "report.png").exists() and can_png())
        pairs.write(aside, "pair.json", file)
        _write(aside / "README.md", card(file, report))
        if key is not None:
            sealing.sign(aside, key)
        aside.rename(place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    # What a hub shows of all versions together.
    _write(place.parent / "README.md", card(file, report, version))
    return place


def _weights(folder: Path) -> Path:
    """Where those of an official checkpoint lie."""
    return folder / "final" if (folder / "final").is_dir() else folder


def _copy_fuser(folder: Path, aside: Path, file: PairFile, report: Report | None) -> None:
    """What the kind of fuser consists of, once it is what `pair.json` names. Raises LoadFailed."""
    match file.fuser.kind:
        case "identity":
            pass
        case "c2c":
            _copy_official(folder, aside, file, report)
        case kind:
            read_weights(folder, kind)
            _copy(folder / WEIGHTS, aside / WEIGHTS)
            aside.joinpath(WEIGHTS).chmod(0o644)


def _copy_official(folder: Path, aside: Path, file: PairFile, report: Report | None) -> None:
    """The official layout as safetensors. Its recipe names the models as `pair.json` does; the rest of the file is
    about the machine it was trained on.
    """
    weights = _weights(folder)
    listed = sorted(found for found in weights.glob("projector_*.*") if _PROJECTOR.fullmatch(found.name))
    if not any(found.suffix == ".safetensors" for found in listed):
        raise LoadFailed(f"{weights}: holds no projector_N.safetensors; `twolane pair import` makes them of .pt files")
    for found in listed:
        _copy(found, aside / "final" / found.name)
    if (weights / _LINKS).exists():
        _copy(weights / _LINKS, aside / "final" / _LINKS)
        _require_official(folder, file, report)
    names = {"base_model": file.receiver.model, "teacher_model": file.sharer.model}
    _write(aside / "config.json", json.dumps({"model": recipe_of(folder)[1] | names}, indent=1) + "\n")


def _require_official(folder: Path, file: PairFile, report: Report | None) -> None:
    """The digest is over the links of all receiver layers, and nothing but the report says how many there are."""
    count = 1 + len(file.others)
    dtype = DTYPES[file.receiver.dtype]
    read = [load_official(folder, dtype=dtype, place=place, sharers=count).fuser for place in range(count)]
    digest = read[0].digest if count == 1 else JointFuser(read, "sequential").digest
    layers = len(report.gates) if report is not None else 0
    if digest != file.fuser.digest and layers == len(read[0].links):
        raise LoadFailed(f"{folder}: its weights are not those that pair.json names")


def _copy(source: Path, target: Path) -> None:
    """Of a plain file, or of what a link leads to. Raises LoadFailed."""
    if not source.is_file():
        raise LoadFailed(f"{source}: is no plain file")
    with replacing(target) as aside:
        shutil.copyfile(source, aside)


def _write(file: Path, text: str) -> None:
    with replacing(file) as aside:
        aside.write_text(text, encoding="utf-8")


def _same(folder: Path, file: PairFile, place: Path, key: Ed25519PrivateKey | None) -> bool:
    """Nothing has changed since it was exported, neither the pair, its report nor the signer."""
    reports = [(at / "report.json").read_bytes() if (at / "report.json").exists() else b"" for at in (folder, place)]
    signer = "" if key is None else key.public_key().public_bytes_raw().hex()
    return pairs.read_pair(place) == file and reports[0] == reports[1] and sealing.signer_of(place) == signer


def _named(file: PairFile, models: Mapping[str, str]) -> PairFile:
    changed = {}
    for role in ("sharer", "receiver"):
        party: Party = getattr(file, role)
        changed[role] = msgspec.structs.replace(party, model=models.get(role, party.model))
        if changed[role].model.startswith(("/", ".", "~")):
            raise LoadFailed(
                f"the {role} {changed[role].model} is a folder of this machine; name it as others find it, with "
                f"--{role}-model"
            )
    return msgspec.structs.replace(file, **changed)


def _require_licences(folder: Path, file: PairFile) -> None:
    parts = {
        "sharer": file.sharer.licence,
        "receiver": file.receiver.licence,
        "fuser": file.fuser.licence,
        "data": file.data_licence,
        **{f"sharer {i + 2}": party.licence for i, party in enumerate(file.others)},
    }
    if unknown := [name for name, licence in parts.items() if not licence]:
        raise LoadFailed(f"{folder}: no licence is known of {', '.join(unknown)}; a pair is exported with all of them")


def card(file: PairFile, report: Report | None, version: str = "") -> str:
    """The model card, `README.md`: front matter that hubs read, then what is known. `version` is the folder beside it
    that it is about, where it does not lie in that folder.
    """
    parties = [*(("sharer", party) for party in (file.sharer, *file.others)), ("receiver", file.receiver)]
    lines = ["---", "library_name: twolane", f"license: {(file.fuser.licence or '').lower()}"]
    # Others know hub ids only; a hub refuses what cannot be one.
    if known := dict.fromkeys(party.model for _, party in parties if party.model.count("/") == 1):
        lines += ["base_model:", *(f"- {model}" for model in known)]
    lines += ["tags: [kv-cache, cache-to-cache]", "---", "", f"# {file.name}", ""]
    lines.append(
        f"A {file.fuser.kind} fuser of {file.fuser.parameters / 1e6:.2f} M parameters; mode {file.mode} over the "
        f"{file.scope}. It is no model by itself: it needs exactly the two models below."
    )
    lines += ["", "| part | what | dtype, layers | licence |", "|---|---|---|---|"]
    lines += [f"| {role} | `{p.model}` | {p.dtype}, {p.layers} | {p.licence} |" for role, p in parties]
    lines += [f"| fuser | `{file.fuser.digest[:16]}` | | {file.fuser.licence} |", f"| data | | | {file.data_licence} |"]
    lines += ["", "## What was measured", ""]
    lines += ["```", told(report), "```"] if report is not None else ["Nothing: the pair is unproven."]
    if report is not None:
        lines += ["", f"Data digest `{report.data}`, fingerprint `{report.fingerprint}`."]
    if version:
        lines += [
            "",
            f"This is the newest version, `{version}`; each lies in a folder of its own. A configuration names it",
        ]
        lines += [f"by `fuser: OWNER/REPOSITORY/{version}`, with the name of this repository."]
    return "\n".join(lines) + "\n"
