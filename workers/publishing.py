"""Pairs from elsewhere into our folders, and our folders for others. Knows files and the official layout."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.torch import save_file

from workers import pairs, sealing
from workers.errors import LoadFailed
from workers.fusers.c2c import load_official
from workers.loader import Loaded
from workers.pair_file import publish
from workers.pairs import FuserInfo, PairFile, Party, Report
from workers.report_text import told
from workers.train_pair import Licences

_REPORT = ("report.json", "report.txt", "report.svg", "report.png")


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
    official = load_official(folder, receiver=receiver.shape, sharer=sharer.shape)
    final = out / "final"
    final.mkdir(parents=True, exist_ok=True)
    weights = folder / "final" if (folder / "final").is_dir() else folder
    recipe = folder / "config.json" if (folder / "config.json").is_file() else folder.parent / "config.json"
    shutil.copyfile(recipe, out / "config.json")
    if (weights / "projector_config.json").exists():
        shutil.copyfile(weights / "projector_config.json", final / "projector_config.json")
    for index, projector in official.fuser.projectors.items():
        shutil.copyfile(weights / f"projector_{index}.json", final / f"projector_{index}.json")
        file = final / f"projector_{index}.safetensors"
        save_file({name: t.contiguous() for name, t in projector.state_dict().items()}, file)
        file.chmod(0o644)  # safetensors creates it for its owner alone
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
    Raises LoadFailed: a licence that nobody has said, a model that only this machine knows, a pair that was withdrawn.
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
    aside.mkdir(parents=True)
    for found in ("fuser.safetensors", "config.json", *_REPORT):
        if (folder / found).exists():
            shutil.copyfile(folder / found, aside / found)
    if (folder / "final").is_dir():
        shutil.copytree(folder / "final", aside / "final")
    pairs.write(aside, "pair.json", file)
    (aside / "README.md").write_text(card(file, report), encoding="utf-8")
    if key is not None:
        sealing.sign(aside, key)
    aside.rename(place)
    # What a hub shows of all versions together.
    (place.parent / "README.md").write_text(card(file, report, version), encoding="utf-8")
    return place


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
