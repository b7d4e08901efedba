"""Pipeline schedules as lists of operations: what every stage worker computes, in which order. Pure.

A worker goes through its list from the front and starts each operation as soon as its `inputs` are there; nothing else
decides the order. Schedules differ by their `ScheduleKind` (`base/pipeline`): the number of forward passes that a
worker runs ahead of its first backward pass, and the order of turns among its chunks. After the passes ahead one
forward and one backward pass take turns until the forward passes are used up.

Micro-batch m is the m-th lane that goes this way, in lane order. **Gradients fold by lane, never by arrival**: the
order of backward passes belongs to the schedule, the bits may not. The gradient of a chunk for one micro-batch is a
leaf of `placement.tree`, and a worker adds up complete subtrees only, left child first. In all kinds the backward
passes of one chunk come in micro-batch order, so its subtrees complete from left to right and only about log2 of the
lanes are open at once; chunks fold apart from each other, because they are different parameters. Nothing but memory may
depend on that: a lane taken over from a dead worker is folded into the same place of the tree, whenever it comes.

Recomputation: a forward pass keeps only its input, and is repeated directly before its backward pass; it waits for no
gradient, so it may fill a bubble. If the backward pass directly follows its own forward pass, recomputing would save
nothing, so there is no `recompute` and that forward pass keeps its activations (the last stage of 1F1B).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from everstep.base.errors import ConfigError, check, did_you_mean
from everstep.base.pipeline.kind import ScheduleKind, Shape
from everstep.base.pipeline.schedule_table import KINDS, check_possible

OpKind: TypeAlias = Literal["forward", "backward", "recompute"]


class Op(NamedTuple):
    """One pass of one micro-batch through one chunk of one stage worker; all numbers count from 0."""

    kind: OpKind
    stage: int
    chunk: int
    micro_batch: int


class PipeOp(NamedTuple):
    """One pass of one lane through one part of the model; `stage` is `part % stages`."""

    kind: OpKind
    part: int
    stage: int
    lane: int


_AnyOp = TypeVar("_AnyOp", Op, PipeOp)
Schedule: TypeAlias = tuple[tuple[Op, ...], ...]


def schedule(kind: str, stages: int, micro_batches: int, chunks: int = 1, recompute: bool = False) -> Schedule:
    """The operations of each stage worker, in order.

    kind: one of `KINDS`. stages: workers along the pipeline. micro_batches: per step. chunks: parts of the model per
    worker. recompute: keep inputs only, and compute activations again.

    Raises: ConfigError for a combination that the kind does not allow.
    """
    _check_numbers(kind, stages, micro_batches, chunks)
    check_possible(kind, stages, micro_batches, chunks, called="micro-batches")
    lists = []
    for stage in range(stages):
        shape = Shape(stages, stages - 1 - stage, micro_batches, chunks)
        ops = order(KINDS[kind], stage, shape)
        lists.append(tuple(with_recompute(ops) if recompute else ops))
    return tuple(lists)


def _check_numbers(kind: str, stages: int, micro_batches: int, chunks: int) -> None:
    if kind not in KINDS:
        raise ConfigError(f"a schedule is one of {', '.join(KINDS)}, got {kind!r}{did_you_mean(kind, KINDS)}")
    for name, value in (("stages", stages), ("micro-batches", micro_batches), ("chunks", chunks)):
        if value < 1:
            raise ConfigError(f"a schedule needs at least 1 of {name}, got {value}: give a positive number")


def order(kind: ScheduleKind, stage: int, shape: Shape) -> Iterator[Op]:
    """Operations of one stage worker, also for numbers that the kind was not made for: a last group that is smaller
    than the others takes turns like them."""
    passes = list(_forward_passes(shape.micro_batches, max(1, kind.group(shape)), shape.chunks))
    ahead = min(kind.ahead(shape), len(passes))
    for i in range(len(passes) + ahead):
        if i < len(passes):
            chunk, micro_batch = passes[i]
            yield Op("forward", stage, chunk, micro_batch)
        if i >= ahead:
            chunk, micro_batch = passes[i - ahead]
            yield Op("backward", stage, shape.chunks - 1 - chunk, micro_batch)


def _forward_passes(micro_batches: int, group: int, chunks: int) -> Iterator[tuple[int, int]]:
    """(chunk, micro-batch), in order: groups of micro-batches, chunk after chunk."""
    for first in range(0, micro_batches, group):
        for chunk in range(chunks):
            yield from ((chunk, i) for i in range(first, min(first + group, micro_batches)))


def with_recompute(ops: Iterable[_AnyOp]) -> Iterator[_AnyOp]:
    """The list with a recomputation directly before each backward pass that does not follow its own forward pass."""
    before: _AnyOp | None = None
    for op in ops:
        if op.kind == "backward" and before != op._replace(kind="forward"):
            yield op._replace(kind="recompute")
        yield op
        before = op


def inputs(op: Op, *, stages: int, chunks: int = 1) -> tuple[Op, ...]:
    """Operations whose results this one needs, its worker's own included; another worker's result is received."""
    part = op.chunk * stages + op.stage
    check(0 <= op.stage < stages and 0 <= op.chunk < chunks, f"{op} is outside {stages} stages of {chunks} chunks")
    if op.kind == "forward":
        return (_at(op, part - 1, stages),) if part > 0 else ()
    own = op._replace(kind="forward")
    if op.kind == "backward" and part + 1 < stages * chunks:
        return own, _at(op, part + 1, stages)
    return (own,)


def _at(op: Op, part: int, stages: int) -> Op:
    """The same pass of the same micro-batch at another part of the model."""
    return Op(op.kind, part % stages, part // stages, op.micro_batch)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Most (chunk, micro-batch) pairs at once between their forward and their backward pass, per stage.

    The worker holds at least the input of each. In units of one chunk: with c chunks, 1/c of a stage's worth.
    """
    return tuple(_peak(ops, {op[1:] for op in ops if op.kind == "forward"}) for ops in schedule)


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Most full sets of activations held at once, per stage, in units of one chunk.

    `peak_in_flight` without recomputation; with it, activations are held from `recompute` to `backward` only.
    """
    return tuple(
        _peak(ops, {op[1:] for op in ops if op.kind == "forward"} - {op[1:] for op in ops if op.kind == "recompute"})
        for ops in schedule
    )


def _peak(ops: tuple[Op, ...], kept: set[tuple[int, int, int]]) -> int:
    """`kept`: (stage, chunk, micro-batch) of the forward passes that count from their end; others from `recompute`."""
    held = peak = 0
    for op in ops:
        if op.kind == "backward":
            held -= 1
        elif (op.kind == "forward") == (op[1:] in kept):
            held += 1
        peak = max(peak, held)
    return peak


def expected_bubble_fraction(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle share of the workers' time in theory, without recomputation: (K-1) / (chunks * M + K-1), in 0..1.

    Source: arXiv:2104.04473, section 2.2, as a share of the whole step instead of the ideal one.
    """
    return (stages - 1) / (chunks * micro_batches + stages - 1)


# ---- schedules played through in time, with instant messages: when each operation runs, which worker is idle


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
    """Times of all operations: each starts when its inputs are there and its worker has done everything before it.

    forward, backward, recompute: duration of each, in time steps (of any unit); recompute: as forward by default.

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
            start = max([rows[stage][-1].end if rows[stage] else 0, *(ends[other] for other in needed)])
            ends[op] = start + durations[op.kind]
            rows[stage].append(TimelineSlot(op, start, ends[op]))
            awake.extend(waiting.pop(op, ()))
    stuck = ", ".join(f"worker {worker} for {op}" for op, workers in waiting.items() for worker in workers)
    check(not waiting, f"the schedule cannot go on: waiting are {stuck}")
    return tuple(tuple(row) for row in rows)


def bubble_fraction(timeline: Timeline) -> float:
    """Share of all workers' time in which they are idle, in 0..1; recomputation counts as work."""
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
