"""Joiners that get their part of a divided state from several donors: whom they ask for what, and when donors offer."""

from __future__ import annotations

from typing import Any

import pytest
from driver_harness import Worker, joiner, payload, plan, records_of, ticket

from everstep.base.errors import InvariantViolation
from everstep.base.extents import Extents
from everstep.base.plan import Plan, Shard
from everstep.placement.shards import share
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.joint_feeds import Followers, coming, groups, joint_asks, segments_fed
from everstep.protocol.driver.records import encode
from everstep.protocol.moving.giver import JointAsk
from everstep.protocol.step_types import Key, Record

OF = (("model", 2), ("optimizer/exp_avg", 4))
SHARDS = (Shard(1, 0, segments=((0, 128),)), Shard(2, 0, segments=((128, 256),)))
MEMBERS: Plan = plan(1, (1, 2), shards=SHARDS)
MINE = Shard(0, 0, segments=((100, 150),))
PART = Extents.numbered(OF, (0, 2, 3))


def parts(given: Plan = MEMBERS, *shards: Shard, number: int = 7, **more: Any) -> wire.Heal:
    holders = [[s.worker_id for s in given.pool(stage)] for stage in more.get("stages", (0,))]
    return ticket(number, given, holders=holders, shards=list(shards or (MINE,)), **more)


# ---- whom to ask


def test_each_segment_comes_from_one_donor_and_the_rest_from_the_first() -> None:
    told = parts()
    assert segments_fed(told) == {0: {1: ((100, 128),), 2: ((128, 150),)}}
    (donors, stages), *others = groups(told)
    assert [m.worker_id for m in donors] == [1, 2] and stages == (0,) and not others
    (asks,) = joint_asks(told, 0)
    assert asks == {
        1: JointAsk(0, 7, (1, 2), 1, ((100, 128),), rest=True),
        2: JointAsk(0, 7, (1, 2), 1, ((128, 150),), rest=False),
    }


def test_as_few_donors_as_have_all_are_asked() -> None:
    shards = (Shard(1, 0, segments=((0, 128),)), Shard(2, 0, segments=((90, 256),)), Shard(3, 0, segments=((0, 140),)))
    assert segments_fed(parts(plan(1, (1, 2, 3), shards=shards))) == {0: {2: ((100, 150),)}}
    whole = plan(1, (1, 2))
    assert segments_fed(parts(whole)) == {0: {1: ((100, 150),)}}, "members that have all, while there are few"
    assert segments_fed(parts(MEMBERS, Shard(0, 0, segments=()))) == {0: {1: ()}}, "all that is not dealt out"


def test_segments_without_a_donor_are_a_bug() -> None:
    with pytest.raises(InvariantViolation, match="have no donor"):
        groups(parts(plan(1, (1,), shards=(Shard(1, 0, segments=((0, 120),)),))))


def test_stages_that_come_whole_come_from_one_donor_then_and_it_knows_how_often_it_is_asked() -> None:
    given = plan(1, (1, 2), (1,), shards=SHARDS)
    told = parts(given, stages=(0, 1))
    assert [([m.worker_id for m in donors], stages) for donors, stages in groups(told)] == [([1], (1,)), ([1, 2], (0,))]
    whole, dealt = joint_asks(told, 0)
    assert whole == {1: JointAsk(0, 7, (1, 2), 2, None, rest=True)} and dealt[1].times == 2 and dealt[2].times == 1


def test_the_joiner_has_its_parts_in_a_plan_of_its_own() -> None:
    assert coming(ticket(7, MEMBERS), 0) is None and joint_asks(ticket(7, MEMBERS), 0) == ()
    found = coming(parts(), 0)
    assert (
        found is not None
        and found.stages_of(0) == (0,)
        and found.shard(0, 0) == MINE
        and found.members == MEMBERS.members
    )


# ---- the joiner


def test_it_copies_its_part_and_has_it_after_each_step_that_it_is_fed() -> None:
    w = joiner()
    told = parts()
    w.hear(told)
    own = coming(told, 0)
    assert w.op == do.OpenFeeds(w.op.op, 1, 7, groups(told), own, joint_asks(told, 0))
    w.done((Key(4, 0),))
    w.done(do.Copied(records_of(MEMBERS), {Key(4, 0): records_of(MEMBERS)}, sizes={0: OF}))
    assert w.driver.machine.held == {0: share(MINE, OF)} and isinstance(w.op, do.Watch)
    w.done([do.Seen(0, 5, records_of(MEMBERS))])
    assert isinstance(w.op, do.Replay) and w.op.plan == own
    w.done({0: PART})
    assert w.driver.machine.held == {0: PART} and w.driver.machine.step == 5
    w.done([do.Seen(0)])
    assert [m.step for m in w.told(wire.WorkerHealed)] == [5]


# ---- a donor


def asked(number: int = 7, worker: int = 5, times: int = 1) -> do.FollowerAsked:
    return do.FollowerAsked(JointAsk(worker, number, (0, 1), times, ((0, 9),), rest=True))


def step(w: Worker, number: int, *said: int) -> None:
    """A step in whose records the other member says these tickets."""
    w.to_reduce(number)
    w.reduce()
    w.exchange({1: Record(0, encode(payload(w.plan, 1, asked=said)))})
    w.done(1001)


def member() -> Worker:
    return Worker(plan(1, (0, 1)))


def test_it_offers_after_the_first_step_whose_records_say_that_all_were_asked() -> None:
    w = member()
    w.on(asked())
    step(w, 1)
    step(w, 2, 7)
    assert not w.count(do.OfferFeeds), "the other one had not been asked yet when this step began"
    step(w, 3, 7)
    assert w.last(do.OfferFeeds).tickets == {7} and w.last(do.OfferFeeds).position == Key(2, 0)
    step(w, 4, 7)
    assert w.count(do.OfferFeeds) == 1


def test_who_follows_one_donor_does_not_wait_for_it() -> None:
    w = member()
    w.on(asked())
    w.on(do.FollowerAsked())
    w.ask(do.StepAsked(1))
    assert w.last(do.OfferFeeds).tickets == frozenset()


def test_a_new_generation_ends_what_was_not_offered() -> None:
    w = member()
    w.on(asked())
    w.ask(do.StepAsked(1))
    w.hear(plan(2, (0, 1)))
    w.abort()
    w.settle()
    w.lanes()
    w.reduce()
    w.exchange({1: Record(0, encode(payload(w.plan, 1, asked=(7,))))})
    w.done(1001)
    step(w, 2)
    assert not w.count(do.OfferFeeds)


def test_a_generation_ends_what_was_asked_and_a_newer_ticket_what_is_older() -> None:
    waiting = Followers()
    waiting.come(asked(7, times=2).joint)
    assert waiting.tickets == (), "it is to be asked once more"
    waiting.come(asked(7, times=2).joint)
    assert waiting.tickets == (7,)
    waiting.come(asked(9, times=2).joint)
    waiting.come(asked(7, times=2).joint)
    assert waiting.tickets == ()
    waiting.come(asked(9, times=2).joint)
    waiting.come(asked(8, worker=6).joint)
    assert waiting.tickets == (8, 9)
    both = frozenset((0, 1))
    assert waiting.ready({8: frozenset((0,)), 9: both, 4: both}) == {9} and waiting.tickets == (8,)
    waiting.regroup()
    assert waiting.tickets == () and waiting.ready({8: both}) == frozenset()
