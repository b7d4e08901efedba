"""A pipeline schedule played through in time, with instant messages: when each operation runs, who is idle. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from everstep.base.errors import ConfigError, check
from everstep.placement.schedules import Op, Schedule, inputs


class TimelineSlot(NamedTuple):
    """One operation and the time it takes: from `start` up to, not including, `end`, in time steps."""

    op: Op
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """One row of slots per stage worker, in order of time, without overlaps."""

    rows: tuple[tuple[TimelineSlot, ...], ...]

    @property
    def length(self) -> int:
        """Time steps until the last operation has ended."""
        return max((row[-1].end for row in self.rows if row), default=0)

    def idle(self, stage: int) -> int:
        """Time steps in which this worker computes nothing."""
        return self.length - sum(slot.end - slot.start for slot in self.rows[stage])


def timeline(schedule: Schedule, forward: int = 1, backward: int = 1, recompute: int | None = None) -> Timeline:
    """Each operation starts when its inputs are there and its worker has done everything before it.

    forward, backward, recompute: how long each takes, in time steps (of any unit); recompute: as forward by default.

    Raises: ConfigError unless every duration is at least 1; InvariantViolation if the workers wait for each other.
    """
    durations = {"forward": forward, "backward": backward, "recompute": forward if recompute is None else recompute}
    for name, steps in durations.items():
        if steps < 1:
            raise ConfigError(f"{name} takes at least 1 time step, got {steps}: give a positive number")
    return Timeline(_play(schedule, durations))


def _play(schedule: Schedule, durations: dict[str, int]) -> tuple[tuple[TimelineSlot, ...], ...]:
    chunks = 1 + max((op.chunk for ops in schedule for op in ops), default=0)
    ends: dict[Op, int] = {}
    rows: list[list[TimelineSlot]] = [[] for _ in schedule]
    waiting: dict[Op, list[int]] = {}
    awake = list(range(len(schedule)))
    while awake:
        stage = awake.pop()
        for op in schedule[stage][len(rows[stage]) :]:
            check(op.stage == stage, f"worker {stage} was given {op}")
            needed = inputs(op, stages=len(schedule), chunks=chunks)
            missing = next((other for other in needed if other not in ends), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(stage)
                break
            free = rows[stage][-1].end if rows[stage] else 0
            start = max([free, *(ends[other] for other in needed)])
            ends[op] = start + durations[op.kind]
            rows[stage].append(TimelineSlot(op, start, ends[op]))
            awake.extend(waiting.pop(op, ()))
    stuck = ", ".join(f"worker {worker} for {op}" for op, workers in waiting.items() for worker in workers)
    check(not waiting, f"the schedule cannot go on: waiting are {stuck}")
    return tuple(tuple(row) for row in rows)


def bubble_fraction(timeline: Timeline) -> float:
    """The share of all workers' time in which they are idle, in 0..1; recomputation counts as work."""
    total = timeline.length * len(timeline.rows)
    return sum(timeline.idle(stage) for stage in range(len(timeline.rows))) / total if total else 0.0


def cells(row: tuple[TimelineSlot, ...], length: int) -> Iterator[tuple[Op | None, bool]]:
    """One (operation, whether it starts here) per time step of a row; (None, False) where the worker is idle."""
    at = 0
    for slot in row:
        yield from ((None, False) for _ in range(at, slot.start))
        yield from ((slot.op, time == slot.start) for time in range(slot.start, slot.end))
        at = slot.end
    yield from ((None, False) for _ in range(at, length))
