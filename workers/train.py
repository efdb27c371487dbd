"""Trains a fuser: both models stay frozen, and the loss is on the receiver's answers.

A step is one lesson or a few: a context that the sharer reads once, and several questions that the receiver answers
over the projected KV. Lessons are asked for by number and all chance is drawn by step, so that a run that was stopped
goes on as if it had not been.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers.cache_utils import DynamicCache

from workers.align import Aligned
from workers.c2c_run import Batch, Prompt, Sharer, aligned_prompt, batch_loss, read_sharer
from workers.cache import KVCache
from workers.errors import LoadFailed
from workers.files import replacing
from workers.fusers.base import Change, Slots
from workers.fusers.c2c import C2CFuser
from workers.fusers.mix import MixFuser
from workers.greedy import answer_logits, read
from workers.lesson_batch import grouped, summed_loss
from workers.loader import Loaded
from workers.muon import Muon
from workers.prompt import Heard
from workers.together import ALONE, Team


@dataclass(frozen=True, slots=True)
class Ask:
    """A question as the receiver reads it, and the answer's tokens with the ending one."""

    rest: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lesson:
    """One context and the questions about it, in batches of like length; each batch weighs the same."""

    context: tuple[int, ...]
    batches: tuple[tuple[Ask, ...], ...]
    heard: Heard | None = None
    """The context as a sharer with another tokenizer reads it."""


@dataclass(frozen=True, slots=True)
class AlignedLesson:
    """A whole conversation as two models with different tokenizers read it; its last message is learnt."""

    aligned: Aligned


Lessons = Callable[[int], Lesson] | Callable[[int], AlignedLesson]
"""By number, from 0; the same number gives the same lesson."""


class Reads(Protocol):
    """What frozen models read: computed each time, or kept."""

    def read(self, loaded: Loaded, ids: Sequence[int]) -> KVCache:
        """KV of the ids, read alone from position 0."""

    def read_sharer(self, loaded: Loaded, prompt: Prompt) -> DynamicCache:
        """As `workers.c2c_run.read_sharer`."""


class Anew:
    """Computes each time."""

    def read(self, loaded: Loaded, ids: Sequence[int]) -> KVCache:
        return read(loaded, ids)

    def read_sharer(self, loaded: Loaded, prompt: Prompt) -> DynamicCache:
        return read_sharer(loaded.model, prompt)


ANEW = Anew()


class Trainable(Protocol):
    """A fuser whose weights may change."""

    needs_own: bool

    @property
    def net(self) -> nn.Module:
        """The weights."""

    def project(self, source: KVCache, own: KVCache | None, start: int) -> KVCache:
        """As `workers.fusers.base.Fuser`; differentiable."""

    def change(self) -> Change:
        """Gates as they stand."""

    def calibrate(self, seen: Sequence[Slots]) -> None:
        """Before the first step: some contexts as both models have read them."""

    def train(self, mode: bool = True) -> None:
        """As torch modules."""

    def anneal(self, step: int) -> None:
        """`step` steps are done."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long and how fast to learn."""

    steps: int
    rate: float = 2e-4
    warmup: int = 10
    floor: float = 0.1
    """Share of `rate` that is left at the end of the cosine."""
    weight_decay: float = 0.0
    clip: float = 1.0
    calibrate: int = 12
    """Contexts read for the mean and deviation of KV; 0 leaves those that the fuser has."""
    batch: int = 1
    """Lessons in a step."""
    decay: Literal["cosine", "linear"] = "cosine"
    """`linear` is the official method's: from nothing up and down to nothing."""
    betas: tuple[float, float] = (0.9, 0.99)
    seed: int = 0
    """Of dropout and of the gates' noise."""
    muon: float = 0.0
    """Rate of the matrices, which Muon learns instead of AdamW; 0 leaves all to AdamW."""
    dropout: float = 0.0
    """Of the general network: share of its inputs that are left out, drawn anew for each lesson."""

    def rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to the floor; or linear both ways."""
        if self.decay == "linear":
            left = (self.steps - step) / max(1, self.steps - self.warmup)
            return self.rate * (step / self.warmup if step < self.warmup else max(0.0, left))
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (self.floor + (1 - self.floor) * (1 + math.cos(math.pi * min(1.0, done))) / 2)


@dataclass(frozen=True, slots=True)
class Progress:
    """After one step; `loss` is smoothed over about twenty steps."""

    step: int
    steps: int
    loss: float
    left_s: float
    gates_open: float = 1.0

    def __str__(self) -> str:
        gates = f"  gates {self.gates_open:.0%} open" if self.gates_open < 1 else ""
        return f"step {self.step}/{self.steps}  loss {self.loss:.3f}{gates}  {self.left_s:.0f} s left"


class Trainer:
    """Holds the fuser's optimiser between steps; the fuser it is given is trained in place.

    `team`: the processes that share each batch. All of them call the same methods in the same order; what comes out is
    the same in all, and that of one process but for the order of sums.
    """

    def __init__(
        self,
        sharer: Loaded,
        receiver: Loaded,
        fuser: Trainable,
        lessons: Lessons,
        recipe: Recipe,
        reads: Reads = ANEW,
        team: Team = ALONE,
    ) -> None:
        self.sharer, self.receiver, self.fuser = sharer, receiver, fuser
        self.lessons, self.recipe, self.reads, self.team = lessons, recipe, reads, team
        self.step = 0
        self.smooth = 0.0
        """The loss, smoothed over about twenty steps."""
        self.tokens = 0
        """Learnt from in all steps, also those of earlier processes: contexts, questions and answers."""
        self.earlier_s = 0.0
        """What earlier processes took up to the checkpoint that this one goes on from."""
        self._made_at = time.monotonic()
        self.fuser.net.requires_grad_(True)
        self._parameters = list(fuser.net.parameters())
        self._optimizers = _optimizers(fuser.net, recipe)
        self._began: tuple[float, int] | None = None

    def run(self, until: int | None = None, tell: Callable[[Progress], None] | None = None) -> float:
        """Steps from where it stands to `until` (default: all). Returns the smoothed loss."""
        end = min(self.recipe.steps, until if until is not None else self.recipe.steps)
        began, first = self._begin()
        self.fuser.train()
        while self.step < end:
            loss = self._learn()
            self.step += 1
            if not math.isfinite(loss):
                raise self._diverged()
            self.smooth += (loss - self.smooth) / min(20, self.step)
            if tell is not None:
                pace = (time.monotonic() - began) / (self.step - first)
                left = pace * (self.recipe.steps - self.step)
                tell(Progress(self.step, self.recipe.steps, self.smooth, left, self.fuser.change().gates_open))
        self.fuser.train(False)
        # The loss of a step is that of the weights before it.
        if not all(bool(t.isfinite().all()) for t in self._parameters):
            raise self._diverged()
        return self.smooth

    def _diverged(self) -> LoadFailed:
        return LoadFailed(f"the training diverged at step {self.step}: it computes no numbers; begin with a lower rate")

    def _begin(self) -> tuple[float, int]:
        """When, and at which step, this process went to work."""
        if self._began is None:
            self._began = time.monotonic(), self.step
            if self.step == 0 and self.recipe.calibrate and self.team.rank == 0:
                self._calibrate()
            self.team.follow(list(self.fuser.net.state_dict().values()))
        return self._began

    def _calibrate(self) -> None:
        found = [self.lessons(i) for i in range(self.recipe.calibrate)]
        # The general network begins at what maps the one's KV to the other's.
        own = self.fuser.needs_own or isinstance(self.fuser, MixFuser)
        self.fuser.calibrate([self._slots(one, own=own) for one in found if isinstance(one, Lesson)])

    def _learn(self) -> float:
        rate = self.recipe.rate_at(self.step) / self.recipe.rate
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * rate
            optimizer.zero_grad(set_to_none=True)
        numbers = range(self.step * self.recipe.batch, (self.step + 1) * self.recipe.batch)
        lessons = [(number, self.lessons(number)) for number in numbers]
        supervised = sum(_supervised(lesson) for _, lesson in lessons)
        total = torch.zeros(1, device=self.receiver.device)
        with torch.random.fork_rng([self.receiver.device] if self.receiver.device.type == "cuda" else []):
            for loss in self.losses(self.team.share(lessons), supervised):
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        self.team.add_gradients(self._parameters)
        self.team.add([total])
        torch.nn.utils.clip_grad_norm_(self._parameters, self.recipe.clip)
        for optimizer in self._optimizers:
            optimizer.step()
        self.fuser.anneal(self.step + 1)
        self.tokens += sum(_tokens(lesson) for _, lesson in lessons)
        return float(total)

    def losses(self, lessons: Sequence[tuple[int, Lesson | AlignedLesson]], supervised: int) -> Iterator[torch.Tensor]:
        """Parts of a step's loss, for lessons with their numbers. Every supervised token of a step weighs the same,
        whatever lesson it is in; `supervised` says how many there are.
        """
        if isinstance(self.fuser, MixFuser):
            own = self.fuser.needs_own
            numbers = (number for number, lesson in lessons if isinstance(lesson, Lesson))
            for group in grouped([lesson for _, lesson in lessons if isinstance(lesson, Lesson)]):
                slots = [self._slots(lesson, own=own) for lesson in group]
                keep = self._keep(self.fuser, slots, list(islice(numbers, len(group))))
                yield summed_loss(self.receiver, self.fuser, group, slots, keep) / supervised
            return
        for number, lesson in lessons:
            torch.manual_seed(self._chance(number))
            yield self.loss(lesson) * (_supervised(lesson) / supervised)

    def _chance(self, number: int) -> int:
        """By lesson: what is drawn for it does not depend on who learns it, and after what."""
        return self.recipe.seed * 1_000_003 + number

    def _keep(self, fuser: MixFuser, slots: Sequence[Slots], numbers: Sequence[int]) -> torch.Tensor | None:
        if not (share := self.recipe.dropout):
            return None
        lessons = zip(slots, numbers, strict=True)
        return torch.cat([fuser.keep(one, share, self._chance(number)) for one, number in lessons])

    def loss(self, lesson: Lesson | AlignedLesson) -> torch.Tensor:
        """Mean cross-entropy of the answers; of a lesson every batch of questions weighs the same."""
        if isinstance(lesson, AlignedLesson):
            return self._aligned_loss(lesson.aligned)
        slots = self._slots(lesson, own=self.fuser.needs_own)
        if lesson.heard is None:
            kv = self.fuser.project(slots.source, slots.own, 0)
        elif isinstance(self.fuser, MixFuser):
            kv = self.fuser.project(slots.source, slots.own, 0, slots.heard_at)
        else:
            raise LoadFailed("only the general lite fuser is trained on two readings of a chat")
        return torch.stack([answer_loss(self.receiver, kv, batch) for batch in lesson.batches]).mean()

    def _slots(self, lesson: Lesson, *, own: bool) -> Slots:
        """The lesson's context as the models have read it."""
        ours = self.reads.read(self.receiver, lesson.context) if own else None
        if lesson.heard is None:
            return Slots.of(self.reads.read(self.sharer, lesson.context), ours, 0)
        places = torch.tensor(lesson.heard.places, device=self.receiver.device)
        return Slots.of(self.reads.read(self.sharer, lesson.heard.ids).pick(places), ours, 0, places)

    def _aligned_loss(self, aligned: Aligned) -> torch.Tensor:
        if not isinstance(self.fuser, C2CFuser):
            raise LoadFailed("only a c2c fuser is trained between two tokenizers")
        device = self.receiver.device
        batch = Batch(aligned_prompt(aligned, device), torch.tensor([aligned.labels], device=device))
        read = self.reads.read_sharer(self.sharer, batch.prompt)
        return batch_loss(self.receiver.model, [Sharer(self.sharer.model, self.fuser)], batch, read=read).loss

    def checkpoint(self, file: Path) -> None:
        """Everything needed to go on later. Raises LoadFailed, and the one before is then still there."""
        state = {
            "step": self.step,
            "smooth": self.smooth,
            "tokens": self.tokens,
            "seconds": self.earlier_s + time.monotonic() - self._made_at,
            "net": self.fuser.net.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }
        with replacing(file, RuntimeError) as aside, aside.open("wb") as written:
            torch.save(state, written)

    def resume(self, file: Path) -> None:
        """Go on from a checkpoint of the same shape. Raises LoadFailed."""
        try:
            state = torch.load(file, weights_only=True, map_location="cpu")
            self.fuser.net.load_state_dict(state["net"])
            for optimizer, kept in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
            self.step, self.smooth = int(state["step"]), float(state["smooth"])
            self.tokens, self.earlier_s = int(state["tokens"]), float(state["seconds"])
            self.fuser.train(False)  # digest and gates are those of the weights, also where no step is left
        except (OSError, KeyError, RuntimeError, ValueError) as error:
            raise LoadFailed(f"{file}: no checkpoint of this fuser ({error})") from error


def _optimizers(net: nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon for matrices where the recipe has a rate for it."""
    matrices = [p for p in net.parameters() if p.ndim == 2 and recipe.muon]
    others = [p for p in net.parameters() if not (p.ndim == 2 and recipe.muon)]
    made: list[torch.optim.Optimizer] = []
    if others:
        decay = recipe.weight_decay
        made.append(torch.optim.AdamW(others, lr=recipe.rate, betas=recipe.betas, weight_decay=decay))
    if matrices:
        made.append(Muon(matrices, lr=recipe.muon, weight_decay=recipe.weight_decay))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return made


def _supervised(lesson: Lesson | AlignedLesson) -> int:
    if isinstance(lesson, AlignedLesson):
        return sum(label >= 0 for label in lesson.aligned.labels)
    return sum(len(ask.answer) for batch in lesson.batches for ask in batch)


def _tokens(lesson: Lesson | AlignedLesson) -> int:
    if isinstance(lesson, AlignedLesson):
        return len(lesson.aligned.receiver_ids)
    asked = sum(len(ask.rest) + len(ask.answer) for batch in lesson.batches for ask in batch)
    return len(lesson.context) + asked


def answer_loss(receiver: Loaded, kv: KVCache, asks: Sequence[Ask]) -> torch.Tensor:
    """Mean cross-entropy over all answer tokens, with the receiver reading the questions over `kv`."""
    logits = answer_logits(receiver, kv, [ask.rest for ask in asks], [ask.answer for ask in asks])
    wanted = torch.tensor([token for ask in asks for token in ask.answer], device=logits.device)
    return F.cross_entropy(logits.float(), wanted)
