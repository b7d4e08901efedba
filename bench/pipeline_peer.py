"""The peer of `pipeline.py`: torch.distributed.pipelining on gloo, same model, cut, micro-batches and schedule.

Started once per rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. `--cut 0:2,2:4`: units of each part; part
p is on rank `p % WORLD_SIZE`. The gradients of a parameter that parts on several ranks use (the tied embedding) are
added up between those, or it would be another model. It trains until it is killed; the last rank appends to `--ends`
when each step ended (unix, ns).
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.utils.data import default_collate

from everstep.exact.accumulate import keep_freed_memory
from models import MODELS

SINGLE = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--schedule", required=True)
    parser.add_argument("--cut", required=True)
    parser.add_argument("--lanes", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--ends", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    task = MODELS[options.model]()
    units = task.units(task.build_model())
    cut = [tuple(int(end) for end in part.split(":")) for part in options.cut.split(",")]
    own = [(p, nn.Sequential(*units[first:last])) for p, (first, last) in enumerate(cut) if p % world == rank]
    stages = [PipelineStage(part, p, len(cut), torch.device("cpu")) for p, part in own]
    optimizer = task.build_optimizer([p for _, part in own for p in part.parameters()])
    schedule = make_schedule(options.schedule, stages, options.lanes)
    tied = shared_parameters(units, cut, rank, world)
    dataset: Any = task.build_dataset("train")
    size = options.lanes * options.micro_batch
    for step in itertools.count():
        inputs, targets = pair(dataset, step * size % (len(dataset) - size), size) if rank in (0, world - 1) else (0, 0)
        given = (inputs,) if rank == 0 else ()
        schedule.step(*given, **({"target": targets} if rank == world - 1 else {}))
        for parameter, group in tied:
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
        if rank == world - 1:
            with open(options.ends, "a") as file:
                file.write(f"{time.time_ns()}\n")


def shared_parameters(
    units: list[nn.Module], cut: list[tuple[int, ...]], rank: int, world: int
) -> list[tuple[nn.Parameter, Any]]:
    """The parameters that this rank and others use, each with the group of those ranks. Collective."""
    ranks: dict[nn.Parameter, set[int]] = {}
    for p, (first, last) in enumerate(cut):
        for unit in units[first:last]:
            for parameter in unit.parameters():
                ranks.setdefault(parameter, set()).add(p % world)
    groups = [(k, used, dist.new_group(sorted(used))) for k, used in ranks.items() if len(used) > 1]
    return [(parameter, group) for parameter, used, group in groups if rank in used]


def make_schedule(kind: str, stages: list[PipelineStage], lanes: int) -> Any:
    """Ours by name, theirs by class."""
    if kind == "interleaved":
        return ScheduleInterleaved1F1B(stages, lanes, loss_fn=mean_loss)
    return SINGLE[kind](stages[0], lanes, loss_fn=mean_loss)


def pair(dataset: Any, first: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A global batch as the model's input and what it is compared with."""
    batch = default_collate([dataset[i] for i in range(first, first + size)])
    return (batch[:, :-1], batch[:, 1:]) if isinstance(batch, torch.Tensor) else (batch[0], batch[1])


def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As the tasks have it."""
    if output.dim() == 3:
        output, target = output.flatten(0, 1), target.flatten()
    return nn.functional.cross_entropy(output, target)


if __name__ == "__main__":
    main()
