"""What happens when workers are lost for good, or must all be there."""

from __future__ import annotations

import pytest

from job_harness import Jobs, healed

STEPS = {"steps": 30}


def test_shrink_goes_on_with_fewer(jobs: Jobs) -> None:
    job = jobs.run("Pictures", chaos="kill:target=worker:1,at=5", settings={"on_failure": "shrink"}, numerics=STEPS)
    assert job.of_kind("generation_started")[-1]["workers"] == [0, 2]
    assert len(job.of_kind("worker_joined")) == 3


@pytest.mark.longer
def test_wait_goes_on_with_all(jobs: Jobs) -> None:
    job = jobs.run("Text", chaos="kill:target=worker:1,at=5", settings={"on_failure": "wait"}, numerics=STEPS)
    assert [e["workers"] for e in job.of_kind("generation_started")] == [[0, 1, 2], [0, 1, 2]]
    assert "on_failure is 'wait'" in job.of_kind("waiting")[0]["reason"]


@pytest.mark.longer
def test_too_few_wait_for_a_replacement(jobs: Jobs) -> None:
    chaos = "kill:target=worker:1,at=5; kill:target=worker:2,at=5; kill:target=leader:0,at=12"
    job = jobs.run("Pictures", "--min-workers", "2", chaos=chaos, numerics=STEPS, pace=[healed(0)])
    assert all(len(e["workers"]) >= 2 for e in job.of_kind("generation_started"))
    assert "min_workers" in job.of_kind("waiting")[0]["reason"]
