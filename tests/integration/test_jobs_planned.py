"""A job of emulated devices, with a kill: as the plan has it, and with the bits of an undisturbed run without waits."""

from __future__ import annotations

import pytest

from everstep.cli.plan_online import plan_of_run
from job_harness import Jobs

WAIT_MS = 40


@pytest.mark.longer
@pytest.mark.parametrize(("stages", "workers"), [pytest.param(1, 2, marks=pytest.mark.longer), (2, 2)])
def test_the_step_takes_what_was_planned(jobs: Jobs, stages: int, workers: int) -> None:
    settings = {"emulate_compute_ms": WAIT_MS, "metrics.interval_s": 0.2, "stages": stages}
    numerics = {"steps": 20}
    chaos = "kill:target=worker:1,at=4,phase=backward" if stages == 1 else ""
    job = jobs.start("Text", workers=workers, chaos=chaos, settings=settings, numerics=numerics)
    if stages == 1:
        jobs.check(job, "Text", numerics)
    else:
        assert job.end() == 0, job.account()  # waits replace the passes there, so nothing is learnt
    said = plan_of_run(job.run_dir)
    assert said["lane_s"] == pytest.approx(3 * WAIT_MS / 1e3)
    calibrated = next(one for one in said["time"] if one["calibrated"])
    assert abs(calibrated["error"]) < 0.1, said["parts"]
