"""Jobs whose model is cut into virtual shards: one result at every degree, through kills of any rank."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from job_harness import Job, Jobs, healed
from sampling import mostly_longer

FOUR = {"cell.shards": 4}
SCRIPT = """
import torch, everstep
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
for step in everstep.join(model, torch.optim.SGD(model.parameters(), lr=0.1), data, lanes=4, micro_batch=2, steps=4):
    for x, y in step:
        step.backward(torch.nn.functional.mse_loss(model(x), y))
"""

WEIGHED = """
import torch
from job_tasks import Sharded

class Weighed(Sharded):
    def lane_loss(self, model, batch):
        loss, count = super().lane_loss(model, batch)
        asked = [model.head.weight, model.blocks[0].attention.qkv.weight, model.head.norm.weight]
        sizes = [one.norm() for one in torch.autograd.grad(loss, asked, retain_graph=True)]
        return loss * (sizes[0] / (sizes[1] + sizes[2])).clamp(0.5, 2.0), count
"""


@pytest.mark.parametrize(
    ("settings", "workers"),
    mostly_longer(
        [
            ({"cell.tp": 4}, 1),
            ({"cell.tp": 2, "cell.fsdp": 3}, 1),
            ({"verify_every": 4}, 2),
            ({"cell.tp": 2, "cell.fsdp": 2, "verify_every": 1}, 2),
            ({"zero.stage": 1}, 2),
        ],
        lambda case: "verify_every" in case[0] and "cell.fsdp" in case[0],
    ),
)
def test_any_degree_and_number_of_workers(jobs: Jobs, settings: dict[str, Any], workers: int) -> None:
    jobs.run("Sharded", workers=workers, numerics=FOUR, settings=settings)


@pytest.mark.longer
@pytest.mark.parametrize(
    "numerics",
    mostly_longer(
        [
            {"cell.sp": True},
            {"precision": "bf16", "clip_value": 0.01},
            {"precision": "fp16", "clip_norm": 0.01, "accumulate": 2},
        ],
        lambda numerics: "cell.sp" in numerics,
    ),
)
def test_parts_of_the_sequence_and_narrow_types(jobs: Jobs, numerics: dict[str, Any]) -> None:
    settings = {"cell.tp": 2, "verify_every": 3, "eval_every": 6}
    jobs.run("Sharded", workers=2, numerics={**FOUR, **numerics}, settings=settings)


def test_a_loss_that_is_weighed_by_its_own_gradients(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "weighed.py").write_text(WEIGHED)
    jobs.run(f"{tmp_path / 'weighed.py'}:Weighed", workers=1, numerics=FOUR, settings={"cell.tp": 2})


@pytest.mark.parametrize(
    "phase", mostly_longer(["forward", "backward", "reduce", "update"], lambda phase: phase == "backward")
)
def test_any_rank_is_killed_and_its_cell_comes_back(jobs: Jobs, phase: str) -> None:
    chaos = f"kill:target=worker:1/1,at=4,phase={phase}; kill:target=leader:0,at=8,phase={phase}"
    pace = [healed(1), {"kind": "worker_healed", "count": 2}]
    job = jobs.run("Sharded", workers=2, numerics=FOUR, settings={"cell.tp": 2}, chaos=chaos, pace=pace)
    assert len(job.of_kind("fault_injected")) == 2, job.account()
    reasons = [event["reason"] for event in job.of_kind("worker_evicted")]
    assert any("its rank 1 was killed by SIGKILL" in reason for reason in reasons), job.account()


@pytest.mark.longer
def test_it_is_resumed_at_other_degrees_by_naming_the_degree_alone(jobs: Jobs) -> None:
    run_dir = None
    for step, settings, workers in (
        (2, {"cell.tp": 4}, 1),
        (4, {"cell.tp": 2}, 2),
        (6, {}, 2),
        (8, {"cell.tp": 2, "cell.fsdp": 2}, 1),
        (0, {"cell.tp": 1}, 1),
    ):
        pace = [{"kind": "step_committed", "step": step}] if step else []
        job = jobs.start("Sharded", workers=workers, settings=settings, run_dir=run_dir, pace=pace)
        if step:
            job.wait_for("step_committed", step=step)
            os.kill(job.launcher_pid(), signal.SIGTERM)
            assert job.end() == 143, job.account()
        run_dir = job.run_dir
    jobs.check(job, "Sharded", FOUR)


def _refused(job: Job) -> str:
    assert job.end() == 2, job.account()
    errors = job.run_dir.with_suffix(".err").read_text()
    assert "Traceback" not in errors and not job.run_dir.exists(), errors
    return errors


@pytest.mark.parametrize(
    ("task", "settings", "said"),
    [
        ("Sharded", {"cell.tp": 8}, "blocks.0.attention.qkv.weight is [48, 16], of 4 heads"),
        ("Unfitting", {"cell.tp": 2}, "what blocks.0.attention (_Bounded) gives is another one by shards"),
        ("Sharded", {"cell.tp": 3, "cell.shards": 4}, "cell.shards: expected a multiple of cell.tp=3, got 4"),
        ("Text", {"cell.tp": 2}, "cell.shards: Text has no plan of what is cut, got 2 shards: define parallelize"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_the_start(
    jobs: Jobs, task: str, settings: dict[str, Any], said: str
) -> None:
    assert said in _refused(jobs.start(task, workers=1, settings=settings))


def test_a_script_is_refused_before_the_start(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    said = _refused(jobs.start(str(tmp_path / "train.py"), workers=1, settings={"cell.tp": 2}))
    assert "cell.shards: expected 1 for a script that calls everstep.join, got 2" in said
