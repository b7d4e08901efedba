"""Signals to a job whose coordinator is dead or frozen: a checkpoint, and out, within the grace."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from pathlib import Path

import pytest

from job_harness import Job, Jobs, healed, same

ENDLESS = [{"kind": "job_completed"}]
GRACE_S = 20.0


def coordinator_pid(job: Job) -> int:
    return int(json.loads((job.run_dir / "coordinator.json").read_text())["pid"])


@pytest.mark.longer
@pytest.mark.parametrize(
    ("how", "number"),
    [(signal.SIGSTOP, signal.SIGTERM), pytest.param(signal.SIGKILL, signal.SIGINT, marks=pytest.mark.longer)],
)
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
        job.wait_for_words("no coordinator answers: the workers take the checkpoint among themselves")
    saved = job.of_kind("checkpoint_completed")
    assert saved and saved[-1]["step"] >= 4, job.account()
    job = jobs.start("Pictures", workers=2, run_dir=job.run_dir)
    assert job.end() == 0, job.account()
    same(jobs.reference("Pictures"), job)
    assert job.of_kind("job_started")[-1]["step"] == saved[-1]["step"], job.account()


def parent(pid: int) -> int:
    """Who has started it, or has it by now."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.longer
def test_workers_outlive_a_fork_server_that_is_frozen_and_get_another(jobs: Jobs) -> None:
    """The one that the job itself has started: whoever is left without it is nobody's child here."""
    job = jobs.start("Pictures", workers=2, pace=[healed(1)], lane_s=0.2)
    job.wait_for("step_committed", lambda event: event["step"] >= 3)
    os.kill(parent(job.pid_of(0)), signal.SIGSTOP)
    job.wait_for("warning", lambda event: "the fork server has not answered for" in event["reason"])
    job.wait_for_words("its workers go on")
    assert not job.of_kind("worker_evicted"), job.account()
    os.kill(job.pid_of(1), signal.SIGKILL)
    jobs.check(job, "Pictures")
    gone = job.of_kind("worker_evicted")
    assert [(e["worker_id"], e["cause"]) for e in gone] == [(1, "killed")], job.account()
    assert len(job.of_kind("generation_started")) == 3, job.account()


@pytest.mark.longer
def test_an_agent_that_is_stopped_goes_on_and_its_workers_lose_nothing(jobs: Jobs) -> None:
    job = jobs.start("Pictures", workers=2, pace=[healed(1)], lane_s=0.2)
    job.wait_for("step_committed", lambda event: event["step"] >= 2)
    agent = next(pid for pid in children(job.launcher_pid()) if b"host_agent" in cmdline(pid))
    os.kill(agent, signal.SIGSTOP)
    job.wait_for_words("it is continued")
    os.kill(job.pid_of(1), signal.SIGKILL)
    jobs.check(job, "Pictures")
    assert [e["worker_id"] for e in job.of_kind("worker_evicted")] == [1], job.account()


LINGERS = """
import os, sys, time
import torch
from torch.utils.data import TensorDataset
import everstep

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = everstep.join(model, optimizer, TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), steps=4, rehearse=False)
for step in run:
    for x, y in step:
        step.backward(torch.nn.functional.mse_loss(model(x), y))
while os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""


def lingering(jobs: Jobs, tmp_path: Path) -> tuple[Job, Path]:
    """A job that is over, and a file without which its workers leave."""
    script, hold = tmp_path / "lingers.py", tmp_path / "hold"
    script.write_text(LINGERS)
    hold.touch()
    job = jobs.start(str(script), "--", str(hold), workers=2)
    job.wait_for("job_completed")
    return job, hold


@pytest.mark.longer
def test_a_coordinator_that_is_frozen_once_the_job_is_over_is_not_waited_for(jobs: Jobs, tmp_path: Path) -> None:
    """It has told of the end, and would have to say when the agents have left."""
    job, hold = lingering(jobs, tmp_path)
    pid = coordinator_pid(job)
    agent = next(pid for pid in children(job.launcher_pid()) if b"host_agent" in cmdline(pid))
    left = os.pidfd_open(agent)
    os.kill(pid, signal.SIGSTOP)
    hold.unlink()
    gone, _, _ = select.select([left], [], [], 120.0)
    assert gone, "the agent had heard of the end before"
    assert job.end() == 0, job.account()


@pytest.mark.longer
def test_a_coordinator_that_dies_once_the_job_is_over_is_started_again(jobs: Jobs, tmp_path: Path) -> None:
    """An agent that had not heard of the end would wait for it."""
    job, hold = lingering(jobs, tmp_path)
    first, late_s = coordinator_pid(job), time.monotonic() + 120.0
    os.kill(first, signal.SIGKILL)
    while coordinator_pid(job) == first:
        assert time.monotonic() < late_s, job.account()
        time.sleep(0.05)
    hold.unlink()
    assert job.end() == 0, job.account()
    assert len(job.of_kind("job_completed")) == 1, job.account()


def children(pid: int) -> list[int]:
    """Of all its threads."""
    found = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for line in found for child in line]


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
