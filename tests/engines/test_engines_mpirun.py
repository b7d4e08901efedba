"""A script that mpirun starts as several processes is one job, which heals without mpirun ending it; one on
three hosts goes on when it is started again."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from net import Net

from engines_harness import Launched, booted, check, clean, hold
from job_harness import LIMIT_S, Job, same

MPIRUN = shutil.which("mpirun")
pytestmark = [
    pytest.mark.longer,
    pytest.mark.skipif(MPIRUN is None, reason="needs mpirun (tests/install_engines.sh)"),
]


def test_a_worker_that_dies_heals(tmp_path: Path, script: Path, alone: Path) -> None:
    run_dir = tmp_path / "run"
    held = hold(run_dir)
    options = [
        "--oversubscribe",
        "--bind-to",
        "none",
        "-np",
        "2",
        *(["--allow-run-as-root"] if not os.getuid() else []),
    ]
    job = Launched(run_dir, [str(MPIRUN), *options, sys.executable, script, run_dir])
    try:
        job.wait_for("generation_started", lambda e: len(e["workers"]) == 2)
        job.wait_for("step_committed", step=1)
        os.kill(job.pid_of(0), signal.SIGKILL)
        job.wait_for("worker_healed", worker_id=0)
        held.unlink()
        check(job, alone)
    finally:
        job.close()
    assert "mpirun" not in job.said, job.said


def test_a_host_of_mpirun_dies(net: Net, tmp_path: Path, script: Path, alone: Path) -> None:
    """Open MPI ends what it has started when it loses a host; the same command with another one goes on."""
    run_dir = tmp_path / "run"
    held = hold(run_dir, 1.0)
    first, _, third, fourth = net.hosts
    begin = beginning(net, tmp_path, [sys.executable, str(script), str(run_dir)])

    mpirun = begin("host1", "host2", "host3")
    job = Job(run_dir, "mpirun on three hosts", mpirun.pid)
    full = job.wait_for("generation_started", lambda e: len(e["workers"]) == 3)
    job.wait_for("step_committed")
    third.kill()
    assert mpirun.wait(LIMIT_S) != 0
    again = begin("host1", "host2", fourth.name)
    job = Job(run_dir, "mpirun on three hosts", again.pid)
    begun = job.wait_for("job_started", lambda e: later(e) > later(full))
    new = job.wait_for("generation_started", lambda e: len(e["workers"]) == 3 and later(e) > later(begun))
    held.unlink()
    assert again.wait(LIMIT_S) == 0, job.account()
    same(alone, job)
    joined = {e["host"] for e in job.of_kind("worker_joined") if later(begun) < later(e) < later(new)}
    assert joined == {first.address, "host2-1", "host4-2"}


def beginning(net: Net, folder: Path, command: list[str]) -> Callable[..., subprocess.Popen[bytes]]:
    """Called with names of hosts it has mpirun start the command there, once on each."""
    reach, first = folder / "reach", net.hosts[0]
    cases = [f'{host.name}) shift; exec {shlex.join(booted(host))} sh -c "$*" ;;' for host in net.hosts]
    reach.write_text("\n".join(["#!/bin/sh", 'case "$1" in', *cases, "esac"]))
    reach.chmod(0o755)
    environment = {"EVERSTEP_TOKEN": secrets.token_hex(32), "MASTER_ADDR": first.address}
    options = ["--map-by", "node", "--bind-to", "none", "--allow-run-as-root"]
    options += ["--mca", "plm_rsh_agent", str(reach), *(word for name in environment for word in ("-x", name))]

    def begin(*names: str) -> subprocess.Popen[bytes]:
        words = [str(MPIRUN), "-np", str(len(names)), "--host", ",".join(names), *options, *command]
        return first.start(words, folder / "run.err", clean(environment))

    return begin


def later(event: dict[str, Any]) -> int:
    return int(event["time_unix_ns"])
