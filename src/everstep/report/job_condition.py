"""A job's state by its events, with its reason, the begin of what goes on, and its end. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.base.cause import Cause
from everstep.report.told_facts import Trouble
from everstep.report.wall_time import Stretch, TimeAccount
from everstep.report.words import Event, reason_text, why_of

ENDED = ("completed", "failed", "interrupted")
"""States of a job that is over."""


@dataclass
class JobCondition:
    """`started_ns`, `waiting_ns`, `fault_ns`: when the start, the wait for workers, or the recovery began; None if it
    does not last. `stopping`: the reason why the job is being ended. `account`: of its wall time."""

    state: str = "starting"
    cause: Cause | None = None
    reason: str = ""
    exit_code: int | None = None
    stopping: Trouble | None = None
    started_ns: int | None = None
    waiting_ns: int | None = None
    fault_ns: int | None = None
    ended_ns: int | None = None
    account: TimeAccount = field(default_factory=TimeAccount)

    def be(self, state: str, why: Event | None = None) -> None:
        """Set the job's state; why: the event with the reason, if it has one."""
        self.state = state
        self.cause, self.reason = (None, "") if why is None else why_of(why)

    def begin(self, time_ns: int) -> None:
        self.be("starting")
        self.exit_code = self.ended_ns = self.stopping = None
        self.started_ns, self.waiting_ns, self.fault_ns = time_ns, None, None

    def go_on(self, time_ns: int) -> None:
        """A step was committed: nothing is waited for."""
        self.end_of_start(time_ns)
        self.end_of_waiting(time_ns)
        self.fault_ns = None
        self.be("running")

    def end_of_start(self, time_ns: int) -> None:
        """End the start-up, if it lasts."""
        if self.started_ns is not None:
            self.account.paint(self.started_ns, time_ns, "start-up")
            self.started_ns = None

    def end_of_waiting(self, time_ns: int) -> None:
        """End the wait for workers, if it lasts."""
        if self.waiting_ns is not None:
            self.account.paint(self.waiting_ns, time_ns, "waiting for workers")
            self.waiting_ns = None

    def wait(self, event: Event, time_ns: int) -> None:
        self.be("waiting", event)
        self.waiting_ns = self.waiting_ns or time_ns

    def stops(self, event: Event, time_ns: int) -> None:
        """The job is being ended: keep the time of the first request, and the newest reason."""
        since_ns = self.stopping.time_ns if self.stopping else time_ns
        self.stopping = Trouble(since_ns, reason_text(event.get("reason")))

    def end(self, exit_code: int | None, time_ns: int) -> None:
        """The job is over; nothing is under way any more."""
        self.exit_code, self.ended_ns = exit_code, time_ns
        self.stopping = self.started_ns = self.waiting_ns = self.fault_ns = None

    def under_way(self, now_ns: int) -> list[Stretch]:
        """Stretches of time that last now, without an event that ends them yet."""
        found = []
        if self.started_ns is not None:
            found.append(Stretch(self.started_ns, now_ns, "start-up"))
        if self.waiting_ns is not None:
            found.append(Stretch(self.waiting_ns, now_ns, "waiting for workers"))
        elif self.fault_ns is not None and self.state == "recovering":
            found.append(Stretch(self.fault_ns, now_ns, "recovery: other"))
        return found
