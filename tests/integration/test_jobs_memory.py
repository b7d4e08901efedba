"""Jobs under a limit of memory: who holds more than that, all processes together, is killed at once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from held_memory import Limit
from job_harness import LIMIT_S, Jobs, same

WIDTH, LAYERS, WORKERS = 1024, 20, 4
"""4 MiB of parameters in each layer."""
LIMIT_MB = 2480
"""2,210 to 2,240 are held here, more by the peer in its first step."""
MODEL = f"""
import torch
from torch import nn

def model(layers):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.Tanh()) for _ in range(layers)))
"""
OURS = f"""
import sys
sys.path.insert(0, __file__.rpartition("/")[0])
import everstep, torch
from plain_model import model

class Twice(everstep.Task):
    defaults = {{"lanes": {WORKERS}, "micro_batch": 2, "steps": 3}}

    def build_model(self):
        return model(2 * {LAYERS})

    def build_dataset(self, split):
        return torch.utils.data.TensorDataset(torch.randn(64, {WIDTH}), torch.randn(64, {WIDTH}))

    def build_optimizer(self, params):
        return torch.optim.AdamW(params)

    def units(self, model):
        return list(model)

    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])
"""
THEIRS = f"""
import os, sys, torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.nn.parallel import DistributedDataParallel
from plain_model import model

def train(rank, place):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{{place}}", rank=rank, world_size={WORKERS})
    net = DistributedDataParallel(model({LAYERS}))
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(100):
        torch.nn.functional.mse_loss(net(torch.randn(2, {WIDTH})), torch.randn(2, {WIDTH})).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()

if __name__ == "__main__":
    processes.spawn(train, (sys.argv[1],), {WORKERS})
"""


@pytest.mark.longer
def test_twice_the_parameters_are_trained_where_plain_data_parallelism_is_killed(jobs: Jobs, tmp_path: Path) -> None:
    """With gradients and the optimizer's state divided, to the bits of one worker without a limit."""
    for name, text in (("plain_model", MODEL), ("ours", OURS), ("theirs", THEIRS)):
        (tmp_path / f"{name}.py").write_text(text)
    task = f"{tmp_path / 'ours.py'}:Twice"
    argv = [sys.executable, str(tmp_path / "theirs.py"), str(tmp_path / "meeting")]
    with subprocess.Popen(argv, cwd=tmp_path) as peer:
        theirs = Limit(peer.pid, LIMIT_MB)
        with theirs.holds():
            assert peer.wait(LIMIT_S) == -signal.SIGKILL, f"it held {theirs.most_mb} MiB"
    settings = {"zero.stage": 2, "zero.copies": 1, "checkpoint.enabled": "false"}
    job = jobs.start(task, workers=WORKERS, settings=settings)
    ours = Limit(job.launcher_pid(), LIMIT_MB)
    with ours.holds():
        assert job.end() == 0, f"it held {ours.most_mb} MiB\n{job.account()}"
    alone = jobs.start(task, workers=1)
    assert alone.end() == 0, alone.account()
    same(alone.run_dir, job)
    assert ours.most_mb <= LIMIT_MB < theirs.most_mb
