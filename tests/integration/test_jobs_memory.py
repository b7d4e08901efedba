"""Jobs under a limit of memory that the kernel keeps: it kills who holds more."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from held_memory import ControlGroup
from job_harness import LIMIT_S, Jobs, same, under_limit

WIDTH, LAYERS, WORKERS, STEPS = 1024, 8, 8, 6
"""4 MiB of parameters in each layer."""
LIMIT_MB = 2800
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
    defaults = {{"lanes": {WORKERS}, "micro_batch": 2, "steps": {STEPS}}}

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


@pytest.fixture
def limited() -> Iterator[ControlGroup]:
    try:
        group = ControlGroup(LIMIT_MB)
    except OSError as error:
        pytest.skip(str(error))
    with group:
        yield group


@pytest.mark.longer
def test_twice_the_parameters_are_trained_where_plain_data_parallelism_is_killed(
    jobs: Jobs, tmp_path: Path, limited: ControlGroup
) -> None:
    """With gradients and the optimizer's state divided, through the death of an owner, to the bits of one worker
    without a limit; the kernel kills none of ours."""
    for name, text in (("plain_model", MODEL), ("ours", OURS), ("theirs", THEIRS)):
        (tmp_path / f"{name}.py").write_text(text)
    argv = [sys.executable, str(tmp_path / "theirs.py"), str(tmp_path / "meeting")]
    with limited.start(argv, cwd=tmp_path, stderr=subprocess.PIPE) as peer:
        said = peer.communicate(timeout=LIMIT_S)[1].decode()
    assert limited.killed and "terminated with signal SIGKILL" in said, f"{limited.most_mb} MiB\n{said}"
    before, task = limited.killed, f"{tmp_path / 'ours.py'}:Twice"
    alone = jobs.start(task, workers=1)
    assert alone.end() == 0, alone.account()
    options = "--workers", str(WORKERS), "--chaos", "kill:target=worker:1,at=4,phase=update"
    settings = {"zero.stage": 2, "zero.copies": 2, "checkpoint.disk.every_steps": 2, "on_failure": "shrink"}
    code, job = under_limit(limited, tmp_path / "run", task, *options, settings=settings)
    assert code == 0, f"{code}, {limited.killed - before} killed for memory\n{job.account()}"
    assert len(job.of_kind("fault_injected")) == 1, job.account()
    assert limited.killed == before, f"{limited.killed - before} killed for memory\n{job.account()}"
    same(alone.run_dir, job)
