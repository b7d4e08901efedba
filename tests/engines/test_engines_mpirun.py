"""A script that mpirun starts as several processes is one job, which heals without mpirun ending it; one on
three hosts goes on when it is started again. What goes between hosts goes over MPI if that is asked for."""

from __future__ import annotations

import contextlib
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
WITH_MPI = Path(__file__).parent / "mpi_torch"
PACKAGES = Path(sys.prefix) / "engines"
GRADIENT_BYTES = 4 * (8 * 16 + 16 + 16 + 1) // 3
pytestmark = [
    pytest.mark.skipif(os.environ.get("EVERSTEP_TEST_ENGINES") != "all", reason="runs in make extended"),
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


def test_what_goes_between_hosts_goes_over_mpi(net: Net, tmp_path: Path, script: Path, alone: Path) -> None:
    """Its ranks are no workers: one of these dies, another comes, and MPI's processes stay."""
    counted = tmp_path / "counted"
    mpirun, job, held = over_mpi(net, tmp_path, script, counted, "--chaos", "kill:target=worker:1,at=2")
    job.wait_for("worker_healed", worker_id=1)
    held.unlink()
    assert mpirun.wait(LIMIT_S) == 0, job.account()
    same(alone, job)
    sent = dict(map(int, line.split()) for line in counted.read_text().splitlines())
    assert sorted(sent) == [0, 1, 2] and min(sent.values()) > 12 * GRADIENT_BYTES, sent


def test_the_job_goes_on_where_mpi_fails(net: Net, tmp_path: Path, script: Path, alone: Path) -> None:
    mpirun, job, held = over_mpi(net, tmp_path, script, tmp_path / "counted")
    job.wait_for("step_committed", step=1)
    os.kill(ferry_of(1), signal.SIGKILL)
    job.wait_for("generation_started", lambda e: e["generation"] > 1)
    held.unlink()
    assert mpirun.wait(LIMIT_S) != 0, "MPI was not left in order"
    same(alone, job)


def over_mpi(
    net: Net, folder: Path, script: Path, counted: Path, *more: str
) -> tuple[subprocess.Popen[bytes], Job, Path]:
    """A job on three hosts, and what holds its lanes back."""
    run_dir = folder / "run"
    held = hold(run_dir, 1.0)
    settings = ["--set", "transport=mpi", "--set", "lanes=4", *more]
    command = [sys.executable, "-P", "-m", "everstep", "run", "--run-dir", str(run_dir), *settings, str(script)]
    environment = {"PYTHONPATH": f"{WITH_MPI}:{PACKAGES}", "COUNT_MPI": str(counted)}
    mpirun = beginning(net, folder, [*command, "--", str(run_dir)], environment)("host1", "host2", "host3")
    job = Job(run_dir, "mpirun on three hosts", mpirun.pid)
    job.wait_for("generation_started", lambda e: len(e["workers"]) == 3)
    return mpirun, job, held


def ferry_of(rank: int) -> int:
    """The process that carries that host's connections."""
    words = f"everstep.runtime.link.ferry\0everstep-continue\0--rank\0{rank}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [int(path.parent.name)] if words in path.read_bytes() else []
    (pid,) = found
    return pid


def beginning(
    net: Net, folder: Path, command: list[str], more: dict[str, str] | None = None
) -> Callable[..., subprocess.Popen[bytes]]:
    """Called with names of hosts it has mpirun start the command there, once on each."""
    reach, first = folder / "reach", net.hosts[0]
    cases = [f'{host.name}) shift; exec {shlex.join(booted(host))} sh -c "$*" ;;' for host in net.hosts]
    reach.write_text("\n".join(["#!/bin/sh", 'case "$1" in', *cases, "esac"]))
    reach.chmod(0o755)
    environment = {"EVERSTEP_TOKEN": secrets.token_hex(32), "MASTER_ADDR": first.address, **(more or {})}
    options = ["--map-by", "node", "--bind-to", "none", "--allow-run-as-root"]
    options += ["--mca", "plm_rsh_agent", str(reach), *(word for name in environment for word in ("-x", name))]

    def begin(*names: str) -> subprocess.Popen[bytes]:
        words = [str(MPIRUN), "-np", str(len(names)), "--host", ",".join(names), *options, *command]
        return first.start(words, folder / "run.err", clean(environment))

    return begin


def later(event: dict[str, Any]) -> int:
    return int(event["time_unix_ns"])
