"""Ctrl-C and SIGTERM at any time, twice; and going on afterwards."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from e2e_cli import Running, events_of, everstep

SLOW = ("--workers", "2", "--steps", "500", "--set", "task.lane_s=0.05")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_job_in_order(run_dir: Path, small_task: str, number: int, code: int) -> None:
    with Running(small_task, *SLOW, "--run-dir", run_dir) as job:
        job.wait_for_step(2)
        job.signal(number)
        ended, printed, errors = job.end()
    assert ended == code, errors
    assert "Traceback" not in errors
    assert (printed[-1]["kind"], printed[-1]["state"], printed[-1]["exit_code"]) == ("summary", "interrupted", code)
    assert json.loads(everstep("status", run_dir, "--json").stdout)["state"] == "interrupted"


def test_a_second_one_ends_it_at_once(run_dir: Path, small_task: str) -> None:
    with Running(small_task, *SLOW, "--run-dir", run_dir) as job:
        job.wait_for_step(1)
        job.signal(signal.SIGINT)
        job.signal(signal.SIGINT)
        begin = time.monotonic()
        ended, _, errors = job.end()
    assert ended == 130
    assert "Traceback" not in errors
    assert time.monotonic() - begin < 30, "generously; in order it may take its grace"


def test_before_the_first_step(run_dir: Path, small_task: str) -> None:
    with Running(small_task, *SLOW, "--run-dir", run_dir) as job:
        job.wait_for(lambda e: e["kind"] == "job_started")
        job.signal(signal.SIGINT)
        ended, _, errors = job.end()
    assert ended == 130, errors
    assert "Traceback" not in errors


def test_an_interrupted_job_starts_again(run_dir: Path, small_task: str) -> None:
    """Without checkpoints: from step 0, in the same directory, and it says so."""
    options = ("--workers", "2", "--steps", "8", "--set", "task.lane_s=0.2", "--run-dir", run_dir)
    with Running(small_task, *options) as job:
        job.wait_for_step(2)
        job.signal(signal.SIGINT)
        job.end()
    before = len(events_of(run_dir))
    again = everstep("run", small_task, *options)
    assert again.returncode == 0, again.stderr
    assert "starts again from step 0" in again.stdout
    events = events_of(run_dir)[before:]
    assert [e["step"] for e in events if e["kind"] == "step_committed"] == list(range(1, 9))
    assert everstep("ledger", run_dir).returncode == 0
