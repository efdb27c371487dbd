"""Pairs through the engine: the official goldens, reuse of all three artefacts, and the taint law."""

from __future__ import annotations

import queue
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from workers.batch import Batch
from workers.cache import KVCache
from workers.config import Fleet, ModelConfig, PairConfig
from workers.engine import Engine
from workers.errors import BadPrompt, LoadFailed
from workers.fusers.base import Change, KVShape
from workers.fusers.c2c import load_official
from workers.fusers.identity import IdentityFuser
from workers.jobs import Done, Event, Failed, Request, Text
from workers.loader import Loaded, Loader
from workers.pairing import hold_pair
from workers.prompt import Prompt
from workers.runtime import Alone, Changed, Keep, Paired, Prefilled, Runtime, changes
from workers.sampling import Sampling
from workers.store import KVStore

GOLDEN = Path(__file__).parents[1] / "golden" / "e2e" / "same_tokenizer"


class Shifted:
    """A fuser made of arithmetic: what it hands over is the sharer's KV times a factor."""

    kind = "lite"
    digest = "shifted"
    parameters = 0

    def __init__(self, shape: KVShape, *, needs_own: bool, factor: float = 1.5) -> None:
        self.source_layers = frozenset(range(shape.layers))
        self.needs_own = needs_own
        self.factor = factor

    def project(self, source: KVCache, own: KVCache | None, start: int) -> KVCache:
        """`factor` times the source, plus the receiver's own where it has read."""
        if own is None:
            return KVCache([k * self.factor for k in source.keys], [v * self.factor for v in source.values])
        return KVCache(
            [o + k * self.factor for k, o in zip(source.keys, own.keys, strict=True)],
            [o + v * self.factor for v, o in zip(source.values, own.values, strict=True)],
        )

    def change(self) -> Change:
        return Change(1.0, 0.0)


def finish(runtime: Runtime, prompt: Prompt, keep: Keep | None = None) -> Prefilled:
    """Run a prefill to its end."""
    with torch.inference_mode():
        steps = runtime.prefill(prompt, keep)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]


def answer(runtime: Runtime, prompt: Prompt, tokens: int, keep: Keep | None = None) -> list[int]:
    """Greedy tokens after a prefill."""
    with torch.inference_mode():
        read = finish(runtime, prompt, keep)
        batch = Batch(runtime.decoder)
        batch.rows.join(read.kv)
        made = [int(read.logits.argmax())]

        class One:
            tokens = made

        batch.choices.append(One())  # type: ignore[arg-type]
        while len(made) < tokens:
            made.append(int(batch.step()[0].argmax()))
        return made


def some_ids(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(2, 390) for _ in range(length))


def keep_of(store: KVStore, tenant: str = "a") -> Keep:
    return Keep(store.scope(tenant), ttl=600, max_bytes=1 << 30)


def golden_model(name: str) -> Loaded:
    """A golden's model; those without a tokenizer of their own borrow a tiny one, which is not used."""
    from dataclasses import replace

    from transformers import AutoModelForCausalLM

    from tests.tiny import tokenizer
    from workers.loader import Digests, kv_shape

    model = AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32).eval()
    config = model.config
    loaded = Loaded(
        name=name, source=name, model=model, tokenizer=tokenizer(), shape=kv_shape(config), context=512,
        vocab=config.vocab_size, dtype=torch.float32, device=torch.device("cpu"),
        digests=Digests(name, "same", "same"), eos=frozenset(),
    )  # fmt: skip
    return replace(loaded)


def test_the_official_fuser_through_the_engines_path_gives_the_golden_tokens() -> None:
    """A `c2c` pair in mode fuse over the prompt: fused KV, logits and twelve tokens of the official code."""
    import json

    sharer, receiver = golden_model("sharer"), golden_model("receiver")
    official = load_official(GOLDEN / "fuser", receiver=receiver.shape, sharer=sharer.shape, dtype=torch.float32)
    pair = Paired("golden", sharer, receiver, official.fuser, mode="fuse", scope="prompt", store=None, chunk=512)
    expected = load_file(GOLDEN / "expected_full.safetensors")
    ids = tuple(json.loads((GOLDEN / "expected.json").read_text())["input_ids"][0])
    read = finish(pair, Prompt(ids, 0))
    for layer, (keys, values) in enumerate(read.kv.tensors()):
        torch.testing.assert_close(keys, expected[f"fused.key.{layer}"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values, expected[f"fused.value.{layer}"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(read.logits, expected["logits_last"].flatten(), rtol=1e-4, atol=1e-5)
    assert answer(pair, Prompt(ids, 0), 12) == expected["greedy_tokens"].flatten().tolist()
    assert 0 < read.spent.gates_open < 1
    assert read.spent.change is not None
    assert read.spent.change.mean > 0


@pytest.mark.parametrize("needs_own", [False, True])
@pytest.mark.parametrize("scope", ["prompt", "context"])
def test_a_pair_reuses_and_answers_as_if_cold(
    needs_own: bool, scope: str, tiny: Loaded, other: Loaded, store: KVStore
) -> None:
    """Cold, fully warm, and after any other question about the same context: the same tokens."""
    fuser = Shifted(tiny.shape, needs_own=needs_own)
    mode = "fuse" if needs_own else "handover"
    cold = Paired("p", other, tiny, fuser, mode=mode, scope=scope, store=None, chunk=32)
    warm = Paired("p", other, tiny, fuser, mode=mode, scope=scope, store=store, chunk=32)
    keep = keep_of(store)
    document = some_ids(101)
    for seed in (1, 2, 1):
        prompt = Prompt((*document, *some_ids(9, seed)), len(document))
        assert answer(warm, prompt, 8, keep) == answer(cold, prompt, 8)
        store.settle()
    again = finish(warm, prompt, keep)
    assert again.spent.reused == (109 if scope == "prompt" else 101)


def test_a_source_hit_skips_the_sharer(tiny: Loaded, other: Loaded, store: KVStore) -> None:
    """Another receiver behind the same sharer finds what the sharer has read."""
    document = some_ids(96)
    prompt = Prompt((*document, *some_ids(5, 1)), 96)
    keep = keep_of(store)
    one = Paired("one", other, tiny, Shifted(tiny.shape, needs_own=False), mode="handover", scope="context",
                 store=store, chunk=32)  # fmt: skip
    two = Paired("two", other, tiny, Shifted(tiny.shape, needs_own=False, factor=2.0), mode="handover",
                 scope="context", store=store, chunk=32)  # fmt: skip
    two.fuser.digest = "another"
    two = Paired("two", other, tiny, two.fuser, mode="handover", scope="context", store=store, chunk=32)
    assert finish(one, prompt, keep).spent.reused == 0
    store.settle()
    second = finish(two, prompt, keep)
    assert second.spent.reused == 96
    assert second.spent.sharer_s == 0.0


def test_alone_reuses_prompt_and_answer_in_the_next_turn(tiny: Loaded, store: KVStore) -> None:
    """What was read and answered is found when the conversation goes on, and the tokens are those of a cold run."""
    keep = keep_of(store)
    engine = Engine({"tiny": Alone("tiny", tiny, store, 32)}, threads=1)
    engine.start()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    first = some_ids(50)
    sampling = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine.submit(Request("tiny", Prompt(first, 0), sampling, events.put, keep))
    while not isinstance(event := events.get(timeout=20), Done):
        assert not isinstance(event, Failed)
    store.settle()
    made = answer(Alone("tiny", tiny, None, 32), Prompt(first, 0), 40)
    turn = Prompt((*first, *made, *some_ids(7, 3)), 0)
    warm = finish(Alone("tiny", tiny, store, 32), turn, keep)
    assert warm.spent.reused == 80
    assert answer(Alone("tiny", tiny, store, 32), turn, 10, keep) == answer(Alone("tiny", tiny, None, 32), turn, 10)
    engine.close()


def test_what_follows_projected_kv_is_never_found_by_the_plain_lane(
    tiny: Loaded, other: Loaded, store: KVStore
) -> None:
    """After any use of a pair, its receiver alone answers as from a cold start, and finds only what it read alone."""
    keep = keep_of(store)
    pair = Paired("p", other, tiny, Shifted(tiny.shape, needs_own=False), mode="handover", scope="context",
                  store=store, chunk=32)  # fmt: skip
    prompt = Prompt((*some_ids(64), *some_ids(64, 1)), 64)
    finish(pair, prompt, keep)
    store.settle()
    alone = finish(Alone("tiny", tiny, store, 32), prompt, keep)
    assert alone.spent.reused == 0
    torch.testing.assert_close(alone.logits, finish(Alone("tiny", tiny, None, 32), prompt).logits, rtol=0, atol=0)


def test_another_tenant_finds_nothing(tiny: Loaded, store: KVStore) -> None:
    """The same prompt under another tenant is cold."""
    runtime, prompt = Alone("tiny", tiny, store, 32), Prompt(some_ids(64), 0)
    finish(runtime, prompt, keep_of(store, "a"))
    store.settle()
    assert finish(runtime, prompt, keep_of(store, "b")).spent.reused == 0
    assert finish(runtime, prompt, keep_of(store, "a")).spent.reused == 48


def test_scope_context_without_context_is_refused(tiny: Loaded, other: Loaded) -> None:
    """A pair that shares what stands before the question needs something to stand there."""
    pair = Paired("p", other, tiny, Shifted(tiny.shape, needs_own=False), mode="handover", scope="context",
                  store=None, chunk=32)  # fmt: skip
    with pytest.raises(BadPrompt, match="system message"):
        finish(pair, Prompt(some_ids(5), 0))


def test_identity_needs_the_same_model(tiny: Loaded, other: Loaded) -> None:
    """Other weights are refused, by name of what differs."""
    with pytest.raises(LoadFailed, match="weights"):
        IdentityFuser(tiny.identity, other.identity, tiny.shape)
    assert IdentityFuser(tiny.identity, tiny.identity, tiny.shape).source_layers == {0, 1, 2}


def test_a_pairs_fingerprint_covers_what_changes_answers(tiny: Loaded, other: Loaded, tiny_folder: Path) -> None:
    """Sharer, receiver, fuser, mode and scope each change it; nothing else does."""
    fuser = Shifted(tiny.shape, needs_own=False)

    def of(sharer: Loaded = other, receiver: Loaded = tiny, mode: str = "handover", scope: str = "context") -> str:
        return Paired("x", sharer, receiver, fuser, mode=mode, scope=scope, store=None, chunk=8).fingerprint

    half = Loader("cpu").load(ModelConfig(model=str(tiny_folder), dtype="bfloat16"))
    base = of()
    changed = {of(sharer=tiny), of(receiver=half), of(mode="fuse"), of(scope="prompt")}
    fuser.digest = "changed"
    assert len({base, of(), *changed}) == 6
    fuser.digest = "shifted"
    assert of() == base


def test_the_size_of_the_change_is_relative_to_own() -> None:
    """Twice the own values are a change of one in the values of that layer; parts weigh by their tokens."""
    one = torch.ones(1, 1, 2, 2)
    own = KVCache([one, one], [one, one])
    twice = KVCache([one, one], [one, one * 2])
    assert Changed.of([(1, changes(twice, own))]) == Changed((0.0, 0.0), (0.0, 1.0))
    mixed = Changed.of([(3, changes(twice, own)), (1, changes(own, own))])
    assert mixed == Changed((0.0, 0.0), (0.0, 0.75))
    assert mixed.mean == pytest.approx(0.75 / 4)


def test_a_pair_of_unknown_fuser_is_refused_by_name(tiny_folder: Path, tmp_path: Path) -> None:
    """A folder that holds neither a pair nor an official checkpoint says what is missing."""
    models = (ModelConfig(name="m", model=str(tiny_folder)),)
    (tmp_path / "empty").mkdir()
    config = PairConfig(name="p", sharer="m", receiver="m", fuser=str(tmp_path / "empty"))
    with pytest.raises(LoadFailed, match=r"config\.json"):
        hold_pair(Fleet(models=models, pairs=(config,)), config, Loader("cpu"), None, 32)


def test_text_events_are_what_the_tokens_say(tiny: Loaded) -> None:
    """Through the engine a pair's answer is its tokens, decoded."""
    pair = Paired("p", tiny, tiny, Shifted(tiny.shape, needs_own=False, factor=1.0), mode="handover", scope="prompt",
                  store=None, chunk=32)  # fmt: skip
    engine = Engine({"p": pair}, threads=1)
    engine.start()
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    prompt = Prompt(some_ids(30), 0)
    sampling = Sampling(temperature=0.0, max_tokens=9, ignore_eos=True)
    engine.submit(Request("p", prompt, sampling, events.put))
    text = ""
    while not isinstance(event := events.get(timeout=20), Done):
        text += event.text if isinstance(event, Text) else ""
    engine.close()
    assert text == tiny.tokenizer.decode(answer(pair, prompt, 9), skip_special_tokens=True)
