"""docs/pair-format.md: a second reader, written from the page in numpy, agrees with ours on the vectors."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from workers import pairs, sealing
from workers.cache import KVCache
from workers.fusers.linear import LinearFuser
from workers.fusers.lite import LiteFuser
from workers.fusers.mix import MixFuser

VECTORS = Path(__file__).parent / "vectors"
Array = Any


def turned(keys: Array, start: int | Array, theta: float, sign: float) -> Array:
    """(…, tokens, size): dimension i with i + size/2; from `start` on, or at the positions given."""
    tokens, size = keys.shape[-2:]
    at = np.arange(start, start + tokens) if isinstance(start, int) else start
    angles = np.outer(at, theta ** (-2 * np.arange(size // 2) / size))
    cos, sin = np.cos(angles), sign * np.sin(angles)
    a, b = keys[..., : size // 2], keys[..., size // 2 :]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def rows(k: Array, v: Array) -> Array:
    """(layers, K|V, tokens, heads side by side)."""
    both = np.stack((k, v), axis=1)
    return both.transpose(0, 1, 3, 2, 4).reshape(*both.shape[:2], both.shape[3], -1)


def read_by_hand(folder: Path) -> tuple[Array, Array]:
    """The receiver's K and V as the page says."""
    info = json.loads((folder / "pair.json").read_text())
    shape, sharer, receiver = info["fuser"]["shape"], *(info["fuser"]["shape"][r] for r in ("sharer", "receiver"))
    # numpy has no bfloat16: the bytes are widened, and nothing else of torch is used here.
    w = {name: t.float().numpy() for name, t in load_torch(folder / "fuser.safetensors").items()}
    given = load_file(folder / "vector.safetensors")
    start = int(given["start"])
    if shape.get("network") == "mix":
        return by_hand_mix(shape, w, given, start)
    x = rows(turned(given["source.k"].astype(float), start, sharer["rope_theta"], -1), given["source.v"])
    made = by_hand_lite(shape, w, x) if info["fuser"]["kind"] == "lite" else by_hand_linear(shape, w, x, start)
    layers, _, tokens, _ = made.shape
    made = made.reshape(layers, 2, tokens, receiver["heads"], receiver["head_size"]).transpose(0, 1, 3, 2, 4)
    keys, values = turned(made[:, 0], start, receiver["rope_theta"], 1), made[:, 1]
    if info["mode"] == "fuse":
        opened = np.array([c >= shape["least"] for c in shape["cosine"]])[:, None, None, None] * shape["blend"]
        keys = given["own.k"] + opened * (keys - given["own.k"])
        values = given["own.v"] + opened * (values - given["own.v"])
    return keys, values


def by_hand_lite(shape: dict[str, Any], w: dict[str, Array], x: Array) -> Array:
    mean, deviation = w["mean"][:, :, None], w["deviation"][:, :, None]
    u = np.clip((x - mean) / deviation, -6, 6)
    rank, found = shape["rank"], []
    for layer, c in enumerate(shape["copied"]):
        down = w["down"][layer * rank : (layer + 1) * rank]
        code = u.transpose(2, 0, 1, 3).reshape(x.shape[2], -1) @ down.T
        joint = np.stack(np.split(code @ w["up"][layer], 2, axis=1))
        change = np.stack([u[c, i] @ w["direct"][layer, i] + w["bias"][layer, i] for i in range(2)]) + joint
        found.append(x[c] + deviation[c] * change)
    return np.stack(found)


def by_hand_mix(shape: dict[str, Any], w: dict[str, Array], given: dict[str, Array], start: int) -> tuple[Array, Array]:
    sharer, receiver, tokens = shape["sharer"], shape["receiver"], given["source.k"].shape[2]
    heard_at = given.get("heard_at", np.arange(start, start + tokens))
    x = rows(turned(given["source.k"].astype(float), heard_at, sharer["rope_theta"], -1), given["source.v"])
    u = np.clip((x - w["theirs_mean"][:, :, None]) / w["theirs_deviation"][:, :, None], -6, 6)
    base, mine = (
        np.broadcast_to(w["ours_mean"][:, :, None], (*w["ours_mean"].shape[:2], tokens, w["scale"].shape[2])),
        None,
    )
    if shape["own"]:
        base = rows(turned(given["own.k"].astype(float), start, receiver["rope_theta"], -1), given["own.v"])
        if not shape.get("add_only", False):
            mine = np.clip((base - w["ours_mean"][:, :, None]) / w["ours_deviation"][:, :, None], -6, 6)
    found = []
    for layer, reads in enumerate(shape["reads"]):
        inputs = u[reads].transpose(2, 0, 1, 3).reshape(tokens, -1)
        if mine is not None:
            inputs = np.concatenate((inputs, mine[layer].transpose(1, 0, 2).reshape(tokens, -1)), axis=1)
        part = {name.removeprefix(f"layers.{layer}."): t for name, t in w.items()}
        code = inputs @ part["down.weight"].T + part["down.bias"]
        if shape["hidden"]:
            even = code / np.sqrt((code**2).mean(1, keepdims=True) + np.finfo(np.float32).eps)
            gated, value = np.split(even @ part["widen.weight"].T, 2, axis=1)
            code = code + (gated / (1 + np.exp(-gated)) * value) @ part["narrow.weight"].T
        gate = 2 / (1 + np.exp(-(code @ part["gate.weight"].T + part["gate.bias"])))
        y = (code @ part["up.weight"].T + part["up.bias"]).reshape(tokens, gate.shape[1], -1) * gate[:, :, None]
        change = y.reshape(tokens, 2, -1).transpose(1, 0, 2)
        found.append(base[layer] + w["scale"][layer][:, None] * change)
    made = (
        np.stack(found)
        .reshape(len(found), 2, tokens, receiver["heads"], receiver["head_size"])
        .transpose(0, 1, 3, 2, 4)
    )
    keys, values = turned(made[:, 0], start, receiver["rope_theta"], 1), made[:, 1]
    if shape["last"]:
        kept = tokens - shape["last"]
        keys[:, :, :kept], values[:, :, :kept] = given["own.k"][:, :, :kept], given["own.v"][:, :, :kept]
    return keys, values


def by_hand_linear(shape: dict[str, Any], w: dict[str, Array], x: Array, start: int) -> Array:
    found = []
    for layer, reads in enumerate(shape["layers"]):
        inputs = np.concatenate([x[i] for i in reads], axis=-1)
        y = np.stack([inputs[i] @ w["weight"][layer, i] + w["bias"][layer, i] for i in range(2)])
        if start == 0:
            y[:, 0] += w["first"][layer]
        found.append(y)
    return np.stack(found)


@pytest.mark.parametrize("name", ["lite", "mix", "mix-fuse", "mix-add-fuse", "linear", "linear-fuse"])
def test_a_second_reader_agrees(name: str) -> None:
    """What numpy makes of the folder by the page is the vector, and so is what our reader makes."""
    folder = VECTORS / name
    given = load_file(folder / "vector.safetensors")
    keys, values = read_by_hand(folder)
    np.testing.assert_allclose(keys, given["expected.k"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(values, given["expected.v"], rtol=1e-4, atol=1e-4)
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
    heard_at = (torch.from_numpy(given["heard_at"]),) if "heard_at" in given else ()
    made = fuser.project(parts["source"], parts.get("own"), start, *heard_at)
    torch.testing.assert_close(torch.cat(made.keys), torch.from_numpy(given["expected.k"]))
    torch.testing.assert_close(torch.cat(made.values), torch.from_numpy(given["expected.v"]))
    digest = hashlib.sha256((folder / "fuser.safetensors").read_bytes()).hexdigest()
    assert digest == json.loads((folder / "pair.json").read_text())["fuser"]["digest"]


def _kv(given: dict[str, Array], part: str) -> KVCache:
    return KVCache(*(list(torch.from_numpy(given[f"{part}.{kind}"]).split(1)) for kind in "kv"))


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
