"""A script that srun starts on three hosts is one job; a host that dies is missed, and another one takes its place."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from net import Net

from engines_harness import hold, places
from job_harness import LIMIT_S, Job, same
from slurm_cluster import Slurm, why_not

pytestmark = [
    pytest.mark.longer,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is Slurm"),
]


@pytest.fixture
def slurm(net: Net) -> Iterator[Slurm]:
    found = Slurm(3, net.hosts)
    yield found
    found.close()


def test_a_host_of_srun_dies(slurm: Slurm, net: Net, tmp_path: Path, script: Path, alone: Path) -> None:
    run_dir = tmp_path / "run"
    held = hold(run_dir, 4.0)
    environment = {**slurm.environment, "EVERSTEP_TOKEN": secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
    submit = net.hosts[0]
    options = ["srun", "--no-kill", "--kill-on-bad-exit=0", "-N", "3", "-n", "3", "-c", "1"]
    log = run_dir.with_suffix(".err")
    srun = submit.start([*options, sys.executable, str(script), str(run_dir)], log, environment)
    job = Job(run_dir, "srun on three hosts", srun.pid)
    full = job.wait_for("generation_started", lambda e: len(e["workers"]) == 3)
    job.wait_for("step_committed")
    victim = next(e for e in job.of_kind("worker_joined") if e["host"] == "n2")
    slurm.kill(2)
    gone = job.wait_for("worker_evicted", worker_id=victim["worker_id"])
    job.wait_for("step_committed", lambda e: e["time_unix_ns"] > gone["time_unix_ns"])
    agent = [sys.executable, "-P", "-m", "everstep", "agent", "--join", f"file://{run_dir}", "--refill", "3"]
    other = net.hosts[3].start(agent, tmp_path / "agent", environment)
    again = job.wait_for("worker_joined", lambda e: e["time_unix_ns"] > gone["time_unix_ns"])
    job.wait_for("worker_healed", worker_id=again["worker_id"])
    held.unlink()
    job.wait_for("job_completed")
    assert other.wait(LIMIT_S) == 0, (tmp_path / "agent").read_text() + job.account()
    same(alone, job)
    assert full["generation"] >= 1 and len(places(run_dir)) == 3
