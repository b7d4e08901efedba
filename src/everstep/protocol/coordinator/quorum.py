"""The wait for enough workers: since when, for how long, and why. Pure."""

from __future__ import annotations

from everstep.base.cause import Why
from everstep.protocol.coordinator.alarms import QuorumDue, StartDue
from everstep.protocol.coordinator.desk import SECOND_NS, Desk

START_PATIENCE_NS = 10 * SECOND_NS


class Quorum:
    """waiting: why the job waits, None if it does not, or has only just begun. starting_over: all state is lost."""

    def __init__(self, desk: Desk) -> None:
        self.version = 0
        self.waiting: Why | None = None
        self.starting_over = False
        self._desk = desk
        self._since_ns: int | None = None
        self._first_came_ns: int | None = None

    def begin(self) -> None:
        """Workers are waited for from now on."""
        self._since_ns = self._desk.now

    def met(self) -> None:
        """Enough workers are there: there is a plan."""
        self._since_ns = self._first_came_ns = self.waiting = None
        self.starting_over = False

    def wait(self) -> None:
        """There are too few workers. Since when that is so is kept."""
        if self._since_ns is None:
            self._since_ns = self._desk.now
        self._desk.alarms.set(QuorumDue(), self._since_ns + self._desk.config.quorum_wait_ns)

    def wait_for(self, why: Why, step: int, generation: int) -> None:
        """There are too few workers, and this is why; it is told once."""
        if why != self.waiting:
            self.waiting = why
            self._desk.report("waiting", why, step=step, generation=generation)
        self.wait()

    def over(self) -> bool:
        """Whether workers were waited for long enough; if not, ring when they were."""
        if self._since_ns is None:
            return False
        until_ns = self._since_ns + self._desk.config.quorum_wait_ns
        if self._desk.now < until_ns:
            self._desk.alarms.set(QuorumDue(), until_ns)
            return False
        return True

    # ---- patience with those who are a little later than the first

    @property
    def anybody(self) -> bool:
        """Whether a first worker has come."""
        return self._first_came_ns is not None

    @property
    def patient(self) -> bool:
        """Whether the first worker has come so lately that others may follow."""
        return self._first_came_ns is not None and self._desk.now < self._first_came_ns + START_PATIENCE_NS

    def came(self) -> None:
        """A worker is there; the first one counts."""
        if self._first_came_ns is None:
            self._first_came_ns = self._desk.now

    def give_time(self) -> None:
        """Ring when the workers after the first have had time enough."""
        if self._first_came_ns is not None:
            self._desk.alarms.set(StartDue(), self._first_came_ns + START_PATIENCE_NS)

    def patience_over(self) -> None:
        """The workers after the first have had time enough."""
        self.version += 1

    def start_over(self) -> None:
        """All state is lost: whoever comes from now on counts."""
        if not self.starting_over:
            self.starting_over, self._first_came_ns = True, None
