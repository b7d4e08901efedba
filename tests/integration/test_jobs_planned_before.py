"""Plans made before a job, data parallel and in three stages of emulated devices: each step takes what was planned, and
the plan that is chosen is the best of those that were run."""

from __future__ import annotations

from itertools import pairwise

import pytest

from everstep.cost.online import Calibrated, JobShape
from job_harness import Job, Jobs

WAIT_S, LANES, WORKERS, STEPS = 0.3, 6, 3, 6


def step_s(job: Job) -> float:
    """Least time between the commits of two steps, the first two aside: other programs only ever add to it."""
    assert job.end() == 0, job.account()
    at_ns = [event["time_unix_ns"] for event in job.of_kind("step_committed")]
    return min(after - before for before, after in pairwise(at_ns[2:])) / 1e9


@pytest.mark.longer
def test_two_plans_of_one_job_and_what_it_takes(jobs: Jobs) -> None:
    plan = Calibrated(JobShape(LANES, 4), WORKERS, 3 * WAIT_S, 0.0, 0.0)
    planned = {stages: plan.parts(WORKERS, stages).step_s for stages in (1, 3)}
    numerics = {"steps": STEPS, "lanes": LANES, "micro_batch": 4}
    waits_ms = {stages: 1000 * WAIT_S / stages for stages in planned}  # each stage waits for its part of the model
    measured = {}
    for stages, wait_ms in waits_ms.items():
        settings = {"stages": stages, "emulate_compute_ms": wait_ms}
        measured[stages] = step_s(jobs.start("Text", workers=WORKERS, numerics=numerics, settings=settings))
    assert planned == pytest.approx({1: 2 * 3 * WAIT_S, 3: (LANES + 2) * WAIT_S})
    for stages, seconds in planned.items():
        assert abs(measured[stages] / seconds - 1) < 0.1, (planned, measured)
    chosen = min(planned, key=lambda stages: planned[stages])
    assert measured[chosen] < 1.05 * min(measured.values()), measured
