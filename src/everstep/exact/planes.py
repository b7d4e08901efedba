"""Where each tensor of a state lies: in one plane per kind of state, all of them on the grid of the gradient.

A plane holds the parameters (`model`) or what the optimizer keeps under one key (`optimizer/exp_avg`), of one type:
others than float32 have planes of their own (`model:bfloat16`). Element e of the flat gradient (`layout`) is element e
of each of these planes, so whoever owns a range of the gradient can hash, send or store the same range of the
optimizer's state alone. Everything else is in the plane `rest`, by unit.

Planes follow each other in the order of their names, each beginning at a block. A block holds the elements of one unit
only, and a block in which nothing lies does not exist.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MODEL, OPTIMIZER, REST = "model", "optimizer", "rest"
ITEM_SIZES = (1, 2, 4)
"""Of the elements that planes hold; tensors of larger ones are in `rest`."""
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")

PlaneRun = tuple[int, int, int]
"""Element block, first block, count: so many blocks of the state from that one on hold the elements of the grid from
`BLOCK_ELEMENTS` times the element block on."""


@dataclass(frozen=True)
class Plane:
    """Some consecutive blocks of a state. itemsize: bytes of an element. runs: ascend, in both numbers.

    The elements of `rest` are bytes, and lie on no grid.
    """

    name: str
    itemsize: int
    runs: tuple[PlaneRun, ...]

    @property
    def start(self) -> int:
        """Its first block."""
        return self.runs[0][1]

    @property
    def stop(self) -> int:
        """The block after its last one."""
        return self.runs[-1][1] + self.runs[-1][2]

    @property
    def span(self) -> int:
        """How many element blocks lie in a block."""
        return span_of(self.itemsize)

    def grid(self) -> dict[int, int]:
        """For each of its blocks the element block that it begins with."""
        return {first + k: at + k * self.span for at, first, count in self.runs for k in range(count)}

    def blocks(self, start: int, stop: int) -> list[int]:
        """The blocks with elements of the element blocks `start` to `stop` - 1. Where elements are smaller than four
        bytes, the first and the last one may hold those of neighbours in the same unit too."""
        found: list[int] = []
        span = self.span
        ends = [*(at for at, _, _ in self.runs[1:]), stop + span]
        for (at, first, count), end in zip(self.runs, ends, strict=True):
            low, high = max(0, (start - at) // span), min(count, -(-(stop - at) // span))
            if start < min(at + count * span, end, stop):
                found.extend(range(first + low, first + high))
        return found


def span_of(itemsize: int) -> int:
    """How many element blocks lie in a block of elements of this size."""
    return 4 // itemsize


def runs_of(places: Iterable[tuple[int, int]], itemsize: int) -> tuple[PlaneRun, ...]:
    """The runs of a plane that has these (element block, block), which ascend."""
    runs: list[PlaneRun] = []
    for at, block in places:
        extend(runs, at, block, 1, span_of(itemsize))
    return tuple(runs)


def extend(runs: list[PlaneRun], at: int, first: int, count: int, span: int) -> None:
    """Adds blocks to a plane, to the last of its runs if they follow it in both numbers."""
    if runs:
        last_at, last_first, last_count = runs[-1]
        if (last_at + last_count * span, last_first + last_count) == (at, first):
            runs[-1] = (last_at, last_first, last_count + count)
            return
    runs.append((at, first, count))


def is_kind(kind: str) -> bool:
    """Whether there are planes of this kind: `model`, or `optimizer/` and a plain key."""
    top, slash, key = kind.partition("/")
    return kind == MODEL or (top == OPTIMIZER and bool(slash) and _KEY.fullmatch(key) is not None)


# ---- as JSON


def rows_of(planes: Sequence[Plane]) -> list[list[object]]:
    """As a manifest has them: name, itemsize, runs."""
    return [[p.name, p.itemsize, [list(run) for run in p.runs]] for p in planes]


def planes_of(manifest: Mapping[str, object]) -> tuple[Plane, ...]:
    """The planes of a manifest; all of one without planes (format 1) is `rest`."""
    rows = manifest.get("planes")
    if rows is None:
        n_blocks = len(manifest["blocks"])  # type: ignore[arg-type]
        return (Plane(REST, 1, ((0, 0, n_blocks),)),) if n_blocks else ()
    return tuple(Plane(name, size, tuple((a, b, n) for a, b, n in runs)) for name, size, runs in rows)  # type: ignore[attr-defined]


def plane_at(planes: Sequence[Plane], block: int) -> Plane | None:
    """The one that has this block."""
    k = bisect_right([p.start for p in planes], block) - 1
    return planes[k] if k >= 0 and block < planes[k].stop else None
