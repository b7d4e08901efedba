"""A peer of `recovery.py`: torchft's managed DistributedDataParallel on gloo, one replica per process.

    torchft_peer.py lighthouse HEARTBEAT_TIMEOUT_MS JOIN_TIMEOUT_MS MIN_REPLICAS    prints its address, then sleeps
    torchft_peer.py replica FOLDER NUMBER REPLICAS MODEL GLOBAL_BATCH STEPS QUORUM_RETRIES TIMEOUT_S

A replica appends "step unix_ns" to FOLDER/commits-NUMBER for each step that it has committed.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from everstep.exact.accumulate import keep_freed_memory
from models import MODELS


def lighthouse(heartbeat_timeout_ms: int, join_timeout_ms: int, min_replicas: int) -> None:
    """heartbeat_timeout_ms 0: torchft's own default."""
    from torchft.coordination import LighthouseServer

    tuned = {"heartbeat_timeout_ms": heartbeat_timeout_ms} if heartbeat_timeout_ms else {}
    server = LighthouseServer(
        bind="127.0.0.1:0", min_replicas=min_replicas, join_timeout_ms=join_timeout_ms or None, **tuned
    )
    print(server.address(), flush=True)
    time.sleep(1e6)


def replica(
    folder: Path, number: int, replicas: int, name: str, batch: int, steps: int, quorum_retries: int, timeout_s: int
) -> None:
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    torch.set_num_threads(1)
    keep_freed_memory()
    torch.manual_seed(0)
    task = MODELS[name]()
    module = task.build_model()
    inner = task.build_optimizer(module.parameters())
    dataset: Any = task.build_dataset("train")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        module.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=timeout_s)),
        load_state_dict=load,
        state_dict=lambda: {"model": module.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=replicas - 1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=f"replica_{number}",
        quorum_retries=quorum_retries,
    )
    model = DistributedDataParallel(manager, module)
    optimizer = Optimizer(manager, inner)
    size = batch // replicas
    with open(folder / f"commits-{number}", "a", buffering=1) as commits:
        while manager.current_step() < steps:
            before = manager.current_step()
            first = (before * batch + number * size) % (len(dataset) - size)
            optimizer.zero_grad()
            task.loss(model, default_collate([dataset[i] for i in range(first, first + size)])).backward()
            optimizer.step()
            if manager.current_step() > before:
                commits.write(f"{manager.current_step()} {time.time_ns()}\n")
    manager.shutdown()


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        lighthouse(*map(int, sys.argv[2:5]))
    else:
        replica(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], *map(int, sys.argv[6:10]))
