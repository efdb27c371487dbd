"""The fusers that are tried on a mini world, and a table of what each costs and reaches on validation entities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.mini_world.measure import ask, fit
from benchmarks.mini_world.prepare import Prepared
from benchmarks.mini_world.world import KINDS
from workers.errors import LoadFailed
from workers.items import read_items
from workers.plan import Plan

_C2C = Plan("c2c", "fuse", "prompt", steps=300, batch=16)
_LITE = Plan(
    "lite",
    "fuse",
    "prompt",
    steps=300,
    batch=64,
    rank=64,
    hidden=128,
    last=1,
    deepest=2,
    dropout=0.3,
    rate=3e-3,
    add_only=True,
)
ALL: dict[str, Plan] = {
    "c2c": _C2C,
    "linear": Plan("linear", "fuse", "prompt"),
    "lite": _LITE,
    "lite, own KV read": replace(_LITE, add_only=False),
    "lite, linear": replace(_LITE, hidden=0),
    "lite, all slots": replace(_LITE, last=0),
    "lite, the deepest layer": replace(_LITE, deepest=1),
    "lite, all sharer layers": replace(_LITE, deepest=0),
    "lite, no dropout": replace(_LITE, dropout=0.0),
}
CHOSEN: dict[str, Plan] = {"c2c": _C2C, "lite": _LITE}
"""By kind, what the report is made with."""
DEFAULT = "lite"


def quickly(plan: Plan) -> Plan:
    """The same, small enough to see whether it runs."""
    return replace(plan, steps=2, batch=2, width=16, rank=4, hidden=min(plan.hidden, 8))


def compare(place: Prepared, names: Sequence[str], *, quick: bool, tell: Callable[[str], None]) -> None:
    """One row each. A fuser that cannot stand between these models says why."""
    items = read_items(place.data("validation"))
    wide = max(map(len, ALL)) + 2
    tell(f"{'':{wide}}{'parameters':>12}{'CPU s':>8}" + "".join(f"{kind:>7}" for kind in KINDS) + f"{'average':>9}")
    for name in names or ALL:
        plan = quickly(ALL[name]) if quick else ALL[name]
        try:
            fitted = fit(place, f"variant-{name.replace(' ', '-')}", plan, lambda _: None)
        except LoadFailed as error:
            tell(f"{name:{wide}}{error}")
            continue
        outcome = ask(fitted, items, date="", seed=plan.seed, relay=False)
        cells = "".join(f"{outcome.per_kind[kind]['cache']:>7.3f}" for kind in KINDS)
        tell(f"{name:{wide}}{fitted.parameters:>12}{fitted.cpu_s:>8.0f}{cells}{outcome.mean['cache']:>9.3f}")
