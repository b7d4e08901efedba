"""Members whose states differ: what all agree on counts alone, and a script that makes them differ ends its job."""

from __future__ import annotations

from pathlib import Path

import pytest

from job_harness import Jobs

SCRIPT = """
import torch
from torch import nn
import everstep

torch.manual_seed(0)
data = [(torch.randn(4), torch.tensor(i % 2)) for i in range(64)]
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = everstep.join(model, optimizer, data, lanes=4, micro_batch=2, steps=11, rehearse=False)
for step in run:
    for x, y in step:
        step.backward(nn.functional.cross_entropy(model(x), y))
    if run.is_main and step.number > {after}:
        with torch.no_grad():
            model.weight.mul_(0.999)
"""


def test_a_script_that_changes_the_leaders_weights_ends_with_the_checkpoint_that_all_agreed_on(
    jobs: Jobs, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(after=5))
    job = jobs.start(str(script), workers=2, settings={"checkpoint.disk.every_steps": 4})
    assert job.end() == 1, job.account()
    (failed,) = job.of_kind("job_failed")
    assert failed["cause"] == "nondeterministic" and ", in weight:" in failed["reason"], failed
    assert "run.is_main" in failed["reason"] and failed["reason"].endswith("checkpoint up to step 4 counts")
    refused = [e for e in job.of_kind("checkpoint_failed") if e["step"] == 8]
    named = [e["cause"] == "corrupt" and ("weight" in e["reason"] or "discarded" in e["reason"]) for e in refused]
    assert named and all(named), job.account()  # discarded: if the comparison at the end was first
    assert {e["step"] for e in job.of_kind("checkpoint_completed")} == {4}, job.account()
    assert [path.parent.name for path in job.run_dir.glob("checkpoints/*/manifest.json")] == ["step-0000000004"]
    assert not (job.run_dir / "final").exists()


@pytest.mark.longer
def test_a_mode_that_the_leader_alone_has_set_ends_the_job_by_name(jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = SCRIPT.format(after=5).replace("with torch.no_grad():\n            model.weight.mul_(0.999)", "model.eval()")
    assert "mul_" not in text
    script.write_text(text)
    job = jobs.start(str(script), workers=2)
    assert job.end() == 1, job.account()
    reason = job.of_kind("job_failed")[-1]["reason"]
    assert "how the script has set the model (modes) differs among the workers" in reason and "run.is_main" in reason


@pytest.mark.longer
def test_what_differs_after_the_last_step_alone_is_seen(jobs: Jobs, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(after=10))
    job = jobs.start(str(script), workers=2, settings={"checkpoint.enabled": "false"})
    assert job.end() == 1, job.account()
    assert "after step 11, the last" in job.of_kind("job_failed")[0]["reason"], job.account()
    assert not (job.run_dir / "final").exists()


@pytest.mark.longer
def test_a_bit_that_flips_in_the_last_step_is_healed_by_the_majority(jobs: Jobs) -> None:
    settings = {"verify_every": 1000, "checkpoint.memory.every_steps": 2}
    job = jobs.run("Pictures", workers=3, chaos="flip:target=worker:1,at=30,phase=load", settings=settings)
    (evicted,) = job.of_kind("worker_evicted")
    assert evicted["worker_id"] == 1 and "after step 30, the last" in evicted["reason"], job.account()


STATISTICS = """
import os
import torch
from torch import nn
import everstep

torch.manual_seed(0)
data = [(torch.randn(4), torch.tensor(i % 2)) for i in range(64)]
model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = everstep.join(model, optimizer, data, lanes=4, micro_batch=2, steps=11, rehearse=False)
for step in run:
    for x, y in step:
        step.backward(nn.functional.cross_entropy(model(x), y))
    if run.is_main and step.number == 6:
        model[1].running_mean.zero_()
"""


@pytest.mark.longer
def test_running_statistics_that_the_leader_alone_has_set_end_the_job_by_name(jobs: Jobs, tmp_path: Path) -> None:
    """One step later all would hold the same: the mean of what their lanes have made of different ones."""
    script = tmp_path / "train.py"
    script.write_text(STATISTICS)
    job = jobs.start(str(script), workers=2)
    assert job.end() == 1, job.account()
    reason = job.of_kind("job_failed")[-1]["reason"]
    assert "(running statistics) differs among the workers before step 7" in reason and "run.is_main" in reason
    assert not (job.run_dir / "final").exists()
