"""The peer of other benches: DistributedDataParallel on gloo, same model, same global batch.

One thread per worker. Started once per rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. `--passes P`: P
micro-batches per worker and step, all but the last under `no_sync`; 1 is one big pass. It trains until it is killed;
rank 0 appends to `--ends` when each step ended (unix, ns). `--divide optimizer`: with torch's ZeroRedundancyOptimizer;
`--divide all`: FSDP2 by unit in place of DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import itertools
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from everstep.exact.accumulate import keep_freed_memory
from models import MODELS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--passes", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    parser.add_argument("--ends", required=True)
    parser.add_argument("--wait-ms", type=float, default=0.0, help="a pass takes at least three times that")
    parser.add_argument("--bucket-views", action="store_true", help="its gradient_as_bucket_view")
    parser.add_argument("--divide", choices=("optimizer", "all"), help="what ranks hold a part of")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    task = MODELS[options.model]()
    model: Any = task.build_model()
    if options.divide == "all":
        mesh = init_device_mesh("cpu", (world,))
        units = task.units(model)
        held = Counter(id(parameter) for unit in units for parameter in unit.parameters())
        for unit in units:
            if all(held[id(parameter)] == 1 for parameter in unit.parameters()):  # tied ones are the whole model's
                fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=options.bucket_views)
    optimizer = task.build_optimizer(model.parameters())
    if options.divide == "optimizer":
        known = inspect.signature(type(optimizer)).parameters
        settings = {key: value for key, value in optimizer.defaults.items() if key in known}
        optimizer = ZeroRedundancyOptimizer(model.parameters(), type(optimizer), **settings)
    dataset: Any = task.build_dataset("train")
    size = options.global_batch // world // options.passes
    for step in itertools.count():
        for k in range(options.passes):
            first = (step * options.global_batch + (rank * options.passes + k) * size) % (len(dataset) - size)
            batch = default_collate([dataset[i] for i in range(first, first + size)])
            end, last = time.monotonic() + 3 * options.wait_ms / 1e3, k == options.passes - 1
            if options.divide == "all":
                model.set_requires_gradient_sync(last)
            with contextlib.nullcontext() if last or options.divide == "all" else model.no_sync():
                loss = task.loss(model, batch) / options.passes
                time.sleep(max(0.0, end - time.monotonic()))
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            with open(options.ends, "a") as file:
                file.write(f"{time.time_ns()}\n")


if __name__ == "__main__":
    main()
