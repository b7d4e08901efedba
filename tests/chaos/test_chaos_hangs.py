"""A step that hangs in each life ends the job: with the stacks of all threads, and the user's line."""

from __future__ import annotations

from pathlib import Path

from job_harness import Jobs

HANGS = """
import threading
import torch
from torch.utils.data import TensorDataset
import everstep

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = everstep.join(model, optimizer, TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), steps=9, rehearse=False)

def measured(x, y, number):
    if number == 3:
        threading.Event().wait()
    return torch.nn.functional.mse_loss(model(x), y)

for step in run:
    for x, y in step:
        step.backward(measured(x, y, step.number))
"""


def test_the_same_hang_twice_ends_the_job_and_says_where(jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(HANGS)
    settings = {"hang_limit_s": 2, "heartbeat.interval_s": 0.2, "backoff.initial_s": 0.05}
    job = jobs.start(str(script), workers=2, settings=settings)
    assert job.end() == 1, job.account()
    [failed] = job.of_kind("job_failed")
    assert failed["cause"] == "hung", failed
    assert f"in {script}:14 (measured)" in failed["reason"] and "second hang there" in failed["reason"], failed
    logs = "".join(path.read_text() for path in (job.run_dir / "logs").glob("worker-*.jsonl"))
    assert "most recent call first" in logs and "in measured" in logs
