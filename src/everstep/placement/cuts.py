"""Where a model is cut: which run of units makes up each part. Pure.

A cut is one (first unit, unit after the last) per part, in order, without gaps: `parts = stages x chunks`, and part p
belongs to stage `p % stages`. The cut changes no bit of the result, only how long the stages take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate, pairwise, takewhile

from everstep.base.errors import ConfigError
from everstep.base.stage_map import StageMap

ModelCut = tuple[tuple[int, int], ...]


def balance(costs: Sequence[float], parts: int) -> ModelCut:
    """Cut whose most expensive part is as cheap as possible; among equals the most even cut, then the earliest.

    costs: of the units, in any one measure, none negative. Every part has at least one unit.

    Raises: ConfigError if there are fewer units than parts.
    """
    n = len(costs)
    _check_enough(n, parts)
    ends = [0.0, *accumulate(float(c) for c in costs)]

    def ways(first: int, parts: int) -> Iterator[tuple[int, float]]:
        """(end, cost) of each possible first part when the units from `first` on are cut into `parts`."""
        return ((end, ends[end] - ends[first]) for end in range(first + 1 if parts > 1 else n, n - parts + 2))

    @cache
    def dearest(first: int, parts: int) -> float:
        """Least possible cost of the most expensive part."""
        if parts == 0:
            return 0.0
        least = math.inf
        for end, cost in ways(first, parts):
            least = min(least, max(cost, dearest(end, parts - 1)))
            if cost >= least:
                break
        return least

    limit = dearest(0, parts)

    @cache
    def squares(first: int, parts: int) -> tuple[float, int]:
        """Least sum of squared costs under that limit, and the end of the first part that gives it."""
        if parts == 0:
            return 0.0, n
        fitting = takewhile(lambda way: way[1] <= limit, ways(first, parts))
        return min(((cost * cost + squares(end, parts - 1)[0], end) for end, cost in fitting), default=(math.inf, n))

    cut, first = [], 0
    for left in range(parts, 0, -1):
        last = squares(first, left)[1]
        cut.append((first, last))
        first = last
    return tuple(cut)


def _check_enough(units: int, parts: int) -> None:
    if parts > units:
        raise ConfigError(
            f"stages: the model has {units} unit{'s' * (units != 1)}, fewer than the {parts} parts to cut it into: "
            f"use at most {units}, or let Task.units name finer ones (of an nn.Sequential: list(model))"
        )


def of_sizes(sizes: Sequence[int], units: int, source: str) -> ModelCut:
    """Cut with these numbers of units per part. source: who gave the sizes, for error messages.

    Raises: ConfigError if a part would be empty, or the sizes do not add up to the number of units.
    """
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ConfigError(f"{source}: expected at least 1 unit per part, got {list(sizes)}: give every part a unit")
    if sum(sizes) != units:
        raise ConfigError(f"{source}: expected {units} units in all, got {sum(sizes)} in {list(sizes)}: fix the sizes")
    return tuple(pairwise([0, *accumulate(sizes)]))


def of_map(stage_maps: Sequence[StageMap], units: int, chunks: int = 1) -> ModelCut | None:
    """Cut that an explicit map names; None if it names no units.

    Raises: ConfigError if it leaves units out, names one twice, names one that does not exist, or has another number of
    runs per stage than there are chunks.
    """
    if not stage_maps or not stage_maps[0].units:
        return None
    for stage, entry in enumerate(stage_maps):
        if len(entry.units) != chunks:
            raise ConfigError(
                f"map: stage {stage} has {len(entry.units)} runs of units, expected one per chunk: {chunks}"
            )
    cut: list[tuple[int, int]] = []
    expected = 0
    for chunk in range(chunks):
        for stage, entry in enumerate(stage_maps):
            first, last = entry.units[chunk]
            if first != expected or last >= units:
                raise ConfigError(
                    f"map: stage {stage} has the units {first} to {last}, expected it to begin with {expected} and to "
                    f"end before {units}, which the model has: name all units once, in order"
                )
            cut.append((first, last + 1))
            expected = last + 1
    if expected != units:
        raise ConfigError(
            f"map: the last part ends with unit {expected - 1}, the model's last is {units - 1}: name all"
        )
    return tuple(cut)


def choose(
    costs: Sequence[float],
    stages: int,
    chunks: int = 1,
    *,
    stage_maps: Sequence[StageMap] = (),
    preferred: Sequence[int] | None = None,
) -> ModelCut:
    """Cut of the model: by the map, else as the task prefers, else balanced by cost.

    preferred: units per part from the task's own `cuts`, or None.

    Raises: ConfigError if that is impossible.
    """
    _check_enough(len(costs), stages * chunks)
    cut = of_map(stage_maps, len(costs), chunks)
    if cut is not None:
        return cut
    if preferred is not None:
        sizes = list(preferred)
        if len(sizes) != stages * chunks:
            raise ConfigError(f"Task.cuts: expected {stages * chunks} sizes, one per part, got {len(sizes)}")
        return of_sizes(sizes, len(costs), "Task.cuts")
    return balance(costs, stages * chunks)


def units_of(cut: ModelCut, stage: int, stages: int) -> tuple[int, ...]:
    """Units of a stage: those of its parts, in order."""
    return tuple(unit for first, last in cut[stage::stages] for unit in range(first, last))
