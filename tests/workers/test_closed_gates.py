"""Sharer KV that no open gate reads, followed from a request over HTTP to the files of the store."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import tokenizer
from tests.workers.test_combinations import MESSAGES
from tests.workers.test_official_runtime import SAME
from tests.workers.test_server import serving
from workers import protocol, segments
from workers.config import Fleet, ModelConfig, PairConfig, RedisConfig, StoreConfig, WorkerConfig
from workers.store import KVStore


def fuser(folder: Path, reads: tuple[int, ...]) -> Path:
    """The golden fuser, whose projector i reads sharer layer i + 2, with gates open for these layers alone."""
    shutil.copytree(SAME / "fuser", folder)
    for index in range(4):
        file = folder / "final" / f"projector_{index}.safetensors"
        tensors = load_file(file)
        for kind in ("key", "value"):
            tensors[f"{kind}_gate_logit"] = torch.tensor(1.0 if index + 2 in reads else -1.0)
        save_file(tensors, file)
    return folder


def stored(store: KVStore, folder: Path) -> dict[str, set[int]]:
    """By artefact, how many layers its files hold; every file is read and verified."""
    scope, found = store.scope("a"), dict[str, set[int]]()
    for file in (folder / "segments").rglob("*.safetensors"):
        segment = segments.read(file, scope, file.stem)
        found.setdefault(segment.head.role, set()).add(segment.packed.kv.layers)
    return found


@pytest.mark.parametrize(("reads", "depth"), [((2, 3, 4, 5), {6}), ((2,), {3}), ((), None)])
async def test_no_sharer_layer_behind_closed_gates_is_stored(
    reads: tuple[int, ...], depth: set[int] | None, tmp_path: Path, redis_url: str
) -> None:
    """Files of the sharer's KV end at the highest layer that an open gate reads, and with no gate open there are none;
    a pair of the same fuser in another scope is served from them, and warm answers are the cold ones."""
    shutil.copytree(SAME, tmp_path / "models")
    for role in ("sharer", "receiver"):
        tokenizer(150, ascii_only=True).save_pretrained(tmp_path / "models" / role)
    place = str(fuser(tmp_path / "fuser", reads))
    fleet = Fleet(
        models=tuple(ModelConfig(name=role, model=str(tmp_path / "models" / role)) for role in ("sharer", "receiver")),
        pairs=(
            PairConfig(name="prompt", sharer="sharer", receiver="receiver", fuser=place, scope="prompt"),
            PairConfig(name="context", sharer="sharer", receiver="receiver", fuser=place, scope="context"),
        ),
        workers=(WorkerConfig(name="w", pairs=("prompt", "context")),),
        redis=RedisConfig(url=redis_url),
        store=StoreConfig(dir=tmp_path / "kv"),
    )
    async with serving(fleet, tmp_path / "w.sock") as (client, worker):

        async def run(pair: str, **tenant: str) -> dict[str, Any]:
            body = {"model": pair, "messages": MESSAGES, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            answer = await client.post("/v1/chat/completions", json=body, headers={protocol.RECORD: "1", **tenant})
            assert worker.holdings.store.settle()
            told: dict[str, Any] = answer.json()["twolane"]
            return told

        tenant = {protocol.TENANT: "a"}
        cold = {pair: (await run(pair))["tokens"] for pair in ("prompt", "context")}
        first = await run("prompt", **tenant)
        assert (first["tokens"], first.get("kv_read")) == (cold["prompt"], None)
        layers = stored(worker.holdings.store, tmp_path / "kv")
        assert layers.get("source") == depth
        assert layers["own"] == layers["fused"] == {4}
        second = await run("context", **tenant)
        assert second["tokens"] == cold["context"]
        assert {name.partition(":")[0] for name in second["kv_read"]} == ({"own", "source"} if depth else {"own"})
        again = await run("prompt", **tenant)
        assert again["tokens"] == cold["prompt"]
        assert [name.partition(":")[0] for name in again["kv_read"]] == ["fused"]
