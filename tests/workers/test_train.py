"""The trainer: it learns, leaves both models alone, and goes on where it stopped."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.workers.tiny import tiny_pair
from workers.errors import LoadFailed
from workers.fusers.lite import LiteFuser, LiteShape, fresh
from workers.greedy import answer_logits, answers, expand, read
from workers.loader import Loaded
from workers.pair_file import publish
from workers.pairs import FuserInfo, read_pair
from workers.train import Ask, Lesson, Progress, Recipe, Trainer, answer_loss


def lesson(step: int) -> Lesson:
    """The answer is a letter of the context: the question says nothing about which."""
    rng = random.Random(step % 5)
    letter = rng.randint(1, 26)
    context = (30, letter, letter, letter)
    return Lesson(context, ((Ask((31,), (letter, 39)), Ask((31, 32), (letter, 39))), (Ask((33,), (letter,)),)))


def untrained(sharer: Loaded, receiver: Loaded, rank: int = 8) -> LiteFuser:
    return fresh(LiteShape(sharer.shape, receiver.shape, (0, 3), rank), torch.float32, 0)


def flat(fuser: LiteFuser) -> torch.Tensor:
    return torch.cat([t.flatten() for t in fuser.net.state_dict().values()])


def test_it_learns() -> None:
    """The receiver comes to answer what only the sharer has read, greedily and for every context of the lessons."""
    sharer, receiver = tiny_pair()
    fuser = untrained(sharer, receiver)
    trainer = Trainer(sharer, receiver, fuser, lesson, Recipe(steps=150, rate=5e-3, calibrate=5))
    seen: list[Progress] = []
    trainer.run(tell=seen.append)
    assert [p.step for p in seen] == list(range(1, 151))
    assert seen[-1].loss < seen[0].loss / 4
    for i in range(5):
        one = lesson(i)
        with torch.no_grad():
            kv = fuser.project(read(sharer, one.context), None, 0)
        batch = one.batches[0]
        assert answers(receiver, kv, [a.rest for a in batch], 4) == [list(a.answer[:-1]) for a in batch]


def test_training_goes_on_with_the_scale_it_has() -> None:
    """Without contexts to calibrate on, mean and deviation of a fuser that was trained before stay as they are."""
    sharer, receiver = tiny_pair()
    fuser = untrained(sharer, receiver)
    Trainer(sharer, receiver, fuser, lesson, Recipe(steps=1, calibrate=3)).run()
    mean, deviation = fuser.net.mean.clone(), fuser.net.deviation.clone()
    Trainer(sharer, receiver, fuser, lambda i: lesson(i + 3), Recipe(steps=1, calibrate=0)).run()
    assert torch.equal(fuser.net.mean, mean)
    assert torch.equal(fuser.net.deviation, deviation)


def test_models_stay_frozen() -> None:
    """Training changes the fuser, and no weight of sharer or receiver."""
    sharer, receiver = tiny_pair()
    before = {name: t.clone() for name, t in sharer.model.state_dict().items()}
    fuser = untrained(sharer, receiver)
    start = flat(fuser)
    Trainer(sharer, receiver, fuser, lesson, Recipe(steps=3)).run()
    assert all(torch.equal(before[name], t) for name, t in sharer.model.state_dict().items())
    assert not torch.equal(flat(fuser), start)


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """A run that stops, is stored and goes on ends at the weights of one that never stopped."""
    sharer, receiver = tiny_pair()
    recipe = Recipe(steps=6, warmup=2)
    whole = untrained(sharer, receiver)
    Trainer(sharer, receiver, whole, lesson, recipe).run()
    first = Trainer(sharer, receiver, untrained(sharer, receiver), lesson, recipe)
    first.run(until=3)
    first.checkpoint(tmp_path / "half.ckpt")
    rest = untrained(sharer, receiver)
    second = Trainer(sharer, receiver, rest, lesson, recipe)
    second.resume(tmp_path / "half.ckpt")
    second.run()
    assert torch.equal(flat(rest), flat(whole))


def test_a_last_step_that_breaks_the_weights_is_an_error() -> None:
    """No later loss would tell of them, and they would be published."""
    sharer, receiver = tiny_pair()
    fuser = untrained(sharer, receiver)
    trainer = Trainer(sharer, receiver, fuser, lesson, Recipe(steps=2))
    trainer.run(1)
    next(iter(fuser.net.parameters())).register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(LoadFailed, match="diverged at step 2"):
        trainer.run()


def test_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    """A checkpoint that does not fit, or is none, raises LoadFailed."""
    sharer, receiver = tiny_pair()
    Trainer(sharer, receiver, untrained(sharer, receiver), lesson, Recipe(steps=1)).checkpoint(tmp_path / "a.ckpt")
    other = Trainer(sharer, receiver, untrained(sharer, receiver, rank=4), lesson, Recipe(steps=1))
    with pytest.raises(LoadFailed):
        other.resume(tmp_path / "a.ckpt")
    with pytest.raises(LoadFailed):
        other.resume(tmp_path / "none.ckpt")


def test_loss_is_on_the_answers_only() -> None:
    """Batched over padded rows, the loss is that of each question read by itself, answer tokens alone."""
    sharer, receiver = tiny_pair()
    fuser = untrained(sharer, receiver)
    fuser.net.requires_grad_(False)
    kv = fuser.project(read(sharer, [1, 2, 3, 4, 5]), None, 0)
    asks = (Ask((6, 7, 8), (9, 39)), Ask((10,), (11, 12, 39)))
    losses, count = 0.0, 0
    for ask in asks:
        line = torch.tensor([[*ask.rest, *ask.answer]])
        logits = receiver.model(input_ids=line, cache=expand(kv, 1), use_cache=True).logits[0]
        for i, token in enumerate(ask.answer):
            losses -= float(logits[len(ask.rest) - 1 + i].log_softmax(-1)[token])
            count += 1
    assert float(answer_loss(receiver, kv, asks)) == pytest.approx(losses / count, rel=1e-4)


def test_gradients_reach_the_handed_over_kv() -> None:
    """Every layer's K and V is reached by the loss, through the receiver alone."""
    sharer, receiver = tiny_pair()
    fuser = untrained(sharer, receiver)
    kv = fuser.project(read(sharer, [1, 2, 3]), None, 0)
    for k, v in kv.tensors():
        k.retain_grad()
        v.retain_grad()
    answer_logits(receiver, kv, [[4]], [[5, 6]]).square().mean().backward()
    assert all(t.grad is not None and t.grad.abs().sum() > 0 for pair in kv.tensors() for t in pair)


@pytest.mark.parametrize("context", [(), (1, 2, 3)])
def test_greedy_rows_do_not_depend_on_each_other(context: tuple[int, ...]) -> None:
    """A question's answer in a batch with longer and shorter ones is its answer alone, with and without context."""
    model, _ = tiny_pair()
    rests = [[4, 5, 6, 7], [8], [9, 10]]
    together = answers(model, read(model, context), rests, 8)
    assert together == [answers(model, read(model, context), [rest], 8)[0] for rest in rests]


def test_greedy_equals_generate() -> None:
    """Context and rest apart answer as one prompt does in `generate`."""
    model, _ = tiny_pair()
    prompt = [1, 2, 3, 4, 5]
    out = model.model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = [t for t in out[0, 5:].tolist() if t not in model.eos]
    assert answers(model, read(model, prompt[:3]), [prompt[3:]], 8) == [expected]


@pytest.mark.parametrize(("step", "share"), [(0, 0.5), (1, 1.0), (2, 1.0), (12, 0.1), (7, 0.55)])
def test_learning_rate(step: int, share: float) -> None:
    """Linear warm-up, then half a cosine down to the floor."""
    assert Recipe(steps=12, rate=2.0, warmup=2).rate_at(step) == pytest.approx(2.0 * share)


def test_pair_file(tmp_path: Path) -> None:
    """`pair.json` names both models by digest, and the layers the receiver keeps."""
    sharer, receiver = tiny_pair()
    info = FuserInfo("lite", "d", {"rank": 1}, 5)
    publish(tmp_path, "tiny", sharer, receiver, info, mode="handover", scope="context", made="2026-01-01")
    pair = read_pair(tmp_path)
    assert (pair.sharer.layers, pair.receiver.layers) == ("all", "0,3")
    assert pair.receiver.weights == sharer.digests.weights
    assert pair.fuser == info
