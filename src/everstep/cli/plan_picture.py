"""Pareto front of splits, memory against time: in the terminal and as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everstep.base.errors import ConfigError
from everstep.cost.quantities import time_words
from everstep.report.style import can_draw, write_pictures
from everstep.report.svg import Curve, line_chart

_COLUMNS, _ROWS = 60, 10
_DASHES = 300
"""Widths of half a dash in the picture."""


def check_picture(path: Path) -> None:
    """Raises: ConfigError, one line, if no picture can be written there."""
    if path.suffix != ".png":
        raise ConfigError(f"--picture: expected a name that ends in .png, got {str(path)[:80]}")
    if path.exists():
        raise ConfigError(f"--picture: {path} exists: name another file, or remove it")
    if not path.parent.is_dir():
        raise ConfigError(f"--picture: there is no folder {path.parent}")
    if not can_draw():
        raise ConfigError("--picture needs a renderer: pip install 'everstep[report]'")


def write_picture(path: Path, front: Sequence[dict[str, Any]], best: Sequence[dict[str, Any]]) -> None:
    """Draw the front, and the best of each division, as a PNG. Raises: ConfigError if it cannot be written."""
    ordered = sorted((row["step_s"], row["total_bytes"] / 1e9) for row in front)
    edge = Curve("no split is both smaller and shorter", [x for x, _ in ordered], [y for _, y in ordered], 0)
    curves = [edge, _dashes("best of each division", best, (ordered[-1][0] - ordered[0][0]) / _DASHES)]
    chart = line_chart("GB per device, by seconds per step", curves, "seconds per step")
    write_pictures(path.parent, {path.stem: chart}, None)


def _dashes(name: str, rows: Sequence[dict[str, Any]], width: float) -> Curve:
    """A dash for each row, so wide on either side: no line joins them."""
    points = [(row["step_s"], row["total_bytes"] / 1e9) for row in rows]
    x = [at for step, _ in points for at in (step - width, step + width, step + width)]
    return Curve(name, x, [at for _, size in points for at in (size, size, None)], 1)


def picture_lines(front: Sequence[dict[str, Any]], best: Sequence[dict[str, Any]]) -> list[str]:
    """The same for a terminal: * is on the front, o the best of a division of the devices."""
    rows = [*front, *best]
    if len(front) < 2:
        return []
    steps, sizes = [row["step_s"] for row in rows], [row["total_bytes"] / 1e9 for row in rows]
    grid = [[" "] * _COLUMNS for _ in range(_ROWS)]
    for shown, mark in ((best, "o"), (front, "*")):
        for row in shown:
            x = _cell(row["step_s"], steps, _COLUMNS)
            grid[_ROWS - 1 - _cell(row["total_bytes"] / 1e9, sizes, _ROWS)][x] = mark
    left = [f"{max(sizes):.3g} GB", *[""] * (_ROWS - 2), f"{min(sizes):.3g} GB"]
    low, high = time_words(min(steps)), time_words(max(steps))
    return [
        "Memory of a device by time of a step: * cannot be bettered in both, o is the best of a division",
        *(f"{name:>9} |{''.join(line).rstrip()}" for name, line in zip(left, grid, strict=True)),
        f"{'':>9} +{'-' * _COLUMNS}",
        f"{'':>11}{low}{high:>{_COLUMNS - len(low)}}",
        "",
    ]


def _cell(value: float, among: Sequence[float], cells: int) -> int:
    low, high = min(among), max(among)
    return 0 if high <= low else min(cells - 1, int((value - low) / (high - low) * cells))
