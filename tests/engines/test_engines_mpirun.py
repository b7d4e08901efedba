"""A script that mpirun starts as several processes is one job, which heals without mpirun ending it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from engines_harness import Launched, check, hold

MPIRUN = shutil.which("mpirun")
pytestmark = [
    pytest.mark.skipif(os.environ.get("EVERSTEP_TEST_ENGINES") != "all", reason="runs in make extended"),
    pytest.mark.skipif(MPIRUN is None, reason="needs mpirun (tests/install_engines.sh)"),
]


def test_a_worker_that_dies_heals(tmp_path: Path, script: Path, alone: Path) -> None:
    run_dir = tmp_path / "run"
    held = hold(run_dir)
    options = [
        "--oversubscribe",
        "--bind-to",
        "none",
        "-np",
        "2",
        *(["--allow-run-as-root"] if not os.getuid() else []),
    ]
    job = Launched(run_dir, [str(MPIRUN), *options, sys.executable, script, run_dir])
    try:
        job.wait_for("generation_started", lambda e: len(e["workers"]) == 2)
        job.wait_for("step_committed", step=1)
        os.kill(job.pid_of(0), signal.SIGKILL)
        job.wait_for("worker_healed", worker_id=0)
        held.unlink()
        check(job, alone)
    finally:
        job.close()
    assert "mpirun" not in job.said, job.said
