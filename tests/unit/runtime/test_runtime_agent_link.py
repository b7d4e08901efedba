"""What a host's agent tells of its workers: once, and again to a coordinator that has not heard it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest
from fake_coordinator import FakeCoordinator

from everstep.base.cause import Cause, Why
from everstep.protocol import messages as m
from everstep.protocol.patience import Figures
from everstep.runtime.host.agent_link import (
    FIRST_INTERVAL_S,
    AgentLink,
    LaneTime,
    Pulses,
    Rate,
    Secrets,
    Stillness,
)
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


def test_samples_per_second_are_those_of_the_last_seconds() -> None:
    rate = Rate()
    assert rate.update(10.0, 100) == 0.0 and rate.update(10.0, 200) == 0.0, "no time has passed"
    assert rate.update(11.0, 300) == 200.0
    assert rate.update(12.0, 300) == 50.0
    assert rate.update(13.0, 300) == 0.0, "of the last two seconds alone"
    assert rate.update(17.0, 700) == 100.0, "but of two values at least"


def test_the_time_of_a_lane_is_told_anew_once_some_seconds_and_lanes_have_passed() -> None:
    times = LaneTime()
    assert times.update(10.0, 5_000_000, 3) == 0.0
    assert times.update(11.9, 25_000_000, 7) == 0.0
    assert times.update(12.0, 25_000_000, 7) == 5.0
    assert times.update(14.0, 99_000_000, 7) == 5.0, "no lane has passed"
    assert times.update(14.5, 99_000_000, 9) == 37.0
    assert times.update(15.0, 100_000_000, 10) == 37.0


def test_a_worker_is_looked_at_while_it_stands_still_alone() -> None:
    still, looked = Stillness(), []

    def look() -> Figures:
        looked.append(True)
        return Figures("T")

    assert still.update(1.0, 499, look) == {} and not looked
    found = still.update(2.0, 500, look)
    assert found["stopped"] and set(found) == {"waited_ms", "lifeless_ms", "stopped"} and looked == [True]
    assert still.update(3.0, 0, look) == {}
    assert not still.update(4.0, 900, lambda: None)["stopped"], "what was seen before it moved says nothing"


class Quiet(Host):
    """One whose link sends nothing; `sent`: what it would have, `heard`: what it gave on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.sent: list[m.AnyMessage] = []
        self.heard: list[m.AnyMessage] = []
        monkeypatch.setattr(self.link.client, "send", self.sent.append)
        monkeypatch.setattr(type(self.link.client), "connected", property(lambda client: True))
        monkeypatch.setattr(self.link, "_on_message", self.heard.append)

    def beats(self) -> list[m.Heartbeat]:
        return [one for one in self.sent if isinstance(one, m.Heartbeat)]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Quiet]:
    one = Quiet(monkeypatch)
    yield one
    one.close()


def test_heartbeats_go_out_when_they_are_due_and_count_up(quiet: Quiet) -> None:
    link = quiet.link
    quiet.board.begin(0, 3, 1)
    quiet.lives.append(m.WorkerLife(worker_id=0, incarnation=3, pid=1))
    assert link.due_in(100.0) == 0.0
    link.beat(100.0)
    assert link.due_in(100.0) == pytest.approx(FIRST_INTERVAL_S) and link.due_in(200.0) == 0.0
    link.beat(100.1)
    link.beat(100.0 + FIRST_INTERVAL_S)
    beats = quiet.beats()
    assert [beat.seq for beat in beats] == [1, 2] and {beat.agent_id for beat in beats} == {"here"}
    assert [[one.incarnation for one in beat.workers] for beat in beats] == [[3], [3]]
    assert beats[0].waited_ms == 0, "what it has waited before it first looked says nothing"


def test_nothing_is_sent_while_nobody_is_there_and_the_next_beat_is_due_as_ever(
    quiet: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(quiet.link.client), "connected", property(lambda client: False))
    quiet.link.beat(100.0)
    assert not quiet.sent and quiet.link.due_in(100.0) == pytest.approx(FIRST_INTERVAL_S)


@pytest.mark.parametrize(
    ("rtts_ms", "fixed_s", "interval_s"),
    [
        ([], None, FIRST_INTERVAL_S),
        ([1.0], None, 0.2),
        ([100.0, 30.0, 40.0], None, 0.4),
        ([900.0], None, 5.0),
        ([100.0], 3.0, 3.0),
        ([], 0.05, 0.05),
    ],
)
def test_heartbeats_are_ten_round_trips_apart_unless_it_is_said(
    quiet: Quiet, rtts_ms: list[float], fixed_s: float | None, interval_s: float
) -> None:
    quiet.link._rtts_ms.extend(rtts_ms)
    quiet.link.beat_every(fixed_s)
    assert quiet.link.interval() == pytest.approx(interval_s)


def test_a_round_trip_is_that_of_the_newest_heartbeat(quiet: Quiet) -> None:
    link = quiet.link
    link.beat(100.0)
    link._receive(m.Pong(seq=9))
    assert not link._rtts_ms and not quiet.heard
    link._receive(m.Pong(seq=1))
    assert len(link._rtts_ms) == 1 and 0.0 <= link._rtts_ms[0] < 60_000.0
    link.beat(200.0)
    assert quiet.beats()[1].rtt_ms == link._rtts_ms[0]
    other = m.HostKept(cause=Cause.CONFIG, reason="stay")
    link._receive(other)
    assert quiet.heard == [other]


def test_what_happens_to_workers_is_told_with_its_cause(quiet: Quiet) -> None:
    link, life = quiet.link, m.WorkerLife(worker_id=1, incarnation=2, pid=5)
    link.worker_started(life)
    link.worker_exited(1, 2, LOST, 77, in_order=True)
    link.notice("warning", {"reason": "x"})
    assert quiet.sent == [
        m.WorkerStarted(agent_id="here", worker=life),
        m.WorkerExited(
            agent_id="here", worker_id=1, incarnation=2, died_unix_ns=77, in_order=True, step=0, **vars(LOST)
        ),
        m.AgentNotice(agent_id="here", kind="warning", fields={"reason": "x"}),
    ]


def test_pulses_say_where_a_worker_stands_still_and_what_its_slowest_rank_is(quiet: Quiet) -> None:
    quiet.board.begin(0, 3, 1)
    quiet.board.row(0).set(step=9, phase="reduce")
    asked: list[tuple[int, int]] = []
    pulses = Pulses(quiet.board, lambda worker_id, since_ns: asked.append((worker_id, since_ns)) or "loss.py:5")
    (pulse,) = pulses.of([m.WorkerLife(worker_id=0, incarnation=3, pid=1)], 0.0)
    assert (pulse.step, pulse.phase) == (9, "reduce")
    assert pulse.at == ("loss.py:5" if pulse.still_ms else "") and bool(asked) == bool(pulse.still_ms)
    assert list(pulses.of([], 1.0)) == [] and not pulses._paces
