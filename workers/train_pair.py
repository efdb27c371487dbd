"""Two models and a file of items -> a pair folder. What `twolane pair train` runs.

While it runs, the folder holds `training/`: what was asked for, and a checkpoint. A run that was stopped, in whatever
way, goes on from there; it refuses to go on with other options. `pair.json` is written last: once it is there, the
training has ended, and `training/` is only swept up. Of several processes the first alone writes.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers.cache_utils import DynamicCache

from workers import fit_linear, training_folder
from workers.c2c_run import Prompt
from workers.cache import KVCache
from workers.errors import BadPrompt, LoadFailed
from workers.fusers import c2c_write, lite, mix
from workers.fusers.c2c import C2CFuser, Official
from workers.fusers.lite import LiteFuser, LiteShape
from workers.fusers.mix import MixFuser
from workers.fusers.mix_net import MixShape
from workers.greedy import expand
from workers.items import Item, digest_of_items
from workers.lesson_batch import Remembered
from workers.lessons import Shuffled, aligned_lessons, lessons_of, questions_in
from workers.loader import Loaded
from workers.matching import Matcher
from workers.pair_file import publish
from workers.pairs import FuserInfo, PairFile, Training
from workers.plan import Plan, is_general, refuse
from workers.prompt import WITHOUT_THINKING
from workers.together import ALONE, Team
from workers.train import ANEW, Progress, Reads, Trainable, Trainer
from workers.verify import silent


@dataclass(frozen=True, slots=True)
class Licences:
    """As SPDX names; None where nobody has said."""

    sharer: str | None = None
    receiver: str | None = None
    fuser: str | None = None
    data: str | None = None


@dataclass(frozen=True, slots=True)
class Trained:
    """What has come of it."""

    pair: PairFile
    loss: float | None
    """None where nothing was learnt by steps."""
    resumed_at: int
    left_out: int = 0
    """Items that nothing is learnt from: too long, or nothing to share, or refused by a chat template."""


Tell = Callable[[Progress | fit_linear.Progress], None]


def train_pair(
    folder: Path,
    name: str,
    sharer: Loaded,
    receiver: Loaded,
    items: Sequence[Item],
    plan: Plan,
    *,
    resume: bool = False,
    every: int = 50,
    licences: Licences = Licences(),
    tell: Tell | None = None,
    reads: Reads = ANEW,
    team: Team = ALONE,
    deaf: bool = False,
) -> Trained | None:
    """A checkpoint is written after `every` steps. `reads` gives the frozen models' KV; `deaf`: as a control, the
    sharer says nothing. Every process of the `team` calls this, on models of its own; None in all but the first.

    Raises LoadFailed: models that no such fuser stands between, nothing to learn from, or a folder in use.
    """
    if deaf and plan.kind == "linear":
        raise ValueError("what a linear plan is without its sharer, fit_pair says: no folder would take it")
    with team.agreeing():
        foreign = refuse(plan, sharer, receiver)
        _refuse_team(plan, team)
        asked = _asked(plan, sharer, receiver, items, team)
    with ExitStack() as held:
        with team.agreeing():
            if (ended := training_folder.ended(folder, asked, resume=resume)) is None and team.rank == 0:
                training_folder.enter(folder, asked, resume=resume)
                held.enter_context(training_folder.alone(folder))
        if ended is not None:
            if team.rank == 0:
                training_folder.sweep(folder)
            return Trained(ended, None, plan.steps) if team.rank == 0 else None
        began = time.monotonic()
        try:
            if plan.kind == "linear":
                fuser, done = _fitted(folder, sharer, receiver, items, plan, tell, reads)
            else:
                heard, given = _deafened(sharer, reads) if deaf else (sharer, reads)
                trainer, done = _learnt(folder, heard, receiver, items, plan, every, tell, given, team, foreign=foreign)
                if team.rank:
                    return None
                fuser = _store(folder, trainer.fuser, plan, sharer, receiver, aligned=foreign)
        except LoadFailed:
            if team.rank == 0:
                training_folder.forget(folder)
            raise
        training = Training(
            data=asked["data"],
            steps=plan.steps if plan.kind != "linear" else 1,
            tokens=done.tokens,
            seconds=round(done.earlier_s + time.monotonic() - began, 1),
            device=str(receiver.device) if team.size == 1 else f"{team.size} x {receiver.device.type}",
            options=asdict(plan),
        )
        pair = publish(
            folder,
            name,
            sharer,
            receiver,
            msgspec.structs.replace(fuser, licence=licences.fuser),
            mode=plan.mode,
            scope=plan.scope,
            made=datetime.datetime.now(datetime.UTC).date().isoformat(),
            licence=(licences.sharer, licences.receiver),
            data_licence=licences.data,
            training=training,
        )
        training_folder.sweep(folder)
        return Trained(pair, done.loss, done.resumed_at, done.left_out)


def _refuse_team(plan: Plan, team: Team) -> None:
    if team.size > 1 and plan.kind == "linear":
        raise LoadFailed("a linear fuser is fitted in one pass, by one process")
    if plan.batch < team.size:
        raise LoadFailed(
            f"a batch of {plan.batch} cannot be shared by {team.size} processes: each takes one context at least"
        )


def _asked(plan: Plan, sharer: Loaded, receiver: Loaded, items: Sequence[Item], team: Team) -> dict[str, Any]:
    return {
        **({"processes": team.size} if team.size > 1 else {}),
        "options": asdict(plan),
        "sharer": sharer.identity,
        "receiver": receiver.identity,
        "device": receiver.device.type,
        "data": digest_of_items(items),
    }


@dataclass(frozen=True, slots=True)
class _Done:
    tokens: int
    loss: float | None = None
    resumed_at: int = 0
    left_out: int = 0
    earlier_s: float = 0.0
    """Of the processes before this one."""


def _fitted(
    folder: Path,
    sharer: Loaded,
    receiver: Loaded,
    items: Sequence[Item],
    plan: Plan,
    tell: Tell | None,
    reads: Reads,
) -> tuple[FuserInfo, _Done]:
    """There is nothing to go on from."""
    fitted = fit_pair(sharer, receiver, items, plan, tell, reads=reads)
    stored = fitted.fuser(plan.mode, receiver.dtype).save(folder)
    info = FuserInfo(stored.kind, stored.digest, stored.shape.as_json(), stored.parameters)
    return info, _Done(fitted.tokens + fitted.held_out)


def fit_pair(
    sharer: Loaded,
    receiver: Loaded,
    items: Sequence[Item],
    plan: Plan,
    tell: Tell | None = None,
    *,
    reads: Reads = ANEW,
    deaf: bool = False,
) -> fit_linear.Fitted:
    """A linear plan in closed form: one pass over the chats. `deaf`: the sharer says nothing. Raises LoadFailed."""
    chats = [[*item.chat, *[{"role": "assistant", "content": a} for a in item.answers[:1]]] for item in items]
    texts = [ids for chat in chats for ids in _encoded(receiver.tokenizer, chat, plan.most)]
    held_out = max(64, min(1024, plan.tokens // 10))
    recipe = fit_linear.Recipe(tokens=plan.tokens, scout=held_out, held_out=held_out)
    if deaf:
        sharer, reads = _deafened(sharer, reads)
    return fit_linear.fit(sharer, receiver, texts, recipe, tell, reads.read)


def _encoded(tokenizer: Any, chat: list[dict[str, str]], most: int) -> list[list[int]]:
    """None where the template refuses it."""
    try:
        return list(fit_linear.encoded(tokenizer, [chat], most))
    except BadPrompt:
        return []


def _learnt(
    folder: Path,
    sharer: Loaded,
    receiver: Loaded,
    items: Sequence[Item],
    plan: Plan,
    every: int,
    tell: Tell | None,
    reads: Reads,
    team: Team,
    *,
    foreign: bool,
) -> tuple[Trainer, _Done]:
    checkpoint = folder / "training" / "checkpoint.pt"
    with team.agreeing():
        fuser = _fresh(plan, sharer, receiver, foreign=foreign)
        general = isinstance(fuser, MixFuser)
        most = min(plan.most, receiver.context, sharer.context)
        lessons: Any
        if foreign and not general:
            lessons = aligned_lessons(receiver.tokenizer, sharer.tokenizer, items, most=most)
        else:
            options = {} if isinstance(fuser, LiteFuser) else WITHOUT_THINKING
            matcher = Matcher(receiver.tokenizer, sharer.tokenizer, plan.scope, options) if foreign else None
            lessons = lessons_of(
                receiver.tokenizer, items, scope=plan.scope, most=most, options=options, matcher=matcher
            )
        recipe = plan.recipe(general=general)
        reads = Remembered(reads) if general else reads
        trainer = Trainer(sharer, receiver, fuser, Shuffled(lessons, plan.seed), recipe, reads, team)
        if checkpoint.exists():
            trainer.resume(checkpoint)
    with team.agreeing():
        step = torch.tensor([trainer.step], device=team.device)
        team.follow([step])
        if int(step) != trainer.step:
            raise LoadFailed(f"{folder}: process {team.rank} finds another checkpoint there than process 0")
    resumed_at = trainer.step
    while trainer.step < plan.steps:
        trainer.run(trainer.step + every, tell)
        with team.agreeing():
            if team.rank == 0:
                trainer.checkpoint(checkpoint)
    learnt = sum(questions_in(lesson) for lesson in lessons)
    return trainer, _Done(trainer.tokens, trainer.smooth, resumed_at, len(items) - learnt, trainer.earlier_s)


def _deafened(sharer: Loaded, reads: Reads) -> tuple[Loaded, Reads]:
    """The sharer as a party of its own, also where it is the receiver, and reads that are silent for it."""
    silenced = replace(sharer)
    return silenced, _Deaf(silenced, reads)


class _Deaf:
    """The sharer's KV is zero, whatever it reads."""

    def __init__(self, sharer: Loaded, reads: Reads) -> None:
        self._sharer, self._reads = sharer, reads

    def read(self, loaded: Loaded, ids: Sequence[int]) -> KVCache:
        return silent(self._sharer, len(ids)) if loaded is self._sharer else self._reads.read(loaded, ids)

    def read_sharer(self, loaded: Loaded, prompt: Prompt) -> DynamicCache:
        cache: DynamicCache = expand(silent(loaded, prompt.fused_until(0)), 1)
        return cache


def _fresh(plan: Plan, sharer: Loaded, receiver: Loaded, *, foreign: bool) -> C2CFuser | LiteFuser | MixFuser:
    if plan.kind == "c2c":
        size = c2c_write.Size(plan.width, plan.width)
        return c2c_write.fresh(
            sharer.shape,
            receiver.shape,
            size,
            steps=plan.steps,
            seed=plan.seed,
            dtype=receiver.dtype,
            device=receiver.device,
        )
    if is_general(plan, sharer, receiver, foreign=foreign):
        reads = (tuple(range(sharer.shape.layers)[-plan.deepest :]),) * receiver.shape.layers
        shape = MixShape(
            sharer.shape,
            receiver.shape,
            own=plan.mode == "fuse",
            reads=reads,
            rank=plan.rank,
            hidden=plan.hidden,
            last=plan.last,
            add_only=plan.add_only,
        )
        general = mix.fresh(shape, receiver.dtype, plan.seed)
        general.net.to(receiver.device)
        return general
    same = sharer.digests.weights == receiver.digests.weights and sharer.layers is None
    copied = lite.copied_layers(sharer.shape, receiver.shape, receiver.layers if same else None)
    made = lite.fresh(LiteShape(sharer.shape, receiver.shape, copied, plan.rank), receiver.dtype, plan.seed)
    made.net.to(receiver.device)
    return made


def _store(folder: Path, fuser: Trainable, plan: Plan, sharer: Loaded, receiver: Loaded, *, aligned: bool) -> FuserInfo:
    if isinstance(fuser, LiteFuser | MixFuser):
        stored: LiteFuser | MixFuser = fuser.save(folder)
        return FuserInfo("lite", stored.digest, stored.shape.as_json(), stored.parameters)
    if not isinstance(fuser, C2CFuser):
        raise TypeError(f"no folder is known for {type(fuser).__name__}")
    official = Official(
        fuser,
        aligned=aligned,
        strategy="first",
        include_response=False,
        fusion="sequential",
        receiver=receiver.source,
        sharer=sharer.source,
    )
    c2c_write.save_official(folder, official, asdict(plan))
    return FuserInfo("c2c", fuser.digest, {}, fuser.parameters)
