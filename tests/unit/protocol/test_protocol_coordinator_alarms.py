"""The coordinator's alarms: one moment each, a fixed order, and a function for every kind."""

from __future__ import annotations

from everstep.protocol.coordinator.coordinator import ALARMS
from everstep.protocol.coordinator.environment import Alarm, Alarms


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
