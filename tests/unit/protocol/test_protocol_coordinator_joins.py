"""The coordinator's changes of membership without a fault: joins, waits, commands; and its own restart."""

from __future__ import annotations

import pytest
from coordinator_harness import MS, S, World, drop, running

from everstep.base.cause import Cause
from everstep.base.plan import WorkerKey
from everstep.protocol import messages as m

# ---- joins


def rejoined(world: World, worker: int, incarnation: int) -> None:
    world.started(worker, incarnation)
    world.hello(worker, incarnation)


def test_a_restarted_worker_heals_and_joins_by_a_prepared_plan():
    world = running()
    world.exited(2)
    rejoined(world, 2, 1)
    assert world.last(m.Heal) is None
    world.entered(0, 2, 4)
    heal = world.last(m.Heal, "w2.1")
    assert [d.worker_id for d in heal.donors] == [1, 0] and heal.plan == world.plan
    world.healed(2, 1)
    plan = world.prepared
    assert plan.prepared and plan.generation == 3 and plan.joining == (2,) and plan.previous == 0
    assert {to for to, x in world.sent if isinstance(x, m.PlanPrepared)} == {"w0.0", "w1.0", "w2.1"}
    assert world.plan.generation == 2
    world.entered(1, 3, 6)
    assert world.plan == plan and world.prepared is None
    assert world.report("generation_started")["generation"] == 3
    assert "worker_healed" not in world.kinds()
    world.entered(2, 3, 6, 1)
    assert world.report("worker_healed")["worker_id"] == 2


def test_a_spare_takes_the_place_of_the_dead():
    world = World()
    world.agent(0, 1, 2, 3)
    for i in range(4):
        world.hello(i)
    world.entered(0, 1, 1)
    assert world.last(m.Heal) is None
    world.exited(1)
    world.entered(0, 2, 2)
    assert world.last(m.Heal, "w3.0") is not None
    rejoined(world, 1, 1)
    assert world.last(m.Heal, "w1.1") is None
    world.healed(3)
    world.entered(0, 3, 3)
    assert world.plan.worker_ids == (0, 2, 3)


def test_a_place_that_a_prepared_plan_fills_is_not_given_away_twice():
    world = World()
    world.agent(0, 1, 2, 3)
    for i in range(4):
        world.hello(i)
    world.entered(0, 1, 1)
    world.exited(1)
    world.entered(0, 2, 2)
    world.healed(3)
    assert world.prepared.joining == (3,)
    rejoined(world, 1, 1)
    world.wait(1 * S)
    assert world.last(m.Heal, "w1.1") is None


def test_joiners_are_batched():
    world = running(4)
    world.exited(2)
    world.exited(3)
    rejoined(world, 2, 1)
    rejoined(world, 3, 1)
    world.entered(0, 3, 4)
    world.healed(2, 1)
    assert world.prepared is None
    world.healed(3, 1)
    assert world.prepared.joining == (2, 3)


def test_a_slow_joiner_does_not_hold_up_the_others_for_long():
    world = running(4)
    world.exited(2)
    world.exited(3)
    rejoined(world, 2, 1)
    rejoined(world, 3, 1)
    world.entered(0, 3, 4)
    world.healed(2, 1)
    world.wait(260 * MS)
    assert world.prepared.joining == (2,)
    world.healed(3, 1)
    world.entered(0, 4, 6)
    assert world.prepared.joining == (3,) and world.prepared.generation == 5


def test_the_first_of_several_that_have_healed_waits_for_the_slow_ones_as_long_as_if_it_were_alone():
    world = running(5)
    for i in (2, 3, 4):
        world.exited(i)
        rejoined(world, i, 1)
    world.entered(0, world.plan.generation, 4)
    world.healed(2, 1)
    world.wait(200 * MS)
    world.healed(3, 1)
    assert world.prepared is None
    world.wait(60 * MS)
    assert world.prepared.joining == (2, 3)


def test_a_death_while_a_plan_is_prepared_goes_above_it_without_the_joiner():
    world = running(4)
    world.exited(3)
    rejoined(world, 3, 1)
    world.entered(0, 2, 4)
    world.healed(3, 1)
    assert world.prepared.generation == 3
    world.exited(2)
    assert world.plan.generation == 4 and world.plan.worker_ids == (0, 1) and world.prepared is None
    old = world.last(m.Heal, "w3.1").ticket
    world.entered(0, 4, 5)
    assert world.last(m.Heal, "w3.1").ticket > old
    world.entered(1, 3, 5)
    assert world.plan.generation == 4


def test_a_death_after_the_switch_keeps_the_joiner():
    world = running(4)
    world.exited(3)
    rejoined(world, 3, 1)
    world.entered(0, 2, 4)
    world.healed(3, 1)
    world.entered(1, 3, 5)
    world.exited(2)
    assert world.plan.generation == 4 and world.plan.worker_ids == (0, 1, 3)


def test_the_death_of_a_joiner_in_a_prepared_plan_supersedes_it():
    world = running()
    world.exited(2)
    rejoined(world, 2, 1)
    world.entered(0, 2, 4)
    world.healed(2, 1)
    world.exited(2, 1)
    assert world.plan.generation == 4 and world.plan.worker_ids == (0, 1) and world.prepared is None


def test_the_death_of_a_healing_worker_changes_nothing_for_the_others():
    world = running()
    world.exited(2)
    rejoined(world, 2, 1)
    world.entered(0, 2, 4)
    world.exited(2, 1)
    assert world.plan.generation == 2
    rejoined(world, 2, 2)
    assert world.last(m.Heal, "w2.2") is not None


def test_failed_heals_are_tried_again_later_and_later_and_given_up():
    world = running(4)
    world.exited(3)
    rejoined(world, 3, 1)
    world.entered(0, 2, 4)
    firsts, delays = [], []
    for attempt in range(10):
        heal = world.last(m.Heal, "w3.1")
        firsts.append(heal.donors[0].worker_id)
        count = len(world.messages(m.Heal, "w3.1"))
        world.say(
            "w3.1",
            m.HealFailed(worker_id=3, incarnation=1, ticket=heal.ticket, reason="donor gone"),
        )
        start = world.now
        while attempt < 9 and len(world.messages(m.Heal, "w3.1")) == count:
            world.wait(100 * MS)
        delays.append(world.now - start)
    assert set(firsts) == {1, 2}
    assert delays[:9] == sorted(delays[:9]) and delays[0] == 0 and 5 * S <= delays[8] < 6 * S
    assert "could not heal" in world.report("worker_evicted")["reason"]


def test_the_retry_of_one_joiner_does_not_wait_for_that_of_another():
    world = running(4)
    world.exited(2)
    world.exited(3)
    rejoined(world, 2, 1)
    rejoined(world, 3, 1)
    world.entered(0, world.plan.generation, 4)

    def fails(worker: int) -> None:
        ticket = world.last(m.Heal, f"w{worker}.1").ticket
        world.say(f"w{worker}.1", m.HealFailed(worker_id=worker, incarnation=1, ticket=ticket, reason="donor gone"))

    fails(3)
    fails(3)
    world.now += 100 * MS
    fails(2)
    tickets = len(world.messages(m.Heal, "w3.1"))
    world.wait(100 * MS, beating=False)
    assert len(world.messages(m.Heal, "w3.1")) == tickets + 1


def test_old_tickets_are_void():
    world = running()
    world.exited(2)
    rejoined(world, 2, 1)
    world.entered(0, 2, 4)
    ticket = world.last(m.Heal, "w2.1").ticket
    world.healed(2, 1, ticket=ticket + 1)
    assert world.prepared is None


def test_a_joiner_that_reconnects_begins_anew():
    world = running()
    world.exited(2)
    rejoined(world, 2, 1)
    world.entered(0, 2, 4)
    first = world.last(m.Heal, "w2.1").ticket
    drop(world, "w2.1")
    world.hello(2, 1)
    assert world.last(m.Heal, "w2.1").ticket > first


def test_a_joiner_in_a_prepared_plan_gets_it_again_after_a_reconnect():
    world = running()
    world.exited(2)
    rejoined(world, 2, 1)
    world.entered(0, 2, 4)
    world.healed(2, 1)
    drop(world, "w2.1")
    world.clear()
    world.hello(2, 1)
    assert world.last(m.PlanPrepared, "w2.1").plan == world.prepared


# ---- too few


def test_below_min_workers_it_waits_and_says_so():
    world = running(min_workers=3)
    world.exited(2)
    assert world.plan.generation == 1 and world.coordinator.status()["state"] == "waiting"
    assert "min_workers" in world.report("waiting")["reason"]
    assert world.last(m.PlanNow) is None
    rejoined(world, 2, 1)
    plan = world.plan
    assert plan.generation == 2 and plan.joining == (2,) and plan.members[2].incarnation == 1
    assert world.coordinator.status()["state"] == "recovering"
    world.entered(2, 2, 4, 1)
    assert world.report("worker_healed")["worker_id"] == 2


def test_who_joined_and_has_not_come_back_after_a_restart_may_hold_the_state():
    """It may have settled before; the others are gone, and its host says nothing."""
    world = running(min_workers=3, quorum_wait_ns=3600 * S)
    world.exited(2)
    rejoined(world, 2, 1)
    plan = world.plan
    world.entered(2, 2, 4, 1)
    after = world.restart()
    for i in (0, 1):
        after.connect(f"w{i}.1", "worker")
        after.hello(i, 1)
    after.wait(60 * S, beating=False)
    evicted = [fields["worker_id"] for kind, fields in after.reports if kind == "worker_evicted"]
    assert evicted == [0, 1] and "fallback" not in after.kinds()
    after.hello(2, 1, plan=plan, step=3)
    assert after.plan.worker_ids == (0, 1, 2) and after.plan.joining == (0, 1)


def test_waiting_ends_with_exit_code_3():
    world = running(min_workers=3, quorum_wait_ns=20 * S)
    world.exited(2)
    world.wait(21 * S)
    ended = world.last(m.JobEnded, "w0.0")
    assert ended.exit_code == 3 and "20 s" in ended.reason


@pytest.mark.parametrize("what", ["the wait is over", "a stop", "a slot is given up"])
def test_members_that_wait_save_their_state_before_the_end(what: str):
    world = running(min_workers=3, quorum_wait_ns=20 * S, save_ns=5 * S)
    world.exited(2)
    if what == "the wait is over":
        world.wait(21 * S)
    elif what == "a stop":
        assert world.command("stop", grace_s=5.0, exit_code=130).ok
    else:
        world.say("a1", m.SlotLost(agent_id="a1", worker_id=2, reason="it dies each time"))
    assert world.plan.worker_ids == (0, 1) and world.plan.save and world.last(m.JobEnded, "w0.0") is None
    saved = m.Saved(worker_id=0, incarnation=0, step=4, ok=True, where="checkpoints/step-4")
    world.entered(0, 2, 5)
    world.say("w0.0", saved)
    ended = world.last(m.JobEnded, "w0.0")
    assert (
        ended.exit_code == {"the wait is over": 3, "a stop": 130}.get(what, 1) and "checkpoints/step-4" in ended.reason
    )


def test_without_all_stages_there_is_nothing_to_save():
    world = running(stages=3, min_workers=3, quorum_wait_ns=20 * S, save_ns=5 * S)
    world.exited(2)
    world.wait(21 * S)
    assert world.last(m.JobEnded, "w0.0").exit_code == 3


def test_on_failure_wait_holds_everybody_until_all_are_back():
    world = running(on_failure="wait")
    world.exited(2)
    assert world.plan.generation == 1 and world.coordinator.status()["state"] == "waiting"
    rejoined(world, 2, 1)
    assert world.plan.generation == 2 and world.plan.worker_ids == (0, 1, 2) and world.plan.joining == (2,)


def test_on_failure_shrink_lowers_the_target():
    world = running(on_failure="shrink")
    world.exited(2)
    assert world.plan.worker_ids == (0, 1)
    assert world.last(m.SetSlots, "a1").worker_ids == [0, 1]
    world.entered(0, 2, 4)
    rejoined(world, 2, 1)
    assert world.last(m.Heal) is None and world.last(m.Dismissed, "w2.1").drained


def test_with_shrink_members_that_go_back_to_a_checkpoint_by_new_lives_are_not_lost():
    """They end by themselves, all that are left, and so does the job if nobody is waited for."""
    world = running(on_failure="shrink")
    world.exited(2)
    world.entered(0, 2, 4)
    for i in (0, 1):
        world.exited(i, reason="exit code 75", cause=Cause.EXITED, again=True)
    assert world.last(m.JobEnded) is None and world.last(m.SetSlots, "a1").worker_ids == [0, 1]
    for i in (0, 1):
        rejoined(world, i, 1)
    assert world.plan.worker_ids == (0, 1)


def test_when_all_state_is_lost_it_starts_over_and_says_so():
    world = running()
    world.progress(0, 1, 40)
    for i in range(3):
        world.exited(i)
    assert world.coordinator.status()["state"] == "waiting"
    for i in range(3):
        rejoined(world, i, 1)
    assert world.plan.worker_ids == (0, 1, 2) and world.plan.previous == 0 and world.plan.joining == ()
    assert "starting over from the newest copy" in world.report("generation_started")["reason"]
    assert "fallback" not in world.kinds() and world.coordinator.status()["step"] == 0
    for i in range(3):
        world.entered(i, world.plan.generation, 1, incarnation=1)
    assert world.kinds().count("fallback") == 1 and world.report("fallback")["steps_redone"] == 40


# ---- scale, drain, stop


def test_scale_up_starts_workers_that_join():
    world = running(2)
    assert world.command("scale", workers=3).ok
    assert world.last(m.SetSlots, "a1").worker_ids == [0, 1, 2]
    rejoined(world, 2, 0)
    assert world.last(m.Heal, "w2.0") is not None


def test_scale_down_dismisses_the_highest_after_the_switch():
    world = running(4)
    assert world.command("scale", workers=2).ok
    assert world.prepared.worker_ids == (0, 1) and world.last(m.Dismissed) is None
    assert world.last(m.SetSlots, "a1").worker_ids == [0, 1, 2, 3]
    world.entered(0, 2, 5)
    assert {to for to, x in world.sent if isinstance(x, m.Dismissed) and x.drained} == {"w2.0", "w3.0"}
    assert world.last(m.SetSlots, "a1").worker_ids == [0, 1, 2, 3]
    world.exited(2, reason="exit 0")
    world.exited(3, reason="exit 0")
    assert world.last(m.SetSlots, "a1").worker_ids == [0, 1]
    assert world.plan.generation == 2 and "worker_evicted" not in world.kinds()


def test_a_slot_that_is_wanted_again_before_its_worker_has_left_is_told_once_more_when_it_has():
    """Its agent believes to know that it is to be kept filled, and that this life was the last."""
    world = running(3)
    assert world.command("scale", workers=2).ok
    world.entered(0, 2, 5)
    assert world.command("scale", workers=3).ok
    world.clear()
    world.exited(2, in_order=True)
    assert world.last(m.SetSlots, "a1").worker_ids == [0, 1, 2]


def three_and_a_spare() -> World:
    world = World(workers=3)
    world.agent(0, 1, 2, 3)
    for i in range(4):
        world.hello(i)
    world.entered(0, 1, 1)
    return world


def test_scale_down_with_a_spare_keeps_the_spare():
    world = three_and_a_spare()
    world.command("scale", workers=2)
    world.entered(0, 2, 3)
    world.exited(2, reason="exit 0")
    assert world.last(m.SetSlots, "a1").worker_ids == [0, 1, 3]
    assert [w["worker_id"] for w in world.coordinator.status()["workers"]] == [0, 1, 3]


def test_everyone_who_leaves_in_order_is_told_of_a_spare_too():
    world = three_and_a_spare()
    assert world.command("drain", worker_id=3).ok and world.last(m.Dismissed, "w3.0").drained
    world.exited(3, reason="exit 0")
    world.command("scale", workers=2)
    world.entered(0, 2, 3)
    told = [report.fields for report in world.reports if report.kind == "worker_left"]
    assert [(one["worker_id"], one["cause"]) for one in told] == [(3, Cause.DRAINED), (2, Cause.SCALED)]


@pytest.mark.parametrize("workers", [0, 9, -1, "3", None, True])
def test_scale_out_of_range_is_refused(workers):
    world = running()
    reply = world.command("scale", workers=workers)
    assert not reply.ok and "from 1" in reply.error and "8" in reply.error


def test_drain_leaves_without_fault_and_is_not_refilled():
    world = running()
    assert world.command("drain", worker_id=1).ok
    assert world.prepared.worker_ids == (0, 2)
    world.entered(0, 2, 5)
    assert world.last(m.Dismissed, "w1.0").drained
    world.exited(1, reason="exit 0")
    assert world.last(m.SetSlots, "a1").worker_ids == [0, 2]
    assert world.plan.generation == 2 and world.coordinator.status()["target"] == 2


def test_who_leaves_in_order_before_the_others_have_told_of_the_switch_is_not_evicted():
    world = running()
    assert world.command("drain", worker_id=1).ok
    world.exited(1, reason="exit code 0", in_order=True)  # its agent was faster than the members
    assert world.plan.generation == 2 and world.plan.worker_ids == (0, 2)
    world.entered(0, 2, 5)
    world.entered(2, 2, 5)
    assert world.plan.generation == 2 and "worker_evicted" not in world.kinds()
    assert world.last(m.SetSlots, "a1").worker_ids == [0, 2]


@pytest.mark.parametrize("entered", [False, True])
def test_who_lost_blocks_as_the_others_switched_is_heard(entered):
    """It cannot switch, and the others wait for it in the generation that was prepared."""
    world = running()
    assert world.command("drain", worker_id=1).ok
    world.exited(1, reason="exit code 0", in_order=True)
    if entered:
        world.entered(2, 2, 5)
    world.say("w2.0", m.SettleAgain(worker_id=2, incarnation=0, generation=1, reason="it has lost blocks"))
    assert world.plan.generation == (2 if entered else 3) and world.plan.worker_ids == (0, 2)


def test_a_spare_that_leaves_in_order_says_nothing_of_the_switch():
    world = three_and_a_spare()
    assert world.command("scale", workers=2).ok and world.prepared is not None
    world.exited(3, reason="exit code 0", in_order=True)
    assert world.plan.generation == 1 and world.prepared is not None


def test_the_step_at_which_a_worker_was_lost_is_that_of_its_last_progress():
    world = running()
    world.progress(1, 1, 7)
    world.exited(1)
    assert world.report("worker_evicted")["step"] == 7


def test_who_dies_before_the_switch_is_evicted():
    world = running()
    assert world.command("drain", worker_id=1).ok
    world.exited(1)
    assert world.plan.generation == 3 and "worker_evicted" in world.kinds()


def test_drain_below_min_workers_or_of_nobody_is_refused():
    world = running(min_workers=3)
    assert "min_workers is 3" in world.command("drain", worker_id=1).error
    assert "no worker 7" in world.command("drain", worker_id=7).error
    assert world.prepared is None


def test_slots_that_were_given_up_do_not_count_as_left_by_a_drain():
    world = running(min_workers=1)
    world.say("a1", m.SlotLost(agent_id="a1", worker_id=1, reason="crash loop"))
    assert world.command("drain", worker_id=0).ok
    assert "0 workers would be left" in world.command("drain", worker_id=2).error


def test_a_drain_waits_while_a_fault_has_left_too_few():
    world = running(min_workers=2)
    assert world.command("drain", worker_id=1).ok
    world.exited(2)
    assert world.plan.worker_ids == (0, 1)
    world.entered(0, 3, 5)
    assert world.prepared is None
    rejoined(world, 2, 1)
    world.healed(2, 1)
    assert world.prepared.worker_ids == (0, 2)


def test_a_fault_is_handed_to_all_workers_if_there_is_anybody_whom_it_means():
    world = running(3)
    fault = "kill:target=worker:1"
    for _ in range(2):
        assert world.command("chaos", fault=fault, workers=[1], stages=[]).ok
    told = [x for to, x in world.sent if to == "w1.0" and isinstance(x, m.InjectFault)]
    assert [x.fault for x in told] == [fault, fault] and told[0].number < told[1].number
    assert {to for to, x in world.sent if x == told[0]} == {"w0.0", "w1.0", "w2.0"}
    world.clear()
    for args, words in [
        ({"workers": [7]}, "no worker 7: the workers are 0, 1, 2"),
        ({"stages": [1]}, "no stage 1: the stages are 0"),
        ({"fault": 3}, "expected a fault"),
    ]:
        reply = world.command("chaos", **{"fault": fault, **args})
        assert not reply.ok and words in reply.error
    assert world.messages(m.InjectFault) == []
    assert "no worker trains yet" in World().command("chaos", fault=fault).error


def test_a_drain_survives_a_fault_in_between():
    world = running(4)
    world.command("drain", worker_id=1)
    world.exited(3)
    assert world.plan.generation == 3 and world.plan.worker_ids == (0, 1, 2)
    world.entered(0, 3, 5)
    assert world.prepared.worker_ids == (0, 2)


def test_stop_interrupts():
    world = running()
    assert world.command("stop").ok
    assert world.last(m.JobEnded, "w1.0").exit_code == 130
    assert world.coordinator.status()["state"] == "interrupted"
    assert world.coordinator.next_deadline_ns is None


def test_unknown_commands_are_refused():
    assert "unknown command" in running().command("dance").error


def test_completion_is_told_to_all_and_journaled():
    world = running()
    done = {"generation": 1, "step": 50}
    world.say("w1.0", m.WorkerDone(worker_id=1, incarnation=0, final_written=False, **done))
    assert world.last(m.JobEnded) is None
    world.say("w0.0", m.WorkerDone(worker_id=0, incarnation=0, final_written=True, **done))
    assert {to for to, x in world.sent if isinstance(x, m.JobEnded)} == {"a1", "w0.0", "w1.0", "w2.0"}
    assert world.report("job_completed")["step"] == 50 and world.journal[-1]["kind"] == "ended"
    again = world.restart()
    again.agent(0)
    assert again.last(m.JobEnded, "a1").state == "completed"


# ---- coordinator restart


def test_after_a_restart_the_same_members_go_on_in_the_same_generation():
    world = running()
    again = world.restart()
    again.agent(0, 1, 2)
    for i in range(3):
        again.hello(i, plan=world.plan, step=20)
    again.wait(30 * S)
    assert again.plan == world.plan and again.last(m.PlanNow) is None
    assert again.coordinator.status()["state"] == "running" and again.coordinator.status()["step"] == 20


def test_members_that_do_not_come_back_are_evicted_after_the_grace():
    world = running()
    again = world.restart()
    for i in (0, 2):
        again.hello(i, plan=world.plan)
    again.wait(1900 * MS)
    assert again.plan.generation == 1
    again.wait(200 * MS)
    assert again.plan.generation == 2 and again.plan.worker_ids == (0, 2)


def test_when_no_member_comes_back_the_grace_goes_on():
    world = running()
    again = world.restart()
    again.wait(30 * S)
    assert "worker_evicted" not in again.kinds()
    again.agent(0, 1, 2)
    for i in range(3):
        again.hello(i, plan=world.plan)
    again.wait(5 * S)
    assert again.plan == world.plan


def test_for_how_long_it_goes_on_does_not_hang_on_what_the_clock_says():
    again = running(now=100_000 * S).restart()
    again.wait(500 * S)
    assert "worker_evicted" not in again.kinds()
    again.wait(200 * S)
    assert again.kinds().count("worker_evicted") == 3


def test_who_was_to_join_by_a_plan_that_was_broken_off_is_not_waited_for_after_a_restart():
    world = running(3)
    world.exited(2)
    rejoined(world, 2, 1)
    world.entered(0, 2, 4)
    world.healed(2, 1)
    assert world.prepared.joining == (2,)
    world.exited(1)
    assert world.plan.worker_ids == (0,)
    assert world.restart().coordinator.job.membership.workers.keys() == {0}


def test_a_death_in_the_grace_waits_for_the_others_to_come_back():
    world = running()
    again = world.restart()
    again.agent(0, 1, 2)
    again.hello(0, plan=world.plan)
    again.exited(2)
    assert again.plan.generation == 1
    again.hello(1, plan=world.plan)
    assert again.plan.generation == 2 and again.plan.worker_ids == (0, 1)


def test_an_agent_that_lists_fewer_lives_decides_at_once():
    world = running()
    again = world.restart()
    again.hello(0, plan=world.plan)
    again.hello(1, plan=world.plan)
    again.agent(0, 1)
    assert again.plan.worker_ids == (0, 1)


def test_a_newer_plan_than_the_journals_is_adopted():
    world = running()
    journal = list(world.journal)
    world.exited(2)
    newer = world.plan
    again = world.restart(journal=journal)
    again.agent(0, 1)
    again.hello(0, plan=newer, step=9)
    again.hello(1, plan=newer, step=9)
    assert again.plan == newer and "adopted" in again.report("warning")["reason"]
    again.exited(1)
    assert again.plan.generation == newer.generation + 1
    third = again.restart()
    assert third.plan.generation == again.plan.generation


def test_a_member_of_an_adopted_plan_that_never_comes_back_is_given_up():
    others = running(4)
    others.exited(1)
    others.exited(2)
    again = running().restart()
    again.agent(0)
    again.wait(1 * S)
    again.hello(0, plan=others.plan, step=9)
    assert again.plan.worker_ids == (0, 3)
    again.wait(5 * S)
    assert again.plan.worker_ids == (0,)
    assert "did not come back" in again.report("worker_evicted")["reason"]


def test_where_the_last_one_that_holds_the_state_is_gone_it_is_told():
    """Who has come meanwhile has not settled yet."""
    world = running(2, min_workers=2)
    world.progress(0, 1, 40)
    world.exited(1)
    rejoined(world, 1, 1)
    assert world.plan.joining == (1,)
    world.exited(0)
    rejoined(world, 0, 1)
    world.entered(0, world.plan.generation, 1, 1)
    told = world.report("fallback")
    assert told["steps_redone"] == 40 and "all workers with the training state were lost" in told["reason"]


def test_a_joiner_that_has_healed_is_taken_where_nobody_else_holds_the_state():
    world = World(workers=3, min_workers=2)
    world.agent(0, 1, 2, 3, 4)
    for worker in range(5):
        world.hello(worker)
    for worker in range(3):
        world.entered(worker, 1, 1)
    world.exited(3)
    world.exited(2)
    for worker in (0, 1):
        world.entered(worker, 2, 41)
    assert world.last(m.Heal, "w4.0") is not None
    rejoined(world, 2, 1)
    rejoined(world, 3, 1)
    world.healed(4)
    world.exited(1)
    world.exited(0)
    assert 4 in world.plan.worker_ids, "the others have not settled"


def test_without_a_journal_the_members_plan_is_adopted():
    world = running()
    world.exited(2)
    again = world.restart(journal=[])
    again.agent(0, 1)
    again.hello(1, plan=world.plan)
    again.hello(0, plan=world.plan)
    assert again.plan == world.plan
    again.wait(10 * S)
    assert again.plan == world.plan


def test_a_prepared_plan_survives_a_restart():
    world = running()
    world.exited(2)
    rejoined(world, 2, 1)
    world.entered(0, 2, 4)
    world.healed(2, 1)
    again = world.restart()
    again.agent(0, 1, (2, 1))
    again.hello(0, plan=world.plan)
    assert again.last(m.PlanPrepared, "w0.0").plan == world.prepared
    again.hello(1, plan=world.prepared)
    assert again.plan == world.prepared


def test_fences_tickets_and_targets_survive_a_restart():
    world = running(4)
    world.exited(3)
    world.command("scale", workers=2)
    again = world.restart()
    again.hello(3)
    assert again.last(m.Dismissed, "w3.0") is not None
    assert again.coordinator.status()["target"] == 2
    assert WorkerKey(3, 0) not in [x.key for x in again.plan.members]


def test_a_switch_while_the_coordinator_was_away_is_told_once():
    world = running()
    world.exited(2)
    rejoined(world, 2, 1)
    world.entered(0, 2, 4)
    world.healed(2, 1)
    plan = world.prepared
    again = world.restart()
    again.agent(0, 1, (2, 1))
    for worker, incarnation in ((0, 0), (2, 1), (1, 0)):
        again.hello(worker, incarnation, plan=plan, step=7)
        again.entered(worker, plan.generation, 8, incarnation)
    assert again.plan == plan
    assert again.kinds().count("worker_healed") == 1 and again.report("worker_healed")["worker_id"] == 2
    once_more = again.restart()
    once_more.agent(0, 1, (2, 1))
    for worker, incarnation in ((0, 0), (2, 1), (1, 0)):
        once_more.hello(worker, incarnation, plan=plan, step=9)
    assert "worker_healed" not in once_more.kinds()
