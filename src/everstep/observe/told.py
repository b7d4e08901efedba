"""What has been told in events.jsonl, so that what several hosts have to tell of one job is told once.

On one host whoever leads next looks into the file itself. Of a host with a directory of its own it comes later, by the
wire, and others may have told it meanwhile: then it is left out here. Read back from the file, so that a new process
knows what the one before it knew.
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
from everstep.observe.events import Lines, parse_events

CAME_FROM = "came_from"
"""The field of an event that came by the wire: which file it was in, and up to which byte that has come."""
_ONCE = frozenset({"evaluated"})
"""Kinds that every worker could tell and one does, once for a step."""
_CAUSES = frozenset({Cause.NONFINITE, Cause.EARLY_STOP})
"""Likewise the causes of warnings."""
_MOST_KNOWN = 10_000
_PORTION_BYTES = 4 << 20
_FROM = re.compile(r"([0-9a-f]{16}):(\d{1,15})")


class Steps:
    """A set of step numbers, in runs: nearly all that there are follow each other."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def __contains__(self, step: int) -> bool:
        k = bisect_right(self._firsts, step) - 1
        return k >= 0 and step <= self._lasts[k]

    def add(self, step: int) -> None:
        """One more."""
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
    """What an event log says so far. Pure. held: of each file that events came from, up to which byte they have."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self._steps = Steps()
        self._once: OrderedDict[tuple[str, int], None] = OrderedDict()

    def take(self, event: dict[str, Any]) -> None:
        """An event that is in the log."""
        kind, step = event["kind"], event.get("step")
        found = _FROM.fullmatch(str(event.get(CAME_FROM, "")))
        if found is not None:
            self.held[found[1]] = max(self.held.get(found[1], 0), int(found[2]))
        if kind == "job_started" and not step:  # what was before was given up
            self._steps = Steps()
            self._once.clear()
        elif kind == "step_committed" and isinstance(step, int):
            self._steps.add(step)
        else:
            name = _name(event)
            if name is not None:
                self._once[name] = None
                if len(self._once) > _MOST_KNOWN:
                    self._once.popitem(last=False)

    def is_new(self, event: dict[str, Any]) -> bool:
        """Whether nobody has told it."""
        step = event.get("step")
        if event["kind"] == "step_committed":
            return not isinstance(step, int) or step not in self._steps
        name = _name(event)
        return name is None or name not in self._once


def _name(event: dict[str, Any]) -> tuple[str, int] | None:
    """What is told once, by kind and step; None of what each tells for itself."""
    step, cause = event.get("step"), event.get("cause")
    if event["kind"] in _ONCE:
        return (str(event["kind"]), step) if isinstance(step, int) else None
    if event["kind"] == "warning" and cause in _CAUSES:
        return str(cause), 0
    return None


class ToldFile:
    """The same, of a file that others write to as well."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._known: tuple[int, int] | None = None
        self._lines = Lines()
        self.told = Telling()

    def look(self) -> bool:
        """Take in what is new, a portion at most; whether that was all. Raises: OSError."""
        try:
            with open_given(self._path) as file:
                found = os.fstat(file.fileno())
                known = (found.st_dev, found.st_ino)
                if self._known not in (None, known) or found.st_size < self._position:
                    self._position, self._lines, self.told = 0, Lines(), Telling()
                self._known = known
                file.seek(self._position)
                data = file.read(_PORTION_BYTES)
                for event in parse_events(self._lines.whole(data)):
                    self.told.take(event)
                self._position = file.tell()
                return self._position >= found.st_size
        except FileNotFoundError:
            return True
