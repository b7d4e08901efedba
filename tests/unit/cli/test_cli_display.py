"""Events in, facts out; and how they are shown."""

from __future__ import annotations

import io
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from everstep.base.cause import Cause, Why
from everstep.cli.display import (
    FinalStep,
    JsonDisplay,
    LiveDisplay,
    Output,
    PlainDisplay,
    Watcher,
    choose_display,
    duration,
    sentence,
    step_line,
    summary,
    summary_lines,
)
from everstep.cli.status import workers_of
from everstep.observe.events import EventLog, read_events
from everstep.report.facts import Facts, facts_of, present_speed
from everstep.report.tail import Folder

S = 1_000_000_000


def event(kind: str, at_s: float = 0.0, **fields: Any) -> dict[str, Any]:
    return {"time_unix_ns": int(at_s * S) + S, "kind": kind, **fields}


def commit(step: int, at_s: float, loss: float = 1.0, generation: int = 1) -> dict[str, Any]:
    return event("step_committed", at_s, step=step, loss=loss, samples=64, generation=generation)


def plan(generation: int, lanes: dict[str, list[int]], leader: int, at_s: float = 0.0) -> dict[str, Any]:
    workers = sorted(int(i) for i in lanes)
    return event("generation_started", at_s, generation=generation, lanes=lanes, leader=leader, workers=workers)


KILLED = {"cause": "killed", "reason": "killed by SIGKILL"}
EVICTED = event("worker_evicted", 2.5, worker_id=0, incarnation=0, step=2, **KILLED)
JOB = [
    event("job_started", 0),
    event("worker_joined", 0.5, worker_id=0, incarnation=0),
    event("worker_joined", 0.5, worker_id=1, incarnation=0),
    plan(1, {"0": [0, 1], "1": [2, 3]}, 0, 0.6),
    commit(1, 1, 2.0),
    commit(2, 2, 1.5),
    event("fault_injected", 2.4, reason="chaos strikes"),
    EVICTED,
    plan(2, {"1": [0, 1, 2, 3]}, 1, 2.6),
    event("recovery_completed", 2.9, duration_s=0.4, reason="killed by SIGKILL"),
    commit(3, 3, 1.25, 2),
    event("worker_joined", 3.5, worker_id=0, incarnation=1),
    event("coordinator_restarted", 3.6),
    event("recovery_completed", 3.7, duration_s=0.1),
    event("evaluated", 3.8, step=3, metrics={"accuracy": 0.5}),
    commit(4, 4, 1.0, 2),
    event("job_completed", 5, state="completed", exit_code=0),
]


def test_what_is_known_so_far() -> None:
    facts = facts_of(JOB[:7])
    assert (facts.condition.state, facts.course.step, facts.course.loss, facts.crew.generation) == (
        "running",
        2,
        1.5,
        1,
    )
    assert present_speed(facts) == pytest.approx(64)
    assert facts.course.eta_s(4) == pytest.approx(2)
    assert (facts.course.eta_s(None), facts.course.eta_s(2)) == (None, None)
    assert [(w.role, w.lanes) for _, w in sorted(facts.crew.workers.items())] == [
        ("leader", (0, 1)),
        ("active", (2, 3)),
    ]
    facts.take(EVICTED)
    assert (facts.condition.state, facts.condition.cause) == ("recovering", Cause.KILLED)
    assert [w["worker_id"] for w in workers_of(facts)] == [1]


def test_a_returning_worker_joins() -> None:
    assert {w["worker_id"]: w["role"] for w in workers_of(facts_of(JOB[:12]))} == {0: "joining", 1: "leader"}


def test_the_summary_at_the_end() -> None:
    digest = {"step": 4, "model": "ab", "state": "cd"}
    result = summary(facts_of(JOB), 0, "runs/x", digest, missing_rows="")
    assert result == {
        "kind": "summary",
        "state": "completed",
        "exit_code": 0,
        "cause": None,
        "reason": None,
        "steps": 4,
        "faults_survived": 2,
        "steps_lost": 0,
        "nonfinite": None,
        "recoveries": 2,
        "recovery_s": {"median": 0.25, "max": 0.4},
        "generations": 2,
        "checkpoints": {"completed": 0, "failed": 0, "skipped": 0, "newest": None},
        "ledger_complete": True,
        "digest": digest,
        "loss": 1.0,
        "metrics": {"accuracy": 0.5},
        "logged": None,
        "wall_s": 5.0,
        "run_dir": "runs/x",
    }
    rows = dict(summary_lines(result))
    assert rows["faults survived"] == "2"
    assert rows["recoveries"] == "2, median 250 ms, worst 400 ms to the next step"
    assert rows["test accuracy"] == "0.5000"
    assert rows["ledger"] == "complete"


@pytest.mark.parametrize(("code", "after"), [(0, 1), (130, 130), (3, 3)])
def test_a_ledger_that_lacks_rows_is_not_in_order(code: int, after: int) -> None:
    state, unseen = (summary(facts_of(JOB), code, "x", None)[key] for key in ("state", "ledger_complete"))
    assert not unseen, "nobody has looked"
    result = summary(facts_of(JOB), code, "x", None, missing_rows="step 2 has no row")
    assert (result["state"], result["exit_code"], result["ledger_complete"]) == (state, after, False)
    assert result["reason"] == "step 2 has no row"
    assert dict(summary_lines(result))["ledger"] == "incomplete"


def test_a_fallback_loses_steps_and_says_so() -> None:
    events = [*JOB[:6], event("fallback", 2.2, step=0, reason="all workers were lost"), commit(1, 3)]
    facts = facts_of(events)
    assert (facts.course.steps_lost, facts.course.step) == (2, 1)
    assert summary(facts, 0, "x", None)["steps_lost"] == 2


def test_a_checkpoint_that_is_refused_loses_no_steps() -> None:
    refused = event("fallback", 2.2, step=1, what="checkpoint", cause="corrupt", reason="a block differs")
    facts = facts_of([*JOB[:6], refused])
    assert (facts.course.steps_lost, facts.course.step) == (0, 2)


@pytest.mark.parametrize(("code", "state"), [(1, "failed"), (3, "failed"), (130, "interrupted"), (143, "interrupted")])
def test_the_summary_of_a_job_that_ended_badly(code: int, state: str) -> None:
    result = summary(facts_of(JOB[:7]), code, "x", None, Why(Cause.QUORUM, "too few"))
    assert (result["state"], result["exit_code"], result["digest"]) == (state, code, None)
    assert (result["cause"], result["reason"]) == ("quorum", "too few")
    assert result["recovery_s"] == {"median": None, "max": None}
    assert summary_lines(result)


def test_copies_in_memory_are_no_step_to_go_on_from() -> None:
    kept = event("checkpoint_completed", tier="memory", step=3)
    rows = dict(summary_lines(summary(facts_of([*JOB, kept]), 0, "x", None)))
    assert rows["checkpoints"] == "1, none that outlives the job"


def test_sentences_name_the_reason() -> None:
    assert sentence(EVICTED) == "worker 0 was evicted: killed by SIGKILL"
    assert sentence(JOB[9]) == "recovered in 400 ms: killed by SIGKILL"
    timed = event("recovery_completed", duration_s=0.4, phases_s={"notice": 0.1, "redo": 0.3}, reason="killed")
    assert sentence(timed) == "recovered in 100 ms, next step after 400 ms: killed"
    assert sentence(event("waiting", reason="2 of 3 workers")) == "waiting: 2 of 3 workers"
    assert sentence(commit(1, 1)) is None


def test_an_interrupted_job_has_not_failed() -> None:
    assert sentence(event("job_failed", state="interrupted", reason="interrupted by SIGINT")) == "interrupted by SIGINT"
    assert sentence(event("job_failed", state="failed", reason="out of luck")) == "failed: out of luck"


def test_a_worker_that_is_not_needed_is_a_spare() -> None:
    first = plan(1, {"0": [0, 1], "1": [2, 3]}, leader=0)
    facts = facts_of([event("job_started", workers=2), first, event("worker_joined", worker_id=2, incarnation=0)])
    assert [w["role"] for w in workers_of(facts)] == ["leader", "active", "spare"]
    facts.take(plan(2, {"0": [0, 1, 2, 3]}, leader=0))
    facts.take(event("worker_joined", worker_id=1, incarnation=1))
    assert {w["worker_id"]: w["role"] for w in workers_of(facts)} == {0: "leader", 1: "joining", 2: "joining"}


def plain_lines(log_every: int) -> list[str]:
    out = io.StringIO()
    display, facts = PlainDisplay(log_every, FinalStep(4), out), Facts()
    for one in JOB:
        facts.take(one)
        display.event(one, facts)
    return out.getvalue().splitlines()


def test_plain_lines() -> None:
    lines = plain_lines(2)
    steps = [line for line in lines if line.startswith("step ")]
    assert steps[0] == "step 2/4  loss 1.5000  64 samples/s  eta 2s  generation 1"
    assert [line.split()[1] for line in steps] == ["2/4", "4/4"]
    assert "worker 0 was evicted: killed by SIGKILL" in lines
    assert "\x1b" not in "".join(lines)


def test_small_numbers_are_none_that_read_as_zero() -> None:
    """A step takes 160 s, and its loss is small."""
    known = facts_of([*JOB[:4], commit(1, 160, 4e-5), commit(2, 320, 3e-5)])
    assert step_line(known, 2, 9).startswith("step 2/9  loss 3e-05  0.4 samples/s")
    assert sentence(event("evaluated", step=2, metrics={"loss": 0.00012346, "accuracy": 0.5})) == (
        "evaluated after step 2: loss 0.0001235, accuracy 0.5000"
    )
    assert sentence(event("evaluated", step=2, metrics={"loss": 0})) == "evaluated after step 2: loss 0.0000"
    lines = dict(summary_lines(summary(known, 0, "runs/x", None)))
    assert lines["loss"] == "3e-05"


def test_log_every_0_means_no_progress_lines() -> None:
    lines = plain_lines(0)
    assert "worker 0 was evicted: killed by SIGKILL" in lines
    assert [line for line in lines if line.startswith("step ")] == []


def test_a_full_disk_is_told_though_no_event_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and again after training has gone on; what is told late bears its time."""
    out, free, steps = io.StringIO(), [0], [commit(k, float(k)) for k in range(1, 9)]
    display = PlainDisplay(100, FinalStep(1000), out, lambda: free[0])
    facts = facts_of([event("job_started", 0), plan(1, {"0": [0, 1]}, 0, 0.6), *steps])
    monkeypatch.setattr("everstep.cli.display.time.time_ns", lambda: 30 * S)
    for _ in range(3):
        display.refresh(facts)
    assert out.getvalue() == (
        "Step 8 is the newest known, as nothing has been written for 21 s: the disk is full (0 kB left). "
        "Events wait in memory; free some space.\n"
    )
    facts.take(commit(9, 29.0))
    display.refresh(facts)
    display.event(event("warning", 9, cause="disk", reason="rows wait"), facts)
    assert out.getvalue().splitlines()[1].startswith("at ") and out.getvalue().endswith(": warning: rows wait\n")


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_narrow_terminal_has_fewer_columns_and_whole_numbers(tmp_path: Path, width: int) -> None:
    from rich.console import Console

    from everstep.cli.top import picture
    from everstep.dashboard.feed import RunFeed

    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (*JOB[:4], commit(123456, 1))))
    said, screen = io.StringIO(), io.StringIO()
    Console(file=said, width=width).print(picture(RunFeed(tmp_path, logs=False), "worker", 9, width))
    live = LiveDisplay(Console(file=screen, width=width, height=20), Folder(tmp_path, "*.jsonl"), FinalStep(400_000))
    try:
        shown = live._render(facts_of([*JOB[:4], commit(123456, 1)]))
    finally:
        live.close()
    Console(file=said, width=width).print(shown)
    rows = [line for line in said.getvalue().splitlines() if line.split()[:1] in (["worker"], ["0.0"], ["1.0"])]
    assert len(rows) == 6 and not any("…" in line for line in rows), rows
    assert all("step" in row for row in (rows[0], rows[3]))


def test_top_keeps_what_is_newest_last_though_the_clock_is_set_back(tmp_path: Path) -> None:
    from rich.console import Console

    from everstep.cli.top import picture
    from everstep.dashboard.feed import RunFeed

    at = {"old": 3600.0, "told late": 3599.5, "new": 10.0, "newest": 12.0, "also told late": 11.0}
    told = [event("warning", at_s, cause="disk", reason=name) for name, at_s in at.items()]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in (*JOB[:4], *told)))
    said = io.StringIO()
    Console(file=said, width=80).print(picture(RunFeed(tmp_path, logs=False), "worker", 9, 80))
    shown = [line.rpartition("warning: ")[2].strip() for line in said.getvalue().splitlines()[-5:]]
    assert shown == ["told late", "old", "new", "also told late", "newest"]


def test_json_lines_are_those_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write("step_committed", time_unix_ns=5, step=1)
    log.write("step_committed", time_unix_ns=15, step=2, samples=3)
    watcher = Watcher(path, 10, JsonDisplay())
    watcher.start()
    log.write("job_completed", time_unix_ns=20)
    watcher.stop()
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert shown == read_events(path)[1:], "older ones belong to an earlier run"
    assert watcher.facts.course.step == 2


def test_what_follows_is_shown_though_the_clock_is_set_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    log, out = EventLog(tmp_path / "events.jsonl"), io.StringIO()
    earlier = [event("job_started", 0, workers=2), plan(1, {"0": [0], "1": [1]}, 0, 1), EVICTED, commit(1, 3)]
    back = event("worker_evicted", 12, worker_id=1, incarnation=0, **KILLED)
    since = [event("job_started", 100, step=1), commit(2, 104), commit(3, 10), back, commit(4, 16, generation=2)]
    for one in (*earlier, *since):
        fields = {k: v for k, v in one.items() if k not in ("kind", "time_unix_ns")}
        log.write(one["kind"], time_unix_ns=one["time_unix_ns"], **fields)
    for display in (
        PlainDisplay(1),
        LiveDisplay(Console(file=out, width=80), Folder(tmp_path, "*.jsonl"), since_ns=90 * S),
    ):
        watcher = Watcher(tmp_path / "events.jsonl", 90 * S, display)
        watcher.start()
        watcher.stop()
    said = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == ["step 2", "step 3", "worker 1 was evicted: killed by SIGKILL", "step 4"]
    assert "worker 1 was killed" in out.getvalue() and "worker 0" not in out.getvalue()


def test_the_end_is_told_once_though_the_clock_is_set_back(tmp_path: Path) -> None:
    from everstep.cli.conclusion import say_the_end
    from everstep.runtime.job_end import Outcome

    log = EventLog(tmp_path / "events.jsonl")
    for kind, at_s in (("job_failed", 5), ("job_started", 100), ("job_completed", 20)):
        log.write(kind, time_unix_ns=at_s * S)
    say_the_end(log, tmp_path, 90 * S, Outcome(0, "completed", Why(Cause.COMPLETED, "")))
    assert [e["kind"] for e in read_events(tmp_path / "events.jsonl")][2:] == ["job_completed"]
    log.write("job_started", time_unix_ns=200 * S)
    say_the_end(log, tmp_path, 200 * S, Outcome(1, "failed", Why(Cause.QUORUM, "too few")))
    assert read_events(tmp_path / "events.jsonl")[-1]["kind"] == "job_failed"


def test_what_agents_do_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watcher = Watcher(tmp_path / "none", 0, PlainDisplay(1))
    watcher.process_event({"kind": "worker_exited", "worker_id": 2, "reason": "killed by SIGKILL"})
    watcher.process_event({"kind": "worker_exited", "worker_id": 2, "reason": "exit code 0", "in_order": True})
    watcher.process_event({"kind": "worker_started", "worker_id": 2})
    watcher.start()
    watcher.stop()
    assert capsys.readouterr().out == "worker 2 exited: killed by SIGKILL\n"


def test_a_failure_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its event, if there is one; the end of the job by the command itself, on stderr."""
    log = EventLog(tmp_path / "events.jsonl")
    log.write("worker_evicted", worker_id=2, incarnation=0, **KILLED)
    log.write("warning", worker_id=2, cause="crash_loop", reason="its slot was given up: no more restarts")
    log.write("job_failed", state="failed", reason="its slot was given up: no more restarts")
    log.close()
    watcher = Watcher(tmp_path / "events.jsonl", 0, PlainDisplay(1))
    for incarnation in (0, 1):
        told = {"kind": "worker_exited", "worker_id": 2, "incarnation": incarnation, "reason": "killed by SIGKILL"}
        watcher.process_event(told)
    watcher.process_event({"kind": "slot_lost", "worker_id": 2, "reason": "no more restarts"})
    watcher.start()
    watcher.stop()
    assert capsys.readouterr().out.splitlines() == [
        "worker 2 was evicted: killed by SIGKILL",
        "warning: its slot was given up: no more restarts",
        "worker 2 exited: killed by SIGKILL",  # the second life, which no event tells of
    ]


def test_what_is_counted_is_the_jobs_and_what_is_shown_is_of_this_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    for one in [*JOB[:-1], event("job_started", 10, step=4, workers=2), commit(5, 11)]:
        fields = {k: v for k, v in one.items() if k not in ("kind", "time_unix_ns")}
        log.write(one["kind"], time_unix_ns=one["time_unix_ns"], **fields)
    log.close()
    watcher = Watcher(tmp_path / "events.jsonl", 11 * S, PlainDisplay(1))
    watcher.start()
    watcher.stop()
    assert capsys.readouterr().out.startswith("step 5") and watcher.facts.course.step == 5
    found = summary(watcher.facts, 0, "x", None)
    assert (found["faults_survived"], found["recoveries"], found["wall_s"]) == (3, 2, 5.0), (
        "the first start told no end"
    )


def test_in_a_small_window_the_dead_keep_their_lines(tmp_path: Path) -> None:
    from rich.console import Console

    seats = [[i, 0, "active", [i]] for i in range(40)]
    joined = [event("worker_joined", 0.5, worker_id=i, incarnation=0, pid=i, host="h") for i in range(40)]
    died = event("worker_evicted", 2, worker_id=37, incarnation=0, **KILLED)
    begun = event("generation_started", 1, generation=1, seats=seats, leaders=[0])
    many = [event("job_started", 0, workers=40), *joined, begun]
    for width in (80, 100, 140):
        live = LiveDisplay(
            Console(file=io.StringIO(), width=width, height=20), Folder(tmp_path, "*.jsonl"), FinalStep(40)
        )
        try:
            shown = live._render(facts_of([*many, commit(1, 1.5), died]))
        finally:
            live.close()
        screen = io.StringIO()
        Console(file=screen, width=width).print(shown)
        said = screen.getvalue().splitlines()
        assert len(said) <= 20 and max(map(len, said)) <= width
        assert "worker 37 was killed" in said[0] and any(line.lstrip().startswith("37.0") for line in said)
        assert any("and 26 more" in line for line in said)


def test_at_80_columns_no_word_is_cut(tmp_path: Path) -> None:
    from rich.console import Console

    reason = "the disk of the host refuses what is written there since its file system was mounted for reading alone"
    lanes = [list(range(i * 20, i * 20 + 20)) for i in range(2)]
    joined = [event("worker_joined", 0.5, worker_id=i, incarnation=0, pid=i, host="h") for i in range(2)]
    begun = event(
        "generation_started", 1, generation=1, leaders=[0], seats=[[i, 0, "standby", lanes[i]] for i in range(2)]
    )
    told = event("warning", 2, cause="disk", reason=reason)
    facts = facts_of([event("job_started", 0, workers=2), *joined, begun, commit(1000, 1.5), told])
    live = LiveDisplay(
        Console(file=io.StringIO(), width=80, height=20), Folder(tmp_path, "*.jsonl"), FinalStep(100_000)
    )
    try:
        live.event(told, facts)
        shown = live._render(facts)
    finally:
        live.close()
    screen = io.StringIO()
    Console(file=screen, width=80).print(shown)
    said = screen.getvalue()
    assert max(map(len, said.splitlines())) <= 80
    assert all(name in said for name in ("worker", "state", "stage", "lanes", "step", "phase", "samples", "leader"))
    assert "0,1,2,3,4,5,6,7,8,9,10,… " in said and "20,21,22,23,24,25,26,… " in said
    assert said.splitlines()[-1].rstrip("…").split() == f"warning: {reason}".split()[:14]


def test_the_last_step_is_shown_as_soon_as_a_script_has_said_it(tmp_path: Path) -> None:
    out, facts = io.StringIO(), facts_of([*JOB[:6]])
    display = choose_display(tmp_path, as_json=False, log_every=1, total_steps=None)
    assert isinstance(display, PlainDisplay)
    display._out = out
    display.event(commit(1, 1.5), facts)
    (tmp_path / "dataset.json").write_text('{"size": 100, "lanes": 4, "micro_batch": 2, "epochs": 3}')
    display.event(commit(2, 1.6), facts)
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["1", "2/38"]


def test_a_note_is_broken_between_words_and_a_command_in_it_not_at_all(tmp_path: Path) -> None:
    from rich.console import Console

    out = io.StringIO()
    live = LiveDisplay(Console(file=out, width=40), Folder(tmp_path, "*.jsonl"))
    try:
        live.note("the output of all workers goes to a/logs/worker-*.jsonl")
        live.note("hosts join with: everstep agent --join 10.0.0.1:29400")
        live.note("short: everstep top a")
    finally:
        live.close()
    said = [line for line in out.getvalue().splitlines() if line.strip()]
    assert said[:2] == ["the output of all workers goes to", "  a/logs/worker-*.jsonl"]
    assert said[2:4] == ["hosts join with:", "everstep agent --join 10.0.0.1:29400"]
    assert said[4] == "short: everstep top a"


def test_incidents_and_warnings_stay_above_the_live_view(tmp_path: Path) -> None:
    """Once, when their line is whole; those of an earlier start are not told again."""
    from rich.console import Console

    out, facts = io.StringIO(), Facts()
    live = LiveDisplay(Console(file=out, width=60), Folder(tmp_path, "*.jsonl"), since_ns=3 * S + S // 3)
    gone = event("worker_evicted", 2.1, worker_id=1, incarnation=0, **KILLED)
    earlier = [gone, plan(2, {"0": [0, 1, 2, 3]}, 0, 2.2), commit(3, 2.4, generation=2)]
    warned = event("warning", 6.5, cause="disk", reason="the disk of the host refuses what is written to it by now")
    try:
        for one in [*JOB[:6], *earlier, EVICTED]:
            facts.take(one)
        live.refresh(facts)
        assert "was killed" not in out.getvalue()
        for one in [*JOB[8:11], warned, JOB[-1]]:
            facts.take(one)
            live.event(one, facts)
            live.refresh(facts)
    finally:
        live.close()
    said = out.getvalue().splitlines()
    assert [line[10:] for line in said if "worker 0" in line] == ["worker 0 (leader) was killed; training went on"]
    assert [line[10:] for line in said if "warning" in line] == ["warning: the disk of the host refuses what is"]
    assert " " * 10 + "written to it by now" in said and max(map(len, said)) <= 60


def test_small_words() -> None:
    assert [duration(s) for s in (0.4, 65, 3720, 363_600)] == ["0s", "1m05s", "1h02m", "4d05h"]
    assert step_line(Facts(), 3, None) == "step 3  generation 0"
    facts = Facts()
    for step in (1, 2):
        event = {"time_unix_ns": step * 10**9, "step": step, "loss": 1.0, "samples": 4, "tokens": 400, "lr": [0.00125]}
        facts.take({"kind": "step_committed", **event})
    assert step_line(facts, 2, None) == "step 2  loss 1.0000  lr 0.00125  400 tokens/s  generation 0"


def test_a_narrow_line_of_numbers_breaks_between_them() -> None:
    from everstep.cli.top import whole_lines

    parts = ["step 10/12", "goodput 76.9 % (65.6 % by capacity)", "812 samples/s"]
    assert whole_lines(parts, 80) == ["  ".join(parts)]
    assert whole_lines(parts, 20) == parts and whole_lines([], 20) == [""]


def test_a_line_about_a_standstill_promises_no_end() -> None:
    facts = facts_of([event("job_started", 0), plan(1, {"0": [0]}, 0, 0.6), *(commit(n, n) for n in range(1, 5))])
    said = ["step 4/8  loss 1.0000  64 samples/s  eta 4s", "step 4/8  loss 1.0000  2 samples/s"]
    assert [step_line(facts, 4, 8, (5 + later_s) * S) for later_s in (1, 93)] == [
        f"{one}  generation 1" for one in said
    ]


def test_status_of_a_job_that_is_over_lists_its_workers(tmp_path: Path) -> None:
    joined = [
        event("worker_joined", 0.5, worker_id=i, incarnation=0, pid=100 + i, host="here", generation=0)
        for i in (0, 1, 2)
    ]
    first = plan(1, {"0": [0, 1], "1": [2, 3]}, 0)
    workers = workers_of(facts_of([event("job_started", 0, workers=2), *joined, first, commit(3, 1)]))
    assert [(w["pid"], w["host"], w["stage"], w["role"], w["step"], w["lanes"]) for w in workers] == [
        (100, "here", 0, "leader", 3, [0, 1]),
        (101, "here", 0, "active", 3, [2, 3]),
        (102, "here", None, "spare", 0, []),
    ]


SPLIT = [
    event("job_started", 0, workers=4),
    *(event("worker_joined", 0.5, worker_id=i, incarnation=0, pid=100 + i, host="here") for i in range(5)),
    event(
        "generation_started",
        1,
        generation=1,
        cause="started",
        reason="all workers are there",
        seats=[[0, 0, "active", [0, 1]], [1, 0, "active", [2]], [2, 1, "active", [0, 1, 2]], [3, 1, "standby", []]],
        leaders=[0, 2],
        leader=0,
        lanes={"0": [0, 1], "1": [2]},
        workers=[0, 1, 2, 3],
    ),
]


def test_every_stage_of_a_split_job_is_shown() -> None:
    facts = facts_of([*SPLIT, commit(1, 2)])
    assert [(w["worker_id"], w["role"], w["stage"], w["stages"], w["lanes"]) for w in workers_of(facts)] == [
        (0, "leader", 0, [0], [0, 1]),
        (1, "active", 0, [0], [2]),
        (2, "leader", 1, [1], [0, 1, 2]),
        (3, "standby", 1, [1], []),
        (4, "spare", None, [], []),
    ]


def test_the_live_view_shows_states_and_stages(tmp_path: Path) -> None:
    from rich.console import Console

    out = io.StringIO()
    live = LiveDisplay(Console(file=out, width=120), Folder(tmp_path, "*.jsonl"), last=FinalStep(4))
    try:
        died = event("worker_evicted", 2, worker_id=1, incarnation=0, **KILLED)
        shown = live._render(facts_of([*SPLIT, commit(1, 1.5), died]))
    finally:
        live.close()
    screen = io.StringIO()
    Console(file=screen, width=120).print(shown)
    rows = {line.split()[0]: line.split()[1:4] for line in screen.getvalue().splitlines()[2:]}
    assert rows["0.0"] == ["leader", "0", "0,1"]
    assert rows["1.0"] == ["dead", "0", "-"]
    assert rows["2.0"] == ["leader", "1", "0,1,2"]
    assert rows["3.0"] == ["standby", "1", "-"]
    assert rows["4.0"] == ["spare", "-", "-"]
    assert "worker 1 was killed" in screen.getvalue().partition("worker  ")[0]  # above the table


def test_a_member_is_never_behind_the_step_above_it(tmp_path: Path) -> None:
    """Samples of usage are up to a second old. In a narrow window whole parts of the line fall away."""
    from rich.console import Console

    sample = {"t": S, "host": "here", "workers": [{"worker_id": 0, "incarnation": 0, "step": 2, "samples": 4}]}
    (tmp_path / "here.jsonl").write_text(json.dumps(sample) + "\n")
    later_s = time.time() + 600  # it does not stand still
    facts = facts_of([*SPLIT, *(commit(i, later_s + i) for i in range(1, 5))])
    parts = ["step 4/9", "loss 1.0000", "64 samples/s", "eta 5s", "generation 1"]
    for width in range(40, 90):
        out = Console(file=io.StringIO(), width=width, height=20)
        live = LiveDisplay(out, Folder(tmp_path, "*.jsonl"), last=FinalStep(9))
        try:
            live.refresh(facts)
            screen = io.StringIO()
            Console(file=screen, width=width).print(live._render(facts))
        finally:
            live.close()
        lines = screen.getvalue().splitlines()
        (line,) = (line.rstrip() for line in lines if "step 4/9" in line)
        shown = line[line.index("step") :].split("  ")
        assert shown == parts[: len(shown)]
        assert next(line for line in lines if line.startswith(" 0.0")).split()[4 if width >= 72 else 2] == "4"


def test_output_is_read_from_where_it_is_now_by_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_text("5 of an earlier run\n")
    output = Output(path)
    assert output.due(math.inf) == []
    with open(path, "a") as file:
        file.write("10 one\n20 two\r2\n30 thr")
        file.flush()
        assert output.due(0.0) == []
        assert output.before(15) == ["one"]
        assert output.due(math.inf) == ["two", "2"]
        file.write("ee\nno time\n")
    assert output.due(math.inf) == ["three", "no time"]


def test_prints_and_events_come_in_the_order_of_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is read first: the events are all there when the watcher begins, and the prints come late."""
    (tmp_path / "logs").mkdir()
    path = tmp_path / "events.jsonl"
    watcher = Watcher(path, 0, PlainDisplay(1))
    path.write_text("".join(json.dumps(commit(k, float(k))) + "\n" for k in (1, 2, 3)))
    prints = [f"{int((k + 1.5) * S)} after step {k}\n" for k in range(4)]
    (tmp_path / "logs" / "output.log").write_text("".join(prints))
    watcher.start()
    watcher.stop()
    said = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == [
        "after step 0", "step 1", "after step 1", "step 2", "after step 2", "step 3", "after step 3",
    ]  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_are_plain_where_a_launcher_passes_them_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun gives its processes a terminal, and copies all that is drawn there."""
    monkeypatch.setattr("sys.stdout", Terminal())
    for name in ("EVERSTEP_LAUNCHED", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert isinstance(choose_display(tmp_path, as_json=False, log_every=1, total_steps=9), LiveDisplay)
    for name in ("EVERSTEP_LAUNCHED", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
        assert isinstance(choose_display(tmp_path, as_json=False, log_every=1, total_steps=9), PlainDisplay)
        monkeypatch.delenv(name)
