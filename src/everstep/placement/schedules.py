"""Pipeline schedules as lists of operations: what every stage worker computes, in which order. Pure.

A worker goes through its list from the front and starts each operation as soon as the `inputs` of it are there; nothing
else decides the order. The three kinds differ only in how many forward passes a worker runs ahead of its first backward
pass (`_warmup`); after that one forward and one backward pass take turns until the forward passes are used up.

- `gpipe`: all forward passes, then all backward passes. Every micro-batch is in flight at once.
- `1f1b`: as many forward passes ahead as there are stages behind. At most K - stage micro-batches are in flight.
- `interleaved`: each worker holds several stage chunks; chunk c of worker s is part c * K + s of the model. The bubble
  shrinks by the number of chunks, for more activations held and more messages.

Micro-batch m is the m-th of the lanes that go this way, in lane order. **Gradients fold by lane, never by arrival**:
the order of backward passes belongs to the schedule, the bits may not. The gradient of a chunk for one micro-batch is a
leaf of `placement.tree`, and a worker adds up complete subtrees only, left child first. In all three kinds the backward
passes of one chunk come in micro-batch order, so its subtrees complete from left to right and only about log2 of the
lanes are open at once; chunks fold apart from each other, because they are different parameters. Nothing but memory may
depend on that: a lane taken over from a dead worker is folded into the same place of the tree, whenever it comes.

Recomputation: a forward pass keeps only what came in, and is repeated directly before its backward pass; it waits for
no gradient, so it may fill a bubble. Where the backward pass directly follows its own forward pass there is nothing to
save, so there is no `recompute` and that forward pass keeps its activations (the last stage of 1F1B).

Source: GPipe, arXiv:1811.06965, figure 2; its backward passes go through the micro-batches in reverse, here they go in
lane order as in Megatron-LM, arXiv:2104.04473, figures 3 (GPipe) and 4 (1F1B and interleaved), section 2.2.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from everstep.base.errors import ConfigError, check

OpKind: TypeAlias = Literal["forward", "backward", "recompute"]
KINDS = ("gpipe", "1f1b", "interleaved")


class Op(NamedTuple):
    """One pass of one micro-batch through one chunk of one stage worker; all numbers count from 0."""

    kind: OpKind
    stage: int
    chunk: int
    micro_batch: int


Schedule: TypeAlias = tuple[tuple[Op, ...], ...]


def schedule(kind: str, stages: int, micro_batches: int, chunks: int = 1, recompute: bool = False) -> Schedule:
    """The operations of each stage worker, in order.

    kind: gpipe, 1f1b or interleaved. stages: workers along the pipeline. micro_batches: per step. chunks: parts of the
    model per worker, 1 unless interleaved. recompute: keep inputs only, and compute activations again.

    Raises: ConfigError for a combination that the kind does not allow.
    """
    _check_possible(kind, stages, micro_batches, chunks)
    lists = []
    for stage in range(stages):
        ahead = _warmup(kind, stage, stages, micro_batches, chunks)
        ops = tuple(_alternate(stage, ahead, stages, micro_batches, chunks))
        lists.append(tuple(_with_recompute(ops)) if recompute else ops)
    return tuple(lists)


def _check_possible(kind: str, stages: int, micro_batches: int, chunks: int) -> None:
    if kind not in KINDS:
        close = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"a schedule is one of {', '.join(KINDS)}, got {kind!r}{hint}")
    for name, value in (("stages", stages), ("micro-batches", micro_batches), ("chunks", chunks)):
        if value < 1:
            raise ConfigError(f"a schedule needs at least 1 of {name}, got {value}: give a positive number")
    if kind != "interleaved":
        if chunks > 1:
            raise ConfigError(
                f"schedule {kind} has 1 chunk per worker, got chunks {chunks}: set chunks to 1, or take interleaved"
            )
        return
    if chunks < 2:
        raise ConfigError(
            f"schedule interleaved needs 2 or more chunks per worker, got {chunks}: set chunks to 2, or take 1f1b"
        )
    if micro_batches % stages:
        below = micro_batches - micro_batches % stages
        fitting = f"{below} or {below + stages}" if below else f"{stages}"
        raise ConfigError(
            f"schedule interleaved needs micro-batches in multiples of its {stages} stages, got {micro_batches}: "
            f"take {fitting}, or schedule 1f1b"
        )


def _warmup(kind: str, stage: int, stages: int, micro_batches: int, chunks: int) -> int:
    """How many forward passes a worker does before forward and backward passes take turns.

    1f1b: one per stage behind it. interleaved: the first group's passes through all chunks but the last, and two per
    stage behind, because there is enough to do while a gradient is on its way back.
    Source: arXiv:2104.04473, section 2.2 and figure 4.
    """
    behind = stages - 1 - stage
    ahead = {"gpipe": micro_batches, "1f1b": behind, "interleaved": 2 * behind + (chunks - 1) * stages}[kind]
    return min(ahead, micro_batches * chunks)


def _alternate(stage: int, ahead: int, stages: int, micro_batches: int, chunks: int) -> Iterator[Op]:
    """`ahead` forward passes, then one forward and one backward pass in turn, then the backward passes left."""
    passes = micro_batches * chunks
    for i in range(passes + ahead):
        if i < passes:
            chunk, micro_batch = _nth(i, stages, chunks)
            yield Op("forward", stage, chunk, micro_batch)
        if i >= ahead:
            chunk, micro_batch = _nth(i - ahead, stages, chunks)
            yield Op("backward", stage, chunks - 1 - chunk, micro_batch)


def _nth(i: int, stages: int, chunks: int) -> tuple[int, int]:
    """(chunk, micro-batch) of a worker's i-th forward pass: groups of `stages` micro-batches, chunk after chunk."""
    if chunks == 1:
        return 0, i
    group, within = divmod(i, stages * chunks)
    return within // stages, group * stages + within % stages


def _with_recompute(ops: tuple[Op, ...]) -> Iterator[Op]:
    """The same list with a recomputation directly before each backward pass that does not follow its own forward."""
    before: Op | None = None
    for op in ops:
        if op.kind == "backward" and before != op._replace(kind="forward"):
            yield op._replace(kind="recompute")
        yield op
        before = op


def inputs(op: Op, *, stages: int, chunks: int = 1) -> tuple[Op, ...]:
    """The operations whose results this one needs, its worker's own included; another worker's result is received."""
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
    """Per stage: the most (chunk, micro-batch) pairs at once between their forward and their backward pass.

    Of each, the worker holds at least what came in. In units of one chunk: with c chunks, 1/c of a stage's worth.
    """
    return tuple(_peak(ops, {op[1:] for op in ops if op.kind == "forward"}) for ops in schedule)


def peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Per stage: the most full sets of activations held at once, in units of one chunk.

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
    """The idle share of the workers' time in theory, without recomputation: (K-1) / (chunks * M + K-1), in 0..1.

    Source: arXiv:2104.04473, section 2.2, as a share of the whole step instead of the ideal one.
    """
    return (stages - 1) / (chunks * micro_batches + stages - 1)
