"""What the workers are at, told to whoever waits for it: faults are aimed at phases."""

from __future__ import annotations

from collections.abc import Callable

from everstep.base.plan import WorkerKey
from everstep.protocol.driver import operations as do

_PHASES: dict[type[do.Operation], str] = {
    do.Open: "settling",
    do.Fetch: "fetching",
    do.Restore: "fetching",
    do.OpenFeeds: "heal",
    do.Compute: "computing",
    do.Reduce: "reducing",
    do.Update: "updating",
}


class Phases:
    """The phase of every worker. `hooks`: called when one enters a phase."""

    def __init__(self) -> None:
        self.hooks: list[Callable[[WorkerKey, str], None]] = []
        self._of: dict[WorkerKey, str] = {}

    def note(self, who: WorkerKey, operation: do.Operation) -> None:
        """A worker begins an operation."""
        phase = _PHASES.get(type(operation), "")
        if isinstance(operation, do.Exchange):
            phase = "settling" if operation.tag.kind == "settle" else "gathering" if operation.tag.seq else "agreeing"
        if phase and (phase != self._of.get(who, "") or phase == "gathering"):
            for hook in self.hooks[:]:
                hook(who, phase)
        self._of[who] = phase

    def forget(self, who: WorkerKey) -> None:
        """The next phase of a worker is a new one, whichever it is."""
        self._of[who] = ""
