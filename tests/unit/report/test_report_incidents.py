"""What happened, one line per incident; steps, speed, ends and the account of standstills."""

from __future__ import annotations

import json
import os
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from everstep.report.facts import facts_of, present_speed
from everstep.report.headline import Now, headline
from everstep.report.history import History
from everstep.report.pace import Pace
from everstep.report.usage import Usage
from everstep.report.wall_time import TimeAccount
from everstep.runtime.files.run_lock import run_lock
from told_events import HEALED, KILLED, LEADS, T0, TWO, S, commit, event, killed, plan, recovered, trained, write_events

FLIP = {"cause": "corrupt", "reason": "worker 1 deviates"}


def lines(events: list[dict[str, Any]]) -> list[str]:
    return [incident.line() for incident in facts_of(events).incidents.all]


def test_killed_replaced_and_back() -> None:
    events = [*trained(), killed(2, 5.8), plan(5.9, 2, [[0, 1, 3]]), recovered(2, 5.8, 6.2), commit(11, 6.2)]
    assert lines(events) == ["worker 2 was killed; step 11 was done again; training went on after 400 ms"]
    events += [plan(8.7, 3, [[0, 1, 2, 3]])]
    assert lines(events)[0].endswith("worker 2 is back; training went on after 400 ms; whole again after 2.9 s")


def test_an_exception_that_comes_again_is_named_once() -> None:
    raised = {"cause": "exception", "reason": "ValueError: no such label: 17 (train.py:13)"}
    first = {**killed(2, 5.8), **raised}
    events = [*trained(), first, plan(5.9, 2, [[0, 1, 3]]), recovered(2, 5.8, 6.2), commit(11, 6.2)]
    events += [{**killed(1, 6.5), **raised}, plan(6.6, 3, [[0, 3]])]
    events += [event("job_failed", 7, state="failed", exit_code=1, **raised)]
    one, other = lines(events)
    assert one.startswith("worker 2 raised an exception (ValueError: no such label: 17 (train.py:13)); step 11 was")
    assert other == "worker 1 raised an exception (the same); the job failed"
    assert "no such label: 17" in headline(facts_of(events), Now(T0 + 9 * S)).text


def test_of_two_faults_before_the_end_the_last_one_is_what_the_job_failed_of() -> None:
    """No step was committed after the first one's recovery either."""
    events = [*trained(), killed(2, 5.8), plan(5.9, 2, [[0, 1, 3]]), recovered(2, 5.8, 6.2)]
    events += [killed(1, 6.3), event("job_failed", 7, state="failed", exit_code=1, reason="too few workers")]
    one, other = lines(events)
    assert "the job failed" not in one and other == "worker 1 was killed; the job failed"
    assert "went on" not in one


def test_the_step_that_is_done_again_is_the_same_wherever_it_is_said() -> None:
    """The commit of step 11 is told after the plan; the fault struck step 12."""
    injected = event("fault_injected", 5.79, worker_id=2, step=12, **KILLED)
    planned = {**plan(5.9, 2, [[0, 1, 3]]), "step": 11}
    done = {**recovered(2, 5.8, 6.2), "step": 11}
    told = [*trained(), injected, killed(2, 5.8), planned]
    for events in (told, [*told, commit(11, 5.75)]):
        assert "redoing step 12 since worker 2 was killed" in headline(facts_of(events), Now(T0 + 6 * S)).text
        assert facts_of(events).course.step == 11, "the number beside that sentence"
    facts = facts_of([*told, commit(11, 5.75), done, commit(12, 6.2)])
    assert [one.line() for one in facts.incidents.all] == [
        "worker 2 was killed; step 12 was done again; training went on after 400 ms"
    ]
    assert [recovery.step for recovery in facts.recoveries] == [12]


@pytest.mark.parametrize("counted", [11, 12])
def test_the_commit_after_a_plan_names_the_step_that_was_done_again(counted: int) -> None:
    """A recovery is told with or without the step that ended it; clocks of hosts differ, generations do not."""
    late = {**commit(11, 5.95), "generation": 1}
    done = {**recovered(2, 5.8, 6.2), "step": counted, "generation": 2}
    facts = facts_of([*trained(), killed(2, 5.8), plan(5.9, 2, [[0, 1, 3]]), done, late])
    assert facts.incidents.all[0].done == []
    for step, at_s in ((12, 5.85), (13, 6.5)):
        facts.take({**commit(step, at_s), "generation": 2})
    assert facts.incidents.all[0].done == ["step 12 was done again"]
    assert [recovery.step for recovery in facts.recoveries] == [12]


@pytest.mark.parametrize("knows", ["plan", "late commit", "injected"])
def test_each_of_them_says_which_step_was_struck(knows: str) -> None:
    events = [*trained()]
    events += [event("fault_injected", 5.79, worker_id=2, step=12, **KILLED)] if knows == "injected" else []
    events += [killed(2, 5.8), {**plan(5.9, 2, [[0, 1, 3]]), "step": 11 if knows == "plan" else 0}]
    events += [commit(11, 5.75)] if knows == "late commit" else []
    assert "redoing step 12" in headline(facts_of(events), Now(T0 + 6 * S)).text


def test_the_leader_of_a_stage_and_its_spare() -> None:
    events = [*trained(TWO), killed(2, 5.8), plan(5.9, 2, [[0, 1], [3, 4]]), LEADS, HEALED, recovered(2, 5.8, 6.2)]
    story = "worker 2 (leader of stage 1) was killed; worker 3 leads stage 1; worker 4 takes its place"
    assert lines([*events, commit(11, 5.75), commit(12, 6.2)]) == [
        f"{story}; step 12 was done again; training went on after 400 ms"
    ]


def test_several_at_once_are_one_incident() -> None:
    events = [*trained(), killed(2, 5.8), killed(1, 5.82), plan(5.9, 2, [[0, 3]]), killed(3, 6.0)]
    incidents = facts_of(events).incidents
    assert (incidents.count, incidents.open is not None) == (1, True)
    assert incidents.all[0].brief == "workers 1, 2, 3 were killed"
    done = facts_of([*events, plan(6.1, 3, [[0]]), commit(11, 6.5)])
    assert done.incidents.open is None and len(done.incidents.missed()) == 1


def test_a_lost_host_is_said_once() -> None:
    why = {"cause": "host_lost", "reason": "host h2 is silent"}
    lost = [{**killed(i, 5.8), **why} for i in (2, 3)]
    events = [*trained(), *lost, plan(5.9, 2, [[0, 1]]), commit(11, 6.2)]
    told = "workers 2, 3 were lost with their hosts (host h2 is silent); training went on"
    assert lines(events)[0].startswith(told)


def test_a_suspicion_that_was_wrong_and_one_that_was_right() -> None:
    suspected = event("worker_suspected", 8, worker_id=1, incarnation=0, cause="hung", reason="no progress for 3.0 s")
    assert lines([*trained(), suspected, commit(11, 9.0)]) == [
        "worker 1 was suspected (no progress for 3.0 s); it went on by itself; training went on after 3.3 s"
    ]
    evicted = event("worker_evicted", 11, worker_id=1, incarnation=0, cause="hung", reason="no progress for 6.0 s")
    (line,) = lines([*trained(), suspected, evicted, plan(11.1, 2, [[0, 2, 3]]), commit(11, 11.4)])
    assert line == "worker 1 hung (no progress for 6.0 s); training went on after 5.7 s"


def test_what_training_does_not_stand_still_for() -> None:
    died = event("coordinator_restarted", 5.8, cause="killed", reason="continues from its journal")
    damaged = event("fallback", 5.9, step=4, what="checkpoint", cause="corrupt", reason="a block differs")
    told = lines([*trained(), died, damaged])
    assert told == [
        "the coordinator was killed; it was restarted",
        "a checkpoint was damaged (a block differs); an older one is used",
    ]


def test_a_slot_that_is_given_up_is_told_with_the_fault_and_for_no_other_reason() -> None:
    lost = {name: event("warning", 6, worker_id=2, cause=name, reason="why") for name in ("crash_loop", "oom")}
    events = [*trained(), killed(2, 5.8), plan(5.9, 2, [[0, 1, 3]])]
    assert "the slot of worker 2 was given up" in lines([*events, lost["crash_loop"]])[0]
    assert "given up" not in lines([*events, lost["oom"]])[0]
    assert "the slot of worker 2 moved to host b" in lines([*events, {**lost["crash_loop"], "host": "b"}])[0]
    assert lines([*trained(), lost["crash_loop"]]) == []


def test_who_is_only_suspected_still_trains() -> None:
    """A coordinator that was frozen suspects all, and hears a moment later that training went on long ago."""
    silent = [event("worker_suspected", 11 + i / 10, worker_id=i, cause="host_lost", reason="quiet") for i in range(4)]
    events = [*trained(), killed(2, 5.8), plan(5.9, 2, [[0, 1, 2, 3]]), commit(11, 6.2), *silent, recovered(2, 5.8, 12)]
    said = headline(facts_of(events), Now(T0 + 12 * S))
    assert "0 of 4" not in said.text and ("4 of 4" in said.text or "suspected" in said.text), said


def test_a_coordinator_that_was_killed_and_restarted_is_one_incident() -> None:
    killed = event("coordinator_killed", 5.8, cause="hung", reason="the coordinator has not answered for 5.0 s")
    restarted = event("coordinator_restarted", 5.9, cause="hung", reason="continues from its journal")
    facts = facts_of([*trained(), killed, restarted])
    assert [incident.line() for incident in facts.incidents.all] == [
        "the coordinator hung (the coordinator has not answered for 5.0 s); it was killed; it was restarted"
    ]
    assert facts.faults == 1


def test_a_fault_that_was_injected_is_told_once() -> None:
    struck = event("fault_injected", 5.8, worker_id=2, cause="injected", reason="chaos fault 'x' strikes")
    died = [*trained(), struck, killed(2, 5.8), plan(5.9, 2, [[0, 1, 3]]), recovered(2, 5.8, 6.2)]
    after = [commit(step, 6 + step / 10) for step in range(11, 16)]
    assert [line.partition(";")[0] for line in lines([*died, *after])] == ["worker 2 was killed"]
    assert lines([*trained(), struck, *after]) == [
        "worker 2 was hit by an injected fault (chaos fault 'x' strikes); training did not stand still"
    ]


def test_a_coordinator_that_was_struck_and_restarted_is_one_incident() -> None:
    """Nobody waits for its restart, so steps are told in between; other faults are counted beside it."""
    struck = event("fault_injected", 5.8, cause="injected", reason="chaos fault 'x' strikes", target="coordinator")
    back = event("coordinator_restarted", 9, **KILLED)
    steps = [commit(step, 2.7 + 0.3 * step) for step in range(11, 19)]
    facts = facts_of([*trained(), struck, *steps, back, killed(2, 9.5)])
    assert facts.incidents.all[0].line() == "the coordinator was killed; it was restarted; whole again after 3.2 s"
    began = facts.incidents.all[0]
    assert (began.begin_ns, began.step) == (T0 + round(5.8 * S), 11), "not the step by which its restart was told"
    assert facts.faults == 2
    later = [commit(step, 2.7 + 0.3 * step) for step in range(11, 90)]
    told = "the coordinator was hit by an injected fault (chaos fault 'x' strikes); training did not stand still"
    assert lines([*trained(), struck, *later]) == [told]
    done = event("job_completed", 9, step=18, state="completed", exit_code=0)
    assert lines([*trained(), struck, *steps, done]) == [told], "the job was over before it was told"


def test_a_fault_of_a_host_is_not_the_coordinators() -> None:
    struck = event("fault_injected", 5.8, cause="injected", reason="chaos fault 'x' strikes host b", target="host:b")
    after = [commit(step, 6 + step / 10) for step in range(11, 16)]
    told = "host b was hit by an injected fault (chaos fault 'x' strikes host b); training did not stand still"
    assert lines([*trained(), struck, *after]) == [told]
    died = [*trained(), struck, killed(2, 5.8), killed(3, 5.8), plan(5.9, 2, [[0, 1]]), *after]
    assert [line.partition(";")[0] for line in lines(died)] == ["workers 2, 3 were killed"]
    assert facts_of(died).faults == 2


def test_a_worker_that_comes_back_as_a_spare_is_not_dead_any_more() -> None:
    spare = event("worker_joined", 2.6, worker_id=4, incarnation=0)
    back = event("worker_joined", 7, worker_id=2, incarnation=1)
    crew = facts_of([*trained(), spare, killed(2, 5.8), plan(5.9, 2, [[0, 1, 3, 4]]), commit(11, 6.2), back]).crew
    told = [(span.state, span.incarnation, span.end_ns) for span in crew.spans if span.worker_id == 2][-2:]
    assert told == [("dead", 0, T0 + 7 * S), ("spare", 1, None)]


def test_a_death_that_no_coordinator_could_tell_of_began_with_the_standstill() -> None:
    late = event(
        "worker_evicted", 16, worker_id=2, incarnation=0, cause="replaced", reason="its slot runs life 1 already"
    )
    facts = facts_of([*trained(), late, plan(16.1, 2, [[0, 1, 3]]), {**commit(11, 16.4), "generation": 2}])
    story = "worker 2 was replaced by its next life (its slot runs life 1 already); training went on after 10.7 s"
    assert facts.incidents.all[0].line() == story


def test_each_start_counts_its_generations_from_the_first() -> None:
    again = [event("job_started", 20, step=10, workers=2), plan(21, 1, [[0, 1]])]
    before = [*trained(), {**plan(7, 3, [[0, 1, 2, 3]]), "generation": 3}]
    assert [facts_of(events).crew.generation for events in (before, [*before, *again])] == [3, 1]
    assert facts_of([*before, *again]).crew.generations[-1].step == 10, "the step that it goes on from"


@pytest.mark.parametrize(
    ("target", "who"),
    [("host:b", "host b"), ("link:a-b", "link a-b"), ("coordinator", "the coordinator"), (None, "the coordinator")],
)
def test_a_fault_that_was_injected_struck_what_it_was_aimed_at(target: str | None, who: str) -> None:
    struck = event("fault_injected", 5.8, target=target, cause="injected", reason="chaos fault 'x' strikes")
    after = [commit(step, 6 + step) for step in range(11, 26)]  # a coordinator's restart may be told late
    assert lines([*trained(), struck, *after]) == [
        f"{who} was hit by an injected fault (chaos fault 'x' strikes); training did not stand still"
    ]


def test_going_back_is_part_of_the_incident() -> None:
    back = event("fallback", 6.0, step=7, steps_redone=3, source="copy", **FLIP)
    evicted = event("worker_evicted", 5.8, worker_id=1, incarnation=0, **FLIP)
    events = [*trained(), evicted, plan(5.9, 2, [[0, 2, 3]]), back, commit(11, 7.4)]
    assert "went back to the copy of step 7: 3 steps again" in lines(events)[0]
    facts = facts_of(events[:-1])
    assert (facts.course.step, facts.course.redo_to) == (7, 10)
    assert facts_of(events).course.redo_to == 0


def test_a_spare_that_dies_stops_nobody() -> None:
    spare = event("worker_joined", 2.6, worker_id=4, incarnation=0)
    facts = facts_of([*trained(), spare, killed(4, 5.8)])
    assert facts.incidents.open is None
    (alone,) = facts.incidents.all
    assert alone.line() == "worker 4 was killed; it took no part"
    assert alone.begin_ns == alone.end_ns == alone.whole_ns == T0 + round(5.8 * S), "when it died, told later"
    facts.take(commit(11, 6.0))
    assert (facts.condition.state, facts.crew.workers[4].state) == ("running", "dead")


@pytest.mark.parametrize(("back_s", "is_set_back"), [(9.9, False), (10.1, True)])
def test_clocks_of_hosts_may_differ_by_ten_seconds(back_s: float, *, is_set_back: bool) -> None:
    """A step by an earlier clock says that the clock was set back only if it is earlier by more."""
    facts = facts_of([*trained(), commit(11, 100.0), commit(12, 100.0 - back_s)])
    assert facts.told_ns == T0 + round((100.0 - back_s * is_set_back) * S)
    assert facts_of([*trained(), commit(11, 100.0), commit(11, 50.0)]).told_ns == T0 + 100 * S, "told a second time"


def test_clocks_that_differ_keep_no_incident_open() -> None:
    """Steps are told with the time of the host that committed them."""
    for slow_s in (0, 3600):
        facts = facts_of([*trained(), killed(2, 5.8), plan(5.9, 2, [[0, 1, 3]])])
        for step in range(11, 17):
            facts.take(commit(step, 6 + step / 10 - slow_s))
        assert (facts.condition.state, facts.incidents.open, facts.course.step) == ("running", None, 16)


def test_who_leaves_in_order_is_no_incident() -> None:
    drained = event("worker_evicted", 6, worker_id=1, incarnation=0, cause="drained", reason="as asked")
    assert lines([*trained(), drained]) == []


@pytest.mark.parametrize("last", ["checkpoint_completed", "job_failed"])
def test_the_newest_step_is_told_by_whoever_tells_it_first(last: str) -> None:
    """An emergency checkpoint proves a step whose own event comes with the next decision: never, if that is the end."""
    fields = {"tier": "disk"} if last == "checkpoint_completed" else {"state": "interrupted", "exit_code": 130}
    assert facts_of([*trained(), event(last, 6, step=11, cause="interrupted", **fields)]).course.step == 11


def test_a_resumed_job_counts_from_where_it_goes_on() -> None:
    again = [event("job_started", 100, step=8, workers=4), plan(101, 1, [[0, 1, 2, 3]])]
    facts = facts_of([*trained(), *again])
    course = facts.course
    assert (course.step, course.redo_to, present_speed(facts), course.eta_s(50)) == (8, 10, None, None)
    assert facts.account.seconds()["not running"] == pytest.approx(100 - 5.7)
    further = facts_of([*trained(), event("job_started", 100, step=30, workers=4)])
    assert (further.course.step, further.course.redo_to) == (30, 0)


def test_a_new_life_has_no_pool_until_it_is_given_one() -> None:
    events = [*trained(TWO), killed(2, 5.8), plan(5.9, 2, [[0, 1], [3]])]
    back = event("worker_joined", 6.5, worker_id=2, incarnation=1, pid=9, host="a")
    assert facts_of(events).crew.workers[2].stage == 1  # the dead one is shown where it is missed
    assert facts_of([*events, back]).crew.workers[2].stage is None


def test_speed_is_that_of_now() -> None:
    pace = Pace()
    for second in range(1, 6):
        pace.commit(second * S, second, 10, clean=second > 1)
    assert (pace.usual_s, pace.samples_per_s()) == (1.0, 10.0)
    assert pace.samples_per_s(41 * S) == 1.0  # it falls while the next one is overdue
    assert pace.eta_s(5, 15) == 10.0
    pace.commit(4 * S, 6, 10, clean=False)  # told late, with another time
    assert (pace.samples_per_s(), pace.eta_s(6, 15)) == (None, None)
    pace.begin(5 * S)
    assert (pace.samples_per_s(), pace.usual_s) == (None, 1.0)


def test_speed_falls_just_while_training_stands_still() -> None:
    """A recovery ends before its first step is told: the step is not overdue by then, and the speed does not fall."""
    struck = [*trained(), killed(2, 5.8), plan(5.9, 2, [[0, 1, 3]])]
    still, told = facts_of(struck), facts_of([*struck, recovered(2, 5.8, 9.0)])
    now_ns, speed = T0 + round(9.1 * S), present_speed(still)
    assert speed is not None
    assert still.stands_still(now_ns) and (present_speed(still, now_ns) or 0) < speed / 2
    assert not told.stands_still(now_ns) and present_speed(told, now_ns) == speed


def test_a_standstill_is_not_training() -> None:
    facts = facts_of([*trained(), commit(11, 15.7), commit(12, 16.0)])
    seconds = facts.account.seconds()
    assert seconds["stalled"] == pytest.approx(10 - 0.3)
    assert sum(seconds.values()) == pytest.approx(16.0)
    (open_one,) = facts.under_way(T0 + 30 * S)
    assert (open_one.use, open_one.end_ns - open_one.begin_ns) == ("stalled", pytest.approx(13.7 * S, rel=1e-6))


def paced(each: list[float]) -> list[dict[str, Any]]:
    """4 workers; steps of so many seconds each, from 2.5 s on."""
    return [*trained()[:6], *(commit(n, at) for n, at in enumerate(accumulate(each, initial=2.5)) if n)]


@pytest.mark.parametrize(
    ("fast", "slow_s", "rate"),
    [([], 40.0, 0.98), ([], 70.0, 0.98), ([0.5] * 40, 2.5, 0.87), ([20.0] * 40, 90.0, 0.88)],
)
def test_steps_that_are_slow_for_good_are_the_usual_ones(
    fast: list[float], slow_s: float, rate: float, tmp_path: Path
) -> None:
    events = paced([*fast, *[slow_s] * 100])
    write_events(tmp_path, events)
    assert (History(tmp_path).load().goodput(False) or 0) > rate
    course = facts_of(events).course
    assert course.pace.usual_s == pytest.approx(slow_s)
    assert course.pace.samples_per_s() == pytest.approx(8 / slow_s)
    assert course.eta_s(len(fast) + 110) == pytest.approx(10 * slow_s)
    assert course.rates[4][2] >= 80, "steps that the speed of so many workers is of"
    for count in (len(fast) + 100,) if fast else (1, 2, 3, 100):  # after step 1, only that one is known
        told = events[: 6 + count]
        said = headline(facts_of(told), Now(told[-1]["time_unix_ns"] + round(0.9 * slow_s * S)))
        assert said.text == f"All is well: step {count}, 4 of 4 workers."


def test_a_job_that_slows_down_has_a_speed_after_the_second_slow_step() -> None:
    facts = facts_of(paced([20.0] * 40 + [90.0] * 2))
    assert (present_speed(facts), facts.course.eta_s(52)) == (pytest.approx(8 / 90), pytest.approx(900))


def test_one_standstill_changes_neither_the_usual_time_nor_the_speed() -> None:
    before, after = [0.5] * 20, [0.5] * 5
    hung = facts_of(paced(before))
    said = headline(hung, Now(hung.course.last_step_ns + 59 * S))
    assert (said.level, said.text) == ("warning", "No step for 59 s (usually 0.5 s): no fault has been noticed yet.")
    for stood_s in (60.0, 61.0):
        facts = facts_of(paced([*before, stood_s, *after]))
        assert facts.account.seconds()["stalled"] == pytest.approx(stood_s - 0.5)
        assert facts.course.pace.usual_s == pytest.approx(0.5)
        assert facts.course.rates[4][2] == len(before) + len(after) - 1
    assert present_speed(facts) == pytest.approx(16)
    again = facts_of(paced([*before, 70.0, *after, 70.0, *after]))
    assert again.account.seconds()["stalled"] == pytest.approx(139)


def test_what_a_recovery_takes_is_counted_from_the_fault_on_until_it_is_over() -> None:
    struck = [*trained(), killed(2, 5.8), plan(5.9, 2, [[0, 1, 3]])]
    used = {one.use: (one.end_ns - one.begin_ns) / S for one in facts_of(struck).under_way(T0 + 7 * S)}
    assert used["recovery: other"] == pytest.approx(1.2)
    for log in (trained(), [*struck, recovered(2, 5.8, 9.0)]):
        assert "recovery: other" not in {one.use for one in facts_of(log).under_way(T0 + 10 * S)}


def test_goodput_by_capacity(tmp_path: Path) -> None:
    """One of four workers for half of the time."""
    log = [event("job_started", 0, step=0, workers=4), plan(0, 1, [[0]]), *(commit(s, s) for s in range(1, 11))]
    log += [plan(10, 2, [[0, 1, 2, 3]]), *(commit(s, s) for s in range(11, 21))]
    write_events(tmp_path, log)
    history = History(tmp_path).load()
    assert history.goodput(False) == pytest.approx(1.0)
    assert history.goodput_by_capacity(False) == pytest.approx((10 / 4 + 10) / 20)


def test_capacity_survives_folding() -> None:
    account = TimeAccount()
    account.reach(0)
    for i in range(30_000):
        account.capacity(i * 10, 0.5 if i % 2 else 1.0)
        account.paint(i * 10, i * 10 + 4, "evaluation")
        account.reach(i * 10 + 10)
    assert account.by_capacity_s() == pytest.approx(30_000 * 6 * 0.75 / 1e9)


def test_lives_with_the_same_number_are_told_apart_by_their_process() -> None:
    usage = Usage()
    for at, pid, samples in ((1, 7, 800), (2, 7, 808), (9, 8, 8), (10, 8, 24)):
        row = {"worker_id": 0, "incarnation": 0, "pid": pid, "samples": samples}
        usage.take({"t": at * S, "host": "h", "workers": [row]})
        if at == 9:
            assert usage.workers[0].samples_per_s is None
    assert usage.workers[0].samples_per_s == 16


def test_a_directory_that_is_taken_again_begins_and_does_not_stand_still(tmp_path: Path) -> None:
    write_events(tmp_path, trained(), earlier_ns=10**18)
    job = {"task": "digits", "explicit": ["steps", "chaos"], "config": {"steps": 30, "chaos": "x"}, "argv": []}
    (tmp_path / "job.json").write_text(json.dumps(job))
    history = History(tmp_path).load()
    assert "died without a word" in history.headline(False).text
    assert f"everstep run digits --run-dir {tmp_path} --set steps=30" in history.headline(False).more
    with run_lock(tmp_path):
        assert history.begins(True) and history.state(True) == "starting"
        assert history.headline(True).text.startswith("Starting again, after step 10")
        assert sum(history.seconds(True).values()) == pytest.approx(5.7)
    os.utime(tmp_path / "lock", ns=(1, 1))
    assert not history.begins(True)


def test_a_plan_does_not_answer_a_death_after_it() -> None:
    """A step that was committed between the two deaths is no end of the second one."""
    events = [*trained(), killed(2, 5.8), plan(5.9, 2, [[0, 1, 3]]), killed(3, 6.0), commit(11, 6.1)]
    assert facts_of(events).incidents.open is not None
    events += [plan(6.3, 3, [[0, 1]]), commit(12, 6.5)]
    (line,) = lines(events)
    assert line.endswith("training went on after 700 ms")


@pytest.mark.parametrize("first", [0, 1, 2])
def test_of_several_deaths_the_earliest_begins_the_recovery_in_whatever_order_they_are_told(first: int) -> None:
    deaths = [killed(1, 5.82), killed(2, 5.8), killed(3, 5.9)]
    facts = facts_of([*trained(), *deaths[first:], *deaths[:first]])
    assert facts.condition.fault_ns == T0 + round(5.8 * S)


def test_a_spare_of_a_job_that_was_made_smaller_waits() -> None:
    """Nobody heals where fewer workers are wanted than before."""
    joined = event("worker_joined", 5.8, worker_id=4, incarnation=0, pid=4, host="a")
    fewer = {**plan(6, 2, [[0, 2, 3]], "drained", "worker 1 leaves as asked"), "target": 3}
    facts = facts_of([*trained(), joined, fewer, commit(11, 6.3)])
    states = {i: worker.state for i, worker in facts.crew.workers.items()}
    assert (states[1], states[4], facts.crew.wanted) == ("left", "spare", 3)


def test_an_exception_of_two_leaders_is_told_once() -> None:
    why = {"cause": "exception", "reason": "ValueError: 17"}
    first, second = (event("worker_evicted", 6 + i / 5, worker_id=i, incarnation=0, **why) for i in (0, 1))
    (line,) = lines([*trained(), first, plan(6.1, 2, [[1, 2, 3]], "exception"), second])
    assert line.startswith(
        "worker 0 (leader) raised an exception; worker 1 (leader) raised an exception (ValueError: 17)"
    )
