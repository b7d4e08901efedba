"""How a job comes to its end. Time is the test's."""

from __future__ import annotations

import json
import signal
from math import inf
from pathlib import Path

import pytest

from everstep.base.cause import Cause, Why
from everstep.observe.events import EventLog
from everstep.protocol.messages import JobEnded
from everstep.runtime.job_end import JobEnd
from everstep.runtime.lead.coordinator_setup import report_end

FINISH_S = 100.0


def told(end: JobEnd, state: str = "completed", code: int = 0, now_s: float = 0.0) -> None:
    end.told(JobEnded(state=state, cause=Cause.COMPLETED, reason="said so", exit_code=code), now_s)


def test_it_is_over_when_the_agents_have_left() -> None:
    end = JobEnd(FINISH_S)
    end.present(["a", "b"])
    told(end)
    for present, local, over in ((["a"], True, False), ([], True, False), ([], False, True)):
        end.present(present)
        end.look(1.0, local)
        assert end.over == over
    assert end.outcome is not None and (end.outcome.exit_code, end.outcome.state) == (0, "completed")


def test_agents_that_do_not_leave_are_not_waited_for_for_ever() -> None:
    for state, wait_s in (("failed", 40.0), ("completed", 40.0 + FINISH_S)):
        end = JobEnd(FINISH_S)
        end.present(["a"])
        told(end, state, 1)
        end.look(wait_s - 1, True)
        assert not end.over
        end.look(wait_s, True)
        assert end.over


def test_the_first_signal_asks_and_the_second_ends() -> None:
    end = JobEnd(FINISH_S)
    assert end.signal(signal.SIGTERM, 0.0, 30.0)
    end.look(1.0, True)
    assert not end.over and end.outcome is None
    assert not end.signal(signal.SIGINT, 2.0, 30.0)
    assert end.over and end.outcome is not None and end.outcome.exit_code == 128 + signal.SIGINT


def test_what_is_ended_by_a_signal_is_interrupted_unless_it_was_done() -> None:
    for state, code, expected in (("failed", 1, (130, "interrupted")), ("completed", 0, (0, "completed"))):
        end = JobEnd(FINISH_S)
        end.signal(signal.SIGINT, 0.0, 0.0)
        told(end, state, code)
        assert end.outcome is not None and (end.outcome.exit_code, end.outcome.state) == expected


def test_a_signal_after_the_end_changes_nothing_and_the_next_does_not_wait() -> None:
    end = JobEnd(FINISH_S)
    told(end, "failed", 3)
    assert not end.signal(signal.SIGINT, 0.0, 30.0)
    end.look(1.0, True)
    assert not end.over
    assert not end.signal(signal.SIGINT, 0.0, 30.0)
    assert end.over and end.outcome is not None


def test_a_coordinator_that_does_not_answer_a_signal() -> None:
    end = JobEnd(FINISH_S)
    end.signal(signal.SIGINT, 0.0, 30.0)
    end.look(30.0, True)
    assert end.over and end.outcome is not None and "did not answer" in end.outcome.why.reason


@pytest.mark.parametrize("grace_s", [0.0, 2.0, 30.0])
def test_all_is_over_within_the_grace(grace_s: float) -> None:
    """However the coordinator ends it, or does not."""
    for ended in (False, True):
        end = JobEnd(FINISH_S)
        end.present(["a"])
        end.signal(signal.SIGTERM, 5.0, grace_s)
        if ended:
            told(end, "interrupted", 143, 6.0)
        assert 0 < end.due_in(5.0) <= (0.9 * grace_s or 10.0)
        end.look(5.0 + (grace_s or 10.0), True)
        assert end.over


def test_without_an_answer_the_workers_end_it_alone_and_are_told_once() -> None:
    end = JobEnd(FINISH_S)
    assert not end.goes_alone(10.0, 10.0), "nobody has asked for an end"
    end.signal(signal.SIGTERM, 10.0, 30.0)
    times = ((10.5, 9.0, False), (12.0, 0.3, False), (13.0, 1.0, True), (14.0, 2.0, False))
    assert [end.goes_alone(now, unheard) for now, unheard, _ in times] == [expected for *_, expected in times]
    end.look(14.0, True)
    assert not end.over
    end.look(15.0, False)
    assert end.over and end.outcome is not None and (end.outcome.exit_code, end.outcome.state) == (143, "interrupted")


def test_a_coordinator_that_is_being_started_has_a_quarter_of_the_time_to_say_something() -> None:
    end = JobEnd(FINISH_S)
    end.signal(signal.SIGTERM, 10.0, 45.0)
    assert not end.goes_alone(19.0, 9.0, True), "a busy machine takes its time"
    assert end.goes_alone(20.0, 10.0, True)


def test_a_job_that_is_over_is_not_ended_alone() -> None:
    end = JobEnd(FINISH_S)
    end.signal(signal.SIGTERM, 0.0, 30.0)
    told(end, "interrupted", 143)
    assert not end.goes_alone(10.0, 10.0)


def test_workers_that_all_leave_without_a_word() -> None:
    end = JobEnd(FINISH_S)
    end.look(0.0, True)
    assert end.due_in(0.0) == inf, "without agents the job waits for some"
    end.present(["a", "b"])
    end.all_left("a")
    end.look(0.0, True)
    assert end.due_in(0.0) == inf, "those of the other agent go on"
    end.all_left("b")
    end.look(1.0, True)
    end.started("a")
    end.look(2.0, True)
    assert end.due_in(2.0) == inf
    end.all_left("a")
    end.look(3.0, True)
    end.look(3.0 + 15.0, True)
    assert end.over and end.outcome is not None and "has not said" in end.outcome.why.reason


def test_an_agent_that_is_gone_is_no_sign_of_the_end() -> None:
    end = JobEnd(FINISH_S)
    end.present(["a"])
    end.all_left("a")
    end.present([])
    end.look(0.0, True)
    assert end.due_in(0.0) == inf


def test_the_first_outcome_stands() -> None:
    end = JobEnd(FINISH_S)
    told(end, "failed", 3)
    end.fail(Why(Cause.CRASH_LOOP, "the coordinator cannot start"))
    assert end.over and end.outcome is not None and end.outcome.exit_code == 3


@pytest.mark.parametrize("state", ["completed", "failed"])
def test_an_end_that_was_decided_and_not_told_is_told_once_by_the_next_coordinator(tmp_path: Path, state: str) -> None:
    ended = JobEnded(state=state, cause=Cause.NONFINITE, reason="said so", exit_code=state == "failed")
    log = EventLog(tmp_path / "events.jsonl")
    log.write("job_started", step=0)
    log.write("step_committed", step=7)
    for _ in range(2):
        report_end(log, ended)
    found = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()][2:]
    assert [(one["kind"], one["step"], one["reason"]) for one in found] == [(f"job_{state}", 7, "said so")]


def test_an_end_is_told_to_nobody_where_the_events_cannot_be_read(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    log.path.mkdir()
    report_end(log, JobEnded(state="failed", cause=Cause.NONFINITE, reason="said so", exit_code=1))
    assert not list(log.path.iterdir())
