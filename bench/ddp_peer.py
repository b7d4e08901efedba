"""The peer of `overhead.py`: DistributedDataParallel on gloo, same model, same global batch, one thread per worker.

Run by torchrun-like environment variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Prints step times as JSON.
`--lanes L`: L micro-batches per step over all workers, under `no_sync` but for the last; `--lanes 0`: one big pass.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--lanes", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    task = MODELS[options.model]()
    model = DistributedDataParallel(task.build_model())
    optimizer = task.build_optimizer(model.parameters())
    dataset: Any = task.build_dataset("train")
    passes = max(1, options.lanes // world)
    size = options.global_batch // world // passes
    times = []
    for step in range(options.steps):
        dist.barrier()
        begin = time.perf_counter()
        for k in range(passes):
            first = (step * options.global_batch + (rank * passes + k) * size) % (len(dataset) - size)
            batch = default_collate([dataset[i] for i in range(first, first + size)])
            last = k == passes - 1
            with contextlib.nullcontext() if last else model.no_sync():
                (task.loss(model, batch) / passes).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    if rank == 0:
        print(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
