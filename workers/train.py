"""Trains a fuser for handover: both models stay frozen, and the loss is on the receiver's answers.

One step is one lesson: a context that the sharer reads once, and several questions that the receiver answers over the
projected KV. Lessons are asked for by step number, so that a run that was stopped goes on with the same ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from workers.cache import KVCache
from workers.errors import LoadFailed
from workers.fusers.lite import LiteFuser
from workers.greedy import answer_logits, read
from workers.loader import Loaded
from workers.pairs import FORMAT, FuserInfo, PairFile, Party, write


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


Lessons = Callable[[int], Lesson]
"""By step number, from 0; the same number gives the same lesson."""


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
    """Contexts read for the mean and deviation of the sharer's KV."""

    def rate_at(self, step: int) -> float:
        """Linear warm-up, then a cosine down to the floor."""
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

    def __str__(self) -> str:
        return f"step {self.step}/{self.steps}  loss {self.loss:.3f}  {self.left_s:.0f} s left"


class Trainer:
    """Holds the fuser's optimiser between steps; the fuser it is given is trained in place."""

    def __init__(self, sharer: Loaded, receiver: Loaded, fuser: LiteFuser, lessons: Lessons, recipe: Recipe) -> None:
        self.sharer, self.receiver, self.fuser = sharer, receiver, fuser
        self.lessons, self.recipe = lessons, recipe
        self.step = 0
        self.fuser.net.requires_grad_(True)
        self._optimizer = torch.optim.AdamW(
            fuser.net.parameters(), lr=recipe.rate, betas=(0.9, 0.99), weight_decay=recipe.weight_decay
        )

    def run(self, until: int | None = None, tell: Callable[[Progress], None] | None = None) -> float:
        """Steps from where it stands to `until` (default: all). Returns the smoothed loss."""
        end = min(self.recipe.steps, until if until is not None else self.recipe.steps)
        if self.step == 0:
            contexts = (self.lessons(i).context for i in range(self.recipe.calibrate))
            self.fuser.net.standardise([read(self.sharer, context) for context in contexts])
        began, first, smooth = time.monotonic(), self.step, 0.0
        while self.step < end:
            loss = self._learn(self.lessons(self.step))
            self.step += 1
            smooth = loss if self.step == first + 1 else smooth + (loss - smooth) / min(20, self.step - first)
            if tell is not None:
                pace = (time.monotonic() - began) / (self.step - first)
                tell(Progress(self.step, self.recipe.steps, smooth, pace * (self.recipe.steps - self.step)))
        return smooth

    def _learn(self, lesson: Lesson) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self.recipe.rate_at(self.step)
        source = read(self.sharer, lesson.context)
        kv = self.fuser.project(source, None, 0)
        loss = torch.stack([answer_loss(self.receiver, kv, batch) for batch in lesson.batches]).mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.fuser.net.parameters(), self.recipe.clip)
        self._optimizer.step()
        return float(loss.detach())

    def checkpoint(self, file: Path) -> None:
        """Everything needed to go on later; written aside and renamed."""
        aside = file.with_suffix(".tmp")
        state = {"step": self.step, "net": self.fuser.net.state_dict(), "optimizer": self._optimizer.state_dict()}
        torch.save(state, aside)
        aside.rename(file)

    def resume(self, file: Path) -> None:
        """Go on from a checkpoint of the same shape. Raises LoadFailed."""
        try:
            state = torch.load(file, weights_only=True)
            self.fuser.net.load_state_dict(state["net"])
            self._optimizer.load_state_dict(state["optimizer"])
            self.step = int(state["step"])
        except (OSError, KeyError, RuntimeError, ValueError) as error:
            raise LoadFailed(f"{file}: no checkpoint of this fuser ({error})") from error


def answer_loss(receiver: Loaded, kv: KVCache, asks: Sequence[Ask]) -> torch.Tensor:
    """Mean cross-entropy over all answer tokens, with the receiver reading the questions over `kv`."""
    logits = answer_logits(receiver, kv, [ask.rest for ask in asks], [ask.answer for ask in asks])
    wanted = torch.tensor([token for ask in asks for token in ask.answer], device=logits.device)
    return F.cross_entropy(logits.float(), wanted)


def publish(
    folder: Path,
    name: str,
    sharer: Loaded,
    receiver: Loaded,
    fuser: FuserInfo,
    *,
    mode: str,
    scope: str,
    made: str,
    licence: str | None = None,
    data_licence: str | None = None,
    others: Sequence[Loaded] = (),
) -> PairFile:
    """Write `pair.json`: the models by their digests, and the fuser. `licence` is that of all models; `others` are the
    sharers after the first.
    """
    pair = PairFile(
        format=FORMAT,
        name=name,
        mode=mode,
        scope=scope,
        sharer=_party(sharer, licence),
        receiver=_party(receiver, licence),
        fuser=fuser,
        others=tuple(_party(model, licence) for model in others),
        made=made,
        data_licence=data_licence,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, "pair.json", pair)
    return pair


def _party(loaded: Loaded, licence: str | None) -> Party:
    identity = loaded.identity
    return Party(
        model=loaded.source,
        weights=loaded.digests.weights,
        tokenizer=loaded.digests.tokenizer,
        template=loaded.digests.template,
        dtype=identity["dtype"],
        layers=identity["layers"],
        licence=licence,
    )
