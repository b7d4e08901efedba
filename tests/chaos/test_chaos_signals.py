"""Signals to a job whose coordinator is dead or frozen: a checkpoint, and out, within the grace."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from job_harness import Job, Jobs, same

ENDLESS = [{"kind": "job_completed"}]
GRACE_S = 20.0


def coordinator_pid(job: Job) -> int:
    return int(json.loads((job.run_dir / "coordinator.json").read_text())["pid"])


@pytest.mark.parametrize(("how", "number"), [(signal.SIGSTOP, signal.SIGTERM), (signal.SIGKILL, signal.SIGINT)])
def test_without_a_coordinator_the_job_is_saved_and_ends(jobs: Jobs, how: int, number: int) -> None:
    settings = {"checkpoint.grace_s": GRACE_S}
    job = jobs.start("Pictures", "--stages", "2", workers=3, settings=settings, pace=ENDLESS)
    job.wait_for("step_committed", lambda event: event["step"] >= 4)
    os.kill(coordinator_pid(job), how)
    began_s = time.monotonic()
    os.kill(job.launcher_pid(), number)
    assert job.end() == 128 + number, job.account()
    assert time.monotonic() - began_s < GRACE_S, job.account()
    if how == signal.SIGSTOP:
        assert any("among themselves" in event["reason"] for event in job.of_kind("warning")), job.account()
    saved = job.of_kind("checkpoint_completed")
    assert saved and saved[-1]["step"] >= 4, job.account()
    job = jobs.start("Pictures", workers=2, run_dir=job.run_dir)
    assert job.end() == 0, job.account()
    same(jobs.reference("Pictures"), job)
    assert job.of_kind("job_started")[-1]["step"] == saved[-1]["step"], job.account()
