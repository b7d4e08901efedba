"""Series that stay small however long a job runs: neighbouring points are merged once there are too many. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from typing import Any

POINTS = 2048


class Series:
    """Points (x, columns), x ascending, at most `points` of them.

    rules: how two neighbouring values of each column become one: "last", "sum", "mean" (by the number of points
    merged), "min" or "max". The point of a merge keeps the x of the later one. `version` changes whenever points that
    had been there changed, the newest one excepted, which grows until its bucket is full.
    """

    def __init__(self, rules: Sequence[str], points: int = POINTS) -> None:
        self.rules = tuple(rules)
        self.version = 0
        self.x: list[float] = []
        self.columns: list[list[float]] = [[] for _ in self.rules]
        self._counts: list[int] = []
        self._points = max(4, points)
        self._stride = 1

    def __len__(self) -> int:
        return len(self.x)

    def add(self, x: float, values: Sequence[float | None]) -> None:
        """Append a point. If its x is not beyond the last, it replaces all points from its x on: repeated steps."""
        if self.x and x <= self.x[-1]:
            self.cut(x)
        if self._counts and self._counts[-1] < self._stride:
            self._merge_into(-1, x, values, 1)
            return
        self.x.append(x)
        self._counts.append(1)
        for column, value in zip(self.columns, values, strict=True):
            column.append(math.nan if value is None else value)
        if len(self.x) > self._points:
            self._halve()

    def cut(self, x: float) -> None:
        """Forget everything from this x on."""
        keep = bisect.bisect_left(self.x, x)
        if keep < len(self.x):
            del self.x[keep:], self._counts[keep:]
            for column in self.columns:
                del column[keep:]
            self.version += 1

    def at(self, x: float) -> int | None:
        """The index of the first point at or beyond x."""
        found = bisect.bisect_left(self.x, x)
        return found if found < len(self.x) else None

    def since(self, version: int, length: int) -> dict[str, Any] | None:
        """Points that a reader with `length` points of `version` lacks, as {version, start, x, columns}; None if none.

        The newest point that the reader has is given again, for it may have grown.
        """
        start = max(0, length - 1) if version == self.version and length <= len(self.x) else 0
        if not self.x and version == self.version:
            return None
        return {
            "version": self.version,
            "start": start,
            "x": self.x[start:],
            "columns": [[None if math.isnan(v) else v for v in column[start:]] for column in self.columns],
        }

    def _merge_into(self, i: int, x: float, values: Sequence[float | None], count: int) -> None:
        """Merge one point of `count` points into point i. It runs for each line of a long file, so it is fast."""
        before = self._counts[i]
        for rule, column, value in zip(self.rules, self.columns, values, strict=True):
            if value is None or value != value:
                continue
            old = column[i]
            if rule == "last" or old != old:
                column[i] = value
            elif rule == "sum":
                column[i] = old + value
            elif rule == "mean":
                column[i] = (old * before + value * count) / (before + count)
            elif (value < old) == (rule == "min"):
                column[i] = value
        self.x[i] = x
        self._counts[i] = before + count

    def _halve(self) -> None:
        for i in range(0, len(self.x) - 1, 2):
            self._merge_into(i, self.x[i + 1], [column[i + 1] for column in self.columns], self._counts[i + 1])
        self.x, self._counts, self.columns = self.x[::2], self._counts[::2], [column[::2] for column in self.columns]
        self._stride *= 2
        self.version += 1
