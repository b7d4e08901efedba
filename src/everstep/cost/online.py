"""What a job that ran says about its plan: predicted step times beside measured ones, and what a change would give.
Pure.

A step is that of `step_time`: the lanes of the worker that has most of them, (n + (p - 1) / c) times one lane for p
stages of c chunks, then what is neither computing nor waiting for others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from everstep.cost.step_time import bubble_share

COMPUTING = ("load", "forward", "backward")
EXCHANGE = ("reduce", "transfer", "agree")
ALONE = ("update", "stall", "other")
SOURCE = (
    "a lane's time and the rest of a step as this job's samples have them; the pipeline by (n + (p - 1) / c) lanes; "
    "workers share the processors of their host"
)


@dataclass(frozen=True)
class WorkerTimes:
    """One life of a worker, summed: passes of lanes, and seconds by phase."""

    passes: float
    seconds: Mapping[str, float]

    def spent(self, phases: Iterable[str]) -> float:
        """Seconds in these phases."""
        return sum(max(0.0, self.seconds.get(phase, 0.0)) for phase in phases)


@dataclass(frozen=True)
class JobShape:
    """How a job is divided: lanes of the global batch, samples of a lane, stages and parts of each, ranks of a cell."""

    lanes: int
    micro_batch: int
    stages: int = 1
    chunks: int = 1
    ranks: int = 1

    def most_lanes(self, workers: int) -> int:
        """Lanes of the worker that has most of them; of a cell, whose ranks compute one each at a time, its rounds."""
        return -(-self.lanes // (max(1, workers // self.stages) * self.ranks))


@dataclass(frozen=True)
class Processors:
    """Processors that the workers of a job compute on: of each host, the number of hosts, and those that a worker uses
    at a time. lanes: processors compute the lanes, too; emulated lanes are waits."""

    each: int
    hosts: int = 1
    used: int = 1
    lanes: bool = True

    def stretch(self, workers: int, idle: float = 0.0) -> float:
        """How much longer work takes where so many workers share the processors, at least 1. idle: share of the time in
        which each waits, in a pipeline's bubble."""
        return max(1.0, -(-workers // self.hosts) * (1 - idle) * self.used / self.each)


@dataclass(frozen=True)
class StepParts:
    """Seconds of a step. compute_s: the lanes of the worker that has most; bubble_s: it waits for the other stages;
    exchange_s: sums of gradients and records; alone_s: the update and what a worker does beside it."""

    compute_s: float
    bubble_s: float
    exchange_s: float
    alone_s: float

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.compute_s + self.bubble_s + self.exchange_s + self.alone_s


@dataclass(frozen=True)
class Calibrated:
    """What a job's samples say of one number of workers: seconds of a lane at one stage, of the exchange and of what
    a worker does alone, per step. processors: that the workers share; None: each has enough of its own, or a device."""

    shape: JobShape
    workers: int
    lane_s: float
    exchange_s: float
    alone_s: float
    processors: Processors | None = None

    def parts(self, workers: int, stages: int | None = None) -> StepParts:
        """A step with so many workers, cut into so many stages (as the job is). The exchange grows as a ring does,
        (n - 1) / n for n members of a pool; of one member alone nothing is known of it. All work of processors takes
        longer where more workers share them."""
        stages = self.shape.stages if stages is None else stages
        shape = JobShape(
            self.shape.lanes, self.shape.micro_batch, stages, self.shape.chunks if stages > 1 else 1, self.shape.ranks
        )
        share = bubble_share(stages, shape.most_lanes(workers), shape.chunks)
        slower, slower_lanes = self._slower(workers, share)
        lane_s = self.lane_s * self.shape.stages / stages * slower_lanes
        compute_s = lane_s * shape.most_lanes(workers)
        bubble_s = compute_s * share / (1 - share)
        known, wanted = (_ring(count // cut) for count, cut in ((self.workers, self.shape.stages), (workers, stages)))
        exchange_s = self.exchange_s * wanted / known if known else self.exchange_s
        alone_s = self.alone_s * self.shape.stages / stages
        return StepParts(compute_s, bubble_s, exchange_s * slower, alone_s * slower)

    def _slower(self, workers: int, idle: float) -> tuple[float, float]:
        """How much longer work takes with so many workers than as it was measured, and a lane. idle: the bubble."""
        if self.processors is None:
            return 1.0, 1.0
        before = bubble_share(self.shape.stages, self.shape.most_lanes(self.workers), self.shape.chunks)
        each = [self.processors.stretch(n, share) for n, share in ((workers, idle), (self.workers, before))]
        whole = self.processors.stretch(workers) / self.processors.stretch(self.workers)
        return whole, each[0] / each[1] if self.processors.lanes else 1.0


def calibrated(
    shape: JobShape,
    workers: int,
    lives: Iterable[WorkerTimes],
    lane_s: float | None = None,
    processors: Processors | None = None,
    step_s: float = math.inf,
) -> Calibrated | None:
    """From the lives of workers, None if none of them has computed a lane. The exchange is that of the worker that
    waits least, as the others' waits are for it, less the bubble, in which all wait. lane_s: known in another way, in
    place of the measured one. step_s: an undisturbed step takes no longer. What lives took beyond that belongs to the
    start and the first, slow steps: it is left out of what a worker does alone, then of all the rest."""
    found = [one for one in lives if one.passes > 0]
    if not found:
        return None
    each = shape.most_lanes(workers)
    computed = sum(one.spent(COMPUTING) for one in found) / sum(one.passes for one in found)
    exchange = min(one.spent(EXCHANGE) * each / one.passes for one in found)
    alone = min(one.spent(ALONE) * each / one.passes for one in found)
    without = Calibrated(shape, workers, computed if lane_s is None else lane_s, 0.0, alone, processors)
    whole = replace(without, exchange_s=max(0.0, exchange - without.parts(workers).bubble_s))
    beyond_s = max(0.0, whole.parts(workers).step_s - step_s)
    busy = replace(whole, alone_s=max(0.0, alone - beyond_s))
    slower = 1.0 if lane_s is not None else max(1.0, busy.parts(workers).step_s / step_s)
    return replace(busy, lane_s=busy.lane_s / slower, exchange_s=busy.exchange_s / slower)


def _ring(members: int) -> float:
    return (members - 1) / members if members > 0 else 0.0


def interval_loss(every_s: float, cost_s: float, mtbf_s: float) -> float:
    """Share of the time that checkpoints take, and work that is done again after a failure that loses everything.

    Source: Young 1974: cost / interval + interval / (2 x time between failures).
    """
    return min(1.0, cost_s / (every_s + cost_s) + (every_s / 2) / mtbf_s)


def worth_trying(workers: int, lanes: int) -> list[int]:
    """Numbers of workers to look at: one, half, one less, one more, double, one for each lane."""
    asked = {1, workers // 2, workers - 1, workers, workers + 1, 2 * workers, lanes}
    return sorted(count for count in asked if 1 <= count <= lanes)


def stages_to_try(workers: int, most: int = 8) -> list[int]:
    """Numbers of stages that divide the workers into equal pools."""
    return [stages for stages in range(1, min(workers, most) + 1) if workers % stages == 0]


def off(predicted: float, measured: float) -> float | None:
    """Error of a prediction relative to what was measured, None if nothing was."""
    return predicted / measured - 1 if measured > 0 and math.isfinite(measured) else None
