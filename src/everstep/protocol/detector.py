"""Phi-accrual failure detection with a floor and a ceiling. Pure.

The detector learns how regularly heartbeats come and says how surprising the present silence is. Phi is minus the
decimal logarithm of the probability that a live peer is silent for this long. The floor keeps a very regular peer
from being given up after a short hiccup; the ceiling bounds the wait for a very irregular one.

Source: Hayashibara et al., "The phi accrual failure detector", SRDS 2004, section 4.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from everstep.base.errors import check

# Quantiles of the normal distribution at which phi reaches 5 and 10: P(Z > z) = 10**-phi.
_SUSPECT_Z = 4.264890793922825
_DEAD_Z = 6.361340902404057
_WINDOW = 100
_MIN_DEVIATION_NS = 10_000_000
_LATE_BEATS = 10
_LATE_FACTOR = 4


@dataclass(frozen=True)
class Suspicion:
    """Judgement of a peer. reason: plain text, empty if there is nothing to report."""

    suspect: bool
    dead: bool
    reason: str


class PhiDetector:
    """Watches one peer's heartbeats. floor_ns: a shorter silence never counts as a death; ceiling_ns: a longer one
    always does; interval_ns: the expected interval until enough heartbeats have come; now_ns: start of the watch
    (counts as a heartbeat)."""

    def __init__(self, *, floor_ns: int, ceiling_ns: int, interval_ns: int, now_ns: int) -> None:
        check(0 < floor_ns <= ceiling_ns, f"expected 0 < floor <= ceiling, got {floor_ns} and {ceiling_ns}")
        check(interval_ns > 0, f"expected a positive interval, got {interval_ns}")
        self._floor_ns = floor_ns
        self._ceiling_ns = ceiling_ns
        self._last_ns = now_ns
        self._least_mean_ns = 0
        self._given_up = False
        self._waits: deque[int] = deque(maxlen=_LATE_BEATS)
        # The expectation stands in until three real samples have replaced it.
        self._expected = 3
        self._intervals: deque[int] = deque([interval_ns] * self._expected, maxlen=_WINDOW)

    def heartbeat(self, now_ns: int, waited_ns: int = 0) -> None:
        """A heartbeat came. waited_ns: time that its sender had waited for a processor since the last one."""
        self._waits.append(waited_ns)
        if self._expected:
            self._expected -= 1
            self._intervals.popleft()
        self._intervals.append(max(0, now_ns - self._last_ns))
        self.resume(now_ns)

    def resume(self, now_ns: int) -> None:
        """A heartbeat after an interruption whose length says nothing about the peer's rhythm (a reconnect)."""
        self._last_ns = max(self._last_ns, now_ns)
        self._given_up = False

    def give_up(self) -> bool:
        """The silence has lasted too long. Returns False for the first time: if the watcher itself has stood still,
        heartbeats that came meanwhile are still to be read, and it has to look again after that."""
        before, self._given_up = self._given_up, True
        return before

    def expect(self, interval_ns: int) -> None:
        """From now on the peer may wait `interval_ns` between heartbeats, whatever it did before."""
        self._least_mean_ns = interval_ns

    def pardon(self, gap_ns: int) -> None:
        """Subtract `gap_ns` of silence, in which the watcher itself did not listen."""
        self._last_ns += gap_ns

    def silence_ns(self, now_ns: int) -> int:
        return max(0, now_ns - self._last_ns)

    @property
    def ceiling_at_ns(self) -> int:
        """When the present silence reaches the ceiling."""
        return self._last_ns + self._ceiling_ns

    def suspicion(self, now_ns: int) -> Suspicion:
        silence = self.silence_ns(now_ns)
        suspect_after, dead_after = self._limits()
        if silence < suspect_after:
            return Suspicion(False, False, "")
        text = f"no heartbeat for {silence / 1e9:.2f} s"
        if silence < dead_after:
            mean_s = sum(self._intervals) / len(self._intervals) / 1e9
            return Suspicion(True, False, f"{text} (they came every {mean_s:.2f} s)")
        return Suspicion(True, True, f"{text} (limit {dead_after / 1e9:.2f} s)")

    def next_change_ns(self, now_ns: int) -> int:
        """The next moment at which `suspicion` can change, if no heartbeat comes until then."""
        suspect_after, dead_after = self._limits()
        suspect_at = self._last_ns + suspect_after
        return suspect_at if now_ns < suspect_at else self._last_ns + dead_after

    def _moments(self) -> tuple[float, float]:
        n = len(self._intervals)
        mean = sum(self._intervals) / n
        deviation = math.sqrt(max(0.0, sum(i * i for i in self._intervals) / n - mean * mean))
        mean = max(mean, self._least_mean_ns)
        return mean, max(deviation, mean / 4, _MIN_DEVIATION_NS)

    def _limits(self) -> tuple[int, int]:
        mean, deviation = self._moments()
        longest = max(self._waits, default=0)
        # A peer that waits for most of its time gets longer, within the ceiling; one with processors to spare does not.
        late = _LATE_FACTOR * longest if longest > mean / 2 else 0
        dead = min(max(int(mean + _DEAD_Z * deviation), self._floor_ns) + late, self._ceiling_ns)
        suspect = min(max(int(mean + _SUSPECT_Z * deviation), self._floor_ns // 2), dead)
        return suspect, dead
