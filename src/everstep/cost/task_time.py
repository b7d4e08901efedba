"""Length of a step of a task that was counted: operations and bytes of one lane, by the same roofline. Pure.

Jobs compute a lane at a time: the worker with most lanes decides, (n + (p - 1) / c) times one lane for p stages of c
chunks, as in `step_time`.
"""

from __future__ import annotations

from dataclasses import dataclass

from everstep.cost.memory import MemoryUse, Model, Split, most_nodes, of_ours
from everstep.cost.online import JobShape, StepParts
from everstep.cost.step_time import (
    LINK_LATENCY_S,
    NETWORK_LATENCY_S,
    REACHED,
    Fleet,
    SoftwareStack,
    bubble_share,
    ring_s,
)


@dataclass(frozen=True)
class CountedWork:
    """One lane of a task: operations of its forward pass, samples, and the sizes of its model, activations among
    them."""

    forward_flops: float
    samples: int
    model: Model

    @property
    def flops(self) -> float:
        """Operations of a forward and a backward pass: three times those of the forward pass."""
        return 3 * self.forward_flops


@dataclass(frozen=True)
class TaskSplit:
    """Workers of each pool, stages, chunks of each, lanes of the global batch."""

    pool: int
    stages: int
    lanes: int
    chunks: int = 1


def lane_seconds(work: CountedWork, fleet: Fleet, dtype: str, stack: SoftwareStack) -> float:
    """One lane on one device: operations at the share of the peak that a stack reaches, activations moved."""
    device = fleet.device
    at_peak_s = work.flops / device.peak[dtype] / stack.matmul
    return (at_peak_s + stack.passes * work.model.activation_bytes / device.bandwidth) / fleet.slowest


def task_step(work: CountedWork, fleet: Fleet, split: TaskSplit, dtype: str, stack: SoftwareStack) -> StepParts:
    """Seconds of a step by part."""
    shape = JobShape(split.lanes, work.samples, split.stages, split.chunks)
    each = shape.most_lanes(split.pool * split.stages)
    compute_s = lane_seconds(work, fleet, dtype, stack) / split.stages * each
    share = bubble_share(split.stages, each, split.chunks)
    inside = split.pool * split.stages <= fleet.per_node
    bandwidth = (fleet.device.link if inside else fleet.network) * REACHED
    latency_s = LINK_LATENCY_S if inside else NETWORK_LATENCY_S
    size = work.model.parameter_bytes / split.stages
    exchange_s = max(0.0, ring_s(size, split.pool, bandwidth, latency_s) - stack.overlap * compute_s)
    update_s = (3 * size + 2 * work.model.optimizer_bytes / split.stages) / fleet.device.bandwidth
    return StepParts(compute_s, compute_s * share / (1 - share), exchange_s, update_s)


def part_of_model(model: Model, stages: int, lanes: int) -> Model:
    """The model of one of so many equal stages, with as many activations as 1F1B holds of so many lanes."""
    return Model(
        model.parameters // stages,
        model.parameter_bytes / stages,
        model.optimizer_bytes / stages,
        model.buffer_bytes / stages,
        model.activation_bytes / stages * min(stages, lanes),
        model.fixed_bytes,
        model.undivided_parameters // stages,
        model.undivided_bytes / stages,
    )


def task_memory(work: CountedWork, split: TaskSplit) -> MemoryUse:
    """Bytes of a worker by this product's layout."""
    each = -(-split.lanes // split.pool)
    part = part_of_model(work.model, split.stages, each)
    return of_ours(part, Split(split.pool, split.lanes, most_nodes(split.pool, split.lanes)), 0)
