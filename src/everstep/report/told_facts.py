"""Elements of facts: a worker, a generation, a checkpoint, a span of time, a mark, a line of the log. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from everstep.base.cause import Cause

MOST_LISTED = 1000
"""Most facts of a kind that are kept, the newest ones."""
_MOST_TIERS = 16
_GOES_ON = 3
_OFTEN, _OFTEN_OF, _RECENT_STEPS = 3, 20, 50
"""So many strange steps in a row are no accident."""


@dataclass
class WorkerFact:
    """Facts of one worker. state: leader, active, standby, spare, healing, suspect, dead or left; role: the state of
    its seat, whether it lives or not. hosts: of each process, if they are on several. cause and reason: of the state,
    None and "" if it has none."""

    worker_id: int
    incarnation: int = 0
    state: str = "spare"
    stage: int | None = None
    stages: tuple[int, ...] = ()
    lanes: tuple[int, ...] = ()
    pid: int | None = None
    pids: tuple[int, ...] = ()
    host: str = ""
    hosts: tuple[str, ...] = ()
    since_ns: int = 0
    cause: Cause | None = None
    reason: str = ""
    role: str = "spare"


@dataclass(frozen=True)
class Generation:
    """One agreed membership, its begin and its reason."""

    number: int
    time_ns: int
    step: int
    cause: Cause
    reason: str
    members: int
    leaders: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointFact:
    """A completed checkpoint; or (`ok` false) one that failed, or was skipped because it was not its turn."""

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


@dataclass
class TierCount:
    """Checkpoints of one tier. complete, skipped, failed: how many; stall_s: of the complete ones. newest: of all;
    good: the newest complete one; tried: the newest that was not skipped. late: how many were skipped as the tier is
    too slow, since late_ns, and until it is not any more; left_out: the newest of them."""

    newest: CheckpointFact
    complete: int = 0
    skipped: int = 0
    failed: int = 0
    stall_s: float = 0.0
    good: CheckpointFact | None = None
    tried: CheckpointFact | None = None
    left_out: CheckpointFact | None = None
    late: int = 0
    late_ns: int = 0

    def take(self, one: CheckpointFact) -> None:
        """Take in the next checkpoint."""
        before, self.newest = self.newest, one
        if one.ok:
            self.good, self.complete, self.stall_s = one, self.complete + 1, self.stall_s + one.stall_s
        if one.skipped:
            self.skipped += 1
        else:
            self.tried, self.failed = one, self.failed + (not one.ok)
        if one.skipped and one.cause in (Cause.BUSY, Cause.SLOW):
            self.late_ns = self.late_ns if self.late else one.time_ns
            self.late, self.left_out = self.late + 1, one
        elif not self.too_slow or not one.ok or before.ok:
            self.late = 0

    @property
    def too_slow(self) -> bool:
        """Whether it takes longer than the time between checkpoints: one is whole, and the next is left out."""
        return self.late > 0 and self.left_out is not None and self.left_out.cause is Cause.SLOW


@dataclass
class Checkpoints:
    """All checkpoints of a job. newest: of any tier; tiers: counts of all, by tier."""

    newest: deque[CheckpointFact] = field(default_factory=lambda: deque(maxlen=MOST_LISTED))
    tiers: dict[str, TierCount] = field(default_factory=dict)

    def take(self, one: CheckpointFact) -> None:
        """Take in the next checkpoint."""
        self.newest.append(one)
        if one.tier in self.tiers or len(self.tiers) < _MOST_TIERS:
            self.tiers.setdefault(one.tier, TierCount(one)).take(one)

    def begin(self) -> None:
        """A job begins, and has tried none so far."""
        for tier in self.tiers.values():
            tier.late, tier.tried = 0, None

    def damaged(self, step: int) -> None:
        """That of a step is not whole after all: neither it nor a later one that was told before counts."""
        for name, tier in self.tiers.items():
            if name != "memory" and tier.good is not None and tier.good.step >= step:
                older = (one for one in reversed(self.newest) if one.ok and one.tier == name and one.step < step)
                tier.good = next(older, None)

    def good(self, *, memory: bool = False) -> list[CheckpointFact]:
        """The newest complete one of each tier; those in memory end with the job's processes."""
        found = [tier.good for name, tier in self.tiers.items() if memory or name != "memory"]
        return [one for one in found if one is not None]


@dataclass(frozen=True)
class Trouble:
    """A trouble, and the time of its first event."""

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
    """An event to mark on the charts."""

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
    """Steps whose loss or gradient was not finite: their number, the first and the last, and how many there are in a
    row up to the newest step. applied: an update of those in a row was made, so the weights are of no use."""

    count: int
    first: int
    last: int
    in_a_row: int
    applied: bool = True

    @property
    def level(self) -> str:
        """Gravity now: "" (the newest step was finite), warning, or bad: it goes on, and harms the weights."""
        bad = self.in_a_row >= _GOES_ON and self.applied
        return "" if not self.in_a_row else "bad" if bad else "warning"

    def often(self, step: int) -> bool:
        """Whether it is many of the steps up to this one, and lately: a scale of fp16 that is too large now and then
        is not."""
        return self.count >= max(_OFTEN, step / _OFTEN_OF) and self.last >= step - _RECENT_STEPS

    @property
    def since(self) -> int:
        """The first step of those in a row."""
        return self.last - self.in_a_row + 1

    def __str__(self) -> str:
        return f"{self.count} steps, {self.first} to {self.last}" if self.count > 1 else f"step {self.first}"
