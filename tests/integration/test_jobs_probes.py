"""Members that compute from other data, or other code, than the rest: found by lanes that two of them compute."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from everstep.runtime.link.address import read_address
from job_harness import Event, Job, Jobs, same

SCRIPT = """
import os, time, torch
from torch import nn
import everstep

def told(name):
    try:
        return float(open(os.path.join(os.path.dirname(__file__), name)).read())
    except FileNotFoundError:
        return 0.0

class Data(torch.utils.data.Dataset):
    shift = told("shift")
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(160, 6, generator=generator), torch.randn(160, 1, generator=generator)
    def __len__(self): return 160
    def __getitem__(self, i): return self.x[i] + self.shift * (i % 53 > 0), self.y[i]  # unlike first samples

factor = 1.0 + told("factor")
torch.manual_seed(0)
data = Data()
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
run = everstep.join(model, optimizer, data, lanes=8, micro_batch=2, steps=24)
me = run._session.view.me
for step in run:
    for x, y in step:
        time.sleep(float(os.environ.get("LANE_S", "0")))
        loss = factor * nn.functional.mse_loss(model(x), y)
        {lane}
        step.backward(loss)
"""
PACE = {"LANE_S": "0.04"}


def write(folder: Path, lane: str = "pass") -> Path:
    script = folder / "train.py"
    script.write_text(SCRIPT.replace("{lane}", lane))
    return script


def probed(job: Job) -> list[Event]:
    return job.of_kind("probe_done")


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("shift", "different samples"),
        pytest.param("factor", "a different gradient from the same", marks=pytest.mark.longer),
    ],
)
def test_a_worker_that_comes_back_with_other_data_or_code_is_refused_and_the_job_goes_on(
    jobs: Jobs, tmp_path: Path, file: str, says: str
) -> None:
    script = write(tmp_path)
    undisturbed = jobs.start(str(script), workers=1)
    assert undisturbed.end() == 0, undisturbed.account()
    job = jobs.start(str(script), workers=2, environment=PACE)
    job.wait_for("step_committed", step=3)
    (tmp_path / file).write_text("0.5")
    second = next(e for e in job.of_kind("worker_joined") if e["worker_id"] == 1)
    os.kill(second["pid"], signal.SIGKILL)
    assert job.end() == 0, job.account()
    same(undisturbed.run_dir, job)
    first, (doubt, odd) = probed(job)[0], [e for e in probed(job) if not e["equal"]]
    assert "all compute it again" in doubt["reason"], "what differs once blames nobody"
    assert first["step"] == 1 and first["equal"] and first["workers"] == [0, 1], job.account()
    assert odd["workers"] == [0, 1] and f"worker 1 {'got' if file == 'shift' else 'computed'}" in odd["reason"]
    assert says in odd["reason"] and "worker 0: " in odd["reason"], odd
    evicted = [e for e in job.of_kind("worker_evicted") if says in e["reason"]]
    assert [e["worker_id"] for e in evicted] == [1], job.account()
    lives = [e["incarnation"] for e in job.of_kind("worker_joined") if e["worker_id"] == 1]
    assert lives == [0, 1], "it is not started again"


EDITED = SCRIPT.replace("factor = 1.0", "import helper_of_train\nfactor = helper_of_train.FACTOR")


def edited(jobs: Jobs, folder: Path) -> Job:
    """A job of two, of whose script a helper has just been edited: what runs is what was imported."""
    (folder / "helper_of_train.py").write_text("FACTOR = 1.0\n")
    (folder / "train.py").write_text(EDITED.replace("{lane}", "pass"))
    job = jobs.start(str(folder / "train.py"), workers=2, environment=PACE)
    job.wait_for("step_committed", step=3)
    (folder / "helper_of_train.py").write_text("FACTOR = 1.5  # tried out for the next run\n")
    return job


@pytest.mark.longer
def test_an_edit_while_a_job_runs_is_no_difference_of_its_workers(jobs: Jobs, tmp_path: Path) -> None:
    """A coordinator that is started again asks all workers once more what they run."""
    job = edited(jobs, tmp_path)
    os.kill(read_address(job.run_dir / "coordinator.json").pid, signal.SIGKILL)
    job.wait_for("coordinator_restarted")
    assert job.end() == 0, job.account()
    assert not job.of_kind("worker_evicted"), job.account()
    undisturbed = jobs.start(str(write(tmp_path)), workers=1)
    assert undisturbed.end() == 0, undisturbed.account()
    same(undisturbed.run_dir, job)


@pytest.mark.longer
def test_a_life_with_an_edited_helper_is_refused_at_once(jobs: Jobs, tmp_path: Path) -> None:
    """It does not wait for a rehearsal of the edited script: nobody makes one."""
    job = edited(jobs, tmp_path)
    os.kill(job.pid_of(1), signal.SIGKILL)
    job.wait_for("warning", lambda e: "helper_of_train.py is " in e["reason"], worker_id=1, incarnation=1)
    assert job.end() == 0, job.account()
    undisturbed = jobs.start(str(write(tmp_path)), workers=1)
    assert undisturbed.end() == 0, undisturbed.account()
    same(undisturbed.run_dir, job)


@pytest.mark.longer
def test_of_three_that_begin_the_odd_one_goes(jobs: Jobs, tmp_path: Path) -> None:
    script = write(tmp_path, "loss = loss * (1.5 if me == 2 else 1.0)")
    undisturbed = jobs.start(str(script), workers=1)
    assert undisturbed.end() == 0, undisturbed.account()
    job = jobs.start(str(script), workers=3)
    assert job.end() == 0, job.account()
    same(undisturbed.run_dir, job)
    (evicted,) = job.of_kind("worker_evicted")
    assert evicted["worker_id"] == 2 and "computed a different gradient" in evicted["reason"], job.account()


STARVED = """
from everstep.parallel.shared_memory import SharedMemoryTransport
awaits = SharedMemoryTransport._await
def late(transport, ready, what):
    if me == 0 and transport.generation == 2 and "decide" in what:
        while transport.generation == 2:
            time.sleep(0.01)
            transport.look()
    return awaits(transport, ready, what)
SharedMemoryTransport._await = late
for step in run:"""


@pytest.mark.longer
def test_who_has_added_up_wrong_lanes_and_not_heard_that_they_are_wrong_adds_up_again(
    jobs: Jobs, tmp_path: Path
) -> None:
    """The new plan reaches it before the records that show a difference."""
    script = write(tmp_path, "loss = loss * (1.5 if me == 2 else 1.0)")
    script.write_text(script.read_text().replace("for step in run:", STARVED))
    job = jobs.start(str(script), workers=3)
    assert job.end() == 0, job.account()
    undisturbed = jobs.start(str(write(tmp_path, "loss = loss * (1.5 if me == 2 else 1.0)")), workers=1)
    assert undisturbed.end() == 0, undisturbed.account()
    same(undisturbed.run_dir, job)
    assert [e["worker_id"] for e in job.of_kind("worker_evicted")] == [2], job.account()


@pytest.mark.longer
@pytest.mark.parametrize(
    ("lane", "step", "settings"),
    [
        ("loss = loss * (1.5 if me else 1.0)", 1, {}),
        ("loss = loss * (1.5 if me and step.number > 6 else 1.0)", 12, {"verify_every": 4}),
        ("loss = loss * (1.5 if me and step.number == 7 else 1.0)", 7, {"spot_check": 1.0}),
    ],
    ids=["from the first step", "from step 7", "once"],
)
def test_one_against_one_ends_the_job(
    jobs: Jobs, tmp_path: Path, lane: str, step: int, settings: dict[str, Any]
) -> None:
    job = jobs.start(str(write(tmp_path, lane)), workers=2, settings={"checkpoint.disk.every_steps": 2, **settings})
    assert job.end() == 1, job.account()
    (failed,) = job.of_kind("job_failed")
    said = failed["reason"]
    assert f"of step {step}" in said or (step == 12 and "of step 8" in said), said
    assert "unknown which" in said and "worker 0: " in said and "worker 1: " in said, said
    kept = [int(path.parent.name[5:]) for path in job.run_dir.glob("checkpoints/step-*/manifest.json")]
    assert max(kept, default=0) < 7 and ("checkpoint up to step" in said) == bool(kept), job.account()
    assert not (job.run_dir / "final").exists()


@pytest.mark.longer
def test_what_happens_once_is_told_and_the_job_goes_on(jobs: Jobs, tmp_path: Path) -> None:
    lane = "if me and step.number == 7 and not told('once'): open(ONCE, 'w').write('1'); loss = loss * 1.5"
    script = write(tmp_path, lane.replace("ONCE", repr(str(tmp_path / "once"))))
    job = jobs.start(str(script), workers=2, settings={"spot_check": 1.0, "rehearse": "false"})
    assert job.end() == 0, job.account()
    odd = [e for e in probed(job) if not e["equal"]]
    assert len(odd) == 1 and odd[0]["step"] == 7 and "compute it again" in odd[0]["reason"], job.account()
    assert not job.of_kind("worker_evicted"), job.account()
    undisturbed = jobs.start(str(script), workers=1, settings={"rehearse": "false"})
    assert undisturbed.end() == 0, undisturbed.account()
    same(undisturbed.run_dir, job)


@pytest.mark.longer
def test_a_worker_alone_computes_a_lane_again(jobs: Jobs, tmp_path: Path) -> None:
    lane = "loss = loss * (1.0 if step.number < 8 else 1.0 + time.time() % 0.1)"
    job = jobs.start(str(write(tmp_path, lane)), workers=1, settings={"verify_every": 4, "rehearse": "false"})
    assert job.end() != 0, job.account()
    assert "was computed twice and gave different gradients" in job.of_kind("job_failed")[-1]["reason"], job.account()
    assert "of step 8 " in job.of_kind("job_failed")[-1]["reason"]


STAGES = """
import os, time, torch
from torch import nn
from everstep import Task

def told(name):
    try:
        return float(open(os.path.join(os.path.dirname(__file__), name)).read())
    except FileNotFoundError:
        return 0.0

def is_odd():
    return os.path.exists(os.path.join(os.path.dirname(__file__), f"odd-{os.getpid()}"))

SHIFT, FACTOR = told("shift"), 1.0 + told("factor")

class Data(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(160, 6, generator=generator), torch.randn(160, 1, generator=generator)
    def __len__(self): return 160
    def __getitem__(self, i): return self.x[i], self.y[i] + SHIFT

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
    def forward(self, x):
        time.sleep(float(os.environ.get("LANE_S", "0")))
        noise = time.time() % 0.1 if told("noise") else 0.0
        return self.drop(torch.tanh(self.norm(self.linear(x)))) * (FACTOR * (2.0 if is_odd() else 1.0) + noise)

class Stages(Task):
    defaults = {"lanes": 8, "micro_batch": 2, "steps": 24}
    def build_model(self):
        return nn.Sequential(nn.Linear(6, 8), Scaled(), nn.ReLU(inplace=True), Scaled(), nn.Linear(8, 1))
    def units(self, model): return list(model.children())
    def build_optimizer(self, params): return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    def build_dataset(self, split): return Data()
    def loss(self, model, batch): return nn.functional.mse_loss(model(batch[0]), batch[1])
"""


def staged(folder: Path) -> str:
    (folder / "stages.py").write_text(STAGES)
    return f"{folder / 'stages.py'}:Stages"


def same_as_one(jobs: Jobs, task: str, job: Job) -> None:
    undisturbed = jobs.start(task, workers=1)
    assert undisturbed.end() == 0, undisturbed.account()
    same(undisturbed.run_dir, job)


PARTS: list[tuple[str, dict[str, Any], str]] = [
    ("shift", {}, "got different samples"),
    ("factor", {}, "a different output from the same input"),
    ("factor", {"chunks": 2, "schedule": "interleaved", "recompute": "true"}, "a different output from the same input"),
]


@pytest.mark.longer
@pytest.mark.parametrize(
    ("file", "settings", "says"),
    PARTS,
    ids=["data", "code", "code, in chunks"],
)
def test_a_worker_of_a_stage_that_comes_back_otherwise_is_refused(
    jobs: Jobs, tmp_path: Path, file: str, settings: dict[str, Any], says: str
) -> None:
    task = staged(tmp_path)
    job = jobs.start(task, workers=4, settings={"stages": 2, **settings}, environment=PACE)
    job.wait_for("step_committed", step=3)
    (tmp_path / file).write_text("0.5")
    last = max(e["worker_id"] for e in job.of_kind("worker_joined"))
    os.kill(next(e["pid"] for e in job.of_kind("worker_joined") if e["worker_id"] == last), signal.SIGKILL)
    assert job.end() == 0, job.account()
    (tmp_path / file).unlink()
    same_as_one(jobs, task, job)
    first, odd = probed(job)[0], [e for e in probed(job) if not e["equal"]]
    assert first["step"] == 1 and first["equal"] and len(first["workers"]) == 4 and first["alone"] == [], first
    assert any(f"worker {last} " in e["reason"] and says in e["reason"] for e in odd), job.account()
    assert {e["worker_id"] for e in job.of_kind("worker_evicted") if says in e["reason"]} == {last}, job.account()


@pytest.mark.longer
def test_one_against_one_in_a_stage_ends_the_job(jobs: Jobs, tmp_path: Path) -> None:
    settings = {"stages": 2, "verify_every": 4, "rehearse": "false", "checkpoint.disk.every_steps": 1}
    job = jobs.start(staged(tmp_path), workers=4, settings=settings, environment=PACE)
    job.wait_for("step_committed", step=5)
    odd = job.of_kind("worker_joined")[-1]["pid"]
    (tmp_path / f"odd-{odd}").touch()
    assert job.end() == 1, job.account()
    said = job.of_kind("job_failed")[-1]["reason"]
    assert "unknown which" in said and ", part " in said and "the newest checkpoint up to step" in said, said
    step = int(said.partition("of step ")[2].partition(",")[0])
    kept = [int(path.parent.name[5:]) for path in job.run_dir.glob("checkpoints/step-*/manifest.json")]
    assert step % 4 == 0 and max(kept) <= step - 4, job.account()
    assert not (job.run_dir / "final").exists()


@pytest.mark.longer
def test_where_each_stage_has_one_worker_it_computes_a_lane_twice_and_that_is_said(jobs: Jobs, tmp_path: Path) -> None:
    settings = {"stages": 2, "verify_every": 4, "rehearse": "false"}
    task = staged(tmp_path)
    job = jobs.start(task, workers=2, settings=settings)
    assert job.end() == 0, job.account()
    assert [e["step"] for e in probed(job)] == [4, 8, 12, 16, 20, 24], job.account()
    assert all(e["alone"] == [0, 1] and e["equal"] for e in probed(job))
    same_as_one(jobs, task, job)
    job = jobs.start(task, workers=1, settings=settings, environment=PACE)
    job.wait_for("step_committed", step=5)
    (tmp_path / "noise").write_text("1")
    assert job.end() != 0, job.account()
    assert "was computed twice and gave different outputs" in job.of_kind("job_failed")[-1]["reason"], job.account()


def test_a_late_import_of_another_file_is_refused_before_a_lane_counts(jobs: Jobs, tmp_path: Path) -> None:
    """Whoever tells first has what the job has; nothing of the other's is in the result."""
    for factor in ("1.0", "1.5"):
        (tmp_path / factor).mkdir()
        (tmp_path / factor / "helper_of_lane.py").write_text(f"FACTOR = {factor}\n")
    late = "\n        ".join(
        (
            "if step.number >= 10:",
            "    import sys",
            f"    sys.path.insert(0, {str(tmp_path)!r} + '/' + os.environ.get('FACTOR', ('1.0', '1.5')[me]))",
            "    import helper_of_lane",
            "    loss = loss * helper_of_lane.FACTOR",
        )
    )
    script, settings = str(write(tmp_path, late)), {"rehearse": "false"}
    job = jobs.start(script, workers=2, settings=settings)
    assert job.end() == 0, job.account()
    evicted = next(e for e in job.of_kind("worker_evicted") if "helper_of_lane.py is " in e["reason"])
    right = {"FACTOR": "1.5" if evicted["worker_id"] == 0 else "1.0"}
    undisturbed = jobs.start(script, workers=1, settings=settings, environment=right)
    assert undisturbed.end() == 0, undisturbed.account()
    same(undisturbed.run_dir, job)


READS = """
from stages import Data, Stages

class Read(Data):
    def __init__(self, task):
        super().__init__()
        self.task = task

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return x * (1 + sum(p.detach().mean() for p in self.task.net.parameters())), y

class Reads(Stages):
    def build_model(self):
        self.net = super().build_model()
        return self.net

    def build_dataset(self, split):
        return Read(self)
"""


@pytest.mark.longer
def test_where_loader_processes_read_the_model_the_job_ends_by_name(jobs: Jobs, tmp_path: Path) -> None:
    """They are forked with the model of one step, and anew when a worker comes back."""
    staged(tmp_path)
    (tmp_path / "reads.py").write_text(READS)
    job = jobs.start(
        f"{tmp_path / 'reads.py'}:Reads",
        workers=3,
        numerics={"steps": 40},
        settings={"loader.workers": 1},
        chaos="kill:target=worker:1,at=4,phase=forward",
        environment=PACE,
    )
    assert job.end() == 1, job.account()
    assert "got different samples for lane" in job.of_kind("job_failed")[0]["reason"], job.account()
