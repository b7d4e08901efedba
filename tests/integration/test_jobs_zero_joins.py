"""Workers that join a job whose members divide the optimizer's state: they get their parts while training goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from job_harness import Job, Jobs, healed, same

SCRIPT = """
import os, sys, torch
sys.path.insert(0, {tests!r})
from torch import nn
import everstep
from job_tasks import PACE, Pace

pace = Pace(os.environ.get(PACE, ""))
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(160, 40), torch.randn(160, 1))
model = nn.Sequential(
    nn.Linear(40, 700), nn.BatchNorm1d(700), nn.Tanh(), nn.Linear(700, 500), nn.Dropout(0.1), nn.Linear(500, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
run = everstep.join(model, optimizer, data, lanes=6, micro_batch=3, steps=100, clip_norm=1.0)
for step in run:
    for x, y in step:
        pace.lane()
        step.backward(nn.functional.mse_loss(model(x), y))
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT.replace("{tests!r}", repr(str(Path(__file__).parents[1]))))
    return str(path)


def begun(jobs: Jobs, script: str, pace: list[dict[str, object]], **settings: object) -> Job:
    """A job of three workers to which a fourth one is coming."""
    job = jobs.start(script, workers=3, settings=settings, pace=pace)
    job.wait_for("step_committed", step=3)
    assert jobs.command(["scale", str(job.run_dir), "--workers", "4"], job.run_dir.with_name("scaled")).end() == 0
    job.wait_for("worker_joined", worker_id=3)
    return job


@pytest.mark.longer
def test_steps_go_on_while_a_worker_gets_its_part(jobs: Jobs, script: str, reference: Path) -> None:
    """It has asked all of its donors, is offered their parts at one step, and is fed others, before a generation has
    it."""
    job = begun(jobs, script, [healed(3)], **{"zero.stage": 2, "zero.copies": 1, "verify_every": 4})
    assert job.end() == 0, job.account()
    same(reference, job)
    told = [event for event in job.events if event["kind"] in ("worker_joined", "step_committed", "generation_started")]
    came = next(n for n, e in enumerate(told) if e["kind"] == "worker_joined" and e["worker_id"] == 3)
    taken = next(n for n, e in enumerate(told) if e["kind"] == "generation_started" and 3 in e["workers"])
    meanwhile = [e for e in told[came:taken] if e["kind"] == "step_committed"]
    assert meanwhile and {e["generation"] for e in meanwhile} == {1}, job.account()
    assert told[taken]["generation"] == 2 and "worker 3 healed and joins" in told[taken]["reason"], job.account()
    assert not job.of_kind("fallback")


@pytest.mark.longer
@pytest.mark.parametrize("copies", [1, 2])
def test_a_donor_dies_while_a_worker_gets_its_part(jobs: Jobs, script: str, reference: Path, copies: int) -> None:
    settings = {"zero.stage": 2, "zero.copies": copies, "checkpoint.disk.every_steps": 2}
    job = begun(jobs, script, [healed(3), healed(1)], **settings)
    os.kill(job.pid_of(1), signal.SIGKILL)
    assert job.end() == 0, job.account()
    same(reference, job)
    assert {e["worker_id"] for e in job.of_kind("worker_healed")} >= {1, 3}, job.account()
