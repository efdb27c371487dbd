"""A report as one SVG picture: accuracy by route with intervals, and how far fusing moves each layer. Torch-free."""

from __future__ import annotations

from html import escape

from workers.pairs import Interval, Report

ORDER = ("receiver", "sharer", "reads_all", "relay", "cache", "no_context", "shuffled", "zero", "adapter", "baseline")
_WIDTH, _ROW, _LEFT, _PLOT = 640, 24, 110, 440
_COLOUR = {"cache": "#1b6ca8", "shuffled": "#b0b0b0", "zero": "#b0b0b0", "adapter": "#b0b0b0"}


def picture(report: Report) -> str:
    """Whole SVG text; readable without colour, and by a screen reader through its title."""
    rows = [(route, report.accuracy[route]) for route in ORDER if route in report.accuracy]
    parts = [_text(10, 22, f"{report.verdict}: {report.reason}", 13)]
    parts.append(_text(10, 42, f"n {report.n}, {report.date}, {report.numerics}", 11))
    y = 60
    for route, interval in rows:
        parts += _bar(y, route, interval)
        y += _ROW
    for name, ratios in (("K", report.change_k), ("V", report.change_v)):
        if ratios:
            parts += _layers(y + 20, name, ratios)
            y += 90
    title = f"<title>{escape(report.verdict)}: accuracy by route</title>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 20}" width="{_WIDTH}" role="img" '
        f'font-family="sans-serif">{title}<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _bar(y: int, route: str, interval: Interval) -> list[str]:
    colour = _COLOUR.get(route, "#7a9e7e")
    low, high = (_LEFT + _PLOT * share for share in (interval.low, interval.high))
    return [
        _text(10, y + 14, route, 12),
        f'<rect x="{_LEFT}" y="{y + 3}" width="{_PLOT * interval.value:.1f}" height="15" fill="{colour}"/>',
        f'<path d="M{low:.1f} {y + 10.5}H{high:.1f}M{low:.1f} {y + 6}v9M{high:.1f} {y + 6}v9" stroke="black"/>',
        _text(_LEFT + _PLOT + 12, y + 14, f"{interval.value:.3f}", 12),
    ]


def _layers(y: int, name: str, ratios: tuple[float, ...]) -> list[str]:
    most, step = max(*ratios, 1e-9), min(24.0, _PLOT / len(ratios))
    bars = [
        f'<rect x="{_LEFT + i * step:.1f}" y="{y + 60 - 55 * ratio / most:.1f}" width="{step * 0.8:.1f}" '
        f'height="{55 * ratio / most:.1f}" fill="#1b6ca8"/>'
        for i, ratio in enumerate(ratios)
    ]
    told = _text(10, y + 30, f"change of {name}", 12) + _text(10, y + 46, f"by layer, to {most:.3g}", 11)
    return [told, *bars, f'<path d="M{_LEFT} {y + 60}h{step * len(ratios):.1f}" stroke="black"/>']


def _text(x: float, y: float, text: str, size: int) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}">{escape(text)}</text>'
