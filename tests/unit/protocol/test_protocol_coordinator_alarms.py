"""The coordinator's alarms: one moment each, a fixed order, and a function for every kind."""

from __future__ import annotations

from coordinator_harness import MS, S, World, running

from everstep.base.cause import Cause
from everstep.protocol import messages as m
from everstep.protocol.coordinator.coordinator import ALARMS
from everstep.protocol.coordinator.environment import Alarm, Alarms
from everstep.protocol.coordinator.types import Tick


def test_each_kind_of_alarm_leads_somewhere():
    assert set(ALARMS) == set(Alarm)


def test_an_alarm_rings_once_at_the_earliest_moment_that_was_asked_for():
    alarms = Alarms()
    alarms.set(Alarm.GONE, 30, 1)
    alarms.set(Alarm.GONE, 20, 1)
    alarms.set(Alarm.GONE, 40, 1)
    assert alarms.next_ns == 20 and alarms.due(19) == []
    assert alarms.due(50) == [(Alarm.GONE, 1)]
    assert alarms.next_ns is None and alarms.due(50) == []


def test_what_is_due_at_one_moment_rings_in_a_fixed_order():
    alarms = Alarms()
    wanted = [(Alarm.AGENT, "a"), (Alarm.AGENT, "b"), (Alarm.GONE, 2), (Alarm.GONE, 10), (Alarm.GRACE, 0)]
    for due, about in reversed(wanted):
        alarms.set(due, 5, about)
    assert alarms.due(5) == wanted


def early(world: World, alarm: Alarm) -> None:
    """An alarm that was set for something before rings."""
    world.coordinator.job.env.alarms.set(alarm, world.now)
    world.handle(Tick())


def test_who_alone_holds_the_state_is_not_let_go_by_an_alarm_for_a_life_before():
    world = running(1, save_ns=20 * S)
    words = {"step": 7, "signature": "x", "fatal": False, "holds": True}
    world.say("w0.0", m.WorkerFailed(worker_id=0, incarnation=0, generation=1, reason="OSError: a", **words))
    world.entered(0, 2, 8)
    world.say("w0.0", m.Saved(worker_id=0, incarnation=0, step=7, ok=True, where="there"))
    assert world.last(m.Dismissed, "w0.0") is not None
    world.exited(0)
    world.started(0, 1)
    world.hello(0, 1)
    world.entered(0, 3, 8, 1)
    world.wait(15 * S)
    words |= {"step": 9, "signature": "y"}
    world.say("w0.1", m.WorkerFailed(worker_id=0, incarnation=1, generation=3, reason="OSError: b", **words))
    world.wait(15 * S)  # past the moment that was set for the life before
    assert world.last(m.Dismissed, "w0.1") is None
    world.wait(6 * S)
    assert world.last(m.Dismissed, "w0.1").reason == "OSError: b"


def test_links_are_not_judged_by_an_alarm_for_accusations_before():
    world = running(3)
    world.fault(0, 1, 1)
    world.exited(1)
    world.wait(60 * MS)
    for worker in (0, 2):
        world.entered(worker, 2, 5)
    world.fault(0, 2, 2)
    world.wait(50 * MS)  # past the end of the window before
    assert world.plan.generation == 2
    world.exited(2)  # a death explains it
    assert world.plan.cause is Cause.KILLED


def test_members_are_not_asked_for_their_loops_by_an_alarm_for_a_loop_before():
    world = running(3)
    world.say("w1.0", m.LoopLeft(worker_id=1, incarnation=0, generation=1, step=4))
    early(world, Alarm.LEFT)
    assert world.plan.generation == 1
    world.wait(S)
    assert world.plan.cause is Cause.LEFT
