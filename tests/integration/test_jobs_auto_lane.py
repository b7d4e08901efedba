"""`micro_batch: auto`: the bits are those of a job with the lanes that were found, also after a kill and a stop."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from job_harness import Job, Jobs


def lanes_of(job: Job) -> dict[str, Any]:
    config = json.loads((job.run_dir / "job.json").read_text())["config"]
    return {key: config[key] for key in ("lanes", "micro_batch")}


@pytest.mark.longer
def test_a_resumed_job_keeps_the_lane_that_was_found(jobs: Jobs) -> None:
    auto, numerics = {"micro_batch": "auto"}, {"steps": 12}
    chaos = "kill:target=worker:1,at=3,phase=backward"
    job = jobs.start("Text", workers=2, chaos=chaos, settings=auto | {"emulate_compute_ms": 60}, numerics=numerics)
    job.wait_for("step_committed", step=4)
    os.kill(job.launcher_pid(), signal.SIGTERM)
    assert job.end() == 143, job.account()
    found = lanes_of(job)
    assert found["lanes"] == 2
    again = jobs.start("Text", workers=1, settings=auto, numerics=numerics, run_dir=job.run_dir)
    jobs.check(again, "Text", numerics | found)
    assert lanes_of(again) == found
