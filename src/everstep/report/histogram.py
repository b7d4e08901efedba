"""Values counted by size: as many numbers as there are bounds, however many values come. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

_MOST = 1e12


class Histogram:
    """How many values were at most each of `bounds` (rising), how many there were in all, and their sum.

    The sum is kept in billionths, as a whole number: so it does not depend on the order in which values come, and a
    reader that starts anew arrives at the very same one.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0

    @property
    def sum(self) -> float:
        """What they add up to."""
        return self._sum / 1e9

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, `times` over; one above 10^12 counts as that."""
        if value:
            value = min(value, _MOST)
            self._sum += round(value * 1e9) * times
        self._counts[bisect_left(self.bounds, value)] += times

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(bound, how many values are not above it), rising; the last bound is infinity."""
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            below += count
            yield bound, below
