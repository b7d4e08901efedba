"""Jobs whose workers are cells: the bits of one worker of one process, through kills of any rank and in any shape."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from job_harness import Job, Jobs, healed


def cells(ranks: int, **more: Any) -> dict[str, Any]:
    """Settings of a job with so many processes in each worker."""
    return {"cell.fsdp": ranks, **more}


def ranks_of(job: Job, worker_id: int) -> list[int]:
    """Pids of the newest life of a worker, the head's first."""
    started = [e for e in job.of_kind("worker_started") if e["worker_id"] == worker_id]
    return [int(pid) for pid in started[-1]["pids"]]


@pytest.mark.parametrize(("ranks", "workers"), [(2, 1), (4, 1), (2, 2), (3, 3)])
@pytest.mark.parametrize("task", ["Pictures", "Text"])
def test_any_number_of_ranks(jobs: Jobs, task: str, ranks: int, workers: int) -> None:
    """Lanes that do not divide, BatchNorm, dropout, tied parameters, clipping."""
    jobs.run(task, workers=workers, settings=cells(ranks))


@pytest.mark.parametrize("phase", ["forward", "reduce", "agree", "update"])
def test_any_rank_is_killed_and_its_cell_comes_back(jobs: Jobs, phase: str) -> None:
    chaos = f"kill:target=worker:1/1,at=7,phase={phase}; kill:target=leader:0,at=14,phase={phase}"
    pace = [healed(1), {"kind": "worker_healed", "count": 2}]
    job = jobs.run("Text", workers=2, settings=cells(2), chaos=chaos, pace=pace)
    assert len(job.of_kind("fault_injected")) == 2, job.account()
    reasons = [event["reason"] for event in job.of_kind("worker_evicted")]
    assert any("its rank 1 was killed by SIGKILL" in reason for reason in reasons), job.account()


def test_a_spare_cell_takes_over_and_a_rank_that_is_stopped_hangs(jobs: Jobs) -> None:
    job = jobs.start(
        "Pictures", workers=2, settings=cells(2, spares=1, hang_limit_s=3), pace=[healed(2), healed(1)]
    )
    job.wait_for("step_committed", step=4)
    for pid in ranks_of(job, 0):  # both at once
        os.kill(pid, signal.SIGKILL)
    job.wait_for("worker_healed", worker_id=2)
    os.kill(ranks_of(job, 1)[1], signal.SIGSTOP)
    evicted = job.wait_for("worker_evicted", worker_id=1)
    assert evicted["cause"] == "hung" and "its rank 1" in evicted["reason"], job.account()
    jobs.check(job, "Pictures")


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
    ("task", "numerics"),
    [("Sparse", {}), ("SparseStages", {}), ("Layers", {"precision": "fp16"}), ("PicturesEpochs", {"precision": "bf16"})],
)
def test_what_lanes_lack_and_narrow_types(jobs: Jobs, task: str, numerics: dict[str, Any]) -> None:
    """Parameters that some lanes do not use, or none; lanes without samples; a scaled loss; schedules."""
    jobs.run(task, workers=2, numerics=numerics, settings=cells(3, verify_every=4))
