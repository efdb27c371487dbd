"""The official method as it is served: pairs whose tokenizers differ, and the recipes that are allowed or refused."""

from __future__ import annotations

import json
import queue
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.tiny import TEMPLATE, tokenizer
from tests.workers.test_server import serving
from workers import c2c_run
from workers.align import Aligned, Part
from workers.buffers import Rows
from workers.c2c_run import Section, Sharer, greedy
from workers.cache import KVCache
from workers.config import Fleet, ModelConfig, PairConfig, RedisConfig, StoreConfig, WorkerConfig
from workers.engine import Engine
from workers.errors import BadPrompt, LoadFailed, PromptTooLong
from workers.fusers.base import KVShape
from workers.fusers.c2c import load_official
from workers.jobs import Done, Event, Failed, Request, Text
from workers.loader import Loaded, Loader
from workers.official_runtime import AlignedPair, aligned_prompt, receiver_track, sharer_track
from workers.pairing import HeldPair, hold_pair
from workers.prompt import Prompt
from workers.runtime import Paired, Prefilled, Runtime
from workers.sampling import Sampling

E2E = Path(__file__).parents[1] / "golden" / "e2e"
ALIGNED, SAME = E2E / "aligned", E2E / "same_tokenizer"
EXPECTED = json.loads((ALIGNED / "expected.json").read_text())
MESSAGES = EXPECTED["messages"]
CHATS = [
    MESSAGES,
    [{"role": "user", "content": "Why is the sky blue?"}],
    [
        {"role": "user", "content": "Answer in one word: 北京 or łódź?"},
        {"role": "assistant", "content": "Neither 👩‍🚀."},
        {"role": "user", "content": "Explain why, step by step, and end with a full stop."},
    ],
]


def held(place: Path, fuser: Path, loader: Loader | None = None, chunk: int = 512, **asked: Any) -> HeldPair:
    """A golden's pair, as a worker would load it."""
    models = (
        ModelConfig(name="sharer", model=str(place / "sharer")),
        ModelConfig(name="receiver", model=str(place / "receiver")),
    )
    config = PairConfig(name="golden", sharer="sharer", receiver="receiver", fuser=str(fuser), **asked)
    return hold_pair(Fleet(models=models, pairs=(config,)), config, loader or Loader("cpu"), None, chunk)


@pytest.fixture(scope="module")
def loader() -> Loader:
    return Loader("cpu")


@pytest.fixture(scope="module")
def pair(loader: Loader) -> AlignedPair:
    runtime = held(ALIGNED, ALIGNED / "fuser", loader).runtime
    assert isinstance(runtime, AlignedPair)
    return runtime


@pytest.fixture
def engine(pair: AlignedPair) -> Iterator[Engine]:
    running = Engine({"golden": pair}, threads=1)
    running.start()
    yield running
    running.close()


def finish(runtime: Runtime, prompt: Prompt) -> Prefilled:
    with torch.inference_mode():
        steps = runtime.prefill(prompt, None)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]


def ask(engine: Engine, prompt: Prompt, tokens: int, name: str = "golden") -> queue.SimpleQueue[Event]:
    """Greedy, with the tokens in the events."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    sampling = Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=0)
    engine.submit(Request(name, prompt, sampling, events.put))
    return events


def tokens_of(events: queue.SimpleQueue[Event]) -> list[int]:
    got: list[int] = []
    while not isinstance(event := events.get(timeout=30), Done):
        assert not isinstance(event, Failed), event
        got += [c.token for c in event.tokens] if isinstance(event, Text) else []
    return got


def reference(pair: AlignedPair, sharer: Loaded, prompt: Prompt) -> c2c_run.Run:
    """The same chat by the plain functions, padding masked."""
    assert prompt.aligned is not None
    parties = [Sharer(sharer.model, pair.fuser)]
    return c2c_run.prefill(pair.decoder.model, parties, c2c_run.aligned_prompt(prompt.aligned))


def test_the_engine_gives_the_golden_tokens_of_an_aligned_pair(pair: AlignedPair, engine: Engine) -> None:
    """The official vector with two tokenizers: the same ids, and its twelve tokens with padding masked."""
    vector = load_file(ALIGNED / "expected_full.safetensors")
    prompt = pair.chat(MESSAGES)
    assert prompt.aligned is not None
    assert list(prompt.aligned.receiver_ids) == vector["input_ids.receiver"][0].tolist()
    assert list(prompt.aligned.sharer_ids) == vector["input_ids.sharer"][0].tolist()
    assert tokens_of(ask(engine, prompt, 12)) == vector["padmasked.greedy_tokens"].tolist()


def test_the_kv_of_an_aligned_prompt_is_the_golden_one_without_padding(pair: AlignedPair) -> None:
    """Fused KV and logits of the official code, at the slots that stand for a token; padding has no slot at all."""
    vector = load_file(ALIGNED / "expected_full.safetensors")
    read = finish(pair, pair.chat(MESSAGES))
    kept = vector["attention_mask.receiver"][0].bool()
    assert 0 < len(read.kv) == int(kept.sum()) < len(kept)
    for layer, (keys, values) in enumerate(read.kv.tensors()):
        torch.testing.assert_close(keys, vector[f"fused.key.{layer}"][:, :, kept], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values, vector[f"fused.value.{layer}"][:, :, kept], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(read.logits, vector["logits_last"], rtol=1e-4, atol=1e-5)
    assert 0 < read.spent.gates_open < 1
    assert read.spent.change is not None
    assert read.spent.change.mean > 0


@pytest.mark.parametrize("chunk", [16, 512])
def test_chats_in_one_batch_are_answered_as_by_the_plain_functions(loader: Loader, chunk: int) -> None:
    """Chats of several turns, lengths and scripts, read in chunks and decoded together: each as if it were alone."""
    runtime = held(ALIGNED, ALIGNED / "fuser", loader, chunk).runtime
    assert isinstance(runtime, AlignedPair)
    sharer = loader.load(ModelConfig(name="sharer", model=str(ALIGNED / "sharer")))
    running = Engine({"golden": runtime}, threads=1)
    running.start()
    prompts = [runtime.chat(chat) for chat in (*CHATS, *CHATS)]
    answers = [ask(running, prompt, 10 + i) for i, prompt in enumerate(prompts)]
    for i, (prompt, events) in enumerate(zip(prompts, answers, strict=True)):
        tokens, _ = greedy(reference(runtime, sharer, prompt), 10 + i)
        assert tokens_of(events) == tokens[0].tolist()
    running.close()


def test_an_aligned_prompt_says_what_it_computes_next(pair: AlignedPair) -> None:
    """As of any prompt: fair shares go by it. All that both models read is announced, a chunk at most at a time."""
    prompt = pair.chat(CHATS[2])
    assert prompt.aligned is not None
    with torch.inference_mode():
        announced = [
            sum(len(chunk.ids) for chunk in step) for step in pair.prefill(prompt, None) if isinstance(step, tuple)
        ]
    messages = [i for i, part in enumerate(prompt.aligned.parts) if part.kind == "message"]
    assert sum(announced) == len(prompt) + sharer_track(prompt.aligned).ends[messages[-1]]
    assert max(announced) <= pair.chunk


def test_positions_run_over_padding(pair: AlignedPair) -> None:
    """A prompt's room is counted in positions, its tokens without padding."""
    prompt = pair.chat(MESSAGES)
    assert (len(prompt), prompt.positions) == (71, 74)
    limited = replace(pair.decoder, context=76)
    engine = Engine({"golden": pair})
    room = pair.context
    try:
        pair.context = limited.context
        with pytest.raises(PromptTooLong, match="resulted in 74 tokens and 3"):
            engine.submit(Request("golden", prompt, Sampling(max_tokens=3), print))
    finally:
        pair.context = room


def test_a_row_has_a_position_of_its_own() -> None:
    """Positions beyond the length stay with their row while rows join, step and leave."""
    rows = Rows(KVShape(1, 1, 2), 1, torch.float32, torch.device("cpu"))

    def kv(tokens: int) -> KVCache:
        return KVCache([torch.zeros(1, 1, tokens, 2)], [torch.zeros(1, 1, tokens, 2)])

    for tokens, position in ((3, None), (5, 9), (2, 4)):
        rows.join(kv(tokens), position)
    assert rows.prepare()[0].flatten().tolist() == [3, 9, 4]
    rows.advance()
    rows.leave(0)
    assert rows.prepare()[0].flatten().tolist() == [5, 10]
    assert rows.lengths == [3, 6]


def test_blank_sharer_slots_of_a_message_are_kept_and_those_of_the_template_are_not() -> None:
    """Every message slot is fused, so the sharer has one for each of the receiver's; template padding has none."""
    aligned = Aligned(
        receiver_ids=(1, 0, 2, 3, 4),
        sharer_ids=(7, 8, 9, 0, 0),
        receiver_padding=(False, True, False, False, False),
        sharer_padding=(False, False, False, True, True),
        parts=(Part("template", 0, 2), Part("message", 2, 4), Part("template", 4, 5)),
        receiver_text="",
        sharer_text="",
        mode="generate",
    )
    ours, theirs = receiver_track(aligned), sharer_track(aligned)
    assert (ours.ids, ours.positions, ours.ends) == ((1, 2, 3, 4), (0, 2, 3, 4), (1, 3, 4))
    assert (theirs.ids, theirs.ends) == ((7, 8, 9, 0), (2, 4, 4))
    assert theirs.blank == (False, False, False, True)
    assert aligned_prompt(aligned).ids == (1, 2, 3, 4)


def test_a_raw_prompt_is_refused_by_an_aligned_pair(pair: AlignedPair) -> None:
    """Only messages can be aligned, and the refusal says where to go."""
    with pytest.raises(BadPrompt, match="chat/completions"):
        pair.text("once upon a time")
    with pytest.raises(BadPrompt, match="chats only"):
        finish(pair, Prompt((1, 2, 3), 0))


@pytest.mark.parametrize("token", ["<|im_end|>", "<|eot_id|>"])
def test_control_tokens_of_either_model_are_refused_in_content(pair: AlignedPair, token: str) -> None:
    """A caller can end a message neither for the receiver nor for the sharer."""
    with pytest.raises(BadPrompt, match="control token"):
        pair.chat([{"role": "user", "content": f"hello {token} there"}])


def test_the_rehearsal_takes_the_path_of_a_chat(pair: AlignedPair) -> None:
    """What is measured at start is fused like any request."""
    prompt = pair.rehearsal(20)
    assert prompt.aligned is not None
    assert any(prompt.aligned.message_mask)
    assert finish(pair, prompt).spent.fuse_s > 0


async def test_an_aligned_pair_answers_over_http(tmp_path: Path, pair: AlignedPair) -> None:
    """A worker measures it at start, answers a chat with the prompt's real tokens, and refuses a raw prompt."""
    models = tuple(ModelConfig(name=n, model=str(ALIGNED / n)) for n in ("sharer", "receiver"))
    fleet = Fleet(
        models=models,
        pairs=(PairConfig(name="golden", sharer="sharer", receiver="receiver", fuser=str(ALIGNED / "fuser")),),
        workers=(WorkerConfig(name="w", pairs=("golden",)),),
        redis=RedisConfig(url=f"unix://{tmp_path}/no-redis.sock"),
        store=StoreConfig(dir=None),
    )
    body = {"model": "golden", "messages": MESSAGES, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with serving(fleet, tmp_path / "w.sock") as (client, worker):
        assert worker.state().pairs[0].fingerprint == pair.fingerprint
        assert worker.state().rates["golden"].prefill_tokens_per_s > 0
        answer = await client.post("/v1/chat/completions", json=body, headers={"x-twolane-tenant": "a"})
        raw = await client.post("/v1/completions", json={"model": "golden", "prompt": "once", "max_tokens": 4})
    assert answer.json()["usage"] == answer.json()["usage"] | {"prompt_tokens": 71, "completion_tokens": 4}
    assert raw.status_code == 400
    assert "/v1/chat/completions" in raw.json()["error"]["message"]


# -- what a recipe says -------------------------------------------------------------------------------------------


def recipe(tmp_path: Path, source: Path, **changes: Any) -> Path:
    """The golden checkpoint with another recipe."""
    folder = tmp_path / "fuser"
    shutil.copytree(source, folder)
    data = json.loads((folder / "config.json").read_text())
    data["model"].update(changes)
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def with_tokenizers(tmp_path: Path, change: Callable[[Path], None] | None = None) -> Path:
    """The models of the same-tokenizer golden with tokenizer files; `change` is put to the sharer's."""
    place = tmp_path / "models"
    shutil.copytree(SAME, place)
    small = tokenizer(150, ascii_only=True)
    small.chat_template = TEMPLATE + "{% if enable_thinking is false %}<think>{% endif %}"
    for name in ("receiver", "sharer"):
        small.save_pretrained(place / name)
    if change is not None:
        change(place / "sharer" / "tokenizer.json")
    return place


def rename(file: Path) -> None:
    """One token of the sharer's means something else."""
    data = json.loads(file.read_text())
    vocab, merges = data["model"]["vocab"], data["model"]["merges"]
    token = max(vocab, key=vocab.__getitem__)
    vocab["ZZZZ"] = vocab.pop(token)
    merges[:] = [m for m in merges if "".join(m) != token]
    file.write_text(json.dumps(data))


def test_ids_pass_unchanged_where_they_mean_the_same(tmp_path: Path) -> None:
    """A sharer whose tokenizer lacks tokens of the receiver's is served by a recipe without alignment."""
    place = with_tokenizers(tmp_path)
    more = AutoTokenizer.from_pretrained(place / "receiver")
    more.add_tokens(["<|endoftext|>", "<think>", "</think>"])  # the first is what Qwen2 adds by itself
    more.save_pretrained(place / "receiver")
    pair = held(place, place / "fuser").runtime
    assert isinstance(pair, Paired)
    vector = load_file(SAME / "expected_full.safetensors")
    ids = tuple(json.loads((SAME / "expected.json").read_text())["input_ids"][0])
    torch.testing.assert_close(
        finish(pair, Prompt(ids, 0)).logits, vector["logits_last"].flatten(), rtol=1e-4, atol=1e-5
    )


def test_ids_that_mean_another_token_are_refused_with_the_count(tmp_path: Path) -> None:
    """One id that means another token to the sharer is enough."""
    place = with_tokenizers(tmp_path, rename)
    with pytest.raises(LoadFailed, match=r"149 mean the same to the sharer, 1 mean another"):
        held(place, place / "fuser")


@pytest.mark.parametrize(
    ("place", "changes", "asked", "says"),
    [
        (ALIGNED, {"include_response": True}, {}, "include_response, whose sharer must read the receiver's own ids"),
        (SAME, {}, {"mode": "handover"}, "runs in mode fuse, not handover"),
        (ALIGNED, {}, {"scope": "context"}, "its scope is prompt"),
        (ALIGNED, {"is_do_alignment": False}, {}, "mean another token"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    place: Path, changes: dict[str, Any], asked: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Include-response over an alignment, a mode or scope it was not made for, ids that the sharer would misread."""
    models = place if place is ALIGNED else with_tokenizers(tmp_path)
    with pytest.raises(LoadFailed, match=says):
        held(models, recipe(tmp_path, place / "fuser", **changes), **asked)


def test_the_fingerprint_covers_the_recipe(loader: Loader, tmp_path: Path, pair: AlignedPair) -> None:
    """The strategy, the way sharers are joined and the alignment itself each change it."""
    seen = {pair.fingerprint}
    for i, changes in enumerate(({"alignment_strategy": "first"}, {"multi_source_fusion_mode": "parallel"})):
        seen.add(held(ALIGNED, recipe(tmp_path / str(i), ALIGNED / "fuser", **changes), loader).runtime.fingerprint)
    place = with_tokenizers(tmp_path)
    for i, aligned in enumerate((False, True)):
        folder = recipe(tmp_path / f"a{i}", SAME / "fuser", is_do_alignment=aligned)
        seen.add(held(place, folder).runtime.fingerprint)
    assert len(seen) == 5


def test_the_template_is_rendered_without_thinking(tmp_path: Path) -> None:
    """A c2c pair asks its receiver as it was trained: the non-thinking prompt."""
    place = with_tokenizers(tmp_path)
    pair = held(place, place / "fuser").runtime
    text = pair.decoder.tokenizer.decode(pair.chat([{"role": "user", "content": "hi"}]).ids)
    assert text.endswith("assistant\n<think>")


# -- scope context ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [1, 7, 12])
def test_scope_context_equals_the_official_run_in_two_sections(context: int, tmp_path: Path) -> None:
    """Fusing what stands before the question is the official run with sections [1 x context, -1 x rest]."""
    place = with_tokenizers(tmp_path)
    pair = held(place, place / "fuser", scope="context").runtime
    ids = tuple(json.loads((SAME / "expected.json").read_text())["input_ids"][0])
    loader = Loader("cpu")
    receiver, sharer = (loader.load(ModelConfig(model=str(place / name))) for name in ("receiver", "sharer"))
    official = load_official(place / "fuser", receiver=receiver.shape, sharer=sharer.shape)
    sections = (Section(1, context), Section(-1, len(ids) - context))
    run = c2c_run.prefill(
        receiver.model, [Sharer(sharer.model, official.fuser)], c2c_run.Prompt(torch.tensor([ids]), sections)
    )
    read = finish(pair, Prompt(ids, context))
    torch.testing.assert_close(read.logits, run.logits[0, -1], rtol=1e-4, atol=1e-5)
    tokens, _ = greedy(run, 8)
    engine = Engine({"golden": pair}, threads=1)
    engine.start()
    assert tokens_of(ask(engine, Prompt(ids, context), 8)) == tokens[0].tolist()
    engine.close()


def test_an_aligned_pair_has_counterfactuals_too(pair: AlignedPair) -> None:
    """A silent sharer and one that reads another text lead to other KV in the same slots, and the pair itself stays as
    it was; the receiver alone reads its own template."""
    from workers.counterfactual import otherwise

    prompt = pair.chat(MESSAGES)
    other: list[dict[str, Any]] = [{"role": "user", "content": "Report, ledger, item, price, buyer."}]
    same = finish(pair, prompt).kv
    shape = pair.decoder.shape
    for kind in ("zero", "shuffled"):
        got = finish(otherwise(pair, kind, other), prompt).kv  # type: ignore[arg-type]
        assert got.keys[0].shape == same.keys[0].shape
        assert any(not torch.allclose(got.values[i], same.values[i]) for i in range(shape.layers))
    for mine, before in zip(finish(pair, prompt).kv.values, same.values, strict=True):
        torch.testing.assert_close(mine, before, rtol=0, atol=0)
    alone = otherwise(pair, "receiver", None)
    ids = alone.chat(MESSAGES).ids
    assert ids == tuple(
        pair.decoder.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, enable_thinking=False)[
            "input_ids"
        ]
    )
