"""Include-response as it is served: the official vectors from a running batch, and the plain functions beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.workers.test_official_runtime import SAME, ask, recipe, tokens_of, with_tokenizers
from tests.workers.test_runtime import finish, keep_of
from tests.workers.test_server import serving
from tests.workers.test_several import fleet_of as several_fleet
from tests.workers.test_several import place as several_place  # noqa: F401
from workers import c2c_run
from workers.c2c_run import Section, Sharer, greedy
from workers.config import Fleet, ModelConfig, PairConfig, RedisConfig, StoreConfig, WorkerConfig
from workers.counterfactual import Scored, otherwise
from workers.engine import Engine
from workers.errors import BadPrompt
from workers.fusers.c2c import C2CFuser
from workers.fusers.several import JointFuser
from workers.loader import Loader
from workers.pairing import hold_pair
from workers.prompt import Prompt
from workers.response import Responding
from workers.store import KVStore

IDS = tuple(json.loads((SAME / "expected_include_response.json").read_text())["input_ids"][0])
OTHER = tuple((i * 7 + 3) % 140 + 2 for i in range(40))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden's models with tokenizers, and its checkpoint with the recipe."""
    root = tmp_path_factory.mktemp("response")
    made = with_tokenizers(root)
    recipe(root, SAME / "fuser", include_response=True)
    return made


@pytest.fixture(scope="module")
def loader() -> Loader:
    return Loader("cpu")


def fleet_of(place: Path, **asked: Any) -> Fleet:
    config = PairConfig(name="golden", sharer="sharer", receiver="receiver", fuser=str(place.parent / "fuser"), **asked)
    models = tuple(ModelConfig(name=n, model=str(place / n)) for n in ("sharer", "receiver"))
    return Fleet(models=models, pairs=(config,))


def pair_of(fleet: Fleet, loader: Loader, store: KVStore | None = None, chunk: int = 512) -> Responding:
    runtime = hold_pair(fleet, fleet.pairs[0], loader, store, chunk).runtime
    assert isinstance(runtime, Responding)
    return runtime


@pytest.fixture
def pair(place: Path, loader: Loader) -> Responding:
    return pair_of(fleet_of(place), loader)


@pytest.fixture
def engine(pair: Responding) -> Iterator[Engine]:
    running = Engine({"golden": pair}, threads=1)
    running.start()
    yield running
    running.close()


def reference(pair: Responding, loader: Loader, fleet: Fleet, ids: tuple[int, ...], shared: int) -> c2c_run.Run:
    """By the plain functions, in two sections."""
    fusers = pair.fuser.fusers if isinstance(pair.fuser, JointFuser) else (pair.fuser,)
    assert all(isinstance(f, C2CFuser) for f in fusers)
    models = [loader.load(fleet.model(ref)).model for ref in fleet.pairs[0].parties]
    sharers = [Sharer(model, fuser) for model, fuser in zip(models, fusers, strict=True)]
    sections = (Section(2 ** len(sharers) - 1, shared), Section(-1, len(ids) - shared))
    prompt = c2c_run.Prompt(torch.tensor([ids]), sections)
    return c2c_run.prefill(pair.decoder.model, sharers, prompt, include_response=True)


def test_the_official_vectors_from_a_running_batch(pair: Responding, engine: Engine) -> None:
    """Fused KV and logits of the prompt, and twelve tokens while other answers grow beside it, longer and shorter."""
    want = load_file(SAME / "expected_include_response.safetensors")
    read = finish(pair, Prompt(IDS, 0))
    for layer, (keys, values) in enumerate(read.kv.tensors()):
        torch.testing.assert_close(keys, want[f"fused.key.{layer}"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values, want[f"fused.value.{layer}"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(read.logits, want["logits_last"].flatten(), rtol=1e-4, atol=1e-5)
    running = [ask(engine, Prompt(ids, 0), n) for ids, n in ((IDS, 12), (OTHER, 5), (OTHER[:9], 20), (IDS, 12))]
    answers = [tokens_of(events) for events in running]
    assert answers[0] == answers[3] == want["greedy_tokens"].flatten().tolist()
    assert (len(answers[1]), len(answers[2])) == (5, 20)


@pytest.mark.parametrize(("scope", "context", "chunk"), [("prompt", 0, 16), ("context", 7, 512), ("context", 25, 16)])
def test_it_answers_as_the_plain_functions_do(
    scope: str, context: int, chunk: int, place: Path, loader: Loader
) -> None:
    """Whatever is shared, and in whatever chunks the rest is read: logits and twelve tokens."""
    fleet = fleet_of(place, scope=scope)
    pair, prompt = pair_of(fleet, loader, chunk=chunk), Prompt(OTHER, context)
    run = reference(pair, loader, fleet, OTHER, context or len(OTHER) - 1)
    torch.testing.assert_close(finish(pair, prompt).logits, run.logits[0, -1], rtol=1e-4, atol=1e-5)
    tokens, _ = greedy(run, 12)
    engine = Engine({"golden": pair}, threads=1)
    engine.start()
    assert tokens_of(ask(engine, prompt, 12)) == tokens[0].tolist()
    engine.close()


def test_of_several_sharers_the_first_goes_on(several_place: Path, loader: Loader, tmp_path: Path) -> None:  # noqa: F811
    """Both have part in the prompt, one in the answer, as in the official code."""
    first = recipe(tmp_path, several_place / "fuser_1", include_response=True)
    fleet = several_fleet(several_place, fusers=(str(first), str(several_place / "fuser_2")))
    pair, ids = pair_of(fleet, loader), tuple(i % 100 + 2 for i in OTHER)
    tokens, _ = greedy(reference(pair, loader, fleet, ids, len(ids) - 1), 12)
    engine = Engine({"golden": pair}, threads=1)
    engine.start()
    assert tokens_of(ask(engine, Prompt(ids, 0), 12)) == tokens[0].tolist()
    engine.close()


def test_warm_equals_cold(place: Path, loader: Loader, store: KVStore) -> None:
    """Both models' own reading is reused, and nothing fused is stored: not of the prompt, nor of the answer."""
    cold, warm = pair_of(fleet_of(place), loader), pair_of(fleet_of(place), loader, store)
    keep, prompt = keep_of(store), Prompt(OTHER, 0)
    first = finish(warm, prompt, keep)
    store.settle()
    again = finish(warm, prompt, keep)
    assert (first.spent.reused, again.spent.reused) == (0, len(OTHER) - 1)
    expected = finish(cold, prompt)
    assert torch.equal(first.logits, expected.logits)
    assert torch.equal(again.logits, expected.logits)
    assert {name.split(":")[0] for name in keep.written} == {"source", "own"}


def test_what_it_cannot_tell_is_refused(pair: Responding) -> None:
    """Neither another sharer's part in an answer that grows with it, nor how likely a given answer was."""
    for kind in ("zero", "shuffled"):
        with pytest.raises(BadPrompt, match="no counterfactual"):
            otherwise(pair, kind, [{"role": "user", "content": "hello"}])  # type: ignore[arg-type]
    with pytest.raises(BadPrompt, match="cannot be scored"):
        finish(Scored(pair, (5, 6)), Prompt(IDS, 0))  # type: ignore[arg-type]


async def test_it_answers_over_http(place: Path, loader: Loader, tmp_path: Path) -> None:
    """A worker measures it at start and answers a chat as the plain functions do."""
    fleet = fleet_of(place).model_copy(
        update={
            "workers": (WorkerConfig(name="w", pairs=("golden",)),),
            "redis": RedisConfig(url=f"unix://{tmp_path}/no-redis.sock"),
            "store": StoreConfig(dir=None),
        }
    )
    pair, messages = pair_of(fleet, loader), [{"role": "user", "content": "What is the capital of France?"}]
    ids = pair.chat(messages).ids
    tokens, _ = greedy(reference(pair, loader, fleet, ids, len(ids) - 1), 8)
    body = {"model": "golden", "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    async with serving(fleet, tmp_path / "w.sock") as (client, worker):
        assert worker.state().pairs[0].fingerprint == pair.fingerprint
        answer = (await client.post("/v1/chat/completions", json=body, headers={"x-twolane-tenant": "a"})).json()
    assert answer["choices"][0]["message"]["content"] == pair.decoder.tokenizer.decode(tokens[0])
