"""Search for the best way to divide a model over devices: every split that is possible, pruned, ranked. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from everstep.cost.memory import MemoryUse, Model, Split, of_ours
from everstep.cost.models import RECOMPUTE, ModelShape
from everstep.cost.split_memory import CONTEXT_BYTES, split_memory
from everstep.cost.step_time import Fleet, ParallelSplit, SoftwareStack, StepTime, micro_batches_of, step_time

MICRO_BATCHES = (1, 2, 4, 8, 16)
LEAST_TOKENS = 4096
MOST_DEVICES = 1 << 20
_PARTS = {
    "matrices_s": "matrix products",
    "traffic_s": "traffic of activations",
    "tensor_s": "sums within layers",
    "stages_s": "messages between stages",
    "experts_s": "ways to experts and back",
    "context_s": "keys and values of other parts of the sequence",
    "bubble_s": "bubble",
    "gradients_s": "sums of gradients",
    "update_s": "update",
    "straggler_s": "waits for the slowest device",
}


@dataclass(frozen=True)
class RankedSplit:
    """A split with its memory and time. fits: into the device's memory."""

    split: ParallelSplit
    memory: MemoryUse
    time: StepTime
    fits: bool


def possible_splits(shape: ModelShape, fleet: Fleet, batch: int, ours: bool = False) -> Iterator[ParallelSplit]:
    """Splits that can be, the pruned ones aside: tensor parallelism leaves no node and comes with sequence parallelism;
    stages have as many layers each; ZeRO's stages 2 and 3 are not combined with a pipeline, for which they would gather
    or sum at every micro-batch; context parallelism leaves each device 4,096 tokens of a sequence or more.

    ours: only those that jobs run on GPUs: no tensor parallelism, no ZeRO, activations computed again in stages alone.
    """
    for tp in (1,) if ours else (1, 2, 4, 8, 16):
        if tp <= fleet.per_node and fleet.count % tp == 0 and shape.heads % tp == 0:
            for pp in range(1, min(shape.layers, fleet.count // tp) + 1):
                if shape.layers % pp == 0 and fleet.count // tp % pp == 0:
                    yield from _divided(shape, tp, pp, fleet.count // tp // pp, batch, ours)


def _divided(shape: ModelShape, tp: int, pp: int, dp: int, batch: int, ours: bool) -> Iterator[ParallelSplit]:
    """Splits with so many tensor parallel devices, stages and other devices."""
    contexts = [1] if ours else _context(shape, dp)
    experts = [1] if ours or not shape.experts else _experts(shape, dp)
    for cp, ep in itertools.product(contexts, experts):
        base = ParallelSplit(tp, pp, dp // cp, sequence_parallel=tp > 1, ep=ep, cp=cp)
        for one in _settings(shape, base, ours):
            count = micro_batches_of(batch, one)
            if count and (one.schedule != "interleaved" or count % pp == 0):
                yield one


def _context(shape: ModelShape, dp: int) -> list[int]:
    possible = (n for n in (1, 2, 4, 8, 16) if dp % n == 0 and shape.sequence % n == 0)
    return [n for n in possible if n == 1 or shape.sequence // n >= LEAST_TOKENS]


def _experts(shape: ModelShape, dp: int) -> list[int]:
    return [n for n in (1, 2, 4, 8, 16, 32, 64) if dp % n == 0 and shape.experts % n == 0]


def _settings(shape: ModelShape, base: ParallelSplit, ours: bool) -> Iterator[ParallelSplit]:
    each = shape.layers // base.pp
    looped = next((chunks for chunks in (2, 3) if base.pp > 1 and each % chunks == 0), None)
    schedules = (("1f1b", 1), *((("interleaved", looped),) if looped else ()))
    stages = (0,) if ours or base.replicas == 1 else (0, 1) if base.pp > 1 else (0, 1, 2, 3)
    recomputes = RECOMPUTE if not ours else ("none", "full") if base.pp > 1 else ("none",)
    for micro_batch, zero, recompute, (schedule, chunks) in itertools.product(
        MICRO_BATCHES, stages, recomputes, schedules
    ):
        yield replace(base, micro_batch=micro_batch, zero=zero, recompute=recompute, schedule=schedule, chunks=chunks)


def memory_of_ours(shape: ModelShape, split: ParallelSplit, batch: int) -> MemoryUse:
    """Bytes of a worker of this product, in float32, by its own layout (`memory.of_ours`)."""
    count = micro_batches_of(batch, split)
    found = split_memory(shape, split, count, "fp32").device
    held = shape.parameters // split.pp
    moving = found["activations"] + found["output"] + found["fragmentation"]
    model = Model(held, 4.0 * held, 8.0 * held, activation_bytes=moving, fixed_bytes=CONTEXT_BYTES)
    return of_ours(model, Split(split.dp, split.dp * count, count.bit_count(), hosts=split.dp), split.zero)


def planned_splits(
    shape: ModelShape, fleet: Fleet, batch: int, dtype: str, stack: SoftwareStack, *, ours: bool = False
) -> list[RankedSplit]:
    """Every split that is possible, with its memory and time."""
    room, planned = fleet.device.memory_gb * 1e9, []
    for split in possible_splits(shape, fleet, batch, ours):
        usage = (
            memory_of_ours(shape, split, batch)
            if ours
            else split_memory(shape, split, micro_batches_of(batch, split), dtype, fused=stack.fused_attention)
        )
        time = step_time(shape, fleet, split, batch, dtype, stack)
        planned.append(RankedSplit(split, usage, time, usage.total <= room))
    return planned


def best_of_each(planned: Iterable[RankedSplit]) -> list[RankedSplit]:
    """The best of each (tensor, pipeline, data parallel): those that fit by time, then the others by memory."""
    best: dict[tuple[int, int], tuple[tuple[float, ...], RankedSplit]] = {}
    for found in planned:
        total, step_s = found.memory.total, found.time.step_s
        rank = (0.0, step_s, total) if found.fits else (1.0, total, step_s)
        key = (found.split.tp, found.split.pp)
        if key not in best or rank < best[key][0]:
            best[key] = rank, found
    return [found for _, found in sorted(best.values(), key=lambda one: one[0])]


def ranked_splits(
    shape: ModelShape, fleet: Fleet, batch: int, dtype: str, stack: SoftwareStack, *, ours: bool = False
) -> list[RankedSplit]:
    """`best_of_each` of all splits."""
    return best_of_each(planned_splits(shape, fleet, batch, dtype, stack, ours=ours))


def pareto_front(planned: Iterable[RankedSplit]) -> list[RankedSplit]:
    """Splits that fit and than which none is both shorter and smaller, the shortest first."""
    front: list[RankedSplit] = []
    for one in sorted((one for one in planned if one.fits), key=lambda one: (one.time.step_s, one.memory.total)):
        if not front or one.memory.total < front[-1].memory.total:
            front.append(one)
    return front


def why_better(one: RankedSplit, other: RankedSplit) -> str:
    """Why the first of two splits is before the second, in words."""
    if one.fits != other.fits:
        return f"it fits: the next needs {other.memory.total / 1e9:.3g} GB"
    if not one.fits:
        return f"it needs {(other.memory.total - one.memory.total) / 1e9:.3g} GB less"
    gains = {part: getattr(other.time, part) - getattr(one.time, part) for part in _PARTS}
    part = max(gains, key=lambda name: gains[name])
    shorter = other.time.step_s - one.time.step_s
    if shorter < 1e-9:
        return f"as fast, it needs {(other.memory.total - one.memory.total) / 1e9:.3g} GB less"
    return f"{shorter / other.time.step_s:.1%} shorter: {gains[part]:.3g} s less for {_PARTS[part]}"


def devices_needed(
    shape: ModelShape, fleet: Fleet, batch: int, dtype: str, stack: SoftwareStack, *, ours: bool = False
) -> int | None:
    """The fewest devices of this kind, doubling, on which a split fits; None if more than `MOST_DEVICES` would not do.
    batch: raised to a multiple of the devices."""
    count = fleet.count
    while count <= MOST_DEVICES:
        found = ranked_splits(shape, replace(fleet, count=count), -(-batch // count) * count, dtype, stack, ours=ours)
        if any(one.fits for one in found):
            return count
        count *= 2
    return None
