"""Charts as SVG text: curves, rows of spans, bars. Pure; every text is escaped here and nowhere else."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.base.visible import visible

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 70, 18, 40, 38


@dataclass(frozen=True)
class Curve:
    """A named curve; None and NaN are gaps. band: (low, high) around it. colour: a number of the palette."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    colour: int = 0
    band: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True)
class Upright:
    """A vertical line at x; `soft` if it marks no fault."""

    x: float
    text: str
    soft: bool = False


@dataclass(frozen=True)
class Bar:
    """A stretch from x0 to x1 of one row; `style` is a class of the style sheet."""

    row: int
    x0: float
    x1: float
    style: str
    text: str


def escape(text: object) -> str:
    """Any text, safe within elements and attributes, with control characters made visible."""
    return html.escape(visible(str(text)), quote=True)


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers from low to high; low alone if these are too near to each other, or too far apart."""
    if not (math.isfinite(low) and 1e-300 < high - low < 1e300):
        return [low] if math.isfinite(low) else []
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [
        (first + i) * step
        for i in range(int((high - low) / step + 1e-9) + 2)
        if (first + i) * step <= high + step / 1e6
    ]


def short(value: float) -> str:
    """Number in short form: 1200000 -> 1.2M, 0.00012 -> 1.2e-4."""
    size = abs(value)
    if size == 0:
        return "0"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}" if size >= 1e-3 else f"{value:.1e}"


def line_chart(
    title: str, curves: Sequence[Curve], x_label: str, uprights: Sequence[Upright] = (), height: int = 300
) -> str:
    """Curves over x, with vertical lines at events."""
    points = [
        (x, y) for curve in curves for x, y in zip(curve.x, curve.y, strict=True) if y is not None and math.isfinite(y)
    ]
    if not points:
        return _empty(title)
    x_low, x_high = _span([x for x, _ in points])
    y_low, y_high = _robust([y for _, y in points])
    legend = len(curves) > 1
    plot = _Plot(x_low, x_high, y_low, y_high, height, TOP + (22 if legend else 0))
    whole = all(float(x).is_integer() for x, _ in points)
    parts = [_open(title, height), _name(title), *plot.axes(x_label, whole=whole)]
    if legend:
        parts += _legend([(curve.name, f"f{curve.colour}") for curve in curves])
    parts += [_upright(plot, mark) for mark in uprights if x_low <= mark.x <= x_high]
    for curve in curves:
        if curve.band is not None:
            parts.append(_band(plot, curve))
        parts.append(
            f'<path class="curve l{curve.colour}" d="{_path(plot, curve)}"><title>{escape(curve.name)}</title></path>'
        )
    return "".join(parts) + "</svg>"


def columns_chart(
    title: str,
    ends: Sequence[float],
    parts: Sequence[tuple[str, str, Sequence[float | None]]],
    width: float,
    x_label: str,
    uprights: Sequence[Upright] = (),
) -> str:
    """Parts of a whole, (name, style, values), on top of each other; a value covers the `width` before an end."""
    known = [i for i in range(len(ends)) if any(values[i] for _, _, values in parts)]
    if not known:
        return _empty(title)
    high = _robust([0.0, *(sum(values[i] or 0.0 for _, _, values in parts) for i in known)])[1]
    plot = _Plot(ends[known[0]] - width, ends[known[-1]], 0.0, high, 300, TOP + 22)
    drawn = [_open(title, 300), _name(title), *plot.axes(x_label), *_legend([part[:2] for part in parts])]
    below = dict.fromkeys(known, 0.0)
    for name, style, values in parts:
        path = ""
        for i in known:
            low, below[i] = below[i], below[i] + (values[i] or 0.0)
            if below[i] > low:
                x0, x1 = plot.x(ends[i] - width), plot.x(ends[i])
                path += f"M{x0:.1f} {plot.y(low):.1f}V{plot.y(below[i]):.1f}H{x1:.1f}V{plot.y(low):.1f}Z"
        drawn.append(f'<path class="{escape(style)}" d="{path}"><title>{escape(name)}</title></path>')
    drawn += [_upright(plot, mark) for mark in uprights if plot.x0 <= mark.x <= plot.x1]
    return "".join(drawn) + "</svg>"


def rows_chart(
    title: str,
    rows: Sequence[str],
    bars: Sequence[Bar],
    x_label: str,
    uprights: Sequence[Upright] = (),
    legend: Sequence[tuple[str, str]] = (),
    row_height: int = 22,
    values: Sequence[str] = (),
) -> str:
    """Rows of spans over x: lives of workers, phases of recoveries. values: a text at the end of each row."""
    if not rows or not bars:
        return _empty(title)
    x_low, x_high = _span([0.0, *(b.x1 for b in bars)])
    top = TOP + (22 if legend else 0)
    height = top + row_height * len(rows) + BOTTOM
    left = min(240, max(LEFT, 20 + 7 * max(len(row) for row in rows)))
    plot = _Plot(x_low, x_high, 0, 1, height, top, left, RIGHT + (70 if values else 0))
    parts = [_open(title, height), _name(title), *plot.axes(x_label, horizontal=False), *_legend(legend)]
    for i, name in enumerate(rows):
        y = top + i * row_height
        parts.append(f'<text x="{left - 8}" y="{y + row_height / 2 + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        if i < len(values):
            x = WIDTH - RIGHT - 64
            parts.append(f'<text class="value" x="{x}" y="{y + row_height / 2 + 4:.1f}">{escape(values[i])}</text>')
    for bar in bars:
        x0, x1 = plot.x(bar.x0), plot.x(bar.x1)
        y = top + bar.row * row_height + 3
        parts.append(
            f'<rect class="{escape(bar.style)}" x="{x0:.1f}" y="{y}" width="{max(1.0, x1 - x0):.1f}" '
            f'height="{row_height - 6}" rx="2"><title>{escape(bar.text)}</title></rect>'
        )
    parts += [_upright(plot, mark) for mark in uprights if x_low <= mark.x <= x_high]
    return "".join(parts) + "</svg>"


def stacked_bar(title: str, parts_of: Sequence[tuple[str, float, str, str]]) -> str:
    """One bar of the whole: (name, share from 0 to 1, style, text)."""
    x, whole = 16.0, WIDTH - 32
    bars = []
    for name, share, style, text in parts_of:
        width = share * whole
        bars.append(
            f'<rect class="{escape(style)}" x="{x:.2f}" y="36" width="{width:.2f}" height="34">'
            f"<title>{escape(name)}: {escape(text)}</title></rect>"
        )
        x += width
    legend, bottom = _wrapped([(f"{name} {100 * share:.1f} %", style) for name, share, style, _ in parts_of], 82)
    return "".join([_open(title, bottom + 8), _name(title), *bars, *legend]) + "</svg>"


class _Plot:
    """The mapping from values to places."""

    def __init__(
        self, x0: float, x1: float, y0: float, y1: float, height: int, top: int, left: int = LEFT, right: int = RIGHT
    ) -> None:
        self.x0, self.x1, self.y0, self.y1 = x0, x1, y0, y1
        self.left, self.right, self.top, self.bottom = left, WIDTH - right, top, height - BOTTOM

    def x(self, value: float) -> float:
        return self.left + (self.right - self.left) * (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        inside = min(self.y1, max(self.y0, value))
        return self.bottom - (self.bottom - self.top) * (inside - self.y0) / (self.y1 - self.y0)

    def axes(self, x_label: str, horizontal: bool = True, whole: bool = False) -> list[str]:
        """Lines and numbers of both axes. whole: x counts something, so it has no numbers in between."""
        found = []
        for value in ticks(self.x0, self.x1, 8):
            if whole and abs(value - round(value)) > 1e-6:
                continue
            x = f"{self.x(value):.1f}"
            found.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{self.top}" y2="{self.bottom}"/>')
            found.append(f'<text x="{x}" y="{self.bottom + 16}" text-anchor="middle">{short(value)}</text>')
        for value in ticks(self.y0, self.y1, 5) if horizontal else []:
            y = f"{self.y(value):.1f}"
            found.append(f'<line class="grid" x1="{self.left}" x2="{self.right}" y1="{y}" y2="{y}"/>')
            found.append(f'<text x="{self.left - 8}" y="{y}" dy="4" text-anchor="end">{short(value)}</text>')
        found.append(f'<line class="axis" x1="{self.left}" x2="{self.right}" y1="{self.bottom}" y2="{self.bottom}"/>')
        found.append(f'<text x="{self.right}" y="{self.bottom + 32}" text-anchor="end">{escape(x_label)}</text>')
        return found


def _open(title: str, height: int) -> str:
    return (
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img" aria-label="{escape(title)}">'
    )


def _name(title: str) -> str:
    return f'<text class="name" x="16" y="22">{escape(title)}</text>'


def _empty(title: str) -> str:
    return f'{_open(title, 70)}{_name(title)}<text x="16" y="50">nothing was recorded</text></svg>'


def _legend(entries: Sequence[tuple[str, str]]) -> list[str]:
    return _wrapped(entries, 34)[0]


def _wrapped(entries: Sequence[tuple[str, str]], y: int) -> tuple[list[str], int]:
    """A legend from y on, in as many lines as it takes; and the y of its end."""
    found, x = [], 16.0
    for name, style in entries:
        width = 34 + 6.6 * len(name)
        if x > 16 and x + width > WIDTH:
            x, y = 16.0, y + 20
        found.append(f'<rect class="{escape(style)}" x="{x:.0f}" y="{y}" width="12" height="12" rx="2"/>')
        found.append(f'<text x="{x + 17:.0f}" y="{y + 10}">{escape(name)}</text>')
        x += width
    return found, y + 12


def _upright(plot: _Plot, mark: Upright) -> str:
    x = f"{plot.x(mark.x):.1f}"
    style = "mark soft" if mark.soft else "mark"
    head = "" if mark.soft else f'<circle class="fault" cx="{x}" cy="{plot.top}" r="3.5"/>'
    line = f'<line class="{style}" x1="{x}" x2="{x}" y1="{plot.top}" y2="{plot.bottom}"/>'
    return f"<g><title>{escape(mark.text)}</title>{line}{head}</g>"


def _path(plot: _Plot, curve: Curve) -> str:
    found, pen = [], "M"
    for x, y in zip(curve.x, curve.y, strict=True):
        if y is None or not math.isfinite(y):
            pen = "M"
            continue
        found.append(f"{pen}{plot.x(x):.1f} {plot.y(y):.1f}")
        pen = "L"
    if len(found) == 1:
        found.append("h0.1")
    return "".join(found)


def _band(plot: _Plot, curve: Curve) -> str:
    low, high = curve.band or ((), ())
    there = [i for i in range(len(curve.x)) if math.isfinite(low[i]) and math.isfinite(high[i])]
    if len(there) < 2:
        return ""
    up = [f"{plot.x(curve.x[i]):.1f} {plot.y(high[i]):.1f}" for i in there]
    down = [f"{plot.x(curve.x[i]):.1f} {plot.y(low[i]):.1f}" for i in reversed(there)]
    return f'<path class="band f{curve.colour}" d="M{"L".join(up + down)}Z"/>'


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _robust(values: Sequence[float]) -> tuple[float, float]:
    """Limits of an axis: a few outliers far above the rest are cut off at the edge."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    usual = ordered[int(0.98 * (len(ordered) - 1))]
    if len(ordered) > 20 and high - low > 6 * (usual - low) > 0:
        high = low + 1.5 * (usual - low)
    if high <= low:
        return low - (abs(low) or 1) * 0.5, high + (abs(high) or 1) * 0.5
    margin = 0.05 * (high - low)
    return (0.0 if 0 <= low < 0.4 * high else low - margin), high + margin
