"""Signatures of pairs (Ed25519), withdrawal, and versions side by side. Torch-free.

`signature.json` says who stands for a pair: it covers `pair.json`, which names every weight by digest, and
`report.json`.
`withdrawn.json` takes a pair back, whatever its report says.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from workers import pairs
from workers.errors import LoadFailed
from workers.files import content

SIGNED = ("pair.json", "report.json")


class Signature(msgspec.Struct, frozen=True):
    """`signature.json`."""

    format: int
    key: str
    """The public key, 64 hex digits."""
    signature: str
    """Base64, over `statement`."""


class Withdrawn(msgspec.Struct, frozen=True):
    """`withdrawn.json`."""

    date: str
    reason: str
    by: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """What a command has done with a pair's folder, for an audit log."""

    what: str
    by: str
    detail: dict[str, Any]
    audit: Path | None
    """The log's folder; None where none was named."""


def make_key(file: Path) -> str:
    """Write a new private key, readable by its owner alone; returns the public key in hex. Raises LoadFailed."""
    key = Ed25519PrivateKey.generate()
    try:
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise LoadFailed(f"{file}: {error.strerror}") from error
    with os.fdopen(handle, "w") as out:
        out.write(key.private_bytes_raw().hex() + "\n")
    return key.public_key().public_bytes_raw().hex()


def read_key(file: Path) -> Ed25519PrivateKey:
    """Raises LoadFailed: no key, or one that others can read."""
    try:
        if file.stat().st_mode & 0o077:
            raise LoadFailed(f"{file}: others can read this key; chmod 600 it, or make another")
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(file.read_text().strip()))
    except (OSError, ValueError) as error:
        raise LoadFailed(f"{file}: no Ed25519 key of 64 hex digits ({error})") from error


def statement(folder: Path) -> bytes:
    """What is signed: the SHA-256 of each file as it lies there, empty for one that is absent."""
    digests = [_digest(folder / name) for name in SIGNED]
    return pairs.canonical(["twolane-pair/1", *digests])


def _digest(file: Path) -> str:
    return hashlib.sha256(content(file)).hexdigest() if file.exists() else ""


def sign(folder: Path, key: Ed25519PrivateKey) -> Signature:
    """Write `signature.json`."""
    signed = base64.b64encode(key.sign(statement(folder))).decode()
    made = Signature(1, key.public_key().public_bytes_raw().hex(), signed)
    pairs.write(folder, "signature.json", made)
    return made


def signer_of(folder: Path) -> str:
    """The public key that signed what lies in the folder, empty where nobody did. Raises LoadFailed where the signature
    does not fit.
    """
    file = folder / "signature.json"
    if not file.exists():
        return ""
    found = pairs.read_as(file, Signature)
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(found.key))
        key.verify(base64.b64decode(found.signature, validate=True), statement(folder))
    except (ValueError, binascii.Error, InvalidSignature) as error:
        raise LoadFailed(f"{file}: does not fit the pair and the report that lie beside it") from error
    return found.key


def withdrawn(folder: Path) -> Withdrawn | None:
    """None where the pair stands."""
    file = folder / "withdrawn.json"
    # A link that leads nowhere says that something was written there.
    return pairs.read_as(file, Withdrawn) if os.path.lexists(file) else None


@dataclass(frozen=True, slots=True)
class Version:
    """One folder of several that hold the same pair."""

    folder: str
    name: str
    made: str
    fuser: str
    parameters: int
    verdict: str
    why: str
    signer: str
    report: pairs.Report | None = None


def version_of(folder: Path) -> Version:
    """Raises LoadFailed where its files cannot be read; a signature that does not fit is told."""
    file, report, taken = pairs.read_pair(folder), pairs.read_report(folder), withdrawn(folder)
    verdict = report.verdict if report else "unproven"
    why = report.reason if report else "no report"
    if taken is not None:
        verdict, why = "withdrawn", f"{taken.reason} ({taken.date})"
    try:
        signer = signer_of(folder)
    except LoadFailed:
        signer = "does not fit"
    return Version(
        folder.name, file.name, file.made, file.fuser.kind, file.fuser.parameters, verdict, why, signer, report
    )


def versions(folder: Path) -> tuple[Sequence[Version], Sequence[LoadFailed]]:
    """Of all pair folders in a folder, the newest last, and why others cannot be read. Raises LoadFailed where there is
    none.
    """
    found: list[Version] = []
    broken: list[LoadFailed] = []
    for file in sorted(folder.glob("[!.]*/pair.json")):
        try:
            found.append(version_of(file.parent))
        except LoadFailed as error:
            broken.append(error)
    if not found and not broken:
        raise LoadFailed(f"{folder}: no folder in it holds a pair.json")
    return sorted(found, key=lambda v: (v.made, v.report.date if v.report else "", v.folder)), broken
