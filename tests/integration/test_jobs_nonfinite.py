"""Jobs whose loss is not finite in some steps: said once, counted, left out or the end, whatever dies meanwhile."""

from __future__ import annotations

import json
from typing import Any

import pytest

from job_harness import Job, Jobs, healed

CHAOS = "kill:target=worker:1,at=2,phase=backward; kill:target=leader:0,at=9,phase=agree"
PACE = [healed(1), healed(0)]


def summary_of(job: Job) -> dict[str, Any]:
    lines = job.run_dir.with_suffix(".out").read_text().splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    assert found["kind"] == "summary"
    return found


def warnings_of(job: Job) -> list[dict[str, Any]]:
    return [event for event in job.of_kind("warning") if event["cause"] == "nonfinite"]


def strange_steps(job: Job) -> list[int]:
    return [event["step"] for event in job.of_kind("step_committed") if event.get("nonfinite")]


@pytest.mark.parametrize("settings", [{}, {"stages": 2}])
def test_a_job_that_skips_goes_on_with_the_same_bits(jobs: Jobs, settings: dict[str, Any]) -> None:
    numerics = {"on_nonfinite": "skip"}
    job = jobs.run("PicturesNonFinite", chaos=CHAOS, numerics=numerics, settings=settings, pace=PACE)
    strange = strange_steps(job)
    left_out = [event["step"] for event in job.of_kind("step_committed") if not event["applied"]]
    assert strange and strange == left_out, job.account()
    (warning,) = warnings_of(job)
    assert warning["step"] == strange[0] and "the loss of lane" in warning["reason"], job.account()
    assert summary_of(job)["nonfinite"] == {"steps": len(strange), "first": strange[0]}


def test_by_default_it_is_said_once_and_counted(jobs: Jobs) -> None:
    job = jobs.run("PicturesNonFinite", chaos=CHAOS, pace=PACE)
    (warning,) = warnings_of(job)
    strange = strange_steps(job)
    assert warning["step"] == strange[0] and strange == list(range(strange[0], 31))
    assert summary_of(job)["nonfinite"] == {"steps": len(strange), "first": strange[0]}


@pytest.mark.parametrize("settings", [{}, {"stages": 2}])
def test_a_job_that_is_to_stop_ends_with_a_checkpoint_and_can_be_continued(
    jobs: Jobs, settings: dict[str, Any]
) -> None:
    settings = {"on_nonfinite": "stop", **settings}
    job = jobs.start("PicturesNonFinite", settings=settings)
    assert job.end() == 1, job.account()
    (failed,) = job.of_kind("job_failed")
    first = strange_steps(jobs_first(jobs))[0]
    assert failed["cause"] == "nonfinite" and f"step {first}: the loss of lane" in failed["reason"], job.account()
    assert f"checkpoint of step {first}" in failed["reason"], job.account()
    error = job.run_dir.with_suffix(".err").read_text()
    assert "Traceback" not in error
    again = jobs.start("PicturesNonFinite", settings={**settings, "on_nonfinite": "skip"}, run_dir=job.run_dir)
    jobs.check(again, "PicturesNonFinite", {"on_nonfinite": "skip"})


def jobs_first(jobs: Jobs) -> Job:
    """An undisturbed run that skips."""
    return Job(jobs.reference("PicturesNonFinite", {"on_nonfinite": "skip"}), "", 0)
