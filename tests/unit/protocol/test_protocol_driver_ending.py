"""The driver at the end: finish, leave, hold, and a job that is over."""

from __future__ import annotations

import pytest
from driver_harness import MS, Worker, at, gather_records, joiner, member_worker, plan

from everstep.base.extents import WHOLE
from everstep.base.plan import WorkerKey
from everstep.base.ports import Tag
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.records import GatherPayload, StageSection, encode
from everstep.protocol.following import StatesAlike
from everstep.protocol.step_types import Key, LaneDone, Record

COMPLETED = wire.JobEnded(state="completed", reason="done", exit_code=0)
WORDS = wire.WorkerFailed(
    worker_id=0, incarnation=0, step=1, reason="it raised", signature="x", fatal=False, generation=1, holds=True
)


def finishing() -> Worker:
    """Worker 0, whose application is through with step 1, and all have said so."""
    w = member_worker(0, 1)
    w.step(1)
    w.ask(do.EndAsked())
    w.exchange(gather_records(w.plan, ends=True))
    return w


def holding(until_ns: int = 1 << 60) -> Worker:
    """Worker 0, whose application raised in the middle of step 2."""
    w = member_worker(0, 1)
    w.step(1)
    w.ask(do.StepAsked(2))
    w.abort()
    w.ask(do.HoldAsked(words=WORDS, until_ns=until_ns))
    return w


# ---- finish


def finish(w: Worker, generation: int) -> do.Finish:
    """Its last operation, where it is the only one to hold anything."""
    end = {"step": 1, "save": None, "digests": {}, "position": w.driver.machine.position}
    return do.Finish(op=w.op.op, generation=generation, plan=w.plan, **end)


def test_those_who_do_not_lead_have_their_stages_ready_for_who_writes_the_result() -> None:
    w = Worker(plan(1, (0,), (1,)), me=WorkerKey(1, 0))
    w.step(1)
    w.ask(do.EndAsked())
    w.exchange(gather_records(w.plan, ends=True))
    (shelf,) = [effect for effect in w.out if isinstance(effect, do.Shelve)]
    assert (shelf.generation, shelf.position, shelf.live) == (1, Key(1, 1), {1: WHOLE})
    assert isinstance(w.op, do.Finish) and not w.op.sources
    w.abort()
    w.hear(plan(2, (1,), (1,)))
    assert do.Unshelve() in w.out, "another one may be the leader, and who is not there any more"


def test_the_result_is_held_against_what_all_have_said_of_every_stage() -> None:
    w = Worker(plan(1, (0,), (1,)))
    w.step(1)
    said = {k: StageSection(k, [], (0, 0), b"", [], [], digest) for k, digest in enumerate(("aa", "bb"))}
    w.ask(do.EndAsked(states=(said[0],), at=1))
    records = {k: Record(0, encode(GatherPayload(b"", 0, True, [said[k]]))) for k in w.plan.worker_ids}
    w.exchange(records)
    end = {"step": 1, "save": None, "digests": {0: "aa", 1: "bb"}, "position": Key(1, 1), "sources": {1: (1,)}}
    assert w.op == do.Finish(op=w.op.op, generation=1, plan=w.plan, **end)


def last(digest: str) -> StageSection:
    """What a worker says of its last state of an unsplit model."""
    return StageSection(0, [], (0, 0), b"", [], [], digest)


def all_end(*digests: str, me: int = 0) -> Worker:
    """One of several workers, which say after step 1 that their loops are over, and what their states are then."""
    w = Worker(plan(1, range(len(digests))), me=WorkerKey(me, 0))
    w.step(1)
    w.ask(do.EndAsked(states=(last(digests[0]),), at=1))
    said = (GatherPayload(b"", 0, True, [last(digest)]) for digest in digests)
    w.exchange({worker: Record(0, encode(one)) for worker, one in enumerate(said)})
    return w


def test_last_states_that_are_alike_are_told_once_and_count() -> None:
    w = all_end("aa", "aa")
    assert isinstance(w.op, do.Finish) and w.driver.proven(1) == 1
    (told,) = w.told(StatesAlike)
    assert (told.step, told.digests) == (1, {0: "aa"})
    w = all_end("aa", "aa", me=1)
    assert w.driver.proven(1) == 1 and w.told(StatesAlike) == [], "the first member says it"


def test_last_states_that_differ_are_no_result() -> None:
    w = all_end("aa", "aa", "bb")
    assert w.op is None and w.told(StatesAlike) == []
    (told,) = w.told(wire.SettleAgain)
    assert told.tainted == 2 and not told.drift


def ends_behind(mine: StageSection, *theirs: StageSection, at_step: int = 1) -> Worker:
    """Worker 0, which is given the last gather by worker 1, and ends with this state."""
    w = member_worker(0, 1)
    w.step(1)
    others = {1: Record(0, encode(GatherPayload(b"", 0, True, list(theirs))))}
    w.ask(do.EndAsked(states=(mine,), at=at_step))
    w.enter(plan(2, (0, 1)), w1=at(1, 1, records=others))
    return w


def test_who_was_given_the_last_gather_compares_its_state_with_those_of_that() -> None:
    w = ends_behind(last("aa"), last("aa"))
    assert isinstance(w.op, do.Finish) and [told.digests for told in w.told(StatesAlike)] == [{0: "aa"}]
    w = ends_behind(last("bb"), last("aa"))
    assert w.op is None and len(w.told(wire.SettleAgain)) == 1 and w.told(StatesAlike) == []


def test_where_nothing_is_said_of_the_last_state_or_of_another_step_nothing_is_compared() -> None:
    for w in (ends_behind(last("aa")), ends_behind(last("bb"), last("aa"), at_step=0)):
        assert isinstance(w.op, do.Finish) and w.told(StatesAlike) == w.told(wire.SettleAgain) == []


def test_the_end_is_a_gather_and_then_finish_and_then_the_end_of_the_job() -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.ask(do.EndAsked())
    assert w.op.tag == Tag("decide", 1, 1) and w.driver._parts.application.asked == 2
    w.exchange(gather_records(w.plan, ends=True))
    assert w.out[-1] == finish(w, 1)
    w.done(True)
    done = wire.WorkerDone(worker_id=0, incarnation=0, generation=1, step=1, final_written=True)
    assert w.out == [do.Tell(done)] and done in w.driver.situation.messages
    w.on(do.TimePassed())
    assert w.out == [], "once per generation"
    w.hear(COMPLETED)
    assert w.out == [do.JobOver()]


def test_who_is_not_the_main_has_not_written_it() -> None:
    w = finishing()
    w.done(False)
    assert w.told(wire.WorkerDone)[-1].final_written is False


def test_a_plan_in_the_middle_of_the_end_finishes_again() -> None:
    w = finishing()
    w.hear(plan(2, (0, 1)))
    w.abort()
    assert w.told(wire.WorkerDone) == []
    w.settle()
    assert w.op == finish(w, 2)
    w.done(True)
    w.hear(plan(3, (0,)))
    w.settle()
    assert isinstance(w.op, do.Finish) and w.op.generation == 3
    w.done(True)
    assert [m.generation for m in w.told(wire.WorkerDone)] == [2, 3]


def test_nothing_is_finished_while_the_others_are_waited_for() -> None:
    w = finishing()
    w.hear(plan(2, (0, 1)))
    w.abort()
    w.abort(1)
    w.on(do.TimePassed())
    assert w.op is None and w.count(do.Finish) == 1


def test_the_end_is_asked_again_after_going_back() -> None:
    w = Worker(plan(1, (0,), (1,)))
    w.step(1)
    w.ask(do.EndAsked())
    w.exchange(gather_records(w.plan, ends=True))
    w.done(True)
    w.hear(plan(2, (0,), (1,)))
    w.settle(w1=at(0, stages=(1,)))
    assert isinstance(w.op, do.Restore)
    w.done(do.Copied())
    assert w.out[-1] == do.WentBack(0) and w.driver._parts.application.asked == 0
    w.step(1)
    w.ask(do.EndAsked())
    w.exchange(gather_records(w.plan, ends=True))
    assert isinstance(w.op, do.Finish) and w.op.generation == 2


def test_an_end_that_is_asked_twice_in_a_generation_is_finished_twice() -> None:
    w = finishing()
    w.abort()
    w.ask(do.HoldAsked(words=WORDS, until_ns=0))
    assert w.out[-1] == do.Released()
    w.ask(do.EndAsked())
    w.exchange(gather_records(w.plan, ends=True))
    assert isinstance(w.op, do.Finish)


def test_the_job_may_end_while_the_end_is_being_gathered() -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.ask(do.EndAsked())
    w.hear(COMPLETED)
    w.abort()
    assert w.out == [do.JobOver()]
    assert w.driver.ended == COMPLETED


@pytest.mark.parametrize("ask", [do.EndAsked(), do.GatherAsked(b"")])
def test_a_gather_that_was_left_waits_for_the_next_plan(ask: do.Ask) -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.ask(ask)
    w.abort(1)
    assert [type(e) for e in w.out] == [do.Tell] and w.op is None


def test_nothing_is_finished_that_was_not_asked_to_end() -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.gather()
    w.ask(do.StepAsked(2))
    w.abort(1)
    assert [type(e) for e in w.out] == [do.Tell] and w.op is None


# ---- the loop is left


def left_told(w: Worker) -> list[int]:
    return [said.step for said in w.told(wire.LoopLeft)]


def test_a_loop_that_is_left_says_so_and_ends_as_the_last_step_does() -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.ask(do.EndAsked(left=True))
    assert left_told(w) == [1] and w.op.tag == Tag("decide", 1, 1)
    w.exchange(gather_records(w.plan, ends=True))
    assert isinstance(w.op, do.Finish) and w.op.step == 1


def test_a_step_that_was_begun_is_dropped_with_its_lanes() -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.ask(do.StepAsked(2))
    w.on(LaneDone(2, 0, 0))
    w.abort()
    w.ask(do.EndAsked(left=True))
    assert do.DropLanes() in w.out and w.op.tag == Tag("decide", 1, 1)
    assert w.driver.machine.holding().lacking == (0, 2), "nothing of the step is held"
    w.exchange(gather_records(w.plan, ends=True))
    assert isinstance(w.op, do.Finish) and w.op.step == 1


@pytest.mark.parametrize("ask", [do.EndAsked(), do.GatherAsked(b"")])
def test_where_loops_disagree_nobody_finishes_and_nobody_gets_an_answer(ask: do.Ask) -> None:
    """Whose loop is over has said so; the others must not take that for an answer to what they gather."""
    w = member_worker(0, 1)
    w.step(1)
    w.ask(ask)
    both = {**gather_records(w.plan), 1: gather_records(w.plan, ends=True)[1]}
    mine = isinstance(ask, do.EndAsked)
    w.exchange(both if not mine else {**gather_records(w.plan, ends=True), 1: gather_records(w.plan)[1]})
    assert w.op is None and not [e for e in w.out if isinstance(e, do.Answer)]
    assert left_told(w) == ([1] if mine else [])
    w.hear(plan(2, (0, 1)))
    w.settle(w1=at(1, 1))
    (entered,) = [said for said in w.told(wire.GenerationEntered) if said.generation == 2]
    assert entered.loop == ("left" if mine else "on")


@pytest.mark.parametrize(("ask", "loop"), [(do.StepAsked(2), "on"), (do.EndAsked(left=True), "left")])
def test_in_a_new_generation_it_is_said_what_the_loop_does(ask: do.Ask, loop: str) -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.ask(ask)
    w.hear(plan(2, (0, 1)))
    w.abort()
    w.settle(w1=at(1))
    assert w.told(wire.GenerationEntered)[-1].loop == loop


def test_a_step_that_is_still_being_done_says_nothing_of_the_loop() -> None:
    w = member_worker(0, 1)
    w.ask(do.StepAsked(1))
    w.hear(plan(2, (0, 1)))
    w.abort()
    w.settle()
    assert w.told(wire.GenerationEntered)[-1].loop == "on", "it is beyond step 0"
    assert Worker(plan(1, (0,), (1,))).told(wire.GenerationEntered)[-1].loop == ""


# ---- leave


@pytest.mark.parametrize("drained", [True, False])
def test_a_worker_that_is_dismissed_leaves(drained: bool) -> None:
    w = member_worker(0, 1)
    w.ask(do.StepAsked(1))
    w.hear(wire.Dismissed(reason="scaled down", drained=drained))
    assert w.out == []
    w.abort()
    assert w.out == [do.Exit("scaled down", drained=drained)]


@pytest.mark.parametrize("state", ["failed", "interrupted"])
def test_a_worker_of_a_failed_job_leaves(state: str) -> None:
    w = member_worker(0, 1)
    w.ask(do.GatherAsked(b""))
    w.hear(wire.JobEnded(state=state, reason="no quorum", exit_code=1))
    w.abort()
    assert w.out == [do.Exit("no quorum", failed=True)]


def test_a_gather_of_a_job_that_is_over_has_nothing() -> None:
    w = member_worker(0, 1)
    w.ask(do.GatherAsked(b""))
    w.hear(COMPLETED)
    w.abort()
    assert w.out == [do.GatherDone({})]
    w.ask(do.GatherAsked(b""))
    assert w.out == [do.GatherDone({})]
    w.ask(do.EndAsked())
    assert w.out == [do.JobOver()]
    w.ask(do.StepAsked(1))
    assert w.out == [do.Exit("the job is over, and this worker was not needed", drained=True)]


def test_a_gather_that_was_decided_is_answered_though_the_job_is_over() -> None:
    w = member_worker(0, 1)
    w.ask(do.GatherAsked(b""))
    w.hear(COMPLETED)
    w.exchange(gather_records(w.plan, ends=True))
    assert isinstance(w.out[-1], do.GatherDone) and set(w.out[-1].records) == {0, 1}


@pytest.mark.parametrize("ask", [do.StepAsked(1), do.JoinAsked()])
def test_one_that_waits_for_a_step_is_not_needed_once_the_job_is_over(ask: do.Ask) -> None:
    w = Worker() if isinstance(ask, do.JoinAsked) else member_worker(0, 1)
    w.ask(ask)
    w.hear(COMPLETED)
    if w.op is not None:
        w.abort()
    assert w.out == [do.Exit("the job is over, and this worker was not needed", drained=True)]


def test_a_step_that_was_applied_is_answered_though_the_job_is_over() -> None:
    w = member_worker(0, 1)
    w.to_agree(1)
    w.agree()
    w.hear(COMPLETED)
    w.done(1)
    assert w.out[-1] == do.Stepped(1)


# ---- hold


def test_who_has_raised_says_so_drops_its_lanes_and_stays() -> None:
    w = holding()
    assert w.out == [do.DropLanes(), do.Tell(WORDS)] and WORDS in w.driver.situation.messages
    w.on(do.TimePassed())
    assert w.out == []


def test_it_computes_nothing_more_but_settles_and_gives_its_state() -> None:
    w = holding()
    w.hear(plan(2, (0, 1)))
    w.settle(w1=at(0))
    assert w.op is None and w.count(do.Shelve) == 1 and w.out[-1] == do.Tell(w.told()[-1])
    assert isinstance(w.told()[-1], wire.GenerationEntered)
    w.hear(plan(3, (0, 1), save="the last words"))
    w.settle()
    assert isinstance(w.op, do.Linger), "this job takes no checkpoints"
    w.done()
    assert w.op is None and w.count(do.Compute) == 2, "one of step 1, and the one in which it raised"


def test_it_is_released_when_its_time_is_over() -> None:
    w = holding(until_ns=100 * MS)
    w.now = 98 * MS
    assert w.on(do.TimePassed()) == []
    assert w.on(do.TimePassed()) == [do.Released()]


def test_it_is_released_when_the_job_is_over() -> None:
    w = holding()
    assert w.hear(COMPLETED) == [do.Released()]


def test_it_leaves_when_it_is_dismissed() -> None:
    w = holding()
    assert w.hear(wire.Dismissed(reason="it failed", drained=False)) == [do.Exit("it failed")]


def test_one_whose_state_nobody_could_want_does_not_stay() -> None:
    w = member_worker(0, 1)
    w.ask(do.StepAsked(1))
    w.abort()
    assert w.ask(do.HoldAsked(words=WORDS, until_ns=1 << 60)) == [do.Released()], "nothing was trained"
    w = joiner()
    assert w.ask(do.HoldAsked(words=WORDS, until_ns=1 << 60)) == [do.Released()]
    w = member_worker(0, 1)
    w.step(1)
    w.ask(do.StepAsked(2))
    w.hear(plan(2, (0, 1)))
    w.abort()
    w.abort(1)
    assert w.ask(do.HoldAsked(words=WORDS, until_ns=1 << 60)) == [do.Released()], "it is not settled"
    assert w.told(wire.WorkerFailed) == []


def test_who_is_held_goes_back_with_the_others_and_is_not_told() -> None:
    w = Worker(plan(1, (0,), (1,)))
    w.step(1)
    w.ask(do.StepAsked(2))
    w.abort()
    w.ask(do.HoldAsked(words=WORDS, until_ns=1 << 60))
    w.hear(plan(2, (0,), (1,)))
    w.settle(w1=at(0, stages=(1,)))
    w.done(do.Copied())
    assert w.driver.machine.position == Key(0, 0) and w.count(do.WentBack) == 0
    assert isinstance(w.out[-1], do.Tell)
