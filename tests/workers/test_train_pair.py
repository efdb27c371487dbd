"""`twolane pair train`: a pair from two models and a file, on tiny models; stopped in any way, it goes on the same."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from router.cli import main
from tests.tiny import make_model
from tests.workers.test_runtime import GOLDEN, finish, golden_model
from workers import fit_linear, pairs
from workers.c2c_run import Example, Sharer, batch_loss, collate
from workers.config import Fleet, ModelConfig, PairConfig
from workers.errors import LoadFailed
from workers.fusers import c2c_write, mix
from workers.fusers.c2c import load_official
from workers.fusers.mix_net import MixShape
from workers.items import read_items
from workers.lessons import Shuffled, answer_ids, lessons_of
from workers.loader import Loaded, Loader
from workers.matched_runtime import MatchedPair
from workers.matching import Matcher
from workers.pairing import hold_pair
from workers.plan import MODES, Plan
from workers.train import Ask, Lesson, Progress, Recipe, Trainer
from workers.train_cli import Asked, layers_of, work
from workers.train_pair import Licences, train_pair

WORDS = ["Paris", "tide", "harbour", "ledger", "France", "buyer"]
ROWS = [{"context": f"Item {i} is {w}.", "question": "What is it?", "answer": w} for i, w in enumerate(WORDS)]
KILLS = 4
COMMON = ("--width", "32", "--rank", "8", "--tokens", "200", "--device", "cpu")


def said(*roles: str, text: str = "tide") -> dict[str, Any]:
    """A chat of messages in these roles."""
    return {"messages": [{"role": role, "content": f"{text} {i}"} for i, role in enumerate(roles)]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("items") / "items.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return file


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What trainings keep for each other stays in the test."""
    monkeypatch.setenv("TWOLANE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def models(tiny_folder: Path, other_folder: Path) -> tuple[str, str]:
    return str(tiny_folder), str(other_folder)


def train(models: tuple[str, str], data: Path, out: Path, *options: str) -> Result:
    arguments = ["pair", "train", *models, "--data", str(data), "--out", str(out), *COMMON, *options]
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize(
    ("kind", "mode", "scope", "options"),
    [
        ("lite", "handover", "context", ()),
        ("lite", "handover", "prompt", ("--scope", "prompt")),
        ("lite", "fuse", "prompt", ("--mode", "fuse", "--batch", "3", "--hidden", "8")),
        ("lite", "fuse", "context", ("--mode", "fuse", "--scope", "context", "--last", "1")),
        ("c2c", "fuse", "prompt", ("--batch", "2")),
        ("c2c", "fuse", "context", ("--scope", "context")),
        ("linear", "fuse", "prompt", ("--mode", "fuse")),
    ],
)
def test_a_pair_is_made_that_a_worker_loads(
    tmp_path: Path, models: tuple[str, str], data: Path, kind: str, mode: str, scope: str, options: tuple[str, ...]
) -> None:
    """Every kind, from the command to a loaded pair: weights as named, unproven, and nothing of the training left."""
    out = tmp_path / "made"
    licence = ("--data-licence", "CC0-1.0", "--receiver-licence", "MIT")
    result = train(models, data, out, "--fuser", kind, "--steps", "3", "--json", *licence, *options)
    assert result.exit_code == 0, result.stderr
    told = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["step"] for row in told[:-1]] == ([] if kind == "linear" else [1, 2, 3])
    assert not (out / "training").exists()
    file = pairs.read_pair(out)
    assert (file.mode, file.scope, file.fuser.kind, file.name) == (mode, scope, kind, "made")
    assert (file.data_licence, file.receiver.licence, file.sharer.licence) == ("CC0-1.0", "MIT", None)
    assert file.training is not None
    assert file.training.tokens > 0
    config = PairConfig(
        name="made", sharer=ModelConfig(model=models[0]), receiver=ModelConfig(model=models[1]), fuser=str(out)
    )
    held = hold_pair(Fleet(models=(), pairs=(config,)), config, Loader("cpu"), None, 64)
    assert (held.state.verdict, held.state.verdict_reason) == ("unproven", "no report")
    assert (held.state.mode, held.state.scope) == (mode, scope)
    assert held.runtime.digests["fuser"] == f"{kind}:{file.fuser.digest[:16]}"


def asked(models: tuple[str, str], data: Path, out: Path, plan: Plan, *, resume: bool = False) -> Asked:
    """As the command understands its options; a checkpoint after every step."""
    parties = ModelConfig(model=models[0]), ModelConfig(model=models[1])
    return Asked(data, out, "pair", parties, plan, resume, 1, 1 << 20, None, Licences(), "cpu", as_json=False)


def forked(todo: Asked) -> int:
    """The process that does it, which shares nothing with this one."""
    child = os.fork()
    if not child:
        os._exit(work(todo))
    return child


def ended(child: int, within: float) -> bool:
    """Has it, with status 0? Else it is killed, as `kill -9` does."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        if os.waitpid(child, os.WNOHANG) == (child, 0):
            return True
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("kind", ["c2c", "lite"])
def test_a_training_killed_anywhere_goes_on_to_the_same_weights(
    tmp_path: Path, models: tuple[str, str], data: Path, kind: str
) -> None:
    """SIGKILL again and again, whenever it hits, with dropout and noisy gates: what --resume ends at is, byte for byte,
    the fuser of a run that nobody stopped, and to resume what has ended changes nothing.
    """
    plan = Plan(kind, MODES[kind][0], "context", steps=30, seed=7, rank=4, width=16)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    began = time.monotonic()
    assert ended(forked(asked(models, data, whole, plan)), 120)
    long = time.monotonic() - began
    draw = random.Random(kind)
    kills = sum(
        not ended(forked(asked(models, data, killed, plan, resume=True)), draw.uniform(0.1, 0.6) * long)
        for _ in range(KILLS)
    )
    assert ended(forked(asked(models, data, killed, plan, resume=True)), 120)
    assert kills
    names = [p.relative_to(whole) for p in sorted(whole.rglob("*")) if p.is_file() and p.name != "pair.json"]
    again = [p.relative_to(killed) for p in sorted(killed.rglob("*")) if p.is_file() and p.name != "pair.json"]
    assert names == again
    assert all((killed / name).read_bytes() == (whole / name).read_bytes() for name in names)
    one, two = pairs.read_pair(killed), pairs.read_pair(whole)
    assert one.fuser == two.fuser
    assert one.training is not None
    assert two.training is not None
    assert (one.training.steps, one.training.tokens) == (two.training.steps, two.training.tokens)


def test_a_stopped_training_goes_on_only_as_it_was_asked_for(
    tmp_path: Path, models: tuple[str, str], data: Path
) -> None:
    """Without --resume, or with another seed, it is refused and says so; with it the loss goes on being smoothed, and
    every text that was read before the end is found.
    """
    out, options = tmp_path / "made", ("--fuser", "c2c", "--steps", "9", "--checkpoint-every", "3", "--json")
    whole = [json.loads(line) for line in train(models, data, tmp_path / "whole", *options).stdout.splitlines()]

    def tell(progress: Progress | fit_linear.Progress) -> None:
        if isinstance(progress, Progress) and progress.step == 5:
            raise KeyboardInterrupt

    plan = Plan("c2c", "fuse", "prompt", steps=9, width=32, rank=8, tokens=200)
    sharer, receiver = (Loader("cpu").load(ModelConfig(model=model)) for model in models)
    with pytest.raises(KeyboardInterrupt):
        train_pair(out, "made", sharer, receiver, read_items(data), plan, every=3, tell=tell)
    refused = train(models, data, out, *options)
    assert (refused.exit_code, "--resume" in refused.stderr) == (1, True)
    other = train(models, data, out, *options, "--resume", "--seed", "8")
    assert (other.exit_code, "options.seed" in other.stderr) == (1, True)
    end = tmp_path / "end"
    (end / "final" / "projector_0.json").mkdir(parents=True)  # nothing can be written there
    with pytest.raises(LoadFailed, match="cannot be written"):
        train_pair(end, "end", sharer, receiver, read_items(data), plan, every=3)
    (end / "final" / "projector_0.json").rmdir()
    assert train(models, data, end, *options, "--resume").exit_code == 0
    assert pairs.read_pair(end).fuser == pairs.read_pair(tmp_path / "whole").fuser
    told = [json.loads(line) for line in train(models, data, out, *options, "--resume").stdout.splitlines()]
    assert [(row["step"], row["loss"]) for row in told[:-1]] == [(row["step"], row["loss"]) for row in whole[3:-1]]
    assert (told[-1]["resumed_at"], told[-1]["kv_computed"]) == (3, 0)
    assert told[-1]["digest"] == whole[-1]["digest"]


def test_a_folder_with_a_pair_is_not_overwritten(tmp_path: Path, models: tuple[str, str], data: Path) -> None:
    """Training into it, resumed or not, is refused and changes nothing."""
    assert train(models, data, tmp_path / "a", "--steps", "1").exit_code == 0
    before = (tmp_path / "a" / "fuser.safetensors").read_bytes()
    for more in ((), ("--resume",)):
        result = train(models, data, tmp_path / "a", "--steps", "2", *more)
        assert (result.exit_code, "holds a pair already" in result.stderr) == (1, True)
    assert (tmp_path / "a" / "fuser.safetensors").read_bytes() == before


def test_what_cannot_be_trained_is_refused(tmp_path: Path, models: tuple[str, str], data: Path) -> None:
    """A mode that the fuser does not have, adding where nothing is added to, items without a context to share, a layer
    list that is none.
    """
    result = train(models, data, tmp_path / "a", "--fuser", "c2c", "--mode", "handover")
    assert (result.exit_code, "runs in mode fuse, not handover" in result.stderr) == (1, True)
    for kind, mode in (("lite", "handover"), ("c2c", "fuse")):
        result = train(models, data, tmp_path / "a", "--fuser", kind, "--mode", mode, "--add-only")
        said = f"can be add-only, not a {kind} fuser in mode {mode}"
        assert (result.exit_code, said in result.stderr) == (1, True)
    bare = tmp_path / "bare.jsonl"
    bare.write_text('{"question": "Who?", "answer": "Ann"}')
    result = train(models, bare, tmp_path / "b")
    assert (result.exit_code, "before the last user message" in result.stderr) == (1, True)
    result = train(models, data, tmp_path / "c", "--receiver-layers", "first")
    assert (result.exit_code, "names no layers" in result.stderr) == (2, True)
    assert layers_of("0-2,5") == (0, 1, 2, 5)
    result = train(models, data, tmp_path / "d", "--name", "../other")
    assert (result.exit_code, "not the name of a folder" in result.stderr) == (2, True)


IDLE = {
    "hidden": ("--hidden", "8"),
    "last": ("--last", "1"),
    "deepest": ("--deepest", "1"),
    "dropout": ("--dropout", "0.5"),
    "muon": ("--muon", "0.01"),
}


@pytest.mark.parametrize("kind", ["lite", "c2c", "linear"])
def test_an_option_that_would_change_nothing_is_refused(
    tmp_path: Path, models: tuple[str, str], data: Path, kind: str
) -> None:
    """What only the general lite network has is refused by name where another fuser is made: between models of one KV
    size lite hands over by its first network.
    """
    for name, option in IDLE.items():
        result = train(models, data, tmp_path / "a", "--fuser", kind, *option)
        assert (result.exit_code, f"has no use for --{name}; " in result.stderr) == (1, True), result.stderr
    result = train(models, data, tmp_path / "a", "--fuser", kind, *IDLE["last"], *IDLE["hidden"])
    assert "has no use for --hidden, --last; " in result.stderr
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--mode", "fuse", "--rank", "0"), "--rank 0 leaves nothing"),
        (("--mode", "fuse", "--deepest", "4"), "--deepest 4: the sharer has 3 layers"),
        (("--mode", "handover", "--last", "1"), "--last is for mode fuse"),
    ],
)
def test_what_the_general_network_cannot_be_is_refused(
    tmp_path: Path, models: tuple[str, str], data: Path, options: tuple[str, ...], said: str
) -> None:
    """It is told by the option, before anything is written."""
    unlike = str(make_model(tmp_path / "unlike", hidden=64, kv_heads=1))
    result = train((models[0], unlike), data, tmp_path / "a", *options)
    assert (result.exit_code, said in result.stderr, (tmp_path / "a").exists()) == (1, True, False), result.stderr


def test_too_few_texts_for_a_linear_fuser(tmp_path: Path, models: tuple[str, str], data: Path) -> None:
    """It says what it has read, and whether items or tokens were too few."""
    few = train(models, data, tmp_path / "a", "--fuser", "linear", "--tokens", "2")
    assert (few.exit_code, "given 1 (42 tokens): let it read more than 2 tokens" in few.stderr) == (1, True)
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps(ROWS[0]))
    few = train(models, one, tmp_path / "a", "--fuser", "linear")
    assert (few.exit_code, "(42 tokens): let it read more items" in few.stderr) == (1, True)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("option", ["--rate", "--muon", "--dropout"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e39"])
def test_numbers_that_are_none_are_refused(
    tmp_path: Path, models: tuple[str, str], data: Path, option: str, value: str
) -> None:
    """Neither is a rate or a share, and the command says so before it reads a model."""
    result = train(models, data, tmp_path / "a", option, value)
    assert (result.exit_code, option in result.stderr, (tmp_path / "a").exists()) == (2, True, False)


def test_a_seed_that_no_generator_takes_is_refused(tmp_path: Path, models: tuple[str, str], data: Path) -> None:
    """It is told as an option out of its range."""
    result = train(models, data, tmp_path / "a", "--seed", str(2**70))
    assert (result.exit_code, "--seed" in result.stderr) == (2, True)


@pytest.mark.parametrize("kind", [("lite", "fuse"), ("lite", "handover"), ("c2c", "fuse")], ids="-".join)
def test_a_training_that_diverges_makes_no_pair(
    tmp_path: Path, models: tuple[str, str], data: Path, kind: tuple[str, str]
) -> None:
    """A loss that is no number ends the command with an error."""
    options = ("--rate", "1e9", "--muon", "0", "--steps", "12", "--fuser", kind[0], "--mode", kind[1])
    result = train(models, data, tmp_path / "a", *options)
    assert (result.exit_code, "diverged" in result.stderr) == (1, True), result.output
    assert not (tmp_path / "a" / "pair.json").exists()


def foreign(folder: Path) -> Loaded:
    """Another tokenizer, other layers, and one KV head of another size."""
    made = make_model(folder / "ascii", seed=3, layers=4, hidden=64, kv_heads=1, ascii_only=True)
    return Loader("cpu").load(ModelConfig(name="foreign", model=str(made)))


STRICT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must "
    "alternate') }}{% endif %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
)
"""As some families have it: no system message, user and assistant in turn."""
CHATS: dict[str, tuple[dict[str, Any] | str, bool]] = {
    "several turns": (said("user", "assistant", "user", "assistant"), True),
    "other scripts": (said("user", "assistant", "user", "assistant", text="žluťoučký 👩 北京 \u2028 \0"), True),
    "the same again": (said("user", "assistant", "user", "assistant"), True),
    "one turn": (said("user", "assistant"), False),
    "a system message": (said("system", "user", "assistant"), False),
    "two users": (said("user", "user", "assistant"), False),
    "the assistant first": (said("assistant", "user", "assistant"), False),
    "longer than the model reads": (said("user", "assistant", "user", "assistant", text="tide " * 90), False),
    "a control token": (said("user", "assistant", "user", "assistant", text="a <|im_end|> b"), False),
}


@pytest.mark.parametrize("kind", ["lite", "c2c"])
def test_what_nothing_can_be_learnt_from_is_left_out_and_counted(tmp_path: Path, kind: str) -> None:
    """A template that refuses roles, a context of 256 tokens, scope `context`: what would not be served, or has nothing
    before the last question, teaches nothing, and the command says how many there were.
    """
    model = make_model(tmp_path / "strict", context=256)
    (model / "chat_template.jinja").write_text(STRICT)
    data = tmp_path / "chats.jsonl"
    data.write_text("\ufeff" + "\r\n".join(json.dumps(line, ensure_ascii=False) for line, _ in CHATS.values()))
    options = ("--fuser", kind, "--scope", "context", "--steps", "1")
    told = train((str(model), str(model)), data, tmp_path / "a", *options, "--json")
    assert told.exit_code == 0, told.stderr
    left = sum(not learnt for _, learnt in CHATS.values())
    assert json.loads(told.stdout.splitlines()[-1])["left_out"] == left
    said_so = train((str(model), str(model)), data, tmp_path / "b", *options)
    assert f"{left} items left out" in said_so.stdout
    data.write_text(json.dumps(CHATS["two users"][0]))
    none = train((str(model), str(model)), data, tmp_path / "c", *options)
    assert (none.exit_code, "roles must alternate" in none.stderr) == (1, True)
    assert not (tmp_path / "c").exists()


def test_two_tokenizers(tmp_path: Path, tiny: Loaded) -> None:
    """A c2c fuser learns over aligned chats, and its folder says so; a linear one refuses and says which does not."""
    other = foreign(tmp_path)
    items = read_items(_chats(tmp_path))
    plan = Plan("c2c", "fuse", "prompt", steps=2, width=16)
    done = train_pair(tmp_path / "made", "made", other, tiny, items, plan)
    assert done.loss is not None
    official = load_official(tmp_path / "made", receiver=tiny.shape, sharer=other.shape)
    assert official.aligned
    assert official.fuser.digest == done.pair.fuser.digest
    with pytest.raises(LoadFailed, match=r"one tokenizer on both sides \(c2c and lite do not\)"):
        train_pair(tmp_path / "no", "no", other, tiny, items, Plan("linear", "handover", "prompt", steps=1))


@pytest.mark.parametrize(("mode", "scope"), [("fuse", "prompt"), ("fuse", "context"), ("handover", "context")])
def test_lite_stands_between_any_two_models(
    tmp_path: Path, tiny: Loaded, tiny_folder: Path, data: Path, mode: str, scope: str
) -> None:
    """With other layers, heads, head sizes and tokenizer it learns, and a worker runs what was learnt."""
    other, losses = foreign(tmp_path), list[float]()
    plan = Plan("lite", mode, scope, steps=30, batch=6, rank=8, hidden=8)
    tell = lambda progress: losses.append(progress.loss)  # noqa: E731
    done = train_pair(tmp_path / "made", "made", other, tiny, read_items(data), plan, tell=tell)
    assert done.pair.fuser.shape["network"] == "mix"
    assert losses[-1] < losses[0] * 0.9
    config = PairConfig(
        name="made",
        sharer=ModelConfig(model=other.source),
        receiver=ModelConfig(model=str(tiny_folder)),
        fuser=str(tmp_path / "made"),
    )
    held = hold_pair(Fleet(models=(), pairs=(config,)), config, Loader("cpu"), None, 64)
    assert isinstance(held.runtime, MatchedPair)
    with torch.inference_mode():
        assert len(finish(held.runtime, held.runtime.chat(read_items(data)[0].chat)).kv) > 10


@pytest.mark.parametrize("last", [0, 1])
def test_lessons_at_once_teach_what_each_teaches_alone(tmp_path: Path, tiny: Loaded, data: Path, last: int) -> None:
    """Loss and gradients of a step over lessons of several lengths are those of lesson after lesson."""
    other = foreign(tmp_path)
    matcher = Matcher(tiny.tokenizer, other.tokenizer, "prompt", {})
    rows = [*read_items(data), *read_items(_chats(tmp_path))]
    lessons = lessons_of(tiny.tokenizer, rows, scope="prompt", most=200, options={}, matcher=matcher)
    reads = (tuple(range(other.shape.layers)),) * tiny.shape.layers
    shape = MixShape(other.shape, tiny.shape, own=True, reads=reads, rank=4, hidden=4, last=last)
    fuser = mix.fresh(shape, torch.float32, 0)
    torch.manual_seed(0)
    for parameter in fuser.net.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    trainer = Trainer(other, tiny, fuser, lambda i: lessons[i], Recipe(steps=1, batch=len(lessons)))
    counts = [len(lesson.batches[0][0].answer) for lesson in lessons]
    found = []
    for losses in (
        trainer.losses(list(enumerate(lessons)), sum(counts)),
        (trainer.loss(one) * (n / sum(counts)) for one, n in zip(lessons, counts, strict=True)),
    ):
        fuser.net.zero_grad(set_to_none=True)
        total = sum(losses, torch.tensor(0.0))
        total.backward()
        found.append([total.detach(), *(p.grad for p in fuser.net.parameters())])
    for at_once, alone in zip(*found, strict=True):
        torch.testing.assert_close(at_once, alone, rtol=1e-3, atol=1e-5)


def test_a_stopped_lite_training_goes_on_to_the_same_weights(tmp_path: Path, tiny: Loaded, data: Path) -> None:
    """With Muon beside AdamW and inputs left out by chance: what resumes ends at the bytes of a run that nobody
    stopped, says how long both of its processes took, and reads what was asked for: some of the sharer's layers, and
    nothing of the receiver's own.
    """
    other, items = foreign(tmp_path), read_items(data)
    plan = Plan("lite", "fuse", "prompt", steps=6, batch=4, rank=4, deepest=1, dropout=0.3, add_only=True)

    def stop(progress: object) -> None:
        time.sleep(0.2)
        if isinstance(progress, Progress) and progress.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_pair(tmp_path / "cut", "p", other, tiny, items, plan, every=3, tell=stop)
    began = time.monotonic()
    done = train_pair(tmp_path / "cut", "p", other, tiny, items, plan, every=3, resume=True)
    took = time.monotonic() - began
    assert done is not None
    assert done.pair.training is not None
    assert done.pair.training.seconds > took
    train_pair(tmp_path / "whole", "p", other, tiny, items, plan, every=6)
    one, two = ((tmp_path / name / "fuser.safetensors").read_bytes() for name in ("cut", "whole"))
    assert one == two
    made = mix.MixFuser.from_folder(tmp_path / "whole", torch.float32)
    assert made.source_layers == {other.shape.layers - 1}
    assert other.shape.layers > 1
    assert (made.shape.add_only, made.needs_own) == (True, True)


def _chats(folder: Path) -> Path:
    file = folder / "chats.jsonl"
    said = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "Paris."}]
    file.write_text(json.dumps({"messages": said}))
    return file


def test_the_loss_and_gradients_are_the_official_ones() -> None:
    """On the vectors of the official code: a step over two lessons has the loss and the gradients of their batch."""
    sharer, receiver = golden_model("sharer"), golden_model("receiver")
    expected = json.loads((GOLDEN / "expected_batch_loss.json").read_text())
    lessons, examples = [], []
    for feature in expected["features"]:
        ids, labels = feature["input_ids"], feature["labels"]
        codes = [code for code, _ in feature["kv_cache_index"]]
        shared, first = codes.count(1), next(i for i, label in enumerate(labels) if label >= 0)
        lessons.append(Lesson(tuple(ids[:shared]), ((Ask(tuple(ids[shared:first]), tuple(ids[first:])),),)))
        examples.append(Example(ids, labels, codes))
    fuser = load_official(GOLDEN / "fuser").fuser
    trainer = Trainer(sharer, receiver, fuser, lambda i: lessons[i], Recipe(steps=1))
    counts = [len(lesson.batches[0][0].answer) for lesson in lessons]
    total = sum(
        (trainer.loss(one) * (n / sum(counts)) for one, n in zip(lessons, counts, strict=True)), torch.tensor(0.0)
    )
    assert total.item() == pytest.approx(expected["loss"], rel=1e-4)
    total.backward()
    ours = [p.grad.clone() if p.grad is not None else None for p in fuser.net.parameters()]
    fuser.net.zero_grad(set_to_none=True)
    batch = collate(examples, expected["pad_token_id"])
    batch_loss(receiver.model, [Sharer(sharer.model, fuser)], batch).loss.backward()
    for mine, parameter in zip(ours, fuser.net.parameters(), strict=True):
        assert (mine is None) == (parameter.grad is None)
        if mine is not None and parameter.grad is not None:
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-6)


def test_a_c2c_fuser_learns(tiny: Loaded, other: Loaded, data: Path) -> None:
    """The receiver's loss on the lessons falls, in training and with hard gates, and its models do not change."""
    lessons = lessons_of(other.tokenizer, read_items(data), scope="prompt", most=200, options={})
    size = c2c_write.Size(64, 64)
    fuser = c2c_write.fresh(tiny.shape, other.shape, size, steps=40, seed=0, dtype=torch.float32)
    recipe = Recipe(40, rate=3e-3, warmup=6, batch=2, decay="linear")
    trainer = Trainer(tiny, other, fuser, Shuffled(lessons, 0), recipe)
    before = {name: t.clone() for name, t in other.model.state_dict().items()}

    def hard() -> float:
        with torch.no_grad():
            return sum(trainer.loss(one).item() for one in lessons)

    start = hard()
    trainer.run()
    assert fuser.change().gates_open > 0
    assert hard() < start * 0.7
    assert all(torch.equal(before[name], t) for name, t in other.model.state_dict().items())


def test_half_precision_keeps_the_gates_temperature_whole(tiny: Loaded, data: Path, tmp_path: Path) -> None:
    """A bfloat16 fuser is stored and loaded as it was trained."""
    half = replace(tiny, model=tiny.model, dtype=torch.bfloat16)
    fuser = c2c_write.fresh(tiny.shape, tiny.shape, c2c_write.Size(16, 16), steps=9, seed=0, dtype=half.dtype)
    assert {p.dtype for p in fuser.net.parameters()} == {torch.bfloat16}
    assert fuser.projectors[0].gate_temperature.dtype is torch.float32
    fuser.anneal(3)
    assert 0.0 < float(fuser.projectors[0].gate_temperature) < 1.0


def test_lessons(tiny: Loaded, data: Path, tmp_path: Path) -> None:
    """Questions about one context are one lesson; answers end as the template ends them; order is drawn by the seed."""
    file = tmp_path / "items.jsonl"
    file.write_text("\n".join(json.dumps({**ROWS[0], "question": f"What is {i}?"}) for i in range(8)))
    items = read_items(file)
    found = lessons_of(tiny.tokenizer, items, scope="context", most=200, options={})
    assert [len(lesson.batches[0]) for lesson in found] == [6, 2]
    assert tiny.tokenizer.decode(answer_ids(tiny.tokenizer, items[0], {})) == "Paris<|im_end|>"
    text = tiny.tokenizer.decode([*found[0].context, *found[0].batches[0][0].rest])
    assert text.endswith("What is 0?<|im_end|>\n<|im_start|>assistant\n")
    prompts = lessons_of(tiny.tokenizer, items, scope="prompt", most=200, options={})
    assert all(len(lesson.batches[0][0].rest) == 1 for lesson in prompts)
    order = [Shuffled(range(10), seed) for seed in (1, 1, 2)]
    drawn = [[draw(i) for i in (*range(20), 3)] for draw in order]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(drawn[0][:10]) == sorted(drawn[0][10:20]) == list(range(10))
    assert drawn[0][:10] != drawn[0][10:20]
    assert drawn[0][3] == drawn[0][20]


def test_progress_tells_steps_loss_and_gates(tmp_path: Path, tiny: Loaded, other: Loaded, data: Path) -> None:
    """After every step; a run that found its end reached tells nothing and loses nothing."""
    told: list[str] = []
    plan = Plan("c2c", "fuse", "prompt", steps=4, width=16)
    tell = lambda progress: told.append(str(progress))  # noqa: E731
    train_pair(tmp_path / "a", "a", tiny, other, read_items(data), plan, every=3, tell=tell)
    assert [line.split("  ")[0] for line in told] == [f"step {i}/4" for i in range(1, 5)]
