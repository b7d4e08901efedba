"""Growing sums: counts and histograms over all events of a job, for systems that collect such numbers. Pure.

Facts keep only the newest events; here nothing is ever forgotten. A reader that starts from the beginning of the same
files arrives at the same numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from everstep.base.cause import Cause
from everstep.report.wall_time import PHASES
from everstep.report.words import Event, cause, checkpoint_result, number, whole_number

TOTAL = "total"
STEP_BOUNDS_S = (*(digit * 10.0**power for power in range(-4, 2) for digit in (1, 2, 5)), 100.0)
WAIT_BOUNDS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)
TIERS = ("memory", "disk", "object", "other")
FAULTS = tuple(cause for cause in Cause if cause.is_fault)
SKIPPED = tuple(cause for cause in Cause if cause.skips_checkpoint)
NO_CHECKPOINT = (
    Cause.SLOW,
    Cause.DISK,
    Cause.STORE,
    Cause.OOM,
    Cause.CORRUPT,
    Cause.CONFIG,
    Cause.UNKNOWN,
)
"""Causes that are counted from zero on: a series that begins with its first event would show no increase then."""
_MOST_SAMPLES = 1 << 40
_MOST = 1e12


class Tally:
    """Takes in events in file order. Dictionaries have every key of FAULTS, of TIERS (and NO_CHECKPOINT or SKIPPED), or
    TOTAL and the recovery's phases; causes that are none of these are added as they come.

    step_seconds: from commit to commit of two successive steps, with all that came between them; started_ns,
    progress_ns: of the newest start, and of the newest step since (the start itself before the first one).
    """

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self.step_seconds = Histogram(STEP_BOUNDS_S)
        self.recoveries = dict.fromkeys(FAULTS, 0)
        self.recovery_seconds = {phase: Histogram(WAIT_BOUNDS_S) for phase in (TOTAL, *PHASES)}
        self.checkpoint_seconds = {tier: Histogram(WAIT_BOUNDS_S) for tier in TIERS}
        self.checkpoint_failures = {(tier, cause): 0 for tier in TIERS for cause in NO_CHECKPOINT}
        self.checkpoints_skipped = {(tier, cause): 0 for tier in TIERS for cause in SKIPPED}
        self.checkpoint_bytes: dict[str, int] = {}
        self.checkpoint_ns: dict[str, int] = {}
        self.coordinator_restarts = 0
        self.nonfinite_steps = 0
        self.started_ns = 0
        self.progress_ns = 0
        self._step = 0
        self._step_ns = 0

    def take(self, event: Event) -> None:
        act, time_ns = _ACTS.get(event["kind"]), whole_number(event.get("time_unix_ns"))
        if act is not None and 0 <= time_ns < 1 << 63:
            act(self, event, time_ns)

    def _job_started(self, event: Event, time_ns: int) -> None:
        self.started_ns = self.progress_ns = time_ns
        self._step_ns = 0

    def _step_committed(self, event: Event, time_ns: int) -> None:
        step, samples = whole_number(event.get("step")), whole_number(event.get("samples"))
        samples = samples if 0 <= samples <= _MOST_SAMPLES else 0
        self.steps += 1
        self.nonfinite_steps += bool(event.get("nonfinite"))
        self.samples += samples
        if step == self._step + 1 and time_ns > self._step_ns > 0:
            self.step_seconds.add((time_ns - self._step_ns) / 1e9)
        self._step, self._step_ns = step, time_ns
        self.progress_ns = time_ns

    def _recovery_completed(self, event: Event, time_ns: int) -> None:
        why = cause(event)
        self.recoveries[why] = self.recoveries.get(why, 0) + 1
        phases = event.get("phases_s")
        spent = {TOTAL: event.get("duration_s"), **(phases if isinstance(phases, dict) else {})}
        for phase, histogram in self.recovery_seconds.items():
            histogram.add(max(0.0, number(spent.get(phase))))

    def _checkpoint_completed(self, event: Event, time_ns: int) -> None:
        tier = _tier(event)
        self.checkpoint_seconds[tier].add(max(0.0, number(event.get("duration_s"))))
        self.checkpoint_bytes[tier] = int(number(event.get("size_bytes") or event.get("bytes")))
        self.checkpoint_ns[tier] = time_ns

    def _no_checkpoint(self, event: Event, time_ns: int) -> None:
        key = (_tier(event), cause(event))
        counts = self.checkpoints_skipped if checkpoint_result(event) == "skipped" else self.checkpoint_failures
        counts[key] = counts.get(key, 0) + 1

    def _coordinator_restarted(self, event: Event, time_ns: int) -> None:
        self.coordinator_restarts += 1


_ACTS: dict[str, Callable[[Tally, Event, int], None]] = {
    "job_started": Tally._job_started,
    "step_committed": Tally._step_committed,
    "recovery_completed": Tally._recovery_completed,
    "checkpoint_completed": Tally._checkpoint_completed,
    "checkpoint_failed": Tally._no_checkpoint,
    "checkpoint_skipped": Tally._no_checkpoint,
    "coordinator_restarted": Tally._coordinator_restarted,
}


def _tier(event: Event) -> str:
    tier = event.get("tier")
    return tier if isinstance(tier, str) and tier in TIERS else "other"


class Histogram:
    """How many values were at most each of `bounds` (rising), how many there were in all, and their sum.

    The sum is kept in billionths, as a whole number: so it does not depend on the order in which values come, and a
    reader that starts over arrives at the very same one.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0

    @property
    def sum(self) -> float:
        return self._sum / 1e9

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, `times` over; a value above 10^12 counts as 10^12."""
        if value:
            value = min(value, _MOST)
            self._sum += round(value * 1e9) * times
        self._counts[bisect_left(self.bounds, value)] += times

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(bound, number of values not above it), rising; the last bound is infinity."""
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            below += count
            yield bound, below
