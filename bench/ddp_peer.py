"""The peer of `overhead.py`: DistributedDataParallel on gloo, same model, same global batch, one thread per worker.

Started once per rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. `--passes P`: P micro-batches per worker
and step, all but the last under `no_sync`; 1 is one big pass. Rank 0 prints JSON: `steps_s`, from the end of each step
to the end of the next, and `cpu_s`, processor time of all ranks per step, both without the warm-up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from models import MODELS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--passes", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    task = MODELS[options.model]()
    model = DistributedDataParallel(task.build_model())
    optimizer = task.build_optimizer(model.parameters())
    dataset: Any = task.build_dataset("train")
    size = options.global_batch // world // options.passes
    ends, cpu = [], []
    for step in range(options.steps):
        for k in range(options.passes):
            first = (step * options.global_batch + (rank * options.passes + k) * size) % (len(dataset) - size)
            batch = default_collate([dataset[i] for i in range(first, first + size)])
            with contextlib.nullcontext() if k == options.passes - 1 else model.no_sync():
                (task.loss(model, batch) / options.passes).backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
        cpu.append(time.process_time())
    first = options.warm_up - 1
    total = torch.tensor((cpu[-1] - cpu[first]) / (len(cpu) - 1 - first), dtype=torch.float64)
    dist.all_reduce(total)
    if rank == 0:
        steps = [b - a for a, b in zip(ends[first:], ends[first + 1 :], strict=False)]
        print(json.dumps({"steps_s": steps, "cpu_s": float(total)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
