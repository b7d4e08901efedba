"""Jobs whose optimizer's state, or all of whose model, lies in files: the bits of a job that has it in memory, through
kills and resumes; and how little memory is left that the kernel cannot have back."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from held_memory import ControlGroup
from job_harness import Jobs, same, under_limit

SCRIPT = """
import os, time, torch
from torch import nn
import everstep

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(160, 40), torch.randn(160, 1))
model = nn.Sequential(nn.Linear(40, 700), nn.Tanh(), nn.Linear(700, 90), nn.Dropout(0.1), nn.Linear(90, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7)
run = everstep.join(model, optimizer, data, lanes=4, micro_batch=4, steps=40, scheduler=scheduler, clip_norm=1.0)
for step in run:
    for x, y in step:
        time.sleep(float(os.environ.get("LANE_S", "0")))
        step.backward(nn.functional.mse_loss(model(x), y))
"""


@pytest.fixture(scope="module")
def undisturbed(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    job = jobs.start(str(path), workers=1)
    assert job.end() == 0, job.account()
    return job.run_dir


@pytest.mark.longer
@pytest.mark.parametrize("parameters", ["false", "true"])
def test_a_kill_a_heal_and_a_resume_without_it_keep_the_bits(
    jobs: Jobs, undisturbed: Path, tmp_path: Path, parameters: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    script, far = str(tmp_path / "train.py"), tmp_path / "far"
    settings = {"zero.offload": f"{far}/", "zero.offload_params": parameters}
    job = jobs.start(script, settings=settings, workers=2, environment={"LANE_S": "0.06"})
    job.wait_for("step_committed", step=2)
    os.kill(job.pid_of(1), signal.SIGKILL)
    job.wait_for("worker_healed", worker_id=1)
    os.kill(job.launcher_pid(), signal.SIGTERM)  # the checkpoint is written from the file, and read without one
    assert job.end() == 143, job.account()
    off = {"zero.offload": "none", "zero.offload_params": "false"}
    again = jobs.start(script, settings=off, workers=3, run_dir=job.run_dir)
    assert again.end() == 0, again.account()
    same(undisturbed, again)
    assert list(far.iterdir()) == []


LARGE = """
import torch
from torch import nn
import everstep

data = torch.utils.data.TensorDataset(torch.randn(16, 1024), torch.randn(16, 1))
layers = [nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(64)]
model = nn.Sequential(*layers, nn.Linear(1024, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
for step in everstep.join(model, optimizer, data, lanes=1, micro_batch=2, steps=2):
    for x, y in step:
        step.backward(nn.functional.mse_loss(model(x), y))
"""
LIMIT_MB = 750
"""501 are held here, all processes together; 1,024 are parameters, gradients and the optimizer's state alone."""


@pytest.mark.longer
def test_a_model_larger_than_the_memory_that_it_is_allowed_is_trained(jobs: Jobs, tmp_path: Path) -> None:
    """A control group without swap cannot have anonymous and shared memory back; pages of files are written and
    dropped. A job is killed under its limit that has its model in the former."""
    (tmp_path / "train.py").write_text(LARGE)
    found: list[tuple[int, int]] = []
    near = {"rehearse": "false", "checkpoint.enabled": "false"}
    far = near | {"zero.offload": str(tmp_path / "far"), "zero.offload_params": "true"}
    script = str(tmp_path / "train.py")
    free = jobs.start(script, workers=1, settings=near)
    assert free.end() == 0, free.account()
    for name, settings in (("near", near | {"max_restarts": 0}), ("far", far)):
        try:
            group = ControlGroup(LIMIT_MB)
        except OSError as error:
            pytest.skip(str(error))
        with group:
            code, job = under_limit(group, tmp_path / name, script, settings=settings)
            found.append((code, group.killed))
    assert found[0][0] != 0 and found[0][1], found
    assert found[1] == (0, 0), f"{found}\n{job.account()}"
    same(free.run_dir, job)
