"""The progress board: what a worker writes is what its agent reads, across processes, and cheaply."""

from __future__ import annotations

import os
import time

import pytest

from everstep.base.errors import ConfigError, InvariantViolation
from everstep.runtime.host.agent_link import LaneTime
from everstep.runtime.host.board import MAX_ROWS, OPERATIONS, PHASES, ROW_BYTES, Board


def test_rows_are_apart() -> None:
    board = Board.create(4)
    board.row(1).set(step=7, phase="reduce", samples=64, generation=3)
    pulse = board.read(1)
    assert (pulse.step, pulse.phase, pulse.samples, pulse.generation, pulse.counter) == (7, "reduce", 64, 3, 1)
    assert board.read(0).counter == 0 and board.read(2).counter == 0
    board.row(1).reset(incarnation=2, pid=55)
    pulse = board.read(1)
    assert (pulse.step, pulse.phase, pulse.incarnation, pulse.pid, pulse.generation) == (0, "starting", 2, 55, 0)


def test_device_memory_is_of_one_life() -> None:
    board = Board.create(1)
    assert (board.read(0).allocated_bytes, board.read(0).reserved_bytes) == (0, 0)
    board.row(0).device_memory(5 << 30, 8 << 30)
    assert (board.read(0).allocated_bytes, board.read(0).reserved_bytes) == (5 << 30, 8 << 30)
    board.row(0).reset(incarnation=1, pid=1)
    assert board.read(0).reserved_bytes == 0


def test_a_life_is_warm_once_it_has_updated_what_it_computed_and_may_be_chilled() -> None:
    row = (board := Board.create(1)).row(0)
    cold = []
    for phase in ("update", "forward", "backward", "update", "idle"):
        row.set(phase=phase)
        cold.append(board.read(0).cold)
    assert cold == [True, True, True, True, False]
    row.chill()
    assert board.read(0).cold


def test_every_phase_can_be_told() -> None:
    board = Board.create(1)
    for phase in PHASES:
        board.row(0).set(phase=phase)
        assert board.read(0).phase == phase


def test_another_process_sees_it_through_the_descriptor() -> None:
    board = Board.create(3)
    pid = os.fork()
    if pid == 0:
        Board.attach(board.fd).row(2).set(step=11, samples=5)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert (board.read(2).step, board.read(2).samples) == (11, 5)


def test_standing_still_is_measured_from_the_last_tick() -> None:
    board = Board.create(1)
    row = board.row(0)
    row.tick()
    pulse = row.read()
    assert pulse.still_ms(pulse.beat_ns + 1_500_000_000) == 1500
    assert pulse.still_ms(pulse.beat_ns - 1) == 0
    before = pulse.beat_ns
    row.tick()
    assert row.read().beat_ns >= before and row.read().counter == 2


def test_limits() -> None:
    with pytest.raises(ConfigError, match="4096"):
        Board.create(MAX_ROWS + 1)
    board = Board.create(2)
    with pytest.raises(InvariantViolation):
        board.row(2)
    with pytest.raises(InvariantViolation):
        board.row(-1)
    fd = os.memfd_create("no board")
    os.ftruncate(fd, ROW_BYTES + 1)
    with pytest.raises(InvariantViolation):
        Board.attach(fd)
    os.close(fd)


def test_setting_is_cheap() -> None:
    row = Board.create(1).row(0)
    best = min(_time_sets(row) for _ in range(20))
    assert best < 20e-6  # an order of magnitude above what it takes on a quiet machine


def _time_sets(row) -> float:  # type: ignore[no-untyped-def]
    start = time.perf_counter()
    for step in range(200):
        row.set(step=step, phase="load", samples=step)
    return (time.perf_counter() - start) / 200


def test_computing_is_timed_from_phase_to_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000]
    monkeypatch.setattr("everstep.runtime.host.board._monotonic_ns", lambda: now[0])
    board = Board.create(1)
    row = board.row(0)
    for phase, then in (("load", 5), ("forward", 30), ("backward", 60), ("load", 7), ("forward", 20), ("reduce", 500)):
        row.set(phase=phase)
        now[0] += then
    row.set(phase="agree")
    pulse = board.read(0)
    assert (pulse.compute_ns, pulse.lanes) == (110, 2)
    spent = dict(zip(PHASES, pulse.spent_ns, strict=True))
    assert {name: ns for name, ns in spent.items() if ns} == {"load": 12, "forward": 50, "backward": 60, "reduce": 500}
    row.sent("transfer", 7)
    row.sent("transfer", 8)
    assert dict(zip(OPERATIONS, board.read(0).sent_bytes, strict=True)) == {"reduce": 0, "transfer": 15, "heal": 0}
    row.reset(1, 5)
    assert (board.read(0).compute_ns, board.read(0).lanes) == (0, 0)


def test_time_per_lane_is_that_of_the_last_lanes() -> None:
    time = LaneTime()
    assert time.update(0.0, 0, 0) == 0.0
    assert time.update(1.0, 100_000_000, 1) == 0.0
    assert time.update(2.5, 400_000_000, 4) == 100.0
    assert time.update(5.0, 400_000_000, 4) == 100.0, "nothing new was computed"
    assert time.update(6.0, 1_000_000_000, 6) == 300.0


def test_a_hidden_row_is_seen_again_afterwards() -> None:
    row = Board.create(1).row(0)
    assert not row.hidden(1)
    row.hide(1000)
    assert row.hidden(999)
    assert not row.hidden(1000)
    row.hide(1000)
    row.reset(1, 5)
    assert not row.hidden(1), "another life is not cut off"
