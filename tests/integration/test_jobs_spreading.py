"""Jobs whose members die in the middle of sending each other updated parameters: the bits of one worker."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from job_harness import LIMIT_S, Job, Jobs, same

TASK = """
import os, time
from pathlib import Path

import torch
from torch import nn

import everstep
from everstep.parallel.channel import SharedMemoryChannel

exchange, folder = SharedMemoryChannel.spread, os.environ.get("STALL")

def stalled(self, step, stage, portions):
    half = len(portions) // 2 if folder and step in (6, 12) else len(portions)
    exchange(self, step, stage, portions[:half])
    if half < len(portions):
        Path(folder, f"{step}-{os.getpid()}").touch()
        while not Path(folder, f"go-{step}").exists():
            self._fence.check()
            time.sleep(0.005)
        exchange(self, step, stage, portions[half:], relayed=True)

SharedMemoryChannel.spread = stalled

class Small(everstep.Task):
    def build_model(self):
        torch.manual_seed(0)
        layers = [nn.Linear(40, 700), nn.BatchNorm1d(700), nn.Tanh(), nn.Linear(700, 500), nn.Dropout(0.1)]
        return nn.Sequential(*layers, nn.Linear(500, 1))

    def build_dataset(self, split):
        g = torch.Generator().manual_seed(1)
        return torch.utils.data.TensorDataset(torch.randn(160, 40, generator=g), torch.randn(160, 1, generator=g))

    def build_optimizer(self, params):
        return torch.optim.AdamW(params, lr=0.01, amsgrad=True)

    def loss(self, model, batch):
        time.sleep(float(os.environ.get("LANE_S", "0")))
        until = time.monotonic() + 2.0
        while folder and Path(folder, "go-6").exists() and not Path(folder, "healed").exists():
            if time.monotonic() > until:
                break
            time.sleep(0.005)
        return nn.functional.mse_loss(model(batch[0]), batch[1])
"""
NUMERICS = {"lanes": 6, "micro_batch": 3, "steps": 20}
ZERO = {"zero.stage": 1, "checkpoint.disk.every_steps": 5, "checkpoint.memory.every_steps": 5}


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "small.py").write_text(TASK)
    (tmp_path / "stall").mkdir()
    return f"{tmp_path / 'small.py'}:Small"


def wait_until_stalled(job: Job, folder: Path, step: int, count: int) -> list[int]:
    """Until so many workers wait in the middle of a step's exchange. Returns their processes."""
    end = time.monotonic() + LIMIT_S
    while len(found := list(folder.glob(f"{step}-*"))) < count:
        assert not job.over(0.01) and time.monotonic() < end, job.account()
    return [int(path.name.partition("-")[2]) for path in found]


@pytest.mark.longer
@pytest.mark.parametrize("copies", [2, pytest.param(1, marks=pytest.mark.longer)])
def test_holders_and_joiners_die_while_parameters_are_on_their_way(
    jobs: Jobs, task: str, tmp_path: Path, copies: int
) -> None:
    folder = tmp_path / "stall"
    job = jobs.start(
        task,
        workers=3,
        numerics=NUMERICS,
        settings={**ZERO, "zero.copies": copies},
        environment={"STALL": str(folder), "LANE_S": "0.03"},
    )
    wait_until_stalled(job, folder, 6, 3)
    os.kill(job.pid_of(1), signal.SIGKILL)
    (folder / "go-6").touch()
    job.wait_for("worker_healed", worker_id=1)
    (folder / "healed").touch()
    stalled = wait_until_stalled(job, folder, 12, 3)
    assert job.pid_of(1) in stalled, "it takes part again"
    os.kill(job.pid_of(2), signal.SIGKILL)
    os.kill(job.wait_for("worker_joined", worker_id=2, incarnation=1)["pid"], signal.SIGKILL)
    (folder / "go-12").touch()
    assert job.end() == 0, job.account()
    same(jobs.reference(task, NUMERICS), job)
    assert bool(job.of_kind("fallback")) == (copies == 1), job.account()
