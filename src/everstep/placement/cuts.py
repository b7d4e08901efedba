"""Where a model is cut: which run of units makes up each part. Pure.

A cut is one (first unit, unit after the last) per part, in order, without gaps: `parts = stages x chunks`, and part p
belongs to stage `p % stages`. Where it is cut changes no bit of the result, only how long the stages take.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from everstep.base.errors import ConfigError
from everstep.base.stage_map import StageMap

ModelCut = tuple[tuple[int, int], ...]


def balance(costs: Sequence[float], parts: int) -> ModelCut:
    """The cut whose dearest part is the cheapest possible; of those the most even one, then the earliest cuts.

    costs: of each unit, in any one measure, none negative. Every part has at least one unit.

    Raises: ConfigError if there are fewer units than parts.
    """
    n = len(costs)
    _check_enough(n, parts)
    ends = [0.0, *accumulate(float(c) for c in costs)]
    limit = _least_limit(ends, parts)
    # Fewest squares under that limit: best[k][i] for the units from i on in k parts.
    none = float("inf")
    best = [[none] * n + [0.0]]
    choice: list[list[int]] = []
    for k in range(1, parts + 1):
        row, chosen = [none] * (n + 1), [0] * (n + 1)
        for i in range(n - k + 1):
            for j in range(i + 1, n - k + 2):
                cost = ends[j] - ends[i]
                if cost > limit:
                    break
                total = cost * cost + best[k - 1][j]
                if total < row[i]:
                    row[i], chosen[i] = total, j
        best.append(row)
        choice.append(chosen)
    cut, first = [], 0
    for k in reversed(range(parts)):
        last = choice[k][first]
        cut.append((first, last))
        first = last
    return tuple(cut)


def _least_limit(ends: list[float], parts: int) -> float:
    """The least cost that the dearest of the parts can have."""
    n = len(ends) - 1
    worst = [float("inf")] * n + [0.0]
    for k in range(1, parts + 1):
        row = [float("inf")] * (n + 1)
        for i in range(n - k + 1):
            for j in range(i + 1, n - k + 2):
                cost = ends[j] - ends[i]
                row[i] = min(row[i], max(cost, worst[j]))
                if cost >= row[i]:
                    break
        worst = row
    return worst[0]


def _check_enough(units: int, parts: int) -> None:
    if parts > units:
        raise ConfigError(
            f"stages: the model has {units} unit{'s' * (units != 1)}, fewer than the {parts} parts to cut it into: "
            f"use at most {units}, or let Task.units name finer ones (of an nn.Sequential: list(model))"
        )


def of_sizes(sizes: Sequence[int], units: int, source: str) -> ModelCut:
    """The cut with so many units per part. source: who said so, for error messages.

    Raises: ConfigError if a part would be empty, or they are not all units.
    """
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ConfigError(f"{source}: expected at least 1 unit per part, got {list(sizes)}: give every part a unit")
    if sum(sizes) != units:
        raise ConfigError(f"{source}: expected {units} units in all, got {sum(sizes)} in {list(sizes)}: mend the sizes")
    ends = [0, *accumulate(sizes)]
    return tuple((ends[p], ends[p + 1]) for p in range(len(sizes)))


def of_map(stage_maps: Sequence[StageMap], units: int, chunks: int = 1) -> ModelCut | None:
    """The cut that an explicit map names; None if it names no units.

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
    """Where the model is cut: by hand from the map, else where the task prefers, else balanced by cost.

    preferred: units per part, as the task's own `cuts` says, or None.

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
    """The units of a stage: those of its parts, in order."""
    return tuple(unit for first, last in cut[stage::stages] for unit in range(first, last))
