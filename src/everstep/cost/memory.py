"""Memory that a worker needs to train a model, in bytes by kind. Pure.

Two tables. That of the ZeRO paper (Rajbhandari et al., arXiv 1910.02054, section 3): mixed precision with Adam, 2 bytes
per parameter for it, 2 for its gradient, 12 for the optimizer (a float32 copy and two moments). Stage 1 divides the
optimizer's bytes among the workers, stage 2 the gradients', too, and stage 3 all. And the table of this product, which
trains in float32 and keeps what exact recovery needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from everstep.base.errors import check

STAGES = (0, 1, 2, 3)
GB = 10**9
AT_ONCE_ELEMENTS, OFFLOADED_ELEMENTS = 1 << 18, 1 << 22
"""As of `train.optimizer_update`: elements that are updated at once where each worker updates a part of the model, and
where it updates all and the optimizer's state lies elsewhere."""
_MOST_FOLLOWED, _FROM_EACH_BYTES = 3, 1 << 26
"""As of `train.taking`: workers that a new one follows at the most, and what each of several gives at least."""
_IN_USE_BYTES = float(1 << 26)
"""Bytes in use at a time of parameters that lie in files, and of their gradients."""
WORKER_BYTES, JOB_BYTES, SHARED_BYTES = 48_000_000, 385_000_000, 163_000_000
"""Memory of Python and torch: of each worker beside what it shares with the others; of a job's other processes; and
what of the latter the workers of a host share with their fork server.
Source: bench/memory.py with a model of 0.1M parameters, 2 and 4 workers; what a job has more at its peak by four jobs
of 12.6M and 25M parameters, 2 to 4 workers (84 to 111 MiB), less the 70 MB of torch._dynamo, which is imported where
something compiles. Torch 2.13 on Linux, x86-64, November 2026."""


PEAK_BYTES = 140_000_000
"""What the workers of a job hold together beside that and beside their states, where gradients are as large as that.
Source: jobs of 12.6M parameters with 2 and 4 workers, 146 and 126 MB."""


@dataclass(frozen=True)
class Model:
    """Sizes of a model and of its optimizer's state for one worker that holds all of it, in bytes.

    activations: of one lane. fixed: memory that does not grow with the model. undivided_parameters, undivided_bytes: of
    these, and of their optimizer's state, those that stages 1 and 2 leave to each worker (`exact.divisible`).
    """

    parameters: int
    parameter_bytes: float
    optimizer_bytes: float
    buffer_bytes: float = 0.0
    activation_bytes: float = 0.0
    fixed_bytes: float = 0.0
    undivided_parameters: int = 0
    undivided_bytes: float = 0.0

    def divides(self, stage: int) -> bool:
        """Whether a stage divides anything."""
        return stage == 3 or (stage > 0 and self.undivided_parameters < self.parameters)

    def held(self, stage: int, part: float) -> tuple[float, float]:
        """Bytes of the optimizer's state, and of one whole gradient, of a worker that has this part of what is divided
        at a stage."""
        rest, whole = (self.undivided_parameters, self.undivided_bytes) if stage in (1, 2) else (0, 0.0)
        return whole + (self.optimizer_bytes - whole) * part, 4.0 * (rest + (self.parameters - rest) * part)


@dataclass(frozen=True)
class Split:
    """How the work is divided.

    lanes: of the global batch. nodes: complete subtrees of lanes per worker. copies: of each part of the optimizer's
    state; with as many as workers, or more, each worker has all. offload: that state lies in host memory or on disk;
    offload_params: parameters and gradients lie on disk, too.
    hosts: on which the workers are. staging: bytes that a worker may use for what of a checkpoint is not written yet
    (`checkpoint.staging_mb`). snapshots: copies of as much state as a worker has, in memory. host_apart: devices have
    memory of their own, so that of the host is counted by itself.
    """

    workers: int
    lanes: int = 8
    nodes: int = 1
    copies: int = 2
    offload: bool = False
    hosts: int = 1
    staging: float = 0.0
    snapshots: int = 0
    host_apart: bool = False
    offload_params: bool = False


_LOOKED_AT = 4096
"""Workers whose lanes are looked at one by one; the lanes of the others begin at like places."""


def most_nodes(workers: int, lanes: int) -> int:
    """Complete subtrees of the lanes of the worker that has most of them, where each has a run of lanes."""

    def inside(low: int, high: int, first: int, last: int) -> int:
        if last <= low or high <= first:
            return 0
        if first <= low and high <= last:
            return 1
        middle = low + (1 << ((high - low - 1).bit_length() - 1))
        return inside(low, middle, first, last) + inside(middle, high, first, last)

    if workers >= lanes:
        return 1
    looked_at = {*range(min(workers, _LOOKED_AT)), workers - 1}
    return max(inside(0, lanes, k * lanes // workers, (k + 1) * lanes // workers) for k in looked_at)


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of one worker by kind, on its device and in the memory of its host.

    grows: kinds on the device that grow with the number of parameters.
    """

    device: Mapping[str, float]
    host: Mapping[str, float] = field(default_factory=dict)
    grows: frozenset[str] = frozenset({"parameters", "gradients", "optimizer", "lanes", "results", "snapshots"})

    @property
    def total(self) -> float:
        return sum(self.device.values())

    def largest(self, memory_bytes: float, parameters: int) -> int:
        """The most parameters for which there is room on a device; `parameters`: of the model counted here."""
        growing = sum(size for kind, size in self.device.items() if kind in self.grows)
        return max(0, math.floor((memory_bytes - (self.total - growing)) / (growing / parameters)))


def by_paper(parameters: int, workers: int, stage: int, offload: bool = False) -> MemoryUse:
    """Bytes by the ZeRO paper, one copy of everything. offload: the optimizer's 12 bytes are the host's."""
    check(stage in STAGES, f"expected a stage from 0 to 3, got {stage}")
    optimizer = 12 * parameters / (workers if stage >= 1 else 1)
    device = {
        "parameters": 2 * parameters / (workers if stage >= 3 else 1),
        "gradients": 2 * parameters / (workers if stage >= 2 else 1),
        "optimizer": 0.0 if offload else optimizer,
    }
    return MemoryUse(device, {"optimizer": optimizer} if offload else {})


def of_ours(model: Model, split: Split, stage: int) -> MemoryUse:
    """Bytes of a worker of this product.

    - lanes: the sums of its lanes, one flat gradient for each complete subtree, and gradients under way (half of them,
      as measured, at stage 1 on one host). The update's gradients lie where those were, if it needs all; between hosts,
      what has left is still in `.grad`.
    - results: reduced gradients. The workers of one host hold them once, whoever updates with them; elsewhere each has
      its own, from stage 1 on two of the own part, since blocks that come early may not overwrite those of a step.
    - gradients: from stage 1 on, those normalised for one part of the update, which is made a little at a time.
    - optimizer: of a state that lies elsewhere, that of one part of the update.
    - staging: of a worker's part of a checkpoint, as far as it is allowed. snapshots: copies in memory.
    Where all workers hold all parts, or nothing can be divided, stages 1 and 2 divide nothing. Stage 2 gives the sums
    of a worker's last lane back block by block as soon as they have been added up, so with one lane per worker few are
    held; on one host those that wait for workers that are slower, half of them at the most. With several lanes, and
    where some hosts but not all have several workers, the sums stay. In stage 3, parameters are split, too, within a
    cell of all workers, whose members gather them unit by unit.
    """
    check(stage in STAGES, f"expected a stage from 0 to 3, got {stage}")
    divided = model.divides(stage) and split.copies < split.workers
    part = split.copies / split.workers if divided else 1.0
    flat = 4.0 * model.parameters
    per_worker = -(-split.lanes // split.workers)
    least = 1.0 if split.hosts > 1 or not divided else 0.5 if stage == 1 else 0.0
    under_way = flat * max(least, math.ceil(math.log2(per_worker)) - 1)
    by_unit = divided and stage >= 2 and per_worker == 1 and split.hosts in (1, split.workers)
    waiting = flat / 2 if split.hosts == 1 else 0.0
    optimizer, own = model.held(stage, part)
    staging = min(split.staging, (model.parameter_bytes + model.optimizer_bytes + model.buffer_bytes) / split.workers)
    at_once = AT_ONCE_ELEMENTS if divided else OFFLOADED_ELEMENTS
    in_use = min(optimizer, model.optimizer_bytes / model.parameters * at_once)
    device = {
        "parameters": model.parameter_bytes / (split.workers if stage == 3 else 1),
        "gradients": min(flat * part, 4.0 * at_once) if divided else 0.0,
        "optimizer": in_use if split.offload else optimizer,
        "lanes": waiting if by_unit else flat * split.nodes + under_way,
        "results": flat / split.workers if split.hosts == 1 else 2 * own if divided else flat,
        "buffers": model.buffer_bytes,
        "activations": model.activation_bytes,
        "process": model.fixed_bytes,
    }
    host = {"optimizer": optimizer} if split.offload else {}
    if split.offload_params:
        host |= {kind: device[kind] for kind in ("parameters", "lanes", "results")}
        deeper = flat * max(0, math.ceil(math.log2(per_worker)) - 1)
        host["lanes"] -= deeper
        device |= {"parameters": min(model.parameter_bytes, _IN_USE_BYTES), "lanes": deeper, "results": 0.0}
        device["optimizer"] = 0.0  # what is in use of it then takes the place of parameters and gradients
        device["gradients"] = min(flat, _IN_USE_BYTES)
    if staging:
        (host if split.host_apart else device)["staging"] = staging
    if split.snapshots:
        state = model.parameter_bytes + optimizer + model.buffer_bytes
        (host if split.host_apart else device)["snapshots"] = split.snapshots * state
    return MemoryUse(device, host)


def of_recovery(model: Model, split: Split, stage: int) -> float:
    """Bytes that the workers of a stage take together for a moment, beside what they hold, until a new one has the
    state of one that was lost: copies at those that it follows, and what has come until it is in its place there.

    Where the optimizer's state is divided, one copies the parameters, and all together one worker's part of the rest.
    Otherwise each of those that it follows copies all, of which there are up to three. In files copies take none.
    """
    divided = model.divides(stage) and split.copies < split.workers
    part = split.copies / split.workers if divided else 1.0
    state = model.parameter_bytes + model.held(stage, part)[0] + model.buffer_bytes
    followed = max(1, min(_MOST_FOLLOWED, split.workers - 1, int(state // _FROM_EACH_BYTES)))
    copies = 0 if split.offload else 1 if divided else followed
    return state * (copies + 1) if split.workers > 1 else 0.0


def of_running(model: Model, split: Split, stage: int, workers: int) -> MemoryUse:
    """As `of_ours`, of a worker by itself, with its part of what it shares with others (PSS). workers: of all stages.
    model: without fixed bytes."""
    shared = SHARED_BYTES / (1 + workers / split.hosts)
    fixed = WORKER_BYTES + shared + min(PEAK_BYTES / workers, 4.0 * model.parameters)
    return of_ours(replace(model, fixed_bytes=fixed), split, stage)


@dataclass(frozen=True)
class StageMemory:
    """One stage's memory beside that of plain data parallelism (stage 0, nothing offloaded). GB are 10^9 bytes. `fits`
    and `max_model_size_with_zero` (parameters) are None if no device was named. recovery_bytes: what all workers take
    together for a moment after a loss (`of_recovery`)."""

    per_worker_bytes: Mapping[str, int]
    host_bytes: Mapping[str, int]
    baseline_memory_gb: float
    zero_memory_gb: float
    memory_reduction_factor: float
    max_model_size_with_zero: int | None
    fits: bool | None
    recovery_bytes: int = 0


@dataclass(frozen=True)
class CellMemoryUse:
    """Bytes of each of the processes of a worker of several, by kind; what they share is divided among them."""

    ranks: int
    per_rank_bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of one process."""
        return sum(self.per_rank_bytes.values())


def of_cell(
    model: Model,
    split: Split,
    ranks: int,
    exchanged: int,
    sums: int,
    degree: int = 1,
    shards: int = 0,
    hosts: int = 1,
    gathered: int = 0,
    stage: int = 0,
) -> CellMemoryUse:
    """Bytes of a process where each worker is so many of them (`cell.fsdp`, `cell.tp`). degree: of these compute each
    lane together.

    exchanged: of the gradients that are exchanged at once (`cell.wrap`). sums: of lanes that are kept at a time.
    shards: bytes of the largest tensor of all shards that ranks exchange. The model has the activations of one rank.
    Source: a transformer of 20M parameters and 4 shards needed 1,315, 779 and 497 MiB for each process at `cell.tp` 1,
    2 and 4 (once each, on a loaded machine), 1 to 8 % less than is counted.
    - exchange: two boxes of what is exchanged, for those who compute a lane together, and as much in each `.grad`.
    - lanes: the sums, once for all. first: the first lane, computed twice, is whole in the head's `.grad`, or in that
      of each process that computes a lane with others. In later steps the head hands sums over to other workers, which
      takes as much; in stage 2 half of it, as for `of_ours`.
    - shards: two boxes for each, shared, and what has come of all of them.
    - hosts: that each worker is on; a process on its head's host is counted, where the sums are. gathered: of the
      parameters that are computed with at a time, of which other hosts' come here (elsewhere).
    - gradients: of one part of an update, which each process makes a little at a time; results: reduced ones, on one
      host. In stages 1 and 2 a worker has its part of the optimizer's state and of these, which its processes divide.
    """
    check(ranks >= 1, f"expected at least one process in a worker, got {ranks}")
    flat, each = 4.0 * model.parameters, ranks / hosts
    divided = stage in (1, 2) and model.divides(stage) and split.copies < split.workers
    optimizer, own = model.held(stage, split.copies / split.workers if divided else 1.0)
    first = flat if degree > 1 else flat / (each * (2 if divided and stage == 2 else 1))
    found = {
        "parameters": model.parameter_bytes / ranks,
        "elsewhere": gathered * (1.0 - 1.0 / hosts) / each,
        "optimizer": optimizer / ranks,
        "exchange": exchanged * (1.0 + 2.0 / degree),
        "lanes": flat * sums / each,
        "gradients": min(own / ranks, 4.0 * AT_ONCE_ELEMENTS),
        "first": first,
        "results": (own if divided else flat / split.workers) / each,
        "buffers": model.buffer_bytes * (1 + 1 / each),
        "activations": model.activation_bytes,
        "shards": shards * (1.0 + 2.0 / degree) if degree > 1 else 0.0,
        "process": WORKER_BYTES + JOB_BYTES / (split.workers * ranks),
    }
    return CellMemoryUse(ranks, {kind: round(size) for kind, size in found.items()})


def answer(
    usage: MemoryUse, baseline: MemoryUse, parameters: int, memory_bytes: int | None, recovery: float = 0.0
) -> StageMemory:
    """What one stage needs, from its bytes and those of stage 0."""
    return StageMemory(
        {kind: round(size) for kind, size in usage.device.items()},
        {kind: round(size) for kind, size in usage.host.items()},
        baseline.total / GB,
        usage.total / GB,
        baseline.total / usage.total,
        None if memory_bytes is None else usage.largest(memory_bytes, parameters),
        None if memory_bytes is None else usage.total <= memory_bytes,
        round(recovery),
    )


def answers_by_paper(parameters: int, workers: int, offload: bool, memory_bytes: int | None) -> dict[int, StageMemory]:
    """For each stage, by the ZeRO paper."""
    base = by_paper(parameters, workers, 0)
    found = {stage: by_paper(parameters, workers, stage, offload) for stage in STAGES}
    return {stage: answer(usage, base, parameters, memory_bytes) for stage, usage in found.items()}


def answers_of_ours(model: Model, split: Split, memory_bytes: int | None) -> dict[int, StageMemory]:
    """For each stage, of this product."""
    base = of_ours(model, replace(split, offload=False, offload_params=False), 0)
    found = {stage: of_ours(model, split, stage) for stage in STAGES}
    return {
        stage: answer(usage, base, model.parameters, memory_bytes, of_recovery(model, split, stage))
        for stage, usage in found.items()
    }
