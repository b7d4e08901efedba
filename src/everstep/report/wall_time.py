"""Account of a job's wall time, second by second. Pure.

Intervals are painted with a use; if they overlap, the more specific use counts. Unpainted time between the first and
the last moment is training. So the parts always add up to the whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

PHASES = ("notice", "decide", "unblock", "regroup", "settle", "redo", "heal")
USES = (
    "training",
    "start-up",
    *(f"recovery: {phase}" for phase in PHASES),
    "recovery: other",
    "stalled",
    "waiting for workers",
    "steps done again",
    "evaluation",
    "checkpoints",
    "finishing",
    "not running",
)
_PRIORITY = {
    "stalled": 1,
    "finishing": 2,
    "evaluation": 3,
    "checkpoints": 4,
    "steps done again": 5,
    "waiting for workers": 7,
    "start-up": 8,
    "not running": 9,
    "clock": 10,
}
_RECOVERY = 6
_BY_CAPACITY = "training, by capacity"
_MOST_INTERVALS = 20_000


@dataclass(frozen=True)
class Stretch:
    """A stretch of wall time, in ns since 1970, and its use."""

    begin_ns: int
    end_ns: int
    use: str

    @property
    def priority(self) -> int:
        """Rank of its use: the higher one counts if two overlap."""
        return _PRIORITY.get(self.use, _RECOVERY if self.use.startswith("recovery") else 0)


class TimeAccount:
    """Collects intervals; old ones are added up and forgotten once there are many. Inside, time goes on where the clock
    was set back, and what it was set forward by does not count."""

    def __init__(self) -> None:
        self.begin_ns: int | None = None
        self.end_ns = 0
        self.intervals: list[Stretch] = []
        self._folded: dict[str, int] = {}
        self._folded_through_ns = 0
        self._shares: list[tuple[int, float]] = [(0, 1.0)]
        self._set_back_ns = 0

    def reach(self, time_ns: int) -> None:
        if self.begin_ns is None:
            self.begin_ns = self._folded_through_ns = time_ns
        if time_ns > self.end_ns:
            self.end_ns = time_ns

    def clock_set_back(self, time_ns: int) -> None:
        """The last moment has this time by the new clock."""
        self._set_back_ns += self.end_ns - time_ns
        self.end_ns = time_ns

    def clock_set_forward(self, time_ns: int, by_ns: int) -> None:
        """By this moment the clock had been set forward by so much: that time never was."""
        self.paint(time_ns - by_ns, time_ns, "clock")

    def capacity(self, time_ns: int, share: float) -> None:
        """Set the share, from 0 to 1, of the wanted capacity that takes part from this moment on."""
        share = min(1.0, max(0.0, share))
        if share != self._shares[-1][1]:
            self._shares.append((max(time_ns + self._set_back_ns, self._shares[-1][0]), share))

    def paint(self, begin_ns: int, end_ns: int, use: str) -> None:
        if end_ns > begin_ns:
            self.intervals.append(self._inside(Stretch(begin_ns, end_ns, use)))
        if len(self.intervals) > _MOST_INTERVALS:
            self._fold()

    def seconds(self, extra: Iterable[Stretch] = ()) -> dict[str, float]:
        """Seconds by use, in the order of USES; the sum is the wall time. extra: stretches that are still under way."""
        total = self._total(extra)
        return {use: total[use] / 1e9 for use in USES if total.get(use)}

    def by_capacity_s(self, extra: Iterable[Stretch] = ()) -> float:
        """The seconds of training, weighted by the share of the capacity in it. extra: as for `seconds`."""
        return self._total(extra).get(_BY_CAPACITY, 0) / 1e9

    def _total(self, extra: Iterable[Stretch]) -> dict[str, int]:
        if self.begin_ns is None:
            return {}
        total, end_ns = dict(self._folded), self.end_ns + self._set_back_ns
        under_way = map(self._inside, extra)
        _sweep([*self.intervals, *under_way], self._folded_through_ns, end_ns, total, self._shares)
        return total

    def _inside(self, one: Stretch) -> Stretch:
        ahead_ns = self._set_back_ns
        return replace(one, begin_ns=one.begin_ns + ahead_ns, end_ns=one.end_ns + ahead_ns) if ahead_ns else one

    def _fold(self) -> None:
        self.intervals.sort(key=lambda i: i.end_ns)
        half = len(self.intervals) // 2
        through_ns = max(self._folded_through_ns, self.intervals[half].end_ns)
        _sweep(self.intervals, self._folded_through_ns, through_ns, self._folded, self._shares)
        self._folded_through_ns = through_ns
        past = [i for i, (time_ns, _) in enumerate(self._shares) if time_ns <= through_ns]
        del self._shares[: past[-1]]
        self.intervals = [i for i in self.intervals[half:] if i.end_ns > through_ns]


def recovery_phases(end_ns: int, duration_s: float, phases_s: dict[str, float]) -> list[Stretch]:
    """Stretches of a recovery that ended at `end_ns`: its phases one after another; unexplained time is "other".

    Phases that add up to more than the whole are shortened in proportion.
    """
    shares = [(phase, max(0.0, float(phases_s.get(phase) or 0.0))) for phase in PHASES]
    total = sum(share for _, share in shares)
    scale = min(1.0, duration_s / total) if total > 0 else 0.0
    found: list[Stretch] = []
    at = end_ns - round(max(0.0, duration_s) * 1e9)
    for phase, share in shares:
        until = min(end_ns, at + round(share * scale * 1e9))
        if until > at:
            found.append(Stretch(at, until, f"recovery: {phase}"))
        at = until
    if end_ns - at > 1000:
        found.append(Stretch(at, end_ns, "recovery: other"))
    return found


def goodput(seconds: dict[str, float]) -> float | None:
    """Training's share of the time in which the job was running, None before there was any."""
    running = sum(value for use, value in seconds.items() if use != "not running")
    return seconds.get("training", 0.0) / running if running > 0 else None


def _sweep(
    intervals: list[Stretch], begin_ns: int, end_ns: int, total: dict[str, int], shares: list[tuple[int, float]]
) -> None:
    """Add the nanoseconds by use between two moments. shares: (time, share of the capacity from then on)."""
    edges: list[tuple[int, int, Stretch | float]] = []
    for interval in intervals:
        first, last = max(interval.begin_ns, begin_ns), min(interval.end_ns, end_ns)
        if last > first:
            edges += [(first, 1, interval), (last, -1, interval)]
    edges += [(min(end_ns, max(begin_ns, time_ns)), 0, share) for time_ns, share in shares]
    edges.sort(key=lambda edge: edge[0])
    active: dict[tuple[int, str], int] = {}
    at, capacity = begin_ns, 1.0

    def add(until_ns: int) -> None:
        use = max(active)[1] if active else "training"
        total[use] = total.get(use, 0) + until_ns - at
        if use == "training":
            total[_BY_CAPACITY] = total.get(_BY_CAPACITY, 0) + round((until_ns - at) * capacity)

    for time_ns, sign, what in edges:
        if time_ns > at:
            add(time_ns)
            at = time_ns
        if not isinstance(what, Stretch):
            capacity = what
            continue
        key = (what.priority, what.use)
        active[key] = active.get(key, 0) + sign
        if not active[key]:
            del active[key]
    if end_ns > at:
        add(end_ns)
