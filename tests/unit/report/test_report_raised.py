"""What the user's code raised: one block, from the log of the worker; and the lines of the run, which say it once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.display import Sentences
from everstep.cli.main import run_command
from everstep.observe.logs import RAISED_IN
from everstep.report.facts import facts_of
from everstep.report.history import History
from everstep.report.raised import raised_lines
from everstep.report.words import sentence, why_of
from told_events import T0, S, commit, event, plan, recovered, trained, write_events

RAISED = {"cause": "exception", "reason": "Bad.loss raised ValueError: no such label: 17 (task.py:17)"}
FAILED = event("job_failed", 7, step=10, state="failed", exit_code=1, **RAISED)
TRACEBACK = """Traceback (most recent call last):
  File "/usr/lib/python3/site-packages/torch/nn.py", line 3, in call
  File "/home/me/bad task.py", line 17, in loss
    raise ValueError("no such label: 17")
  File "/opt/elsewhere/everstep/train/run.py", line 95, in __iter__
ValueError: no such label: 17

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/home/me/elsewhere.py", line 1, in run
everstep.base.errors.TaskError: Bad.loss raised ValueError: no such label: 17 (task.py:17)
"""


def record(at_s: float, level: str, message: str, **more: Any) -> str:
    said = {"time_unix_ns": T0 + round(at_s * S), "level": level, "logger": "x", "message": message, "source": "log"}
    return json.dumps({**said, **more}) + "\n"


def failed_run(run_dir: Path, *records: str, end: dict[str, Any] = FAILED) -> History:
    write_events(run_dir, [*trained(), end])
    (run_dir / "logs").mkdir(exist_ok=True)
    (run_dir / "logs" / "worker-1.jsonl").write_text("".join(records))
    return History(run_dir).load()


def test_the_block_names_exception_line_lane_and_the_command_for_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lane = record(6.5, "error", f"{RAISED_IN}3 of step 11 (samples 52, 17)")
    last = record(6.6, "critical", RAISED["reason"], exception=TRACEBACK)
    history = failed_run(tmp_path, lane, last, record(6.7, "info", "bye"))
    assert raised_lines(tmp_path, history.facts) == [
        "Bad.loss raised ValueError: no such label: 17 (task.py:17)",
        "at /home/me/bad task.py:17, in lane 3 of step 11 (samples 52, 17), in worker 1",
        "the job ended after step 10, without a checkpoint",
        f"traceback and log: everstep logs {tmp_path} --worker 1 --level error",
    ]
    (tmp_path / "job.json").write_text('{"task": "bad.py:Bad", "argv": [], "config": {}}')
    assert run_command(["status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.strip() for line in shown if line.startswith("  ")] == raised_lines(tmp_path, history.facts)[1:]


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    bare = record(6.6, "critical", "ValueError: x", exception="damaged")
    history = failed_run(tmp_path, bare)
    assert raised_lines(tmp_path, history.facts)[:2] == ["ValueError: x", "in worker 1"]
    assert raised_lines(tmp_path, failed_run(tmp_path, record(6.6, "info", "x")).facts) == []
    killed = {**FAILED, "cause": "killed", "reason": "killed by SIGKILL"}
    assert raised_lines(tmp_path, failed_run(tmp_path, bare, end=killed).facts) == []


def test_a_log_on_another_host_is_said_to_be_there(tmp_path: Path) -> None:
    joined = event("worker_joined", 2.2, worker_id=1, incarnation=0, pid=1, host="far")
    raised = [event("worker_evicted", 6, worker_id=i, incarnation=0, **RAISED) for i in (2, 1)]
    facts = facts_of([*trained(), joined, *raised, FAILED])
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-2.jsonl").touch()
    assert raised_lines(tmp_path, facts) == [
        RAISED["reason"],
        "in step 11, in worker 1, as in worker 2",
        "the job ended after step 10, without a checkpoint",
        "traceback and log: on host far, in logs/ of its own directory",
    ]
    here = facts_of([*trained(), *raised, FAILED])
    assert raised_lines(tmp_path, here) == [], "there is one host: the log is lost"
    (tmp_path / "logs" / "worker-1.jsonl").touch()
    assert raised_lines(tmp_path, facts) == []


def test_others_that_raised_are_named_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    raised = [event("worker_evicted", 6, worker_id=i, incarnation=0, **RAISED) for i in (10, 2, 1, 3)]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-1.jsonl").write_text(record(6.6, "critical", "ValueError: x", exception="damaged"))
    said = raised_lines(tmp_path, facts_of([*trained([[1, 2, 3, 10]]), *raised, FAILED]))
    assert said[1] == "in step 11, in worker 1, as in worker 2, worker 3, worker 10"


def test_the_lines_of_a_run_say_an_exception_once() -> None:
    text = RAISED["reason"]
    lines = Sentences()
    evicted = event("worker_evicted", 5, worker_id=1, incarnation=0, **RAISED)
    assert lines.of(evicted) == f"worker 1 was evicted: {text}"
    led_to = f"worker 0 failed at step 1 as worker 1 did: {text}: a checkpoint is taken first"
    shown = [
        lines.of(event("generation_started", 6, generation=2, workers=[0], cause="exception", reason=led_to)),
        lines.of(event("fallback", 6, step=1, cause="exception", reason=f"every holder is gone ({text}): from disk")),
        lines.of({**FAILED, "reason": f"worker 1 (incarnation 0): {text}; checkpoint of step 1 in x"}),
    ]
    assert shown == [
        "generation 2 with worker 0: worker 0 failed at step 1 as worker 1 did: a checkpoint is taken first",
        "fallback: every holder is gone: from disk",
        "failed; checkpoint of step 1 in x",
    ]
    assert Sentences().of(FAILED) == f"failed: {text}"
    assert lines.of({**evicted, "worker_id": 0}) == "worker 0 raised the same"
    why = f"no worker holds the training state any more (worker 1 (incarnation 0): {text}): waiting"
    waits = event("waiting", 7, step=1, cause="exception", reason=why)
    assert lines.of(waits) == "waiting: all workers raised an exception, and are started again"
    assert Sentences().of({**waits, "cause": "killed", "reason": "x"}) == "waiting: x"
    other = event("worker_evicted", 8, worker_id=0, incarnation=0, cause="exception", reason="KeyError: 'x'")
    assert lines.of(other) == "worker 0 was evicted: KeyError: 'x'"


def test_a_long_exception_is_said_once_though_lines_are_shortened() -> None:
    lines, text = Sentences(), f"RuntimeError: {'a second time through the graph ' * 15}(train.py:20)"
    first = event("worker_evicted", 5, worker_id=1, incarnation=0, cause="exception", reason=text)
    assert lines.of(first) == f"worker 1 was evicted: {text}"
    led_to = f"worker 0 failed after step 1, as worker 1 did: {text}: a checkpoint is taken first"
    led_to += f"; worker 0 (incarnation 1): {text}"
    again = event("generation_started", 6, generation=2, workers=[0], cause="exception", reason=led_to)
    said = "worker 0 failed after step 1, as worker 1 did: a checkpoint is taken first"
    assert lines.of(again) == f"generation 2 with worker 0: {said}"


def test_a_plan_gives_its_reason_once() -> None:
    lines, why = Sentences(), "worker 0 (incarnation 0): killed by SIGKILL"
    planned = event("generation_started", 6, generation=2, workers=[1], cause="killed", reason=why)
    assert lines.of(planned) == "generation 2 with worker 1: worker 0: killed by SIGKILL"
    ends = "worker 1: step 5: the loss of lane 0 is not finite"
    last = event(
        "generation_started",
        7,
        generation=3,
        workers=[1],
        cause="nonfinite",
        reason=f"{ends}: a checkpoint is taken first",
    )
    assert lines.of(last) == f"generation 3 with worker 1: {ends}: a checkpoint is taken first"
    saved = event("checkpoint_completed", 8, step=5, worker_id=1, tier="disk", cause="nonfinite", reason=ends)
    assert str(lines.of(saved)).startswith("checkpoint of step 5") and ends not in str(lines.of(saved))
    long = f"{'a reason ' * 100}in the end"
    lines.of({**last, "reason": f"{long}: a checkpoint is taken first"})
    assert "a reason" not in str(lines.of({**saved, "reason": long}))
    lines = Sentences()
    lines.of(planned)
    leads = {"cause": "killed", "reason": f"worker 1 is the first member of generation 2: {why}"}
    first = "worker 1 is the first member of generation 2"
    assert lines.of(event("leader_changed", 6, worker_id=1, **leads)) == f"the leader is now worker 1: {first}"


def test_an_exception_of_all_is_one_fault_that_training_did_not_survive(tmp_path: Path) -> None:
    """The survivors' recovery served the last checkpoint alone: no step was committed after it."""
    why = f"worker 0 (incarnation 0) failed after step 10, as worker 1 (incarnation 2) did: {RAISED['reason']}"
    first, second = (
        event("worker_evicted", at_s, worker_id=i, incarnation=0, **RAISED) for at_s, i in ((6, 1), (6.3, 0))
    )
    planned = [plan(6.1, 2, [[0, 2, 3]], "exception", why), plan(6.4, 3, [[2, 3]], "exception", why)]
    saved = event("checkpoint_completed", 6.5, step=10, tier="disk")
    end = {**FAILED, "reason": f"{why}; checkpoint of step 10 in x"}
    told = [*trained(), first, planned[0], second, planned[1], saved, recovered(1, 6, 6.6), end]
    write_events(tmp_path, told)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "worker-1.jsonl").write_text(record(6, "critical", RAISED["reason"], exception=TRACEBACK))
    history = History(tmp_path).load()
    assert history.facts.faults == 1
    exception = f"raised an exception ({RAISED['reason']})"
    assert [one.line() for one in history.facts.incidents.all] == [
        f"worker 1 raised an exception; worker 0 (leader) {exception}; the job failed"
    ]
    said = history.headline(False)
    assert said.text == f"Failed after step 10: {RAISED['reason']}."
    assert raised_lines(tmp_path, history.facts)[1:3] == [
        "at /home/me/bad task.py:17, in step 11, in worker 1, as in worker 0",
        "the job ended after step 10, with a checkpoint of step 10",
    ]
    went_on = [*told[:-1], commit(11, 6.9), end]
    assert "training went on" in facts_of(went_on).incidents.all[0].line()


def test_lives_are_named_where_they_are_not_the_first() -> None:
    said = {"cause": "killed", "reason": "worker 1 (incarnation 0), then worker 12 (incarnation 3): killed"}
    assert sentence(event("waiting", 1, **said)) == "waiting: worker 1, then life 3 of worker 12: killed"
    assert why_of(event("waiting", 1, **said))[1] == "worker 1, then life 3 of worker 12: killed"


def test_a_checkpoint_that_was_skipped_is_no_failure() -> None:
    said = {"tier": "disk", "step": 5, "reason": "worker 1 left"}
    left = sentence(event("checkpoint_skipped", 1, **said, cause="busy"))
    assert left == "checkpoint of step 5 on disk skipped, the next one replaces it: worker 1 left"
    failed = sentence(event("checkpoint_failed", 1, **said, cause="disk"))
    assert failed == "no checkpoint of step 5 on disk: worker 1 left"


def test_a_snapshot_in_memory_is_no_checkpoint_to_go_on_from() -> None:
    done = {"cause": "scheduled", "reason": "every 5 steps", "duration_s": 0.1, "size_bytes": 1, "stall_s": 0.0}
    tiers = [("disk", 5), ("memory", 10)]
    events = [event("checkpoint_completed", at, tier=tier, step=at, **done) for tier, at in tiers]
    assert facts_of([*trained(), *events]).checkpoint_step == 5
