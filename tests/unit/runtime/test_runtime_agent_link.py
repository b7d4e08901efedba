"""What a host's agent tells of its workers: once, and again to a coordinator that has not heard it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest
from fake_coordinator import FakeCoordinator

from everstep.base.cause import Cause, Why
from everstep.protocol import messages as m
from everstep.runtime.host.agent_link import AgentLink, Pulses, Secrets
from everstep.runtime.host.board import Board
from everstep.runtime.link.context import Joining

TOKEN = b"0123456789abcdef"
LOST = Why(Cause.CRASH_LOOP, "it crashed at the same step again and again")


class Host:
    """An agent's link to a coordinator that the test plays, and the board of its workers."""

    def __init__(self) -> None:
        self.coordinator, self.board = FakeCoordinator(TOKEN), Board.create(2)
        self.lives: list[m.WorkerLife] = []
        joining = Joining(f"127.0.0.1:{self.coordinator.port}", "module:entry", [], "here")
        pulses = Pulses(self.board)
        self.link = AgentLink(
            joining, Secrets(TOKEN, None), pulses, lambda: self.lives, lambda: 2, lambda message: None
        )
        self.coordinator.hear(m.AgentHello)

    def says_again(self) -> m.AgentHello:
        """The hello after a lost connection."""
        self.coordinator.hang_up()
        return self.coordinator.hear(m.AgentHello)

    def close(self) -> None:
        self.link.close()
        self.coordinator.close()


@pytest.fixture
def host() -> Iterator[Host]:
    one = Host()
    yield one
    one.close()


def test_a_slot_that_was_given_up_is_told_again_until_it_runs_again(host: Host) -> None:
    host.link.slot_lost(0, LOST)
    host.link.slot_lost(1, LOST)
    assert {host.coordinator.hear(m.SlotLost).worker_id for _ in range(2)} == {0, 1}
    assert [lost.worker_id for lost in host.says_again().lost] == [0, 1]
    host.link.worker_started(m.WorkerLife(worker_id=0, incarnation=7, pid=1))
    assert host.coordinator.hear(m.WorkerStarted).worker.incarnation == 7
    assert [lost.worker_id for lost in host.says_again().lost] == [1]


def test_a_host_that_has_failed_says_so_again(host: Host) -> None:
    host.link.host_failed(LOST)
    assert host.coordinator.hear(m.HostFailed).cause is Cause.CRASH_LOOP
    failed = host.says_again().failed
    assert failed is not None and failed.reason == LOST.reason


def test_whether_it_wishes_to_leave_is_said_in_each_hello(host: Host) -> None:
    host.link.ask_to_leave()
    host.coordinator.hear(m.HostLeaving)
    assert host.says_again().leaving
    host.link.stay()
    assert not host.says_again().leaving


@pytest.mark.parametrize(("incarnation", "step"), [(3, 9), (2, 0), (4, 0)])
def test_the_step_of_a_dead_worker_is_that_of_its_own_life(host: Host, incarnation: int, step: int) -> None:
    host.board.begin(0, 3, 1)
    host.board.row(0).set(step=9)
    host.link.worker_exited(0, incarnation, Why(Cause.KILLED, "killed by SIGKILL"), 5)
    assert host.coordinator.hear(m.WorkerExited).step == step


def test_no_pulse_of_another_life_is_told(host: Host) -> None:
    host.board.begin(0, 3, 1)
    host.board.row(0).set(step=9)
    lives = [m.WorkerLife(worker_id=0, incarnation=n, pid=1) for n in (2, 3)]
    assert [(p.incarnation, p.step) for p in Pulses(host.board).of(lives, 0.0)] == [(3, 9)]


def test_a_pulse_says_that_the_process_lives(host: Host) -> None:
    """A dead process has none, whether its death was noticed or not; nor has a cell that has lost a rank."""
    host.board.begin(0, 3, 1)
    dead = subprocess.Popen(["true"])
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    for pid, limbs, told in ((os.getpid(), (), 1), (dead.pid, (), 0), (os.getpid(), (dead.pid,), 0)):
        life = m.WorkerLife(worker_id=0, incarnation=3, pid=pid, limbs=limbs)
        assert len(list(Pulses(host.board).of([life], 0.0))) == told
    dead.wait()
