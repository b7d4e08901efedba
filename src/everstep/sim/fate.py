"""The end of a simulated job, as its coordinators report it."""

from __future__ import annotations

from typing import Any

from everstep.sim.orders import ScriptedStrikes


class Fate:
    """The end of the job, as the coordinator reports it."""

    def __init__(self, strikes: ScriptedStrikes) -> None:
        self.strikes = strikes
        self.completed = False
        self.failed = ""
        self.stopped = False  # at the user's request
        self.why = ""  # reason of the stop
        self.reports: dict[str, int] = {}

    def began(self, state: str, reason: str) -> None:
        """A coordinator has begun: the one before may have crashed between journaling the end and reporting it."""
        self.stopped = self.stopped or state == "interrupted"
        self.completed = self.completed or state == "completed"
        self.failed = reason if state == "failed" else self.failed

    def report(self, kind: str, fields: dict[str, Any]) -> None:
        self.reports[kind] = self.reports.get(kind, 0) + 1
        self.strikes.reported(kind, fields)
        if kind == "job_completed":
            self.completed = True
        elif kind == "job_failed" and fields.get("state") == "interrupted":
            self.stopped, self.why = True, str(fields.get("reason"))
        elif kind == "job_failed":
            self.failed = str(fields.get("reason"))

    @property
    def ended(self) -> bool:
        return self.completed or self.stopped or bool(self.failed)
