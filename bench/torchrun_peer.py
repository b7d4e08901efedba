"""A peer of `recovery.py`: DistributedDataParallel on gloo under torchrun, with a checkpoint after every step.

    torchrun --nproc-per-node N --max-restarts M torchrun_peer.py FOLDER MODEL GLOBAL_BATCH STEPS

Each life of a rank writes its pid into FOLDER/pids/RANK; rank 0 appends "step unix_ns" to FOLDER/commits once the
checkpoint of the step is in place.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from everstep.exact.accumulate import keep_freed_memory
from models import MODELS


def main() -> None:
    folder, model_name, batch, steps = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    (folder / "pids" / str(rank)).write_text(str(os.getpid()))
    torch.manual_seed(0)
    task = MODELS[model_name]()
    model = DistributedDataParallel(task.build_model())
    optimizer = task.build_optimizer(model.parameters())
    dataset: Any = task.build_dataset("train")
    checkpoint, size, done = folder / "checkpoint.pt", batch // world, 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    for step in range(done + 1, steps + 1):
        first = (step * batch + rank * size) % (len(dataset) - size)
        task.loss(model, default_collate([dataset[i] for i in range(first, first + size)])).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, folder / "checkpoint.new")
            os.replace(folder / "checkpoint.new", checkpoint)
            with open(folder / "commits", "a") as file:
                file.write(f"{step} {time.time_ns()}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
