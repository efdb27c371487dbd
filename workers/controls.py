"""The adapter control: a pair's fuser made again, on the same items in the same way, with a sharer that says nothing.

What such a fuser still gains is not the sharer's doing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from workers.config import Fleet, ModelConfig, PairConfig
from workers.counterfactual import otherwise
from workers.errors import LoadFailed
from workers.fusers.linear import LinearFuser, LinearShape
from workers.items import Item, digest_of_items
from workers.kept import KEEP_BYTES, keeping
from workers.loader import Loaded, Loader
from workers.pairing import hold_pair
from workers.pairs import PairFile, Training
from workers.plan import Plan
from workers.runtime import Paired, Runtime
from workers.train_pair import fit_pair, train_pair


def adapter(
    file: PairFile, sharer: Loaded, receiver: Loaded, items: Sequence[Item], place: Path, chunk: int
) -> Runtime:
    """Runs like the pair, with its sharer silent. `place` is an empty folder that outlives it. Raises LoadFailed: a
    pair that was not trained by `twolane pair train`, or on other items.
    """
    training = _training(file)
    if training.data != digest_of_items(items):
        raise LoadFailed(f"pair {file.name}: was trained on other items than those of --train-data")
    plan = Plan(**training.options)
    if plan.kind == "linear":
        return _linear(file, sharer, receiver, items, plan, chunk)
    with keeping(KEEP_BYTES) as kept:
        train_pair(place / "adapter", "adapter", sharer, receiver, items, plan, reads=kept, deaf=True)
    known = _Known(sharer, receiver)
    config = PairConfig(name="adapter", fuser=str(place / "adapter"), sharer=known.sharer, receiver=known.receiver)
    return otherwise(hold_pair(Fleet(models=(), pairs=(config,)), config, known, None, chunk).runtime, "zero", None)


def _training(file: PairFile) -> Training:
    if file.others:
        raise LoadFailed(f"pair {file.name}: has several sharers, and those are not trained here")
    if file.training is None:
        raise LoadFailed(f"pair {file.name}: its pair.json does not say how its fuser was trained")
    return file.training


def _linear(file: PairFile, sharer: Loaded, receiver: Loaded, items: Sequence[Item], plan: Plan, chunk: int) -> Runtime:
    """In the layers that are open in the pair, and as far: of a silent sharer no layer would pass the screen."""
    theirs = LinearShape.read(file.fuser.shape)
    fitted = fit_pair(sharer, receiver, items, plan, deaf=True)
    shape = replace(fitted.shape, cosine=theirs.cosine, least=theirs.least, blend=theirs.blend)
    fuser = LinearFuser(shape, fitted.tensors, mode=plan.mode, dtype=receiver.dtype)
    pair = Paired("adapter", sharer, receiver, fuser, mode=plan.mode, scope=plan.scope, store=None, chunk=chunk)
    return pair.with_source(lambda _: None)


class _Known(Loader):
    """Gives out two models that are loaded already."""

    def __init__(self, sharer: Loaded, receiver: Loaded) -> None:
        super().__init__(str(receiver.device))
        # Two names, also where both are one model with other layers.
        self.sharer, self.receiver = (ModelConfig(name=name, model=name) for name in ("sharer", "receiver"))
        self._known = {"sharer": sharer, "receiver": receiver}

    def load(self, config: ModelConfig) -> Loaded:
        return self._known[config.model]
