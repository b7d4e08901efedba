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
