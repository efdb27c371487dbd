"""A `lite` pair of two tokenizers as it is served: against the obvious way, warm as cold, in a batch, and controls."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.tiny import make_model
from tests.workers.test_official_runtime import ask, tokens_of
from tests.workers.test_runtime import finish
from workers.cache import KVCache
from workers.config import Fleet, ModelConfig, PairConfig
from workers.counterfactual import otherwise
from workers.engine import Engine
from workers.errors import BadPrompt, LoadFailed, PromptTooLong
from workers.fusers.base import Slots
from workers.fusers.mix import MixFuser, fresh
from workers.fusers.mix_net import MixShape
from workers.greedy import answers, read
from workers.jobs import Event
from workers.loader import Loaded, Loader
from workers.matched_runtime import MatchedPair
from workers.pair_file import publish
from workers.pairing import hold_pair
from workers.pairs import FuserInfo, read_pair
from workers.prompt import Message, Prompt, chat_ids
from workers.runtime import Alone, Keep
from workers.store import KVStore

CHATS: list[list[Message]] = [
    [{"role": "user", "content": text}]
    for text in ("What is the capital of France?", "Report: tide, 北京.", "The buyer and the ledger, day by day.")
]
SETTINGS = [("fuse", "prompt", 0), ("fuse", "prompt", 1), ("handover", "prompt", 0), ("fuse", "context", 0)]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A sharer with other layers, other heads of another size, and another tokenizer."""
    folder = make_model(
        tmp_path_factory.mktemp("foreign"), seed=3, layers=4, hidden=64, kv_heads=1, context=300, ascii_only=True
    )
    return Loader("cpu").load(ModelConfig(name="foreign", model=str(folder)))


def stirred(sharer: Loaded, receiver: Loaded, mode: str, last: int) -> MixFuser:
    reads = (tuple(range(sharer.shape.layers)),) * receiver.shape.layers
    shape = MixShape(sharer.shape, receiver.shape, own=mode == "fuse", reads=reads, rank=8, hidden=4, last=last)
    fuser = fresh(shape, receiver.dtype, 0)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in fuser.net.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random) * 0.2)
    fuser.calibrate([Slots.of(read(sharer, range(40)), read(receiver, range(40)), 0)])
    return fuser


def pair_of(
    sharer: Loaded,
    receiver: Loaded,
    mode: str = "fuse",
    scope: str = "prompt",
    last: int = 0,
    store: KVStore | None = None,
) -> MatchedPair:
    fuser = stirred(sharer, receiver, mode, last)
    return MatchedPair("duo", sharer, receiver, fuser, mode=mode, scope=scope, store=store, chunk=16, template={})


def turns(chat: list[Message], scope: str) -> list[Message]:
    before = [{"role": "user", "content": "A table of prices."}, {"role": "assistant", "content": "Yes."}]
    return [*before, *chat] if scope == "context" else chat


def plainly(pair: MatchedPair, sharer: Loaded, prompt: Prompt) -> KVCache:
    """What the receiver goes on from: whole readings, and one projection."""
    assert prompt.heard is not None
    shared, places = len(prompt.heard.places), torch.tensor(prompt.heard.places)
    source = read(sharer, prompt.heard.ids).pick(places)
    own = read(pair.decoder, prompt.ids[:shared]) if pair.fuser.needs_own else None
    fuser = pair.fuser
    assert isinstance(fuser, MixFuser)
    with torch.inference_mode():
        return fuser.project(source, own, 0, places)


@pytest.mark.parametrize(("mode", "scope", "last"), SETTINGS)
def test_prefill_is_the_plain_way(foreign: Loaded, tiny: Loaded, mode: str, scope: str, last: int) -> None:
    """Chunk by chunk it comes to what whole readings and one projection give, slot for slot."""
    pair = pair_of(foreign, tiny, mode, scope, last)
    prompt = pair.chat(turns(CHATS[1], scope))
    want = plainly(pair, foreign, prompt)
    got = finish(pair, prompt)
    assert len(want) == (prompt.context if scope == "context" else len(prompt) - 1)
    for mine, other in zip((*got.kv.keys, *got.kv.values), (*want.keys, *want.values), strict=True):
        torch.testing.assert_close(mine[:, :, : len(want)], other, rtol=1e-4, atol=1e-4)
    assert (got.spent.change is not None) == (mode == "fuse")


@pytest.fixture
def running(foreign: Loaded, tiny: Loaded) -> Iterator[tuple[Engine, MatchedPair]]:
    pair = pair_of(foreign, tiny)
    engine = Engine({"duo": pair}, threads=1)
    engine.start()
    yield engine, pair
    engine.close()


def test_answers_in_one_batch_are_those_of_each_alone(running: tuple[Engine, MatchedPair], foreign: Loaded) -> None:
    """Through the engine that serves, token for token what greedy decoding over the plain KV says."""
    engine, pair = running
    prompts = [pair.chat(chat) for chat in (*CHATS, *CHATS)]
    asked: list[queue.SimpleQueue[Event]] = [ask(engine, p, 6 + i, "duo") for i, p in enumerate(prompts)]
    free = replace(pair.decoder, eos=frozenset())
    for i, (prompt, events) in enumerate(zip(prompts, asked, strict=True)):
        assert tokens_of(events) == answers(free, plainly(pair, foreign, prompt), [prompt.ids[-1:]], 6 + i)[0]


@pytest.mark.parametrize(("mode", "last"), [("fuse", 0), ("fuse", 1), ("handover", 0)])
def test_warm_is_cold_and_each_reading_is_its_models_own(
    foreign: Loaded, tiny: Loaded, store: KVStore, mode: str, last: int
) -> None:
    """What the store gives back is the same prompt bit for bit, all of it counted as reused. A model alone finds what
    it has read for the pair, and the other way round; nothing projected is stored.
    """
    pair = pair_of(foreign, tiny, mode, last=last, store=store)
    scope = store.scope("t")
    prompt = pair.chat(CHATS[0])
    keeps = [Keep(scope, 60.0, 1 << 30) for _ in range(3)]
    cold = finish(pair, prompt, keeps[0])
    store.settle()
    warm = finish(pair, prompt, keeps[1])
    assert all(torch.equal(a, b) for a, b in zip(cold.kv.keys, warm.kv.keys, strict=True))
    assert torch.equal(cold.logits, warm.logits)
    assert (cold.spent.reused, warm.spent.reused) == (0, len(prompt) - 1)
    roles = {name.split(":")[0] for name in keeps[0].written}
    assert roles == ({"source", "own"} if mode == "fuse" else {"source"})
    alone = Alone("foreign", foreign, store, 16)
    found = finish(alone, chat_ids(foreign.tokenizer, CHATS[0]), keeps[2])
    assert found.spent.reused >= store.block_tokens


def test_with_one_tokenizer_only_the_last_slot_is_found_by_no_longer_prompt(
    tiny: Loaded, other: Loaded, store: KVStore
) -> None:
    """A pair that changes the end of what is shared stores nothing fused: in a longer prompt that end is no end."""
    from workers.runtime import Paired

    fuser = stirred(other, tiny, "fuse", 1)
    pair = Paired(
        "p", other, tiny, fuser, mode="fuse", scope="prompt", store=store, chunk=16, piecewise=not fuser.shape.last
    )
    bare = Paired("p", other, tiny, fuser, mode="fuse", scope="prompt", store=None, chunk=16, piecewise=False)
    short, long = (Prompt(tuple(range(2, 2 + n)), 0) for n in (33, 65))
    keep = Keep(store.scope("t"), 60.0, 1 << 30)
    finish(pair, short, keep)
    store.settle()
    assert torch.equal(finish(pair, long, keep).logits, finish(bare, long).logits)
    assert {name.split(":")[0] for name in keep.written} == {"source", "own"}


def test_controls_change_what_the_sharer_says(foreign: Loaded, tiny: Loaded) -> None:
    """Silent, and over another text, the KV is another; the receiver alone is the receiver."""
    pair, prompt = pair_of(foreign, tiny), pair_of(foreign, tiny).chat(CHATS[0])
    spoken = finish(pair, prompt).kv
    for kind in ("zero", "shuffled"):
        swapped = finish(otherwise(pair, kind, CHATS[2]), prompt).kv  # type: ignore[arg-type]
        assert not torch.equal(swapped.keys[0], spoken.keys[0])
    alone = finish(otherwise(pair, "receiver", None), prompt)
    assert torch.equal(alone.logits, finish(Alone("r", tiny, None, 16), prompt).logits)


def test_what_cannot_be_read_is_refused(foreign: Loaded, tiny: Loaded) -> None:
    """Raw text, control tokens of either model, chats without a context where one is shared, and what is too long for
    the sharer in its own tokens.
    """
    pair = pair_of(foreign, tiny)
    with pytest.raises(BadPrompt, match="reads chats only"):
        pair.text("Hello")
    with pytest.raises(BadPrompt, match="control token"):
        pair.chat([{"role": "user", "content": "a <|im_end|> b"}])
    with pytest.raises(PromptTooLong, match="sharer of duo reads 300 tokens"):
        pair.chat([{"role": "user", "content": "tide " * 300}])
    document = pair_of(foreign, tiny, scope="context")
    with pytest.raises(BadPrompt, match="nothing stands there"):
        finish(document, document.chat(CHATS[0]))
    assert len(pair.rehearsal(40).ids) > 20


@pytest.mark.parametrize("last", [0, 1])
def test_a_worker_loads_it_and_its_shape_is_in_the_fingerprint(
    foreign: Loaded, tiny: Loaded, tmp_path: Path, last: int
) -> None:
    """From its folder, with the right models; another shape of KV, or another network, is refused by name."""
    stored = stirred(foreign, tiny, "fuse", last).save(tmp_path)
    info = FuserInfo("lite", stored.digest, stored.shape.as_json(), stored.parameters)
    publish(tmp_path, "duo", foreign, tiny, info, mode="fuse", scope="prompt", made="2026-01-01")
    config = PairConfig(
        name="duo",
        sharer=ModelConfig(model=foreign.source),
        receiver=ModelConfig(model=tiny.source),
        fuser=str(tmp_path),
    )
    fleet = Fleet(models=(), pairs=(config,))
    held = hold_pair(fleet, config, Loader("cpu"), None, 64)
    assert isinstance(held.runtime, MatchedPair)
    assert held.runtime.digests["fuser"] == f"lite:{stored.digest[:16]}"
    file = tmp_path / "pair.json"
    before = file.read_text()
    file.write_text(before.replace('"last": ' + str(last), '"last": 5'))
    assert read_pair(tmp_path).fuser.shape["last"] == 5
    assert hold_pair(fleet, config, Loader("cpu"), None, 64).state.fingerprint != held.state.fingerprint
    file.write_text(before.replace('"network": "mix"', '"network": "later"'))
    with pytest.raises(LoadFailed, match="'later', which this release does not know"):
        hold_pair(fleet, config, Loader("cpu"), None, 64)
    file.write_text(before.replace('"rope_theta": 10000.0', '"rope_theta": 500.0'))
    with pytest.raises(LoadFailed, match="another KV shape"):
        hold_pair(fleet, config, Loader("cpu"), None, 64)
