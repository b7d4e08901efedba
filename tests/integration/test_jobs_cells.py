"""Jobs whose workers are cells: the bits of one worker of one process, through kills of any rank and in any shape."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from job_harness import Job, Jobs, healed

SCRIPT = """
import torch, everstep
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
for step in everstep.join(model, torch.optim.SGD(model.parameters(), lr=0.1), data, lanes=4, micro_batch=2, steps=4):
    for x, y in step:
        step.backward(torch.nn.functional.mse_loss(model(x), y))
"""
RAISES = """
import inspect
from job_tasks import Text

class Raises(Text):
    def lane_loss(self, model, batch):
        stack = inspect.stack()
        if any(frame.filename.endswith("cell_limb.py") for frame in stack):
            raise ValueError("a limb cannot read this")
        return super().lane_loss(model, batch)
"""
DRIVEN = """
import torch
from job_tasks import Pictures

class Anneals(torch.optim.lr_scheduler.ExponentialLR):
    def __init__(self, optimizer, model):
        self.owned = [model]
        super().__init__(optimizer, 0.9)

    def step(self, *args):
        super().step(*args)
        self.owned[0][2][1].p = 0.4 / (1 + self.last_epoch)

    def state_dict(self):
        return {key: value for key, value in super().state_dict().items() if key != "owned"}

class Driven(Pictures):
    def build_model(self):
        self.model = super().build_model()
        return self.model

    def build_scheduler(self, optimizer):
        self.scheduler = Anneals(optimizer, self.model)
        return self.scheduler

    def lane_loss(self, model, batch):
        rate = self.scheduler.optimizer.param_groups[0]["lr"]
        return super().lane_loss(model, batch) * (1 + rate + 0.01 * self.scheduler.last_epoch)
"""
FILLED = """
import os
from pathlib import Path
from torch import nn
from job_tasks import Sharded
from everstep.zoo.transformer import Transformer, TransformerConfig

class Logged(Transformer):
    def fill_module(self, path, module):
        with open(Path(__file__).with_suffix(".pids"), "a") as file:
            file.write(f"{os.getpid()}\\n")
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.1)

class Filled(Sharded):
    def build_model(self):
        return Logged(TransformerConfig(37, 8, 2, 16, 4, 0.2))

    def build_optimizer(self, params):
        self.first = [p.detach().clone() for p in params]
        return super().build_optimizer(params)

    def lane_loss(self, model, batch):
        loss, count = super().lane_loss(model, batch)
        return loss * (1 + self.first[-1].square().sum()), count  # which the last stage has, too

class Blank(Filled):
    build_optimizer, lane_loss = Sharded.build_optimizer, Sharded.lane_loss

class Changed(Filled):
    def build_optimizer(self, params):
        found = super().build_optimizer(params)
        for p in params:
            p.data.mul_(0.5)
        return found
"""


def cells(ranks: int, **more: Any) -> dict[str, Any]:
    """Settings of a job with so many processes in each worker."""
    return {"cell.fsdp": ranks, **more}


def ranks_of(job: Job, worker_id: int) -> list[int]:
    """Pids of the newest life of a worker, the head's first."""
    joined = [e for e in job.of_kind("worker_joined") if e["worker_id"] == worker_id]
    return [int(pid) for pid in joined[-1]["pids"]]


@pytest.mark.longer
@pytest.mark.parametrize(("ranks", "workers"), [(4, 1), (3, 3)])
@pytest.mark.parametrize("task", ["Pictures", "Text"])
def test_any_number_of_ranks(jobs: Jobs, task: str, ranks: int, workers: int) -> None:
    """Lanes that do not divide, BatchNorm, dropout, tied parameters, clipping."""
    jobs.run(task, workers=workers, settings=cells(ranks))


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("forward", marks=pytest.mark.longer),
        "reduce",
        pytest.param("agree", marks=pytest.mark.longer),
        pytest.param("update", marks=pytest.mark.longer),
    ],
)
def test_any_rank_is_killed_and_its_cell_comes_back(jobs: Jobs, phase: str) -> None:
    chaos = f"kill:target=worker:1/1,at=7,phase={phase}; kill:target=leader:0,at=14,phase={phase}"
    pace = [healed(1), {"kind": "worker_healed", "count": 2}]
    wrap = {"cell.wrap": 300} if phase in ("reduce", "update") else {}
    job = jobs.run("Text", workers=2, settings=cells(2, **wrap), chaos=chaos, pace=pace)
    assert len(job.of_kind("fault_injected")) == 2, job.account()
    reasons = [event["reason"] for event in job.of_kind("worker_evicted")]
    assert any("its rank 1 was killed by SIGKILL" in reason for reason in reasons), job.account()


@pytest.mark.longer
@pytest.mark.parametrize("stages", [1, 2])
def test_a_spare_cell_takes_over_and_a_rank_that_is_stopped_hangs(jobs: Jobs, stages: int) -> None:
    settings, spare = cells(2, stages=stages, spares=1, hang_limit_s=3), 2 * stages
    job = jobs.start("Pictures", workers=2 * stages, settings=settings, pace=[healed(spare), healed(1)])
    job.wait_for("step_committed", step=4)
    for pid in ranks_of(job, spare - 2):  # both at once
        os.kill(pid, signal.SIGKILL)
    job.wait_for("worker_healed", worker_id=spare)
    os.kill(ranks_of(job, 1)[1], signal.SIGSTOP)
    evicted = job.wait_for("worker_evicted", worker_id=1)
    assert evicted["cause"] == "hung" and "its rank 1" in evicted["reason"], job.account()
    jobs.check(job, "Pictures")


@pytest.mark.longer
def test_lanes_of_limbs_read_what_a_scheduler_has_changed(jobs: Jobs, tmp_path: Path) -> None:
    """The scheduler itself, a learning rate, and dropout that the scheduler anneals."""
    (tmp_path / "driven.py").write_text(DRIVEN)
    chaos = "kill:target=worker:1/1,at=6,phase=forward"
    task = f"{tmp_path / 'driven.py'}:Driven"
    jobs.run(task, workers=2, numerics={"steps": 12}, settings=cells(2), chaos=chaos)


@pytest.mark.longer
def test_it_is_resumed_in_other_shapes(jobs: Jobs) -> None:
    run_dir = None
    for step, ranks, workers in ((5, 2, 2), (11, 4, 1), (17, 1, 3), (23, 2, 1), (0, 3, 2)):
        pace = [{"kind": "step_committed", "step": step}] if step else []
        job = jobs.start("Text", workers=workers, settings=cells(ranks), run_dir=run_dir, pace=pace)
        if step:
            job.wait_for("step_committed", step=step)
            os.kill(job.launcher_pid(), signal.SIGTERM)
            assert job.end() == 143, job.account()
        run_dir = job.run_dir
    jobs.check(job, "Text")


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("Filled", {"cell.fsdp": 2}),
        pytest.param("Filled", {"cell.tp": 2, "stages": 2, "workers": 2}, marks=pytest.mark.longer),
        pytest.param("Changed", {"cell.fsdp": 2}, marks=pytest.mark.longer),
        ("Blank", {"cell.fsdp": 2}),
        pytest.param("Blank", {"cell.tp": 2, "stages": 2, "workers": 2}, marks=pytest.mark.longer),
    ],
)
def test_who_makes_a_model_that_is_made_module_by_module(
    jobs: Jobs, tmp_path: Path, task: str, settings: dict[str, Any]
) -> None:
    """All processes of a worker, each some modules. A task that reads parameters while it makes its optimizer reads
    what it does in one process, so the head makes all; where it changes them, too, all processes make their own."""
    (tmp_path / "filled.py").write_text(FILLED)
    numerics, chaos = {"meta_init": True, "cell.shards": 2, "steps": 6}, "kill:target=worker:0/1,at=3,phase=forward"
    more = {"workers": settings.get("workers", 1), "numerics": numerics, "settings": settings, "chaos": chaos}
    job = jobs.run(f"{tmp_path / 'filled.py'}:{task}", **more)
    made = Counter(int(line) for line in (tmp_path / "filled.pids").read_text().split())
    joined = [event["pids"] for event in job.of_kind("worker_joined")]
    assert {pids[0] for pids in joined} <= made.keys(), joined
    assert made.keys().isdisjoint(pid for pids in joined for pid in pids[1:]) == (task == "Filled"), joined
    if task == "Blank":
        assert all(abs(made[head] - made[limb]) <= 1 for head, limb in joined), made


@pytest.mark.longer
@pytest.mark.parametrize(
    ("task", "numerics"),
    [
        ("Sparse", {}),
        ("SparseStages", {"clip_value": 0.001}),
        ("Layers", {"precision": "fp16"}),
        ("PicturesEpochs", {"precision": "bf16"}),
    ],
)
def test_what_lanes_lack_and_narrow_types(jobs: Jobs, task: str, numerics: dict[str, Any]) -> None:
    """Parameters that some lanes do not use, or none; lanes without samples; a scaled loss; schedules."""
    jobs.run(task, workers=2, numerics=numerics, settings=cells(3, verify_every=4, **{"cell.wrap": 100}))


@pytest.mark.parametrize(
    ("task", "said"),
    [
        pytest.param(
            "MuonText",
            "cell.fsdp divides the elements that Muon updates, which it does not allow",
            marks=pytest.mark.longer,
        ),
        (
            "PicturesCounting",
            "cell.fsdp: expected modules whose state is parameters and buffers, got extra state in 0.0",
        ),
    ],
)
def test_what_a_cell_cannot_train_is_refused_by_name(jobs: Jobs, task: str, said: str) -> None:
    job = jobs.start(task, workers=1, settings=cells(2))
    assert job.end() == 2, job.account()
    errors = job.run_dir.with_suffix(".err").read_text()
    assert said in errors and "Traceback" not in errors, errors


def test_a_script_in_cells_is_refused_by_name(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    job = jobs.start(str(tmp_path / "train.py"), workers=1, settings=cells(2))
    assert job.end() == 2, job.account()
    errors = job.run_dir.with_suffix(".err").read_text()
    assert "write an everstep.Task, or set cell.fsdp=1" in errors and "Traceback" not in errors, errors


def test_what_a_limb_raises_ends_the_job_by_its_words(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(RAISES)
    job = jobs.start(f"{tmp_path / 'task.py'}:Raises", workers=1, settings=cells(2))
    assert job.end() == 1, job.account()
    errors = job.run_dir.with_suffix(".err").read_text()
    assert "a limb cannot read this" in errors and "Traceback" not in errors, errors
