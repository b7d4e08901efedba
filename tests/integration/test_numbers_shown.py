"""Every number that people are shown, held against an independent reading of the events and of the ledger, while a job
is hurt and after it."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from everstep.cli.ledger import audit_run
from everstep.cli.status import read_status
from everstep.dashboard.feed import RunFeed
from everstep.dashboard.run_view import head, worker_rows
from everstep.report.facts import facts_of
from everstep.report.headline import Now, headline
from job_harness import Jobs, healed

Event = dict[str, Any]
CHAOS = "kill:target=worker:2,at=6; kill:target=leader:0,at=14; raise:target=worker:1,at=22"
WINDOW = 33
MANY = 1 << 30


def told(run_dir: Path, count: int) -> list[Event]:
    """The first so many events, read by nothing of ours."""
    lines = (run_dir / "events.jsonl").read_text().splitlines()[:count]
    return [json.loads(line) for line in lines]


def commits(events: list[Event]) -> list[Event]:
    return [e for e in events if e["kind"] == "step_committed"]


def newest_step(events: list[Event]) -> int:
    done = max((e["step"] for e in commits(events)), default=0)
    known = ("checkpoint_completed", "job_completed", "generation_started")
    said = [e["step"] for e in events if e["kind"] in known and e["step"]]
    return max([done, *(step for step in said if step <= done + 1)])


def rate(events: list[Event]) -> float | None:
    times = [(e["time_unix_ns"], e["samples"]) for e in commits(events)][-WINDOW:]
    if len(times) < 2:
        return None
    return sum(samples for _, samples in times[1:]) / ((times[-1][0] - times[0][0]) / 1e9)


def members(events: list[Event]) -> dict[int, str]:
    """leader, active or standby of the newest plan, or dead."""
    found: dict[int, str] = {}
    for e in events:
        if e["kind"] == "generation_started":
            found = {i: s for i, s in found.items() if s == "dead"}
            for worker_id, _, role, lanes in e["seats"]:
                plain = "active" if lanes else role
                found[worker_id] = "leader" if worker_id in e["leaders"] else plain
        elif e["kind"] == "worker_evicted":
            found[e["worker_id"]] = "dead"
        elif e["kind"] == "worker_joined" and found.get(e["worker_id"]) == "dead":
            del found[e["worker_id"]]  # its next life is on its way
    return found


def training_share(events: list[Event], grains: int = 20_000) -> float:
    """Of the time from the first to the last event, looked at moment by moment."""
    first, last = events[0]["time_unix_ns"], max(e["time_unix_ns"] for e in events)
    busy = [(first, next(e["time_unix_ns"] for e in events if e["kind"] == "generation_started"))]
    steps = commits(events)
    usual_s = sorted(b["time_unix_ns"] - a["time_unix_ns"] for a, b in pairwise(steps))[len(steps) // 2] / 1e9
    for a, b in pairwise(steps):
        if (b["time_unix_ns"] - a["time_unix_ns"]) / 1e9 > max(4 * usual_s, usual_s + 1):
            busy.append((a["time_unix_ns"] + round(usual_s * 1e9), b["time_unix_ns"]))
    for e in events:
        now = e["time_unix_ns"]
        if e["kind"] == "recovery_completed":
            busy.append((now - round(e["duration_s"] * 1e9), now))
        elif e["kind"] == "checkpoint_completed":
            busy.append((now - round(e["stall_s"] * 1e9), now))
        elif e["kind"] == "job_completed":
            busy.append((max(s["time_unix_ns"] for s in steps), now))
    moments = (first + (last - first) * i // grains for i in range(grains))
    return sum(not any(a <= at < b for a, b in busy) for at in moments) / grains


def check(run_dir: Path, feed: RunFeed) -> dict[str, Any]:
    """One look at the page's data; returns its head."""
    feed.ask()
    feed.load()
    rows = worker_rows(feed)
    shown, facts = head(feed, rows), feed.history.facts
    events = told(run_dir, sum(facts.counts.values()))
    ahead = newest_step(told(run_dir, MANY)) + 2  # members do a step before it is told
    assert newest_step(events) <= shown["step"] <= (ahead if feed.running else newest_step(events))
    assert shown["generation"] == max((e["generation"] or 0 for e in events), default=0)
    assert shown["recoveries"] == sum(e["kind"] == "recovery_completed" for e in events)
    done = commits(events)
    assert shown["loss"] == (done[-1]["loss"] if done else None)
    expected = rate(events)
    if shown["rate"] is not None and not shown["stands_still"]:
        assert shown["rate"] == pytest.approx(expected)
    if shown["eta_s"] is not None:
        seconds = (done[-1]["time_unix_ns"] - done[-WINDOW:][0]["time_unix_ns"]) / 1e9
        speed = (done[-1]["step"] - done[-WINDOW:][0]["step"]) / seconds
        steps = range(newest_step(events), shown["step"] + 1)  # what is told may be behind what members say
        assert any(shown["eta_s"] == pytest.approx((shown["total"] - step) / speed) for step in steps)
    roles, states = members(events), {i: w.state for i, w in facts.crew.workers.items()}
    for worker_id, role in roles.items():
        assert states[worker_id] in (role, "suspect"), (worker_id, role, states)
    for row in rows.values():
        assert not (row.rate and row.state in ("dead", "ended", "left", "spare", "healing")), row
    if shown["stands_still"] or facts.incidents.open is not None:
        assert shown["headline"]["level"] != "good", shown["headline"]
    return shown


def test_what_is_shown_is_what_was_told(jobs: Jobs) -> None:
    pace = [healed(2), healed(0), healed(1)]
    job = jobs.start("Pictures", workers=3, chaos=CHAOS, pace=pace, settings={"checkpoint.disk.every_steps": 9})
    job.wait_for("job_started")
    feed, levels = RunFeed(job.run_dir, logs=False), set[str]()
    while not job.over(0.05):
        levels.add(check(job.run_dir, feed)["headline"]["level"])
        before = newest_step(told(job.run_dir, MANY))
        status = read_status(job.run_dir)
        assert before <= status["step"] <= newest_step(told(job.run_dir, MANY)) + 2  # one is done, one is untold
    jobs.check(job, "Pictures")
    shown = check(job.run_dir, feed)
    assert levels >= {"good"} and shown["headline"]["level"] == "good" and "Finished" in shown["headline"]["text"]

    events = told(job.run_dir, MANY)
    ledger = audit_run(job.run_dir)
    assert shown["step"] == ledger.steps == read_status(job.run_dir)["step"] == newest_step(events)
    assert feed.history.tally.samples == sum(e["samples"] for e in commits(events))
    assert shown["goodput"] == pytest.approx(training_share(events), abs=0.02)
    assert shown["goodput_by_capacity"] <= shown["goodput"]
    assert all(row.state == "ended" for row in worker_rows(feed).values()) and shown["members"] == 0

    recovered = [e for e in events if e["kind"] == "recovery_completed"]
    times = {e["step"]: e["time_unix_ns"] for e in commits(events)}
    for fact, e in zip(feed.history.facts.recoveries, recovered, strict=True):
        assert fact.duration_s == e["duration_s"]
        if e["died_unix_ns"] is not None:  # nobody saw how it ended
            assert e["duration_s"] == pytest.approx((e["time_unix_ns"] - e["died_unix_ns"]) / 1e9, abs=1e-3)
        first = min(c["step"] for c in commits(events) if c["generation"] == e["generation"])
        # Its end is that of the first step, as the leader has decided it: after the one before, and before any goes on.
        assert times[first - 1] < e["time_unix_ns"] < times[first + 1]
    incidents = feed.history.facts.incidents
    lost = {e["worker_id"] for e in events if e["kind"] == "worker_evicted"}
    assert lost == {int(who.split()[1]) for one in incidents.all for who in one.hits} == {0, 1, 2}
    assert all(one.end_ns is not None and one.whole_ns is not None for one in incidents.all)
    summary = json.loads(job.run_dir.with_suffix(".out").read_text().splitlines()[-1])
    assert (summary["steps"], summary["recoveries"]) == (shown["step"], len(recovered))
    assert summary["recovery_s"]["max"] == max(e["duration_s"] for e in recovered)


@pytest.mark.longer
@pytest.mark.parametrize("task", ["PicturesEpochs", "PicturesNonFinite"])
def test_what_is_shown_of_epochs_and_of_a_loss_that_is_no_number(jobs: Jobs, task: str) -> None:
    settings = {"on_nonfinite": "skip"} if "NonFinite" in task else {}
    job = jobs.start(task, workers=2, chaos="kill:target=worker:1,at=6", pace=[healed(1)], numerics=settings)
    job.wait_for("job_started")
    feed, totals = RunFeed(job.run_dir, logs=False), set[int | None]()
    while not job.over(0.05):
        totals.add(check(job.run_dir, feed)["total"])
    jobs.check(job, task, settings)
    shown = check(job.run_dir, feed)
    steps = audit_run(job.run_dir).steps
    assert shown["total"] == shown["step"] == steps == newest_step(told(job.run_dir, MANY))
    assert totals <= {None, steps}, "none is known before the length of the data is"
    if settings:
        done = commits(told(job.run_dir, MANY))
        strange = [e["step"] for e in done if e.get("nonfinite")]
        assert strange == [e["step"] for e in done if not e["applied"]]
        assert f"the last was step {strange[-1]}" in shown["headline"]["more"] or len(strange) == 1
        until = told(job.run_dir, MANY)[: told(job.run_dir, MANY).index(done[strange[-1] - 1]) + 1]
        then = headline(facts_of(until), Now(until[-1]["time_unix_ns"]))
        assert then.level == "warning" and f"left out: the weights are those of step {strange[-1] - 1}." in then.more


@pytest.mark.longer
def test_what_is_shown_of_a_job_whose_launcher_died(jobs: Jobs) -> None:
    job = jobs.start("Pictures", workers=2, pace=[healed(1)], lane_s=0.2)
    job.wait_for("step_committed", lambda e: e["step"] >= 2)
    feed = RunFeed(job.run_dir, logs=False)
    assert check(job.run_dir, feed)["headline"]["level"] == "good"
    os.kill(job.launcher_pid(), signal.SIGKILL)
    job.end()
    while feed.running:
        shown = check(job.run_dir, feed)
    shown = check(job.run_dir, feed)
    assert shown["headline"]["level"] == "bad" and shown["faults"] == 1 and shown["members"] == 0
    assert not [row for row in worker_rows(feed).values() if row.state in ("leader", "active")]
