"""Steps that a resumed job repeats have the losses that were told of them, or the job ends by name."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from job_harness import Jobs, same

SCRIPT = """
import os, time, torch
from torch import nn
import everstep

torch.manual_seed(0)
model = nn.Linear(16, 16)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(640, 16), torch.randn(640, 16))
scale = float(os.environ.get("SCALE", "1"))
for step in everstep.join(model, optimizer, data, lanes=4, micro_batch=2, steps=30):
    for x, y in step:
        time.sleep(float(os.environ.get("LANE_S", "0")))
        step.backward(nn.functional.mse_loss(scale * model(x), y))
"""


@pytest.mark.longer
def test_a_script_that_reads_another_environment_after_a_crash_is_refused(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "scaled.py").write_text(SCRIPT)
    script, rule = str(tmp_path / "scaled.py"), {"checkpoint.disk.every_steps": 12}
    alone = jobs.start(script, workers=1)
    job = jobs.start(script, workers=2, settings=rule, environment={"LANE_S": "0.1"})
    job.wait_for("checkpoint_completed", step=12)
    job.wait_for("step_committed", step=15)  # the next checkpoint is far
    signal.pidfd_send_signal(job._pidfd, signal.SIGKILL)
    job.end()

    other = jobs.start(script, workers=2, run_dir=job.run_dir, settings=rule, environment={"SCALE": "1.5"})
    assert other.end() == 2, other.account()
    assert "when it was done before, and has" in other.account() and "numerics.changed=warn" in other.account()

    again = jobs.start(script, workers=3, run_dir=job.run_dir, settings=rule)
    assert (alone.end(), again.end()) == (0, 0), again.account()
    assert again.of_kind("job_started")[-1]["step"] > 0
    same(alone.run_dir, again)
