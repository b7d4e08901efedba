"""Stragglers on purpose: forward passes that take longer, for a while or until something has been reported.

Apart from the faults that strike once: these last, and follow their target from one life to the next.
"""

from __future__ import annotations

import time
from pathlib import Path

from everstep.chaos.fault import Fault
from everstep.chaos.kinds.kind import FaultKind
from everstep.observe.events import read_events

_LOOK_S = 0.05


class _Pace:
    """One `slow` fault in one worker. events: the job's events.jsonl, for its `until`."""

    def __init__(self, fault: Fault, events: Path) -> None:
        self.fault = fault
        self._events = events
        self._end_s: float | None = None
        self._look_s = 0.0
        self._over = False

    def due(self, step: int, phase: str) -> bool:
        """Whether this pass is to be slow, if the worker is the target."""
        return phase == "forward" and step >= self.fault.at and not self._over

    def act(self) -> None:
        """Take longer, unless it is over by now."""
        now_s = time.monotonic()
        if self.fault.for_s is not None:
            self._end_s = self._end_s or now_s + self.fault.for_s
            self._over = now_s >= self._end_s
        if self.fault.until is not None and not self._over and now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            kind, count = self.fault.until
            self._over = sum(event["kind"] == kind for event in read_events(self._events)) >= count
        if not self._over:
            time.sleep(self.fault.by_s)


KIND = FaultKind(
    "slow",
    "by=S: each forward pass takes longer, for=S or until=EVENT*COUNT",
    lasting=_Pace,
    takes=frozenset({"for", "by", "until"}),
    needs={"by": "by which each forward pass takes longer"},
    outcome="slowed down",
)
