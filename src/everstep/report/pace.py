"""Speed of the steps, and whether the next one is overdue: the one place that works speed out. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median

RECENT_STEPS = 32
"""The window of every rate and of the usual time, in steps since the newest start."""
_MANY = 4.0
_GRACE_S = 1.0
_UNKNOWN_S = 30.0
_BREAK_S = 60.0
_LASTS_STEPS = 3
_LASTS = 2.0


class Pace:
    """Takes in commits, each with its time. All rates are of the newest `RECENT_STEPS` since training last began, or
    went back: older steps, and the time in between, say nothing about the present speed. Nor does a standstill of
    minutes; but once a second step takes as long as that, it is the speed. told: the newest step."""

    def __init__(self) -> None:
        self.told = 0
        self._begun_ns = self._first_ns = 0
        self._recent: deque[tuple[int, int, int]] = deque(maxlen=RECENT_STEPS + 1)
        self._usual: deque[int] = deque(maxlen=RECENT_STEPS)

    def begin(self, time_ns: int) -> None:
        """Training begins, or goes back: the next commit does not follow upon the last."""
        self._begun_ns = time_ns
        self._recent.clear()

    def commit(self, time_ns: int, step: int, samples: int, clean: bool) -> None:
        """A step was committed. clean: nothing but the step itself lies between the commit before and this one."""
        self.told = step
        if not self._recent:
            self._first_ns = time_ns - self._begun_ns if self._begun_ns else 0
        passed_ns = time_ns - self._recent[-1][0] if self._recent else 0
        broken = self.was_late(passed_ns / 1e9) and passed_ns > max(_BREAK_S * 1e9, _MANY * self._usual[-1])
        if clean and passed_ns > 0:
            self._usual.append(passed_ns)
        if broken or passed_ns <= 0:  # after going back, some are told late
            self._recent.clear()
        self._recent.append((time_ns, step, samples))

    @property
    def steps(self) -> int:
        return max(0, len(self._recent) - 1)

    @property
    def usual_s(self) -> float | None:
        """Median seconds from one commit to the next without anything in between; None before there were two."""
        return median(self._usual) / 1e9 if self._usual else None

    def limit_s(self) -> float:
        """Seconds after the last commit beyond which training stands still. The first step, which is a slow one, is the
        measure of the second. A few slow ones in a row are the new speed, of which the median knows late."""
        usual_s = self.usual_s
        if usual_s is None:
            return max(_UNKNOWN_S, _MANY * self._first_ns / 1e9)
        newest = list(self._usual)[-_LASTS_STEPS:]
        lasting_s = _LASTS * min(newest) / 1e9 if len(newest) == _LASTS_STEPS else 0.0
        return max(_MANY * usual_s, usual_s + _GRACE_S, lasting_s)

    def stands_still(self, passed_s: float) -> bool:
        """Whether a step may not take so many seconds. Cheap for small numbers."""
        return passed_s > _GRACE_S and passed_s > self.limit_s()

    def was_late(self, passed_s: float) -> bool:
        """Whether a step that took so many seconds stood still: no one did while no usual time is known."""
        return bool(self._usual) and self.stands_still(passed_s)

    def samples_per_s(self, overdue_ns: int | None = None) -> float | None:
        """Samples per second of the newest steps; None before two steps. overdue_ns: the time now, if the next step is
        overdue; the speed falls with it."""
        if len(self._recent) < 2:
            return None
        (first_ns, _, _), (last_ns, _, _) = self._recent[0], self._recent[-1]
        seconds = ((last_ns if overdue_ns is None else overdue_ns) - first_ns) / 1e9
        return sum(samples for _, _, samples in list(self._recent)[1:]) / seconds if seconds > 0 else None

    def eta_s(self, step: int, total: int | None) -> float | None:
        """Seconds to the last step at the present speed; None if unknown, or there already."""
        if total is None or step >= total or len(self._recent) < 2:
            return None
        (first_ns, first, _), (last_ns, last, _) = self._recent[0], self._recent[-1]
        if last <= first or last_ns <= first_ns:
            return None
        return (total - step) * (last_ns - first_ns) / 1e9 / (last - first)
