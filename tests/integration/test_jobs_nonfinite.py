"""Jobs whose loss is not finite in some steps: told, counted, left out or the end, whatever dies meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everstep.report.history import History
from job_harness import Job, Jobs, healed

CHAOS = "kill:target=worker:1,at=2,phase=backward; kill:target=leader:0,at=9,phase=agree"
PACE = [healed(1), healed(0)]


def summary_of(job: Job) -> dict[str, Any]:
    lines = job.run_dir.with_suffix(".out").read_text().splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    assert found["kind"] == "summary"
    return found


def history_of(job: Job) -> History:
    return History(job.run_dir).load()


def strange_steps(job: Job) -> list[int]:
    return [event["step"] for event in job.of_kind("step_committed") if event.get("nonfinite")]


@pytest.mark.parametrize("settings", [{}, pytest.param({"stages": 2}, marks=pytest.mark.longer)])
def test_a_job_that_skips_goes_on_with_the_same_bits(jobs: Jobs, settings: dict[str, Any]) -> None:
    numerics = {"on_nonfinite": "skip"}
    job = jobs.run("PicturesNonFinite", chaos=CHAOS, numerics=numerics, settings=settings, pace=PACE)
    strange = strange_steps(job)
    left_out = [event["step"] for event in job.of_kind("step_committed") if not event["applied"]]
    assert strange and strange == left_out, job.account()
    told = job.of_kind("nonfinite")
    assert [event["step"] for event in told] == strange and "the loss of lane" in told[0]["reason"], job.account()
    assert all(5 in event["samples"] and len(event["lanes"]) == 1 for event in told), told
    assert summary_of(job)["nonfinite"] == {"steps": len(strange), "first": strange[0], "last": strange[-1]}


@pytest.mark.longer
def test_without_a_limit_all_are_told(jobs: Jobs) -> None:
    job = jobs.run("PicturesNonFinite", chaos=CHAOS, pace=PACE, numerics={"nonfinite_limit": 0})
    strange = strange_steps(job)
    assert strange == list(range(strange[0], 31)) == [event["step"] for event in job.of_kind("nonfinite")]
    assert summary_of(job)["nonfinite"] == {"steps": len(strange), "first": strange[0], "last": 30}
    said = history_of(job).headline(False)
    assert said.level == "bad" and f"was not finite from step {strange[0]} to the last" in said.text


@pytest.mark.longer
@pytest.mark.parametrize("settings", [{}, pytest.param({"stages": 2}, marks=pytest.mark.longer)])
def test_so_many_in_a_row_end_the_job_alike_whoever_dies(jobs: Jobs, settings: dict[str, Any]) -> None:
    first = 6
    rule = {"nonfinite_limit": 6, "checkpoint.disk.every_steps": 2, "checkpoint.disk.keep_last": 1, **settings}
    chaos = f"kill:target=worker:1,at={first + 2},phase=backward; kill:target=leader:0,at={first + 4},phase=agree"
    job = jobs.start("PicturesNonFiniteLater", workers=2, settings=rule, chaos=chaos, pace=PACE)
    assert job.end() == 1, job.account()
    (failed,) = job.of_kind("job_failed")
    assert failed["cause"] == "nonfinite" and failed["step"] == first + 5, job.account()
    assert f"as in all steps since {first} (nonfinite_limit is 6)" in failed["reason"], job.account()
    assert [event["in_a_row"] for event in job.of_kind("nonfinite")] == [1, 2, 3, 4, 5, 6], job.account()
    kept = {int(path.parent.name[5:]) for path in (job.run_dir / "checkpoints").glob("step-*/manifest.json")}
    sound = [step for step in kept if step < first]
    assert sound == [(first - 1) // 2 * 2] and max(kept) == first + 5, kept  # the newest that is finite
    said = history_of(job).headline(False)
    assert said.level == "bad" and "is not finite" in said.text
    again = jobs.start("PicturesNonFiniteLater", workers=2, settings=rule, run_dir=job.run_dir)
    assert again.end() == 1 and again.of_kind("job_failed")[-1]["step"] == first + 6, again.account()


@pytest.mark.longer
@pytest.mark.parametrize("settings", [pytest.param({}, marks=pytest.mark.longer), {"stages": 2}])
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


LAST = """
import torch
from torch import nn
import everstep

torch.manual_seed(0)
data = [(torch.randn(4), torch.tensor(i % 2)) for i in range(64)]
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = everstep.join(model, optimizer, data, lanes=4, micro_batch=2, steps=4, rehearse=False)
for step in run:
    for x, y in step:
        out = model(x)
        if step.number == 4:
            out.register_hook(lambda grad: grad * float("nan"))
        step.backward(nn.functional.cross_entropy(out, y))
"""


@pytest.mark.longer
def test_weights_that_the_last_step_spoils_are_told(jobs: Jobs, tmp_path: Path) -> None:
    """No loss shows it."""
    script = tmp_path / "last.py"
    script.write_text(LAST)
    job = jobs.start(str(script), workers=2)
    assert job.end() == 0, job.account()
    (warning,) = job.of_kind("warning")
    assert warning["cause"] == "nonfinite" and "weight (and 1 more) is not finite" in warning["reason"], warning
    said = history_of(job).headline(False)
    assert said.level == "bad" and "was not finite from step 4 to the last" in said.text, said
