"""A driver that has a part of a stage: what it states, and how it gets the rest."""

from __future__ import annotations

from dataclasses import replace

from driver_harness import Worker, at, gather_records, joiner, member_worker, plan, records_of, ticket

from everstep.base.extents import WHOLE, BlockRun, Extents
from everstep.base.plan import Shard
from everstep.protocol import messages as wire
from everstep.protocol.driver import operations as do
from everstep.protocol.driver.records import decode_holding, encode_holding
from everstep.protocol.step_types import Discard, Holding, Key, Pieces

OF = (("model", 2), ("exp_avg", 2))
MODEL = Extents.part(OF, [BlockRun("model", 0, 2)])
OPTIMIZER = WHOLE - MODEL
ONE = Extents.part(OF, [BlockRun("exp_avg", 1, 2)])


def peer(w: Worker, **more) -> Holding:
    """What the other member states: it is where this worker is."""
    machine = w.driver.machine
    return at(machine.step, machine.position.seq, records=machine.records, **more)


def sharing(mine: Extents) -> Worker:
    """A worker at step 1, from where on it has its share alone; the other member has all."""
    w = Worker(plan(1, (0, 1), shards=(Shard(0, 0, mine), Shard(1, 0, WHOLE))))
    w.step(1)
    assert w.driver.machine.held == {0: mine}
    return w


def test_the_rest_of_a_stage_is_fetched_and_the_step_goes_on() -> None:
    w = sharing(WHOLE - ONE)
    w.ask(do.StepAsked(2))
    w.enter(plan(2, (0, 1)), w1=peer(w))
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


def test_other_stages_take_the_step() -> None:
    """It has come to a stage of which it has no gradient."""
    w = Worker(plan(1, (0,), (1,)))
    w.step(1)
    w.to_agree(2)
    w.enter(plan(2, (0,), (0, 1)), w1=at(2, stages=(1,), records=records_of(w.plan)))
    assert isinstance(w.op, do.Update) and w.op.stages == (0,)
    w.done(7)
    assert isinstance(w.op, do.Fetch) and (w.op.sources, w.op.pieces) == ({1: (1,)}, {})


def test_members_with_half_of_the_planes_each_serve_each_other() -> None:
    """What a member has not of a stage, the others give, and it gives them what it has."""
    w = sharing(MODEL)
    w.ask(do.StepAsked(2))
    w.enter(plan(2, (0, 1)), w1=replace(peer(w, stages=()), stages={0: OPTIMIZER}))
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
    w = sharing(MODEL)
    for number in (2, 3):
        w.step(number)
    w.knows(2)
    w.on(do.InMemory({(0, 2): MODEL}))
    w.ask(do.StepAsked(4))
    w.enter(plan(2, (0, 1)), w1=replace(at(0), stages={}, snapshots={(0, 2): OPTIMIZER}))
    assert isinstance(w.op, do.Restore) and w.op.step == 2
    assert w.op.sources == {0: (1,)} and w.op.pieces == {0: Pieces(OPTIMIZER, {1: OPTIMIZER})}
    shelf = w.last(do.Shelve)
    assert shelf.live == {}, "what is kept is in the keeper's hands"


def test_blocks_that_are_not_to_be_had_make_all_settle_anew() -> None:
    w = sharing(WHOLE - ONE)
    w.ask(do.StepAsked(2))
    w.enter(plan(2, (0, 1)), w1=peer(w))
    w.taint("block 3 came damaged")
    assert [m.generation for m in w.told(wire.SettleAgain)] == [2] and w.told(wire.PeerFault) == []
    w.hear(plan(3, (0, 1)))
    w.settle(w1=peer(w))
    assert w.op.pieces == {0: Pieces(ONE)}, "it has still the same part"


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


def test_an_answer_that_was_taken_over_outlives_a_copy() -> None:
    """A gather that the others have decided answers the application, though a stage is copied before it asks for it."""
    w = joiner()
    w.hear(ticket(5, plan(1, (1,), (1,))))
    w.done((Key(3, 0),))
    w.done(do.Copied(records={}, gathers={}))
    coming = plan(2, (0, 1), (0, 1))
    decided = gather_records(coming, w1=b"theirs")
    w.enter(coming, w1=at(3, 1, stages=(0, 1), records=decided))
    assert (w.op.position, w.op.sources) == (Key(3, 1), {1: (1,)})
    w.done(do.Copied(records=decided, gathers={}))
    assert w.out[-1] == do.Arrived(3)
    assert w.ask(do.GatherAsked(b"mine"))[-1] == do.GatherDone(decided)


def test_holdings_in_part_travel() -> None:
    holding = Holding(Key(4, 1), {}, 0, stages={0: MODEL, 1: WHOLE}, snapshots={(0, 2): ONE, (1, 2): WHOLE - ONE})
    holding = replace(holding, gradients={0: MODEL, 1: WHOLE})
    assert decode_holding(encode_holding(holding)) == holding
    whole = Holding(Key(4, 1), {}, 0)
    assert len(encode_holding(holding)) > len(encode_holding(whole)) < 28, "what is whole costs nothing"
