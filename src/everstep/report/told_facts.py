"""What facts are made of: a worker, a generation, a checkpoint, a span of time, a mark, a line of the log. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.base.cause import Cause

MOST_LISTED = 1000
"""Of the newest facts of a kind."""
_GOES_ON = 3
"""So many steps in a row are no accident."""


@dataclass
class WorkerFact:
    """What is known of one worker. state: leader, active, standby, spare, healing, suspect, dead or left; role: the
    same, whether it lives or not. cause and reason: of the state, None and "" where there is nothing to say."""

    worker_id: int
    incarnation: int = 0
    state: str = "spare"
    stage: int | None = None
    stages: tuple[int, ...] = ()
    lanes: tuple[int, ...] = ()
    pid: int | None = None
    pids: tuple[int, ...] = ()
    host: str = ""
    since_ns: int = 0
    cause: Cause | None = None
    reason: str = ""
    role: str = "spare"


@dataclass(frozen=True)
class Generation:
    """One agreed membership, from when, and why."""

    number: int
    time_ns: int
    step: int
    cause: Cause
    reason: str
    members: int
    leaders: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointFact:
    """One that was completed; or else (`ok` false) skipped because it was not its turn, or failed."""

    tier: str
    step: int
    time_ns: int
    ok: bool
    duration_s: float
    size_bytes: int
    stall_s: float
    cause: Cause
    reason: str
    skipped: bool = False


@dataclass(frozen=True)
class Trouble:
    """Something that is wrong, since it was told."""

    time_ns: int
    reason: str


@dataclass
class Span:
    """A stretch of a worker's life in one state; `end_ns` None while it lasts."""

    worker_id: int
    incarnation: int
    state: str
    begin_ns: int
    end_ns: int | None = None


@dataclass(frozen=True)
class Mark:
    """Something to be marked on the charts."""

    time_ns: int
    step: int
    kind: str
    worker_id: int | None
    cause: Cause
    text: str


@dataclass(frozen=True)
class Line:
    """An event in the log; `number` counts all that there were."""

    number: int
    time_ns: int
    level: str
    kind: str
    worker_id: int | None
    step: int | None
    text: str


@dataclass(frozen=True)
class Strange:
    """Steps whose loss or gradient was not finite: how many, the first and the last of them, and how many there are in
    a row up to the newest step."""

    count: int
    first: int
    last: int
    in_a_row: int

    @property
    def level(self) -> str:
        """How bad it is now: "" (the newest step was finite), warning, or bad: it goes on."""
        return "" if not self.in_a_row else "bad" if self.in_a_row >= _GOES_ON else "warning"

    @property
    def since(self) -> int:
        """The first of those in a row."""
        return self.last - self.in_a_row + 1

    def __str__(self) -> str:
        return f"{self.count} steps, {self.first} to {self.last}" if self.count > 1 else f"step {self.first}"
