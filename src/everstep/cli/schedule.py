"""`everstep schedule`: a pipeline schedule in time, the idle time of its workers, and the memory that they need."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from everstep.base.errors import ConfigError
from everstep.base.pipeline.schedule_table import KINDS
from everstep.cli.terminal import raw, stdout_width
from everstep.placement.schedules import (
    Op,
    Schedule,
    Timeline,
    bubble_fraction,
    cells,
    expected_bubble_fraction,
    peak_activations,
    peak_in_flight,
    schedule,
    timeline,
)
from everstep.report.words import aligned

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_COLOURS = {"F": "blue", "B": "green", "R": "yellow"}
MOST_CELLS = 200_000
"""Largest number of cells of a table: more take minutes."""
_NARROWEST = 40


_KINDS = "\b\n" + "\n".join(f"{kind.name:12} {kind.about}" for kind in KINDS.values())


@click.command(epilog=_KINDS)
@click.option("--kind", type=click.Choice(tuple(KINDS)), default="1f1b", show_default=True, help="Schedule to show.")
@click.option("--stages", type=int, default=4, show_default=True, help="Stages of the pipeline.")
@click.option("--micro-batches", type=int, default=8, show_default=True, help="Micro-batches per step.")
@click.option(
    "--chunks", type=int, default=1, show_default=True, help="Chunks per worker, for schedules that allow several."
)
@click.option("--recompute", is_flag=True, help="Compute activations again in the backward pass.")
@click.option("--forward", type=int, default=1, show_default=True, help="Time steps of a forward pass of one chunk.")
@click.option("--backward", type=int, default=1, show_default=True, help="Time steps of a backward pass of one chunk.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    kind: str,
    stages: int,
    micro_batches: int,
    chunks: int,
    recompute: bool,
    forward: int,
    backward: int,
    as_json: bool,
) -> int:
    """Show a pipeline schedule: a row per stage and a column per time step, idle time, and activations held."""
    cells = stages * (stages + micro_batches) * chunks * max(1, forward, backward)
    if min(stages, micro_batches, chunks) > 0 and cells > MOST_CELLS:
        raise ConfigError(
            f"expected a table of at most {MOST_CELLS:,} cells, got {cells:,}, stages x (stages + micro-batches) x "
            "chunks x time steps of a pass: lower them"
        )
    plan = schedule(kind, stages, micro_batches, chunks, recompute)
    played = timeline(plan, forward, backward)
    expected = None if recompute else expected_bubble_fraction(stages, micro_batches, chunks)
    if as_json:
        asked = {"schedule": kind, "stages": stages, "micro_batches": micro_batches, "chunks": chunks}
        times = {"recompute": recompute, "forward_time": forward, "backward_time": backward}
        print(json.dumps({"kind": "schedule", **asked, **times, **to_dict(plan, played, expected)}))
        return 0
    wide = stdout_width()
    for band in table(played, chunks, None if wide is None else max(_NARROWEST, wide)):
        for cells_of_line in band:
            _echo(cells_of_line)
        print()
    print(legend(chunks, recompute, max(forward, backward) > 1))
    formula = "" if expected is None else f"; (K-1)/({'C*' if chunks > 1 else ''}M+K-1) = {expected:.1%}"
    print(f"{played.length} time steps, bubble {bubble_fraction(played):.1%}{formula}")
    for line in totals(plan, played, chunks):
        print(line)
    return 0


def to_dict(plan: Schedule, played: Timeline, expected: float | None) -> dict[str, Any]:
    """The schedule and its timeline as JSON-able data; `workers`: one list of operations per stage."""
    return {
        "time_steps": played.length,
        "bubble_fraction": bubble_fraction(played),
        "expected_bubble_fraction": expected,
        "idle": [played.idle(stage) for stage in range(len(plan))],
        "peak_in_flight": list(peak_in_flight(plan)),
        "peak_activations": list(peak_activations(plan)),
        "workers": [
            [{**slot.op._asdict(), "start": slot.start, "end": slot.end} for slot in row] for row in played.rows
        ],
    }


def label(op: Op, chunks: int) -> str:
    """F3: forward pass of micro-batch 3; with several chunks F3a, F3b, ..."""
    return f"{op.kind[0].upper()}{op.micro_batch}{_chunk_name(op.chunk) if chunks > 1 else ''}"


def _chunk_name(chunk: int) -> str:
    """a, ..., z, aa, ab, ..."""
    name = ""
    chunk += 1
    while chunk:
        chunk, letter = divmod(chunk - 1, len(_LETTERS))
        name = _LETTERS[letter] + name
    return name


def table(played: Timeline, chunks: int, width: int | None) -> list[list[list[str]]]:
    """Bands of lines of padded cells: the time steps, then a line per stage; no line is wider than `width` characters.

    width: None for one band, however wide.
    """
    rows = [
        ["." if op is None else label(op, chunks) if starts else "-" for op, starts in cells(row, played.length)]
        for row in played.rows
    ]
    header = [str(time) for time in range(played.length)]
    cell = max(len(text) for line in [header, *rows] for text in line)
    names = ["time", *(f"stage {stage}" for stage in range(len(rows)))]
    margin = max(len(name) for name in names)
    per_band = played.length if width is None else max(1, (width - margin) // (cell + 1))
    bands = []
    for first in range(0, played.length, per_band):
        shown = [[text.ljust(cell) for text in line[first : first + per_band]] for line in [header, *rows]]
        bands.append([[name.ljust(margin), *line] for name, line in zip(names, shown, strict=True)])
    return bands


def legend(chunks: int, recompute: bool, long_passes: bool) -> str:
    """Explanation of the letters in the table."""
    words = ["F3: forward pass of micro-batch 3", "B3: backward"]
    if recompute:
        words.append("R3: its activations computed again")
    if chunks > 1:
        words.append(f"{_chunk_name(0)}-{_chunk_name(chunks - 1)}: chunk")
    if long_passes:
        words.append("-: goes on")
    return ", ".join([*words, ".: idle"])


def totals(plan: Schedule, played: Timeline, chunks: int) -> list[str]:
    """A small table: idle time, micro-batches in flight and activations held, per stage."""
    lines = [("stage", "idle", "peak in flight", "peak activations")]
    for stage, (flying, held) in enumerate(zip(peak_in_flight(plan), peak_activations(plan), strict=True)):
        lines.append((str(stage), str(played.idle(stage)), str(flying), str(held)))
    shown = aligned(lines)
    if chunks > 1:
        shown.append(f"in flight and activations count chunks: 1/{chunks} of a stage each")
    return shown


def _echo(line: list[str]) -> None:
    """Print the cells; with colours on a terminal, unless NO_COLOR is set."""
    plain = " ".join(line).rstrip()
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        print(plain)
        return
    print(" ".join([line[0], *(_coloured(cell) for cell in line[1:])]), file=raw(sys.stdout))


def _coloured(cell: str) -> str:
    colour = _COLOURS.get(cell[0])
    return click.style(cell, fg=colour) if colour else cell
