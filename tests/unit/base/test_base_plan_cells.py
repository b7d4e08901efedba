"""Members that are cells of several processes: their ranks, and the plan as those of one rank see it."""

from __future__ import annotations

import pytest

from everstep.base.errors import MembershipError
from everstep.base.plan import Member, Plan, Rank, Seat

CELL = Member(3, 1, "here", 100, "h:1", "s", (Rank(101, "h:2", "t"), Rank(102, "h:3", "u")))


def plan_of(*members: Member) -> Plan:
    seats = tuple(Seat(m.worker_id, 0, "active", (k,)) for k, m in enumerate(members))
    return Plan(1, "a test", members, seats, len(members))


def test_a_worker_of_one_process_is_a_cell_of_its_head() -> None:
    alone = Member(3, 1, "here", 100, "h:1", "s")
    assert alone.cell == (Rank(100, "h:1", "s"),) and alone.pids == (100,)
    plan = plan_of(alone)
    assert plan.at_rank(0) is plan


def test_each_rank_has_a_way_of_its_own() -> None:
    assert CELL.pids == (100, 101, 102)
    assert CELL.cell == (Rank(100, "h:1", "s"), Rank(101, "h:2", "t"), Rank(102, "h:3", "u"))
    assert CELL.at_rank(2) == Member(3, 1, "here", 102, "h:3", "u")


def test_equal_places_meet() -> None:
    other = Member(5, 0, "here", 200, "h:7", "x", (Rank(201, "h:8", "y"),))
    plan = plan_of(CELL, other).at_rank(1)
    assert [(m.key, m.pid, m.segment) for m in plan.members] == [(CELL.key, 101, "t"), (other.key, 201, "y")]
    assert plan.seats == plan_of(CELL, other).seats
    with pytest.raises(MembershipError, match=r"rank 2 of worker 5\.0, it has 2"):
        plan_of(CELL, other).at_rank(2)
