"""The driver as a donor's and as a joiner's: offers, feeds, levelling, replay, and what ends it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from driver_harness import LANES, Worker, at, gather_records, joiner, member, member_worker, plan, records_of, ticket

from everstep.base.cause import Cause
from everstep.base.errors import InvariantViolation
from everstep.base.extents import WHOLE
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.records import conclude, encode_holding
from everstep.protocol.driver.stepper import groups
from everstep.protocol.following import StatesAlike
from everstep.protocol.step_types import Key, Record, Release

MEMBERS = plan(1, (1, 2))
SPLIT = plan(1, (1,), (2,))


def fed(step: int, feed: int = 0, of: Any = MEMBERS, **more: Any) -> do.Seen:
    return do.Seen(feed=feed, step=step, records=records_of(of, **more))


def outcome(step: int, of: Any = MEMBERS) -> Any:
    return conclude(step, LANES, records_of(of))


def following(given: Any = MEMBERS, *positions: Key, stages: tuple[int, ...] = (0,)) -> Worker:
    """Worker 0, to whom everything was offered."""
    w = joiner(verify_every=2)
    holders = [[s.worker_id for s in given.pool(stage)] for stage in stages]
    w.hear(ticket(7, given, stages, holders=holders))
    w.done(positions or (Key(4, 0),))
    return w


def adopted(given: Any = MEMBERS) -> Worker:
    """Worker 0, which has the state of step 4."""
    w = following(given)
    w.done(do.Copied(records=records_of(given), gathers={Key(4, 0): records_of(given)}))
    return w


def split_pair(first: Key, second: Key) -> Worker:
    return following(SPLIT, first, second, stages=(0, 1))


# ---- a donor


def test_who_asks_to_follow_is_offered_the_state_when_the_next_step_begins() -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.gather()
    w.on(do.FollowerAsked())
    assert w.out == []
    w.ask(do.GatherAsked(b""))
    w.exchange(gather_records(w.plan))
    assert w.count(do.OfferFeeds) == 0, "the application may still learn something"
    w.ask(do.StepAsked(2))
    offer = w.out[0]
    assert offer == do.OfferFeeds(
        position=Key(1, 2), records=w.driver.machine.records, gathers=w.driver.gathered, stages=(0,)
    )
    assert set(offer.gathers) == {Key(1, 0), Key(1, 1), Key(1, 2)} and isinstance(w.out[1], do.Compute)
    w.lanes()
    w.reduce()
    w.agree()
    w.done(2)
    w.step(3)
    assert w.count(do.OfferFeeds) == 1
    w.on(do.FollowerAsked())
    w.ask(do.StepAsked(4))
    assert w.count(do.OfferFeeds) == 2


def test_nothing_is_offered_while_a_plan_is_being_settled() -> None:
    w = joiner()
    w.hear(plan(1, (0, 1)))
    w.on(do.FollowerAsked())
    w.settle()
    w.step(1)
    assert w.count(do.OfferFeeds) == 1
    w = member_worker(0, 1)
    w.on(do.FollowerAsked())
    w.hear(plan(2, (0, 1)))
    w.ask(do.EvaluateAsked())
    w.abort(1)
    w.hear(wire.JobEnded(state="completed", reason="", exit_code=0))
    assert w.count(do.OfferFeeds) == 0


def test_nothing_is_offered_of_a_state_that_may_yet_be_another() -> None:
    """The gather was decided, so the application goes on; but the members of the next generation have not settled."""
    w = member_worker(0, 1)
    w.ask(do.GatherAsked(b""))
    w.hear(plan(2, (0, 1)))
    w.exchange(gather_records(w.plan))
    w.abort(1)
    assert isinstance(w.out[-1], do.GatherDone)
    w.on(do.FollowerAsked())
    w.ask(do.StepAsked(1))
    assert w.out == []
    w.hear(plan(3, (0,)))
    w.settle()
    w.lanes()
    w.reduce()
    w.agree()
    w.done(1)
    assert w.count(do.OfferFeeds) == 0
    w.ask(do.StepAsked(2))
    assert w.count(do.OfferFeeds) == 1


def test_a_follower_that_asks_during_a_step_waits_for_the_next() -> None:
    w = member_worker(0, 1)
    w.ask(do.StepAsked(1))
    w.on(do.FollowerAsked())
    w.lanes()
    w.reduce()
    w.agree()
    w.done(1)
    assert w.count(do.OfferFeeds) == 0
    w.ask(do.StepAsked(2))
    assert w.count(do.OfferFeeds) == 1


# ---- a joiner: offers


def test_a_ticket_is_followed_from_the_offer_to_the_word_that_it_is_healed() -> None:
    w = joiner()
    w.hear(ticket(7, MEMBERS))
    assert w.out == [do.OpenFeeds(op=1, generation=1, ticket=7, groups=(((member(1), member(2)), (0,)),))]
    w.done((Key(4, 0),))
    assert w.out == [do.Adopt(op=2, generation=1, position=Key(4, 0), stages=(0,), passed=((),))]
    known = {Key(4, 0): records_of(MEMBERS)}
    w.done(do.Copied(records=records_of(MEMBERS), gathers=known))
    assert w.out == [Release(3), do.Watch(op=3, generation=1)]
    assert w.driver.gathered == known and w.driver.machine.position == Key(4, 0)
    assert w.driver.machine.records == records_of(MEMBERS)
    w.done([fed(5)])
    assert w.out == [
        do.Replay(op=4, generation=1, step=5, records=records_of(MEMBERS), outcome=outcome(5), plan=MEMBERS)
    ]
    w.done()
    assert w.out == [Release(4), do.Watch(op=5, generation=1)] and w.driver.machine.position == Key(5, 0)
    assert w.driver.gathered == {Key(5, 0): records_of(MEMBERS)} and w.driver.machine.stages == (0,)
    assert w.told() == []
    w.done([do.Seen(0)])
    healed = wire.WorkerHealed(worker_id=0, incarnation=0, ticket=7, step=5)
    assert w.out == [do.Tell(healed), do.Watch(op=6, generation=1)]
    assert w.driver.situation.messages == (healed,)
    w.done([do.Seen(0)])
    w.done([fed(6)])
    w.done()
    w.done([do.Seen(0)])
    assert w.told() == [healed], "once"
    assert isinstance(w.op, do.Watch)


def test_it_is_healed_once_it_has_nothing_left_to_replay() -> None:
    w = adopted()
    w.done([do.Seen(0), fed(5), fed(6)])
    assert isinstance(w.op, do.Replay)
    w.done()
    assert isinstance(w.op, do.Replay) and w.op.step == 6
    w.done()
    assert w.told() == [] and isinstance(w.op, do.Watch), "more has come than it was told before"
    w.done([])
    assert w.told() == []
    w.done([do.Seen(0)])
    assert w.told()[-1].step == 6


def test_offers_of_different_steps_are_levelled_before_anything_is_loaded() -> None:
    w = split_pair(Key(4, 0), Key(6, 1))
    assert isinstance(w.op, do.Watch)
    w.done([fed(5, of=SPLIT), do.Seen(1)])
    assert isinstance(w.op, do.Watch), "one more is lacking"
    w.done([fed(6, of=SPLIT), fed(7, of=SPLIT)])
    passed = ((outcome(5, SPLIT), outcome(6, SPLIT)), ())
    assert w.out == [do.Adopt(op=w.op.op, generation=1, position=Key(6, 1), stages=(0, 1), passed=passed)]
    w.done(do.Copied(records=records_of(SPLIT), gathers={Key(6, 0): {}, Key(6, 1): {}}))
    assert w.driver.machine.position == Key(6, 1) and w.driver.machine.stages == (0, 1)
    assert isinstance(w.op, do.Watch), "the second feed has not given step 7 yet"
    w.done([fed(7, feed=1, of=SPLIT)])
    assert isinstance(w.op, do.Replay) and w.op.step == 7
    w.done()
    assert w.driver.machine.position == Key(7, 0) and w.driver.machine.stages == (0, 1)


def test_it_is_healed_when_all_feeds_are() -> None:
    w = split_pair(Key(4, 0), Key(4, 0))
    assert isinstance(w.op, do.Adopt)
    w.done(do.Copied())
    w.done([do.Seen(0)])
    assert w.told() == []
    w.done([do.Seen(1)])
    assert w.told() == [wire.WorkerHealed(worker_id=0, incarnation=0, ticket=7, step=4)]


def test_feeds_that_are_a_step_apart_are_a_bug() -> None:
    w = split_pair(Key(4, 0), Key(4, 0))
    w.done(do.Copied())
    with pytest.raises(InvariantViolation, match=r"feeds are apart: \[5, 6\]"):
        w.done([fed(5, of=SPLIT), fed(6, feed=1, of=SPLIT)])


def test_gathers_that_came_with_the_offer_answer_the_application_later() -> None:
    found = gather_records(MEMBERS, w1=b"x")
    w = following(MEMBERS, Key(4, 1))
    w.done(do.Copied(records=found, gathers={Key(4, 0): records_of(MEMBERS), Key(4, 1): found}))
    w.hear(plan(2, (0, 1, 2)))
    w.abort()
    w.settle(w1=at(4, 1, records=found), w2=at(4, 1, records=found))
    assert w.out[-1] == do.Arrived(4)
    w.ask(do.GatherAsked(b""))
    assert w.out == [do.GatherDone(found)]


def test_who_slept_while_all_went_back_and_gathered_anew_forgets_the_first_answer() -> None:
    w = member_worker(0, 1, 2)
    w.step(1)
    w.gather()
    w.ask(do.GatherAsked(b""))
    w.enter(plan(3, (0, 1, 2), voided=3), w1=at(1, 1), w2=at(1, 1))
    assert isinstance(w.op, do.Fetch) and w.op.position == Key(1, 1) == w.driver.machine.position
    found = gather_records(plan(2, (1, 2)), w1=b"anew")
    w.done(do.Copied(records=found, gathers={Key(1, 1): found}))
    assert w.driver.gathered == {Key(1, 1): found}


def test_a_gather_that_was_decided_before_it_joined_leaves_the_shelf_to_those_who_still_copy() -> None:
    w = split_pair(Key(4, 0), Key(4, 0))
    w.done(do.Copied(records=records_of(SPLIT), gathers={Key(4, 0): records_of(SPLIT)}))
    w.hear(plan(2, (1,), (0, 3)))
    w.abort()
    w.settle(w1=at(4, 1, records=gather_records(SPLIT)), w3=at(0, stages=()))
    assert w.count(do.Shelve) == 1 and w.out[-1] == do.Arrived(4)
    w.ask(do.GatherAsked(b""))
    assert w.out[0] == do.Decided(key=Key(4, 1), generation=2, first=False) and w.count(do.Unshelve) == 0
    w.ask(do.GatherAsked(b""))
    w.exchange(gather_records(w.plan))
    assert w.out[:2] == [do.Unshelve(), do.Decided(key=Key(4, 2), generation=2, first=True)]


def test_whom_to_ask_for_what() -> None:
    given = plan(3, (1, 2), (1, 2), (2,))
    some = ticket(1, given, (2, 0, 1), holders=[[2, 9], [2, 1], [2, 1]])
    assert groups(some) == (((member(2), member(1)), (0, 1)), ((member(2),), (2,)))
    assert groups(ticket(1, given, (0, 1))) == (((member(1), member(2)), (0, 1)),)


def test_who_follows_learns_from_the_members_that_they_are_alike_and_says_nothing_of_itself() -> None:
    w = adopted()
    w.done([fed(5, digests={1: "aa", 2: "aa"})])
    w.done()
    assert w.driver.machine.step == 5 and w.driver.proven(4) == 4
    assert w.told(StatesAlike) == [] and w.driver.fresh, "its own state was not compared"


# ---- a joiner: the switch


def test_a_joiner_switches_with_the_members_and_closes_its_feeds() -> None:
    w = adopted()
    coming = plan(2, (0, 1, 2), prepared=True)
    w.hear(coming)
    w.done([fed(5, prepared=2)])
    assert isinstance(w.op, do.Replay)
    w.done()
    assert w.out == [
        Release(4),
        do.CloseFeeds(),
        do.Open(op=w.op.op, generation=2, plan=coming, step=6, disk=False, limit=None),
    ]
    w.settle(w1=at(5, records=records_of(MEMBERS, prepared=2)), w2=at(5, records=records_of(MEMBERS, prepared=2)))
    assert w.out[-1] == do.Arrived(5)
    w.step(6)
    assert w.count(do.CloseFeeds) == 1


def test_a_joiner_that_hears_of_the_plan_after_the_members_have_switched() -> None:
    w = adopted()
    w.done([fed(5, prepared=2)])
    w.done()
    assert isinstance(w.op, do.Watch)
    w.hear(plan(2, (0, 1, 2), prepared=True))
    w.done([])
    assert w.out == [do.CloseFeeds(), w.op] and isinstance(w.op, do.Open)


def test_a_joiner_may_be_taken_in_at_once() -> None:
    w = adopted()
    w.hear(plan(2, (0, 1)))
    w.abort(reason="the connection was closed")
    assert w.told(wire.HealFailed) == []
    assert w.out == [do.CloseFeeds(), w.op] and isinstance(w.op, do.Open)
    w.settle(w1=at(6))
    assert isinstance(w.op, do.Fetch) and w.op.position == Key(6, 0)


@pytest.mark.parametrize(("voided", "counts"), [(0, True), (1, True), (2, False)])
def test_a_joiner_has_nothing_if_all_went_back_without_it_since_it_began(voided: int, counts: bool) -> None:
    w = adopted()
    w.hear(replace(plan(3, (0, 1)), voided=voided))
    w.abort(reason="the connection was closed")
    w.done(do.Opened())
    mine = w.stated()
    assert mine.stages == ({0: WHOLE} if counts else {}) and bool(mine.records) == counts
    w.done({0: encode_holding(mine), 1: encode_holding(at(3))})
    gets = w.op if isinstance(w.op, do.Restore) else None
    assert (gets and (gets.step, gets.sources)) == (None if counts else (3, {0: (1,)}))


# ---- a joiner: what ends it


def test_a_lost_feed_is_told_and_another_ticket_begins_anew() -> None:
    w = adopted()
    w.abort(1, reason="the donor went away")
    failed = wire.HealFailed(
        worker_id=0, incarnation=0, ticket=7, cause=Cause.SILENT, reason="healing stopped: the donor went away"
    )
    assert w.out == [do.CloseFeeds(), do.Tell(failed)] and w.op is None
    assert w.told(wire.PeerFault) == []
    w.on(do.TimePassed())
    assert w.op is None
    w.hear(ticket(8, plan(3, (1, 2))))
    assert w.out == [do.OpenFeeds(op=w.op.op, generation=3, ticket=8, groups=(((member(1), member(2)), (0,)),))]
    w.done((Key(2, 0),))
    assert isinstance(w.op, do.Adopt) and w.op.position == Key(2, 0)
    w.done(do.Copied())
    assert w.driver.machine.position == Key(2, 0)
    w.done([do.Seen(0)])
    assert w.told(wire.WorkerHealed)[-1].ticket == 8


def test_a_donor_that_cannot_be_reached_is_told_too() -> None:
    w = joiner()
    w.hear(ticket(7, MEMBERS))
    w.abort(reason="nobody answers")
    assert w.told() == [
        wire.HealFailed(
            worker_id=0, incarnation=0, ticket=7, cause=Cause.SILENT, reason="healing stopped: nobody answers"
        )
    ]


def test_it_is_silent_when_a_new_ticket_has_cut_it() -> None:
    w = adopted()
    w.done([do.Seen(0)])
    w.hear(ticket(8, plan(3, (1, 2))))
    w.abort(reason="cut")
    assert w.told(wire.HealFailed) == [] and w.driver.situation.messages == ()
    assert w.out == [do.CloseFeeds(), w.op] and isinstance(w.op, do.OpenFeeds) and w.op.ticket == 8


def test_a_new_ticket_while_nothing_was_cut_begins_anew_too() -> None:
    w = adopted()
    w.done([do.Seen(0), fed(5)])
    w.done()
    w.hear(ticket(8, MEMBERS))
    w.done([do.Seen(0)])
    assert w.out[0] == do.CloseFeeds()
    assert isinstance(w.op, do.OpenFeeds) and w.op.ticket == 8
    w.done((Key(3, 0),))
    w.done(do.Copied())
    w.done([do.Seen(0)])
    assert [(m.ticket, m.step) for m in w.told(wire.WorkerHealed)][-1] == (8, 3)


def test_a_message_that_can_wait_does_not_silence_it() -> None:
    w = adopted()
    w.hear(plan(2, (0, 1, 2), prepared=True))
    w.abort(reason="the donor went away")
    assert [type(m) for m in w.told()] == [wire.HealFailed]


def test_a_step_whose_records_differ_is_not_replayed() -> None:
    w = adopted()
    w.done([fed(5, digests={1: "a", 2: "b"})])
    assert w.out[0] == do.CloseFeeds()
    [failed] = w.told(wire.HealFailed)
    assert failed.cause is Cause.CORRUPT
    assert failed.reason.startswith("healing stopped: the state differs among the workers before step 5")
    assert w.op is None and w.driver.machine.position == Key(4, 0)


def test_a_joiner_is_not_needed_once_the_job_is_over() -> None:
    w = adopted()
    w.hear(wire.JobEnded(state="completed", reason="", exit_code=0))
    w.abort()
    assert w.out[-1] == do.Exit("the job is over, and this worker was not needed", drained=True)
    assert w.told() == []


def test_a_joiner_that_was_not_cut_yet_leaves_too() -> None:
    w = adopted()
    w.hear(wire.JobEnded(state="completed", reason="", exit_code=0))
    w.done([do.Seen(0)])
    assert w.out == [do.Exit("the job is over, and this worker was not needed", drained=True)]


def test_a_joiner_without_a_ticket_waits() -> None:
    w = joiner()
    assert w.on(do.TimePassed()) == [] and w.op is None


def test_a_ticket_for_one_that_is_a_member_already_is_of_no_use() -> None:
    w = member_worker(0, 1)
    w.hear(ticket(3, plan(1, (1,))))
    w.ask(do.StepAsked(1))
    assert isinstance(w.op, do.Compute) and w.count(do.Exit) == 0


def test_one_that_has_switched_to_what_the_others_have_not_starts_anew() -> None:
    w = Worker(plan(2, (0, 1)))
    w.hear(ticket(3, plan(4, (1,))))
    w.ask(do.StepAsked(1))
    [left] = [e for e in w.out if isinstance(e, do.Exit)]
    assert left.reason == (
        "it followed a switch to generation 2, but the others went on without it as generation 4; it has to restart"
    )
    assert not left.drained and not left.failed


def test_an_offer_of_more_donors_than_were_asked_is_a_bug() -> None:
    w = joiner()
    w.hear(ticket(7, MEMBERS))
    with pytest.raises(ValueError, match="zip"):
        w.done((Key(1, 0), Key(1, 0)))
    assert Record(0, b"") not in w.seen
