"""Snapshots in memory: who copies those of another pool, and when none is taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from driver_harness import plan

from everstep.base.cause import Cause, Why
from everstep.base.extents import NONE, WHOLE
from everstep.base.plan import WorkerKey
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.outbox import Outbox
from everstep.protocol.driver.saver import Keeper, keeps_for
from everstep.protocol.step_types import Record

PLAN = plan(1, (0, 1), (2, 3))
RECORDS = {0: Record(0, b"r")}


class Member:
    """A worker's keeper after updates."""

    def __init__(self, worker_id: int) -> None:
        self.out = Outbox(WorkerKey(worker_id, 0))
        machine: Any = SimpleNamespace(plan=PLAN, me=WorkerKey(worker_id, 0), held={})
        self.keeper = Keeper(machine, self.out, lambda number: 0)

    def update(self, number: int) -> list[Any]:
        """After which snapshots are due."""
        outcome: Any = SimpleNamespace(kept=0, save=(("memory",), ""), step=number)
        self.keeper.updated(outcome, RECORDS)
        return self.out.drain()

    def hear(self, kept: int, number: int) -> list[Any]:
        """An update, whose records say that the snapshots of a step are where they are to be."""
        outcome: Any = SimpleNamespace(kept=kept, save=((), ""), step=number)
        self.keeper.updated(outcome, RECORDS)
        return self.out.drain()


def skipped(effects: list[Any]) -> bool:
    (effect,) = effects
    return isinstance(effect, do.Skipped) and effect.why.cause is Cause.BUSY


def test_a_member_of_another_pool_copies_what_a_stage_has() -> None:
    others = {i: Member(i).update(4) for i in PLAN.worker_ids}
    keepers = {keeps_for(PLAN, stage): stage for stage in range(PLAN.stages)}
    assert len(keepers) == 2 and None not in keepers
    for i, (effect,) in others.items():
        pool = {0: (0, 1), 1: (2, 3)}.get(keepers.get(i, -1), ())
        assert effect == do.Keep(PLAN, 4, {keepers[i]: pool} if pool else {}, {})


def test_who_copies_has_all_of_a_step_once_the_copy_is_there() -> None:
    one = Member(keeps_for(PLAN, 0) or 0)
    one.update(4)
    assert one.keeper.complete == 0 and skipped(one.update(5)), "one at a time"
    one.keeper.others_kept(do.OthersKept(4, True))
    assert one.keeper.complete == 4 and not skipped(one.update(6))
    one.keeper.others_kept(do.OthersKept(4, False))
    one.keeper.others_kept(do.OthersKept(6, False))
    assert one.keeper.complete == 0 and not skipped(one.update(7)), "the next one may succeed"


@pytest.mark.parametrize("busy", [False, True])
def test_nobody_takes_another_one_while_its_newest_is_being_copied(busy: bool) -> None:
    one = Member(next(i for i in PLAN.worker_ids if i not in {keeps_for(PLAN, 0), keeps_for(PLAN, 1)}))
    one.update(4)
    one.keeper.there(do.InMemory({(0, 4): WHOLE}, busy=busy))
    assert skipped(one.update(5)) == busy and one.keeper.complete == (4 if busy else 5)


def test_no_room_for_another_pools_snapshot_is_told_once_until_one_is_kept_again() -> None:
    one, why = Member(keeps_for(PLAN, 0) or 0), Why(Cause.CONFIG, "no room")

    def refused(step: int) -> list[bool]:
        one.update(step)
        one.keeper.there(do.InMemory({(1, step): WHOLE}))  # its own stage is there
        one.keeper.refused(do.NotKept(step, why))
        return [effect.tell for effect in one.out.drain()]

    assert refused(4) == [True] and refused(5) == [False] and one.keeper.complete == 0
    one.update(6)
    one.keeper.others_kept(do.OthersKept(6, True))
    assert refused(7) == [True]


def test_where_nobody_else_keeps_it_no_room_is_told_once_until_the_newest_is_here_in_all() -> None:
    one = Member(next(i for i in PLAN.worker_ids if i not in {keeps_for(PLAN, 0), keeps_for(PLAN, 1)}))

    def refused(step: int) -> list[bool]:
        one.update(step)
        one.keeper.refused(do.NotKept(step, Why(Cause.CONFIG, "no room")))
        return [effect.tell for effect in one.out.drain()]

    assert refused(4) == [True] and refused(5) == [False]
    for step, there in ((6, {(0, 4): WHOLE}), (8, {(0, 4): WHOLE, (0, 8): NONE})):
        one.update(step)
        one.keeper.there(do.InMemory(there))
        assert refused(step + 1) == [False], "an older one, or a part"
    one.update(10)
    one.keeper.there(do.InMemory({(0, 10): WHOLE}))
    assert refused(11) == [True]


def test_after_one_that_had_no_room_the_next_may_succeed_also_where_nobody_else_keeps_it() -> None:
    one = Member(next(i for i in PLAN.worker_ids if i not in {keeps_for(PLAN, 0), keeps_for(PLAN, 1)}))
    one.update(4)
    one.keeper.refused(do.NotKept(4, Why(Cause.CONFIG, "no room")))
    one.out.drain()
    (effect,) = one.update(5)
    assert isinstance(effect, do.Keep)


def test_what_is_gone_back_to_stays() -> None:
    one = Member(0)
    for step in (4, 6):
        one.update(step)
        one.keeper.others_kept(do.OthersKept(step, True))
    one.keeper.there(do.InMemory({(0, 4): WHOLE, (0, 6): WHOLE}))
    one.keeper.released(6)
    (stated,) = one.keeper.went_back(4)
    assert list(stated.snapshots) == [(0, 4)]


@pytest.mark.parametrize(("copied", "complete"), [(True, 4), (False, 0)])
def test_what_came_after_the_step_that_is_gone_back_to_is_forgotten(copied: bool, complete: int) -> None:
    """Also a copy that was on its way: what comes of it later says nothing, and the next may be taken."""
    one = Member(keeps_for(PLAN, 0) or 0)
    for step in (2, 4, 6):
        one.update(step)
        if step < 6 or copied:
            one.keeper.others_kept(do.OthersKept(step, True))
    one.out.drain()
    list(one.keeper.went_back(4))
    assert one.out.drain() == [do.ForgetKept(4)]
    assert [bool(one.keeper.records_of(step)) for step in (2, 4, 6)] == [True, True, False]
    one.keeper.others_kept(do.OthersKept(6, True))
    assert one.keeper.complete == complete
    assert isinstance(one.update(5)[0], do.Keep)


def test_a_snapshot_that_was_forgotten_does_not_count_when_its_step_is_repeated() -> None:
    one = Member(0)
    one.update(6)
    one.keeper.others_kept(do.OthersKept(6, True))
    one.keeper.there(do.InMemory({(0, 6): WHOLE}))
    assert list(one.keeper.released(6)) and list(one.keeper.went_back(4))
    one.update(6)
    assert not list(one.keeper.released(7))
    (stated,) = one.keeper.there(do.InMemory({(0, 6): WHOLE}))
    assert list(stated.snapshots) == [(0, 6)]


def test_records_of_the_newest_that_all_have_stay_and_older_ones_only_with_their_snapshots() -> None:
    """What is in memory here may be heard of later than what all have."""
    one = Member(next(i for i in PLAN.worker_ids if i not in {keeps_for(PLAN, 0), keeps_for(PLAN, 1)}))
    for step in (2, 4, 6):
        one.update(step)
    one.keeper.there(do.InMemory({(0, 2): WHOLE}))
    assert one.hear(6, 7) == [do.RetireKept(6, 0)]
    assert [bool(one.keeper.records_of(step)) for step in (2, 4, 6)] == [True, False, True]
    one.keeper.released(7)
    (stated,) = one.keeper.there(do.InMemory({(0, 6): WHOLE}))
    assert list(stated.snapshots) == [(0, 6)]


def test_what_is_kept_is_told_once_all_have_gone_beyond_it() -> None:
    one = Member(0)
    one.update(4)
    assert list(one.keeper.there(do.InMemory({(0, 4): WHOLE}))) == []
    (told,) = one.keeper.released(4)
    assert dict(told.snapshots) == {(0, 4): WHOLE}
    assert list(one.keeper.released(5)) == [] == list(one.keeper.there(do.InMemory({(0, 4): WHOLE})))
    (told,) = one.keeper.went_back(3)
    assert not told.snapshots
