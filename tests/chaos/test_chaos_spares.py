"""A hot spare with a small state steps in within the recovery's own plan."""

from __future__ import annotations

from job_harness import Jobs

STEPS = {"steps": 12}


def test_a_spare_takes_over_in_the_plan_that_answers_the_death(jobs: Jobs) -> None:
    chaos = "kill:target=worker:1,at=5,phase=backward"
    job = jobs.run("Text", "--spares", "1", chaos=chaos, numerics=STEPS)
    started = job.of_kind("generation_started")
    assert [e["workers"] for e in started][:2] == [[0, 1, 2], [0, 2, 3]], job.account()
    assert "worker 3 takes part from here" in started[1]["reason"]
    assert started[1]["lanes"]["3"], "the lost lanes are its"
    healed = job.of_kind("worker_healed")
    assert healed[0]["worker_id"] == 3 and healed[0]["generation"] == 2
