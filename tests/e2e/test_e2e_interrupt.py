"""Ctrl-C and SIGTERM at any time, twice; and going on afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from e2e_cli import COMMAND, Running, environment, events_of, everstep

SLOW = ("--workers", "2", "--steps", "500")


def test_interrupted_in_order_and_started_again(run_dir: Path, small_task: str) -> None:
    """A job goes on in the same directory: where its last checkpoint is, and no step is told twice."""
    options = ("--workers", "2", "--steps", "40", "--run-dir", run_dir)
    with Running(small_task, *options, E2E_LANE_S="0.1") as job:
        job.wait_for_step(2)
        job.signal(signal.SIGINT)
        code, printed, errors = job.end()
    assert (code, "Traceback" in errors) == (130, False), errors
    assert "stopped after step" in errors and ": interrupted by SIGINT; checkpoint of step" in errors
    command = next(line for line in errors.splitlines() if line.startswith("to go on: everstep run "))
    assert "error:" not in errors and f"--run-dir {run_dir}" in command
    assert (printed[-1]["kind"], printed[-1]["state"], printed[-1]["exit_code"]) == ("summary", "interrupted", 130)
    assert json.loads(everstep("status", run_dir, "--json").stdout)["state"] == "interrupted"
    again = everstep("run", small_task, *options)
    assert again.returncode == 0, again.stderr
    assert "goes on from the checkpoint of step" in again.stdout and f"this runs {small_task}\n" in again.stdout
    events = events_of(run_dir)
    assert [e["step"] for e in events if e["kind"] == "step_committed"] == list(range(1, 41))
    assert everstep("ledger", run_dir).returncode == 0


@pytest.mark.longer
def test_other_signals_and_other_moments(tmp_path: Path, small_task: str) -> None:
    with (
        Running(small_task, *SLOW, "--run-dir", tmp_path / "terminated", E2E_LANE_S="0.05") as terminated,
        Running(small_task, *SLOW, "--run-dir", tmp_path / "twice", E2E_LANE_S="0.05") as twice,
        Running(small_task, *SLOW, "--run-dir", tmp_path / "early", E2E_LANE_S="0.05") as early,
    ):
        early.wait_for(lambda e: e["kind"] == "job_started")
        early.signal(signal.SIGINT)
        twice.wait_for_step(1)
        twice.signal(signal.SIGINT)
        twice.signal(signal.SIGINT)
        terminated.wait_for_step(2)
        terminated.signal(signal.SIGTERM)
        for job, expected in ((early, 130), (twice, 130), (terminated, 143)):
            code, _, errors = job.end()
            assert (code, "Traceback" in errors, "error:" in errors) == (expected, False, False), errors
            assert "interrupted by SIG" in errors and "to go on: everstep run" in errors
    for name in ("terminated", "twice", "early"):
        assert processes_of(tmp_path / name) == []


def test_while_the_task_is_looked_at(tmp_path: Path, small_task: str) -> None:
    """Before there is a launcher: Ctrl-C reaches the whole group, as a terminal sends it."""
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        run_dir = tmp_path / "run"
        process = subprocess.Popen(
            [*COMMAND, "run", small_task, "--run-dir", str(run_dir)],
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        while not children(process.pid):  # the first child looks at the task
            assert process.poll() is None
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, "Traceback" in errors, "error: interrupted" in errors) == (code, False, True), (
            errors
        )
        assert not run_dir.exists()


def children(pid: int) -> list[str]:
    """The ids of the processes that this one has started."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def processes_of(run_dir: Path) -> list[str]:
    """Command lines of living processes that have to do with this directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode()
            if str(run_dir) in line:
                found.append(line)
    return found


@pytest.mark.longer
@pytest.mark.parametrize("how", ["moved", "removed"])
def test_a_run_directory_that_is_taken_away_ends_the_job(run_dir: Path, small_task: str, how: str) -> None:
    """In one line; and another directory of its name stays as it is."""
    there = run_dir.with_name("there")
    with Running(small_task, "--workers", "2", "--steps", "5000", "--run-dir", run_dir, E2E_LANE_S="0.1") as job:
        job.wait_for_step(2)
        if how == "moved":
            run_dir.rename(there)
        while run_dir.exists():
            shutil.rmtree(run_dir, ignore_errors=True)  # as long as files come that were being written
        run_dir.mkdir()
        code, _, errors = job.end()
    assert (code, errors.count("error: "), "Traceback" in errors) == (1, 1, False), errors
    assert f"the run directory {run_dir} was {how}" in errors
    assert not list(run_dir.iterdir())
    if how == "moved":
        assert next(e["reason"] for e in events_of(there) if e["kind"] == "job_failed") in errors
        assert json.loads(everstep("status", there, "--json").stdout)["state"] == "failed"
