"""Workers that come and go on request, and scripts that call `everstep.join`."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from everstep.runtime.commands import ask
from job_harness import Jobs, healed, same

SCRIPT = """
import os
import sys
import torch
from torch import nn

sys.path.insert(0, {tests!r})
import everstep
from job_tasks import PACE, Glyphs, Pace


class Seen:
    def __init__(self):
        self.losses = 0.0

    def state_dict(self):
        return {{"losses": self.losses}}

    def load_state_dict(self, state):
        self.losses = state["losses"]


pace = Pace(os.environ.get(PACE, ""))
torch.manual_seed(7)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
seen = Seen()
run = everstep.join(
    model, optimizer, Glyphs(augmented=True), micro_batch=4, scheduler=scheduler, clip_norm=1.0, state={{"seen": seen}},
    steps=int(sys.argv[1]), run_dir=sys.argv[2] if len(sys.argv) > 2 else None,
)
for step in run:
    for picture, label in step:
        pace.lane()
        step.backward(nn.functional.cross_entropy(model(picture), label))
    seen.losses += step.loss
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plain training script."""
    path = tmp_path_factory.mktemp("script") / "plain.py"
    path.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    return str(path)


def test_scale_and_drain(jobs: Jobs) -> None:
    """Up, down, and the leader leaves."""
    numerics = {"steps": 40}
    pace = [{"kind": "generation_started", "workers": [1, 2]}]
    job = jobs.start("Text", workers=2, numerics=numerics, pace=pace, lane_s=0.03)
    job.wait_for("step_committed", step=2)
    ask(job.run_dir, "scale", {"workers": 4})
    job.wait_for("generation_started", workers=[0, 1, 2, 3])
    ask(job.run_dir, "scale", {"workers": 3})
    job.wait_for("generation_started", workers=[0, 1, 2])
    ask(job.run_dir, "drain", {"worker_id": 0})
    job.wait_for("generation_started", workers=[1, 2])
    jobs.check(job, "Text", numerics)
    assert [e["reason"] for e in job.of_kind("worker_evicted")] == []


def test_scale_with_a_kill_in_the_middle(jobs: Jobs) -> None:
    numerics = {"steps": 30}
    job = jobs.start("Pictures", workers=2, numerics=numerics, pace=[healed(1), healed(2)])
    job.wait_for("step_committed", step=2)
    ask(job.run_dir, "scale", {"workers": 3})
    job.wait_for("worker_joined", worker_id=2)
    os.kill(job.pid_of(1), signal.SIGKILL)
    jobs.check(job, "Pictures", numerics)
    assert job.of_kind("generation_started")[-1]["workers"] == [0, 1, 2]


def test_a_script(jobs: Jobs, script: str) -> None:
    """The same by itself, on one launched worker, and on three with kills."""
    plain = jobs.plainly(script, "25")
    assert plain.end() == 0, plain.account()
    chaos = "kill:target=worker:1,at=4; kill:target=leader:0,at=9"
    job = jobs.start(script, "--", "25", chaos=chaos, pace=[healed(1), healed(0)])
    assert job.end() == 0, job.account()
    same(plain.run_dir, job)
    assert {e["worker_id"] for e in job.of_kind("worker_healed")} == {0, 1}
