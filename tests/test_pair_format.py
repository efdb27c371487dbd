"""docs/pair-format.md: a second reader, which knows the page alone, agrees with ours on what a folder means."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from safetensors.torch import load_file

from tests import second_reader
from workers import pairs, sealing
from workers.cache import KVCache
from workers.errors import LoadFailed
from workers.fusers.linear import LinearFuser
from workers.fusers.lite import LiteFuser
from workers.fusers.mix import MixFuser

VECTORS = Path(__file__).parent / "vectors"
NAMES = ["lite", "mix", "mix-fuse", "mix-add-fuse", "linear", "linear-fuse"]


@pytest.mark.parametrize("name", NAMES)
def test_a_second_reader_agrees(name: str) -> None:
    """What plain Python makes of the folder by the page is the vector, and so is what our reader makes."""
    folder = VECTORS / name
    numbers, _ = second_reader.read_tensors(folder / "vector.safetensors")
    for made, kind in zip(second_reader.Pair(folder).project(numbers), "kv", strict=True):
        np.testing.assert_allclose(made, numbers[f"expected.{kind}"], rtol=1e-4, atol=1e-4)
    given = load_file(folder / "vector.safetensors")
    file = pairs.read_pair(folder)
    fuser: Any
    start = int(given["start"])
    if name.startswith("mix"):
        fuser = MixFuser.from_folder(folder, torch.float32)
    elif file.fuser.kind == "lite":
        fuser = LiteFuser.from_folder(folder, torch.float32)
    else:
        fuser = LinearFuser.from_folder(folder, torch.float32, mode=file.mode)
    parts = {part: _kv(given, part) for part in ("source", "own") if f"{part}.k" in given}
    heard_at = (given["heard_at"],) if "heard_at" in given else ()
    made = fuser.project(parts["source"], parts.get("own"), start, *heard_at)
    torch.testing.assert_close(torch.cat(made.keys), given["expected.k"])
    torch.testing.assert_close(torch.cat(made.values), given["expected.v"])


def _kv(given: dict[str, torch.Tensor], part: str) -> KVCache:
    return KVCache(*(list(given[f"{part}.{kind}"].split(1)) for kind in "kv"))


def altered(folder: Path, change: str) -> None:
    """One thing in the folder that the page forbids."""
    file, weights = folder / "pair.json", folder / "fuser.safetensors"
    said = json.loads(file.read_text())
    match change:
        case "another format":
            said["format"] = 2
        case "a mode that is none":
            said["mode"] = "both"
        case "a shape that the tensors lack":
            said["fuser"]["shape"]["receiver"]["layers"] += 1
        case "a number of the weights":
            held = weights.read_bytes()
            weights.write_bytes(held[:-1] + bytes([held[-1] ^ 1]))
    written = json.dumps(said)
    if change == "a member twice":
        written = written.replace('"mode": ', '"mode": "fuse", "mode": ', 1)
    if change == "a member twice, deep":
        written = written.replace('"rank": ', '"rank": 1, "rank": ', 1)
    if change == "a member that is not known":
        written = written.replace("{", '{"later": {"a": [1]}, ', 1)
    file.write_text(written)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ("nothing", False),
        ("a member that is not known", False),
        ("another format", True),
        ("a mode that is none", True),
        ("a shape that the tensors lack", True),
        ("a number of the weights", True),
        ("a member twice", True),
        ("a member twice, deep", True),
    ],
)
def test_both_readers_refuse_what_the_page_forbids(tmp_path: Path, change: str, refused: bool) -> None:
    """And take what it allows."""
    folder = Path(shutil.copytree(VECTORS / "lite", tmp_path / "lite"))
    altered(folder, change)
    with pytest.raises(second_reader.Refused) if refused else nullcontext():
        second_reader.Pair(folder)
    with pytest.raises(LoadFailed) if refused else nullcontext():
        LiteFuser.from_folder(folder, torch.float32)


@pytest.mark.parametrize("name", ["report.json", "signature.json", "withdrawn.json"])
def test_no_file_of_a_pair_says_a_thing_twice(tmp_path: Path, name: str) -> None:
    """A member that stands twice is refused by its name in every file, and so is JSON that nests without an end."""
    read = {"report.json": pairs.read_report, "signature.json": sealing.signer_of, "withdrawn.json": sealing.withdrawn}
    (tmp_path / "pair.json").write_text("{}")
    whole = {"report.json": REPORT, "signature.json": SIGNATURE, "withdrawn.json": WITHDRAWN}[name]
    for written, said in (
        (json.dumps(whole)[:-1] + ', "date": "2026-01-01", "date": "2026-01-02"}', "'date' stands there twice"),
        (json.dumps(whole)[:-1] + ', "more": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
    ):
        (tmp_path / name).write_text(written)
        with pytest.raises(LoadFailed, match=said):
            read[name](tmp_path)


REPORT = {
    "format": 1,
    "fingerprint": "f",
    "mode": "fuse",
    "verdict": "verified",
    "reason": "",
    "numerics": "float32",
    "data": "d",
    "n": 1,
}
SIGNATURE = {"format": 1, "key": "00", "signature": ""}
WITHDRAWN = {"reason": "r", "by": "b"}


def test_the_fingerprint_is_what_the_page_says() -> None:
    """Sorted keys, no spaces, sixteen hex digits."""
    model = {"weights": "w", "tokenizer": "t", "dtype": "float32", "layers": "all", "attention": "sdpa"}
    named = {"fuser": "d", "kind": "lite", "mode": "handover", "scope": "context", "sharer": model, "receiver": model}
    by_hand = hashlib.sha256(json.dumps(named, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]
    assert by_hand == pairs.fingerprint(model, model, kind="lite", digest="d", mode="handover", scope="context")


def test_the_signature_is_what_the_page_says(tmp_path: Path) -> None:
    """Ed25519 over the JSON of a mark and two digests, an empty string for the file that is absent."""
    (tmp_path / "pair.json").write_text("{}")
    sealing.sign(tmp_path, Ed25519PrivateKey.generate())
    written = json.loads((tmp_path / "signature.json").read_text())
    said = json.dumps(["twolane-pair/1", hashlib.sha256(b"{}").hexdigest(), ""], separators=(",", ":")).encode()
    key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(written["key"]))
    key.verify(base64.b64decode(written["signature"]), said)
