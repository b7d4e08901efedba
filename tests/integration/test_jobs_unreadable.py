"""Jobs that are resumed where the data of checkpoints cannot be read, though their manifests can: they go on from an
older one, and do not begin again beside one that may be whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from everstep.checkpoint.reader import steps_in
from everstep.checkpoint.store import DirectoryStore
from job_harness import Job, Jobs
from sampling import mostly_longer

TASK = """
import os, sys

sys.path.insert(0, {tests!r})
from everstep.base.errors import StoreError
from everstep.checkpoint.reader import Checkpoint
from job_tasks import Text

read_into = Checkpoint._read_into
bad, stages = ([int(n) for n in os.environ.get(name, "").split()] for name in ("BAD", "STAGES"))

def broken(self, piece, parts, stage):
    if self.step in bad and stage in stages:
        raise StoreError(f"cannot read {{self.name}}: Input/output error")
    return read_into(self, piece, parts, stage)

Checkpoint._read_into = broken

class Unread(Text):
    pass
"""
RULE = {"checkpoint.disk.every_steps": 2, "checkpoint.disk.keep_last": 9}


@pytest.fixture
def task(tmp_path: Path) -> str:
    (tmp_path / "task.py").write_text(TASK.format(tests=str(Path(__file__).parents[1])))
    return f"{tmp_path / 'task.py'}:Unread"


def stopped(jobs: Jobs, task: str, stages: int) -> tuple[Job, list[int]]:
    """A job that was stopped, and the steps of its checkpoints."""
    settings = {"stages": stages, **RULE}
    job = jobs.start(task, workers=2, settings=settings, pace=[{"kind": "step_committed", "step": 9}])
    job.wait_for("step_committed", step=9)
    os.kill(job.launcher_pid(), signal.SIGTERM)
    assert job.end() == 143, job.account()
    return job, steps_in(DirectoryStore(job.run_dir / "checkpoints"))


CASES = mostly_longer([(1, "0"), (2, "0"), (2, "0 1")], lambda case: case == (2, "0"))


@pytest.mark.parametrize(("stages", "unread"), CASES)
def test_an_older_one_is_taken(jobs: Jobs, task: str, stages: int, unread: str) -> None:
    """Also where one stage alone cannot read the newest: then the others state older ones than those, too."""
    job, steps = stopped(jobs, task, stages)
    bad = {"BAD": " ".join(map(str, steps[-3:])), "STAGES": unread}
    settings = {"stages": stages, **RULE}
    again = jobs.start(task, workers=2, settings=settings, run_dir=job.run_dir, environment=bad)
    jobs.check(again, task)
    passed = [e for e in again.of_kind("fallback") if e.get("what") == "checkpoint"]
    assert {e["step"] for e in passed} == {*steps[-3:]}, again.account()
    assert all("Input/output error" in e["reason"] and e["cause"] == "disk" for e in passed), again.account()
    assert [e["step"] for e in again.of_kind("recovery_completed")] == [steps[-4]], again.account()


@pytest.mark.parametrize(("stages", "unread"), CASES)
def test_none_can_be_read(jobs: Jobs, task: str, stages: int, unread: str) -> None:
    job, steps = stopped(jobs, task, stages)
    before = len(job.of_kind("step_committed"))
    bad = {"BAD": " ".join(map(str, steps)), "STAGES": unread}
    settings = {"stages": stages, **RULE}
    again = jobs.start(task, workers=2, settings=settings, run_dir=job.run_dir, environment=bad)
    assert again.end() == 2, again.account()
    errors = again.run_dir.with_suffix(".err").read_text()
    assert "Input/output error: make it readable and run the job again, or start over with --fresh" in errors, errors
    assert "Traceback" not in errors and len(again.of_kind("step_committed")) == before, again.account()
