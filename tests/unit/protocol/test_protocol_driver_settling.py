"""The driver when a generation begins: what it opens, states, serves, copies and goes back to; states that differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
from driver_harness import Worker, at, gather_records, joiner, member, member_worker, plan, records_of, ticket

from everstep.base.cause import Cause
from everstep.base.extents import WHOLE
from everstep.base.plan import Plan, Seat, WorkerKey
from everstep.base.ports import Tag
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.records import encode_holding
from everstep.protocol.driver.saver import SavingRules
from everstep.protocol.step_types import Discard, Key, LaneDone, Record, Release, ServeState

OF_5 = {7: records_of(plan(1, (7,)))[7]}


KEPT = {0: Record(0, b"kept")}
"""What `Worker.keeps` says of the steps of snapshots."""


def behind(**more: object) -> Worker:
    """A member of generation 1 at step 2, whose application has asked for step 3, in the settle of generation 2."""
    w = member_worker(0, 1, **more)
    w.step(1)
    w.step(2)
    w.ask(do.StepAsked(3))
    w.hear(plan(2, (0, 1)))
    w.abort()
    return w


# ---- regroup


def test_a_plan_is_opened_stated_and_entered() -> None:
    w = joiner()
    given = plan(1, (0, 1))
    w.hear(given)
    assert w.out == [do.Open(op=1, generation=1, plan=given, step=1, disk=True, limit=None)]
    w.done(do.Opened())
    assert w.out == [do.Exchange(op=2, generation=1, tag=Tag("settle", 0, 0), payload=encode_holding(w.stated()))]
    w.done({0: w.op.payload, 1: encode_holding(at(0))})
    entered = wire.GenerationEntered(
        worker_id=0, incarnation=0, generation=1, step=1, phases_ms={"unblock": 1.0, "regroup": 1.0, "settle": 1.0}
    )
    assert w.out == [do.EnteredPlan(plan=given, step=0), do.Tell(entered), do.Arrived(0)]


def test_a_plan_leaves_what_is_not_decided_and_keeps_what_is() -> None:
    w = member_worker(0, 1, 2)
    w.step(1)
    w.to_agree(2)
    w.hear(plan(2, (0, 1)))
    w.agree()
    assert w.out[0] == Release(1) and isinstance(w.op, do.Update)
    w.hear(plan(3, (0, 1)))
    w.done(2000)
    assert w.out == [Discard(2), do.Cut(2), w.op] and w.op.plan.generation == 3, "not that of 2, which is over"
    w.settle()
    assert [type(e) for e in w.out][-2:] == [do.Tell, do.Stepped]
    assert w.count(do.Open) == 2


def test_gathers_that_are_decided_are_kept_when_a_plan_comes() -> None:
    w = member_worker(0, 1)
    w.ask(do.GatherAsked(b""))
    w.hear(plan(2, (0, 1)))
    found = gather_records(w.plan)
    w.exchange(found)
    assert Key(0, 1) in w.driver.gathered and isinstance(w.op, do.Open)
    w.settle()
    assert w.out[-1] == do.GatherDone({**found, 0: w.driver.gathered[Key(0, 1)][0]})


@pytest.mark.parametrize(("stages", "steps", "disk"), [(1, 0, True), (1, 1, False), (2, 0, True), (2, 1, True)])
def test_checkpoints_are_listed_only_where_memory_may_not_do(stages: int, steps: int, disk: bool) -> None:
    pools = ((0, 1),) if stages == 1 else ((0,), (1,))
    w = Worker(plan(1, *pools))
    for number in range(1, steps + 1):
        w.step(number)
    w.hear(plan(2, *pools))
    w.ask(do.StepAsked(steps + 1))
    assert (w.op.step, w.op.disk, w.op.limit) == (steps + 1, disk, None)
    w.done(do.Opened(disk=(4, 8)))
    assert w.stated().disk == (4, 8)


def test_what_was_listed_for_one_generation_is_not_stated_in_the_next() -> None:
    w = joiner()
    w.hear(plan(1, (0, 1)))
    w.done(do.Opened(disk=(8,)))
    w.hear(plan(2, (0, 1)))
    w.abort()
    w.done(do.Opened())
    assert w.stated().disk == ()


def test_a_member_whom_the_others_know_a_doubt_of_states_anew_what_it_can_read_up_to_there() -> None:
    w = behind()
    w.settle(w1=at(2, sound=1, records=w.driver.machine.records))
    assert w.told(wire.SettleAgain) == [
        wire.SettleAgain(
            worker_id=0,
            incarnation=0,
            generation=2,
            cause=Cause.CORRUPT,
            reason="states later than that of step 1 are tainted",
            tainted=0,
            decided_in=0,
            sound=1,
        )
    ]
    assert w.op is None and not w.driver.machine.settled
    w.hear(plan(3, (0, 1)))
    assert (w.op.disk, w.op.limit) == (True, 1)
    w.done(do.Opened())
    assert w.stated().sound == 1


def test_a_doubt_of_all_there_is_limits_to_step_0() -> None:
    w = behind()
    w.settle(w1=at(2, sound=0))
    w.hear(plan(3, (0, 1)))
    assert (w.op.disk, w.op.limit) == (True, 0)


def test_an_open_that_fails_accuses_and_the_next_plan_is_opened() -> None:
    w = member_worker(0, 1)
    w.hear(plan(2, (0, 1)))
    w.ask(do.StepAsked(1))
    w.abort(1, reason="not there")
    assert w.told(wire.PeerFault)[-1].generation == 2
    w.hear(plan(3, (0,)))
    w.settle()
    assert isinstance(w.op, do.Compute)


def test_how_far_the_others_had_been_is_told_when_steps_are_done_again() -> None:
    w = Worker(plan(1, (0,), (1,)))
    for number in (1, 2, 3):
        w.step(number)
    w.keeps(((0, 2), (1, 2)))
    w.ask(do.StepAsked(4))
    w.enter(plan(2, (0,), (1,)), w1=at(0, stages=(1,)))
    assert isinstance(w.op, do.Restore) and w.told(wire.Progress) == []
    w.done(do.Copied(OF_5))
    assert w.told(wire.Progress) == [wire.Progress(worker_id=0, incarnation=0, generation=1, step=3, step_ms=0.0)]
    assert [type(m) for m in w.driver.situation.messages] == [wire.GenerationEntered], "it is not repeated"


# ---- serving


def test_what_others_lack_is_shelved_until_the_next_decision() -> None:
    w = behind()
    w.settle(w1=at(0))
    shelf = do.Shelve(
        generation=2,
        position=Key(2, 0),
        records=w.driver.machine.records,
        gathers=w.driver.gathered,
        live={0: WHOLE},
        stands=True,
    )
    assert w.out[0] == shelf
    assert set(shelf.gathers) == {Key(2, 0)} and shelf.records
    w.lanes()
    w.reduce()
    assert w.count(do.Unshelve) == 0
    w.agree()
    assert w.out[:3] == [Release(2), do.Unshelve(), do.Decided(key=Key(3, 0), generation=2, first=True)]
    w.done(1)
    w.step(4)
    assert w.count(do.Unshelve) == 1


@pytest.mark.parametrize("decided", [False, True])
def test_a_state_stands_only_where_the_loop_waits_for_all(decided: bool) -> None:
    """A loop that is told of a gather which was decided before goes on while others copy, and may change the state."""
    w = member_worker(0, 1)
    w.step(1)
    w.ask(do.GatherAsked(b""))
    w.hear(plan(2, (0, 1)))
    if decided:
        w.exchange(gather_records(w.plan))
    else:
        w.abort()
    w.settle(w1=at(0))
    (shelf,) = [one for one in w.out if isinstance(one, do.Shelve)]
    assert shelf.stands is not decided
    assert any(isinstance(one, do.GatherDone) for one in w.out) is decided


@pytest.mark.parametrize("position", [Key(1, 0), Key(1, 1)])
def test_a_state_does_not_stand_where_the_worker_goes_back_from(position: Key) -> None:
    """Its loop is answered at once then, while others copy."""
    w = member_worker(0, 1)
    w.step(1)
    w.gather()
    w.ask(do.StepAsked(2))
    w.driver._effects.carry_out(ServeState(1, position, (1,)))
    (shelf,) = [one for one in w.driver._effects._parts.out.drain() if isinstance(one, do.Shelve)]
    assert shelf.stands is (position == w.driver.machine.position)


def test_a_gather_empties_the_shelf_too() -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.ask(do.GatherAsked(b""))
    w.enter(plan(2, (0, 1)), w1=at(0))
    assert w.count(do.Shelve) == 1
    w.exchange(gather_records(w.plan))
    assert w.out[:3] == [Release(1), do.Unshelve(), do.Decided(key=Key(1, 1), generation=2, first=True)]


def test_a_plan_empties_the_shelf_too() -> None:
    w = behind()
    w.settle(w1=at(0))
    w.hear(plan(3, (0, 1)))
    w.abort()
    assert w.out[:2] == [do.Cut(2), do.Unshelve()]


def test_a_kept_state_is_shelved_without_what_belongs_to_the_present_one() -> None:
    w = Worker(plan(1, (0,), (1,)))
    for number in (1, 2, 3):
        w.step(number)
    w.gather()
    w.keeps(((0, 2), (1, 2)))
    w.ask(do.StepAsked(4))
    w.enter(plan(2, (0,), (1,)), w1=at(0, stages=(1,)))
    shelf = w.last(do.Shelve)
    assert (shelf.generation, shelf.position, shelf.live) == (2, Key(2, 0), {})
    assert shelf.records == KEPT and shelf.gathers == {}
    assert shelf.live == {}


def test_who_goes_back_to_an_update_gets_it_as_it_was_before_the_loop_learnt_more() -> None:
    w = Worker(plan(1, (0,), (1,)))
    w.step(1)
    w.gather()
    w.gather()
    of_update = w.driver.gathered[Key(1, 0)]
    w.ask(do.StepAsked(2))
    # Stage 1 is gone but for a snapshot of step 1 that this worker has: all go to (1, 0).
    w.keeps(((1, 1),))
    w.enter(plan(2, (0,), (1,)), w1=at(0, stages=(1,)))
    shelf = w.last(do.Shelve)
    assert (shelf.position, shelf.live) == (Key(1, 0), {0: WHOLE})
    assert (shelf.records, shelf.gathers, shelf.live) == (of_update, {Key(1, 0): of_update}, {0: WHOLE})
    assert isinstance(w.op, do.Restore) and (w.op.own, w.op.stands) == (of_update, (0,))


def test_gathers_belong_to_what_is_served_after_them() -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.gather()
    w.ask(do.GatherAsked(b""))
    w.enter(plan(2, (0, 1)), w1=at(0))
    shelf = w.last(do.Shelve)
    assert (shelf.position, shelf.live) == (Key(1, 1), {0: WHOLE})
    assert set(shelf.gathers) == {Key(1, 0), Key(1, 1)} and shelf.records == w.driver.machine.records


def test_a_gather_that_the_own_application_has_not_asked_for_yet_is_given_with_the_state() -> None:
    """A joiner was taken in where the others had decided one without it; the next plan comes before it has arrived."""
    w = joiner()
    w.hear(ticket(1, plan(1, (1, 2))))
    w.done((Key(1, 0),))
    of_update, found = records_of(plan(1, (1, 2))), gather_records(plan(1, (1, 2)), w1=b"x")
    w.done(do.Copied(records=of_update, gathers={Key(1, 0): of_update}))
    w.hear(plan(2, (0, 1, 2)))
    w.abort()
    w.done(do.Opened())
    w.hear(plan(3, (0, 1, 3)))
    theirs = encode_holding(at(1, 1, records=found))
    w.done({0: w.op.payload, 1: theirs, 2: theirs})
    assert w.driver.machine.position == Key(1, 1) and w.count(do.Arrived) == 0
    w.settle(w1=at(1, 1, records=found), w3=at(0))
    shelf = w.last(do.Shelve)
    assert shelf.position == Key(1, 1) and shelf.gathers == {Key(1, 0): of_update, Key(1, 1): found}
    assert w.out[-1] == do.Arrived(1)
    w.ask(do.GatherAsked(b""))
    assert w.out[-1] == do.GatherDone(found)


def restored(*pools: tuple[int, ...]) -> Worker:
    """Worker 0 of a job that goes on from a checkpoint of step 8 that has no records."""
    w = joiner()
    w.hear(plan(1, *pools))
    w.settle(do.Opened(disk=(8,)), w1=at(0, disk=(8,), stages=(len(pools) - 1,)))
    w.done(do.Copied())
    assert w.out[-1] == do.Arrived(8)
    return w


def test_records_that_nobody_knows_are_not_given_as_some() -> None:
    w = restored((0, 1))
    w.ask(do.StepAsked(9))
    w.enter(plan(2, (0, 1)), w1=at(0))
    shelf = w.last(do.Shelve)
    assert (shelf.position, shelf.records, shelf.gathers) == (Key(8, 0), {}, {})
    w = restored((0,), (1,))
    w.gather()
    w.keeps(((1, 8),))
    w.ask(do.StepAsked(9))
    w.enter(plan(2, (0,), (1,)), w1=at(0, stages=(1,)))
    shelf = w.last(do.Shelve)
    assert (shelf.position, shelf.records, shelf.gathers) == (Key(8, 0), {}, {})


# ---- copying


def test_a_member_that_lacks_the_state_copies_it_and_its_application_goes_on_from_there() -> None:
    w = behind()
    w.settle(w1=at(3))
    assert w.out == [do.Fetch(op=w.op.op, generation=2, plan=w.plan, position=Key(3, 0), sources={0: (1,)})]
    before = w.driver.gathered
    w.done(do.Copied(records=OF_5, gathers={Key(3, 0): OF_5}))
    assert w.out[:3] == [do.CutFeeds(), Release(2), Discard(3)] and w.out[-1] == do.Stepped(3)
    assert w.driver.gathered == {Key(3, 0): OF_5} != before
    assert w.driver.machine.records == OF_5


def test_a_stage_that_is_gained_moves_nothing() -> None:
    w = Worker(plan(1, (0,), (1,)))
    w.step(1)
    w.ask(do.StepAsked(2))
    known = dict(w.driver.gathered)
    held = w.driver.machine.records
    w.enter(plan(2, (0,), (0, 1)), w1=at(1, stages=(1,), records=held))
    assert isinstance(w.op, do.Fetch) and w.op.sources == {1: (1,)}
    w.done(do.Copied(records=held, gathers={Key(1, 0): held}))
    assert do.CutFeeds() not in w.out and w.driver.gathered == known
    assert isinstance(w.op, do.Compute)


def test_a_copy_that_is_aborted_accuses_and_waits_for_the_next_plan() -> None:
    w = behind()
    w.settle(w1=at(3))
    w.abort(1, reason="no state")
    assert [type(m) for m in w.told(wire.PeerFault)] == [wire.PeerFault]
    assert w.driver.machine.position == Key(2, 0) and w.op is None
    w.hear(plan(3, (0,)))
    w.settle()
    assert isinstance(w.op, do.Compute) and w.driver.machine.position == Key(2, 0)


def test_a_plan_in_the_middle_of_a_copy() -> None:
    w = behind()
    w.settle(w1=at(3))
    w.hear(plan(3, (0, 2)))
    w.abort()
    assert w.told(wire.PeerFault) == [] and isinstance(w.op, do.Open)


def test_one_that_rolls_forward_updates_with_the_records_of_the_others() -> None:
    w = member_worker(0, 1)
    w.to_agree(1)
    found = records_of(w.plan)
    w.enter(plan(2, (0, 1)), w1=at(1, records=found))
    assert isinstance(w.op, do.Update) and w.op.records == found
    w.done(5)
    assert w.out[-1] == do.Stepped(1)
    assert w.out[0] == Discard(1)


def test_a_step_is_answered_once_all_have_settled() -> None:
    w = member_worker(0, 1)
    w.to_agree(1)
    w.agree()
    w.hear(plan(2, (0, 1)))
    w.done(1)
    w.abort(1)
    assert w.driver.machine.position == Key(1, 0) and [type(e) for e in w.out] == [do.Tell]
    w.hear(plan(3, (0,)))
    w.settle()
    assert w.out[-1] == do.Stepped(1)


@pytest.mark.parametrize("rewindable", [True, False])
def test_who_copies_a_later_step_than_it_was_asked_for_goes_on_from_there_or_starts_anew(rewindable: bool) -> None:
    w = behind(rewindable=rewindable)
    w.settle(w1=at(5))
    assert isinstance(w.op, do.Fetch)
    w.done(do.Copied(OF_5))
    anew = do.Exit("the others are at step 5, while step 3 was under way here: this worker restarts")
    assert w.out[-1] == (do.WentBack(5) if rewindable else anew)


# ---- going back


def gone_back(ask: do.Ask | None = None, rewindable: bool = True) -> Worker:
    """Worker 1, who was the pool of stage 1, is a new life: all go back from step 3 to 2, in the middle of step 4."""
    w = Worker(plan(1, (0,), (1,)), rewindable=rewindable)
    for number in (1, 2, 3):
        w.step(number)
    w.gather()
    w.keeps(((0, 2), (1, 2)))
    w.ask(ask or do.StepAsked(4))
    w.on(LaneDone(4, 0, 1))
    w.enter(plan(2, (0,), (1,)), w1=at(0, stages=(1,)))
    return w


def test_going_back_is_one_operation_and_the_application_is_told_once() -> None:
    w = gone_back()
    assert w.op == do.Restore(op=w.op.op, generation=2, plan=w.plan, step=2, sources={0: (0,)}, own=KEPT, stands=())
    assert do.CutFeeds() not in w.out, "who copies from here is waited for before the state changes"
    w.done(do.Copied(OF_5))
    assert w.out[0] == do.CutFeeds() and w.out[-1] == do.WentBack(2)
    assert w.driver.machine.position == Key(2, 0) and w.driver.gathered == {Key(2, 0): OF_5}
    assert "heal" in w.told(wire.GenerationEntered)[-1].phases_ms
    assert w.driver._parts.application.asked == 0
    w.step(3)
    assert w.count(do.WentBack) == 1
    w.ask(do.GatherAsked(b""))
    assert w.op.tag == Tag("decide", 3, 1), "gathers are numbered anew"


def test_gathers_after_a_step_are_numbered_anew_when_it_is_gone_back_to() -> None:
    w = Worker(plan(1, (0,), (1,)))
    w.step(1)
    w.gather()
    w.keeps(((1, 1),))
    w.ask(do.GatherAsked(b""))
    w.enter(plan(2, (0,), (1,)), w1=at(0, stages=(1,)))
    assert w.op.step == 1
    w.done(do.Copied(OF_5))
    assert w.out[-1] == do.WentBack(1)
    w.ask(do.GatherAsked(b""))
    assert w.op.tag == Tag("decide", 1, 1)


def test_one_that_stands_where_all_go_back_to_goes_on_undisturbed() -> None:
    """A stage is gained, at the very step: the application is where it should be."""
    w = Worker(plan(1, (0,), (1,)))
    w.step(1)
    w.ask(do.StepAsked(2))
    w.enter(plan(2, (0,), (0, 1)), do.Opened(disk=(1,)), w1=at(0, stages=(1,), disk=(1,)))
    known = w.driver.machine.records
    assert isinstance(w.op, do.Restore) and (w.op.own, w.op.stands) == (known, (0,))
    w.done(do.Copied(known))
    assert isinstance(w.op, do.Compute)
    w.lanes()
    w.reduce()
    w.agree()
    w.done(1)
    assert w.out[-1] == do.Stepped(2) and w.count(do.WentBack) == 0


def test_one_that_stands_where_all_go_back_to_keeps_nothing_of_steps_that_are_done_again() -> None:
    """Another pool was a step further, and has handed over its state of that step: a spoilt one, for all that is known.
    When the step is done again nothing would take its place."""
    w = Worker(plan(1, (0,), (1,), (2,)))
    w.step(1)
    w.keeps(((0, 1), (1, 1), (1, 2)))
    w.ask(do.StepAsked(2))
    ahead = at(2, stages=(1,), snapshots={(1, 1): WHOLE, (2, 1): WHOLE})
    w.enter(plan(2, (0,), (1,), (2,)), w1=ahead, w2=at(0, stages=(2,)))
    assert do.ForgetKept(1) in w.out and w.count(do.Restore) == 0
    assert w.told(wire.GenerationEntered)[-1].step == 2


def test_a_worker_that_arrives_by_going_back_is_told_that_it_has_arrived() -> None:
    w = joiner()
    w.hear(plan(1, (0, 1)))
    w.settle(do.Opened(disk=(8,)), w1=at(0, disk=(8,)))
    assert w.op == do.Restore(op=3, generation=1, plan=w.plan, step=8, sources={0: ()}, own={}, stands=())
    w.done(do.Copied(OF_5))
    assert w.out[-1] == do.Arrived(8) and w.count(do.WentBack) == 0
    w.step(9)
    assert w.count(do.WentBack) == 0


def test_a_checkpoint_without_records_leaves_none() -> None:
    w = joiner()
    w.hear(plan(1, (0, 1)))
    w.settle(do.Opened(disk=(8,)), w1=at(0, disk=(8,)))
    w.done(do.Copied())
    assert w.driver.gathered == {}


def test_going_back_twice_is_told_twice() -> None:
    w = gone_back()
    w.done(do.Copied(OF_5))
    w.step(3)
    w.ask(do.StepAsked(4))
    w.enter(plan(3, (0,), (1,)), w1=at(0, stages=(1,)))
    w.done(do.Copied(OF_5))
    assert w.count(do.WentBack) == 2


def test_a_plan_while_going_back() -> None:
    w = gone_back()
    w.hear(plan(3, (0,), (1,)))
    w.abort()
    w.settle(w1=at(2, stages=(1,)))
    assert isinstance(w.op, do.Restore) and w.op.generation == 3 and w.count(do.WentBack) == 0
    w.done(do.Copied(OF_5))
    assert w.count(do.WentBack) == 1


@pytest.mark.parametrize("ask", [do.StepAsked(4), do.GatherAsked(b""), do.EndAsked()])
def test_the_application_is_told_once_all_have_settled_though_plans_come_in_between(ask: do.Ask) -> None:
    w = gone_back(ask)
    w.hear(plan(3, (0,), (1,)))
    w.done(do.Copied(OF_5))
    assert isinstance(w.op, do.Open) and w.driver.machine.position == Key(2, 0)
    w.abort(1)
    assert [type(e) for e in w.out] == [do.Tell], "nothing is answered before that"
    w.hear(plan(4, (0,), (1,)))
    w.settle(w1=at(2, stages=(1,)))
    assert w.out[-1] == do.WentBack(2)


def test_an_application_that_cannot_go_on_from_an_earlier_step_starts_anew() -> None:
    w = gone_back(rewindable=False)
    assert (
        w.out[-1] == do.Exit("the job goes back to step 2, from where this worker restarts", returns=True)
        and w.op is None
    )


def test_one_that_has_not_trained_yet_can_go_anywhere() -> None:
    w = Worker(rewindable=False)
    w.ask(do.JoinAsked())
    w.hear(plan(1, (0, 1)))
    w.settle(do.Opened(disk=(8,)), w1=at(0, disk=(8,)))
    assert isinstance(w.op, do.Restore)


def tainted(w: Worker, sound: int) -> None:
    """All are to go back to what is there up to `sound`."""
    w.settle(w1=at(2, sound=sound))
    w.hear(plan(3, (0, 1)))
    w.settle(w1=at(2, sound=sound))


def test_a_whole_model_that_has_trained_cannot_go_back_to_the_beginning() -> None:
    w = behind()
    tainted(w, 0)
    assert w.out[-1] == do.Exit("the job goes back to step 0, from where this worker restarts", returns=True)
    w = behind()
    w.keeps(((0, 1),))
    w.settle(w1=at(2, sound=1))
    w.hear(plan(3, (0, 1)))
    w.settle(w1=at(2, sound=1))
    assert isinstance(w.op, do.Restore) and w.op.step == 1


def test_parts_of_a_split_model_can_be_built_anew() -> None:
    w = Worker(plan(1, (0,), (1,)))
    w.step(1)
    w.ask(do.StepAsked(2))
    w.enter(plan(2, (0,), (1,)), w1=at(0, stages=(1,)))
    assert isinstance(w.op, do.Restore) and w.op.step == 0
    w.done(do.Copied())
    assert w.out[-1] == do.WentBack(0)


def test_a_checkpoint_that_cannot_be_used_makes_all_settle_anew() -> None:
    w = joiner()
    w.hear(plan(1, (0, 1)))
    w.settle(do.Opened(disk=(8,)), w1=at(0, disk=(8,)))
    w.taint("step 8 is damaged")
    assert w.out == [
        do.Tell(
            wire.SettleAgain(worker_id=0, incarnation=0, generation=1, cause=Cause.DISK, reason="step 8 is damaged")
        )
    ]
    w.hear(plan(2, (0, 1)))
    w.settle()
    assert w.out[-1] == do.Arrived(0)


def test_one_whose_state_was_written_in_part_starts_anew() -> None:
    w = joiner()
    w.hear(plan(1, (0, 1)))
    w.settle(do.Opened(disk=(8,)), w1=at(0, disk=(8,)))
    w.taint("step 8 is damaged", torn=True)
    assert w.out == [do.Exit("step 8 is damaged; this worker restarts")]


def test_what_is_queued_is_dropped_when_the_state_cannot_be_used() -> None:
    w = gone_back()
    w.on(LaneDone(4, 0, 0))
    w.taint(odd=(1,))
    assert w.op is None
    told = w.told(wire.SettleAgain)[-1]
    assert (told.generation, told.odd) == (2, [1])


# ---- prepared plans


def test_the_switch_to_a_prepared_plan_follows_the_agree_in_which_all_hold_it() -> None:
    w = member_worker(0, 1)
    coming = plan(2, (0, 1, 2), prepared=True)
    w.hear(coming)
    w.to_agree(1)
    assert w.sent().prepared == 2
    w.agree(prepared=0)
    w.done(1)
    assert w.out[-1] == do.Stepped(1) and w.driver.machine.generation == 1
    w.to_agree(2)
    w.agree(prepared=2)
    w.done(2)
    assert w.out == [Discard(2), do.Cut(1), w.op] and w.op.plan == coming
    held = w.driver.machine.records
    w.settle(w1=at(2, records=held), w2=at(2, records=held))
    assert w.out[-1] == do.Stepped(2)
    assert "unblock" not in w.told(wire.GenerationEntered)[-1].phases_ms


def test_whoever_is_not_in_the_prepared_plan_leaves_for_good() -> None:
    w = member_worker(0, 1)
    w.hear(plan(2, (1,), prepared=True))
    w.step(1, prepared=2)
    leaves = w.out[-1]
    assert isinstance(leaves, do.Exit) and leaves.drained and not leaves.failed
    assert "plan goes on without" in leaves.reason and do.Cut(1) in w.out


# ---- a checkpoint that the plan asks for


def test_a_plan_that_asks_for_a_checkpoint_gets_it_before_anything_else() -> None:
    w = Worker(plan(1, (0, 1)), saving=SavingRules(on=True))
    w.step(1)
    w.ask(do.StepAsked(2))
    last = plan(2, (0, 1), save="stop")
    w.enter(last)
    assert isinstance(w.op, do.SaveLast) and (w.op.plan, w.op.step, w.op.save.due.reason) == (last, 1, "stop")
    w.done("somewhere")
    saved = wire.Saved(worker_id=0, incarnation=0, step=1, ok=True, where="somewhere")
    assert w.out == [Release(1), do.Tell(saved), do.Linger(op=w.op.op, generation=2)], (
        "rows and events of it come before the end"
    )
    assert saved in w.driver.situation.messages
    w.done()
    assert isinstance(w.op, do.Compute) and saved not in w.driver.situation.messages


def saved_at(**other: object) -> Worker:
    """Worker 0, whose loop has not heard of step 2, in a plan that asks for a checkpoint. other: of worker 1."""
    w = Worker(plan(1, (0, 1)), saving=SavingRules(on=True))
    w.step(1)
    w.to_agree(2)
    w.agree()
    w.hear(plan(2, (0, 1), save="stop"))
    w.done(1002)
    w.settle(w1=replace(at(2), **other))
    return w


def test_a_loop_that_has_not_heard_of_the_step_goes_on_to_the_next_before_it_is_saved() -> None:
    w = saved_at(heard=2)
    assert do.Stepped(2) in w.out and w.op is None, "the other's loop may have changed the state after the step"
    w.ask(do.StepAsked(3))
    assert isinstance(w.op, do.SaveLast) and w.op.save.past
    w.done("somewhere")
    w.done()
    assert isinstance(w.op, do.Compute) and w.op.step == 3


def test_if_no_loop_has_heard_of_the_step_all_are_saved_where_they_are() -> None:
    w = saved_at(heard=1)
    assert isinstance(w.op, do.SaveLast) and not w.op.save.past


def test_if_a_loop_never_goes_on_the_others_are_saved_where_it_is() -> None:
    w = saved_at(heard=2, stays_at=2)
    assert isinstance(w.op, do.SaveLast) and not w.op.save.past
    assert saved_at(heard=2, stays_at=3).op is None, "it has raised in the next step"


def test_a_plan_that_came_meanwhile_goes_before_the_checkpoint_of_an_older_one() -> None:
    w = saved_at(heard=2)
    w.hear(plan(3, (0, 1), save="stop"))
    w.ask(do.StepAsked(3))
    assert not isinstance(w.op, do.SaveLast)
    w.settle(w1=replace(at(2), heard=2))
    assert isinstance(w.op, do.SaveLast) and w.op.generation == 3 and w.op.save.past


def test_nobody_but_the_main_tells_of_it() -> None:
    w = Worker(plan(1, (0, 1)), me=WorkerKey(1, 0), saving=SavingRules(on=True))
    w.ask(do.StepAsked(1))
    w.enter(plan(2, (0, 1), save="stop"))
    w.done("somewhere")
    assert w.out == [do.Linger(op=w.op.op, generation=2)], "none of step 0 is told"


# ---- states that differ


def verified(*ids: int, **config: object) -> Worker:
    """Worker 0 of several, at step 3, where each second step's records bear digests; in the agree of step 4."""
    w = member_worker(*ids, verify_every=2, **config)
    for number in (1, 2, 3):
        w.step(number)
    w.to_agree(4, digest="aa")
    return w


def test_states_that_are_alike_are_applied() -> None:
    w = verified(0, 1, 2)
    w.agree({1: "aa", 2: "aa"})
    assert isinstance(w.op, do.Update) and w.count(do.Invalidate) == 0


def test_when_somebody_else_is_outvoted_nothing_is_applied_and_all_settle_anew() -> None:
    w = verified(0, 1, 2)
    w.agree({1: "aa", 2: "bb"})
    assert w.out[:2] == [Release(3), do.Invalidate(sound=1, first=True)]
    [told] = w.told(wire.SettleAgain)
    assert (told.generation, told.tainted, told.decided_in, told.odd) == (1, 4, 1, [2])
    assert "worker 2 deviates" in told.reason and told.reason.endswith("; all steps after 1 are tainted")
    assert w.op is None and w.driver.machine.position == Key(3, 0) and w.driver.machine.sound == 1
    w.hear(plan(2, (0, 1)))
    assert (w.op.disk, w.op.limit) == (True, 1)


def test_the_outvoted_one_leaves() -> None:
    w = verified(0, 1, 2)
    w.agree({1: "bb", 2: "bb"})
    assert w.out[:2] == [Release(3), do.Invalidate(sound=1, first=False)]
    left = w.out[2]
    assert isinstance(left, do.Outvoted) and (left.step, left.generation, left.sound) == (4, 1, 1)
    assert "worker 0 deviates" in left.reason
    assert w.told(wire.SettleAgain) == [] and w.count(do.Update) == 3 and len(w.out) == 3


def test_the_outvoted_one_says_in_which_generation_that_was_decided() -> None:
    w = verified(0, 1, 2)
    w.hear(plan(2, (0, 1)))
    w.agree({1: "bb", 2: "bb"})
    assert [e.generation for e in w.out if isinstance(e, do.Outvoted)] == [1]


def test_what_is_heard_after_the_next_plan_does_not_change_in_which_generation_that_was_decided() -> None:
    w = verified(0, 1, 2)
    w.hear(plan(2, (0, 1)))
    w.hear(plan(3, (0, 1, 2), prepared=True))
    w.agree({1: "bb", 2: "bb"})
    assert [e.generation for e in w.out if isinstance(e, do.Outvoted)] == [1]


def test_where_no_copy_is_outvoted_all_settle_anew_and_the_lowest_sees_to_what_is_shared() -> None:
    w = verified(0, 1)
    w.agree({1: "bb"})
    assert do.Invalidate(sound=1, first=True) in w.out and len(w.told(wire.SettleAgain)) == 1
    w = Worker(plan(1, (0, 1)), me=member(1).key, verify_every=2)
    w.to_agree(1, digest="x")
    w.agree({0: "y"})
    assert do.Invalidate(sound=0, first=False) in w.out
    assert w.told(wire.SettleAgain)[-1].reason.endswith("; all steps are tainted")


def test_one_below_that_is_outvoted_does_not_see_to_what_is_shared() -> None:
    w = Worker(plan(1, (0, 1, 2)), me=member(1).key)
    w.to_agree(1, digest="x")
    w.agree({0: "y", 2: "x"})
    assert do.Invalidate(sound=0, first=True) in w.out


def test_where_all_are_outvoted_each_sees_to_it() -> None:
    """Each of three deviates in another stage."""
    pools = plan(1, (0, 1, 2), (0, 1, 2), (0, 1, 2))
    w = Worker(pools)
    digests = {i: {k: "odd" if k == i else "even" for k in range(3)} for i in range(3)}
    w.to_agree(1, digest=digests[0])
    w.agree({1: digests[1], 2: digests[2]})
    assert do.Invalidate(sound=0, first=True) in w.out and isinstance(w.out[-1], do.Outvoted)


def test_a_job_that_began_with_a_checkpoint_trusts_that() -> None:
    w = verified(0, 1, begins_after=2)
    w.agree({1: "bb"})
    assert w.driver.machine.sound == 2 and w.driver.proven(8) == 7 and w.driver.proven(1) == 2


def done_again(digest: str, saved: int = 0) -> Worker:
    """Worker 0 of two in stage 0. States of step 2 were alike, "cc" here; then the pool of stage 1 was lost, all have
    gone back to step 1, and are in the agree of step 3 again. saved: the checkpoint that had counted before."""
    w = Worker(plan(1, (0, 2), (1,)), verify_every=2, saving=SavingRules(on=True))
    w.step(1)
    w.to_agree(2, digest="aa")
    w.agree({1: "b1", 2: "aa"})
    w.done(1002)
    w.to_agree(3, digest="cc")
    w.agree({1: "b2", 2: "cc"})
    w.done(1003)
    if saved:
        w.on(do.SaveEnded(step=saved, ok=True, reason=""))
    w.keeps(((0, 1), (1, 1), (0, 2)))
    w.ask(do.StepAsked(4))
    w.enter(plan(2, (0, 2), (1,)), w1=at(0, stages=(1,)))
    assert w.op.step == 1
    w.done(do.Copied(OF_5))
    w.step(2)
    assert w.driver.proven(2) == 1
    w.to_agree(3, digest)
    return w


@pytest.mark.parametrize("saved", [0, 2])
def test_states_that_differ_when_a_step_is_done_again_are_not_sound_as_they_were_alike_before(saved: int) -> None:
    """What was alike is gone with the lost pool, and the checkpoint of it, which is not to be had, is of that time."""
    w = done_again("dd", saved)
    w.agree({1: "b2", 2: "ee"})
    assert do.Invalidate(sound=1, first=True) in w.out
    assert w.told(wire.SettleAgain)[-1].sound == 1 and w.driver.machine.sound == 1


def test_states_that_come_to_what_they_were_when_a_step_is_done_again_are_sound() -> None:
    w = done_again("cc")
    w.agree({1: "b2", 2: "cc"})
    assert isinstance(w.op, do.Update) and w.driver.proven(2) == 2


def test_where_one_that_was_healed_differs_from_those_that_stayed_they_see_to_what_is_shared() -> None:
    w = behind()
    w.settle(w1=at(2, records=w.driver.machine.records, fresh=True))
    w.lanes()
    w.reduce("aa")
    w.agree({1: "bb"})
    (told,) = w.told(wire.SettleAgain)
    assert told.drift and do.Invalidate(sound=told.sound, first=True) in w.out


@pytest.mark.parametrize(("digests", "drift"), [({1: "bb", 2: "bb"}, True), ({1: "bb", 2: "aa"}, False)])
def test_one_that_was_healed_sees_to_what_is_shared_unless_it_differs_from_those_that_stayed(
    digests: dict[int, str], drift: bool
) -> None:
    w = Worker(plan(1, (0, 1, 2, 3)))
    w.ask(do.StepAsked(1))
    w.enter(plan(2, (0, 1, 2, 3)), **{f"w{i}": at(3, records=OF_5) for i in (1, 2, 3)})
    w.done(do.Copied(OF_5))
    assert w.driver.fresh and w.out[-1] == do.WentBack(3)
    w.to_agree(4, digest="aa")
    w.agree({**digests, 3: digests[2]})
    assert [told.drift for told in w.told(wire.SettleAgain)] == [drift]
    assert [e for e in w.out if isinstance(e, do.Invalidate)] == ([] if drift else [do.Invalidate(0, first=True)])


def test_a_plan_that_comes_with_records_that_differ_is_opened_but_not_settled_in() -> None:
    w = verified(0, 1, 2)
    w.hear(plan(2, (0, 1)))
    w.agree({1: "aa", 2: "bb"})
    assert isinstance(w.op, do.Open)
    told = w.told(wire.SettleAgain)[-1]
    assert (told.generation, told.decided_in) == (2, 1), (
        "who took the plan later says the same; twice would end the job"
    )
    w.done(do.Opened())
    assert w.op is None, "what it would state counts for nothing any more"
    w.hear(plan(3, (0, 1)))
    w.done(do.Opened())
    assert w.stated().sound == 1 and w.stated().position == Key(3, 0)


def test_a_switch_is_not_made_by_records_that_differ() -> None:
    w = verified(0, 1)
    w.hear(plan(2, (0, 1, 2), prepared=True))
    w.agree({1: "bb"})
    assert w.op is None and w.driver.machine.generation == 1


def test_a_member_without_a_seat_says_only_what_it_knows_of_the_state_that_it_did_not_copy() -> None:
    spare = plan(2, (1,))
    odd = Plan(2, "because", tuple(map(member, (0, 1))), spare.seats, spare.lanes)
    assert Seat(1, 0, "active", (0, 1, 2, 3)) in odd.seats
    w = behind()
    w.abort()
    w.hear(Plan(3, "because", odd.members, odd.seats, odd.lanes))
    w.settle(w1=at(3, records=OF_5))
    assert isinstance(w.op, do.Fetch) and w.op.sources == {}
    w.done(do.Copied())
    assert w.driver.machine.position == Key(3, 0)
    assert w.driver.machine.records == {}, "those of the step before would be handed to others as this one's"
