"""A report for people. Torch-free."""

from __future__ import annotations

from pathlib import Path

from workers.files import replacing
from workers.pairs import Interval, Report, shown
from workers.pictures import picture, png, routes


def for_people(folder: Path, report: Report, *, as_png: bool) -> None:
    """Write `report.txt`, `report.svg` and, if asked for, `report.png` beside a report. Raises LoadFailed."""
    files = {"report.txt": (told(report) + "\n").encode(), "report.svg": picture(report).encode()}
    if as_png:
        files["report.png"] = png(report)
    else:
        (folder / "report.png").unlink(missing_ok=True)  # one of an earlier report would say something else
    for name, written in files.items():
        with replacing(folder / name) as aside:
            aside.write_bytes(written)


def told(report: Report) -> str:
    """The verdict first, then every figure behind it."""
    lines = [f"{report.verdict}: {report.reason}", f"n {report.n}, {report.date}, {report.numerics}"]
    lines.append(f"{'':<12}{'accuracy':<26}{'exact':>7}{'F1':>7}{'first ms':>10}{'all ms':>10}")
    for route in routes(report):
        row = f"{route:<12}{told_interval(report.accuracy[route]):<26}"
        row += f"{_value(report.exact.get(route)):>7}{_value(report.f1.get(route)):>7}"
        lines.append(row + f"{_ms(report.ttft_ms, route):>10}{_ms(report.latency_ms, route):>10}")
    singles = (("gain", report.gain), ("retention", report.retention), ("agreement", report.agreement))
    for name, interval in (*singles, ("harm", report.harm)):
        if interval is not None:
            lines.append(f"{name:<12}{told_interval(interval)}")
    for route, pair in report.compared.items():
        lines.append(f"against {route}: better on {pair.better}, worse on {pair.worse}, p {pair.p:.3g}")
    if report.split_ms:
        lines.append("pair's time  " + ", ".join(f"{part} {ms:.1f} ms" for part, ms in report.split_ms.items()))
    for kind, values in report.safety.items():
        lines.append(f"safety, {kind}: " + ", ".join(f"{who} {told_interval(v)}" for who, v in values.items()))
    if report.gates:
        lines.append(f"gates        {report.gates}")
    for name, ratios in (("K", report.change_k), ("V", report.change_v)):
        if ratios:
            lines.append(f"change of {name}  " + " ".join(f"{ratio:.3f}" for ratio in ratios))
    for label, values in report.slices.items():
        lines.append(f"{label}: " + ", ".join(f"{route} {v.value:.3f}" for route, v in values.items()) + _n(values))
    return "\n".join(map(shown, [*lines, *(f"note: {note}" for note in report.notes)]))


def told_interval(interval: Interval) -> str:
    """`0.512 (0.480 to 0.544)`."""
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


def _n(values: dict[str, Interval]) -> str:
    return f" (n {next(iter(values.values())).n})" if values else ""


def _value(interval: Interval | None) -> str:
    return f"{interval.value:.3f}" if interval is not None else "-"


def _ms(by_route: dict[str, float], route: str) -> str:
    return f"{by_route[route]:.1f}" if route in by_route else "-"
