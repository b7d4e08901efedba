"""The peers of `cells.py`: torch's own ways to split a model over processes, on gloo, one thread each.

Started once per rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. `--kind`:
- fsdp: `fully_shard` by unit; gradients are reduced after each micro-batch;
- tp: column and row-parallel layers, vocabulary-parallel embedding, logits and loss;
- 3d: torch.distributed.pipelining in two stages (1F1B), each split by both of these over two ranks. Each stage has its
  own copy of the embedding's weight, whose gradients are added up.

Columns of fused layers lie elsewhere than in our cut, so values differ from ours; what is computed and sent does not.
It trains until it is killed, and appends to `--ends` when each step ended (unix, ns).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.utils.data import default_collate

from everstep.exact.accumulate import keep_freed_memory
from models import MODELS


class ParallelHead(nn.Module):
    """The last norm, and logits of which each rank has those of some words."""

    def __init__(self, head: Any, mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm, self.mesh = head.norm, mesh
        self.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        """x: (N, T, width) -> logits (N, T, words), a DTensor."""
        whole = DTensor.from_local(self.norm(x), self.mesh, [Replicate()])
        return nn.functional.linear(whole, self.weight)


def parallelized(model: Any, mesh: DeviceMesh) -> None:
    """Cut the zoo's transformer."""
    for block in model.blocks:
        block.attention.heads //= mesh.size()
        plan = {"attention.qkv": ColwiseParallel(), "attention.out": RowwiseParallel()}
        parallelize_module(block, mesh, {**plan, "up": ColwiseParallel(), "down": RowwiseParallel()})
    model.head = ParallelHead(model.head, mesh)
    parallelize_module(model.embedding, mesh, {"tokens": RowwiseParallel(input_layouts=Replicate())})


def divided(model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh) -> None:
    """Divide parameters: each block's apart, those of the embedding and the head together."""
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def pair(dataset: Any, first: int, size: int) -> tuple[Tensor, Tensor]:
    """A batch as the model's input and what it is compared with."""
    first %= len(dataset) - size
    batch = default_collate([dataset[i] for i in range(first, first + size)])
    return batch[:, :-1], batch[:, 1:]


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """As the tasks have it."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Sharded:
    """Steps of one model that all ranks have (`fsdp`, `tp`)."""

    def __init__(self, kind: str, task: Any, lanes: int, micro_batch: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (world,))
        self.model, self.dataset = task.build_model(), task.build_dataset("train")
        self.lanes, self.size, self.world, self.rank = lanes, micro_batch, world, rank
        self.parallel = kind == "tp"
        if self.parallel:
            parallelized(self.model, mesh)
            self.model.head.weight = self.model.embedding.tokens.weight
            self.world, self.rank = 1, 0
        else:
            divided(self.model, self.model.blocks, mesh)
        self.optimizer = task.build_optimizer(self.model.parameters())

    def step(self, number: int) -> None:
        """One step of all lanes."""
        for lane in range(self.rank, self.lanes, self.world):
            tokens, targets = pair(self.dataset, (number * self.lanes + lane) * self.size, self.size)
            with loss_parallel() if self.parallel else contextlib.nullcontext():
                (mean_loss(self.model(tokens), targets) / (self.lanes // self.world)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Staged:
    """Steps of a model in two stages, each divided in two ways (`3d`)."""

    def __init__(self, task: Any, lanes: int, micro_batch: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("stages", "fsdp", "tp"))
        self.stage, self.seat = mesh["stages"].get_local_rank(), mesh["fsdp"].get_local_rank()
        self.lanes, self.size = lanes, micro_batch
        self.dataset = task.build_dataset("train")
        model = task.build_model()
        parallelized(model, mesh["tp"])
        units = [model.embedding, *model.blocks, model.head]
        half = len(units) // 2
        own = units[half:] if self.stage else units[:half]
        part = nn.Sequential(*own)
        divided(part, own[:-1] if self.stage else own[1:], mesh["fsdp"])
        self.shared = own[-1].weight if self.stage else own[0].tokens.weight
        self.group = mesh["stages"].get_group()
        self.optimizer = task.build_optimizer(part.parameters())
        stage = PipelineStage(part, self.stage, 2, torch.device("cpu"), group=self.group)
        self.schedule = Schedule1F1B(stage, lanes // 2, loss_fn=mean_loss)

    def step(self, number: int) -> None:
        """One step of all lanes."""
        size = self.lanes // 2 * self.size
        tokens, targets = pair(self.dataset, (2 * number + self.seat) * size, size)
        with loss_parallel():
            self.schedule.step(target=targets) if self.stage else self.schedule.step(tokens)
        dist.all_reduce(self.shared.grad.to_local(), group=self.group)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=("fsdp", "tp", "3d"), required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lanes", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--ends", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    task, sizes = MODELS[options.model](), (options.lanes, options.micro_batch)
    trained = Staged(task, *sizes) if options.kind == "3d" else Sharded(options.kind, task, *sizes)
    for number in itertools.count():
        trained.step(number)
        if dist.get_rank() == dist.get_world_size() - 1:
            with open(options.ends, "a") as file:
                file.write(f"{time.time_ns()}\n")


if __name__ == "__main__":
    main()
