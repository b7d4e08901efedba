"""Signals at the command line before, while and after a job runs: one line and the documented code, or nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from e2e_cli import Running, environment

HELD = """
import builtins, os, sys
real = builtins.__import__
def held(name, *args, **kwargs):
    if name == {at!r} and not os.environ.pop("HELD", ""):
        os.environ["HELD"] = "1"
        print("here", flush=True)
        sys.stdin.readline()
    return real(name, *args, **kwargs)
builtins.__import__ = held
import runpy
sys.argv = ["everstep", "config", "causes"]
runpy.run_module("everstep", run_name="__main__", alter_sys=True)
"""
"""A command that waits in the middle of one of its imports."""


@pytest.mark.parametrize("at", ["everstep.cli.main", "click"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 0)])
def test_while_it_imports(at: str, number: int, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", HELD.format(at=at)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    process.send_signal(number)
    _, errors = process.communicate("\n", timeout=60)
    assert (process.returncode, "Traceback" in errors) == (code, False), errors
    assert errors.count("error: interrupted") == (code > 0) and len(errors.splitlines()) == (code > 0), errors


@pytest.mark.longer
def test_notices_before_and_after_the_job_change_nothing(run_dir: Path, small_task: str) -> None:
    """A scheduler's notice may come at any moment: before there is anything to save, and when all is done."""
    with Running(small_task, "--workers", "1", "--steps", "3", "--run-dir", run_dir) as job:
        job.wait_for(lambda e: e["kind"] == "job_started")
        job.signal(signal.SIGUSR1)
        job.wait_for(lambda e: e["kind"] == "job_completed")
        job.signal(signal.SIGUSR1)
        code, _, errors = job.end()
    assert (code, "Traceback" in errors) == (0, False), errors
