"""Lives of a process that is started again: which of their ends say that another start is hopeless."""

from __future__ import annotations

import signal
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from everstep.base.config import load_config
from everstep.base.readable import readable
from everstep.runtime.start import Start
from everstep.runtime.supervisor import HOPELESS, Child, LocalHost, Supervised


class Dying(Supervised):
    """Each life ends as it is told."""

    def __init__(self, log_path: Path, end: str) -> None:
        super().__init__(log_path)
        self._end = end

    def start(self) -> None:
        self.spawn([sys.executable, "-S", "-E", "-c", f"import os, signal\n{self._end}"])


@pytest.mark.parametrize(
    ("end", "hopeless"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", False),
        ("os.kill(os.getpid(), signal.SIGTERM)", False),
        ("signal.signal(signal.SIGSEGV, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGSEGV)", True),
        ("os.kill(os.getpid(), signal.SIGABRT)", True),
        ("os._exit(1)", True),
    ],
)
def test_who_is_killed_from_outside_could_have_begun(tmp_path: Path, end: str, hopeless: bool) -> None:
    process, found = Dying(tmp_path / "log", end), []
    for _ in range(HOPELESS):
        process.start()
        readable([process.pidfd], None)
        process._started_s = 10.0  # whatever this machine takes
        found.append(process.died(10.5)[1])
    assert found == [False] * (HOPELESS - 1) + [hopeless]
    assert 10.5 < process.restart_at_s < inf


@pytest.mark.parametrize(("code", "hopeless"), [(1, False), (2, True)])
def test_what_refuses_to_begin_is_hopeless_however_long_that_takes(tmp_path: Path, code: int, hopeless: bool) -> None:
    process, found = Dying(tmp_path / "log", f"os._exit({code})"), []
    for _ in range(HOPELESS):
        process.start()
        readable([process.pidfd], None)
        process._started_s = 10.0
        found.append(process.died(70.0)[1])
    assert found == [False] * (HOPELESS - 1) + [hopeless]
    assert (process.restart_at_s > 70.0) == hopeless, "it waits longer from one to the next"


def test_it_is_killed_for_its_silence_once(tmp_path: Path) -> None:
    process = Dying(tmp_path / "log", "signal.pause()")
    assert not process.kill()
    process.start()
    assert process.kill() and not process.kill()
    readable([process.pidfd], None)
    why, _ = process.died(0.0)
    assert (why.cause, why.reason) == ("hung", f"killed by {signal.SIGKILL.name}")


def test_a_child_that_was_started_before_is_supervised_as_others(tmp_path: Path) -> None:
    process = Dying(tmp_path / "log", "")
    for end in (process.end, process.kill):
        child = subprocess.Popen(["sleep", "600"])
        process.adopt(child.pid)
        assert (process.pid, readable([process.pidfd], 0.0)) == (child.pid, set())
        with pytest.raises(subprocess.TimeoutExpired):
            Child(child.pid).wait(0.0)
        end()
        assert not Path(f"/proc/{child.pid}").exists() or readable([process.pidfd], None)
    why, _ = process.died(0.0)
    assert (why.reason, process.exit_code, process.pid) == ("killed by SIGKILL", -signal.SIGKILL, 0)


def test_an_agent_that_runs_already_is_not_started(tmp_path: Path) -> None:
    child = subprocess.Popen(["sleep", "600"])
    local = LocalHost(Start(load_config([]), run_dir=tmp_path, agent=child.pid))
    local.start()
    assert (local.pid, local.leave(), local.pid) == (child.pid, child.pid, 0)
    assert child.poll() is None, "it was left, and lives"
    child.kill()
    child.wait()
