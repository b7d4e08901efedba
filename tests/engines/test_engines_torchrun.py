"""A script that torchrun starts as several processes is one job, which heals without torchrun noticing."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from engines_harness import PLACE, Launched, check, hold, places


def torchrun(*options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *options]


@pytest.mark.longer
@pytest.mark.parametrize(
    "restarts",
    [
        "3",
        pytest.param(
            "0",
            marks=pytest.mark.longer,
        ),
    ],
)
def test_a_worker_that_dies_heals(tmp_path: Path, script: Path, alone: Path, restarts: str) -> None:
    run_dir = tmp_path / "run"
    held = hold(run_dir)
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", restarts)
    job = Launched(run_dir, [*torchrun(*options), script, run_dir])
    try:
        job.wait_for("generation_started", lambda e: len(e["workers"]) == 2)
        job.wait_for("step_committed", step=2)
        os.kill(job.pid_of(1), signal.SIGKILL)
        job.wait_for("worker_evicted", worker_id=1, cause="killed")
        job.wait_for("worker_healed", worker_id=1)
        held.unlink()
        check(job, alone)
    finally:
        job.close()
    assert len(job.of_kind("job_started")) == 1, "torchrun has restarted nothing"
    assert "Traceback" not in job.said and "failed" not in job.said.lower(), job.said
    found = places(run_dir)
    assert [[place[name] for name in PLACE[:5]] for place in found] == [
        ["0", "2", "0", "2", "0"],
        ["1", "2", "1", "2", "0"],
    ]
    assert {place["MASTER_ADDR"] for place in found} == {"127.0.0.1"}
    assert len({place["MASTER_PORT"] for place in found}) == 1
