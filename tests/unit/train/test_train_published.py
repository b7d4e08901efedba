"""What the leader reports is told once, even if it dies at that moment; rows that a full disk refused are written."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from everstep.base.plan import WorkerKey
from everstep.observe.events import read_events
from everstep.order.ledger import steps_of
from everstep.protocol.driver.records import LaneReport, StepOutcome
from everstep.train.published import LedgerFile, Publisher


def told(run_dir: Path) -> list[int]:
    return [event["step"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "evaluated"]


def pair(run_dir: Path) -> tuple[Publisher, Publisher]:
    """A leader that has told step 2, and the worker that will lead after it."""
    first, second = Publisher(run_dir, WorkerKey(0, 0)), Publisher(run_dir, WorkerKey(1, 0))
    first.release(1, True)
    second.release(1, False)
    first.report("evaluated", 2, True, {"metrics": {}})
    second.report("evaluated", 2, False, {"metrics": {}})
    return first, second


def test_the_leader_alone_tells(tmp_path: Path) -> None:
    pair(tmp_path)
    assert told(tmp_path) == [2]


def test_the_next_leader_tells_what_the_dead_one_could_not(tmp_path: Path) -> None:
    _, second = pair(tmp_path)
    second.report("evaluated", 4, False, {"metrics": {}})
    second.release(5, True)
    assert told(tmp_path) == [2, 4]


def test_it_does_not_repeat_what_was_told(tmp_path: Path) -> None:
    first, second = pair(tmp_path)
    first.report("evaluated", 4, True, {"metrics": {}})
    second.report("evaluated", 4, True, {"metrics": {}})  # it became the leader within the evaluation
    second.release(5, True)
    second.report("evaluated", 6, True, {"metrics": {}})
    assert told(tmp_path) == [2, 4, 6]


def step(publisher: Publisher, number: int) -> None:
    lanes = tuple(LaneReport(lane, 0.5, 1.0, 2, 7) for lane in range(2))
    publisher.hold(StepOutcome(number, lanes, {0: 0, 1: 0}, 0.5, 1.0, 0.0, 4, {}, {}), 1, {})
    publisher.release(number, True)


def warnings(run_dir: Path) -> list[str]:
    return [event["reason"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "warning"]


def test_rows_wait_for_a_full_disk_and_it_is_said_once(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, WorkerKey(0, 0))
    rows = tmp_path / "ledger" / "worker-0-0.jsonl"
    rows.symlink_to("/dev/full")
    for number in (1, 2, 3):
        step(publisher, number)
    [said] = warnings(tmp_path)
    assert "No space left on device" in said and "wait in memory" in said
    rows.unlink()
    step(publisher, 4)
    assert list(steps_of(rows.read_bytes())) == [1, 2, 3, 4]
    publisher.close()
    assert warnings(tmp_path) == [said]


def test_leaving_without_rows_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("everstep.train.published.LedgerFile", functools.partial(LedgerFile, most_bytes=150))
    monkeypatch.setattr(LedgerFile.close, "__defaults__", (0.0,))
    publisher = Publisher(tmp_path, WorkerKey(0, 0))
    (tmp_path / "ledger" / "worker-0-0.jsonl").symlink_to("/dev/full")
    for number in (1, 2, 3):
        step(publisher, number)
    publisher.close()
    waits, given_up, leaving = warnings(tmp_path)
    assert "wait in memory" in waits and "given up: 1 wait" in given_up
    assert "without having written 3 rows" in leaving and "everstep ledger" in leaving and leaving in caplog.text
