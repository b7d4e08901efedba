"""What `everstep check` notes of a life beside its state: its work, the surroundings that its code reads, its lines.

Apart from the rehearsal, which every job begins with, because a job needs none of this.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from everstep.base.below import write_atomically
from everstep.base.given import read_json
from everstep.protocol.step_types import LaneSaid
from everstep.script.ambient import Ambient, Setting
from everstep.script.line_trace import Divergence, LineRow, LineTrace, first_divergence, first_write
from everstep.script.reachable import variables

IN_REHEARSAL, TRIED = "EVERSTEP_REHEARSAL", "job"
"""Environment variable of a life that is only rehearsed, and its value in a job that tries a script out."""
AGAIN, FIRST, RUN, BEFORE = "again", "first", "run", "before"
_MOST_NUMBERS = 500
LaneWork = tuple[int, int, str, str]
"""Step, lane, digest of the batch, digest of loss and gradients."""


@dataclass(frozen=True)
class LifeWatch:
    """What is noted. work: of each lane. setting: of the surroundings; None if they are left alone. trace: lines of
    the lanes that are computed twice ("lane"), of all ("run"), or none. buffer: the name of one: its first write is
    looked for. covered: which lines were executed. origin: a folder with a checkpoint that the life goes on from."""

    work: bool = False
    setting: Setting | None = None
    trace: str = ""
    buffer: str = ""
    covered: bool = False
    origin: str = ""


@dataclass(frozen=True)
class Noted:
    """What was noted. sites: as in `Ambient`. seconds: of the steps. lines: executed ones by file. diverged: within one
    life, between two computations of a lane; or the line that wrote to a parameter or the buffer."""

    work: tuple[LaneWork, ...] = ()
    sites: tuple[str, ...] = ()
    seconds: float = 0.0
    lines: dict[str, list[int]] = field(default_factory=dict)
    diverged: Divergence | None = None


class LifeNotes:
    """The notes of this process's life, being taken. file: for the lines."""

    def __init__(self, watch: LifeWatch, file: Path) -> None:
        self._watch = watch
        self._file = file
        self._work: list[LaneWork] = []
        self._began_s: float | None = None
        self._ambient = Ambient(watch.setting or Setting())
        self._trace: LineTrace | None = None
        if watch.setting is not None:
            self._ambient.install()
        if watch.trace or watch.covered:
            self._trace = LineTrace(only_lines=not watch.trace)
            self._trace.mark(BEFORE if watch.trace == RUN else "")
            self._trace.start()

    @property
    def works(self) -> bool:
        """Whether each lane's gradient is wanted by itself."""
        return self._watch.work

    def watch(self, parameters: Sequence[Any], buffers: Mapping[str, Any]) -> None:
        if self._trace is not None:
            self._trace.watch([buffers[self._watch.buffer]] if self._watch.buffer in buffers else parameters)

    def turn(self, step: int) -> None:
        """The step after this one is about to begin."""
        self._ambient.turn(step)
        if self._trace is not None and self._watch.trace == RUN:
            self._trace.mark(str(step))

    def computes(self, part: str) -> None:
        """A batch goes to the loop, or comes back ("")."""
        self._began_s = self._began_s or time.monotonic()
        if self._trace is not None and self._watch.trace == "lane":
            self._trace.mark(part)

    def computed(self, step: int, lane: int, said: LaneSaid) -> None:
        self._work.append((step, lane, said.data, said.gave))

    def noted(self) -> Noted:
        """All notes; the lines of a run go to the file."""
        seconds = time.monotonic() - self._began_s if self._began_s is not None else 0.0
        found = Noted(tuple(self._work), tuple(self._ambient.sites), seconds)
        trace = self._trace
        if trace is None:
            return found
        trace.stop()
        if self._watch.trace == RUN:
            write_rows(self._file, trace.parts)
        elif self._watch.trace:
            first, again = (trace.parts.get(part, []) for part in (FIRST, AGAIN))
            diverged = (not self._watch.buffer and first_divergence(first, again)) or first_write(first)
            return Noted(found.work, found.sites, seconds, diverged=diverged)
        lines = {file: sorted(those) for file, those in trace.lines.items()}
        return Noted(found.work, found.sites, seconds, lines)


def write_rows(path: Path, parts: Mapping[str, Sequence[LineRow]]) -> None:
    """Keep lines for another process."""
    told = {part: [list(asdict(row).values()) for row in rows] for part, rows in parts.items()}
    write_atomically(path, json.dumps(told), 1)


def read_rows(path: Path) -> dict[str, list[LineRow]]:
    """Lines that a life has kept; none if it could not."""
    try:
        told = read_json(path, folders=1)
    except (OSError, ValueError):
        return {}
    return {part: [_row(*row) for row in rows] for part, rows in told.items()}


def _row(file: str, line: int, frame: int, after: int, made: Any, read: Any, versions: int) -> LineRow:
    return LineRow(file, line, frame, after, tuple(map(tuple, made)), tuple(map(tuple, read)), versions)


def noted_of(data: dict[str, Any]) -> Noted:
    """Notes from JSON."""
    work = tuple((int(s), int(lane), str(d), str(g)) for s, lane, d, g in data["work"])
    diverged = Divergence(**data["diverged"]) if data["diverged"] else None
    return Noted(work, tuple(data["sites"]), float(data["seconds"]), data["lines"], diverged)


def watch_of(data: dict[str, Any]) -> LifeWatch:
    """Notes to take, from JSON."""
    setting = data["setting"]
    if setting is not None:
        setting = Setting(tuple(setting["moved"]), bool(setting["pinned"]), bool(setting["still"]))
    return LifeWatch(**{**data, "setting": setting})


def epoch_end(order: Any, epoch: int = 1) -> int:
    """The step with which an epoch ends, counted from 1; 0 if the order of samples has no epochs."""
    size, batch = getattr(order, "dataset_size", 0), getattr(order, "global_batch", 1)
    return -(-epoch * size // batch)


def numbers_in(frames: Sequence[FrameType]) -> dict[str, float]:
    """Numbers that the loop's names stand for, and attributes of plain objects."""
    found: dict[str, float] = {}
    for name, value in variables(frames):
        if isinstance(value, int | float):
            found[name] = value
        elif not isinstance(value, ModuleType | type) and len(found) < _MOST_NUMBERS:
            inner = dict(getattr(value, "__dict__", {}))
            found |= {f"{name}.{n}": v for n, v in inner.items() if isinstance(v, int | float)}
    return found
