"""Workers that die while blocks of their sums are on their way, before the step's lanes are computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from job_harness import Jobs

BACK = [{"kind": "worker_healed", "count": 2}]


@pytest.mark.longer
@pytest.mark.parametrize(("workers", "settings"), [(3, {}), pytest.param(4, {"stages": 2}, marks=pytest.mark.longer)])
def test_whoever_dies_while_blocks_leave_is_replaced(
    jobs: Jobs, tmp_path: Path, workers: int, settings: dict[str, Any]
) -> None:
    """What the others have of them counts for nothing: the lanes are computed again, by somebody else."""
    struck = tmp_path / "struck"
    job = jobs.start(
        "PicturesStruck",
        workers=workers,
        settings={"transport": "sockets", **settings},
        pace=BACK,
        environment={"EVERSTEP_TEST_STRIKE": f"{struck} 4 12"},
    )
    jobs.check(job, "PicturesStruck")
    assert [(tmp_path / f"struck-{step}").exists() for step in (4, 12)] == [True, True]
    assert len(job.of_kind("worker_evicted")) == 2, job.account()
