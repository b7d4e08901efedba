"""Events that events.jsonl has, so that several hosts tell each event of a job once.

On one host the next leader looks into the file itself. Events of a host with its own directory come later, by the wire;
those that others have told meanwhile are left out here. The file is read back, so that a new process knows what the one
before it knew.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import OrderedDict
from pathlib import Path
from typing import Any

from everstep.base.cause import Cause
from everstep.base.given import open_given
from everstep.observe.events import Lines, last_committed_step, parse_events

CAME_FROM = "came_from"
"""Field of an event that came by the wire: its file, and the number of bytes of it that have come."""
_ONCE = frozenset({"evaluated"})
"""Kinds that every worker could tell and one tells, once per step."""
_DOUBTED = frozenset({Cause.CORRUPT, Cause.NONDETERMINISTIC})
"""Causes for which all go back because steps that were told are void."""
_CAUSES = frozenset({Cause.NONFINITE, Cause.EARLY_STOP})
"""Causes of warnings that one worker tells once."""
_MOST_KNOWN = 10_000
_PORTION_BYTES = 4 << 20
_FROM = re.compile(r"([0-9a-f]{16}):(\d{1,15})")


class Steps:
    """A set of step numbers, kept as runs: nearly all of them are consecutive."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __contains__(self, step: int) -> bool:
        return self.last_from(step) is not None

    def last_from(self, step: int) -> int | None:
        """Last step of the run that contains this one; None if there is none."""
        k = bisect_right(self._firsts, step) - 1
        return self._lasts[k] if k >= 0 and step <= self._lasts[k] else None

    @property
    def first(self) -> int | None:
        return self._firsts[0] if self._firsts else None

    def add(self, step: int) -> None:
        if step in self:
            return
        k = bisect_right(self._firsts, step)
        before = k > 0 and self._lasts[k - 1] == step - 1
        after = k < len(self._firsts) and self._firsts[k] == step + 1
        if before and after:
            self._lasts[k - 1] = self._lasts.pop(k)
            del self._firsts[k]
        elif before:
            self._lasts[k - 1] = step
        elif after:
            self._firsts[k] = step
        else:
            self._firsts.insert(k, step)
            self._lasts.insert(k, step)


class Telling:
    """State of an event log. Pure. held: by file that events came from, the number of bytes taken over. losses: those
    that were told of the newest steps."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.losses: OrderedDict[int, float] = OrderedDict()
        self._steps = Steps()
        self._stood = self._assumed = 0
        self._once: OrderedDict[tuple[str, int], None] = OrderedDict()

    @property
    def through(self) -> int:
        """Last step up to which all are told, or forgotten: a job that began with a checkpoint knows no earlier
        ones."""
        for step in (self._stood, self._stood + 1):
            last = self._steps.last_from(step)
            if last is not None:
                return last
        return max(self._assumed, self._stood - 1)

    @property
    def first(self) -> int | None:
        """Lowest step that is known to have been told."""
        return self._steps.first

    def assume(self, step: int) -> None:
        """Take all steps up to this one as told, in a part of the file that is not read."""
        self._assumed = max(self._assumed, step)
        self._stood = max(self._stood, step)

    def take(self, event: dict[str, Any]) -> None:
        """Note an event of the log."""
        kind, step = event["kind"], event.get("step")
        if kind == "fallback" and event.get("cause") in _DOUBTED:
            self.losses = OrderedDict((at, loss) for at, loss in self.losses.items() if at <= (step or 0))
        found = _FROM.fullmatch(str(event.get(CAME_FROM, "")))
        if found is not None:
            self.held[found[1]] = max(self.held.get(found[1], 0), int(found[2]))
        if kind == "job_started" and not step:  # the job before was given up
            self._steps, self._stood, self._assumed = Steps(), 0, 0
            self._once.clear()
            self.losses.clear()
        elif kind == "job_started" or (kind == "fallback" and event.get("source") == "checkpoint"):
            self._stood = max(self._stood, step) if isinstance(step, int) else self._stood
        elif kind == "step_committed" and isinstance(step, int):
            self._steps.add(step)
            if isinstance(loss := event.get("loss"), float):
                self.losses[step] = loss
                if len(self.losses) > _MOST_KNOWN:
                    self.losses.popitem(last=False)
        else:
            name = _name(event)
            if name is not None:
                self._once[name] = None
                if len(self._once) > _MOST_KNOWN:
                    self._once.popitem(last=False)

    def is_new(self, event: dict[str, Any]) -> bool:
        step = event.get("step")
        if event["kind"] == "step_committed":
            return not isinstance(step, int) or self.lacks(step)
        name = _name(event)
        return name is None or name not in self._once

    def lacks(self, step: int) -> bool:
        return step > self._assumed and step not in self._steps


def _name(event: dict[str, Any]) -> tuple[str, int] | None:
    """Name of an event that is told once, by kind and step; None for events that each process tells for itself."""
    step, cause = event.get("step"), event.get("cause")
    if event["kind"] in _ONCE:
        return (str(event["kind"]), step) if isinstance(step, int) else None
    if event["kind"] == "warning" and cause in _CAUSES:
        return str(cause), 0
    return None


class ToldFile:
    """`Telling` for a file that others write to as well. tail_bytes: read only this end, and take steps before it as
    told. position: bytes of the file taken in."""

    def __init__(self, path: Path, tail_bytes: int | None = None) -> None:
        self._path = path
        self._tail_bytes = tail_bytes
        self.position = 0
        self._known: tuple[int, int] | None = None
        self._lines = Lines()
        self.told = Telling()

    def look(self) -> bool:
        """Take in new events, one portion at most; returns whether that was all. Raises: OSError."""
        try:
            with open_given(self._path) as file:
                found = os.fstat(file.fileno())
                known = (found.st_dev, found.st_ino)
                if self._known not in (None, known) or found.st_size < self.position:
                    self.position, self._lines, self.told = 0, Lines(), Telling()
                skipped = self._skip(found.st_size) if self._known is None else False
                self._known = known
                file.seek(self.position)
                data = file.read(_PORTION_BYTES)
                for event in parse_events(self._lines.whole(data)):
                    self.told.take(event)
                self.position = file.tell()
                if skipped:
                    first = self.told.first
                    self.told.assume(last_committed_step(self._path) if first is None else first)
                return self.position >= found.st_size
        except FileNotFoundError:
            return True

    def _skip(self, size_bytes: int) -> bool:
        """Begin near the end if only the tail is wanted."""
        if self._tail_bytes is not None and size_bytes > self._tail_bytes:
            self.position = size_bytes - self._tail_bytes
        return self.position > 0
