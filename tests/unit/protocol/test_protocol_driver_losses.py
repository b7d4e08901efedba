"""Blocks that a worker has lost: what it says, what it leaves, and how it is whole again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from driver_harness import Worker, at, gather_records, joiner, member_worker, plan, records_of, ticket

from everstep.base.cause import Cause
from everstep.base.errors import InvariantViolation
from everstep.base.extents import WHOLE, BlockRun, Extents
from everstep.base.plan import Plan
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.records import decode_holding, encode_holding
from everstep.protocol.step_phases import Phase
from everstep.protocol.step_types import BlocksLost, Discard, Holding, Key, Pieces

OF = (("model", 2), ("exp_avg", 2))
MODEL = Extents.part(OF, [BlockRun("model", 0, 2)])
OPTIMIZER = WHOLE - MODEL
ONE = Extents.part(OF, [BlockRun("exp_avg", 1, 2)])


def peer(w: Worker, **more) -> Holding:
    """What the other member states: it is where this worker is."""
    machine = w.driver.machine
    return at(machine.step, machine.position.seq, records=machine.records, **more)


def regroup(w: Worker, given: Plan, **others: Holding) -> None:
    """A plan finds the worker waiting for it."""
    w.hear(given)
    w.settle(**others)


def test_who_has_lost_a_block_says_so_and_goes_no_further() -> None:
    w = member_worker()
    w.step(1)
    w.on(BlocksLost(0, ONE))
    (told,) = w.told(wire.SettleAgain)
    assert (told.generation, told.cause) == (1, Cause.CORRUPT) and "exp_avg 1-1" in told.reason
    assert w.driver.machine.phase is Phase.LACKING and not w.driver.machine.settled
    assert w.ask(do.StepAsked(2)) == [], "nothing is computed from what is there instead"
    w.hear(plan(2, (0, 1)))
    assert isinstance(w.op, do.Open)
    w.done(do.Opened())
    assert w.stated().stages == {0: WHOLE - ONE}


def test_the_rest_of_a_stage_is_fetched_and_the_step_goes_on() -> None:
    w = member_worker()
    w.step(1)
    w.on(BlocksLost(0, ONE))
    w.ask(do.StepAsked(2))
    regroup(w, plan(2, (0, 1)), w1=peer(w))
    records = w.driver.machine.records
    assert w.op == do.Fetch(
        op=w.op.op, generation=2, plan=w.plan, position=Key(1, 0), sources={0: (1,)}, pieces={0: Pieces(ONE)}
    )
    w.done(do.Copied(records=records, gathers={}))
    assert w.driver.machine.held == {0: WHOLE}
    assert Discard(2) in w.out and do.CutFeeds() not in w.out, "its lanes run again, nobody's feed breaks"
    assert isinstance(w.op, do.Compute) and w.op.step == 2
    w.lanes()
    w.reduce()
    w.agree()
    assert w.done(7)[-1] == do.Stepped(2)


def test_a_loss_while_the_step_is_decided_leaves_it_to_the_others() -> None:
    """They take the decision; this worker copies what they made of it."""
    w = member_worker()
    w.step(1)
    w.to_agree(2)
    w.on(BlocksLost(0, ONE))
    w.agree()
    assert w.count(do.Update) == 1 and w.driver.machine.position == Key(1, 0)
    w.hear(plan(2, (0, 1)))
    w.done(do.Opened())
    assert w.stated().gradient_step == 0, "a part cannot take it"
    ahead = at(2)
    w.done({0: w.op.payload, 1: encode_holding(ahead)})
    assert isinstance(w.op, do.Fetch) and (w.op.position, w.op.pieces) == (Key(2, 0), {})
    assert w.done(do.Copied(records=ahead.records, gathers={Key(2, 0): ahead.records}))[-1] == do.Stepped(2)


def test_other_stages_take_the_step() -> None:
    w = Worker(plan(1, (0,), (0, 1)))
    w.step(1)
    w.to_agree(2)
    w.on(BlocksLost(1, ONE))
    w.abort()
    regroup(w, plan(2, (0,), (0, 1)), w1=at(2, stages=(1,), records=records_of(w.plan)))
    assert isinstance(w.op, do.Update) and w.op.stages == (0,)
    w.done(7)
    assert isinstance(w.op, do.Fetch) and (w.op.sources, w.op.pieces) == ({1: (1,)}, {})


def test_members_with_half_of_the_planes_each_serve_each_other() -> None:
    """What a member has not of a stage, the others give, and it gives them what it has."""
    w = member_worker()
    w.step(1)
    w.on(BlocksLost(0, OPTIMIZER))
    w.ask(do.StepAsked(2))
    regroup(w, plan(2, (0, 1)), w1=replace(peer(w, stages=()), stages={0: OPTIMIZER}))
    shelf = w.last(do.Shelve)
    assert shelf.live == {0: MODEL}
    assert w.op.sources == {0: (1,)} and w.op.pieces == {0: Pieces(OPTIMIZER, {1: OPTIMIZER})}
    w.done(do.Copied(records=w.driver.machine.records, gathers={}))
    assert w.driver.machine.stages == (0,) and w.last(do.EnteredPlan).plan.generation == 2


def test_snapshots_in_part_are_stated_once_their_step_has_been_released() -> None:
    w = member_worker()
    w.step(1)
    w.knows(1)
    w.on(do.InMemory({(0, 1): MODEL}))
    w.ask(do.StepAsked(2))
    w.hear(plan(2, (0, 1)))
    w.abort()
    w.done(do.Opened())
    assert w.stated().snapshots == {}
    w.done(dict.fromkeys((0, 1), w.op.payload))
    w.lanes()
    w.reduce()
    w.agree()
    w.done(7)
    w.ask(do.StepAsked(3))
    w.hear(plan(3, (0, 1)))
    w.abort()
    w.done(do.Opened())
    assert w.stated().snapshots == {(0, 1): MODEL}
    w.done(dict.fromkeys((0, 1), w.op.payload))
    assert w.driver.in_memory(1), "for all alike, whoever has it"


def test_going_back_to_parts_in_memory() -> None:
    w = member_worker()
    for number in (1, 2, 3):
        w.step(number)
    w.knows(2)
    w.on(do.InMemory({(0, 2): MODEL}))
    w.on(BlocksLost(0, WHOLE))
    w.ask(do.StepAsked(4))
    regroup(w, plan(2, (0, 1)), w1=replace(at(0), stages={}, snapshots={(0, 2): OPTIMIZER}))
    assert isinstance(w.op, do.Restore) and w.op.step == 2
    assert w.op.sources == {0: (1,)} and w.op.pieces == {0: Pieces(OPTIMIZER, {1: OPTIMIZER})}
    shelf = w.last(do.Shelve)
    assert shelf.live == {}, "what is kept is in the keeper's hands"


def test_blocks_that_are_not_to_be_had_make_all_settle_anew() -> None:
    w = member_worker()
    w.step(1)
    w.on(BlocksLost(0, ONE))
    w.ask(do.StepAsked(2))
    regroup(w, plan(2, (0, 1)), w1=peer(w))
    w.taint("block 3 came damaged")
    assert [m.generation for m in w.told(wire.SettleAgain)] == [1, 2] and w.told(wire.PeerFault) == []
    regroup(w, plan(3, (0, 1)), w1=peer(w))
    assert w.op.pieces == {0: Pieces(ONE)}, "it has still the same part"


def test_a_joiner_that_loses_blocks_begins_anew() -> None:
    w = joiner()
    w.hear(ticket(5, plan(1, (1,))))
    w.done((Key(3, 0),))
    assert isinstance(w.op, do.Adopt)
    with pytest.raises(InvariantViolation):
        w.on(BlocksLost(0, ONE))
    w.done(do.Copied(records={}, gathers={}))
    w.on(BlocksLost(0, ONE))
    assert w.told(wire.HealFailed)[0].cause is Cause.CORRUPT and w.told(wire.SettleAgain) == []


def test_a_loss_in_the_middle_of_computing_is_a_mistake() -> None:
    w = member_worker()
    w.ask(do.StepAsked(1))
    assert isinstance(w.op, do.Compute) and not w.driver.still
    with pytest.raises(InvariantViolation):
        w.on(BlocksLost(0, ONE))


def test_the_coordinator_hears_of_a_switch_before_the_loss() -> None:
    """It would take the complaint for one of a generation that it does not know yet."""
    w = member_worker()
    w.hear(replace(plan(2, (0, 1)), prepared=True))
    w.step(1, prepared=2)
    assert isinstance(w.op, do.Open)
    w.on(BlocksLost(0, ONE))
    told = [m for m in w.told() if isinstance(m, wire.Progress | wire.SettleAgain)]
    assert [type(m) for m in told] == [wire.Progress, wire.SettleAgain] and {m.generation for m in told} == {2}


def test_it_hears_of_a_switch_before_a_copy_of_the_next_plan_is_refused() -> None:
    w = Worker(plan(1, (0,), (1,)))
    w.hear(replace(plan(2, (0,), (0, 1)), prepared=True))
    w.step(1, prepared=2)
    w.settle(w1=at(1, stages=(1,), records=w.driver.machine.records))
    assert isinstance(w.op, do.Fetch) and w.op.sources == {1: (1,)}
    w.taint("the copy is not what it should be")
    told = [m for m in w.told() if isinstance(m, wire.Progress | wire.SettleAgain)]
    assert [type(m) for m in told[-2:]] == [wire.Progress, wire.SettleAgain]
    assert {m.generation for m in told[-2:]} == {2}


def test_the_initial_state_in_part() -> None:
    """At step 0 all stages can be built, but what has been is not whole."""
    w = joiner(digest="same")
    w.on(BlocksLost(0, ONE))
    regroup(w, plan(1, (0, 1)), w1=Holding(Key(0, 0), {}, 0, "same"))
    assert w.op == do.Fetch(
        op=w.op.op, generation=1, plan=w.plan, position=Key(0, 0), sources={0: (1,)}, pieces={0: Pieces(ONE)}
    )
    lost = joiner(digest="same")
    lost.on(BlocksLost(0, WHOLE))
    regroup(lost, plan(1, (0, 1)), w1=Holding(Key(0, 0), {}, 0, "same"))
    assert lost.op.sources == {0: (1,)} and lost.op.pieces == {}


def test_an_answer_that_was_taken_over_outlives_a_repair() -> None:
    """A gather that the others have decided answers the application, though blocks are copied before it asks for it."""
    w = joiner()
    w.hear(ticket(5, plan(1, (1,))))
    w.done((Key(3, 0),))
    w.done(do.Copied(records={}, gathers={}))
    w.on(BlocksLost(0, ONE))
    w.abort()
    decided = gather_records(plan(2, (0, 1)), w1=b"theirs")
    regroup(w, plan(2, (0, 1)), w1=at(3, 1, records=decided))
    assert (w.op.position, w.op.pieces) == (Key(3, 1), {0: Pieces(ONE)})
    w.done(do.Copied(records=decided, gathers={}))
    assert w.out[-1] == do.Arrived(3)
    assert w.ask(do.GatherAsked(b"mine"))[-1] == do.GatherDone(decided)


def test_holdings_in_part_travel() -> None:
    holding = Holding(Key(4, 1), {}, 0, stages={0: MODEL, 1: WHOLE}, snapshots={(0, 2): ONE, (1, 2): WHOLE - ONE})
    holding = replace(holding, gradients={0: MODEL, 1: WHOLE})
    assert decode_holding(encode_holding(holding)) == holding
    whole = Holding(Key(4, 1), {}, 0)
    assert len(encode_holding(holding)) > len(encode_holding(whole)) < 28, "what is whole costs nothing"
