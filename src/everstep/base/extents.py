"""Sets of blocks of one stage's state, run-length coded: blocks that a member holds, lacks, asks for or gives. Pure.

A state's blocks lie in planes (one per kind of state) and have one numbering: plane after plane, in the order of
`Sizes`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import accumulate
from operator import itemgetter, or_
from typing import NamedTuple

from everstep.base.errors import InvariantViolation, check

Sizes = tuple[tuple[str, int], ...]
"""The planes of a state with their numbers of blocks, in the order of the numbering. One of no blocks may follow, whose
name says where segments end (`with_ends`)."""

Coded = tuple[Sizes, tuple[tuple[int, int, int], ...]] | None
"""As it travels: sizes, and (place of the plane among them, lo, hi); None for all."""

Runs = tuple[tuple[int, int], ...]
"""Blocks by their numbers: (first, one beyond the last), ascending, none empty, none adjacent."""

_Spans = list[tuple[int, int]]
_ENDS = "ends:"


def with_ends(planes: Iterable[tuple[str, int]], ends: Sequence[int]) -> Sizes:
    """Sizes that say, too, after which blocks of the divided planes a segment may end, if not after any."""
    return (*planes, *([(_ENDS + ",".join(map(str, ends)), 0)] if ends else ()))


def ends_in(of: Sizes) -> tuple[int, ...]:
    """The argument of `with_ends`."""
    name = of[-1][0] if of else ""
    return tuple(map(int, name.removeprefix(_ENDS).split(","))) if name.startswith(_ENDS) else ()


def within(runs: Runs) -> tuple[int, int]:
    """(first, one beyond the last) block of the runs; (0, 0) if there are none."""
    return (runs[0][0], runs[-1][1]) if runs else (0, 0)


def common(left: Runs, right: Runs) -> Runs:
    """Blocks that are in both."""
    found, i, k = [], 0, 0
    while i < len(left) and k < len(right):
        run = max(left[i][0], right[k][0]), min(left[i][1], right[k][1])
        if run[0] < run[1]:
            found.append(run)
        if left[i][1] <= right[k][1]:
            i += 1
        else:
            k += 1
    return tuple(found)


class BlockRun(NamedTuple):
    """Blocks `lo` to `hi` - 1 of a plane."""

    plane: str
    lo: int
    hi: int


@dataclass(frozen=True)
class Extents:
    """A set of blocks. `whole`: all blocks, however many. Otherwise `runs` (ascending, disjoint, merged) and, if there
    are any, `of`: the planes of the whole state, of which the runs are a proper part.

    Equal sets are equal values: make parts by `part`.
    """

    whole: bool = False
    runs: tuple[BlockRun, ...] = ()
    of: Sizes = ()

    @staticmethod
    def part(of: Sizes, runs: Iterable[BlockRun]) -> Extents:
        """These blocks of a state of these sizes; `WHOLE` if they are all. Raises: InvariantViolation for others."""
        known, starts = dict(of), _starts(of)
        spans = []
        for plane, lo, hi in runs:
            check(0 <= lo <= hi <= known.get(plane, -1), f"expected blocks of {of}, got {lo} to {hi} of {plane!r}")
            spans.append((starts[plane] + lo, starts[plane] + hi))
        return _made(of, spans)

    @staticmethod
    def numbered(of: Sizes, numbers: Iterable[int]) -> Extents:
        return _made(of, [(n, n + 1) for n in numbers])

    def __bool__(self) -> bool:
        return self.whole or bool(self.runs)

    def __or__(self, other: Extents) -> Extents:
        if self.whole or not other:
            return self
        if other.whole or not self:
            return other
        return _made(self._like(other), self._spans() + other._spans())

    def __sub__(self, other: Extents) -> Extents:
        if other.whole:
            return NONE
        if not self or not other:
            return self
        of = other.of if self.whole else self._like(other)
        mine = [(0, _total(of))] if self.whole else self._spans()
        return _made(of, _without(mine, other._spans()))

    def __and__(self, other: Extents) -> Extents:
        if self.whole or not other:
            return other
        if not self:
            return self
        return self - (WHOLE - other) if not other.whole else self

    def covers(self, other: Extents) -> bool:
        return not other - self

    def fits(self, other: Extents) -> bool:
        """Whether both can be parts of the same state."""
        return not (self.of and other.of) or self.of == other.of

    def size(self, of: Sizes) -> int:
        """Number of blocks, in a state of these sizes."""
        return sum(hi - lo for lo, hi in self.spans(of))

    def spans(self, of: Sizes) -> _Spans:
        """Numbers of the blocks, ascending, as (first, one beyond the last)."""
        return ([(0, _total(of))] if _total(of) else []) if self.whole else self._spans()

    def first(self, count: int, of: Sizes) -> Extents:
        taken: _Spans = []
        for lo, hi in self.spans(of):
            taken.append((lo, min(hi, lo + count)))
            count -= hi - lo
            if count <= 0:
                break
        return _made(of, taken)

    def split(self, shares: int, of: Sizes) -> list[Extents]:
        """`shares` consecutive sets whose sizes differ by at most one block."""
        found, left, size = [], self, self.size(of)
        for k in range(shares):
            found.append(left.first(size // shares + (k < size % shares), of) if left else NONE)
            left = left - found[-1]
        return found

    def encoded(self) -> Coded:
        if self.whole:
            return None
        places = {plane: k for k, (plane, _) in enumerate(self.of)}
        return self.of, tuple((places[run.plane], run.lo, run.hi) for run in self.runs)

    @staticmethod
    def decoded(coded: Coded) -> Extents:
        """Inverse of `encoded`. Raises: InvariantViolation for anything that it cannot have made."""
        if coded is None:
            return WHOLE
        of, runs = coded
        check(all(0 <= k < len(of) for k, _, _ in runs), f"expected runs of the planes {of}, got {runs}")
        return Extents.part(of, (BlockRun(of[k][0], lo, hi) for k, lo, hi in runs))

    def __str__(self) -> str:
        return "all" if self.whole else ", ".join(f"{p} {lo}-{hi - 1}" for p, lo, hi in self.runs) or "nothing"

    def _like(self, other: Extents) -> Sizes:
        if self.of != other.of:
            raise InvariantViolation(f"parts of states of different sizes: {self.of}, {other.of}")
        return self.of

    def _spans(self) -> _Spans:
        starts = _starts(self.of)
        return [(starts[plane] + lo, starts[plane] + hi) for plane, lo, hi in self.runs]


WHOLE = Extents(whole=True)
NONE = Extents()


def union(parts: Iterable[Extents]) -> Extents:
    """All blocks of the parts."""
    return reduce(or_, parts, NONE)


def _total(of: Sizes) -> int:
    return sum(count for _, count in of)


@lru_cache(maxsize=256)
def _starts(of: Sizes) -> Mapping[str, int]:
    return dict(zip((plane for plane, _ in of), accumulate((n for _, n in of), initial=0), strict=False))


def _made(of: Sizes, spans: Sequence[tuple[int, int]]) -> Extents:
    """The set of all blocks with these numbers, in any order."""
    merged: _Spans = []
    for lo, hi in sorted(span for span in spans if span[0] < span[1]):
        if merged and lo <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(hi, merged[-1][1]))
        else:
            merged.append((lo, hi))
    if not merged:
        return NONE
    total = _total(of)
    if merged[0][0] < 0 or merged[-1][1] > total:
        raise InvariantViolation(f"expected blocks below {total}, got {merged[-1][1] - 1}")
    if merged == [(0, total)]:
        return WHOLE
    runs = []
    for (plane, count), start in zip(of, _starts(of).values(), strict=True):
        for at in range(bisect_right(merged, start, key=itemgetter(1)), len(merged)):
            lo, hi = merged[at]
            if lo >= start + count or not count:
                break
            runs.append(BlockRun(plane, max(lo - start, 0), min(hi - start, count)))
    return Extents(False, tuple(runs), of)


def _without(spans: _Spans, holes: _Spans) -> _Spans:
    """What holes leave of spans; both ascend and are disjoint."""
    left: _Spans = []
    for lo, hi in spans:
        for at in range(bisect_right(holes, lo, key=itemgetter(1)), len(holes)):
            start, stop = holes[at]
            if start >= hi:
                break
            left.append((lo, start))
            lo = stop
        left.append((lo, hi))
    return left
