"""What would have been said otherwise: against the obvious slow way, through HTTP, and never found afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.workers.test_runtime import Shifted, answer, finish, some_ids
from tests.workers.test_server import HELLO, serving, until
from workers.cache import KVCache
from workers.config import Fleet, ModelConfig, PairConfig, RedisConfig, StoreConfig, WorkerConfig
from workers.counterfactual import Scored, otherwise
from workers.errors import BadPrompt
from workers.fusers.lite import LiteFuser, LiteShape, fresh
from workers.greedy import read
from workers.loader import Loaded
from workers.pairs import FORMAT, FuserInfo, PairFile, Party, write
from workers.prompt import Prompt
from workers.runtime import Alone, Paired, Runtime
from workers.server import Worker

OTHER: list[dict[str, Any]] = [{"role": "user", "content": "A ledger of items, prices and buyers."}]


def pair_of(tiny: Loaded, other: Loaded, mode: str) -> Paired:
    fuser = Shifted(tiny.shape, needs_own=mode == "fuse")
    return Paired("p", other, tiny, fuser, mode=mode, scope="prompt", store=None, chunk=16)


def projected(fuser: Shifted, source: KVCache, own: KVCache, mode: str) -> KVCache:
    return fuser.project(source, own if mode == "fuse" else None, 0)


@pytest.mark.parametrize("mode", ["fuse", "handover"])
def test_zero_and_shuffled_are_the_fuser_over_another_source(tiny: Loaded, other: Loaded, mode: str) -> None:
    """The prefilled KV is what the fuser makes of zeros, or of another text cut to length, slot for slot."""
    pair, prompt = pair_of(tiny, other, mode), Prompt(some_ids(40), 0)
    fuser, shared = Shifted(tiny.shape, needs_own=mode == "fuse"), prompt.ids[:-1]
    own, said = read(tiny, shared), read(other, shared)
    silent = KVCache([k * 0 for k in said.keys], [v * 0 for v in said.values])
    ids = pair.chat(OTHER).ids
    elsewhere = read(other, (ids * 40)[: len(shared)])
    for kind, source in (("zero", silent), ("shuffled", elsewhere)):
        got = finish(otherwise(pair, kind, OTHER), prompt).kv  # type: ignore[arg-type]
        want = projected(fuser, source, own, mode)
        for mine, theirs in zip((*got.keys, *got.values), (*want.keys, *want.values), strict=True):
            torch.testing.assert_close(mine[:, :, : len(shared)], theirs, rtol=1e-4, atol=1e-5)


def test_receiver_and_sharer_are_the_models_alone(tiny: Loaded, other: Loaded) -> None:
    """Token for token what each model answers by itself."""
    pair, prompt = pair_of(tiny, other, "fuse"), Prompt(some_ids(40), 0)
    for kind, model in (("receiver", tiny), ("sharer", other)):
        alone = answer(Alone("m", model, None, 16), prompt, 8)
        assert answer(otherwise(pair, kind, None), prompt, 8) == alone  # type: ignore[arg-type]


def test_a_pair_of_one_model_has_counterfactuals_and_a_model_has_none(tiny: Loaded) -> None:
    """Without its KV an identity pair says something else; a plain model is refused by name."""
    twin: Runtime = Alone("twin", tiny, None, 16, role="source")
    prompt = Prompt(some_ids(40), 0)
    assert answer(otherwise(twin, "receiver", None), prompt, 8) == answer(twin, prompt, 8)
    assert answer(otherwise(twin, "zero", None), prompt, 8) != answer(twin, prompt, 8)
    with pytest.raises(BadPrompt, match="m is one model"):
        otherwise(Alone("m", tiny, None, 16), "zero", None)


def test_another_text_must_be_another(tiny: Loaded, other: Loaded) -> None:
    """A shuffled control over the same text, or over none, is no control."""
    pair = pair_of(tiny, other, "handover")
    prompt = pair.chat(OTHER)
    with pytest.raises(BadPrompt, match="same text"):
        finish(otherwise(pair, "shuffled", OTHER), prompt)
    with pytest.raises(BadPrompt, match="`other`"):
        otherwise(pair, "shuffled", None)


def test_a_score_is_the_mean_log_probability_of_the_answers_tokens(tiny: Loaded, other: Loaded) -> None:
    """The same figure as from one forward over everything; an answer of the model's own scores above any other."""
    runtime, prompt = Alone("m", tiny, None, 16), Prompt(some_ids(20), 0)
    made = tuple(answer(runtime, prompt, 70))
    scored = Scored(runtime, made)
    out: Runtime = scored  # type: ignore[assignment]  # only its prefill is looked at
    told = finish(out, prompt).spent.score
    with torch.inference_mode():
        logits = tiny.model(input_ids=torch.tensor([[*prompt.ids, *made]])).logits[0].float()
    want = logits.log_softmax(-1)[len(prompt.ids) - 1 : -1].gather(1, torch.tensor(made)[:, None]).mean()
    assert told == pytest.approx(float(want), abs=1e-4)
    worse = finish(Scored(runtime, some_ids(70, 3)), prompt).spent.score  # type: ignore[arg-type]
    assert worse is not None
    assert told > worse


def lite_pair(folder: Path, sharer: Loaded, receiver: Loaded, seed: int | None = None) -> Path:
    """An untrained pair folder: hands the sharer's layers over as they are, or with a seed changed at random."""
    layers = tuple(range(receiver.shape.layers))
    made = fresh(LiteShape(sharer.shape, receiver.shape, layers, 4), torch.float32, 0)
    if seed is not None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            made.net.direct.data.normal_(std=0.5)
    fuser: LiteFuser = made.save(folder)
    sides = [Party(m.name, m.digests.weights, m.digests.tokenizer, m.digests.template) for m in (sharer, receiver)]
    info = FuserInfo("lite", fuser.digest, fuser.shape.as_json(), fuser.parameters)
    write(folder, "pair.json", PairFile(FORMAT, "duo", "handover", "prompt", sides[0], sides[1], info))
    return folder


@pytest.fixture
async def worker(
    tiny_folder: Path, other_folder: Path, tiny: Loaded, other: Loaded, tmp_path: Path
) -> AsyncIterator[tuple[httpx.AsyncClient, Worker]]:
    pair = PairConfig(name="duo", sharer="other", receiver="tiny", fuser=str(lite_pair(tmp_path / "duo", other, tiny)))
    fleet = Fleet(
        models=(ModelConfig(name="tiny", model=str(tiny_folder)), ModelConfig(name="other", model=str(other_folder))),
        pairs=(pair,),
        workers=(WorkerConfig(name="w", models=("tiny",), pairs=("duo",), max_running=2, max_queued=1),),
        redis=RedisConfig(url=f"unix://{tmp_path}/no-redis.sock"),
        store=StoreConfig(dir=tmp_path / "kv"),
    )
    async with serving(fleet, tmp_path / "w.sock") as pair_:
        yield pair_


def ask(**more: Any) -> dict[str, Any]:
    request = {"model": "duo", "messages": HELLO, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
    return {"request": {**request, **more.pop("request", {})}, **more}


async def said(client: httpx.AsyncClient, **more: Any) -> tuple[str, dict[str, Any]]:
    got = await client.post("/counterfactual", json=ask(**more))
    assert got.status_code == 200, got.text
    return got.json()["choices"][0]["message"]["content"], got.json()["twolane"]


async def test_the_worker_tells_each_counterfactual_and_keeps_nothing(
    worker: tuple[httpx.AsyncClient, Worker], tmp_path: Path
) -> None:
    """Four answers and a score over HTTP, with their token ids; a tenant's header changes nothing and nothing is
    stored, whoever asks."""
    client, running = worker
    client.headers["x-twolane-tenant"] = "a"
    plain = await client.post("/v1/chat/completions", json=ask()["request"], headers={"x-twolane-tenant": ""})
    before = running.holdings.store.stats()["ram_bytes"]
    texts = {kind: (await said(client, kind=kind, other=OTHER))[0] for kind in ("same", "receiver", "zero", "shuffled")}
    assert texts["same"] == plain.json()["choices"][0]["message"]["content"]
    assert len(set(texts.values())) == 4
    _, run = await said(client, kind="sharer")
    assert len(run["tokens"][0]) == 6
    _, run = await said(client, score="Paris", request={"stream": True})
    assert run["score"] < 0
    assert running.holdings.store.stats()["ram_bytes"] == before


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kind": "nonsense"}, "kind"),
        ({"score": ""}, "no text to score"),
        ({"kind": "shuffled"}, "other"),
        ({"request": {"model": "nobody"}}, "nobody"),
        ({"request": {"model": "tiny"}, "kind": "zero"}, "one model"),
        ({"score": "Paris " * 2100}, "exceed"),
    ],
)
async def test_what_cannot_be_asked_is_refused_in_its_own_terms(
    worker: tuple[httpx.AsyncClient, Worker], more: dict[str, Any], message: str
) -> None:
    """A 4xx that names what is wrong."""
    got = await worker[0].post("/counterfactual", json=ask(**more))
    assert 400 <= got.status_code < 500
    assert message in got.json()["error"]["message"]


async def test_what_waits_begins_only_in_idle_moments_and_gives_way(
    worker: tuple[httpx.AsyncClient, Worker],
) -> None:
    """A background answer is refused while a caller's runs, and ends with 503 when a caller comes; the caller is
    answered as if alone."""
    client, running = worker
    long = {"max_tokens": 400}
    background = asyncio.create_task(client.post("/counterfactual", json=ask(request=long, background=True)))
    await until(lambda: running.engine.load()[0] == 1)
    caller = await client.post("/v1/chat/completions", json=ask()["request"])
    assert caller.status_code == 200
    gone = await background
    assert (gone.status_code, gone.json()["error"]["code"]) == (503, "overloaded")
    caller_task = asyncio.create_task(client.post("/v1/chat/completions", json=ask(request=long)["request"]))
    await until(lambda: running.engine.load()[0] == 1)
    refused = await client.post("/counterfactual", json=ask(background=True))
    assert refused.status_code == 503
    assert not caller_task.done()
    assert (await caller_task).status_code == 200
    done = await client.post("/counterfactual", json=ask(background=True))
    assert done.status_code == 200
