"""An agent that a signal has stopped: continued first, as its workers die with it, and killed if that is no help."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from math import inf
from pathlib import Path

import pytest

from everstep.base.config import load_config
from everstep.runtime.link.context import Handed, Joining
from everstep.runtime.process import END_ALONE, is_stopped, own_command
from everstep.runtime.start import Start
from everstep.runtime.supervisor import AGENT_MODULE, STOPPED_S, LocalHost


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


class EarlyServer:
    """Stands for a fork server that runs already."""

    def __init__(self) -> None:
        self.let = 0

    def hand_over(self, threads: int, preload: tuple[str, ...]) -> Handed:
        return Handed(31, 32, 4711, "", {"threads": threads})

    def let_go(self) -> None:
        self.let += 1


def test_the_first_agent_alone_takes_over_the_early_fork_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned, early = list[tuple[list[str], Sequence[int]]](), EarlyServer()
    monkeypatch.setattr(
        LocalHost, "spawn", lambda self, command, descriptors=(): spawned.append((command, descriptors))
    )
    found = LocalHost(Start(load_config([]), "module:entry", run_dir=tmp_path, early=early))  # type: ignore[arg-type]
    for _ in range(2):
        found.start()
    joinings = [Joining.from_json(command[-1]) for command, _ in spawned]
    assert [descriptors for _, descriptors in spawned] == [(31, 32), ()] and early.let == 1
    assert [joining.server and joining.server.pid for joining in joinings] == [4711, None]
    assert all(command[:-1] == own_command(AGENT_MODULE) for command, _ in spawned)
    assert all((joining.entry, joining.parent) == ("module:entry", os.getpid()) for joining in joinings)
