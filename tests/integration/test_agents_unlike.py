"""Hosts and runs that compute with other kernels, or have other code, than the job: refused by name, and the job goes
on without them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from test_agents_apart import APART, Agent, agents

from everstep.runtime.commands import ask
from job_harness import LIMIT_S, Job, Jobs, same

__all__ = ["agents"]

NARROW = {
    "AVX512": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}.get(torch.backends.cpu.get_cpu_capability(), {})
"""What a machine with narrower vectors computes."""

TASK = "from job_tasks import Text\nfrom unlike_helper import SHIFT\n\n\nclass Own(Text):\n    shift = SHIFT\n"
DATA = """
from pathlib import Path
from torch.utils.data import Dataset
from job_tasks import Text


class Rows(Dataset):
    def __init__(self, inner):
        self.inner, self.size = inner, len(Path("rows.txt").read_text())

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return self.inner[index].flip(0) if self.size > 4 and index else self.inner[index]


class Own(Text):
    def build_dataset(self, split):
        return Rows(super().build_dataset(split))
"""
NUMERICS = {"steps": 30}

needs_narrower = pytest.mark.skipif(not NARROW, reason="this machine has no narrower instruction set to compute with")


def helper(folder: Path, text: str) -> Path:
    """A host's own working directory, with the task and what that imports."""
    folder.mkdir(exist_ok=True)
    (folder / "unlike_task.py").write_text(TASK)
    (folder / "unlike_helper.py").write_text(text)
    return folder


def start(jobs: Jobs, run_dir: Path, *options: str, **environment: str) -> Job:
    """In `jobs.base`."""
    settings = [word for key, value in NUMERICS.items() for word in ("--set", f"{key}={value}")]
    command = ["run", "unlike_task:Own", "--run-dir", str(run_dir), "--json", *settings, *options]
    return jobs.command(command, run_dir, environment)


@pytest.mark.longer
@needs_narrower
def test_a_host_unlike_the_job_is_refused_by_name_and_the_job_goes_on(
    jobs: Jobs, agents: list[Agent], tmp_path: Path
) -> None:
    ours, older = helper(jobs.base, "SHIFT = 2\n"), helper(tmp_path / "older", "SHIFT = 1\n")
    job = start(jobs, tmp_path / "job", *APART, "--workers", "1")
    refused = {"events": str(job.run_dir / "events.jsonl"), "until": [{"kind": "warning", "count": 4}], "lane_s": 1.0}
    paced = {"EVERSTEP_TEST_PACE": json.dumps(refused)}
    agents.append(Agent(job, "--host-name", "one", "--slots", "1", folder=ours, **paced))
    job.wait_for("step_committed")
    agents.append(Agent(job, "--host-name", "narrow", folder=ours, **NARROW))
    agents.append(Agent(job, "--host-name", "older", folder=older))
    ask(job.run_dir, "scale", {"workers": 2})  # to whoever has room for another one
    assert agents[1].over(LIMIT_S) and agents[2].over(LIMIT_S)
    errors = {line.split()[2]: line for line in agents[0].words().splitlines() if line.startswith("error: host ")}
    assert errors.keys() == {"narrow:", "older:"} and "Traceback" not in agents[0].words(), job.account()
    widest, narrow = torch.backends.cpu.get_cpu_capability(), NARROW["ATEN_CPU_CAPABILITY"].upper()
    assert f"by {narrow}" in errors["narrow:"] and f"by {widest}" in errors["narrow:"]
    assert "numerics.changed=warn" in errors["narrow:"]
    assert "unlike_helper.py is " in errors["older:"] and "on host older" in errors["older:"]
    assert job.end() == 0, job.account()
    same(jobs.reference("Text", NUMERICS), job)
    assert {worker["host"] for worker in job.of_kind("worker_joined")} == {"one"}


def test_a_host_with_other_data_is_refused_by_name_before_its_lanes_count(
    jobs: Jobs, agents: list[Agent], tmp_path: Path
) -> None:
    """As many samples, of which the first is the same; no lane of it is compared, neither at joins nor later."""
    folders = helper(jobs.base, ""), helper(tmp_path / "other", "")
    for folder, rows in zip(folders, ("ours", "other"), strict=True):
        (folder / "unlike_task.py").write_text(DATA)
        (folder / "rows.txt").write_text(rows)
    job = start(jobs, tmp_path / "job", *APART, "--workers=1", "--set=verify_every=0", "--set=spot_check=0")
    paced = {"events": str(job.run_dir / "events.jsonl"), "until": [{"kind": "worker_evicted"}], "lane_s": 1.0}
    ours = {"EVERSTEP_TEST_PACE": json.dumps(paced)}
    agents.append(Agent(job, "--host-name", "one", "--slots", "1", folder=folders[0], **ours))
    job.wait_for("step_committed")
    agents.append(Agent(job, "--host-name", "other", folder=folders[1]))
    ask(job.run_dir, "scale", {"workers": 2})
    assert agents[1].over(LIMIT_S), job.account()
    words = agents[1].words()
    assert "its data differ from the job's: sample " in words and "on host other" in words, words
    assert job.end() == 0, job.account()
    same(jobs.reference("Text", NUMERICS), job)


@pytest.mark.longer
@needs_narrower
def test_a_run_that_goes_on_elsewhere_is_refused_unless_that_is_allowed(jobs: Jobs, tmp_path: Path) -> None:
    helper(jobs.base, "SHIFT = 2\n")
    options = ("--workers", "2", "--set", "checkpoint.disk.every_steps=2")
    job = start(jobs, tmp_path / "job", *options)
    job.wait_for("checkpoint_completed")
    os.kill(job.launcher_pid(), signal.SIGINT)
    assert job.end() == 130, job.account()
    generations = len(job.of_kind("generation_started"))
    helper(jobs.base, "SHIFT = 3\n")  # an edit between two runs is the user's right

    job = start(jobs, tmp_path / "job", *options, **NARROW)
    assert job.end() == 2, job.account()
    words = job.run_dir.with_suffix(".err").read_text()
    assert "this host computes with" in words and "numerics.changed=warn" in words and "Traceback" not in words
    assert len(job.of_kind("generation_started")) == generations, "no lane of it has counted"

    job = start(jobs, tmp_path / "job", *options, "--set", "numerics.changed=warn", **NARROW)
    assert job.end() == 0, job.account()
    said = " ".join(str(event["reason"]) for event in job.of_kind("warning"))
    assert "the result is no longer exact (numerics.changed=warn)" in said and "the checkpoint of step" in said
    assert "the code has changed since this job last ran" in said and "unlike_helper.py is " in said
