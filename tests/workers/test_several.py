"""Several sharers on one receiver, as they are served: the official vectors, reuse, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from router.cli import main
from tests.tiny import TEMPLATE, tokenizer
from tests.workers.test_official_runtime import ask, tokens_of
from tests.workers.test_runtime import finish, keep_of
from tests.workers.test_server import serving
from workers import c2c_run, pairs
from workers.config import Fleet, ModelConfig, PairConfig, RedisConfig, StoreConfig, WorkerConfig
from workers.engine import Engine
from workers.errors import LoadFailed
from workers.fusers.c2c import C2CFuser
from workers.fusers.several import JointFuser
from workers.loader import Loader
from workers.pair_file import publish
from workers.pairing import hold_pair
from workers.pairs import FuserInfo
from workers.prompt import Prompt
from workers.runtime import Alone, Paired
from workers.store import KVStore

GOLDEN = Path(__file__).parents[1] / "golden" / "e2e" / "multi_sharer"
IDS = tuple(json.loads((GOLDEN / "expected.json").read_text())["input_ids"][0])
NAMES = ("receiver", "sharer_1", "sharer_2")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden's models with tokenizer files, which it has none of."""
    made = tmp_path_factory.mktemp("several")
    shutil.copytree(GOLDEN, made, dirs_exist_ok=True)
    small = tokenizer(110, ascii_only=True)
    small.chat_template = TEMPLATE
    for name in NAMES:
        small.save_pretrained(made / name)
    return made


@pytest.fixture(scope="module")
def loader() -> Loader:
    return Loader("cpu")


def fleet_of(place: Path, **asked: Any) -> Fleet:
    several = {"sharers": ("sharer_1", "sharer_2"), "fusers": (str(place / "fuser_1"), str(place / "fuser_2"))}
    return Fleet(
        models=tuple(ModelConfig(name=n, model=str(place / n)) for n in NAMES),
        pairs=(PairConfig(**{"name": "golden", "receiver": "receiver", **several, **asked}),),
    )


def paired(place: Path, loader: Loader, store: KVStore | None = None, **asked: Any) -> Paired:
    fleet = fleet_of(place, **asked)
    runtime = hold_pair(fleet, fleet.pairs[0], loader, store, 512).runtime
    assert isinstance(runtime, Paired)
    return runtime


@pytest.fixture
def running(place: Path, loader: Loader) -> Iterator[Engine]:
    engine = Engine(
        {mode: paired(place, loader, fusion=mode) for mode in ("sequential", "parallel")}, threads=1, pack=False
    )
    engine.start()
    yield engine
    engine.close()


@pytest.mark.parametrize("fusion", ["sequential", "parallel"])
def test_the_official_vectors_of_two_sharers(fusion: str, place: Path, loader: Loader, running: Engine) -> None:
    """Fused KV and logits through the path that serves, and twelve tokens from the running batch."""
    want = load_file(GOLDEN / f"expected_{fusion}_mask3.safetensors")
    pair = paired(place, loader, fusion=fusion)
    read = finish(pair, Prompt(IDS, 0))
    for layer, (keys, values) in enumerate(read.kv.tensors()):
        torch.testing.assert_close(keys, want[f"fused.key.{layer}"], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(values, want[f"fused.value.{layer}"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(read.logits, want["logits_last"].flatten(), rtol=1e-4, atol=1e-5)
    events = [ask(running, Prompt(IDS, 0), 12, fusion) for _ in range(3)]
    assert [tokens_of(e) for e in events] == [want["greedy_tokens"].flatten().tolist()] * 3
    assert 0 < read.spent.gates_open < 1
    assert len(read.spent.gates) == read.kv.layers


@pytest.mark.parametrize("mask", [1, 2])
def test_one_of_the_two_alone_is_the_pair_of_that_one(mask: int, place: Path, loader: Loader) -> None:
    """The vectors with one sharer chosen are those of an ordinary pair."""
    want = load_file(GOLDEN / f"expected_sequential_mask{mask}.safetensors")
    fleet = Fleet(models=fleet_of(place).models)
    config = PairConfig(name="p", sharer=f"sharer_{mask}", receiver="receiver", fuser=str(place / f"fuser_{mask}"))
    read = finish(hold_pair(fleet, config, loader, None, 512).runtime, Prompt(IDS, 0))
    torch.testing.assert_close(read.logits, want["logits_last"].flatten(), rtol=1e-4, atol=1e-5)


async def test_two_sharers_answer_over_http_as_the_plain_functions_do(
    place: Path, loader: Loader, tmp_path: Path
) -> None:
    """The greedy text of the server is that of `c2c_run`, and the fingerprint is the one in the registry."""
    fleet = fleet_of(place, fusion="parallel").model_copy(
        update={
            "workers": (WorkerConfig(name="w", pairs=("golden",)),),
            "redis": RedisConfig(url=f"unix://{tmp_path}/no-redis.sock"),
            "store": StoreConfig(dir=None),
        }
    )
    pair = paired(place, loader, fusion="parallel")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = torch.tensor([pair.chat(messages).ids])
    models = {c.name: loader.load(c).model for c in fleet.models}
    assert isinstance(pair.fuser, JointFuser)
    sharers = [c2c_run.Sharer(models[f"sharer_{q}"], f) for q, f in enumerate(pair.fuser.fusers, start=1)]
    sections = c2c_run.same_tokenizer_sections(ids.shape[1], code=3)
    run = c2c_run.prefill(models["receiver"], sharers, c2c_run.Prompt(ids, sections), fusion="parallel")
    tokens, _ = c2c_run.greedy(run, 10)
    body = {"model": "golden", "messages": messages, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
    async with serving(fleet, tmp_path / "w.sock") as (client, worker):
        assert worker.state().pairs[0].fingerprint == pair.fingerprint
        answer = (await client.post("/v1/chat/completions", json=body, headers={"x-twolane-tenant": "a"})).json()
    assert answer["choices"][0]["message"]["content"] == pair.decoder.tokenizer.decode(tokens[0])
    assert answer["twolane"]["digests"]["sharer"].count("+") == 1


def test_warm_equals_cold_and_each_sharer_is_found_again(place: Path, loader: Loader, store: KVStore) -> None:
    """Reuse of the fused prompt, and of both sharers' KV by a pair that joins them in another way, is exact."""
    cold, warm = paired(place, loader), paired(place, loader, store)
    other, keep = paired(place, loader, store, fusion="parallel"), keep_of(store)
    ids = IDS * 8
    first, expected = finish(warm, Prompt(ids, 0), keep), finish(cold, Prompt(ids, 0))
    store.settle()
    again = finish(warm, Prompt(ids, 0), keep)
    assert (first.spent.reused, again.spent.reused) == (0, len(ids) - 1)
    assert torch.equal(first.logits, expected.logits)
    assert torch.equal(again.logits, expected.logits)
    assert again.spent.sharer_s == 0.0
    joined = finish(other, Prompt(ids, 0), keep)
    assert joined.spent.sharer_s == 0.0
    assert torch.equal(joined.logits, finish(paired(place, loader, fusion="parallel"), Prompt(ids, 0)).logits)


def test_the_fingerprint_covers_every_sharer_fuser_and_how_they_are_joined(place: Path, loader: Loader) -> None:
    """Another order, another fuser, another model or way of joining is another pair."""
    both = (str(place / "fuser_1"), str(place / "fuser_2"))
    variants: list[dict[str, Any]] = [
        {},
        {"fusion": "parallel"},
        {"scope": "context"},
        {"sharers": ("sharer_2", "sharer_1"), "fusers": both[::-1]},
        {"sharers": ("sharer_1", "sharer_1"), "fusers": (both[0], both[0])},
        {"sharers": (), "fusers": (), "sharer": "sharer_1", "fuser": both[0]},
    ]
    assert len({paired(place, loader, **asked).fingerprint for asked in variants}) == len(variants)


def test_a_checkpoint_made_for_all_sharers_is_one_fuser(place: Path, loader: Loader, tmp_path: Path) -> None:
    """One folder whose projector_config.json lists two sharers answers as the two folders do."""
    pair = paired(place, loader, fusers=(), fuser=str(merged(place, tmp_path)))
    apart = paired(place, loader)
    assert torch.equal(finish(pair, Prompt(IDS, 0)).logits, finish(apart, Prompt(IDS, 0)).logits)


def test_such_a_folder_can_be_proven(place: Path, loader: Loader, tmp_path: Path) -> None:
    """Its pair.json names both sharers; a pair with another sharer, fewer of them or other weights is refused."""
    folder = merged(place, tmp_path)
    asked: dict[str, Any] = {"fusers": (), "fuser": str(folder)}
    pair = paired(place, loader, **asked)
    receiver, *sharers = [loader.load(c) for c in fleet_of(place).models]
    info = FuserInfo("c2c", pair.fuser.digest, parameters=pair.fuser.parameters)
    publish(
        folder, "both", sharers[0], receiver, info, mode="fuse", scope="prompt", made="2026-01-01", others=sharers[1:]
    )
    assert paired(place, loader, **asked).fingerprint == pair.fingerprint
    with pytest.raises(LoadFailed, match="made for 2 sharers, not 1"):
        paired(place, loader, sharers=(), sharer="sharer_1", **asked)
    file = pairs.read_pair(folder)
    for changed, says in (
        ({"others": (file.sharer,)}, "the sharer's weights are not those"),
        ({"fuser": FuserInfo("c2c", "0" * 64)}, "its weights are not those that pair.json names"),
    ):
        pairs.write(folder, "pair.json", pairs.PairFile(**{**_fields(file), **changed}))
        with pytest.raises(LoadFailed, match=says):
            paired(place, loader, **asked)


def test_such_a_folder_is_verified(place: Path, loader: Loader, tmp_path: Path) -> None:
    """`pair verify`: each sharer answers alone, all write hints for the relay, and the controls silence or swap all."""
    folder = merged(place, tmp_path)
    pair = paired(place, loader, fusers=(), fuser=str(folder))
    receiver, *sharers = [loader.load(c) for c in fleet_of(place).models]
    info = FuserInfo("c2c", pair.fuser.digest, parameters=pair.fuser.parameters)
    publish(
        folder, "both", sharers[0], receiver, info, mode="fuse", scope="prompt", made="2026-01-01", others=sharers[1:]
    )
    rows = [{"question": f"{i}", "choices": ["a", "b"], "answer": "ab"[i % 2]} for i in range(4)]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--data", str(tmp_path / "items.jsonl"), "--max-tokens", "2", "--hint-tokens", "2", "--device", "cpu"]
    done = CliRunner().invoke(main, ["pair", "verify", str(folder), *options])
    report = pairs.read_report(folder)
    assert report is not None, done.output
    assert report.fingerprint == pair.fingerprint
    assert list(report.accuracy) == ["receiver", "sharer", "sharer_2", "cache", "zero", "shuffled", "relay"]
    assert set(report.compared) == {"receiver", "sharer", "sharer_2", "relay"}
    assert report.ttft_ms["relay"] > max(report.latency_ms[name] for name in ("sharer", "sharer_2"))
    alone = [report.weight_bytes[name] for name in ("receiver", "sharer", "sharer_2")]
    assert report.weight_bytes["cache"] == sum(alone) + 4 * pair.fuser.parameters
    shown = [line.split()[0] for line in done.stdout.splitlines()[3:10]]
    assert shown == ["receiver", "sharer", "sharer_2", "relay", "cache", "shuffled", "zero"]


def test_another_dtype_is_unproven_and_not_refused(place: Path, loader: Loader, tmp_path: Path) -> None:
    """The digest of an official fuser is over its weights in the receiver's dtype; a report on another counts not."""
    fleet = fleet_of(place)
    folder = tmp_path / "one"
    shutil.copytree(place / "fuser_1", folder)
    receiver, sharer, _ = [loader.load(c) for c in fleet.models]
    config = PairConfig(name="p", sharer="sharer_1", receiver="receiver", fuser=str(folder))
    runtime = hold_pair(fleet, config, loader, None, 512).runtime
    assert isinstance(runtime, Paired)
    info = FuserInfo("c2c", runtime.fuser.digest, parameters=runtime.fuser.parameters)
    publish(folder, "one", sharer, receiver, info, mode="fuse", scope="prompt", made="2026-01-01")
    half = fleet.model_copy(update={"models": tuple(c.model_copy(update={"dtype": "bfloat16"}) for c in fleet.models)})
    held = hold_pair(half, config, loader, None, 512)
    assert held.state.verdict == "unproven"
    assert held.runtime.fingerprint != runtime.fingerprint
    assert finish(held.runtime, Prompt(IDS, 0)).kv.keys[0].dtype is torch.bfloat16


def _fields(file: pairs.PairFile) -> dict[str, Any]:
    return {name: getattr(file, name) for name in file.__struct_fields__}


def merged(place: Path, tmp_path: Path) -> Path:
    """Both golden fusers in one folder, as a run with two sharers is saved: the second one's projectors come later."""
    folder = tmp_path / "merged"
    shutil.copytree(place / "fuser_1", folder)
    final, second = folder / "final", place / "fuser_2" / "final"
    count = len(list(final.glob("projector_*.safetensors")))
    for file in second.glob("projector_[0-9]*"):
        shutil.copy(file, final / f"projector_{int(file.stem.removeprefix('projector_')) + count}{file.suffix}")
    listed = json.loads((final / "projector_config.json").read_text())
    more = next(iter(json.loads((second / "projector_config.json").read_text())["0"].values()))
    listed["0"]["2"] = {layer: [[s, p + count] for s, p in found] for layer, found in more.items()}
    (final / "projector_config.json").write_text(json.dumps(listed))
    return folder


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "identity": ({"fusers": (), "fuser": "identity"}, "joined by c2c fusers only, and this one is identity"),
    "one of them identity": ({"fusers": ("identity", "identity")}, "joined by c2c fusers only"),
    "handover": ({"mode": "handover"}, "runs in mode fuse, not handover"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_joined_is_refused(name: str, place: Path, loader: Loader) -> None:
    """Kinds and modes in which several sharers mean nothing."""
    asked, says = REFUSED[name]
    with pytest.raises(LoadFailed, match=says):
        paired(place, loader, **asked)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"sharer": "a", "sharers": ["b", "c"]}, "write sharer or sharers"),
    "one": ({"sharers": ["a"]}, "at least two"),
    "fusers": ({"sharers": ["a", "b"], "fusers": ["x"]}, "1 entries for 2"),
    "fusion": ({"sharer": "a", "fusion": "parallel"}, "there is one"),
    "none": ({}, "sharer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_config_that_does_not_add_up_is_refused(name: str) -> None:
    """Sharers and fusers are written once, and as many of one as of the other."""
    asked, says = WRONG[name]
    with pytest.raises(ValueError, match=says):
        PairConfig(**{"name": "p", "receiver": "r", **asked})


def test_a_config_of_several_survives_being_written_and_read() -> None:
    """A worker process gets its fleet as JSON."""
    config = PairConfig(name="p", receiver="r", sharers=("a", "b"), fusers=("x", "y"))
    assert (config.sharer, config.fuser, config.parties) == ("a", "x", ("a", "b"))
    assert PairConfig.model_validate(json.loads(config.model_dump_json())) == config


def test_closed_gates_cost_no_sharer(place: Path) -> None:
    """A sharer none of whose gates is open is not read; one is read no further than the last layer that is needed."""
    loader, read = Loader("cpu"), set()
    receiver, *sharers = [loader.load(c) for c in fleet_of(place).models]
    for name, model in zip("ab", sharers, strict=True):
        for index, layer in enumerate(model.model.model.layers):
            layer.register_forward_hook(lambda *_, at=(name, index): read.add(at))
    pair = paired(place, loader)
    assert isinstance(pair.fuser, JointFuser)
    first, second = pair.fuser.fusers
    closed = C2CFuser(first.projectors, [None] * len(first.links))
    low = C2CFuser(second.projectors, [replace(link, source=0) if link else None for link in second.links])
    how: dict[str, Any] = {"mode": "fuse", "scope": "prompt", "store": None, "chunk": 512}
    joint = Paired("joint", sharers[0], receiver, JointFuser((closed, low), "sequential"), others=sharers[1:], **how)
    fused = finish(joint, Prompt(IDS, 0))
    assert read == {("b", 0)}
    alone = finish(Paired("p", sharers[1], receiver, low, **how), Prompt(IDS, 0))
    assert torch.equal(fused.logits, alone.logits)
    silent = Paired("silent", sharers[0], receiver, closed, **how)
    read.clear()
    plain = finish(Alone("alone", receiver, None, 512), Prompt(IDS, 0))
    torch.testing.assert_close(finish(silent, Prompt(IDS, 0)).logits, plain.logits, rtol=1e-4, atol=1e-5)
    assert not read
