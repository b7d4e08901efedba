"""Jobs whose workers are cells and divide the optimizer's state among each other: each process of a worker updates a
part of its worker's part. The bits of one worker of one process, through kills, moves and resumes in other shapes.

Holders that die in each phase are in `test_jobs_zero_kills`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from job_harness import Jobs, healed

TASK = """
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, {tests!r})
from everstep.train.cell_update import CellUpdate
from job_tasks import Pictures, Sharded
from everstep.zoo.transformer import Transformer, TransformerConfig

take = CellUpdate.take

def noted(self, dealt):
    take(self, dealt)
    file = Path(__file__).with_suffix(".parts")
    with file.open("a") as parts:
        print(sum(stop - first for ranges in self.pieces.values() for first, stop in ranges), file=parts)

CellUpdate.take = noted

class Large(Pictures):
    def build_model(self):
        first = nn.Sequential(nn.Flatten(), nn.Linear(64, 700), nn.BatchNorm1d(700), nn.Tanh())
        return nn.Sequential(first, nn.Sequential(nn.Linear(700, 400), nn.Dropout(0.1)), nn.Linear(400, 10))

    def build_optimizer(self, params):
        return torch.optim.{optimizer}

NOW = []

class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 700), nn.Tanh(), nn.Linear(700, 400), nn.Linear(400, 10))
        self.side, self.never = nn.Linear(64, 3000), nn.Linear(64, 3000)

    def forward(self, x):
        x = x.flatten(1)
        return self.body(x) + self.side(x).mean(1, keepdim=True) if NOW[-1].last_epoch > 9 else self.body(x)

class Later(Large):
    # some parameters get gradients, and so their state, from a later step on
    def build_model(self):
        return nn.Sequential(Late())

    def build_scheduler(self, optimizer):
        NOW.append(torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.7))
        return NOW[-1]

class Shards(Sharded):
    def build_model(self):
        return Transformer(TransformerConfig(61, 8, 2, 128, 4, 0.2))
"""
ADAMW = "AdamW(params, lr=0.01, amsgrad=True)"
WHOLE = 64 * 700 + 3 * 700 + 700 * 400 + 400 + 400 * 10 + 10


def cells(**more: Any) -> dict[str, Any]:
    return {"cell.fsdp": 2, "zero.stage": 1, "zero.copies": 1, "checkpoint.disk.every_steps": 3, **more}


def written(folder: Path, optimizer: str = ADAMW) -> Path:
    path = folder / "task.py"
    path.write_text(TASK.format(tests=str(Path(__file__).parents[1]), optimizer=optimizer))
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("task"))


def test_each_process_updates_a_part_of_its_workers_part(jobs: Jobs, tmp_path: Path) -> None:
    """And when a limb dies, its worker's part is gone, and comes from the checkpoint."""
    path = written(tmp_path)
    chaos = "kill:target=worker:1/1,at=7,phase=update"
    numerics = {"steps": 12}
    job = jobs.run(f"{path}:Large", workers=2, numerics=numerics, settings=cells(), chaos=chaos, pace=[healed(1)])
    assert job.of_kind("fallback"), job.account()
    parts = [int(line) for line in path.with_suffix(".parts").read_text().split()]
    assert min(parts) < 0.3 * WHOLE, parts


@pytest.mark.longer
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("rank", "copies"), [(1, 1), (0, 2)])
@pytest.mark.parametrize("phase", ["forward", "reduce", "agree", "update"])
def test_any_rank_is_killed(jobs: Jobs, file: Path, phase: str, rank: int, copies: int, stage: int) -> None:
    who = f"1/{rank}" if rank else "1"
    chaos = f"kill:target=worker:{who},at=7,phase={phase}; kill:target=leader:0,at=14,phase={phase}"
    pace = [healed(1), {"kind": "worker_healed", "count": 2}]
    settings = cells(**{"zero.stage": stage, "zero.copies": copies, "verify_every": 4})
    job = jobs.run(f"{file}:Large", workers=3, settings=settings, chaos=chaos, pace=pace)
    assert len(job.of_kind("fault_injected")) == 2, job.account()
    assert bool(job.of_kind("fallback")) == (copies == 1), job.account()


@pytest.mark.longer
@pytest.mark.parametrize("stage", [1, 2])
def test_members_come_and_go(jobs: Jobs, file: Path, stage: int) -> None:
    """Parts move to a new cell, and back when it leaves."""
    job = jobs.start(
        f"{file}:Large",
        workers=2,
        settings=cells(**{"zero.stage": stage, "zero.copies": 2}),
        pace=[{"kind": "worker_joined", "count": 4}, {"kind": "worker_left", "count": 2}],
    )
    job.wait_for("step_committed", step=2)
    assert jobs.command(["scale", str(job.run_dir), "--workers", "4"], job.run_dir.with_name("more")).end() == 0
    job.wait_for("worker_healed", worker_id=3)
    assert jobs.command(["scale", str(job.run_dir), "--workers", "2"], job.run_dir.with_name("fewer")).end() == 0
    jobs.check(job, f"{file}:Large")


@pytest.mark.longer
def test_it_is_resumed_in_other_shapes(jobs: Jobs, file: Path) -> None:
    run_dir, plain = None, {"cell.fsdp": 1, "zero.stage": 0}
    shapes: tuple[tuple[int, int, dict[str, Any]], ...] = (
        (4, 2, cells()),
        (8, 2, cells(**{"zero.stage": 0})),
        (12, 3, cells(**{"cell.fsdp": 3, "zero.stage": 2})),
        (16, 2, cells(**{"cell.fsdp": 1})),
        (20, 1, cells()),
        (23, 1, cells(**plain)),
        (0, 3, cells(**{"zero.copies": 2})),
    )
    for step, workers, settings in shapes:
        pace = [{"kind": "step_committed", "step": step}] if step else []
        job = jobs.start(f"{file}:Large", workers=workers, settings=settings, run_dir=run_dir, pace=pace)
        if step:
            job.wait_for("step_committed", step=step)
            os.kill(job.launcher_pid(), signal.SIGTERM)
            assert job.end() == 143, job.account()
        run_dir = job.run_dir
    jobs.check(job, f"{file}:Large")


@pytest.mark.longer
@pytest.mark.parametrize(
    ("name", "workers", "more"),
    [
        ("Large", 4, {"stages": 2}),
        ("Large", 4, {"stages": 2, "zero.stage": 2, "zero.copies": 2}),
        ("Shards", 2, {"cell.fsdp": 1, "cell.tp": 2}),
        ("Shards", 4, {"cell.tp": 2, "stages": 2}),
        ("Shards", 2, {"cell.fsdp": 1, "cell.tp": 2, "transport": "sockets", "zero.stage": 2}),
    ],
)
def test_stages_and_cells_of_tensor_parallel(
    jobs: Jobs, file: Path, name: str, workers: int, more: dict[str, Any]
) -> None:
    last = workers - 1
    numerics = {"cell.shards": 2} if name == "Shards" else {}
    chaos = f"kill:target=worker:{last}/1,at=3,phase=update; kill:target=leader:0,at=6,phase=agree"
    pace = [healed(last), {"kind": "worker_healed", "count": 2}]
    settings = cells(verify_every=4, **more)
    jobs.run(f"{file}:{name}", workers=workers, numerics=numerics, settings=settings, chaos=chaos, pace=pace)


@pytest.mark.longer
@pytest.mark.parametrize(
    "optimizer", ["Adagrad(params, lr=0.05)", "SGD(params, lr=0.05)", "SGD(params, lr=0.05, momentum=0.9)"]
)
def test_state_from_the_start_and_none_at_all(jobs: Jobs, tmp_path: Path, optimizer: str) -> None:
    task = f"{written(tmp_path, optimizer)}:Large"
    chaos = "kill:target=worker:1/1,at=5,phase=update"
    jobs.run(task, workers=3, numerics={"steps": 12}, settings=cells(), chaos=chaos, pace=[healed(1)])


@pytest.mark.longer
@pytest.mark.parametrize("copies", [1, 2])
def test_parameters_that_get_their_state_later(jobs: Jobs, file: Path, copies: int) -> None:
    """From then on segments are elsewhere."""
    chaos = "kill:target=worker:1/1,at=9,phase=update; kill:target=worker:2,at=13,phase=update"
    settings = cells(**{"zero.copies": copies})
    jobs.run(f"{file}:Later", workers=3, numerics={"steps": 18}, settings=settings, chaos=chaos, pace=[healed(2)])


@pytest.mark.longer
@pytest.mark.parametrize(("copies", "snapshots"), [(2, False), (2, True), (1, False)])
def test_cells_of_unlike_sizes_divide_it(jobs: Jobs, file: Path, copies: int, *, snapshots: bool) -> None:
    """Of one copy a part is lost: all go back to a checkpoint, and those that lost no process stay as they are."""
    settings = cells(**{"cell.fsdp": 3, "max_restarts": 0, "zero.copies": copies, "verify_every": 4})
    settings |= {"checkpoint.memory.every_steps": 2} if snapshots else {}
    chaos = "kill:target=worker:1/1,at=4,phase=forward"
    job = jobs.run(f"{file}:Large", workers=3, settings=settings, chaos=chaos, pace=[healed(1)])
    assert [(event["worker_id"], event["fsdp"]) for event in job.of_kind("cell_shrunk")] == [(1, 2)], job.account()


@pytest.mark.longer
def test_a_model_that_is_made_module_by_module(jobs: Jobs, file: Path) -> None:
    """Its parameters have no values yet when it is tried what its optimizer is like."""
    how: dict[str, Any] = {"workers": 2, "numerics": {"meta_init": True, "cell.shards": 2, "steps": 6}}
    how |= {"settings": cells(), "chaos": "kill:target=worker:1/1,at=3,phase=update", "pace": [healed(1)]}
    jobs.run(f"{file}:Shards", **how)
