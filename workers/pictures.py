"""A report as one picture: accuracy by route with intervals, and how far fusing moves each layer. Torch-free.

SVG is written here; PNG is drawn by Pillow, with the font that it carries, so that no machine lacks one.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import Any, assert_never

from workers.errors import LoadFailed
from workers.pairs import Interval, Report, is_sharer, shown

ORDER = ("receiver", "sharer", "reads_all", "relay", "cache", "no_context", "shuffled", "zero", "adapter", "baseline")
_WIDTH, _ROW, _LEFT, _PLOT = 640, 24, 110, 440
_COLOUR = {"cache": "#1b6ca8", "shuffled": "#b0b0b0", "zero": "#b0b0b0", "adapter": "#b0b0b0"}
_SCALE = 2
"""Pixels of the PNG for one unit of the SVG."""


@dataclass(frozen=True, slots=True)
class _Bar:
    x: float
    y: float
    width: float
    height: float
    colour: str


@dataclass(frozen=True, slots=True)
class _Line:
    """Straight, from one point to another."""

    x: float
    y: float
    to_x: float
    to_y: float


@dataclass(frozen=True, slots=True)
class _Text:
    """`y` is the base line."""

    x: float
    y: float
    text: str
    size: int


_Shape = _Bar | _Line | _Text


def routes(report: Report) -> list[str]:
    """Those that were measured, in the order they are shown in; what another release measures comes last."""

    def place(route: str) -> tuple[int, str]:
        known = "sharer" if is_sharer(route) else route
        return ORDER.index(known) if known in ORDER else len(ORDER), route

    return sorted(report.accuracy, key=place)


def picture(report: Report) -> str:
    """Whole SVG text; readable without colour, and by a screen reader through its title."""
    shapes, height = _drawn(report)
    title = f"<title>{escape(shown(report.verdict))}: accuracy by route</title>"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img" '
        f'font-family="sans-serif">{title}<rect width="100%" height="100%" fill="white"/>'
        f"{''.join(map(_svg, shapes))}</svg>\n"
    )


def png(report: Report) -> bytes:
    """The same picture in pixels, twice as wide. Raises LoadFailed without Pillow."""
    require_png()
    from PIL import Image, ImageDraw, ImageFont

    shapes, height = _drawn(report)
    image = Image.new("RGB", (_WIDTH * _SCALE, height * _SCALE), "white")
    canvas = ImageDraw.Draw(image)
    fonts = {size: ImageFont.load_default(size * _SCALE) for size in (11, 12, 13)}
    for shape in shapes:
        _pixels(canvas, fonts, shape)
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def require_png() -> None:
    """Raises LoadFailed where no PNG can be drawn: to be asked before an hour of work."""
    if not can_png():
        raise LoadFailed("a PNG needs Pillow: pip install 'twolane-router[pictures]'; report.svg needs nothing")


def can_png() -> bool:
    """Whether Pillow is here."""
    return find_spec("PIL") is not None


def _drawn(report: Report) -> tuple[list[_Shape], int]:
    """All shapes, and the height they take."""
    head = textwrap.wrap(f"{report.verdict}: {report.reason}", 96)
    shapes: list[_Shape] = [_Text(10, 22 + 18 * i, line, 13) for i, line in enumerate(head)]
    y = 24 + 18 * len(head)
    shapes.append(_Text(10, y, f"n {report.n}, {report.date}, {report.numerics}", 11))
    y += 18
    for route in routes(report):
        shapes += _row(y, route, report.accuracy[route])
        y += _ROW
    for name, ratios in (("K", report.change_k), ("V", report.change_v)):
        if ratios:
            shapes += _layers(y + 20, name, ratios)
            y += 90
    return shapes, y + 20


def _row(y: int, route: str, interval: Interval) -> Iterator[_Shape]:
    yield _Text(10, y + 14, route, 12)
    yield _Bar(_LEFT, y + 3, _PLOT * interval.value, 15, _COLOUR.get(route, "#7a9e7e"))
    low, high = (_LEFT + _PLOT * share for share in (interval.low, interval.high))
    yield _Line(low, y + 10.5, high, y + 10.5)
    yield _Line(low, y + 6, low, y + 15)
    yield _Line(high, y + 6, high, y + 15)
    yield _Text(_LEFT + _PLOT + 12, y + 14, f"{interval.value:.3f}", 12)


def _layers(y: int, name: str, ratios: tuple[float, ...]) -> Iterator[_Shape]:
    most, step = max(*ratios, 1e-9), min(24.0, _PLOT / len(ratios))
    yield _Text(10, y + 30, f"change of {name}", 12)
    yield _Text(10, y + 46, f"by layer, to {most:.3g}", 11)
    for i, ratio in enumerate(ratios):
        height = 55 * ratio / most
        yield _Bar(_LEFT + i * step, y + 60 - height, step * 0.8, height, "#1b6ca8")
    yield _Line(_LEFT, y + 60, _LEFT + step * len(ratios), y + 60)


def _svg(shape: _Shape) -> str:
    match shape:
        case _Bar(x, y, width, height, colour):
            return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
        case _Line(x, y, to_x, to_y):
            return f'<path d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" stroke="black"/>'
        case _Text(x, y, text, size):
            return f'<text x="{x}" y="{y}" font-size="{size}">{escape(shown(text))}</text>'
        case _:
            assert_never(shape)


def _pixels(canvas: Any, fonts: dict[int, Any], shape: _Shape) -> None:
    s = _SCALE
    match shape:
        case _Bar(x, y, width, height, colour):
            canvas.rectangle((x * s, y * s, (x + width) * s, (y + height) * s), fill=colour)
        case _Line(x, y, to_x, to_y):
            canvas.line((x * s, y * s, to_x * s, to_y * s), fill="black", width=s)
        case _Text(x, y, text, size):
            canvas.text((x * s, y * s), shown(text), fill="black", font=fonts[size], anchor="ls")
        case _:
            assert_never(shape)
