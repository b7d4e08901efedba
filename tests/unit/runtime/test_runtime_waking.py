"""An agent that a signal has stopped: continued first, as its workers die with it, and killed if that is no help."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.base.config import load_config
from everstep.runtime.process import is_stopped
from everstep.runtime.supervisor import STOPPED_S, LocalHost


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LocalHost]:
    (tmp_path / "logs").mkdir()
    found = LocalHost(tmp_path, load_config([]), "module:entry")
    found.spawn([sys.executable, "-c", "import time; time.sleep(1000)"])
    yield found
    found.end(0.0)


def looked(host: LocalHost, first_s: float, last_s: float) -> list[str]:
    """What is done in this time, of which every quarter of a second is looked at."""
    begin_s = host._moves._heard_s
    times = [begin_s + first_s + 0.25 * n for n in range(int(4 * (last_s - first_s)))]
    return [said for now_s in times if (said := host.wake(now_s))]


def test_one_that_runs_is_left_alone(host: LocalHost) -> None:
    assert looked(host, 0.0, 30.0) == []


@pytest.mark.parametrize(("after_s", "word"), [(STOPPED_S, "continued"), (2 * STOPPED_S, "killed")])
def test_one_that_is_stopped(host: LocalHost, after_s: float, word: str) -> None:
    os.kill(host.pid, signal.SIGSTOP)
    while not is_stopped(host.pid):
        pass
    begin_s = host._moves._heard_s
    assert looked(host, 0.0, STOPPED_S) == []
    said = host.wake(begin_s + after_s)
    assert word in said
    if word == "killed":
        assert host.died(0.0)[0].reason == "killed by SIGKILL"
    else:
        while is_stopped(host.pid):
            pass
        assert host.wake(begin_s + after_s + 1) == ""
