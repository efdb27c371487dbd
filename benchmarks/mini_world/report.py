"""Several worlds' outcomes -> the report, as one JSON object and as a table. Knows no torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.mini_world.world import KINDS

PAPER = ("cache > receiver", "cache > sharer", "cache >= relay", "shuffled at the receiver's level", "2.5x faster")
_LEVEL = 0.1
"""How far the shuffled control may lie from the receiver, averaged over the kinds."""


def report_of(worlds: Sequence[Mapping[str, Any]], *, date: str, fuser: Mapping[str, Any]) -> dict[str, Any]:
    """`worlds` as `__main__` writes them, one for each seed."""
    routes = list(worlds[0]["mean"])
    ratios = [w["latency_ms"]["relay"] / w["latency_ms"]["cache"] for w in worlds]
    return {
        "seeds": [w["seed"] for w in worlds],
        "mean": {r: _mean(w["mean"][r] for w in worlds) for r in routes},
        "sd": {r: _sd(w["mean"][r] for w in worlds) for r in routes},
        "per_kind": {k: {r: _mean(w["per_kind"][k][r] for w in worlds) for r in routes} for k in KINDS},
        "per_kind_sd": {k: {r: _sd(w["per_kind"][k][r] for w in worlds) for r in routes} for k in KINDS},
        "latency_ratio": round(mean(ratios), 2),
        "latency_ratios": [round(r, 2) for r in ratios],
        "latency_ms": {r: _mean(w["latency_ms"][r] for w in worlds) for r in routes},
        "split_ms": {
            route: {part: _mean(w["split_ms"][route][part] for w in worlds) for part in worlds[0]["split_ms"][route]}
            for route in ("cache", "relay")
        },
        "holds": {claim: [_holds(w)[claim] for w in worlds] for claim in PAPER},
        "fuser": {**fuser, "cpu_s": [w["fuser_cpu_s"] for w in worlds]},
        "gates": [w["gates"] for w in worlds],
        "verdicts": [f"{w['verdict']}: {w['reason']}" for w in worlds],
        "questions": worlds[0]["questions"],
        "date": date,
        "machine": machine(),
    }


def _holds(world: Mapping[str, Any]) -> dict[str, bool]:
    """What is claimed, in one world."""
    m, ms = world["mean"], world["latency_ms"]
    said = (
        m["cache"] > m["receiver"],
        m["cache"] > m["sharer"],
        m["cache"] >= m["relay"],
        m["shuffled"] <= m["receiver"] + _LEVEL,
        ms["relay"] / ms["cache"] >= 2.5,
    )
    return dict(zip(PAPER, said, strict=True))


def machine() -> dict[str, Any]:
    """What the times depend on."""
    from torch import __version__ as torch_version

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": name or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": 1,
        "torch": torch_version,
        "python": platform.python_version(),
    }


def table(report: Mapping[str, Any]) -> str:
    """For people."""
    routes, wide = list(report["mean"]), 15
    lines = [f"{'':10}" + "".join(f"{kind:>{wide}}" for kind in (*KINDS, "average"))]
    for route in routes:
        cells = [(report["per_kind"][k][route], report["per_kind_sd"][k][route]) for k in KINDS]
        cells.append((report["mean"][route], report["sd"][route]))
        lines.append(f"{route:10}" + "".join(f"{f'{value:.3f} ± {sd:.3f}':>{wide}}" for value, sd in cells))
    lines.append("")
    for route, parts in report["split_ms"].items():
        told = " + ".join(f"{part} {ms:.1f}" for part, ms in parts.items())
        lines.append(f"{route} {report['latency_ms'][route]:.1f} ms = {told}")
    lines.append(f"relay / cache: {report['latency_ratio']:.2f} ({', '.join(map(str, report['latency_ratios']))})")
    for claim, held in report["holds"].items():
        lines.append(f"{claim}: in {sum(held)} of {len(held)} worlds")
    return "\n".join(lines)


def _mean(values: Any) -> float:
    return round(mean(values), 4)


def _sd(values: Any) -> float:
    listed = list(values)
    return round(stdev(listed), 4) if len(listed) > 1 else 0.0
