"""Workers that come and go on request, and scripts that call `everstep.join`."""

from __future__ import annotations

import gzip
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from everstep.runtime.commands import ask
from job_harness import Jobs, healed, same

SCRIPT = """
import os
import random
import sys
import numpy
import torch
from torch import nn

sys.path.insert(0, {tests!r})
import everstep
from job_tasks import PACE, Glyphs, Pace


class Seen:
    def __init__(self):
        self.losses = self.drawn = 0.0

    def draw(self):
        self.drawn += torch.rand(()).item() + random.random() + numpy.random.rand()

    def state_dict(self):
        return {{"losses": self.losses, "drawn": self.drawn}}

    def load_state_dict(self, state):
        self.losses, self.drawn = state["losses"], state["drawn"]


class Lookahead(torch.optim.AdamW):
    # Keeps what it knows in attributes of its own.

    def __init__(self, params, **more):
        super().__init__(params, **more)
        self.calls, self.slow = 0, [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.calls += 1
        if self.calls % 5 == 0:
            for fast, slow in zip(self.param_groups[0]["params"], self.slow):
                fast.copy_(slow.lerp_(fast, 0.5))


pace = Pace(os.environ.get(PACE, ""))
torch.manual_seed(7)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
optimizer = Lookahead(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
seen = Seen()
run = everstep.join(
    model, optimizer, Glyphs(augmented=True), micro_batch=4, scheduler=scheduler, clip_norm=1.0, state={{"seen": seen}},
    steps=int(sys.argv[1]), run_dir=sys.argv[2] if len(sys.argv) > 2 else None,
)
glyphs = Glyphs(augmented=False)
for step in run:
    before = torch.rand(()).item()
    for picture, label in step:
        pace.lane()
        step.backward(nn.functional.cross_entropy(model(picture), label))
    seen.losses += step.loss
    seen.drawn += before
    seen.draw()
    if step.number % 4 == 0:
        run.evaluate(lambda batch: {{"loss": nn.functional.cross_entropy(model(batch[0]), batch[1])}}, glyphs)
        seen.draw()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plain training script."""
    path = tmp_path_factory.mktemp("script") / "plain.py"
    path.write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    return str(path)


@pytest.mark.longer
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
    profile = jobs.command(
        ["profile", str(job.run_dir), "--steps", "4", "--workers", "0,1", "--json"], jobs.base / "profile"
    )
    progress = profile.run_dir.with_suffix(".err")
    while not profile.over(0.01) and not (progress.exists() and progress.read_text().startswith("recording steps ")):
        pass
    first = int(progress.read_text().split()[2])
    job.wait_for("step_committed", step=first)
    os.kill(job.pid_of(1), signal.SIGKILL)
    jobs.check(job, "Pictures", numerics)
    assert job.of_kind("generation_started")[-1]["workers"] == [0, 1, 2]
    assert profile.end() == 0, progress.read_text()
    _check_profile(json.loads(profile.run_dir.with_suffix(".out").read_text()))


def _check_profile(told: dict[str, Any]) -> None:
    """Of worker 0, which led, while worker 1 died."""
    assert told["workers"] == [0] and "killed by SIGKILL" in told["missing"]["1"]
    assert sorted(p.name for p in Path(told["folder"]).iterdir()) == ["trace.json.gz", "worker-0.json.gz"]
    events = json.loads(gzip.decompress(Path(told["path"]).read_bytes()))["traceEvents"]
    assert len(events) == told["events"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"job", "worker 0 (stage 0, leader)"}
    ranges = [e for e in events if e["ph"] == "X" and e.get("cat") == "everstep"]
    steps = {e["name"]: e for e in ranges if e["name"].startswith("step ")}
    assert list(steps) == [f"step {told['first_step'] + k}" for k in range(4)]
    assert {"load", "forward", "backward", "reduce", "agree", "update"} <= {e["name"] for e in ranges}
    assert any("worker 1 was evicted" in e["name"] and e["ph"] == "i" for e in events)
    begin, end = min(e["ts"] for e in steps.values()), max(e["ts"] + e["dur"] for e in steps.values())
    computed = [e for e in events if e.get("cat") == "cpu_op"]
    assert any("addmm" in e["name"] for e in computed)
    assert all(begin - 1e6 < e["ts"] < end + 1e6 for e in computed), "one clock"


@pytest.fixture(scope="module")
def plain(jobs: Jobs, script: str) -> Path:
    """The directory of the script's run by itself."""
    job = jobs.plainly(script, "25")
    assert job.end() == 0, job.account()
    return job.run_dir


@pytest.mark.longer
def test_a_script_heals(jobs: Jobs, script: str, plain: Path) -> None:
    """On three workers, two of which are killed and replaced: what its loop draws and counts is the same as well."""
    chaos = "kill:target=worker:1,at=4; kill:target=leader:0,at=9"
    job = jobs.start(script, "--", "25", chaos=chaos, pace=[healed(1), healed(0)])
    assert job.end() == 0, job.account()
    same(plain, job)
    assert {e["worker_id"] for e in job.of_kind("worker_healed")} == {0, 1}


@pytest.mark.longer
def test_a_script_whose_spares_take_part_at_once(jobs: Jobs, script: str, plain: Path) -> None:
    """They enter the loop's body right after an update, with what the loop knew then, not what the others know now."""
    chaos = "kill:target=worker:1,at=9; kill:target=leader:0,at=15; kill:target=worker:2,at=20,phase=agree"
    job = jobs.start(script, "--spares", "2", "--", "25", chaos=chaos)
    assert job.end() == 0, job.account()
    same(plain, job)
    assert "takes part from here" in job.of_kind("generation_started")[1]["reason"]


@pytest.mark.longer
def test_a_script_that_is_resumed(jobs: Jobs, script: str, plain: Path) -> None:
    """Stopped while or after its loop gathers at the end of a step, on more workers then."""
    stopped = jobs.start(script, "--", "25", workers=2, pace=[{"kind": "never"}])
    stopped.wait_for("step_committed", step=7)
    os.kill(stopped.launcher_pid(), signal.SIGTERM)
    assert stopped.end() == 143, stopped.account()
    resumed = jobs.start(script, "--", "25", workers=4, run_dir=stopped.run_dir)
    assert resumed.end() == 0, resumed.account()
    same(plain, resumed)
