"""Transfers that fail between two workers: when a death explains them, and who leaves otherwise."""

from __future__ import annotations

from coordinator_harness import MS, S, drop, running

from everstep.base.cause import Cause
from everstep.protocol import messages as m
from everstep.protocol.coordinator.links import smallest_cover


def test_a_disconnect_is_no_death_while_the_agent_says_it_lives():
    world = running()
    drop(world, "w1.0")
    world.wait(60 * S)
    assert world.plan.generation == 1


def test_a_first_link_fault_regroups_with_the_same_members():
    world = running()
    world.fault(0, 1, 2)
    world.fault(2, 1, 0)
    assert world.plan.generation == 1
    world.no_death()
    assert world.plan.generation == 2 and world.plan.worker_ids == (0, 1, 2)
    assert "0 to 2" in world.plan.reason and world.plan.previous == 1


def test_links_are_at_fault_only_once_both_ends_were_seen_alive_after_it() -> None:
    """The word of a death may take longer than the window, on a host that starves. It explains what was accused."""
    world = running()
    world.fault(0, 1, 2)
    world.wait(100 * MS)
    world.beat((0, 0, "compute", 0), (1, 0, "compute", 0))  # nothing of worker 2
    world.wait(3 * S)
    assert world.plan.generation == 1
    world.exited(2)
    assert world.plan.generation == 2 and world.plan.cause is Cause.KILLED
    world.no_death()
    assert world.plan.generation == 2


def test_a_pulse_of_before_the_window_is_no_proof_that_an_end_lives() -> None:
    world = running()
    world.fault(0, 1, 2)
    world.wait(50 * MS)
    world.beat(*((i, 0, "compute", 0) for i in range(3)))
    world.wait(100 * MS)
    assert world.plan.generation == 1
    world.beat(*((i, 0, "compute", 0) for i in range(3)))
    world.wait(100 * MS)
    assert world.plan.generation == 2 and world.plan.cause is Cause.LINK


def test_who_is_never_seen_does_not_keep_a_failed_link_open_for_ever() -> None:
    world = running()
    world.fault(0, 1, 2)
    world.wait(10 * S)
    assert world.plan.generation == 1
    world.wait(S)
    assert world.plan.generation == 2 and world.plan.cause is Cause.LINK


def test_a_repeated_link_fault_evicts_the_most_accused():
    world = running(4)
    world.fault(0, 1, 2)
    world.no_death()
    for i in range(4):
        world.entered(i, 2, 3)
    world.fault(0, 2, 2)
    world.fault(1, 2, 2)
    world.no_death()
    assert world.plan.worker_ids == (0, 1, 3)
    assert world.last(m.KillWorker, "a1").worker_id == 2


def test_link_faults_far_apart_are_first_ones():
    world = running()
    world.fault(0, 1, 2)
    world.no_death()
    world.wait(61 * S)
    world.fault(0, 2, 2)
    world.no_death()
    assert world.plan.generation == 3 and world.plan.worker_ids == (0, 1, 2)


def test_who_has_lost_a_peer_before_the_others_switched_is_not_waited_for():
    world = running()
    assert world.command("drain", worker_id=2).ok
    world.fault(1, 1, 0)
    world.entered(0, 2, 5)
    assert world.plan.generation == 3 and world.plan.worker_ids == (0, 1)
    assert "could not follow to the switch" in world.plan.reason


def test_accusations_are_void_once_a_death_explains_them():
    world = running()
    world.fault(0, 1, 2)
    world.now += 5 * MS
    world.exited(2)
    assert world.plan.generation == 2
    world.fault(1, 1, 2)
    world.wait(S)
    assert world.plan.generation == 2


def test_accusations_of_whom_the_plan_does_not_know_are_void() -> None:
    world = running()
    world.fault(0, 1, 7)
    world.no_death()
    assert world.plan.generation == 1 and not world.messages(m.KillWorker)


def test_members_that_have_all_lost_the_coordinator_do_not_all_leave_for_a_link() -> None:
    world = running(2)
    world.fault(0, 1, 1)
    world.no_death()
    for i in (0, 1):
        world.entered(i, 2, 3)
    world.fault(0, 2, 1)
    for i in (0, 1):
        drop(world, f"w{i}.0")
    world.no_death()
    assert world.plan.worker_ids == (0,)


def test_smallest_cover():
    assert smallest_cover([(0, 1), (0, 2), (0, 3)], {}) == (0,)
    assert smallest_cover([(0, 1)], {0: 1, 1: 1}) == (1,)
    assert smallest_cover([(0, 1)], {0: 2, 1: 1}) == (0,)
    assert smallest_cover([(2, 2)], {}) == (2,)
    two = [(a, b) for a in (0, 1, 2) for b in (3, 4)]
    assert smallest_cover(two, {}) == (3, 4)
    many = [(a, b) for a in range(12) for b in range(12, 30)]
    assert smallest_cover(many, {}) == tuple(range(12))
