"""The sentence: for each way in which a job can stand, what it names, in which colour; a clock alone changes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from everstep.report.facts import Facts, facts_of
from everstep.report.headline import Headline, Now, headline
from told_events import HEALED, LEADS, T0, TWO, S, commit, event, killed, plan, recovered, trained

LOST = [*trained(), killed(2, 5.8), plan(5.9, 2, [[0, 1, 3]], "killed")]
LEADER = [*trained(TWO), killed(2, 5.8), plan(5.9, 2, [[0, 1], [3]], "killed")]
ON_TWO_HOSTS = [event("worker_joined", 3.9, worker_id=i, incarnation=0, host=f"h{i % 2}") for i in range(4)]
SPARE = event("worker_joined", 2.6, worker_id=4, incarnation=0)
WITH_SPARE = [SPARE, *trained(TWO), killed(2, 5.8), plan(5.9, 2, [[0, 1], [3, 4]], "killed"), LEADS]
SUSPECTED = event("worker_suspected", 9, worker_id=1, incarnation=0, cause="hung", reason="no progress for 3.0 s")
PARTED = {"cause": "link", "reason": "workers 0, 2, 3 cannot reach it"}
CUT = event("worker_evicted", 6.7, worker_id=1, incarnation=0, **PARTED)
TOO_FEW = event("waiting", 6, cause="quorum", reason="1 of 4 workers is ready, 2 are needed")
FLIP = {"cause": "nondeterministic", "reason": "worker 1 computed other bits; all go back to a copy of step 7"}
BACK = [plan(6, 2, [[0, 1, 2, 3]], "nondeterministic"), event("fallback", 6.1, step=7, steps_redone=3, **FLIP)]
SAVED = event("checkpoint_completed", 4, step=6, tier="disk")
STOPPING = plan(6, 2, [[0, 1, 2, 3]], "interrupted", "interrupted by SIGINT: a checkpoint is taken first")
HANDED_OVER = [plan(5.8, 2, [[0, 1, 4, 5]], "preempted", "workers 4, 5 join; workers 2, 3 leave"), commit(11, 6)]
STOPPED = {"cause": "interrupted", "state": "interrupted", "exit_code": 130, "reason": "interrupted by SIGINT"}
FULL = {"cause": "disk", "reason": "rows of the ledger cannot be written: No space left on device"}
FAILED = {"cause": "disk", "tier": "disk", "step": 9, "reason": "No space left on device"}
BUSY = {"cause": "busy", "tier": "disk", "step": 9, "reason": "that of step 3 is still being written, since 9 s"}
SLOW = {"cause": "slow", "took_s": 3.2, "reason": "/data/runs/a is slow: writing events.jsonl there took 3.2 s"}
TIERS = (("skipped", BUSY), ("completed", {"tier": "memory", "step": 9}))
STORE = {"tier": "object"}
LAGS = {
    "cause": "slow",
    "step": 9,
    "reason": "the object store takes longer than the time between checkpoints",
    **STORE,
}
RAISED = [
    event("worker_evicted", 5.8, worker_id=i, incarnation=0, cause="exception", reason="ValueError: 17") for i in (0, 1)
]
STOPPED_AT_10 = event("job_failed", 7, step=10, **STOPPED)
DONE = event("job_completed", 7, step=10, state="completed", exit_code=0)
KILLED = [event("coordinator_killed", 5 + n / 10, cause="hung", reason="silent", kills=n) for n in range(3)]
SCRIPT = [one for one in trained() if one["kind"] == "step_committed"]
ALONE = {"running": False, "total": 60, "disk_step": 6}
OVER = {"running": False, "finished": True}
GONE = {"running": False, "disk_step": 6, "resume": "everstep run digits --run-dir runs/a"}

STRANGE = [
    event("step_committed", 5.7 + 0.3 * n, step=10 + n, loss=None, samples=8, nonfinite="x") for n in range(1, 5)
]
LEFT_OUT = [{**one, "applied": False} for one in STRANGE]
DAMAGED = {"cause": "corrupt", "reason": "the checkpoint of step 9 is damaged"}
DOUBT = {"cause": "corrupt", "reason": "states differ, and no majority says which is right"}
IN_DOUBT = [
    *(plan(6, 2, [[0, 1, 2, 3]], "corrupt"), event("fallback", 6.1, step=7, steps_redone=3, **DOUBT)),
    *(event("recovery_completed", 6.4, step=7, duration_s=0.4, phases_s={}, **DOUBT), commit(11, 7.5)),
]
AGAIN = event("job_started", 60, step=6, workers=4)
LOST_MEANWHILE = [commit(7, 62), killed(2, 62.2), recovered(2, 62.2, 62.5)]

Events = list[dict[str, Any]]
CASES: dict[str, tuple[Events, float, Mapping[str, Any], str, tuple[str, ...]]] = {
    "all is well": (trained(), 5.8, {}, "good", ("All is well: step 10, 4 of 4 workers.", "No fault so far.")),
    "a coordinator that is killed again and again": (
        [*trained(), *KILLED],
        5.8,
        {},
        "warning",
        ("All is well", "The coordinator was killed 3 times, the last time 0.6 s ago", "coordinator.silent_s"),
    ),
    "a directory that is slow": (
        [*trained(), event("warning", 5.75, **SLOW)],
        5.8,
        {},
        "warning",
        ("Training goes on, but /data/runs/a is slow: writing events.jsonl there took 3.2 s (50 ms ago).",),
    ),
    "a directory that was slow": ([event("warning", -60, **SLOW), *trained()], 5.8, {}, "good", ("All is well",)),
    "a coordinator that was killed twice": ([*trained(), *KILLED[:2]], 5.8, {}, "good", ("Last fault 0.7 s ago",)),
    "steps come, though the coordinator is silent": (
        trained(),
        5.8,
        {"asked": True},
        "warning",
        ("Training goes on, but the coordinator does not answer: step 10, 4 of 4 workers.",),
    ),
    "steps come, and a new coordinator knows of no job yet": (
        trained(),
        5.8,
        {"live": {"state": "starting", "step": 0}},
        "warning",
        ("Training goes on, but the coordinator does not answer: step 10",),
    ),
    "the first step that is not finite": (
        [*trained(), *STRANGE[:1]],
        6.1,
        {},
        "warning",
        ("The loss or gradient of step 11 is not finite.", "Training goes on."),
    ),
    "it goes on": (
        [*trained(), *STRANGE],
        7,
        {},
        "bad",
        ("The loss or gradient is not finite for 4 steps, since step 11.", "for nothing"),
    ),
    "it goes on, and the updates are left out": (
        [*trained(), *LEFT_OUT],
        7,
        {},
        "warning",
        ("not finite for 4 steps, since step 11. Their updates were left out: the weights are those of step 10.",),
    ),
    "one update is left out": (
        [*trained(), *LEFT_OUT[:1]],
        6.1,
        {},
        "warning",
        ("of step 11 is not finite. Its update was left out: the weights are those of step 10. Training goes on.",),
    ),
    "left out, after one that was not": ([*trained(), STRANGE[0], *LEFT_OUT[1:]], 7, {}, "bad", ("for nothing",)),
    "the updates are left out to the end": (
        [*trained(), *LEFT_OUT[:2], event("job_completed", 7, step=12, state="completed", exit_code=0)],
        8,
        {"running": False, "finished": True},
        "warning",
        ("not finite from step 11 to the last. Their updates were left out: the weights are those of step 10.",),
    ),
    "left out to the end, and the weights are not finite": (
        [*trained(), *LEFT_OUT[:2], event("warning", 6.9, step=12, cause="nonfinite", reason="x"), DONE],
        8,
        {"running": False, "finished": True},
        "bad",
        ("The weights are of no use",),
    ),
    "stopped as soon as nothing is finite": (
        [*trained(), *LEFT_OUT[:1], event("job_failed", 7, step=11, state="failed", cause="nonfinite", reason="x")],
        8,
        {**GONE, "disk_step": 11},
        "bad",
        ("The newest checkpoint is of step 11: nothing is lost.",),
    ),
    "a damaged state, and nobody is outvoted": (
        [*trained(), *IN_DOUBT, {**DONE, "time_unix_ns": T0 + 8 * S}],
        60,
        {"running": False, "finished": True},
        "good",
        ("Finished: all 11 steps", "1 fault survived."),
    ),
    "a damaged checkpoint": (
        [*trained(), SAVED, STOPPED_AT_10, AGAIN, event("fallback", 60.5, step=9, what="checkpoint", **DAMAGED)],
        61,
        {},
        "good",
        ("Starting for 1 s",),
    ),
    "finite again": (
        [*trained(), *STRANGE[:2], commit(13, 6.6)],
        6.7,
        {},
        "good",
        ("All is well: step 13", "The loss or gradient of 2 steps was not finite, the last was step 12."),
    ),
    "often not finite": (
        [*trained(), *LEFT_OUT[:3], commit(14, 6.9)],
        7,
        {},
        "warning",
        ("step 14, but the loss or gradient of 3 steps was not finite, the last was step 13.",),
    ),
    "often not finite, long ago": (
        [*trained(), *LEFT_OUT[:3], *(commit(14 + n, 6.9 + 0.3 * n) for n in range(60))],
        25,
        {},
        "good",
        ("All is well: step 73", "The loss or gradient of 3 steps was not finite"),
    ),
    "finished, and often not finite": (
        [
            *trained(),
            *LEFT_OUT[:3],
            commit(14, 6.9),
            event("job_completed", 7, step=14, state="completed", exit_code=0),
        ],
        8,
        {"running": False, "finished": True},
        "warning",
        ("all 14 steps are done", "but the loss or gradient of 3 steps was not finite, the last was step 13."),
    ),
    "failed since nothing was finite, and no checkpoint is older": (
        [*trained(), *STRANGE, event("job_failed", 7, step=14, state="failed", exit_code=1, reason="x")],
        8,
        {**GONE, "disk_step": 14},
        "bad",
        ("nothing is finite since step 11, and no older one is known: start again (--fresh)",),
    ),
    "failed since nothing was finite": (
        [*trained(), SAVED, *STRANGE, event("job_failed", 7, step=14, state="failed", exit_code=1, reason="x")],
        8,
        {**GONE, "disk_step": 14},
        "bad",
        ("The newest checkpoint is of step 14, but nothing is finite since step 11", "--resume-from"),
    ),
    "not finite to the end": (
        [*trained(), *STRANGE[:2], event("job_completed", 7, step=12, state="completed", exit_code=0)],
        8,
        {"running": False, "finished": True},
        "bad",
        ("Finished, but the loss or gradient was not finite from step 11 to the last.",),
    ),
    "worker killed, at once": ([*trained(), killed(2, 5.8)], 6, {}, "warning", ("worker 2 was killed 0.2 s ago",)),
    "worker killed": (LOST, 11.7, {}, "warning", ("No step for 6 s (usually 0.3 s): redoing step 11 since worker 2",)),
    "after that": (
        [*LOST, recovered(2, 5.8, 6.2), commit(11, 6.2), commit(12, 6.5)],
        7,
        {},
        "warning",
        ("Training with 3 of 4 workers: worker 2 was killed 1 s ago",),
    ),
    "leader of a stage killed, no spare": (
        [*LEADER, LEADS],
        8,
        {},
        "warning",
        ("redoing step 11 since worker 2 was killed 2 s ago", "worker 3 leads stage 1"),
    ),
    "leader of a stage killed, a spare": (
        [*WITH_SPARE, HEALED],
        8,
        {},
        "warning",
        ("redoing step 11 since worker 2 was killed", "worker 3 leads stage 1", "worker 4 takes its place"),
    ),
    "after that, a spare": (
        [*WITH_SPARE, HEALED, recovered(2, 5.8, 6.2), commit(11, 6.2), commit(12, 6.5)],
        6.9,
        {},
        "good",
        ("All is well: step 12, 4 of 4 workers.", "Last fault 1 s ago: worker 2 was killed", "after 0.4 s"),
    ),
    "a worker killed before the first step of a resumed job": (
        [*trained(), SAVED, AGAIN, {**killed(2, 61), "step": 6}],
        65,
        {},
        "warning",
        ("Recovering for 4 s",),
    ),
    "and for hours": (
        [*trained(), SAVED, AGAIN, {**killed(2, 61), "step": 6}],
        8000,
        {},
        "bad",
        ("Recovering for 2h12m", "It does not seem to go on by itself"),
    ),
    "a coordinator that is silent from the start": (
        [event("job_started", 0, step=0, workers=4)],
        40,
        {"asked": True, "live": None},
        "warning",
        ("0 of 4 workers are ready. The coordinator does not answer; the job restarts it if it stays silent.",),
    ),
    "a hang that nobody has noticed": (
        trained(),
        8,
        {"phases": {0: "reduce", 1: "forward", 2: "reduce", 3: "agree"}},
        "warning",
        ("No step for 2 s (usually 0.3 s): the others wait for worker 1 (forward)", "A worker that hangs is evicted"),
    ),
    "a hang, and one tells no phase": (
        trained(),
        8,
        {"phases": {0: "reduce", 1: "forward", 2: "reduce", 3: ""}},
        "warning",
        ("the others wait for worker 1 (forward). A worker that hangs",),
    ),
    "a hang": (
        [*trained(), SUSPECTED],
        11,
        {},
        "warning",
        ("No step for 5 s", "worker 1 is suspected for 2 s", "evicted"),
    ),
    "a hang that nobody helps": ([*trained(), SUSPECTED], 100, {}, "bad", ("No step for 1m34s", "look at the logs")),
    "a partition": (
        [*trained(), CUT],
        9,
        {},
        "warning",
        ("No step for 3 s", "worker 1 could not reach the others 2 s"),
    ),
    "launcher dead": (
        [*trained(), SAVED],
        65.7,
        GONE,
        "bad",
        ("died without a word after step 10", "1m00s ago", "of step 6: 4 steps", "To go on: everstep run digits"),
    ),
    "launcher dead, workers on other hosts": (
        [*trained(), *ON_TWO_HOSTS, SAVED],
        65.7,
        GONE,
        "bad",
        ("nothing runs on its host now; other hosts may go on", "of step 6: up to 4 steps", "To go on: everstep run"),
    ),
    "launcher dead, no checkpoint": (
        trained(),
        7,
        {"running": False, "disk_step": 0},
        "bad",
        ("There is no checkpoint",),
    ),
    "the newest step is a member's": (
        trained(),
        5.8,
        {"live": {"step": 10, "workers": [{"role": "active", "step": 11}, {"role": "joining", "step": 99}]}},
        "good",
        ("All is well: step 11, 4 of 4",),
    ),
    "coordinator silent": (
        trained(),
        9,
        {"asked": True},
        "warning",
        ("No step for 3 s", "the coordinator does not answer", "The job restarts it"),
    ),
    "coordinator silent for long": (
        trained(),
        40,
        {"asked": True},
        "bad",
        ("No step for 34 s", "the coordinator does not answer", "It does not seem to go on by itself"),
    ),
    "disk full": (trained(), 5.8, {"free_bytes": 4096}, "warning", ("The disk is full (4 kB left)", "wait in memory")),
    "disk full, nothing is told": (
        trained(),
        9,
        {"free_bytes": 0, "live": {"step": 20, "state": "running"}},
        "warning",
        ("Training is at step 20, but nothing has been written for 3 s: the disk is full",),
    ),
    "rows wait": (
        [*trained(), event("warning", 5.75, **FULL)],
        5.8,
        {},
        "warning",
        ("Trouble with the disk", "rows of"),
    ),
    "the disk stays full, and another thing is to be said": (
        [*trained(), CUT],
        6.8,
        {"free_bytes": 0},
        "warning",
        ("worker 1", "The disk is full (0 kB left)."),
    ),
    "the disk stays full, nobody answers": (
        trained(),
        400,
        {"free_bytes": 0},
        "warning",
        ("nothing has been written for", "the disk is full"),
    ),
    "the disk has refused rows for long": (
        [*trained(), event("warning", 5.75, **FULL)],
        300,
        {"live": {"step": 900, "state": "running"}},
        "warning",
        ("nothing has been written for", "The disk refuses what is written."),
    ),
    "checkpoints fail": (
        [*trained(), SAVED, event("checkpoint_failed", 5.6, **{**FAILED, "cause": "store"})],
        5.8,
        {},
        "warning",
        ("the checkpoint of step 9 failed 0.2 s ago: No space left", "of step 6"),
    ),
    "the object store refuses, and the disk does not": (
        [
            *trained(),
            event("checkpoint_failed", 5.5, **{**FAILED, "cause": "store", "tier": "object", "reason": "403"}),
            event("checkpoint_completed", 5.6, step=9, tier="disk"),
        ],
        5.8,
        {},
        "warning",
        ("the checkpoint of step 9 in the object store failed 0.3 s ago: 403", "of step 9"),
    ),
    "a checkpoint that was not due": (
        [*trained(), event("checkpoint_skipped", 5.6, **{**FAILED, "cause": "busy"})],
        5.8,
        {},
        "good",
        ("All is well",),
    ),
    "a disk that is too slow for checkpoints": (
        [*trained(), *(event("checkpoint_skipped", 4 + n / 2, **BUSY) for n in range(3))],
        5.8,
        {},
        "good",
        ("All is well",),
    ),
    "a disk that is so for long": (
        [*trained(), *(event("checkpoint_skipped", -6 + 3 * n, **BUSY) for n in range(5))],
        5.8,
        {},
        "warning",
        (
            "the last 5 checkpoints were left out: that of step 3 is still being written, since 9 s.",
            "There is no other",
        ),
    ),
    "a disk that is so for long, with copies in memory": (
        [*trained(), *(event(f"checkpoint_{kind}", -6 + 3 * n, **more) for n in range(5) for kind, more in TIERS)],
        6.8,
        {},
        "warning",
        ("the last 5 checkpoints were left out: that of step 3 is still being written, since 9 s.", "no other"),
    ),
    "an object store that is so for long": (
        [*trained(), event("checkpoint_skipped", -6, **LAGS), SAVED],
        5.8,
        {},
        "warning",
        (
            "checkpoints in the object store are left out: the object store takes longer",
            "newest whole one is of step 6",
        ),
    ),
    "an object store that was so": (
        [*trained(), event("checkpoint_skipped", -6, **LAGS), *(event("checkpoint_completed", 5.5, **STORE),) * 2],
        5.8,
        {},
        "good",
        ("All is well",),
    ),
    "waiting for workers": ([*trained(), TOO_FEW], 10, {"gives_up_s": 600.0}, "warning", ("Waiting for 4 s: 1 of 4",)),
    "all have raised, and nothing is to be done again": (
        [
            *(*trained(), *RAISED, event("waiting", 6, cause="exception", reason="every worker is gone")),
            *(plan(8, 2, [[0, 1, 2, 3]]), event("fallback", 8.1, step=10, steps_redone=0, source="checkpoint")),
        ],
        8.3,
        {},
        "warning",
        ("redoing step 11 since workers 0, 1 raised an exception 2 s ago",),
    ),
    "all have raised": (
        [*trained(), *RAISED, event("waiting", 6, cause="exception", reason="every worker is gone")],
        6.3,
        {},
        "warning",
        ("Waiting for 0.3 s: workers 0, 1 raised an exception, and are started again.",),
    ),
    "waiting for long": ([*trained(), TOO_FEW], 26, {"gives_up_s": 600.0}, "bad", ("20 s", "It gives up in 9m40s")),
    "going back after a flip": (
        [*trained(), *BACK],
        6.3,
        {"live": {"step": 8, "state": "running"}},
        "warning",
        ("doing steps 8 to 10 again", "the states of the workers were in doubt"),
    ),
    "doing steps again": (
        [*trained(), *BACK, event("recovery_completed", 6.4, step=7, duration_s=0.4, phases_s={}, **FLIP)],
        7,
        {"live": {"step": 9, "state": "running"}},
        "warning",
        ("Doing steps 8 to 10 again, to the same bits (now at step 9)",),
    ),
    "doing steps again, as the job was started again": (
        [killed(2, -5), *trained(), STOPPED_AT_10, AGAIN, plan(61, 1, [[0, 1, 2, 3]]), commit(7, 62)],
        62.1,
        {},
        "warning",
        ("Doing steps 8 to 10 again, to the same bits, since the job was started again 2 s ago.",),
    ),
    "doing steps again, as the launcher died": (
        [*trained(), AGAIN, plan(61, 1, [[0, 1, 2, 3]]), commit(7, 62)],
        62.1,
        {},
        "warning",
        ("Doing steps 8 to 10 again, to the same bits, since the launcher of the job died without a word 56 s ago.",),
    ),
    "doing steps again, and a worker was lost meanwhile": (
        [*trained(), STOPPED_AT_10, AGAIN, plan(61, 1, [[0, 1, 2, 3]]), *LOST_MEANWHILE],
        62.6,
        {},
        "warning",
        ("Doing steps 8 to 10 again, to the same bits, since the job was started again 3 s ago.",),
    ),
    "being stopped": ([*trained(), STOPPING], 9, {}, "warning", ("Stopping for 3 s: interrupted by SIGINT", "No step")),
    "a host hands over, and training goes on": ([*trained(), *HANDED_OVER], 6.1, {}, "good", ("All is well: step 11",)),
    "a host has handed over, and steps are not finite": (
        [*trained(), *HANDED_OVER[:1], *STRANGE],
        7,
        {},
        "bad",
        ("The loss or gradient is not finite for 4 steps, since step 11.",),
    ),
    "a host has handed over, and too few workers are left": (
        [*trained(), *HANDED_OVER, killed(1, 6.1), {**TOO_FEW, "time_unix_ns": T0 + 7 * S}],
        9,
        {},
        "warning",
        ("Waiting for 2 s: 1 of 4 workers is ready, 2 are needed.",),
    ),
    "stopped": (
        [*trained(), STOPPING, event("job_failed", 7, step=11, **STOPPED)],
        60,
        {**GONE, "disk_step": 11},
        "warning",
        ("Stopped after step 11: interrupted by SIGINT.", "nothing is lost", "To go on"),
    ),
    "failed": (
        [*trained(), event("job_failed", 7, step=10, cause="quorum", state="failed", reason="too few")],
        60,
        GONE,
        "bad",
        ("Failed after step 10: too few.", "4 steps would be done again"),
    ),
    "finished": (
        [*trained(), DONE],
        60,
        {"running": False, "finished": True},
        "good",
        ("Finished: all 10 steps", "7 s"),
    ),
    "finishing": (trained(), 6, {"total": 10}, "good", ("All 10 steps are done",)),
    "starting": (trained()[:3], 3, {}, "good", ("Starting for 3 s: 2 of 4 workers are ready.",)),
    "the first step": (trained()[:6], 4, {}, "good", ("step 1, the first one",)),
    "starting for ever": (trained()[:3], 300, {}, "warning", ("Starting for 5m00s",)),
    "nothing at all": ([], 0, {}, "warning", ("no events so far",)),
    "events that cannot be read": (
        trained(),
        6,
        {"unreadable": "Input/output error"},
        "bad",
        ("cannot be read: Input/output error.", "Step 10 is the newest known."),
    ),
    "this clock is behind": (trained(), -3600, {}, "warning", ("Step 10", "1h00m behind the newest event")),
    "done, but rows are missing": (
        [*trained(), DONE, event("warning", 7.1, **FULL)],
        8,
        OVER,
        "warning",
        ("Finished: all 10 steps are done, in", ", but rows of the ledger cannot be written: No space left"),
    ),
    "done, but nothing is in the store": (
        [*trained(), event("checkpoint_failed", 6, **{**FAILED, **STORE}), DONE],
        8,
        OVER,
        "warning",
        ("all 10 steps", ", but the checkpoint of step 9 in the object store failed: No space left on device."),
    ),
    "done, and old checkpoints could not be removed": (
        [
            *trained(),
            event("checkpoint_completed", 6, step=9, **STORE),
            event("checkpoint_failed", 6.1, **{**FAILED, **STORE}),
            DONE,
        ],
        8,
        OVER,
        "good",
        ("all 10 steps are done, in",),
    ),
    "a clock that was ahead in the run before": (
        [event("job_started", 3600, workers=4), event("step_committed", 3601, step=1), *trained()],
        6,
        {},
        "good",
        ("All is well",),
    ),
    "done, and the last events are lost": (
        trained(),
        8,
        {**OVER, "final_step": 12},
        "good",
        ("all 12 steps are done",),
    ),
    "a loop that was left": (
        [*trained(), DONE],
        8,
        {**OVER, "final_step": 10, "left": True},
        "good",
        ("Finished early, after step 10, in",),
    ),
    "a script by itself": (SCRIPT, 8, ALONE, "good", ("Step 10 of 60, last heard of 2 s ago.",)),
    "a script by itself, not heard of for long": (
        SCRIPT,
        70,
        ALONE,
        "warning",
        ("Step 10 of 60: it may have ended. It was last heard of 1m04s ago. The newest checkpoint is of step 6: 4",),
    ),
    "a slow script by itself": ([commit(n, 30 * n) for n in range(1, 4)], 389, ALONE, "good", ("Step 3 of 60, last",)),
    "a script by itself, and nothing is finite": ([*SCRIPT, *STRANGE], 7, ALONE, "bad", ("for nothing",)),
    "a script by itself has finished": (
        SCRIPT,
        60,
        ALONE | {"finished": True},
        "good",
        ("Finished: all 10 steps are done.",),
    ),
    "a script by itself, then a launched job": (
        [*SCRIPT, AGAIN, plan(61, 1, [[0, 1, 2, 3]]), commit(7, 62), commit(11, 63)],
        63.1,
        {},
        "good",
        ("No fault so far.",),
    ),
    "a start that was refused": (
        [],
        0,
        {"running": False},
        "warning",
        ("The job has not started: it wrote no events.",),
    ),
    "finished, without events": ([], 0, {"running": False, "finished": True}, "good", ("Its events are gone",)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_sentence(name: str) -> None:
    events, at_s, beside, level, parts = CASES[name]
    said = headline(facts_of(events), Now(T0 + round(at_s * S), **beside))
    assert said.level == level, said
    for part in parts:
        assert part in said.whole(), (part, said.whole())
    assert ".." not in said.whole() and "  " not in said.whole()


TRAINING = [
    name for name, case in CASES.items() if case[2].get("running", True) and case[0] and case[0][-1] is not DONE
]


@pytest.mark.parametrize("name", TRAINING)
def test_nothing_is_well_once_the_clock_alone_goes_on(name: str) -> None:
    """Facts that stand still are no good news, whatever they are: within seconds, and for ever."""
    events, at_s, beside, _, _ = CASES[name]
    facts, levels = facts_of(events), []
    for later_s in (0, 2.5, 120, 1e4):
        levels.append(headline(facts, Now(T0 + round((at_s + later_s) * S), **beside)).level)
    started = facts.course.last_step_ns > 0 and name != "finishing"
    assert "good" not in (levels[1:] if started else levels[2:]), levels


def test_a_damage_that_nobody_is_evicted_for_is_one_fault() -> None:
    flipped = event("fault_injected", 5.8, worker_id=1, step=10, reason="a bit was flipped")
    damaged = CASES["a damaged checkpoint"][0]
    for events in (damaged, [*trained(), *IN_DOUBT], [*trained(), flipped, *IN_DOUBT]):
        facts = facts_of(events)
        assert (facts.faults, facts.incidents.all[-1].kind) == (1, "fault")
    outvoted = event("worker_evicted", 5.95, worker_id=1, incarnation=0, cause="corrupt", reason="x")
    assert facts_of([*trained(), outvoted, *IN_DOUBT]).faults == 1


def test_checkpoints_are_counted_beyond_those_that_are_kept() -> None:
    skipped = [event("checkpoint_skipped", 6 + n / 1000, **BUSY) for n in range(1100)]
    facts = facts_of([*trained(), SAVED, *skipped])
    disk = facts.checkpoints.tiers["disk"]
    assert (facts.checkpoint_step, disk.complete, disk.skipped, disk.failed, disk.late) == (6, 1, 1100, 0, 1100)
    earlier = [{**one, "time_unix_ns": T0 - 6 * S} for one in skipped]
    said = headline(facts_of([*trained(), SAVED, *earlier]), Now(T0 + round(5.8 * S))).whole()
    assert "the last 1100 checkpoints were left out" in said and "The newest whole one is of step 6." in said
    many = [event("checkpoint_completed", 6, step=1, tier=f"t{n}") for n in range(99)]
    assert len(facts_of([*trained(), *many]).checkpoints.tiers) == 16


def test_an_object_store_is_too_slow_until_one_checkpoint_follows_the_other() -> None:
    done, left_out = event("checkpoint_completed", -5, step=9, **STORE), event("checkpoint_skipped", -6, **LAGS)
    for upto in range(1, 7):
        facts = facts_of([*trained(), *[left_out, done, left_out, done, done, left_out][:upto]])
        text = headline(facts, Now(T0 + round(5.8 * S))).text
        assert ("checkpoints in the object store are left out" in text) == (upto != 5), (upto, text)
    facts = facts_of([*trained(), left_out, AGAIN, commit(11, 61)])
    assert "left out" not in headline(facts, Now(T0 + 61 * S)).text, "that was another process"


def test_a_recovery_is_heard_of_before_its_step() -> None:
    """It ended with a commit, though that is told later: nobody waits for anything."""
    said = headline(facts_of([*LOST, recovered(2, 5.8, 7.5)]), Now(T0 + round(7.7 * S)))
    assert said.text.startswith("Training with 3 of 4 workers"), said


def test_a_step_of_before_the_fault_ends_no_recovery() -> None:
    """The last step before a death is told after it."""
    facts = facts_of([*LOST, commit(11, 5.75)])
    assert headline(facts, Now(T0 + 6 * S)).level == "warning"
    assert (facts.condition.state, facts.course.step) == ("recovering", 11)


def test_it_is_fitted_to_the_width() -> None:
    said = Headline("good", "All is well: step 3.", "No fault so far.")
    assert [said.fitted(width) for width in (80, 30, 10)] == [
        "All is well: step 3. No fault so far.",
        "All is well: step 3.",
        "All is…",
    ]


def _with(change: Callable[[dict[str, Any]], None]) -> Facts:
    changed = [{**one} for one in WITH_SPARE]
    for one in changed:
        change(one)
    return facts_of(changed)


def test_nonsense_in_events_is_survived() -> None:
    for key in ("worker_id", "seats", "leaders", "target", "step", "died_unix_ns", "reason", "stage"):
        for value in (None, [], {}, "x", -1, 1 << 80, float("nan")):
            facts = _with(lambda one, key=key, value=value: one.update({key: value}) if key in one else None)
            assert headline(facts, Now(T0 + 60 * S)).text


def test_a_checkpoint_that_cannot_be_read_any_more_is_not_promised() -> None:
    facts = facts_of([*trained(), SAVED])
    said = {**GONE, "disk_step": 0}
    assert "of step 6" in headline(facts, Now(T0 + 60 * S, **GONE)).more
    more = headline(facts, Now(T0 + 60 * S, **said)).more
    assert "There is no checkpoint" in more and "of step 6" not in more
