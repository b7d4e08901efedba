"""An agent that a signal has stopped: continued first, as its workers die with it, and killed if that is no help."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest

from everstep.base.config import load_config
from everstep.runtime.process import END_ALONE, is_stopped
from everstep.runtime.start import Start
from everstep.runtime.supervisor import STOPPED_S, LocalHost


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHost]:
    monkeypatch.setattr("everstep.runtime.process_figures.own_waits_s", lambda: 0.0)
    (tmp_path / "logs").mkdir()
    found = LocalHost(Start(load_config([]), "module:entry", run_dir=tmp_path))
    found.spawn([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield found
    found.end(0.0)


def looked(host: LocalHost, for_s: float, begin_s: float = 0.0) -> list[str]:
    """What is done in this time, of which every quarter of a second is looked at."""
    return [said for n in range(int(4 * for_s) + 1) if (said := host.wake(begin_s + 0.25 * n))]


def test_one_that_runs_is_left_alone(host: LocalHost) -> None:
    assert looked(host, 30.0) == []


@pytest.mark.parametrize("helps", [True, False])
def test_one_that_is_stopped(host: LocalHost, helps: bool) -> None:
    os.kill(host.pid, signal.SIGSTOP)
    while not is_stopped(host.pid):
        pass
    [said] = looked(host, STOPPED_S)
    assert said.endswith("stopped for 5.0 s: it is continued")
    if helps:
        while is_stopped(host.pid):
            pass
        assert looked(host, 30.0, STOPPED_S + 0.25) == []
    else:
        os.kill(host.pid, signal.SIGSTOP)
        while not is_stopped(host.pid):
            pass
        [said] = looked(host, STOPPED_S - 0.25, STOPPED_S + 0.25)
        assert said.endswith("stopped for 10.0 s: it is killed and started again")
        assert host.died(0.0)[0].reason == "killed by SIGKILL"


def test_one_that_was_told_to_end_before_it_could_hear_is_not_started_again(host: LocalHost) -> None:
    """Ctrl-C in the first moments: nobody has set a handler there yet, and no worker has begun."""
    host.end_alone()
    os.waitid(os.P_PIDFD, host.pidfd, os.WEXITED | os.WNOWAIT)
    host.died(0.0)
    assert host.exit_code == -END_ALONE and host.restart_at_s == inf
