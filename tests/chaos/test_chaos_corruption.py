"""A bit flips in one worker's memory: it is noticed, all go back, and the bits are those of the undisturbed run."""

from __future__ import annotations

import pytest

from job_harness import Job, Jobs

COMPARED = {"verify_every": 5}


def test_the_worker_that_the_others_outvote_leaves_and_heals(jobs: Jobs) -> None:
    settings = {**COMPARED, "checkpoint.disk.every_steps": 4}
    pace = [{"kind": "checkpoint_failed", "step": 12}]  # of what was wrong
    flip = "flip:target=worker:1,at=12"
    job = jobs.run("PicturesOneCycle", workers=3, chaos=flip, settings=settings, pace=pace)
    (evicted,) = job.of_kind("worker_evicted")
    assert evicted["worker_id"] == 1 and "worker 1 deviates" in evicted["reason"], job.account()
    assert evicted["cause"] == "corrupt"
    (fallback,) = job.of_kind("fallback")
    assert fallback["step"] == 8 and fallback["steps_redone"] >= 4, job.account()
    assert "worker 1 deviates; all steps after 9 are tainted" in fallback["reason"]
    assert "workers 0, 1, 2 hold different states of step 12" in job.of_kind("checkpoint_failed")[0]["reason"]


def newest_copy(job: Job, sound: int) -> int:
    """Of the steps up to this one: in memory every second one, but for those that were skipped since the one before was
    still on its way, or on disk."""
    skipped = {e["step"] for e in job.of_kind("checkpoint_skipped") if e["tier"] == "memory"}
    on_disk = {e["step"] for e in job.of_kind("checkpoint_completed") if e["tier"] == "disk"}
    return max(step for step in {*range(2, sound + 1, 2)} - skipped | on_disk if step <= sound)


@pytest.mark.longer
def test_without_a_majority_all_go_back_in_memory(jobs: Jobs) -> None:
    settings = {**COMPARED, "checkpoint.memory.every_steps": 2, "checkpoint.interval": 1000}
    job = jobs.run("Pictures", workers=2, chaos="flip:target=worker:0,at=12,phase=load", settings=settings)
    (fallback,) = job.of_kind("fallback")
    assert fallback["step"] == newest_copy(job, 9) and "no copy is outvoted" in fallback["reason"], job.account()
    assert fallback["cause"] == "corrupt"
    assert not job.of_kind("worker_evicted"), job.account()


@pytest.mark.longer
def test_with_nothing_to_go_back_to_all_start_anew(jobs: Jobs) -> None:
    job = jobs.run("Text", workers=2, chaos="flip:target=worker:1,at=3", settings=COMPARED)
    assert [event["step"] for event in job.of_kind("fallback")][-1] == 0, job.account()


@pytest.mark.longer
def test_a_copy_of_a_stage(jobs: Jobs) -> None:
    settings = {**COMPARED, "stages": 2, "checkpoint.memory.every_steps": 2}
    job = jobs.run("Pictures", workers=5, chaos="flip:target=worker:4,at=13,phase=load", settings=settings)
    (fallback,) = job.of_kind("fallback")
    assert fallback["step"] == newest_copy(job, 9) and "stage 1 differs" in fallback["reason"], job.account()
