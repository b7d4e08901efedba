"""The coordinator's alarms: one moment each, a fixed order, and a function for every kind."""

from __future__ import annotations

from everstep.protocol.coordinator.alarms import KINDS, AgentDue, Alarms, GoneDue, GraceDue
from everstep.protocol.coordinator.table import ALARMS


def test_each_kind_of_alarm_leads_somewhere():
    assert set(ALARMS) == set(KINDS)


def test_an_alarm_rings_once_at_the_earliest_moment_that_was_asked_for():
    alarms = Alarms()
    alarms.set(GoneDue(1), 30)
    alarms.set(GoneDue(1), 20)
    alarms.set(GoneDue(1), 40)
    assert alarms.next_ns == 20 and list(alarms.due(19)) == []
    assert list(alarms.due(50)) == [GoneDue(1)]
    assert alarms.next_ns is None and list(alarms.due(50)) == []


def test_what_is_due_at_one_moment_rings_in_a_fixed_order():
    alarms = Alarms()
    wanted = [AgentDue("a"), AgentDue("b"), GoneDue(2), GoneDue(10), GraceDue()]
    for alarm in reversed(wanted):
        alarms.set(alarm, 5)
    assert list(alarms.due(5)) == wanted
