"""A report as two SVG pictures: accuracy by kind and route, and where the time of relay and cache goes."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from benchmarks.mini_world.world import KINDS

_COLOURS = {
    "receiver": "#7a9e7e",
    "sharer": "#b9cdb0",
    "relay": "#d98e4a",
    "cache": "#1b6ca8",
    "shuffled": "#9a9a9a",
    "zero": "#d0d0d0",
}
_SHADES = ("#0f4c7a", "#1b6ca8", "#5f9fce", "#b3d1e8")


def accuracy(report: Mapping[str, Any]) -> str:
    """Bars by kind; the whisker is one standard deviation over worlds."""
    routes = list(report["mean"])
    groups = [(f"{kind}", report["per_kind"][kind], report["per_kind_sd"][kind]) for kind in KINDS]
    groups.append(("average", report["mean"], report["sd"]))
    step, high, left, top = 16, 200, 44, 56
    parts = [_text(8, 20, f"Mini world: exact answers by route, {len(report['seeds'])} worlds", 14)]
    for number, route in enumerate(routes):
        x = left + number * 92
        parts += [_box(x, 30, 11, 11, _COLOURS[route]), _text(x + 15, 40, route, 12)]
    for tenth in range(0, 11, 2):
        y = top + high * (1 - tenth / 10)
        parts += [f'<path d="M{left} {y:.1f}h560" stroke="#ddd"/>', _text(8, y + 4, f"{tenth / 10:.1f}", 11)]
    for place, (name, means, sds) in enumerate(groups):
        start = left + 8 + place * (len(routes) * step + 14)
        for number, route in enumerate(routes):
            parts += _bar(start + number * step, top, high, means[route], sds[route], _COLOURS[route])
        parts.append(_text(start, top + high + 18, name, 12))
    return _svg(620, top + high + 30, "accuracy by kind and route", parts)


def latency(report: Mapping[str, Any]) -> str:
    """One stacked bar each."""
    longest = max(sum(split.values()) for split in report["split_ms"].values())
    told = f"Mini world: where one answer's time goes; relay takes {report['latency_ratio']:.2f} times as long"
    parts = [_text(8, 20, told, 14)]
    for row, route in enumerate(("relay", "cache")):
        x, y = 60.0, 36 + row * 62
        parts.append(_text(8, y + 20, route, 12))
        for shade, (part, ms) in zip(_SHADES, report["split_ms"][route].items(), strict=False):
            width = 540 * ms / longest
            parts.append(_box(x, y, width, 28, shade))
            parts.append(_text(x, y + (42 if _SHADES.index(shade) % 2 == 0 else 54), f"{part} {ms:.1f} ms", 11))
            x += width
    return _svg(620, 168, "time of relay and cache by part", parts)


def _bar(x: float, top: float, high: float, value: float, sd: float, colour: str) -> list[str]:
    y, up, down = (top + high * (1 - min(1.0, max(0.0, v))) for v in (value, value + sd, value - sd))
    whisker = f'<path d="M{x + 6:.1f} {up:.1f}V{down:.1f}" stroke="black"/>' if sd else ""
    return [_box(x, y, 12, high * value, colour), whisker]


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, size: int) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}">{escape(text)}</text>'


def _svg(width: int, height: float, title: str, parts: list[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" width="{width}" role="img" '
        f'font-family="sans-serif"><title>{escape(title)}</title><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )
