"""The coordinator's decisions, one situation at a time."""

from __future__ import annotations

import pytest
from coordinator_harness import MS, S, World, drop, member, running

from everstep.base.cause import Cause, Why
from everstep.protocol import messages as m
from everstep.protocol.coordinator.agreement import timed
from everstep.protocol.coordinator.types import Tick
from everstep.protocol.following import StatesAlike, name_of
from everstep.protocol.lease.writer import compacted

# ---- start


def test_starts_when_all_workers_are_there():
    world = World()
    world.agent(0, 1, 2)
    world.hello(0)
    world.hello(2)
    assert world.plan is None and world.coordinator.status()["state"] == "starting"
    world.hello(1)
    assert world.plan.generation == 1 and world.plan.worker_ids == (0, 1, 2)
    assert [to for to, _ in world.sent if isinstance(_, m.PlanNow)] == ["w0.0", "w1.0", "w2.0"]
    assert world.report("generation_started")["leader"] == 0


def test_starts_with_those_there_after_ten_seconds():
    world = World(min_workers=2)
    world.agent(0, 1, 2)
    world.hello(0)
    world.wait(11 * S)
    assert world.plan is None
    world.hello(2)
    assert world.plan.worker_ids == (0, 2)
    assert "2 of 3" in world.plan.reason


def test_starts_with_fewer_when_a_slot_is_lost():
    world = World(min_workers=2)
    world.agent(0, 1, 2)
    world.hello(0)
    world.hello(2)
    world.say("a1", m.SlotLost(agent_id="a1", worker_id=1, reason="crash loop"))
    assert world.plan.worker_ids == (0, 2)


def test_a_slot_that_was_given_up_and_runs_again_is_waited_for_at_the_start():
    world = World(min_workers=2)
    world.agent(0, 1)
    world.say("a1", m.SlotLost(agent_id="a1", worker_id=2, reason="crash loop"))
    world.started(2, 3)
    world.hello(0)
    world.hello(1)
    assert world.plan is None
    world.hello(2, 3)
    assert world.plan.worker_ids == (0, 1, 2)


def test_fails_when_lost_slots_leave_too_few():
    world = World(min_workers=3)
    world.agent(0, 1, 2)
    world.say("a1", m.SlotLost(agent_id="a1", worker_id=1, reason="crash loop"))
    ended = world.last(m.JobEnded, "a1")
    assert (ended.state, ended.exit_code) == ("failed", 1) and "crash loop" in ended.reason


def test_spares_wait_outside_the_plan_even_if_they_are_first():
    world = World()
    world.agent(0, 1, 2, 3)
    for i in (3, 2, 1, 0):
        world.hello(i)
    assert world.plan.worker_ids == (0, 1, 2)
    roles = {w["worker_id"]: w["role"] for w in world.coordinator.status()["workers"]}
    assert roles == {0: "leader", 1: "active", 2: "active", 3: "spare"}


def test_gives_up_after_the_quorum_wait():
    world = World(quorum_wait_ns=30 * S)
    world.agent(0, 1, 2)
    world.wait(29 * S)
    assert world.last(m.JobEnded) is None
    world.wait(2 * S)
    assert world.last(m.JobEnded, "a1").exit_code == 3
    assert world.report("job_failed")["reason"].startswith("gave up")


def test_enough_that_come_late_are_not_given_up_while_the_others_get_a_little_time():
    world = World(quorum_wait_ns=30 * S, min_workers=2)
    world.agent(0, 1, 2)
    world.wait(25 * S)
    world.hello(0)
    world.hello(1)
    world.wait(6 * S)
    assert world.last(m.JobEnded) is None and world.coordinator.status()["generation"] == 0
    world.wait(5 * S)
    assert world.plan.worker_ids == (0, 1)


# ---- deaths


def test_a_death_makes_a_repaired_plan_at_once():
    world = running()
    before = world.plan
    world.exited(2)
    plan = world.plan
    assert plan.generation == 2 and plan.worker_ids == (0, 1) and plan.previous == 1 and not plan.prepared
    for seat in before.seats[:2]:
        assert set(seat.lanes) <= set(plan.lanes_of(seat.worker_id))
    assert {to for to, x in world.sent if isinstance(x, m.PlanNow)} == {"w0.0", "w1.0"}
    assert world.report("worker_evicted")["reason"] == "killed by SIGKILL"
    assert "SIGKILL" in plan.reason
    kinds = [e["kind"] for e in world.journal]
    assert kinds[-2:] == ["evict", "plan"]


def test_journal_entries_come_before_all_messages():
    world = running()
    effects = world.say(
        "a1", m.WorkerExited(agent_id="a1", worker_id=0, incarnation=0, reason="killed", died_unix_ns=1)
    )
    kinds = [type(e).__name__ for e in effects]
    assert kinds.index("Send") > max(i for i, k in enumerate(kinds) if k == "Persist")


def test_the_dead_leader_is_succeeded():
    world = running()
    world.exited(0)
    assert world.report("leader_changed")["worker_id"] == 1


def test_an_evicted_life_is_fenced():
    world = running()
    world.exited(2)
    world.clear()
    world.hello(2, plan=world.plan)
    assert world.last(m.Dismissed, "w2.0") is not None and world.plan.worker_ids == (0, 1)
    world.entered(2, 2, 9)
    assert world.coordinator.status()["step"] == 0


def test_a_death_is_counted_once():
    world = running()
    world.exited(2)
    world.exited(2)
    assert world.plan.generation == 2


def test_two_deaths_are_two_generations_with_one_recovery():
    world = running(4)
    world.exited(3)
    world.exited(2)
    assert world.plan.generation == 3 and world.plan.worker_ids == (0, 1)
    world.entered(0, 3, 7, settle=30.0, regroup=4.0)
    assert "recovery_completed" not in world.kinds()
    world.now += 50 * MS
    world.entered(1, 3, 7, settle=10.0, unblock=2.0)
    assert "recovery_completed" not in world.kinds()
    world.now += 20 * MS
    world.progress(0, 3, 7)
    done = world.report("recovery_completed")
    assert world.kinds().count("recovery_completed") == 1
    assert done["phases_s"]["settle"] == 0.03 and done["phases_s"]["unblock"] == 0.002
    assert done["phases_s"]["redo"] == pytest.approx(0.02)
    assert done["duration_s"] == pytest.approx(0.07) and done["step"] == 7


def test_the_time_of_death_tells_the_notice():
    fields = {"died_unix_ns": 10 * S, "duration_s": 0.5, "phases_s": {"notice": 0.0, "decide": 0.1, "redo": 0.3}}
    told = timed(fields, 10 * S + 700 * MS)
    assert told["duration_s"] == pytest.approx(0.7)
    assert told["phases_s"] == {"notice": pytest.approx(0.2), "decide": 0.1, "redo": pytest.approx(0.3)}
    assert timed(fields, 9 * S)["phases_s"]["notice"] == 0.0, "clocks may be set back"
    hang = {**fields, "died_unix_ns": None}
    assert timed(hang, 20 * S) == {**hang, "time_unix_ns": 20 * S}


def test_a_recovery_ends_at_the_commit_and_not_when_that_is_heard_of():
    spent = {"notice": 0.0, "decide": 0.1, "redo": 0.9}
    fields = {"died_unix_ns": 10 * S, "duration_s": 1.0, "phases_s": spent, "committed_unix_ns": 10 * S + 500 * MS}
    told = timed(fields, 11 * S + 200 * MS)
    assert told["time_unix_ns"] == 10 * S + 500 * MS and "committed_unix_ns" not in told
    assert told["duration_s"] == pytest.approx(0.5)
    assert told["phases_s"] == {"notice": pytest.approx(0.2), "decide": 0.1, "redo": pytest.approx(0.2)}
    for strange_ns in (1, 99 * S):  # the clock of another host
        told = timed({**fields, "committed_unix_ns": strange_ns}, 11 * S + 200 * MS)
        assert 10 * S <= told["time_unix_ns"] <= 11 * S + 200 * MS and min(told["phases_s"].values()) >= 0
        assert sum(told["phases_s"].values()) <= told["duration_s"] + 1e-9


def test_a_recovery_ends_with_the_job_at_the_latest():
    world = running()
    world.exited(2)
    world.entered(0, 2, 9)
    world.entered(1, 2, 9)
    world.say("w0.0", m.WorkerDone(worker_id=0, incarnation=0, generation=2, step=8, final_written=True))
    assert [k for k in world.kinds() if k in ("recovery_completed", "job_completed")] == [
        "recovery_completed",
        "job_completed",
    ]


def test_progress_of_the_leader_completes_a_recovery_too():
    world = running()
    world.exited(2)
    world.entered(0, 2, 3)
    world.progress(0, 2, 3)
    assert world.kinds().count("recovery_completed") == 1


def test_a_newer_life_shows_that_the_old_one_is_gone():
    world = running()
    world.hello(1, 1)
    assert world.plan.generation == 2 and world.plan.worker_ids == (0, 2)
    assert world.report("worker_evicted")["cause"] is Cause.REPLACED


def test_last_words_evict_and_the_same_error_again_fails_the_job():
    world = running()
    words = {"step": 7, "reason": "ValueError: boom", "signature": "x", "fatal": False}
    world.say("w2.0", m.WorkerFailed(worker_id=2, incarnation=0, **words))
    assert world.plan.worker_ids == (0, 1)
    world.say("w1.0", m.WorkerFailed(worker_id=1, incarnation=0, **words))
    ended = world.last(m.JobEnded, "w0.0")
    assert ended.state == "failed" and "boom" in ended.reason


def test_different_errors_do_not_fail_the_job():
    world = running()
    for worker, signature in ((2, "a"), (1, "b")):
        world.say(
            f"w{worker}.0",
            m.WorkerFailed(worker_id=worker, incarnation=0, step=7, reason="chaos", signature=signature, fatal=False),
        )
    assert world.plan.worker_ids == (0,) and world.last(m.JobEnded) is None


def test_the_same_error_of_several_at_once_is_no_proof():
    world = running()
    words = {"incarnation": 0, "step": 7, "reason": "OSError: stale file handle", "signature": "x", "fatal": False}
    for worker in (2, 1):
        world.say(f"w{worker}.0", m.WorkerFailed(worker_id=worker, generation=1, **words))
    assert world.plan.worker_ids == (0,) and world.last(m.JobEnded) is None
    world.say("w0.0", m.WorkerFailed(worker_id=0, generation=3, **words))  # at whom all lanes are now
    assert world.last(m.JobEnded, "a1").state == "failed"


WORDS = {"incarnation": 0, "step": 7, "reason": "ValueError: boom", "signature": "x", "fatal": False, "holds": True}


def test_the_last_that_hold_the_state_save_it_before_they_are_let_go():
    world = running(save_ns=30 * S)
    for worker in (2, 1):
        world.say(f"w{worker}.0", m.WorkerFailed(worker_id=worker, generation=1, **WORDS))
    assert world.plan.worker_ids == (0,) and not world.plan.save, "who can go on has the state"
    world.say("w0.0", m.WorkerFailed(worker_id=0, generation=1, **WORDS))
    assert world.plan.worker_ids == (0,) and world.plan.save.startswith("before the end of worker 0")
    assert world.last(m.Dismissed, "w0.0") is None
    world.entered(0, world.plan.generation, 7)
    world.say("w0.0", m.Saved(worker_id=0, incarnation=0, step=6, ok=True, where="x/step-6"))
    assert world.last(m.Dismissed, "w0.0").reason == "ValueError: boom" and world.last(m.JobEnded) is None
    for worker in (0, 1, 2):
        world.exited(worker)
        world.started(worker, 1)
        world.hello(worker, 1)
    assert world.plan.worker_ids == (0, 1, 2) and not world.plan.save
    for worker in (0, 1, 2):
        world.entered(worker, world.plan.generation, 7, incarnation=1)
    again = {**WORDS, "incarnation": 1, "generation": world.plan.generation}
    for worker in (1, 0):
        world.say(f"w{worker}.1", m.WorkerFailed(worker_id=worker, **again))
    assert world.last(m.JobEnded) is None and world.plan.worker_ids == (2,) and world.plan.save
    world.say("w2.1", m.WorkerFailed(worker_id=2, **again))  # it holds the state: it stays until it is saved
    assert world.last(m.Dismissed, "w2.1") is None
    world.entered(2, world.plan.generation, 7, incarnation=1)
    world.say("w2.1", m.Saved(worker_id=2, incarnation=1, step=6, ok=True, where="x/step-6"))
    ended = world.last(m.JobEnded, "a1")
    assert ended.state == "failed" and "boom" in ended.reason and "checkpoint of step 6 in x" in ended.reason


def test_what_no_restart_can_help_ends_the_job_after_a_checkpoint_where_the_state_is_whole():
    world = running(save_ns=30 * S)
    words = {**WORDS, "fatal": True, "reason": "step 7: the loss of lane 3 is not finite"}
    for worker in (1, 2, 0):
        world.say(f"w{worker}.0", m.WorkerFailed(worker_id=worker, generation=1, **words))
        assert world.last(m.JobEnded) is None and world.plan.worker_ids == (0, 1, 2) and world.plan.save
    assert world.plan.generation == 2
    for worker in (0, 1, 2):
        world.entered(worker, 2, 8)
    world.say("w0.0", m.Saved(worker_id=0, incarnation=0, step=7, ok=True, where="x/step-7"))
    ended = world.last(m.JobEnded, "a1")
    assert (ended.state, ended.exit_code) == ("failed", 1)
    assert "lane 3 is not finite; checkpoint of step 7 in x/step-7" in ended.reason


def test_what_a_joiner_alone_cannot_do_ends_the_job_after_a_checkpoint_of_the_members():
    """A limit that nobody meets but who heals costs no step."""
    world = running(save_ns=30 * S)
    world.say("w2.0", m.WorkerFailed(worker_id=2, generation=1, **{**WORDS, "signature": "y", "holds": False}))
    for worker in (0, 1):
        world.entered(worker, 2, 7)
    world.exited(2)
    world.started(2, 1)
    world.hello(2, 1)
    words = {"step": 7, "reason": "buffer b is too large", "signature": "z", "fatal": True, "exit_code": 2}
    world.say("w2.1", m.WorkerFailed(worker_id=2, incarnation=1, generation=2, **words))
    assert world.last(m.JobEnded) is None and world.plan.worker_ids == (0, 1) and world.plan.save
    for worker in (0, 1):
        world.entered(worker, 3, 8)
    world.say("w0.0", m.Saved(worker_id=0, incarnation=0, step=7, ok=True, where="x/step-7"))
    ended = world.last(m.JobEnded, "a1")
    assert ended.exit_code == 2 and ended.reason.endswith("buffer b is too large; checkpoint of step 7 in x/step-7")


def test_who_waits_for_a_checkpoint_in_vain_is_let_go():
    world = running(1, save_ns=5 * S)
    world.say("w0.0", m.WorkerFailed(worker_id=0, generation=1, **WORDS))
    assert world.plan.generation == 2 and world.plan.save
    world.wait(6 * S)
    assert world.last(m.Dismissed, "w0.0").reason == "ValueError: boom" and world.last(m.JobEnded) is None


def differ(world: World, worker: int, generation: int, decided_in: int) -> None:
    words = {"reason": "the state differs before step 20", "tainted": 20, "decided_in": decided_in}
    world.say(f"w{worker}.0", m.SettleAgain(worker_id=worker, incarnation=0, generation=generation, **words))


@pytest.mark.parametrize(
    ("more", "said"),
    [({}, "worker 1: a checkpoint is damaged"), ({"tainted": 20, "decided_in": 1}, "a checkpoint is damaged")],
)
def test_a_plan_names_the_member_whose_statement_was_wrong_unless_states_differ(more: dict[str, int], said: str):
    world = running()
    again = {"worker_id": 1, "incarnation": 0, "generation": 1, "reason": "a checkpoint is damaged"}
    world.say("w1.0", m.SettleAgain(**again, **more))
    assert world.plan.generation == 2 and world.plan.reason == said


def test_plans_tell_of_taint_until_a_generation_has_settled_with_it():
    """The outvoted worker may be the only one that has found it, and gone."""
    world = running()
    world.progress(0, 1, 18)
    words = {"reason": "it deviates", "signature": "t", "fatal": False}
    world.say("w2.0", m.WorkerFailed(worker_id=2, incarnation=0, step=19, sound=9, generation=1, **words))
    assert world.plan.generation == 2 and world.plan.sound == 9
    world.entered(0, 2, 9)
    world.say("w1.0", m.WorkerFailed(worker_id=1, incarnation=0, step=19, **{**words, "signature": "other"}))
    assert world.plan.generation == 3 and world.plan.sound == -1
    assert world.plan.voided == 2, "who was not there has to know, too"
    again = world.restart()
    again.agent(0, 1)
    again.hello(0, plan=world.plan)
    assert again.plan.voided == 2


def test_a_restarted_coordinator_still_knows_of_taint():
    world = running()
    words = {"reason": "it deviates", "signature": "t", "fatal": False}
    world.say("w2.0", m.WorkerFailed(worker_id=2, incarnation=0, step=19, sound=9, generation=1, **words))
    again = world.restart()
    again.agent(0, 1)
    again.hello(0, plan=world.plan), again.hello(1, plan=world.plan)
    again.say("w1.0", m.WorkerFailed(worker_id=1, incarnation=0, step=19, **{**words, "signature": "other"}))
    assert again.plan.generation > world.plan.generation and again.plan.sound == 9


@pytest.mark.parametrize("switched", [False, True])
def test_a_prepared_plan_leaves_taint_open_until_members_switch_to_it(switched):
    """They have settled in the plan before it by then, and so known of it."""
    world = running()
    words = {"reason": "it deviates", "signature": "t", "fatal": False}
    world.say("w2.0", m.WorkerFailed(worker_id=2, incarnation=0, step=19, sound=9, generation=1, **words))
    again = world.restart()
    again.agent(0, 1)
    again.hello(0, plan=world.plan), again.hello(1, plan=world.plan)
    assert again.command("scale", workers=1).ok
    again.wait(3 * S)
    prepared = again.last(m.PlanPrepared, "w0.0").plan
    if switched:
        again.entered(0, prepared.generation, 10)
    for life in (again, again.restart(), again.restart(compacted(again.journal))):
        progress = life.coordinator.job.progress
        assert (progress.sound, progress.voided) == ((-1, 2) if switched else (9, 0))


def test_states_that_differ_once_are_gone_back_from_and_twice_fail_the_job():
    world = running()
    world.progress(0, 1, 18)
    world.say(
        "w2.0",
        m.WorkerFailed(worker_id=2, incarnation=0, step=19, reason="it deviates", signature="t", fatal=False),
    )
    for worker in (0, 1):  # of the generation in which it was found, though the next one is there already
        differ(world, worker, 1, 1)
    assert world.plan.generation == 2 and world.plan.worker_ids == (0, 1)
    for worker in (0, 1):
        world.entered(worker, 2, 9)
    told = world.report("fallback")
    assert (told["step"], told["steps_redone"]) == (8, 10) and "the state differs before step 20" in told["reason"]
    differ(world, 0, 2, 2)
    ended = world.last(m.JobEnded, "a1")
    assert ended.state == "failed" and "second time since they were alike" in ended.reason


def alike(world, step, **digests):
    said = {int(k[1:]): digest for k, digest in digests.items()}
    world.say("w0.0", StatesAlike(worker_id=0, incarnation=0, step=step, digests=said))


@pytest.mark.parametrize(("step", "ends"), [(18, True), (19, False)])
def test_states_that_were_alike_again_where_they_had_differed_may_differ_once_more(step, ends):
    world = running()
    world.progress(0, 1, 18)
    differ(world, 0, 1, 1)
    for worker in range(3):
        world.entered(worker, 2, 9)
    alike(world, step, s0="a")
    differ(world, 0, 2, 2)
    assert (world.last(m.JobEnded, "a1") is not None) == ends


def test_plans_say_at_which_steps_all_were_alike():
    world = running()
    for step in range(10, 60, 10):
        alike(world, step, s0=f"{step}" + "x" * 9000, s7="no such stage")
    world.progress(0, 1, 18)
    differ(world, 0, 1, 1)
    assert [(step, stage, digest[:3]) for step, stage, digest in world.plan.alike] == [
        (step, 0, f"{step}x") for step in (20, 30, 40, 50)
    ]
    assert max(len(digest) for _, _, digest in world.plan.alike) <= 4096
    again = world.restart()
    assert again.plan.alike == world.plan.alike


def test_drift_ends_the_job_at_once_and_names_what_counts():
    world = running()
    world.progress(0, 1, 18)
    words = {"reason": "worker 1 was healed", "cause": Cause.NONDETERMINISTIC, "tainted": 20, "decided_in": 1}
    world.say("w0.0", m.SettleAgain(worker_id=0, incarnation=0, generation=1, sound=12, drift=True, **words))
    ended = world.last(m.JobEnded, "a1")
    assert (ended.state, ended.exit_code, ended.cause) == ("failed", 1, Cause.NONDETERMINISTIC)
    assert ended.reason.endswith("the newest checkpoint up to step 12 counts")


def test_a_worker_leaves_if_others_have_found_its_state_to_be_wrong():
    """It may hear of the next plan before it has all records of the comparison."""
    world = running()
    world.progress(0, 1, 18)
    words = {"reason": "worker 2 deviates", "cause": Cause.CORRUPT, "tainted": 20, "decided_in": 1, "sound": 9}
    for worker in (0, 1):
        say = m.SettleAgain(worker_id=worker, incarnation=0, generation=1, odd=[2, 7], **words)
        world.say(f"w{worker}.0", say)
    assert world.plan.generation == 2 and world.plan.worker_ids == (0, 1) and world.plan.sound == 9
    assert world.last(m.Dismissed, "w2.0").cause == Cause.CORRUPT
    evicted = world.report("worker_evicted")
    assert evicted["worker_id"] == 2 and evicted["reason"] == "worker 2 deviates"


def test_a_next_life_does_not_leave_for_the_state_of_the_one_before():
    world = running()
    world.progress(0, 1, 18)
    words = {"reason": "worker 2 deviates", "cause": Cause.CORRUPT, "tainted": 20, "decided_in": 1, "sound": 9}
    world.say("w0.0", m.SettleAgain(worker_id=0, incarnation=0, generation=1, odd=[2], **words))
    world.hello(2, 1)
    world.say("w1.0", m.SettleAgain(worker_id=1, incarnation=0, generation=1, odd=[2], **words))
    assert world.last(m.Dismissed, "w2.1") is None and world.kinds().count("worker_evicted") == 1


def test_who_is_outvoted_in_another_generation_ends_the_job():
    world = running()
    words = {"reason": "it deviates", "signature": "t", "fatal": False, "step": 19, "tainted": 19, "sound": 0}
    world.say("w2.0", m.WorkerFailed(worker_id=2, incarnation=0, generation=1, **words))
    assert world.plan.generation == 2 and world.last(m.JobEnded, "a1") is None
    world.say("w1.0", m.WorkerFailed(worker_id=1, incarnation=0, generation=2, **words))
    ended = world.last(m.JobEnded, "a1")
    assert ended.state == "failed" and "second time since they were alike" in ended.reason
    assert ended.reason.endswith("no checkpoint counts")


def test_a_fatal_error_fails_the_job_at_once():
    world = running()
    world.say(
        "w2.0",
        m.WorkerFailed(
            worker_id=2, incarnation=0, step=0, reason="no such file", signature="x", fatal=True, exit_code=2
        ),
    )
    assert world.last(m.JobEnded, "a1").exit_code == 2 and world.coordinator.status()["state"] == "failed"
    world.clear()
    world.hello(2, 1)
    assert world.last(m.JobEnded, "w2.1") is not None


# ---- silence and hangs


def test_a_silent_host_is_suspected_and_then_evicted():
    world = World(workers=2, hang_limit_ns=None)
    world.agent(0, name="a1", host="a1")
    world.agent(1, name="a2", host="a2")
    world.hello(0)
    world.hello(1)
    for _ in range(5):
        world.now += S
        world.beat(agent="a1")
        world.beat(agent="a2")
    for _ in range(8):
        world.wait(500 * MS, beating=False)
        world.beat(agent="a1")
    assert world.kinds().index("worker_suspected") < world.kinds().index("worker_evicted")
    assert world.plan.worker_ids == (0,) and "a2 is silent" in world.plan.reason
    assert "a2" in world.closed


def test_heartbeats_are_answered_and_keep_alive():
    world = running()
    world.wait(60 * S)
    assert world.plan.generation == 1 and world.last(m.Pong, "a1").seq == world.seq


def test_a_hung_worker_is_killed():
    world = running()
    world.beat((0, 0, "forward", 20), (1, 0, "forward", 6_000), (2, 0, "backward", 10))
    assert world.report("worker_suspected")["worker_id"] == 1
    world.now += S
    world.beat((1, 0, "forward", 10_000))
    assert world.plan.worker_ids == (0, 2)
    assert world.last(m.KillWorker, "a1").worker_id == 1 and world.last(m.Dismissed, "w1.0") is not None
    assert "no progress for 10.0 s in phase 'forward'" in world.plan.reason


def test_idle_is_not_hanging_unless_something_was_asked():
    world = running()
    world.beat((1, 0, "idle", 3_600_000))
    assert world.plan.generation == 1
    world.exited(2)
    world.entered(0, 2, 3)
    world.wait(9 * S)
    world.beat((1, 0, "idle", 3_600_000))
    assert world.plan.generation == 2
    world.wait(2 * S)
    world.beat((1, 0, "idle", 3_600_000))
    assert world.plan.worker_ids == (0,)


@pytest.mark.parametrize(("step_ms", "still_ms", "hangs"), [(100.0, 9_900, False), (100.0, 10_100, True)])
def test_automatic_limit_has_a_floor_of_ten_seconds(step_ms, still_ms, hangs):
    world = running(hang_limit_ns=None)
    world.progress(0, 1, 1, step_ms)
    world.beat((1, 0, "forward", still_ms))
    assert (world.plan.generation == 2) == hangs


def test_automatic_limit_follows_the_slowest_of_the_last_hundred_steps():
    world = running(hang_limit_ns=None)
    world.progress(0, 1, 1, 4_000.0)
    world.beat((1, 0, "forward", 39_000))
    assert world.plan.generation == 1
    for step in range(2, 102):
        world.progress(0, 1, step, 1_500.0)
    world.beat((1, 0, "forward", 15_100))
    assert world.plan.generation == 2


def test_a_worker_outside_the_plan_gets_ten_times_the_limit():
    world = running()
    world.started(3, 0)
    world.beat((3, 0, "build", 99_000))
    assert "warning" not in world.kinds()
    world.beat((3, 0, "build", 100_000))
    assert world.last(m.KillWorker, "a1").worker_id == 3 and world.plan.generation == 1


def test_a_disconnect_without_an_agent_is_a_death_after_a_second():
    world = World(workers=2)
    world.hello(0)
    world.hello(1)
    drop(world, "w1.0")
    world.wait(900 * MS)
    assert world.plan.generation == 1
    world.wait(200 * MS)
    assert world.plan.worker_ids == (0,)


def test_a_member_that_cannot_hear_of_a_plan_is_given_up_at_last():
    world = running()
    drop(world, "w1.0")
    world.exited(2)
    assert world.plan.worker_ids == (0, 1)
    world.wait(12 * S)
    assert world.plan.worker_ids == (0,) and "connection" in world.plan.reason


def test_a_returning_member_is_told_the_plan_it_missed():
    world = running()
    first = world.plan
    drop(world, "w1.0")
    world.exited(2)
    world.clear()
    world.hello(1, plan=first)
    assert world.last(m.PlanNow, "w1.0").plan == world.plan


def two_hosts() -> World:
    world = World(workers=2, quorum_wait_ns=60 * S)
    world.agent(0, name="a1", host="a1")
    world.agent(1, name="a2", host="a2")
    world.hello(0)
    world.hello(1, host="a2")
    world.wait(3 * S)
    world.clear()
    return world


def test_workers_outlive_their_agents_connection_up_to_the_ceiling():
    world = two_hosts()
    drop(world, "a2")
    world.wait(9 * S)
    assert world.plan.generation == 1
    world.agent(1, name="a2", host="a2")
    world.wait(9 * S)
    assert world.plan.generation == 1
    drop(world, "a2")
    world.wait(11 * S)
    assert world.plan.worker_ids == (0,)


def test_silence_of_all_who_hold_the_state_is_waited_out():
    world = two_hosts()
    world.exited(1, agent="a2")
    drop(world, "a1")
    world.wait(50 * S)
    assert world.plan.worker_ids == (0,) and "worker_suspected" in world.kinds()
    world.agent(0, name="a1", host="a1")
    world.wait(30 * S)
    assert world.plan.worker_ids == (0,)
    drop(world, "a1")
    world.wait(62 * S)
    assert world.coordinator.status()["state"] == "waiting" and world.report("worker_evicted")["worker_id"] == 0


@pytest.mark.parametrize("first", ["agent", "worker"])
def test_a_slot_that_another_host_runs_is_not_taken_over_by_a_newer_life(first):
    """A host that was away while its slot was given to another starts the slot's next life when it can."""
    world = two_hosts()
    if first == "agent":
        world.agent((1, 3), name="a3", host="a3")
    newer = world.hello(1, 3, host="a3")
    said = world.last(m.Dismissed, newer)
    assert said.reason == "slot 1 runs on host a2, as incarnation 0" and said.cause is Cause.REPLACED
    assert world.plan.generation == 1 and "worker_evicted" not in world.kinds()
    world.exited(1, agent="a2")
    assert world.plan.worker_ids == (0,)
    world.entered(0, world.plan.generation, 1)
    world.hello(1, 4, host="a3")  # nothing speaks against it any more
    assert world.last(m.Heal, "w1.4") is not None


def test_after_a_restart_a_slot_is_the_host_s_that_ran_it():
    """The other host's agent comes back first."""
    world = two_hosts()
    again = World(journal=world.journal, now=world.now, workers=2, quorum_wait_ns=60 * S)
    again.agent((1, 1), name="a3", host="a3")
    assert again.last(m.Dismissed, again.hello(1, 1, host="a3")) is not None
    again.agent(0, name="a1", host="a1")
    again.agent(1, name="a2", host="a2")
    again.hello(0, plan=world.plan)
    again.hello(1, plan=world.plan, host="a2")
    again.wait(3 * S)
    assert "worker_evicted" not in again.kinds() and again.plan.generation == 1


def test_only_the_host_that_has_a_slot_can_give_it_up():
    world = two_hosts()
    world.connect("a3", "agent")
    world.say("a3", m.AgentHello(agent_id="a3", host="a3", workers=[], slots=1))
    lost = {"worker_id": 1, "reason": "it ends at once", "cause": Cause.EXITED}
    world.say("a3", m.SlotLost(agent_id="a3", **lost))
    assert "warning" not in world.kinds()
    world.say("a2", m.SlotLost(agent_id="a2", **lost))
    assert world.report("warning")["reason"] == "its slot was given up: it ends at once"


def test_what_an_agent_has_given_up_is_heard_again_in_its_hello():
    world = two_hosts()
    lost = m.SlotLost(agent_id="a2", worker_id=1, reason="it ends at once", cause=Cause.EXITED)
    hello = m.AgentHello(agent_id="a2", host="a2", workers=[], slots=1, lost=[lost])
    world.connect("a2-again", "agent")
    world.say("a2-again", hello)
    assert world.report("warning")["reason"] == "its slot was given up: it ends at once"
    told = world.kinds().count("warning")
    world.say("a2-again", hello)
    assert world.kinds().count("warning") == told, "it is known"
    failed = m.HostFailed(agent_id="a2", reason="no fork server", cause=Cause.CRASH_LOOP)
    world.say("a2-again", m.AgentHello(agent_id="a2", host="a2", workers=[], slots=1, failed=failed))
    assert world.report("job_failed")["reason"] == "no fork server"


def test_a_returning_agent_names_the_lives_that_are_left():
    world = running()
    drop(world, "a1")
    world.agent(0, 1)
    assert world.plan.worker_ids == (0, 1)


def test_an_evicted_process_that_still_runs_is_killed_when_its_agent_is_back():
    world = running()
    world.exited(2)
    world.clear()
    drop(world, "a1")
    world.agent(0, 1, 2)
    assert world.last(m.KillWorker, "a1").worker_id == 2


def test_an_evicted_process_that_does_not_leave_is_killed_again_and_again():
    world = running()
    message = m.WorkerFailed(worker_id=2, incarnation=0, step=4, reason="it raised", signature="x", fatal=False)
    world.say("w2.0", message)
    assert world.plan.worker_ids == (0, 1) and world.last(m.KillWorker) is None
    for _ in range(12):  # the first time that it is seen it may be about to leave
        world.now += S
        world.beat((2, 0, "computing", 0))
    killed = world.messages(m.KillWorker, "a1")
    assert [(k.worker_id, k.incarnation) for k in killed] == [(2, 0)] * 2


def test_the_coordinators_own_absence_is_nobodys_silence():
    world = running()
    world.wait(5 * S)
    world.now += 60 * S
    world.handle(Tick())
    assert world.plan.generation == 1
    world.beat()
    world.wait(5 * S)
    assert world.plan.generation == 1


def test_nor_is_it_that_of_one_host_among_others():
    world = World()
    world.agent(0, 1)
    world.agent(2, name="a2", host="a2")
    for i, host in enumerate(("a1", "a1", "a2")):
        world.hello(i, host=host)
    for i in range(3):
        world.entered(i, 1, 1)
    world.wait(5 * S)
    world.now += 60 * S
    world.handle(Tick())
    assert world.plan.generation == 1 and world.plan.worker_ids == (0, 1, 2)


def test_a_joiner_that_a_plan_goes_on_without_is_worth_more_than_to_start_over():
    """It may have switched, or follow closely: what it held when the plan came without it is what is left."""
    world = running(3)
    world.exited(2)
    world.entered(0, 2, 5)
    world.hello(2, 1)
    world.healed(2, 1)
    heal = world.last(m.Heal, "w2.1")
    assert world.prepared is not None and 2 in world.prepared.worker_ids
    failed = m.HealFailed(worker_id=2, incarnation=1, ticket=heal.ticket, reason="the donor went away")
    world.say("w2.1", failed)
    assert world.plan.worker_ids == (0, 1)
    world.exited(0)
    world.exited(1)
    world.wait(11 * S)
    assert "worker 2, which had healed, goes on from step 5" in world.report("fallback")["reason"]


# ---- connections and the store


def test_a_message_before_the_hello_ends_the_connection():
    world = World()
    world.connect("x", "worker")
    world.say("x", m.StoreSet(generation=1, key="k", value=b"v"))
    assert world.closed == ["x"]


def test_a_newer_connection_replaces_the_older():
    world = running()
    world.connect("other", "worker")
    world.say("other", m.WorkerHello(member=member(1), step=0, follows=name_of(world.plan)))
    assert world.closed == ["w1.0"]
    drop(world, "w1.0")
    world.exited(2)
    assert world.last(m.PlanNow, "other") is not None


def test_what_changes_nothing_costs_no_decision():
    world = running()
    version = world.coordinator.job.version
    world.beat((0, 0, "computing", 0), (1, 0, "computing", 0), (2, 0, "computing", 0))
    world.progress(0, 1, 1)
    drop(world, "w1.0")
    world.hello(1, plan=world.plan)
    world.agent(0, 1, 2)
    assert world.coordinator.job.version == version


def test_slots_of_an_agent_without_workers_are_handed_on_when_it_is_given_up():
    world = running(2)
    world.agent(name="a2", host="a2", slots=1)
    world.command("scale", workers=3)
    [slots] = world.messages(m.SetSlots, "a2")
    world.clear()
    for _ in range(20):
        world.now += S
        world.beat()
    assert set(slots.worker_ids) <= set(world.last(m.SetSlots, "a1").worker_ids)


def test_store_answers_when_all_keys_are_set_and_none_when_superseded():
    world = running()
    world.say("w0.0", m.StoreGet(request=5, generation=1, keys=["a", "b"]))
    world.say("w1.0", m.StoreSet(generation=1, key="a", value=b"1"))
    assert world.last(m.StoreValues) is None
    world.say("w1.0", m.StoreSet(generation=1, key="b", value=b"2"))
    assert world.last(m.StoreValues, "w0.0") == m.StoreValues(request=5, values=[b"1", b"2"])
    world.say("w0.0", m.StoreGet(request=6, generation=1, keys=["c"]))
    world.exited(2)
    assert world.last(m.StoreValues, "w0.0") == m.StoreValues(request=6, values=None)
    world.say("w1.0", m.StoreGet(request=7, generation=1, keys=["a"]))
    assert world.last(m.StoreValues, "w1.0").values is None


def test_store_keeps_the_prepared_generation_too():
    world = running(4)
    world.command("drain", worker_id=3)
    for generation in (1, 2):
        world.say("w1.0", m.StoreSet(generation=generation, key="a", value=bytes([generation])))
    for generation in (1, 2):
        world.say("w0.0", m.StoreGet(request=generation, generation=generation, keys=["a"]))
        assert world.last(m.StoreValues, "w0.0").values == [bytes([generation])]


@pytest.mark.parametrize("doubts", [(5, 3), (3, 5), (0, 5), (5, 0)])
def test_of_two_doubts_the_earlier_sound_step_counts(doubts: tuple[int, ...]) -> None:
    progress = running().coordinator.job.progress
    for sound in doubts:
        said = m.SettleAgain(worker_id=0, incarnation=0, generation=1, reason="x", tainted=9, decided_in=1, sound=sound)
        progress.in_doubt(Why(Cause.CORRUPT, "states differ"), said)
    assert progress.sound == min(doubts)


def test_a_recovery_is_not_over_by_a_step_of_a_generation_that_has_broken_again() -> None:
    world = running(5, elsewhere=(3, 4))
    world.wait(20 * S)
    world.exited(2)
    for i in (0, 1, 3, 4):
        world.entered(i, 2, 1)
    for name in ("a2", "w3.0", "w4.0"):
        drop(world, name)
    world.exited(1)  # what comes of it waits for the verdict on that host
    assert world.plan.generation == 2 and world.coordinator.job.agreement.broken
    world.progress(0, 2, 2)
    assert "recovery_completed" not in world.kinds()


def test_a_worker_that_cannot_even_begin_fails_the_job_with_its_words():
    """It has never said hello: its task cannot be built."""
    world = running()
    world.exited(2)
    world.started(2, 1)
    world.connect("w2.1", "worker")
    words = {"step": 0, "reason": "ImportError: no module named data", "signature": "x", "fatal": True}
    world.say("w2.1", m.WorkerFailed(worker_id=2, incarnation=1, **words))
    ended = world.last(m.JobEnded, "w0.0")
    assert ended.state == "failed" and "no module named data" in ended.reason
