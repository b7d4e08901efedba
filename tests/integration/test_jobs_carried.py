"""Loops that keep something: what everstep.state holds survives kills and stops; what nobody carries refuses both."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from job_harness import Jobs, healed, same

HEAD = """
import os, random, sys
import torch
from torch import nn

sys.path.insert(0, {tests!r})
import everstep
from job_tasks import PACE, Pace

pace = Pace(os.environ.get(PACE, ""))
torch.manual_seed(7)
data = [(torch.randn(4), torch.tensor(i % 2)) for i in range(64)]
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
"""
KEPT = (
    HEAD
    + """

class Average(nn.Module):
    n = 0

    def __init__(self):
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.zeros(2, 8)), 0

    def forward(self, x):
        self.calls += 1
        return x

    @torch.no_grad()
    def follow(self, value):
        self.n += 1
        self.weight.lerp_(value, 1 / self.n)
        if self.n % 5 == 0:
            self.train(self.n % 10 == 0)

kept = everstep.state(best=-1.0, wait=0, rng=random.Random(1), losses=[], average=Average())
losses = kept.losses
run = everstep.join(
    model, optimizer, data, lanes=4, micro_batch=2, steps=18, state=kept,
    run_dir=sys.argv[1] if len(sys.argv) > 1 else None,
)
for step in run:
    for x, y in step:
        pace.lane()
        step.backward(nn.functional.cross_entropy(model(kept.average(x)), y))
    losses.append(step.loss)
    kept.average.follow(model[2].weight)
    if kept.average.training:
        with torch.no_grad():
            model[2].weight.lerp_(kept.average.weight, 0.1)
    kept.wait = 0 if step.loss < kept.best else kept.wait + 1
    if kept.wait == 7:
        optimizer.param_groups[0]["lr"] *= 0.5 + 0.1 * kept.rng.random() + 0.001 * sum(losses)
        kept.wait = 0
"""
)
HIDDEN = (
    HEAD
    + """
box = type("Box", (), {{}})()
box.level = 1.0
for step in everstep.join(model, optimizer, data, lanes=4, micro_batch=2, steps=400):
    for x, y in step:
        pace.lane()
        step.backward(nn.functional.cross_entropy(model(x * eval("box.level")), y))
    if step.number >= 4:
        eval("box.__setattr__('level', box.level * 0.9)")
"""
)
SAVED = {"lanes": 4, "checkpoint.disk.every_steps": 5}


def written(folder: Path, text: str) -> str:
    script = folder / "train.py"
    script.write_text(text.format(tests=str(Path(__file__).parents[1])))
    return str(script)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    return written(tmp_path_factory.mktemp("kept"), KEPT)


@pytest.fixture(scope="module")
def plain(jobs: Jobs, script: str) -> Path:
    """The directory of the script's run by itself."""
    job = jobs.plainly(script)
    assert job.end() == 0, job.account()
    return job.run_dir


def test_what_a_state_holds_is_healed(jobs: Jobs, script: str, plain: Path) -> None:
    job = jobs.start(script, workers=2, settings={"lanes": 4}, chaos="kill:target=worker:1,at=5", pace=[healed(1)])
    assert job.end() == 0, job.account()
    same(plain, job)
    assert not job.of_kind("warning")


@pytest.mark.longer
def test_what_a_state_holds_is_resumed(jobs: Jobs, script: str, plain: Path) -> None:
    stopped = jobs.start(script, workers=2, settings={"lanes": 4}, pace=[{"kind": "never"}])
    stopped.wait_for("step_committed", step=6)
    os.kill(stopped.launcher_pid(), signal.SIGINT)
    assert stopped.end() == 130, stopped.account()
    resumed = jobs.start(script, workers=1, settings={"lanes": 4}, run_dir=stopped.run_dir)
    assert resumed.end() == 0, resumed.account()
    same(plain, resumed)


@pytest.mark.longer
def test_what_nobody_carries_is_told_and_then_refused(jobs: Jobs, tmp_path: Path) -> None:
    """Its code cannot be read, and it changes after the steps that are rehearsed."""
    script = written(tmp_path, HIDDEN)
    stopped = jobs.start(script, workers=2, settings=SAVED, pace=[{"kind": "never"}])
    told = stopped.wait_for("warning")
    assert "box.level has changed since the first steps" in told["reason"]
    stopped.wait_for("checkpoint_completed")
    os.kill(stopped.pid_of(1), signal.SIGKILL)
    assert stopped.end() == 2, stopped.account()
    assert "cannot be healed" in stopped.of_kind("job_failed")[-1]["reason"]
    resumed = jobs.start(script, workers=1, settings=SAVED, run_dir=stopped.run_dir)
    assert resumed.end() == 2, resumed.account()
    assert "the loop had changed box.level" in resumed.of_kind("job_failed")[-1]["reason"]


def test_a_job_does_not_go_on_with_other_data(jobs: Jobs, tmp_path: Path) -> None:
    script = written(tmp_path, KEPT)
    stopped = jobs.start(script, workers=2, settings={"lanes": 4}, pace=[{"kind": "never"}])
    stopped.wait_for("step_committed", step=6)
    os.kill(stopped.launcher_pid(), signal.SIGINT)
    assert stopped.end() == 130, stopped.account()
    written(tmp_path, KEPT.replace("model = ", "data[42] = data[42][0] + 1, data[42][1]\nmodel = ", 1))
    told = "the dataset holds other samples than before the checkpoint of step"
    refused = jobs.start(script, workers=2, settings={"lanes": 4}, run_dir=stopped.run_dir)
    assert refused.end() == 2 and told in refused.of_kind("job_failed")[-1]["reason"], refused.account()
    assert "__getstate__ may leave out" in refused.of_kind("job_failed")[-1]["reason"]
    settings = {"lanes": 4, "numerics.changed": "warn"}
    warned = jobs.start(script, workers=2, settings=settings, run_dir=stopped.run_dir)
    assert warned.end() == 0 and told in str(warned.of_kind("warning")), warned.account()
