"""The coordinator's decisions, one situation at a time."""

from __future__ import annotations

import pytest
from coordinator_harness import MS, S, World, drop, member, running

from everstep.base.plan import WorkerKey
from everstep.protocol import messages as m
from everstep.protocol.coordinator_links import smallest_cover
from everstep.protocol.coordinator_types import Tick

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
    done = world.report("recovery_completed")
    assert world.kinds().count("recovery_completed") == 1
    assert done["phases_s"]["settle"] == 0.03 and done["phases_s"]["unblock"] == 0.002
    assert done["duration_s"] == pytest.approx(0.05) and done["step"] == 6


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
    assert "incarnation 1" in world.report("worker_evicted")["reason"]


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


def test_a_fatal_error_fails_the_job_at_once():
    world = running()
    world.say(
        "w2.0",
        m.WorkerFailed(worker_id=2, incarnation=0, step=0, reason="no such file", signature="x", fatal=True),
    )
    assert world.last(m.JobEnded, "a1").exit_code == 1 and world.coordinator.status()["state"] == "failed"
    world.clear()
    world.hello(2, 1)
    assert world.last(m.JobEnded, "w2.1") is not None


# ---- silence and hangs


def test_a_silent_host_is_suspected_and_then_evicted():
    world = World(workers=2, hang_limit_ns=None)
    world.agent(0, name="a1", host="h1")
    world.agent(1, name="a2", host="h2")
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
    assert world.plan.worker_ids == (0,) and "h2 is silent" in world.plan.reason
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


def test_a_disconnect_is_no_death_while_the_agent_says_it_lives():
    world = running()
    drop(world, "w1.0")
    world.wait(60 * S)
    assert world.plan.generation == 1


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
    world.agent(0, name="a1", host="h1")
    world.agent(1, name="a2", host="h2")
    world.hello(0)
    world.hello(1)
    world.wait(3 * S)
    world.clear()
    return world


def test_workers_outlive_their_agents_connection_up_to_the_ceiling():
    world = two_hosts()
    drop(world, "a2")
    world.wait(9 * S)
    assert world.plan.generation == 1
    world.agent(1, name="a2", host="h2")
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
    world.agent(0, name="a1", host="h1")
    world.wait(30 * S)
    assert world.plan.worker_ids == (0,)
    drop(world, "a1")
    world.wait(62 * S)
    assert world.coordinator.status()["state"] == "waiting" and world.report("worker_evicted")["worker_id"] == 0


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


def test_the_coordinators_own_absence_is_nobodys_silence():
    world = running()
    world.wait(5 * S)
    world.now += 60 * S
    world.handle(Tick())
    assert world.plan.generation == 1
    world.beat()
    world.wait(5 * S)
    assert world.plan.generation == 1


# ---- links


def test_a_first_link_fault_regroups_with_the_same_members():
    world = running()
    world.fault(0, 1, 2)
    world.fault(2, 1, 0)
    assert world.plan.generation == 1
    world.wait(100 * MS)
    assert world.plan.generation == 2 and world.plan.worker_ids == (0, 1, 2)
    assert "0 to 2" in world.plan.reason and world.plan.previous == 1


def test_a_repeated_link_fault_evicts_the_most_accused():
    world = running(4)
    world.fault(0, 1, 2)
    world.wait(100 * MS)
    for i in range(4):
        world.entered(i, 2, 3)
    world.fault(0, 2, 2)
    world.fault(1, 2, 2)
    world.wait(100 * MS)
    assert world.plan.worker_ids == (0, 1, 3)
    assert world.last(m.KillWorker, "a1").worker_id == 2


def test_link_faults_far_apart_are_first_ones():
    world = running()
    world.fault(0, 1, 2)
    world.wait(100 * MS)
    world.wait(61 * S)
    world.fault(0, 2, 2)
    world.wait(100 * MS)
    assert world.plan.generation == 3 and world.plan.worker_ids == (0, 1, 2)


def test_accusations_are_void_once_a_death_explains_them():
    world = running()
    world.fault(0, 1, 2)
    world.now += 5 * MS
    world.exited(2)
    assert world.plan.generation == 2
    world.fault(1, 1, 2)
    world.wait(S)
    assert world.plan.generation == 2


def test_smallest_cover():
    assert smallest_cover([(0, 1), (0, 2), (0, 3)], {}) == (0,)
    assert smallest_cover([(0, 1)], {0: 1, 1: 1}) == (1,)
    assert smallest_cover([(0, 1)], {0: 2, 1: 1}) == (0,)
    assert smallest_cover([(2, 2)], {}) == (2,)
    two = [(a, b) for a in (0, 1, 2) for b in (3, 4)]
    assert smallest_cover(two, {}) == (3, 4)
    many = [(a, b) for a in range(12) for b in range(12, 30)]
    assert smallest_cover(many, {}) == tuple(range(12))


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
    assert delays[:9] == sorted(delays[:9]) and delays[0] == 0 and delays[8] >= 5 * S
    assert "could not heal" in world.report("worker_evicted")["reason"]


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


def test_waiting_ends_with_exit_code_3():
    world = running(min_workers=3, quorum_wait_ns=20 * S)
    world.exited(2)
    world.wait(21 * S)
    ended = world.last(m.JobEnded, "w0.0")
    assert ended.exit_code == 3 and "20 s" in ended.reason


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


def test_when_all_state_is_lost_it_starts_over_and_says_so():
    world = running()
    world.progress(0, 1, 40)
    for i in range(3):
        world.exited(i)
    assert world.coordinator.status()["state"] == "waiting"
    for i in range(3):
        rejoined(world, i, 1)
    assert world.plan.worker_ids == (0, 1, 2) and world.plan.previous == 0 and world.plan.joining == ()
    assert "step 0" in world.report("fallback")["reason"]
    assert world.coordinator.status()["step"] == 0


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


def test_scale_down_with_a_spare_keeps_the_spare():
    world = World(workers=3)
    world.agent(0, 1, 2, 3)
    for i in range(4):
        world.hello(i)
    world.entered(0, 1, 1)
    world.command("scale", workers=2)
    world.entered(0, 2, 3)
    world.exited(2, reason="exit 0")
    assert world.last(m.SetSlots, "a1").worker_ids == [0, 1, 3]
    assert [w["worker_id"] for w in world.coordinator.status()["workers"]] == [0, 1, 3]


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


def test_drain_below_min_workers_or_of_nobody_is_refused():
    world = running(min_workers=3)
    assert "min_workers is 3" in world.command("drain", worker_id=1).error
    assert "no worker 7" in world.command("drain", worker_id=7).error
    assert world.prepared is None


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


# ---- connections and the store


def test_a_message_before_the_hello_ends_the_connection():
    world = World()
    world.connect("x", "worker")
    world.say("x", m.StoreSet(generation=1, key="k", value=b"v"))
    assert world.closed == ["x"]


def test_a_newer_connection_replaces_the_older():
    world = running()
    world.connect("other", "worker")
    world.say("other", m.WorkerHello(member=member(1), step=0, plan=world.plan))
    assert world.closed == ["w1.0"]
    drop(world, "w1.0")
    world.exited(2)
    assert world.last(m.PlanNow, "other") is not None


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
