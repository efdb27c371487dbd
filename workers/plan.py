"""How a fuser is to be trained, and what cannot be: by the plan alone, then by the two models."""

from __future__ import annotations

from dataclasses import dataclass, replace

from workers import vocabulary
from workers.errors import LoadFailed
from workers.fusers import lite
from workers.loader import Loaded
from workers.train import Recipe

MODES = {"c2c": ("fuse",), "lite": ("handover", "fuse"), "linear": ("handover", "fuse")}
"""By kind of fuser, the one that is taken when none is named first."""


_GENERAL = ("muon", "hidden", "last", "deepest", "dropout")
"""Options of the general lite network alone."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be trained. All of it changes the result, so all of it must be the same to go on."""

    kind: str
    mode: str
    scope: str
    steps: int = 300
    seed: int = 0
    batch: int = 1
    rate: float = 0.0
    """0 takes the kind's own: 1e-4 for c2c, 2.5e-4 for lite's first network, 1e-2 for the general one."""
    muon: float | None = None
    """Rate of matrices by Muon; 0 leaves them to AdamW, None takes the kind's own: 0.02 in general lite."""
    rank: int = 48
    """Of lite."""
    hidden: int = 0
    """Of the general lite network: width of the block on its code; 0 leaves it linear."""
    last: int = 0
    """Of the general lite network in `fuse`: slots that are changed; 0 changes all."""
    deepest: int = 0
    """Of the general lite network: sharer layers that are read, counted from the end; 0 reads all."""
    dropout: float = 0.0
    """Of the general lite network: share of its inputs that are left out while it is trained."""
    add_only: bool = False
    """Of lite in `fuse`: the receiver's own KV is added to, and not read."""
    width: int = 1024
    """Of c2c: hidden and intermediate."""
    tokens: int = 20_000
    """Read by linear."""
    most: int = 1024
    """Tokens of one item, at most."""

    def recipe(self, *, general: bool = False) -> Recipe:
        """The official one for c2c; lite's own, for its first network or the `general` one."""
        if self.kind == "c2c":
            return Recipe(
                self.steps,
                rate=self.rate or 1e-4,
                warmup=max(1, self.steps // 10),
                weight_decay=0.01,
                batch=self.batch,
                decay="linear",
                betas=(0.9, 0.999),
                calibrate=0,
                seed=self.seed,
            )
        warmup = min(10, max(1, self.steps // 10))
        recipe = Recipe(self.steps, rate=self.rate or 2.5e-4, warmup=warmup, batch=self.batch, seed=self.seed)
        if not general:
            return recipe
        muon = 2e-2 if self.muon is None else self.muon
        return replace(recipe, rate=self.rate or 1e-2, muon=muon, calibrate=64, dropout=self.dropout)


def refuse(plan: Plan, sharer: Loaded, receiver: Loaded) -> bool:
    """Whether the two tokenizers name tokens differently. Raises LoadFailed for what cannot be trained."""
    if plan.mode not in MODES[plan.kind]:
        raise LoadFailed(f"a {plan.kind} fuser runs in mode {' or '.join(MODES[plan.kind])}, not {plan.mode}")
    if plan.add_only and (plan.kind, plan.mode) != ("lite", "fuse"):
        raise LoadFailed(f"only a lite fuser in mode fuse can be add-only, not a {plan.kind} fuser in mode {plan.mode}")
    for role, model in (("sharer", sharer), ("receiver", receiver)):
        if model.tokenizer.chat_template is None:
            raise LoadFailed(f"the {role} has no chat template, so chats cannot be learnt from")
    foreign = _foreign(plan, sharer, receiver)
    _refuse_idle(plan, sharer, general=is_general(plan, sharer, receiver, foreign=foreign))
    return foreign


def is_general(plan: Plan, sharer: Loaded, receiver: Loaded, *, foreign: bool) -> bool:
    """A lite fuser is of the general network, except in handover where the sharer's KV can be copied."""
    return plan.kind == "lite" and (plan.mode == "fuse" or foreign or not lite.fits(sharer.shape, receiver.shape))


def _foreign(plan: Plan, sharer: Loaded, receiver: Loaded) -> bool:
    if sharer.digests.tokenizer == receiver.digests.tokenizer:
        return False
    overlap = vocabulary.compare(receiver.tokenizer.get_vocab(), sharer.tokenizer.get_vocab(), sharer.vocab)
    if overlap.ids_pass:
        return False
    if plan.kind == "linear":
        raise LoadFailed(f"a linear fuser needs one tokenizer on both sides (c2c and lite do not), and {overlap}")
    if plan.kind == "c2c" and plan.scope != "prompt":
        raise LoadFailed(f"two tokenizers are aligned over the whole prompt; the scope is prompt, not {plan.scope}")
    return True


def _refuse_idle(plan: Plan, sharer: Loaded, *, general: bool) -> None:
    """Options that would change nothing: whoever gives them believes that they do."""
    if general:
        if plan.rank < 1:
            raise LoadFailed("--rank 0 leaves nothing of this lite fuser, which reads through its rank alone")
        if plan.deepest > sharer.shape.layers:
            raise LoadFailed(f"--deepest {plan.deepest}: the sharer has {sharer.shape.layers} layers")
        if plan.last and plan.mode == "handover":
            raise LoadFailed("--last is for mode fuse: in handover every slot is written")
        return
    if given := [f"--{name}" for name in _GENERAL if getattr(plan, name)]:
        which = f"{plan.kind} fuser"
        if plan.kind == "lite":
            which += " in handover, between models whose KV has one size and that share their tokens,"
        raise LoadFailed(f"a {which} has no use for {', '.join(given)}; a lite fuser in mode fuse has")
