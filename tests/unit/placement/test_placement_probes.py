"""Which lanes are computed by a second member, and by whom."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from everstep.base.plan import Member, Plan, Seat
from everstep.placement.probes import ProbeRule, probes


def plan(pool: Sequence[Sequence[int]], hosts: str = "", stages: int = 1) -> Plan:
    """One stage; by worker, its lanes. hosts: a letter for each."""
    members = tuple(Member(i, 0, (hosts or "a" * len(pool))[i]) for i in range(len(pool)))
    seats = tuple(Seat(i, 0, "active" if lanes else "standby", tuple(lanes)) for i, lanes in enumerate(pool))
    return Plan(1, "", members, seats, sum(map(len, pool)), stages)


EIGHT = [[0, 1, 2], [3, 4, 5], [6, 7]]
JOINS = ProbeRule(joins=True)


def test_who_is_new_computes_a_lane_of_one_who_is_not_on_another_host_if_there_is_one() -> None:
    assert probes(plan(EIGHT), 4, JOINS, {2}) == {1: (0, 2)}
    assert probes(plan(EIGHT, "aba"), 4, JOINS, {2}) == {4: (1, 2)}
    assert probes(plan(EIGHT), 4, JOINS, {0, 2}) == {4: (1, 0, 2)}
    assert probes(plan(EIGHT), 4, JOINS, set()) == {}
    assert probes(plan(EIGHT), 4, ProbeRule(), {2}) == {}


def test_where_all_are_new_the_rest_computes_a_lane_of_the_first() -> None:
    assert probes(plan(EIGHT), 1, JOINS, {0, 1, 2}) == {1: (0, 1, 2)}


@pytest.mark.parametrize(
    "odd", [plan([[0, 1], []]), plan([[0, 1]]), plan(EIGHT, stages=2)], ids=["standby", "one", "cut"]
)
def test_where_nobody_else_could_there_is_none(odd: Plan) -> None:
    assert probes(odd, 100, ProbeRule(every=100, share=1.0, joins=True), {0, 1, 2}) == {}


def test_every_so_many_steps_one_lane_goes_round() -> None:
    rule = ProbeRule(every=10)
    found = [probes(plan(EIGHT), step, rule, set()) for step in range(10, 260, 10)]
    assert all(len(of) == 1 for of in found) and not probes(plan(EIGHT), 11, rule, set())
    assert {lane for of in found for lane in of} == set(range(8))
    assert all(len(who) == 2 and lane in EIGHT[who[0]] for of in found for lane, who in of.items())
    assert {who[1] for of in found for who in of.values()} >= {2}, "the one with the fewest lanes"


def test_the_share_is_that_of_all_lanes_and_the_same_for_all() -> None:
    rule = ProbeRule(seed=3, share=0.25)
    found = [probes(plan(EIGHT), step, rule, set()) for step in range(1, 501)]
    assert 0.2 < sum(map(len, found)) / 4000 < 0.3
    assert found == [probes(plan(EIGHT), step, rule, set()) for step in range(1, 501)]
    assert len(probes(plan(EIGHT), 7, ProbeRule(share=1.0), set())) == 8
