"""The driver in an ordinary step and between steps: compute, reduce, agree, update; gathers; discipline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from driver_harness import (
    LANES,
    MS,
    Worker,
    at,
    gather_records,
    joiner,
    member,
    member_worker,
    payload,
    plan,
    records_of,
)

from everstep.base.extents import WHOLE
from everstep.base.plan import WorkerKey
from everstep.base.ports import Tag
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.policy import COMPARE, Due
from everstep.protocol.driver.records import (
    AgreePayload,
    GatherPayload,
    committed_unix_ns,
    decode_holding,
    encode,
    encode_holding,
)
from everstep.protocol.step_types import Discard, Holding, Key, LaneDone, Record, Release

# ---- a step


def test_a_step_is_compute_reduce_agree_update_and_then_the_answer() -> None:
    w = member_worker(0, 1)
    given = w.plan
    w.ask(do.StepAsked(1))
    assert w.out == [do.Compute(op=3, generation=1, plan=given, step=1, lanes=(0, 2))]
    w.on(LaneDone(1, 0, 0))
    w.on(LaneDone(1, 0, 2))
    assert w.out == [], "what follows waits for the operation's end"
    w.done()
    assert w.out == [do.Reduce(op=4, generation=1, plan=given, step=1)]
    w.reduce()
    assert w.out == [do.Exchange(op=5, generation=1, tag=Tag("decide", 1, 0), payload=w.op.payload)]
    assert w.sent() == Record(0, encode(payload(given, 0).stamped(0, 0, Due())))
    w.agree()
    assert [type(e) for e in w.out] == [do.Decided, do.Update]
    assert w.out[0] == do.Decided(key=Key(1, 0), generation=1, first=True)
    assert (w.op.step, w.op.records, w.op.stages) == (1, records_of(given), (0,))
    assert (w.op.outcome.step, w.op.outcome.loss, len(w.op.outcome.lanes)) == (1, 1.0, LANES)
    w.done(77)
    assert w.out == [Discard(1), do.Stepped(1)]
    assert w.driver.machine.position == Key(1, 0) and w.driver.gathered == {Key(1, 0): records_of(given)}


def test_the_next_decision_says_when_the_last_step_was_committed_and_releases_it() -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.to_agree(2)
    assert committed_unix_ns({0: w.sent()}, is_agree=True) == 1001
    w.agree()
    assert w.out[:2] == [Release(1), do.Decided(key=Key(2, 0), generation=1, first=False)], (
        "only the first of a generation is the first"
    )


def test_a_standby_computes_nothing() -> None:
    w = Worker(plan(1, (0, 1), idle=(0,)))
    w.ask(do.StepAsked(1))
    assert isinstance(w.op, do.Reduce)


def test_a_split_job_computes_what_some_member_lacks_and_all_if_nobody_said() -> None:
    w = Worker(plan(1, (0,), (1,)))
    w.to_reduce(1)
    assert w.last(do.Compute).lanes == (0, 1, 2, 3)
    w.reduce()
    w.agree()
    w.done(1)
    w.ask(do.StepAsked(2))
    assert w.op.lanes == (0, 1, 2, 3), "beyond the first step of a generation"
    w.lanes()
    w.enter(plan(2, (0,), (1,)), w1=at(1, stages=(1,), records=w.driver.machine.records, lacking=(3, 1)))
    assert isinstance(w.op, do.Compute) and w.op.lanes == (1, 3)


def test_a_split_job_runs_all_of_its_lanes_where_a_worker_has_some_of_them() -> None:
    w = Worker(plan(1, (0, 1), (0, 1)))
    w.ask(do.StepAsked(1))
    assert w.op.lanes == (0, 1, 2, 3)


def test_what_is_lacking_of_lanes_that_the_plan_tears_apart_is_stated_and_done_again() -> None:
    """Results that are held only within a sum: with Open it turns out which of them are gone."""
    w = member_worker(0, 1)
    w.to_reduce(1)
    w.hear(plan(2, (0, 1)))
    w.abort()
    w.done(do.Opened(((0, 2),)))
    assert w.stated().lacking == (2,) and w.stated().gradient_step == 0
    w.done({0: w.op.payload, 1: w.op.payload})
    assert isinstance(w.op, do.Compute) and w.op.lanes == (2,)


def test_likewise_in_a_split_job() -> None:
    w = Worker(plan(1, (0,), (1,)))
    w.to_reduce(1)
    w.hear(plan(2, (0,), (1,)))
    w.abort()
    w.done(do.Opened(((0, 1), (0, 3))))
    assert w.stated().lacking == (1, 3)


# ---- gathers


def test_a_gather_is_one_exchange() -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.ask(do.GatherAsked(b"mine"))
    assert w.op.tag == Tag("decide", 1, 1)
    assert w.sent() == Record(0, encode(GatherPayload(b"mine", 1001)))
    found = gather_records(w.plan, w1=b"theirs") | {0: w.sent()}
    w.exchange(found)
    assert w.out == [Release(1), do.Decided(key=Key(1, 1), generation=1, first=False), do.GatherDone(found)]
    assert set(w.driver.gathered) == {Key(1, 0), Key(1, 1)}
    w.gather()
    assert set(w.driver.gathered) == {Key(1, 0), Key(1, 1), Key(1, 2)}
    w.step(2)
    assert set(w.driver.gathered) == {Key(2, 0)}
    w.ask(do.GatherAsked(b""))
    assert w.op.tag == Tag("decide", 2, 1), "numbered by step"
    w.exchange(gather_records(w.plan))
    assert isinstance(w.out[-1], do.GatherDone)


def test_gathers_of_another_step_are_forgotten_with_the_first_of_this_one() -> None:
    w = member_worker(0, 1)
    w.gather()
    w.driver.gathered[Key(7, 1)] = {}
    w.gather()
    assert set(w.driver.gathered) == {Key(0, 1), Key(0, 2)}


def test_a_gather_is_the_first_decision_of_a_generation_too() -> None:
    w = member_worker(0, 1)
    w.gather()
    assert w.last(do.Decided) == do.Decided(key=Key(0, 1), generation=1, first=True)
    w.gather()
    assert w.last(do.Decided) == do.Decided(key=Key(0, 2), generation=1, first=False)


def test_a_gather_that_came_with_the_copied_state_is_answered_at_once() -> None:
    given = plan(1, (0, 1))
    known = {Key(5, 0): records_of(given), Key(5, 1): gather_records(given, w1=b"x")}
    w = joiner()
    w.hear(plan(2, (0, 1)))
    w.settle(w1=at(5, 1))
    assert isinstance(w.op, do.Fetch)
    w.done(do.Copied(records=known[Key(5, 1)], gathers=known))
    assert do.Arrived(5) in w.out
    w.ask(do.GatherAsked(b""))
    assert w.out == [do.GatherDone(known[Key(5, 1)])]
    w.ask(do.GatherAsked(b""))
    assert w.op.tag == Tag("decide", 5, 2)


def test_a_gather_is_sent_again_in_the_next_generation() -> None:
    w = member_worker(0, 1, 2)
    w.ask(do.GatherAsked(b"mine"))
    w.enter(plan(2, (0, 1)))
    assert w.op.tag == Tag("decide", 0, 1) and w.op.generation == 2
    w.exchange(gather_records(w.plan))
    assert isinstance(w.out[-1], do.GatherDone)


@pytest.mark.parametrize("ask", [do.GatherAsked(b""), do.EndAsked()])
def test_one_whose_gather_the_others_have_decided_without_it_starts_anew(ask: do.Ask) -> None:
    w = member_worker(0, 1)
    w.ask(ask)
    w.enter(plan(2, (0, 1)), w1=at(1))
    w.done(do.Copied(records={1: Record(0, b"")}, gathers={Key(1, 0): {1: Record(0, b"")}}))
    reason = "the others have decided Key(step=0, seq=1) without this worker; it has to restart"
    assert w.out[-1] == do.Exit(reason)


# ---- evaluation


def test_an_evaluation_is_one_operation_of_the_generation() -> None:
    w = member_worker(0, 1)
    w.gather()
    w.ask(do.EvaluateAsked())
    assert w.out == [do.Evaluate(op=w.op.op, generation=1, plan=w.plan, number=1)]
    w.done()
    assert w.out == [do.Evaluated()]


def test_an_evaluation_that_is_left_is_answered_too() -> None:
    w = member_worker(0, 1)
    w.ask(do.EvaluateAsked())
    w.abort(1, reason="gone")
    assert [type(e) for e in w.out] == [do.Tell, do.Evaluated]


def test_an_evaluation_waits_for_the_settle_and_does_not_begin_once_the_job_is_over() -> None:
    w = member_worker(0, 1)
    w.hear(plan(2, (0, 1)))
    w.ask(do.EvaluateAsked())
    assert isinstance(w.op, do.Open)
    w.settle()
    assert isinstance(w.op, do.Evaluate) and w.op.generation == 2
    w.done()
    w.hear(wire.JobEnded(state="completed", reason="", exit_code=0))
    w.ask(do.EvaluateAsked())
    assert w.out == [do.Evaluated()]


def test_an_evaluation_does_not_begin_while_the_others_are_waited_for() -> None:
    w = member_worker(0, 1)
    w.hear(plan(2, (0, 1)))
    w.ask(do.EvaluateAsked())
    w.abort(1)
    w.on(do.TimePassed())
    assert w.op is None and w.count(do.Evaluate) == 0


# ---- how long it took


def test_phases_of_a_recovery_are_told_with_the_generation() -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.ask(do.StepAsked(2))
    w.hear(plan(2, (0, 1)))
    w.abort()
    w.now += 2 * MS
    w.done(do.Opened())
    w.now += 4 * MS
    held = at(2, records=records_of(w.plan))
    mine = w.op.payload
    w.done({0: mine, 1: encode_holding(held)})
    assert isinstance(w.op, do.Fetch)
    w.now += 6 * MS
    w.done(do.Copied(held.records))
    assert w.told(wire.GenerationEntered)[-1].phases_ms == {
        "unblock": 2.0,
        "regroup": 3.0,
        "settle": 5.0,
        "heal": 7.0,
    }
    w.hear(plan(3, (0, 1)))
    w.ask(do.StepAsked(3))
    w.settle()
    assert w.told(wire.GenerationEntered)[-1].phases_ms == {"unblock": 2.0, "regroup": 1.0, "settle": 1.0}


def test_a_plan_that_is_not_taken_frees_from_nothing() -> None:
    """A stale one, and then a switch that nobody had to be freed for."""
    w = Worker(plan(5, (0, 1)))
    w.hear(plan(4, (0, 1)))
    w.hear(plan(6, (0, 1), prepared=True))
    w.step(1, prepared=6)
    w.settle()
    assert set(w.told(wire.GenerationEntered)[-1].phases_ms) == {"regroup", "settle"}


# ---- others may look


def test_what_others_may_look_at() -> None:
    w = member_worker(0, 1, begins_after=3)
    assert w.driver.config.begins_after == 3
    assert w.driver.machine.plan == w.plan and w.driver._parts.application.asked == 0
    w.ask(do.StepAsked(1))
    assert w.driver._parts.application.asked == 1
    assert joiner().driver.machine.plan is None


def test_what_somebody_stated_to_have_in_memory() -> None:
    w = member_worker(0, 1)
    w.step(1)
    w.ask(do.StepAsked(2))
    w.enter(plan(2, (0, 1)), w1=at(1, snapshots={(0, 5): WHOLE}))
    assert [n for n in range(8) if w.driver.in_memory(n)] == [1, 5]
    assert not joiner().driver.in_memory(0), "nobody has said anything yet"


def test_holdings_go_through_the_wire() -> None:
    w = member_worker(0, 1)
    w.hear(plan(2, (0, 1)))
    w.ask(do.StepAsked(1))
    w.done(do.Opened())
    assert decode_holding(w.op.payload) == Holding(Key(0, 0), {}, 0, lacking=(0, 2), heard=0)
    w.done({i: encode(Record(0, b"")) if i > 5 else w.op.payload for i in (0, 1)})
    assert isinstance(w.op, do.Compute)
    stamped = AgreePayload([]).stamped(4, 3, Due())
    assert (stamped.committed_unix_ns, stamped.kept) == (4, 3)


def test_the_worker_says_its_own_name() -> None:
    me = WorkerKey(3, 2)
    given = plan(1, (3,))
    life = replace(given, members=(member(3, 2),))
    w = Worker(life, me=me)
    entered = w.told(wire.GenerationEntered)[-1]
    assert (entered.worker_id, entered.incarnation, entered.generation, entered.step) == (3, 2, 1, 1)


def test_the_records_say_whether_the_next_step_compares_and_which_checkpoint_counts() -> None:
    w = Worker(plan(1, (0, 1)), me=WorkerKey(1, 0))
    for number, compares, said in (
        (1, False, {"save": ((COMPARE,), "states may differ")}),
        (2, True, {"saved": 1}),
        (3, False, {}),
    ):
        w.to_reduce(number)
        assert w.op.compare == compares
        w.reduce()
        w.exchange({0: Record(0, encode(payload(w.plan, 0, **said)))})
        w.done(number)
    assert w.driver.proven(3) == 1
