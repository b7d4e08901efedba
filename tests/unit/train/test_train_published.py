"""What the leader reports is told once, even if it dies at that moment; rows that a full disk refused are written."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path

import pytest

from everstep.base.plan import WorkerKey
from everstep.observe.events import read_events
from everstep.order.ledger import steps_of
from everstep.protocol.driver.records import LaneReport, StepOutcome
from everstep.runtime.files.host_directory import ARRIVED_FILE
from everstep.train.published import LOOK_EVERY, LedgerFile, Publisher


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


def step(publisher: Publisher, number: int, leads: bool = True) -> None:
    lanes = tuple(LaneReport(lane, 0.5, 1.0, 2, 7) for lane in range(2))
    publisher.hold(StepOutcome(number, lanes, {0: 0, 1: 0}, 0.5, 1.0, 0.0, {}, {}), 1, {})
    publisher.release(number, leads)


def again(run_dir: Path, loss: float, *numbers: int) -> tuple[int, float, float] | None:
    """A job that was told up to step 3, each with loss 0.5, repeats these steps with this loss."""
    publisher = Publisher(run_dir, WorkerKey(0, 0))
    for number in (1, 2, 3):
        step(publisher, number)
    publisher.close()
    resumed = Publisher(run_dir, WorkerKey(0, 0))
    for number in numbers:
        lanes = (LaneReport(0, loss, 1.0, 2, 7),)
        resumed.hold(StepOutcome(number, lanes, {0: 0}, loss, 1.0, 0.0, {}, {}), 1, {})
        found = resumed.release(number, True)
    return found


def test_a_repeated_step_is_compared_with_the_loss_that_was_told(tmp_path: Path) -> None:
    for name in ("same", "other", "later"):
        (tmp_path / name).mkdir()
    assert again(tmp_path / "same", 0.5, 2, 3) is None
    assert again(tmp_path / "other", 0.75, 2, 3) == (2, 0.5, 0.75)
    assert again(tmp_path / "later", 0.75, 4, 5) is None


def steps_told(run_dir: Path) -> list[int]:
    return [event["step"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "step_committed"]


def of_two_hosts(tmp_path: Path) -> tuple[Publisher, Publisher]:
    """The leader, and who leads next, on hosts with directories of their own."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    return Publisher(tmp_path / "a", WorkerKey(0, 0)), Publisher(tmp_path / "b", WorkerKey(1, 0))


def test_the_next_leader_tells_all_steps_that_may_have_been_lost_with_a_host(tmp_path: Path) -> None:
    """Nothing of what the leader has told had arrived, and its host is gone with its disk."""
    leader, other = of_two_hosts(tmp_path)
    for number in range(1, 1001):
        step(leader, number)
        step(other, number, leads=False)
    step(other, 1001)
    assert steps_told(tmp_path / "b") == list(range(1, 1002))


def test_what_is_in_the_log_of_the_job_is_kept_no_longer(tmp_path: Path) -> None:
    _, other = of_two_hosts(tmp_path)
    for number in range(1, 301):
        step(other, number, leads=False)
        (tmp_path / "b" / ARRIVED_FILE).write_text(f'{{"through": {number - 7}}}')
    assert len(other.untold) <= LOOK_EVERY + 7
    step(other, 301)
    assert steps_told(tmp_path / "b") == list(range(294, 302))


@pytest.mark.parametrize("text", ["", "[]", '{"through": "x"}', '{"through": true}', '{"through": -1}', "\0"])
def test_a_senseless_word_of_what_was_told_counts_for_nothing(tmp_path: Path, text: str) -> None:
    _, other = of_two_hosts(tmp_path)
    (tmp_path / "b" / ARRIVED_FILE).write_text(text)
    step(other, 1, leads=False)
    step(other, 2)
    assert steps_told(tmp_path / "b") == [1, 2]


def test_what_the_leader_wrote_into_a_shared_file_is_told_once(tmp_path: Path) -> None:
    leader, other = Publisher(tmp_path, WorkerKey(0, 0)), Publisher(tmp_path, WorkerKey(1, 0))
    for number in range(1, 400):
        step(leader, number)
        step(other, number, leads=False)
    assert len(other.untold) <= LOOK_EVERY
    for number in (400, 401):
        step(other, number, leads=False)  # the leader dies before it tells them
    step(other, 402)
    assert steps_told(tmp_path) == list(range(1, 403))


def test_a_step_that_others_lacked_is_told_although_newer_ones_were(tmp_path: Path) -> None:
    """The leader between had come later: it did not know what the one before it had not told."""
    late, other = Publisher(tmp_path, WorkerKey(0, 1)), Publisher(tmp_path, WorkerKey(1, 0))
    for number in (1, 2, 3, 4):
        step(other, number, leads=False)
    for number in (3, 4):
        step(late, number)
    step(other, 5)
    assert steps_told(tmp_path) == [3, 4, 1, 2, 5]


def test_whoever_comes_late_learns_what_has_not_been_told(tmp_path: Path) -> None:
    """It leads at once, as its number is the lowest; the leader is gone with its host."""
    _, other = of_two_hosts(tmp_path)
    for number in (1, 2, 3):
        step(other, number, leads=False)
    (tmp_path / "b" / ARRIVED_FILE).write_text('{"through": 1}')
    (tmp_path / "c").mkdir()
    late = Publisher(tmp_path / "c", WorkerKey(0, 1))
    late.learn(other.untold.packed(), 3)
    (tmp_path / "c" / ARRIVED_FILE).write_text('{"through": 1}')
    step(late, 4)
    assert steps_told(tmp_path / "c") == [2, 3, 4]
    late.learn(other.untold.packed(), 3)  # what it has told itself
    step(late, 5)
    assert steps_told(tmp_path / "c") == [2, 3, 4, 5]


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"[1]", b"[{}]", b'[{"step": 1, "generation": 1, "time_unix_ns": 1, "kind": "x"}]']
)
def test_what_a_donor_says_that_is_no_step_is_left_out(tmp_path: Path, data: bytes) -> None:
    late = Publisher(tmp_path, WorkerKey(0, 1))
    late.learn(data, 3)
    step(late, 4)
    assert steps_told(tmp_path) == [4]


def test_a_life_that_begins_late_tells_nothing_of_long_ago_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have died, and steps are done again that were told so long ago that only the end of the log is read."""
    monkeypatch.setattr("everstep.train.published.TAIL_BYTES", 2000)
    before = Publisher(tmp_path, WorkerKey(0, 0))
    for number in range(1, 101):
        step(before, number)
    again = Publisher(tmp_path, WorkerKey(0, 1))
    for number in range(11, 103):
        step(again, number)
    assert steps_told(tmp_path) == list(range(1, 103))


def test_no_more_steps_are_kept_than_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("everstep.train.published.MOST_UNTOLD", 250)
    _, other = of_two_hosts(tmp_path)
    for number in range(1, 1001):
        step(other, number, leads=False)
    step(other, 1001)
    found = steps_told(tmp_path / "b")
    assert 250 <= len(found) <= 250 + LOOK_EVERY and found[-1] == 1001
    [said] = [r.getMessage() for r in caplog.records if "may never be told" in r.getMessage()]
    assert "step 1 " in said or "steps 1 " in said


def warnings(run_dir: Path) -> list[str]:
    return [event["reason"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "warning"]


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.train.published.open_below", lambda *_: os.open("/dev/full", os.O_RDWR))


def test_rows_wait_for_a_full_disk_and_it_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = Publisher(tmp_path, WorkerKey(0, 0))
    rows = tmp_path / "ledger" / "worker-0-0.jsonl"
    with monkeypatch.context() as disk:
        full_disk(disk)
        for number in (1, 2, 3):
            step(publisher, number)
    [said] = warnings(tmp_path)
    assert "No space left on device" in said and "wait in memory" in said
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
    full_disk(monkeypatch)
    for number in (1, 2, 3):
        step(publisher, number)
    publisher.close()
    waits, given_up, leaving = warnings(tmp_path)
    assert "wait in memory" in waits and "given up: 1 wait" in given_up
    assert "without having written 3 rows" in leaving and "everstep ledger" in leaving and leaving in caplog.text


def test_the_next_leader_tells_what_was_reported_of_the_very_step_that_was_told_last(tmp_path: Path) -> None:
    leader, other = Publisher(tmp_path, WorkerKey(0, 0)), Publisher(tmp_path, WorkerKey(1, 0))
    for number in (1, 2):
        step(leader, number)
        step(other, number, leads=False)
    other.report("evaluated", 2, False, {"metrics": {}})  # the leader dies before it can
    step(other, 3)
    assert told(tmp_path) == [2] and steps_told(tmp_path) == [1, 2, 3]


def test_the_leader_tells_that_the_directory_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.observe.events.SLOW_S", -1.0)
    leader, other = Publisher(tmp_path, WorkerKey(0, 0)), Publisher(tmp_path, WorkerKey(1, 0))
    step(other, 1, leads=False)
    assert not warnings(tmp_path)
    for number in (1, 2):
        step(leader, number)
    [said] = warnings(tmp_path)
    assert f"{tmp_path / 'ledger'} is slow: writing worker-0-0.jsonl there" in said


def test_the_leader_tells_that_the_clock_was_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All notice, also those that lead later; a clock that runs a little fast was not set."""
    leader, other = Publisher(tmp_path, WorkerKey(0, 0)), Publisher(tmp_path, WorkerKey(1, 0))
    begun_ns = time.time_ns()
    for number, set_s in enumerate((0.0, 3600.0, 3600.5, 0.5), start=1):
        monkeypatch.setattr("everstep.train.published.time.time_ns", lambda s=set_s: begun_ns + round(s * 1e9))
        monkeypatch.setattr("everstep.train.published.time.clock_gettime_ns", lambda clock: 10**12)
        step(leader, number, leads=number > 1)
        step(other, number, leads=False)
    assert warnings(tmp_path) == [
        "the clock of this host was set forward by 3600.0 s",
        "the clock of this host was set back by 3600.0 s",
    ]
    step(other, 5)
    assert len(warnings(tmp_path)) == 2
