"""Jobs whose optimizer's state lies in a file: the bits of a job that has it in memory, through kills and resumes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from job_harness import Jobs, same

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


@pytest.mark.longer
def test_a_kill_a_heal_and_a_resume_without_it_keep_the_bits(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    script, far = str(tmp_path / "train.py"), tmp_path / "far"
    undisturbed = jobs.start(script, workers=1)
    assert undisturbed.end() == 0, undisturbed.account()
    job = jobs.start(script, settings={"zero.offload": f"{far}/"}, workers=2, environment={"LANE_S": "0.06"})
    job.wait_for("step_committed", step=2)
    os.kill(job.pid_of(1), signal.SIGKILL)
    job.wait_for("worker_healed", worker_id=1)
    os.kill(job.launcher_pid(), signal.SIGTERM)  # the checkpoint is written from the file, and read without one
    assert job.end() == 143, job.account()
    again = jobs.start(script, settings={"zero.offload": "none"}, workers=3, run_dir=job.run_dir)
    assert again.end() == 0, again.account()
    same(undisturbed.run_dir, again)
    assert list(far.iterdir()) == []
