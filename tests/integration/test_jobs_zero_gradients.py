"""Jobs whose members give gradients back before they are whole: the bits of one worker that keeps all of them, through
kills of those who have added them up, and resumes that divide other things or nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from job_harness import Jobs, healed, same

SCRIPT = """
import os, time, torch
from torch import nn
import everstep

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(160, 40), torch.randn(160, 40))

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(40, 900), nn.BatchNorm1d(900)
        self.body, self.late = nn.Sequential(nn.Linear(900, 900), nn.Dropout(0.1)), nn.Linear(900, 900)
        self.down = nn.Linear(900, 40)
        self.down.weight = nn.Parameter(self.up.weight.detach().t().contiguous())
        self.again = nn.Linear(40, 900)
        self.again.weight = self.up.weight

    def forward(self, x, late):
        x = self.body(self.norm(self.up(x)).tanh())
        x = self.late(x) if late else x
        return self.down(x + self.again(self.down(x)))

model = Tied()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)
run = everstep.join(model, optimizer, data, lanes=4, micro_batch=4, steps=20, clip_norm=1.0)
for step in run:
    for x, y in step:
        time.sleep(float(os.environ.get("LANE_S", "0")))
        step.backward(nn.functional.mse_loss(model(x, step.number > 5), y))
"""
ZERO = {"zero.stage": 2, "checkpoint.disk.every_steps": 3}
PACED = {"LANE_S": "0.04"}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.longer
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"zero.copies": 1}, marks=pytest.mark.longer),
        {},
        pytest.param({"zero.copies": 3, "verify_every": 3}, marks=pytest.mark.longer),
    ],
    ids=str,
)
def test_who_has_added_up_gradients_is_killed(jobs: Jobs, script: str, reference: Path, more: dict[str, Any]) -> None:
    """The lanes of all members whose gradients it had are computed again."""
    phases = ("reduce", "agree", "update", "backward")
    who = ("worker:1", "leader:0", "worker:2", "worker:3")
    chaos = "; ".join(f"kill:target={one},at={4 + 4 * k},phase={phases[k]}" for k, one in enumerate(who))
    job = jobs.start(script, workers=4, settings={**ZERO, **more}, chaos=chaos, environment=PACED)
    assert job.end() == 0, job.account()
    same(reference, job)
    assert len(job.of_kind("fault_injected")) == 4, job.account()


@pytest.mark.longer
def test_both_holders_and_a_joiner_are_killed(jobs: Jobs, script: str, reference: Path) -> None:
    job = jobs.start(script, workers=4, settings=ZERO, environment=PACED, chaos="kill:target=worker:3,at=9,phase=heal")
    job.wait_for("step_committed", step=5)
    for pid in [job.pid_of(worker_id) for worker_id in (1, 2, 3)]:
        os.kill(pid, signal.SIGKILL)
    assert job.end() == 0, job.account()
    same(reference, job)


@pytest.mark.longer
def test_it_is_resumed_otherwise_divided_and_not_at_all(jobs: Jobs, script: str, reference: Path) -> None:
    run_dir = None
    for step, stage, workers in ((5, 2, 3), (9, 1, 4), (14, 0, 2)):
        settings = {"zero.stage": stage, "zero.copies": 1}
        job = jobs.start(script, workers=workers, settings=settings, environment=PACED, run_dir=run_dir)
        job.wait_for("step_committed", step=step)
        os.kill(job.launcher_pid(), signal.SIGTERM)
        assert job.end() == 143, job.account()
        run_dir = job.run_dir
    last = jobs.start(script, workers=4, settings={**ZERO, "zero.copies": 1}, run_dir=run_dir)
    assert last.end() == 0, last.account()
    same(reference, last)


@pytest.mark.longer
def test_over_sockets_gradients_stay_and_the_bits_too(jobs: Jobs, script: str, reference: Path) -> None:
    chaos = "kill:target=worker:1,at=8,phase=reduce; kill:target=leader:0,at=14,phase=agree"
    job = jobs.start(script, workers=4, settings={**ZERO, "transport": "sockets"}, chaos=chaos, environment=PACED)
    assert job.end() == 0, job.account()
    same(reference, job)


@pytest.mark.longer
@pytest.mark.parametrize(
    ("task", "numerics", "settings"),
    [
        ("Text", {"precision": "fp16"}, {"stages": 2}),
        ("Layers", {}, {"stages": 2, "chunks": 2, "schedule": "interleaved"}),
        ("PicturesNonFinite", {"on_nonfinite": "skip"}, {"zero.copies": 2}),
        ("PicturesCounting", {}, {"verify_every": 3}),
    ],
)
def test_stages_scaled_losses_and_losses_that_are_not_finite(
    jobs: Jobs, task: str, numerics: dict[str, Any], settings: dict[str, Any]
) -> None:
    chaos = "kill:target=worker:1,at=5,phase=backward; kill:target=leader:0,at=9,phase=agree"
    more = {**ZERO, "zero.copies": 1, **settings}
    jobs.run(task, workers=4, chaos=chaos, numerics=numerics, settings=more, pace=[healed(1), healed(0)])
